"""What all drafters have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from nwor.engine.request import Request


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """What an engine was made for.

    Attributes:
        max_batch: requests that run at a time.
        max_length: longest sequence.
        max_draft: most drafts per request and window.
        vocab_size: token ids of the target.
    """

    max_batch: int
    max_length: int
    max_draft: int
    vocab_size: int


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


class Drafter(ABC):
    """Guesses the next tokens of requests.

    A drafter learns what became of its drafts from the request's tokens at the next call; a request
    that is not named any more has ended.
    """

    @abstractmethod
    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> Proposal:
        """Draft for running requests.

        Args:
            requests: the requests; `Request.tokens` are prompt and emitted tokens, the last of which
                is the window's bonus token.
            limits: most drafts of each; what is longer is cut.
        """

    def bind(self, sizes: EngineSizes) -> None:  # noqa: B027 - most drafters need nothing
        """Get ready for an engine; raise `InputError` if this drafter does not fit it."""

    def close(self) -> None:  # noqa: B027
        """Let go of models and memory."""


class NoDrafter(Drafter):
    """Never drafts: plain decoding."""

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> Proposal:
        """Draft nothing."""
        del limits
        return Proposal([[] for _ in requests])
