"""What a caller asks for, checked before anything runs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nwor.errors import InputError

MAX_DRAFT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: 0 takes the most likely token (greedy).
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the most likely tokens that together reach this probability; 1 keeps all.
        seed: seed of the request's own generator; None draws one.

    Raises:
        InputError: a value out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InputError(f"temperature must be 0 (greedy) or more, got {self.temperature}")
        if self.top_k < 0:
            raise InputError(f"top_k must be 0 (all) or more, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p must be in (0, 1], got {self.top_p}")

    @property
    def greedy(self) -> bool:
        """True if nothing is random."""
        return self.temperature == 0


@dataclass(frozen=True, slots=True)
class Options:
    """What to generate for each prompt.

    Attributes:
        max_new_tokens: most tokens to emit.
        num_draft_tokens: most drafts per window, K; 0 never drafts.
        sampling: how tokens are chosen.
        stop_token_ids: ids that end a request; the id itself is emitted.
        stop_strings: texts that end a request; the text is cut before them.

    Raises:
        InputError: a value out of range.
    """

    max_new_tokens: int = 128
    num_draft_tokens: int = 4
    sampling: Sampling = Sampling()
    stop_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise InputError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not 0 <= self.num_draft_tokens <= MAX_DRAFT_TOKENS:
            raise InputError(
                f"num_draft_tokens must be 0…{MAX_DRAFT_TOKENS}, got {self.num_draft_tokens}"
            )
        if "" in self.stop_strings:
            raise InputError("a stop string must not be empty")
