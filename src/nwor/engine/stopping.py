"""Where a run of accepted tokens ends: stop tokens, stop strings, and the length limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from nwor.engine.options import Options
from nwor.engine.request import FinishReason, Request


class Decoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str:
        """Turn ids into text."""
        ...


@dataclass(frozen=True, slots=True)
class Cut:
    """How much of a run is emitted.

    Attributes:
        length: tokens emitted.
        reason: why the request ends here, None if it goes on.
    """

    length: int
    reason: FinishReason | None


class Stopper:
    """Finds the first token of a run at which a request ends.

    Args:
        options: stop tokens and stop strings.
        decoder: needed for stop strings.
    """

    def __init__(self, options: Options, decoder: Decoder | None) -> None:
        self._ids, self._strings = options.stop_token_ids, options.stop_strings
        self._decoder = decoder
        # A token adds at least one byte, so this many hold any stop string that ends with the last.
        self._tail = max((len(s.encode()) for s in self._strings), default=0) + 8

    def cut(self, request: Request, run: Sequence[int]) -> Cut:
        """Say how much of `run`, which follows the request's tokens, is emitted."""
        limit = min(len(run), request.remaining)
        for at in range(limit):
            if run[at] in self._ids or self._completes_string(request, run[: at + 1]):
                return Cut(at + 1, FinishReason.STOP)
        return Cut(limit, FinishReason.LENGTH if limit == request.remaining else None)

    def _completes_string(self, request: Request, run: Sequence[int]) -> bool:
        if not self._strings or self._decoder is None:
            return False
        text = self._decoder.decode(
            [*request.emitted, *run][-self._tail :], skip_special_tokens=True
        )
        return any(stop in text for stop in self._strings)


def text_until(text: str, stops: Sequence[str]) -> str:
    """Cut `text` before the first stop string."""
    ends = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    return text[: min(ends)] if ends else text
