"""What each row of a window is: bonus, draft, prefill or padding.

A window's rows are the flattened query tokens of one verify step. Two budgets are in public use:

* **draft rows**: only drafts are staged; ``[2, 3]`` drafts are 5 rows.
* **step rows**: all rows of the step are staged; 8 requests of 4 drafts are 40 rows, and prefill
  chunks and padding may lie between them.

Both reduce to two numbers per row. A row's *request* says whose acceptance decides on it, its
*depth* how much acceptance it takes: draft j has depth j, a bonus row 0, a prefill row less, padding
more than anybody can accept. A row is kept if and only if ``depth <= accepted[request]``.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import numpy as np
import torch
from torch import Tensor

from nwor.errors import AcceptanceError, RowCountError

ALWAYS = -(2**31)
"""Depth of rows that belong to no request of the window: kept whatever is accepted or dropped."""
NEVER = 2**31 - 1
"""Depth of padding rows."""
DROPPED = -(2**30)
"""Accepted count that keeps no row of a request, not even its bonus or prefill rows."""


@dataclass(frozen=True, slots=True, eq=False)
class WindowRows:
    """The rows of one window; immutable, shared by all layers.

    Attributes:
        num_drafts: drafts of each request (0 allowed); one entry per request.
        request: int64 ``[rows]`` on the CPU, index of the request that decides on the row.
        depth: int64 ``[rows]`` on the CPU, accepted drafts it takes to keep the row.
        num_bonus: bonus rows among the rows (0 for draft rows).
        parents: per request, parent of each row of its token tree (-1: a root); None for chains.
    """

    num_drafts: tuple[int, ...]
    request: Tensor
    depth: Tensor
    num_bonus: int
    parents: tuple[tuple[int, ...], ...] | None = None

    @classmethod
    def drafts(cls, num_drafts: Sequence[int]) -> Self:
        """Rows of a window that stages drafts only, request after request."""
        counts = _counts("num_drafts", num_drafts)
        request, depth = _draft_rows(counts)
        return cls(counts, request, depth, 0)

    @classmethod
    def step(
        cls,
        num_drafts: Sequence[int],
        query_lens: Sequence[int] | None = None,
        num_rows: int | None = None,
    ) -> Self:
        """Rows of a whole step: each request's drafts are its last rows, its bonus row is before them.

        Args:
            num_drafts: drafts of each request.
            query_lens: rows of each request; more than drafts + 1 if a prefill chunk comes before
                the bonus row. Left out: drafts + 1 each.
            num_rows: rows of the batch; those after the last request are padding.

        Raises:
            RowCountError: fewer rows than drafts and bonus take.
        """
        counts = _counts("num_drafts", num_drafts)
        lens = (
            tuple(k + 1 for k in counts)
            if query_lens is None
            else _counts("query_lens", query_lens)
        )
        if len(lens) != len(counts):
            raise RowCountError(f"{len(counts)} requests, but {len(lens)} query_lens")
        for index, (k, length) in enumerate(zip(counts, lens, strict=True)):
            if length < k + 1:
                raise RowCountError(
                    f"request {index} has {length} rows, its {k} drafts and bonus take {k + 1}"
                )
        total = sum(lens)
        if num_rows is not None and num_rows < total:
            raise RowCountError(f"num_rows is {num_rows}, the requests have {total}")
        request, depth = _step_rows(counts, lens, total if num_rows is None else num_rows)
        return cls(counts, request, depth, len(counts))

    @classmethod
    def located(cls, num_drafts: Sequence[int], bonus_rows: Sequence[int], num_rows: int) -> Self:
        """Rows of a batch in which only the verifying requests are named.

        Args:
            num_drafts: drafts of each verifying request.
            bonus_rows: row of each one's bonus token; its drafts follow directly.
            num_rows: rows of the batch. Rows that no named request claims are kept whatever is
                accepted (prefill); padding among them is told by its negative slot.

        Raises:
            RowCountError: rows out of range or claimed twice.
        """
        counts = _counts("num_drafts", num_drafts)
        starts = _counts("bonus_rows", bonus_rows)
        if len(starts) != len(counts):
            raise RowCountError(f"{len(counts)} requests, but {len(starts)} bonus_rows")
        request = np.zeros(num_rows, np.int64)
        depth = np.full(num_rows, ALWAYS, np.int64)
        for index, (k, start) in enumerate(zip(counts, starts, strict=True)):
            if start + k >= num_rows:
                raise RowCountError(
                    f"request {index}: rows {start}..{start + k} exceed {num_rows} rows"
                )
            if (depth[start : start + k + 1] != ALWAYS).any():
                raise RowCountError(
                    f"request {index}: rows {start}..{start + k} belong to another request"
                )
            request[start : start + k + 1] = index
            depth[start : start + k + 1] = np.arange(k + 1)
        return cls(counts, torch.from_numpy(request), torch.from_numpy(depth), len(counts))

    @classmethod
    def tree(cls, parents: Sequence[Sequence[int]]) -> Self:
        """Rows of draft trees: one row per node, request after request.

        Args:
            parents: per request, the parent of each node within the request, -1 for a root; a parent
                comes before its children. Roots stand for the bonus token.

        Raises:
            AcceptanceError: a parent that does not come before its child.
        """
        trees = tuple(tuple(operator.index(p) for p in tree) for tree in parents)
        for index, tree in enumerate(trees):
            for node, parent in enumerate(tree):
                if not -1 <= parent < node:
                    raise AcceptanceError(
                        f"request {index}: node {node} has parent {parent}, expected -1..{node - 1}"
                    )
        lens = tuple(len(tree) for tree in trees)
        roots = [sum(parent == -1 for parent in tree) for tree in trees]
        request, depth = _step_rows(tuple(max(n - 1, 0) for n in lens), lens, sum(lens))
        drafts = tuple(n - r for n, r in zip(lens, roots, strict=True))
        return cls(drafts, request, depth, sum(roots), trees)

    @property
    def num_rows(self) -> int:
        """Rows each layer stages."""
        return self.depth.shape[0]

    @property
    def num_requests(self) -> int:
        """Requests whose acceptance the window waits for."""
        return len(self.num_drafts)

    @property
    def total_drafts(self) -> int:
        """Drafts of all requests."""
        return sum(self.num_drafts)


def _counts(name: str, values: Sequence[int]) -> tuple[int, ...]:
    """Return a sequence of non-negative ints as a tuple, or say what is wrong with it."""
    try:
        counts = tuple(map(operator.index, values))
    except TypeError:
        raise RowCountError(f"{name} must be integers, got {values!r}") from None
    if not counts:
        raise RowCountError(f"{name} is empty: a window has at least one request")
    if min(counts) < 0:
        raise RowCountError(f"{name} must not be negative, got {list(counts)}")
    return counts


# Windows of the same shape come again and again: their rows are built once.
@lru_cache(maxsize=256)
def _draft_rows(counts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    request = np.repeat(np.arange(len(counts)), counts)
    first = np.cumsum(counts) - counts
    depth = np.arange(sum(counts)) - first[request] + 1
    return torch.from_numpy(request), torch.from_numpy(depth)


@lru_cache(maxsize=256)
def _step_rows(
    counts: tuple[int, ...], lens: tuple[int, ...], num_rows: int
) -> tuple[Tensor, Tensor]:
    total = sum(lens)
    request = np.zeros(num_rows, np.int64)
    depth = np.full(num_rows, NEVER, np.int64)
    request[:total] = np.repeat(np.arange(len(lens)), lens)
    bonus = np.cumsum(lens) - 1 - np.asarray(counts)
    depth[:total] = np.arange(total) - bonus[request[:total]]
    return torch.from_numpy(request), torch.from_numpy(depth)
