"""Text of a growing list of tokens, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence

from nwor.engine.stopping import Decoder, text_until

_CONTEXT = 6


class TextStream:
    """Turns tokens into pieces of text that can be printed at once.

    Characters whose bytes are not complete yet, and what may become a stop string, are held back.

    Args:
        decoder: turns ids into text.
        stops: stop strings; the text ends before the first of them.
    """

    def __init__(self, decoder: Decoder, stops: Sequence[str] = ()) -> None:
        self._decoder, self._stops = decoder, stops
        self._ids: list[int] = []
        self._from = self._read = 0
        self._held = ""
        self._ended = False

    def push(self, tokens: Sequence[int], *, final: bool = False) -> str:
        """Add tokens; return the text that is certain now."""
        self._ids += tokens
        # A few tokens of context keep the decoder from treating a piece as the start of a text.
        before = self._decode(self._ids[self._from : self._read])
        now = self._decode(self._ids[self._from :])
        if final or not now.endswith("\ufffd"):
            self._held += now[len(before) :]
            self._read = len(self._ids)
            self._from = max(self._from, self._read - _CONTEXT)
        return self._release(final=final)

    def _release(self, *, final: bool) -> str:
        if self._ended:
            return ""
        cut = text_until(self._held, self._stops)
        self._ended = cut != self._held
        if self._ended or final:
            self._held = ""
            return cut
        keep = len(cut) - _possible_stop(cut, self._stops)
        self._held = cut[keep:]
        return cut[:keep]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(list(ids), skip_special_tokens=True) if ids else ""


def _possible_stop(text: str, stops: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that a stop string may start with."""
    return max(
        (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0
    )
