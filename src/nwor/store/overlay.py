"""Staging pages laid over durable ones by editing an engine's block tables and slot mappings.

For an engine with a paged cache whose kernels we do not want to touch. Before the forward, every
page that a request's window reaches gets a private staging page: the request's entries in the block
table and in the slot mapping are overwritten in place. Stock attention then reads durable and
staged rows through one table, and the stock writer writes staged rows only. After sampling, the
accepted rows move home in one movement for all layers of all groups that share storage, and both
tensors get their old contents back.

        page 7   page 8                     table row      slot mapping of the window
       +-------+-------+
       | r r r | . . . |   durable          ... 7  8       7:3, 8:0, 8:1
       +-------+-------+
    begin: copy the rows r that the staging page lacks; edit ---> ... S0 S1     S0:3, S1:0, S1:1
       +-------+-------+
       | r r r b | d d |   staging S0, S1   forward: kernels see r r r b d d
       +-------+-------+
    commit: move b and the accepted d to 7:3, 8:0 ...; undo the edits

Decisions (`nwor.store.overlay_plan`) are made before effects: a few entries of the tables, and one
row movement per storage. Tables and slot mappings lie on the host here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from nwor.errors import (
    AcceptanceError,
    CommitError,
    InputError,
    LayoutError,
    StaleWindowError,
    WindowOpenError,
)
from nwor.layout import KVRows
from nwor.metrics import FallbackReason, Metrics, Written
from nwor.store.movers import Move, bind_torch, get_mover
from nwor.store.overlay_loops import Ints, get_loops
from nwor.store.overlay_plan import Buffers, OverlayPlan, plan_fill, plan_home, plan_window
from nwor.store.paged import OverlayGroup, VerifyBatch
from nwor.store.staging import NOBODY, PAGES_PER_LEASE, StagingPages


class OverlayRefusal(StrEnum):
    """Why a request's window was written through to its durable pages."""

    OUT_OF_STAGING_PAGES = "out_of_staging_pages"
    """Every lease belongs to another request of the same step."""
    WINDOW_OVER_TWO_PAGES = "window_over_two_pages"
    """The window reaches more pages than a lease has."""
    OVERLAY_BROKEN = "overlay_broken"
    """A commit failed for good earlier: nothing is staged any more."""


@dataclass(frozen=True, slots=True)
class _Storage:
    """Groups whose rows share one `KVRows`, and the movers bound to it."""

    groups: list[int]
    move: Move
    repair: Move = field(repr=False)


