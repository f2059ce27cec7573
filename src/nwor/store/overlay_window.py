"""The windows of one step, from begin to commit or abort."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np

from nwor.errors import AcceptanceError, StaleWindowError
from nwor.metrics import FallbackReason, Written
from nwor.store.overlay_effects import OverlayEffects
from nwor.store.overlay_loops import Ints
from nwor.store.overlay_plan import OverlayPlan
from nwor.store.paged import VerifyBatch


class OverlayWindow:
    """The windows of one step's requests, from `Overlay.begin` to `commit` or `abort`.

    Leaving a ``with`` block without a commit aborts.

    Attributes:
        requests: the staged requests.
        batch: their numbers.
        plan: where their rows are; None if nothing is staged.
        shared: edits in the tables of newcomers: group, row, column, durable page.
        is_open: whether `commit` and `abort` are still to come.
    """

    def __init__(
        self, effects: OverlayEffects, batch: VerifyBatch, plan: OverlayPlan | None
    ) -> None:
        self.shared: list[tuple[int, int, int, int]] = []
        self.requests = tuple(batch.requests)
        self.batch = batch
        self.plan = plan
        self.is_open = True
        self._effects = effects

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_open:
            self.abort()

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
        batch, plan, effects = self.batch, self.plan, self._effects
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
                interrupt = effects.bring_home(plan, kept)
        finally:
            self.close()
        if plan is not None:
            effects.metrics.count_commit(
                drafts=int(batch.num_drafts.sum()),
                committed=int(counts.sum()),
                bonus=len(self.requests),
                truncated=0,
                cancelled=0,
                staged=effects.written(plan.num_rows),
                wrote=effects.written(int(kept.sum())),
            )
        if interrupt is not None:
            raise interrupt

    def abort(self, reason: FallbackReason = FallbackReason.ABORTED) -> None:
        """Undo all edits; no row reaches a durable page.

        Raises:
            StaleWindowError: the window is closed.
        """
        self._require_open()
        self.close()
        if self.plan is not None:
            self._effects.metrics.count_cancel(
                reason,
                drafts=int(self.batch.num_drafts.sum()),
                flushed=False,
                staged=self._effects.written(self.plan.num_rows),
                wrote=Written(),
            )

    def _require_open(self) -> None:
        if not self.is_open:
            raise StaleWindowError("this overlay window has been closed already")

    def close(self) -> None:
        """Undo all edits; what `commit` and `abort` end with."""
        if self.plan is not None:
            self._effects.point(self.plan, self.plan.durable_pages, self.plan.durable)
        self._effects.unshare(self.shared)
        self.is_open = False  # last: an interrupted close is done again
