"""What begin, commit and abort do to an engine: table entries and row movements.

Everything here carries out a plan (`nwor.store.overlay_plan`); nothing is decided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from nwor.errors import CommitError
from nwor.layout import KVRows
from nwor.metrics import FallbackReason, Metrics, Written
from nwor.store.movers import get_mover
from nwor.store.moves import Move
from nwor.store.overlay_loops import Ints, get_loops
from nwor.store.overlay_plan import Buffers, OverlayPlan, plan_fill, plan_home
from nwor.store.paged import OverlayGroup
from nwor.store.staging import StagingPages
from nwor.store.torch_rows import bind_torch


@dataclass(frozen=True, slots=True)
class RowStorage:
    """Groups whose rows share one `KVRows`, and the movers bound to it."""

    groups: list[int]
    move: Move
    repair: Move = field(repr=False)


class OverlayEffects:
    """Table edits and row movements of one overlay.

    Args:
        groups: cache groups of the engine.
        pages: the staging pages, whose contents are noted here.
        mover: row mover, see `nwor.store.movers`.
        loops: how the bookkeeping runs, ``python`` or ``numba``.
        metrics: counters to add to.

    Attributes:
        buffers: the engine's tables.
        storages: distinct stores, each with its mover.
        observers: called with source and target slots of every movement, before it.
        broken: rows could not be moved for good: nothing may be staged any more.
    """

    def __init__(
        self,
        groups: Sequence[OverlayGroup],
        pages: StagingPages,
        *,
        mover: str,
        loops: str,
        metrics: Metrics,
    ) -> None:
        self.groups = tuple(groups)
        self.pages = pages
        self.metrics = metrics
        self.loops = get_loops(loops)
        self.buffers = Buffers(
            tuple(group.table.numpy() for group in groups),
            tuple(group.slots.numpy() for group in groups),
            np.array([group.page_size for group in groups], np.int64),
        )
        self.storages = _storages(groups, mover)
        self.observers: list[Callable[[Ints, Ints], None]] = []
        self.broken = False
        self._layers = sum(group.num_layers for group in groups)
        self._row_bytes = sum(group.row_bytes for group in groups)

    # -- tables ----------------------------------------------------------------------------------

    def pairs(self) -> Iterator[tuple[NDArray[np.int32], Ints]]:
        """Yield each group's block table and slot mapping."""
        return zip(self.buffers.tables, self.buffers.slots, strict=True)

    def point(self, plan: OverlayPlan, pages: Ints, slots: Ints) -> None:
        """Let the window's entries name `pages` and `slots`."""
        batch, buffers = plan.batch, self.buffers
        self.loops.point(
            buffers.tables,
            buffers.slots,
            batch.table_rows,
            batch.first_rows,
            batch.query_lens,
            plan.columns,
            pages,
            slots,
        )

    def share(
        self, plan: OverlayPlan, newcomers: Ints, edits: list[tuple[int, int, int, int]]
    ) -> None:
        """Show newcomers the staging pages; add group, row, column and old page of each edit."""
        for group, table in enumerate(self.buffers.tables):
            staging = dict(
                zip(plan.durable_pages[group].flat, plan.staging_pages[group].flat, strict=True)
            )
            hit = np.isin(table[newcomers], plan.durable_pages[group])
            for at, column in zip(*np.nonzero(hit), strict=True):
                row = int(newcomers[at])
                old = int(table[row, column])
                edits.append((group, row, int(column), old))
                table[row, column] = staging[old]

    def unshare(self, edits: list[tuple[int, int, int, int]]) -> None:
        """Undo the edits of `share`."""
        for group, row, column, page in edits:
            self.buffers.tables[group][row, column] = page

    def note(self, plan: OverlayPlan, watermark: Ints) -> None:
        """Note which page each staging page stands for and how many durable rows it shows."""
        pages = self.pages
        self.loops.note(
            self.buffers.page_size,
            plan.leases,
            watermark,
            plan.columns,
            plan.durable_pages,
            pages.held,
            pages.durable,
            pages.filled,
        )

    # -- rows ------------------------------------------------------------------------------------

    def fill_in(self, plan: OverlayPlan) -> None:
        """Copy the durable rows that the window's staging pages lack."""
        fill = plan_fill(plan, self.pages, self.buffers.page_size, self.loops)
        if fill is None:
            return
        group, source, target = fill
        for storage in self.storages:
            mine = np.isin(group, storage.groups)
            self.move(storage, source[mine], target[mine])

    def bring_home(self, plan: OverlayPlan, kept: Ints) -> BaseException | None:
        """Move and note the accepted rows; return what interrupted it, once all are home.

        An interrupt between two storages would leave accepted rows in one of them alone. Sources
        are not written while a window is open, so all is done again. If that is interrupted too,
        the overlay stays broken: nothing is staged on rows that may be half moved.

        Raises:
            CommitError: rows could not be moved.
        """
        try:
            self._move_home(plan, kept)
            self.note(plan, plan.batch.computed + kept)
        except Exception:  # movers are repaired already; an observer's objection must stand
            raise
        except BaseException as interrupt:  # noqa: BLE001 - the window raises it when closed
            self.broken = True
            self._move_home(plan, kept)
            self.note(plan, plan.batch.computed + kept)
            self.broken = False
            return interrupt
        return None

    def _move_home(self, plan: OverlayPlan, kept: Ints) -> None:
        source, target = plan_home(plan, kept, self.loops)
        for storage in self.storages:
            if len(storage.groups) == len(self.groups):
                self.move(storage, source.ravel(), target.ravel())
            else:
                self.move(storage, source[storage.groups].ravel(), target[storage.groups].ravel())

    def move(self, storage: RowStorage, source: Ints, target: Ints) -> None:
        """Move rows; what a mover fails at is done again by the plain one.

        Sources are not written while a window is open, so moving twice does no harm.

        Raises:
            CommitError: the plain mover failed too. Nothing will be staged any more.
        """
        for observe in self.observers:
            observe(source, target)
        take, put = torch.from_numpy(source), torch.from_numpy(target)
        try:
            storage.move(take, put)
        except Exception:  # noqa: BLE001 - whatever a mover raises, the rows must get home
            self.metrics.fallbacks[FallbackReason.MOVER_FAULT] += 1
            try:
                storage.repair(take, put)
            except Exception as error:
                self.broken = True
                message = f"rows could not be moved between staging and durable pages: {error}"
                raise CommitError(message, layer_id=None, restored=False) from error

    def written(self, tokens: int) -> Written:
        """Rows and bytes of `tokens` in all layers."""
        return Written(tokens * self._layers, tokens * self._row_bytes)


def _storages(groups: Sequence[OverlayGroup], mover: str) -> list[RowStorage]:
    """Bind one mover per distinct storage; groups that share one are moved together."""
    bind = get_mover(mover)
    found: dict[object, RowStorage] = {}
    for index, group in enumerate(groups):
        for rows in group.rows:
            identity = _identity(rows)
            if identity not in found:
                found[identity] = RowStorage([], bind(rows, rows), bind_torch(rows, rows))
            found[identity].groups.append(index)
    return list(found.values())


def _identity(rows: KVRows) -> object:
    return tuple(
        (view.data_ptr(), view.shape, view.stride(), view.dtype) for view in (rows.key, rows.value)
    )
