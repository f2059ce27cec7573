"""The protocol of drafters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from nwor.engine.request import Request


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafts for each request of a batch.

    Attributes:
        tokens: per request, the drafts; fewer than allowed, or none, is fine.
        probs: per request, float32 ``[drafts, vocab]``: the distributions its drafts were drawn from.
            Empty for drafters that do not draw; a drafter that draws must say from what, or sampled
            output would not follow the target's distribution.
    """

    tokens: Sequence[Sequence[int]]
    probs: Sequence[Tensor] = field(default=())


class Drafter(Protocol):
    """Guesses the next tokens of requests.

    A drafter learns what became of its drafts from the request's tokens at the next call; a request
    that is not named any more has ended.
    """

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> Proposal:
        """Draft for running requests.

        Args:
            requests: the requests; `Request.tokens` are prompt and emitted tokens, the last of which
                is the window's bonus token.
            limits: most drafts of each; what is longer is cut.
        """
        ...

    def close(self) -> None:
        """Let go of models and memory."""
        ...


class NoDrafter:
    """Never drafts: plain decoding."""

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> Proposal:
        """Draft nothing."""
        del limits
        return Proposal([[] for _ in requests])

    def close(self) -> None:
        """Nothing to let go of."""
