"""A request: its tokens, how many of them are durable, and why it ended."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import numpy as np
import numpy.typing as npt
import torch

from nwor.engine.options import Sampling


class FinishReason(StrEnum):
    """Why a request ended."""

    LENGTH = "length"
    STOP = "stop"
    """A stop token or a stop string."""
    INTERRUPTED = "interrupted"


class Request:
    """One prompt and what has been generated for it.

    Attributes:
        index: place of the prompt in the call; identifies the request.
        prompt_length: tokens of the prompt.
        limit: most tokens, prompt included.
        page: page of the durable store, None while the request waits and after it has ended.
        durable: rows in the durable store: the watermark.
        sampling: how its tokens are chosen.
        generator: its own source of randomness, so that a batch does not change what it draws.
        finish: why it ended, None while it runs.
    """

    def __init__(
        self, index: int, prompt: Sequence[int], *, max_new_tokens: int, sampling: Sampling
    ) -> None:
        self.index = index
        self.prompt_length = len(prompt)
        self.limit = len(prompt) + max_new_tokens
        self.page: int | None = None
        self.durable = 0
        self.sampling = sampling
        self.finish: FinishReason | None = None
        self.generator = torch.Generator()
        if sampling.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(sampling.seed + index)
        self._tokens = np.empty(self.limit, np.int64)
        self._tokens[: len(prompt)] = prompt
        self._drafted = np.zeros(self.limit, np.bool_)
        self._length = len(prompt)

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """Prompt and emitted tokens, a read-only view."""
        view = self._tokens[: self._length]
        view.flags.writeable = False
        return view

    @property
    def emitted(self) -> list[int]:
        """Emitted tokens."""
        tokens: list[int] = self._tokens[self.prompt_length : self._length].tolist()
        return tokens

    @property
    def drafted(self) -> list[bool]:
        """For each emitted token, whether it was an accepted draft."""
        marks: list[bool] = self._drafted[self.prompt_length : self._length].tolist()
        return marks

    @property
    def remaining(self) -> int:
        """Tokens it may still emit."""
        return self.limit - self._length

    def append(self, tokens: Sequence[int], drafts: int) -> None:
        """Emit tokens, of which the first `drafts` were accepted drafts."""
        end = self._length + len(tokens)
        self._tokens[self._length : end] = tokens
        self._drafted[self._length : self._length + min(drafts, len(tokens))] = True
        self._length = end