class Overlay:
    """Staging pages over the durable pages of an engine.

    Args:
        groups: cache groups of the engine, all layers of all of them.
        first_page: first staging page. The engine's own allocator must never hand out this page or
            a higher one.
        num_leases: requests that can be staged at a time; takes ``2 * groups * num_leases`` pages.
        mover: row mover, see `nwor.store.movers`.
        loops: how the bookkeeping runs, ``python`` or ``numba``.
        metrics: counters to add to.

    Attributes:
        window: the open window, or None.
        refused: requests written through, by reason.
        broken: a commit failed for good; every window is written through from then on.
        observers: called with source and target slots of every movement, before it.

    Raises:
        InputError: no groups, no leases.
        LayoutError: a store has fewer pages than the staging pages need.
    """

    def __init__(
        self,
        groups: Sequence[OverlayGroup],
        *,
        first_page: int,
        num_leases: int,
        mover: str = "torch",
        loops: str = "python",
        metrics: Metrics | None = None,
    ) -> None:
        if not groups:
            raise InputError("an overlay needs at least one cache group")
        self.groups = tuple(groups)
        self.pages = StagingPages(
            first_page=first_page, num_leases=num_leases, num_groups=len(groups)
        )
        self._check_room()
        self.metrics = metrics if metrics is not None else Metrics()
        self.refused: Counter[OverlayRefusal] = Counter()
        self.window: OverlayWindow | None = None
        self.broken = False
        self.observers: list[Callable[[Ints, Ints], None]] = []
        self._buffers = Buffers(
            tuple(group.table.numpy() for group in groups),
            tuple(group.slots.numpy() for group in groups),
            np.array([group.page_size for group in groups], np.int64),
        )
        self._loops = get_loops(loops)
        self._storages = _storages(groups, mover)

    def begin(self, batch: VerifyBatch, newcomers: Ints | None = None) -> OverlayWindow:
        """Stage the windows of all requests that can be staged; the others are written through.

        Args:
            batch: the verifying requests.
            newcomers: rows in the block tables of requests that begin this step on a cached prefix.
                An engine may share a page in the very step that fills it; where that step stages the
                last row, the newcomer reads the staging page too.

        Returns:
            The open window. `OverlayWindow.requests` are the staged ones, in the batch's order.

        Raises:
            WindowOpenError: a window is open; it is left as it is.
            RowCountError: rows or pages outside the engine's buffers.
            SlotError: the slot mapping contradicts the block table, or names a staging page.
        """
        if self.window is not None:
            raise WindowOpenError("an overlay window is open: commit or abort it first")
        batch, leases = self._admit(batch)
        plan = None
        if len(batch.requests):
            plan = plan_window(batch, leases, self.pages, self._buffers, self._loops)
        window = self.window = OverlayWindow(self, batch, plan)
        if plan is not None:
            try:
                self._stage(window, plan, newcomers)
            except BaseException:  # an interrupt too: half an edit must not outlive it
                window._close()  # noqa: SLF001 - the window is a part of the overlay
                for request in batch.requests:  # their staging pages may be half filled
                    self.pages.release(request)
                raise
        return window

    def _stage(self, window: OverlayWindow, plan: OverlayPlan, newcomers: Ints | None) -> None:
        self._fill_in(plan)
        self._point(plan, plan.staging_pages, plan.staged)
        self._note(plan, window.batch.computed)
        if newcomers is not None and len(newcomers):
            self._share(plan, newcomers, window.shared)

    def rehearse(self) -> None:
        """Run one window before the engine starts, so that no step waits for a compiler.

        Uses the first three rows of page 1 and entries of the first batch row, which must not be in
        use yet; entries are restored, nothing is counted.
        """
        kept = [(table[0, 0], slots[:2].copy()) for table, slots in self._pairs()]
        for (table, slots), size in zip(self._pairs(), self._buffers.page_size, strict=True):
            table[0, 0] = 1
            slots[:2] = size + 1, size + 2
        zero, one, two = (np.array([n], np.int64) for n in range(3))
        metrics, self.metrics = self.metrics, Metrics()
        try:
            self.begin(VerifyBatch([self], zero, zero, one, two, one)).commit([1])
            self.release(self)
        finally:
            self.metrics = metrics
            for (table, slots), (page, old) in zip(self._pairs(), kept, strict=True):
                table[0, 0], slots[:2] = page, old

    def _pairs(self) -> Iterator[tuple[NDArray[np.int32], Ints]]:
        return zip(self._buffers.tables, self._buffers.slots, strict=True)

    def release(self, request: Hashable) -> None:
        """Take back the pages of a request that finished, was aborted or was preempted.

        Raises:
            WindowOpenError: the request is part of the open window: close that first.
        """
        if self.window is not None and request in self.window.requests:
            raise WindowOpenError(f"request {request!r} is part of the open window: close it first")
        self.pages.release(request)

    def _check_room(self) -> None:
        end = self.pages.first_page + self.pages.num_pages
        for index, group in enumerate(self.groups):
            found = min(rows.key.shape[1] for rows in group.rows)
            if found < end:
                raise LayoutError(
                    f"group {index} has {found} pages, staging needs pages "
                    f"{self.pages.first_page}..{end - 1}"
                )

    def _admit(self, batch: VerifyBatch) -> tuple[VerifyBatch, Ints]:
        """Choose the requests to stage and lease pages to them; count the others."""
        size = self._buffers.page_size[:, None]
        last = batch.computed + batch.query_lens - 1
        spans = last // size - batch.computed // size
        fits = spans.max(0) < PAGES_PER_LEASE
        if self.broken:
            nobody = np.zeros(len(fits), np.bool_)
            batch = self._refuse(OverlayRefusal.OVERLAY_BROKEN, batch, nobody)
        elif not fits.all():
            batch = self._refuse(OverlayRefusal.WINDOW_OVER_TWO_PAGES, batch, fits)
        leases = np.array(self.pages.lease(batch.requests), np.int64)
        served = leases != NOBODY
        if not served.all():
            batch = self._refuse(OverlayRefusal.OUT_OF_STAGING_PAGES, batch, served)
        return batch, leases[served]

    def _refuse(
        self, reason: OverlayRefusal, batch: VerifyBatch, staged: NDArray[np.bool_]
    ) -> VerifyBatch:
        self.refused[reason] += int((~staged).sum())
        self.metrics.flushed += int(batch.num_drafts[~staged].sum())
        return batch.take(staged)

    def _fill_in(self, plan: OverlayPlan) -> None:
        fill = plan_fill(plan, self.pages, self._buffers.page_size, self._loops)
        if fill is None:
            return
        group, source, target = fill
        for storage in self._storages:
            mine = np.isin(group, storage.groups)
            self._move(storage, source[mine], target[mine])

    def _point(self, plan: OverlayPlan, pages: Ints, slots: Ints) -> None:
        batch, buffers = plan.batch, self._buffers
        self._loops.point(
            buffers.tables,
            buffers.slots,
            batch.table_rows,
            batch.first_rows,
            batch.query_lens,
            plan.columns,
            pages,
            slots,
        )

    def _share(
        self, plan: OverlayPlan, newcomers: Ints, edits: list[tuple[int, int, int, int]]
    ) -> None:
        """Show newcomers the staging pages; add group, row, column and old page of each edit."""
        for group, table in enumerate(self._buffers.tables):
            staging = dict(
                zip(plan.durable_pages[group].flat, plan.staging_pages[group].flat, strict=True)
            )
            hit = np.isin(table[newcomers], plan.durable_pages[group])
            for at, column in zip(*np.nonzero(hit), strict=True):
                row = int(newcomers[at])
                old = int(table[row, column])
                edits.append((group, row, int(column), old))
                table[row, column] = staging[old]

    def _note(self, plan: OverlayPlan, watermark: Ints) -> None:
        pages = self.pages
        self._loops.note(
            self._buffers.page_size,
            plan.leases,
            watermark,
            plan.columns,
            plan.durable_pages,
            pages.held,
            pages.durable,
            pages.filled,
        )

    def _bring_home(self, plan: OverlayPlan, kept: Ints) -> BaseException | None:
        """Move and note the accepted rows; return what interrupted it, once all are home.

        An interrupt between two storages would leave accepted rows in one of them alone. Sources
        are not written while a window is open, so all is done again. If that is interrupted too,
        the overlay stays broken: nothing is staged on rows that may be half moved.

        Raises:
            CommitError: rows could not be moved.
        """
        try:
            self._move_home(plan, kept)
            self._note(plan, plan.batch.computed + kept)
        except Exception:  # movers are repaired already; an observer's objection must stand
            raise
        except BaseException as interrupt:  # noqa: BLE001 - the window raises it when closed
            self.broken = True
            self._move_home(plan, kept)
            self._note(plan, plan.batch.computed + kept)
            self.broken = False
            return interrupt
        return None

    def _move_home(self, plan: OverlayPlan, kept: Ints) -> None:
        source, target = plan_home(plan, kept, self._loops)
        for storage in self._storages:
            if len(storage.groups) == len(self.groups):
                self._move(storage, source.ravel(), target.ravel())
            else:
                self._move(storage, source[storage.groups].ravel(), target[storage.groups].ravel())

    def _move(self, storage: _Storage, source: Ints, target: Ints) -> None:
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


