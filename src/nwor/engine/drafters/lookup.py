"""Prompt lookup: what followed the last time these tokens were seen (Saxena 2023)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from nwor.engine.drafters.base import Drafter, Proposal
from nwor.engine.request import Request
from nwor.errors import InputError


class PromptLookup(Drafter):
    """Proposes what followed an earlier occurrence of the last n tokens.

    Longer matches win. Among equally long ones the latest that has a full continuation wins, else the
    earliest of the rest, which has the longest.

    Args:
        max_ngram: longest match to look for.
        min_ngram: shortest match to draft from.

    Raises:
        InputError: not 1 <= min_ngram <= max_ngram.
    """

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise InputError(f"need 1 <= min_ngram <= max_ngram, got {min_ngram}, {max_ngram}")
        self._max, self._min = max_ngram, min_ngram

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> Proposal:
        """Look each request's last tokens up in its own tokens."""
        return Proposal(
            [
                continuation(request.tokens, limit, self._max, self._min)
                for request, limit in zip(requests, limits, strict=True)
            ]
        )


def continuation(
    tokens: npt.NDArray[np.int64], limit: int, max_ngram: int, min_ngram: int
) -> list[int]:
    """Return at most `limit` tokens that followed the best earlier match of the last ones."""
    if limit < 1 or len(tokens) < 2:
        return []
    # Ends of matches: a match of n + 1 tokens ends where one of n does.
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])
    best = ends[:0]
    for size in range(1, max_ngram + 1):
        if size > 1:
            ends = ends[ends >= size - 1]
            ends = ends[tokens[ends - size + 1] == tokens[len(tokens) - size]]
        if not len(ends):
            break
        if size >= min_ngram:
            best = ends
    if not len(best):
        return []
    full = best[best + limit < len(tokens)]
    end = int(full[-1] if len(full) else best[0])
    found: list[int] = tokens[end + 1 : end + 1 + limit].tolist()
    return found
