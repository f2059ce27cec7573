"""A drafter for audits: right often enough to be accepted, wrong often enough to be rejected."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Adversary:
    """Prompt lookup whose drafts turn wrong at a random place; sometimes there are none.

    vLLM loads it by name (``method="custom_class"``). What it drafts follows from the tokens alone,
    so two runs of the same requests draft the same.
    """

    def __init__(self, config: Any) -> None:  # noqa: ANN401 - vllm.config.VllmConfig
        self.k = config.speculative_config.num_speculative_tokens
        self.vocabulary = config.model_config.get_vocab_size()

    def load_model(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Nothing to load."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[Any],
        token_ids_cpu: NDArray[Any],
        slot_mappings: Any = None,  # noqa: ANN401, ARG002 - vLLM's interface
    ) -> list[list[int]]:
        """Draft for every request that sampled."""
        return [
            self._draft(token_ids_cpu[row, : int(num_tokens_no_spec[row])].tolist()) if got else []
            for row, got in enumerate(sampled_token_ids)
        ]

    def _draft(self, tokens: list[int]) -> list[int]:
        rng = random.Random(f"{len(tokens)} {tokens[-8:]}")  # noqa: S311 - repeatable, not secret
        found = lookup(tokens, self.k)
        right = found[: rng.randint(0, len(found))]
        wrong = [rng.randrange(self.vocabulary) for _ in range(self.k - len(right))]
        return (right + wrong)[: rng.choice((self.k, self.k, self.k, rng.randint(0, self.k)))]


def lookup(tokens: list[int], count: int) -> list[int]:
    """Return what followed the last two tokens when they last occurred."""
    tail = np.array(tokens[-2:])
    seen = np.array(tokens[:-1])
    if len(seen) < 3:
        return []
    at = np.flatnonzero((seen[:-1] == tail[0]) & (seen[1:] == tail[1]))
    return tokens[at[-1] + 2 : at[-1] + 2 + count] if len(at) else []