class OverlayWindow:
    """The windows of one step's requests, from `Overlay.begin` to `commit` or `abort`.

    Leaving a ``with`` block without a commit aborts.

    Attributes:
        requests: the staged requests.
        batch: their numbers.
        shared: edits in the tables of newcomers: group, row, column, durable page.
    """

    def __init__(self, overlay: Overlay, batch: VerifyBatch, plan: OverlayPlan | None) -> None:
        self.shared: list[tuple[int, int, int, int]] = []
        self.requests = tuple(batch.requests)
        self.batch = batch
        self.plan = plan
        self._overlay = overlay

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.is_open:
            self.abort()

    @property
    def is_open(self) -> bool:
        """Whether `commit` and `abort` are still to come."""
        return self._overlay.window is self

    def commit(self, accepted: Sequence[int] | Ints) -> None:
        """Move the accepted rows home and undo all edits.

        Args:
            accepted: accepted drafts of each of `requests`.

        Raises:
            StaleWindowError: the window is closed.
            AcceptanceError: wrong length, negative, or more than there were drafts. Nothing has
                been moved and the window is still open.
            CommitError: rows could not be moved; the edits are undone all the same.
            KeyboardInterrupt: and whatever else interrupts a commit, after the rows are home, the
                edits undone and the window counted.
        """
        self._require_open()
        counts = np.asarray(accepted, np.int64)
        batch, plan, overlay = self.batch, self.plan, self._overlay
        if counts.shape != batch.num_drafts.shape:
            raise AcceptanceError(f"{counts.size} accepted counts, {len(self.requests)} requests")
        if (counts < 0).any() or (counts > batch.num_drafts).any():
            raise AcceptanceError(
                f"accepted {counts.tolist()} of {batch.num_drafts.tolist()} drafts"
            )
        kept = batch.query_lens - batch.num_drafts + counts
        interrupt = None
        try:
            if plan is not None:
                interrupt = overlay._bring_home(plan, kept)  # noqa: SLF001 - a part of it
        finally:
            self._close()
        if plan is not None:
            overlay.metrics.count_commit(
                drafts=int(batch.num_drafts.sum()),
                committed=int(counts.sum()),
                bonus=len(self.requests),
                truncated=0,
                cancelled=0,
                staged=self._written(plan.num_rows),
                wrote=self._written(int(kept.sum())),
            )
        if interrupt is not None:
            raise interrupt

    def abort(self, reason: FallbackReason = FallbackReason.ABORTED) -> None:
        """Undo all edits; no row reaches a durable page.

        Raises:
            StaleWindowError: the window is closed.
        """
        self._require_open()
        self._close()
        if self.plan is not None:
            self._overlay.metrics.count_cancel(
                reason,
                drafts=int(self.batch.num_drafts.sum()),
                flushed=False,
                staged=self._written(self.plan.num_rows),
                wrote=Written(),
            )

    def _require_open(self) -> None:
        if not self.is_open:
            raise StaleWindowError("this overlay window has been closed already")

    def _close(self) -> None:
        plan, overlay = self.plan, self._overlay
        if plan is not None:
            overlay._point(plan, plan.durable_pages, plan.durable)  # noqa: SLF001
        for group, row, column, page in self.shared:
            overlay.groups[group].table[row, column] = page
        overlay.window = None  # last: an interrupted close is done again

    def _written(self, tokens: int) -> Written:
        groups = self._overlay.groups
        return Written(
            tokens * sum(group.num_layers for group in groups),
            tokens * sum(group.row_bytes for group in groups),
        )


def _storages(groups: Sequence[OverlayGroup], mover: str) -> list[_Storage]:
    """Bind one mover per distinct storage; groups that share one are moved together."""
    bind = get_mover(mover)
    found: dict[object, _Storage] = {}
    for index, group in enumerate(groups):
        for rows in group.rows:
            identity = _identity(rows)
            if identity not in found:
                found[identity] = _Storage([], bind(rows, rows), bind_torch(rows, rows))
            found[identity].groups.append(index)
    return list(found.values())


def _identity(rows: KVRows) -> object:
    return tuple(
        (view.data_ptr(), view.shape, view.stride(), view.dtype) for view in (rows.key, rows.value)
    )
