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

Decisions come before effects:

    Overlay.begin      who is staged, on which pages      nwor.store.admission, nwor.store.staging
      plan_window      where every row goes               nwor.store.overlay_plan
      OverlayEffects   table entries, row movements       nwor.store.overlay_effects
    OverlayWindow      commit or abort                    nwor.store.overlay_window

Tables and slot mappings lie on the host here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np

from nwor.errors import InputError, WindowOpenError
from nwor.metrics import Metrics
from nwor.store.admission import Admission, OverlayRefusal, check_room
from nwor.store.overlay_effects import OverlayEffects
from nwor.store.overlay_loops import Ints
from nwor.store.overlay_plan import OverlayPlan, plan_window
from nwor.store.overlay_window import OverlayWindow
from nwor.store.paged import OverlayGroup, VerifyBatch
from nwor.store.staging import PAGES_PER_LEASE, StagingPages

__all__ = ["Overlay", "OverlayRefusal"]


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
        pages: who holds which staging page.
        effects: how tables are edited and rows moved; `OverlayEffects.broken` once a commit failed
            for good: every window is written through from then on.

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
        check_room(self.groups, self.pages)
        self._admission = Admission(self.pages)
        self._always_fits = 1 + min(group.page_size for group in groups)
        self.effects = OverlayEffects(
            groups,
            self.pages,
            mover=mover,
            loops=loops,
            metrics=metrics if metrics is not None else Metrics(),
        )
        self._window: OverlayWindow | None = None

    @property
    def window(self) -> OverlayWindow | None:
        """The open window, or None."""
        window = self._window
        return window if window is not None and window.is_open else None

    @property
    def refused(self) -> Counter[OverlayRefusal]:
        """Requests written through, by reason."""
        return self._admission.refused

    @property
    def metrics(self) -> Metrics:
        """Counters of all windows."""
        return self.effects.metrics

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
            plan = plan_window(batch, leases, self.pages, self.effects.buffers, self.effects.loops)
        window = self._window = OverlayWindow(self.effects, batch, plan)
        if plan is not None:
            try:
                self._stage(window, plan, newcomers)
            except BaseException:  # an interrupt too: half an edit must not outlive it
                window.close()
                for request in batch.requests:  # their staging pages may be half filled
                    self.pages.release(request)
                raise
        return window

    def _stage(self, window: OverlayWindow, plan: OverlayPlan, newcomers: Ints | None) -> None:
        effects = self.effects
        effects.fill_in(plan)
        effects.point(plan, plan.staging_pages, plan.staged)
        effects.note(plan, window.batch.computed)
        if newcomers is not None and len(newcomers):
            effects.share(plan, newcomers, window.shared)

    def rehearse(self) -> None:
        """Run one window before the engine starts, so that no step waits for a compiler.

        Uses the first three rows of page 1 and entries of the first batch row, which must not be in
        use yet; entries are restored, nothing is counted.
        """
        kept = [(table[0, 0], slots[:2].copy()) for table, slots in self.effects.pairs()]
        for (table, slots), size in zip(
            self.effects.pairs(), self.effects.buffers.page_size, strict=True
        ):
            table[0, 0] = 1
            slots[:2] = size + 1, size + 2
        zero, one, two = (np.array([n], np.int64) for n in range(3))
        metrics, self.effects.metrics = self.metrics, Metrics()
        try:
            self.begin(VerifyBatch([self], zero, zero, one, two, one)).commit([1])
            self.release(self)
        finally:
            self.effects.metrics = metrics
            for (table, slots), (page, old) in zip(self.effects.pairs(), kept, strict=True):
                table[0, 0], slots[:2] = page, old

    def release(self, request: Hashable) -> None:
        """Take back the pages of a request that finished, was aborted or was preempted.

        Raises:
            WindowOpenError: the request is part of the open window: close that first.
        """
        if self.window is not None and request in self.window.requests:
            raise WindowOpenError(f"request {request!r} is part of the open window: close it first")
        self.pages.release(request)

    def _admit(self, batch: VerifyBatch) -> tuple[VerifyBatch, Ints]:
        if batch.query_lens.max(initial=0) <= self._always_fits:  # wherever it starts
            fits = np.ones(len(batch.requests), np.bool_)
        else:
            size = self.effects.buffers.page_size[:, None]
            last = batch.computed + batch.query_lens - 1
            spans = last // size - batch.computed // size
            fits = spans.max(0) < PAGES_PER_LEASE
        return self._admission.admit(batch, fits, self.metrics, broken=self.effects.broken)
