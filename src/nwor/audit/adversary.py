"""Drafts for audits: right often enough to be accepted, wrong often enough to be rejected."""

from __future__ import annotations

import random

import numpy as np


def draft(tokens: list[int], count: int, vocabulary: int) -> list[int]:
    """Return up to `count` drafts: prompt lookup that turns wrong at a random place; or none.

    They follow from the tokens alone, so two runs of the same requests draft the same.
    """
    rng = random.Random(f"{len(tokens)} {tokens[-8:]}")  # noqa: S311 - repeatable, not secret
    found = lookup(tokens, count)
    right = found[: rng.randint(0, len(found))]
    wrong = [rng.randrange(vocabulary) for _ in range(count - len(right))]
    return (right + wrong)[: rng.choice((count, count, count, rng.randint(0, count)))]


def lookup(tokens: list[int], count: int) -> list[int]:
    """Return what followed the last two tokens when they last occurred."""
    tail = np.array(tokens[-2:])
    seen = np.array(tokens[:-1])
    if len(seen) < 3:
        return []
    at = np.flatnonzero((seen[:-1] == tail[0]) & (seen[1:] == tail[1]))
    return tokens[at[-1] + 2 : at[-1] + 2 + count] if len(at) else []
