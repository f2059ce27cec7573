"""The plan of a commit: computed once per window, shared by all layers.

Its heart is one mask, which needs nothing but arithmetic on the device. A writer that skips negative
slots takes the *masked slot mapping* (rejected rows: -1): static shapes, no gather, no sync. A store
with row views, and a writer that cannot skip, take the kept rows as index lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nwor.acceptance import check_tree_path
from nwor.errors import AcceptanceError
from nwor.window_rows import WindowRows

PADDING_SLOT = -1


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """Kept rows and where each goes.

    Attributes:
        rows: int64 ``[n]``, rows of the window.
        slots: ``[n]``, dtype of the slot mapping, the durable slot of each.
    """

    rows: Tensor
    slots: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class CommitPlan:
    """Which rows are kept, and the slots they go to.

    Attributes:
        keep: bool ``[rows]``.
        slot_row: None, or int64 ``[rows]``: row r goes to the slot of row ``slot_row[r]``. Accepted
            tree paths are not dense prefixes, yet their slots are consecutive.
    """

    keep: Tensor
    slot_row: Tensor | None = None
    # Per slot mapping; the mapping is kept too, so that its id stays its own.
    _moves: dict[int, tuple[Tensor, Moves]] = field(default_factory=dict)
    _keep_on: dict[torch.device, Tensor] = field(default_factory=dict)

    def masked(self, slots: Tensor) -> Tensor:
        """Return the slot mapping ``[rows]`` with -1 for every row that is not kept."""
        keep = self._keep_on.get(slots.device)
        if keep is None:
            keep = self._keep_on[slots.device] = self.keep.to(slots.device, non_blocking=True)
        if self.slot_row is not None:
            slots = slots.index_select(0, self.slot_row.to(slots.device))
        return torch.where(keep, slots, PADDING_SLOT)

    def moves(self, slots: Tensor) -> Moves:
        """Return kept rows and their slots; padding (negative slots) is left out.

        The length depends on data, so on an accelerator this waits for the device.
        """
        known = self._moves.get(id(slots))
        if known is None:
            masked = self.masked(slots)
            rows = torch.nonzero(masked >= 0).flatten()
            known = self._moves[id(slots)] = (slots, Moves(rows, masked.index_select(0, rows)))
        return known[1]


def plan_commit(rows: WindowRows, accepted: Tensor) -> CommitPlan:
    """Plan the commit of draft chains.

    Args:
        rows: the window's rows.
        accepted: int64 ``[requests]`` on any device; `DROPPED` keeps no row of a request.
    """
    depth, request = rows.depth, rows.request
    if accepted.device.type != "cpu":
        depth = depth.to(accepted.device, non_blocking=True)
        request = request.to(accepted.device, non_blocking=True)
    return CommitPlan(depth <= accepted.index_select(0, request))


def plan_paths(rows: WindowRows, paths: Sequence[Sequence[int]]) -> CommitPlan:
    """Plan the commit of one accepted path per tree.

    The i-th node of a path goes to the slot of the request's i-th row: slots are consecutive from the
    watermark whatever branch was accepted.

    Args:
        rows: rows made by `WindowRows.tree`.
        paths: per request, accepted nodes from a root on; empty for none.

    Raises:
        AcceptanceError: not a tree window, wrong number of paths, or not a path from a root.
    """
    if rows.parents is None:
        raise AcceptanceError("paths were given for a window of chains: commit accepted counts")
    if len(paths) != len(rows.parents):
        raise AcceptanceError(f"{len(paths)} paths for {len(rows.parents)} requests")
    keep = torch.zeros(rows.num_rows, dtype=torch.bool)
    slot_row = torch.arange(rows.num_rows)
    start = 0
    for parents, path in zip(rows.parents, paths, strict=True):
        check_tree_path(parents, path)
        nodes = torch.tensor(path, dtype=torch.int64) + start
        keep[nodes] = True
        slot_row[nodes] = torch.arange(start, start + len(path))
        start += len(parents)
    return CommitPlan(keep, slot_row)
