"""A drafter whose acceptance tests control: it knows the continuation and spoils it on purpose.

vLLM loads it by name (``method="custom_class"``) in whatever process runs the model. Scripts come
from a JSON file named by ``SCRIPTED_DRAFTS``: a list of full token lists. What is drafted follows
from the script and the position alone, so two runs of the same requests draft the same.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np


class ScriptedDrafter:
    """Drafts a prefix of the script, then wrong tokens; sometimes nothing."""

    scripts: list[list[int]] = []  # noqa: RUF012 - shared with the test in the same process
    silent = False
    limit = 64  # drafts at most
    least = 0  # drafts at least

    def __init__(self, config: Any) -> None:
        self.k = config.speculative_config.num_speculative_tokens
        self.vocab = config.model_config.get_vocab_size()
        path = os.environ.get("SCRIPTED_DRAFTS")
        if path:
            type(self).scripts = json.loads(Path(path).read_text())

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to load."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        drafts = []
        for row, sampled in enumerate(sampled_token_ids):
            length = int(num_tokens_no_spec[row])
            if not sampled or self.silent:
                drafts.append([])
            else:
                drafts.append(self.draft(token_ids_cpu[row, :length].tolist()))
        return drafts

    def draft(self, tokens: list[int]) -> list[int]:
        """Draft for a request with these tokens."""
        rng = random.Random(str(tokens[-8:]) + str(len(tokens)))
        script = next((s for s in self.scripts if s[: len(tokens)] == tokens), [])
        right = script[len(tokens) : len(tokens) + rng.randint(0, self.k)]
        wrong = [rng.randrange(4, self.vocab) for _ in range(rng.randint(self.least, self.k))]
        length = max(rng.choice([self.k, self.k, rng.randint(0, self.k)]), self.least)
        return (right + wrong)[: min(length, self.limit)]
