"""A window: one verify step of one batch, from before the forward to after sampling.

    begin ──▶ OPEN ──commit──▶ COMMITTED
               │ ▲
               │ └─ bad input, failed recovery: raised, still open, nothing lost
               └──abort / flush / failed writer──▶ CANCELLED

A window is an object with a generation number: once closed it refuses everything, so that a late
commit or stage cannot reach the window that came after it.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, Self, TypeVar

import torch
from torch import Tensor

from nwor.errors import AcceptanceError, CommitError, StaleWindowError, WindowOpenError
from nwor.metrics import FallbackReason, Metrics, Written
from nwor.plan import CommitPlan, plan_commit, plan_paths
from nwor.window_rows import DROPPED, WindowRows


class WindowState(StrEnum):
    """States of a window; before it there is none (idle)."""

    OPEN = "open"
    COMMITTED = "committed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class CommitReport:
    """What one commit did.

    Attributes:
        committed: drafts kept.
        rejected: drafts not kept (0 if no layer staged anything).
        rows_written: rows written, summed over layers.
        bytes_written: their bytes.
    """

    committed: int
    rejected: int
    rows_written: int
    bytes_written: int


@dataclass(frozen=True, slots=True)
class _Tally:
    """Drafts of a commit, for the metrics, and its bonus rows."""

    committed: int
    cancelled: int
    bonus: int
    truncated: int


class Window(ABC):
    """State, checks and accounting that all kinds of window share.

    Subclasses say how rows are staged, and implement `_check_staged`, `_apply`, `_flush` and
    `_discard`.
    """

    def __init__(self, rows: WindowRows, generation: int, metrics: Metrics) -> None:
        self.rows = rows
        self.generation = generation
        self._metrics = metrics
        self._state = WindowState.OPEN
        self._staged = Written()
        self._interrupted: BaseException | None = None
        self._torn = False  # rows of some layers are written, of others not

    @property
    def state(self) -> WindowState:
        """Where the window is in its life."""
        return self._state

    @property
    def is_open(self) -> bool:
        """True until commit, abort or flush."""
        return self._state is WindowState.OPEN

    def commit(
        self, accepted: Sequence[int] | Tensor, *, dropped: Iterable[int] = (), truncated: int = 0
    ) -> CommitReport:
        """Move exactly the accepted rows of all layers into the durable store.

        Args:
            accepted: drafts to keep, one count per request; a list or an integer tensor.
            dropped: requests that were aborted or preempted meanwhile. None of their rows is
                written, whatever their count: their pages may belong to somebody else by now.
            truncated: for the metrics, drafts that were accepted by the sampler and then cut off by
                a stop token or a length limit, and are therefore not in `accepted`.

        Raises:
            AcceptanceError: wrong number of counts, or one outside 0…drafts.
            RowCountError: a layer has staged too few rows.
            CommitError: a write failed; see `CommitError.restored`.
            StaleWindowError: the window is closed.
            KeyboardInterrupt: and whatever else interrupts a commit, after all rows are written or
                none is. Interrupted twice, some may be, and the window is still open.

        After bad input nothing has been written and the window is still open.
        """
        self._require_open("commit")
        if self.rows.parents is not None:
            raise AcceptanceError("this window holds trees: use commit_paths")
        counts = checked_counts(accepted, self.rows.num_drafts)
        gone = self._checked_dropped(dropped)
        limits = [DROPPED if i in gone else n for i, n in enumerate(counts)]
        tally = _Tally(
            committed=sum(n for i, n in enumerate(counts) if i not in gone),
            cancelled=sum(self.rows.num_drafts[i] for i in gone),
            bonus=self.rows.num_bonus and self.rows.num_bonus - len(gone),
            truncated=truncated,
        )
        return self._commit(plan_commit(self.rows, torch.tensor(limits)), tally)

    def commit_paths(self, paths: Sequence[Sequence[int]], *, truncated: int = 0) -> CommitReport:
        """Commit one accepted path per draft tree; see `plan_paths`. Errors as in `commit`."""
        self._require_open("commit_paths")
        plan = plan_paths(self.rows, paths)
        bonus = sum(1 for path in paths if path)
        return self._commit(plan, _Tally(sum(map(len, paths)) - bonus, 0, bonus, truncated))

    def abort(self, reason: FallbackReason = FallbackReason.ABORTED) -> None:
        """Close the window without writing anything.

        Raises:
            StaleWindowError: the window is closed.
        """
        self._require_open("abort")
        self._cancel(reason, Written(), flushed=False)

    def flush(self, reason: FallbackReason = FallbackReason.CALLER) -> Written:
        """Close the window by writing *every* staged row, as an engine without nwor would have.

        Raises:
            CommitError: a writer failed. The window is cancelled; see `CommitError.restored`.
            StaleWindowError: the window is closed.
        """
        self._require_open("flush")
        try:
            wrote = self._flush()
        except CommitError:
            self._cancel(FallbackReason.WRITER_FAULT, Written(), flushed=False)
            raise
        self._cancel(reason, wrote, flushed=True)
        if self._interrupted is not None:
            raise self._interrupted
        return wrote

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self.is_open:
            self.abort(FallbackReason.ABORTED if kind else FallbackReason.UNFINISHED)

    def _commit(self, plan: CommitPlan, tally: _Tally) -> CommitReport:
        self._check_staged(plan)
        try:
            wrote = self._apply(plan)
        except BaseException:  # an interrupt too
            if not self._torn:  # else it stays open: it alone holds the rows to commit again
                self._cancel(FallbackReason.WRITER_FAULT, Written(), flushed=False)
            raise
        report = self._close(tally, wrote)
        if self._interrupted is not None:
            raise self._interrupted
        return report

    def _close(self, tally: _Tally, wrote: Written) -> CommitReport:
        self._state = WindowState.COMMITTED
        drafts, staged = self.rows.total_drafts, self._staged
        self._discard()
        self._metrics.count_commit(
            drafts=drafts,
            committed=tally.committed,
            cancelled=tally.cancelled,
            bonus=tally.bonus,
            truncated=tally.truncated,
            staged=staged,
            wrote=wrote,
        )
        if not staged.rows:
            return CommitReport(0, 0, 0, 0)
        rejected = drafts - tally.committed - tally.cancelled
        return CommitReport(tally.committed, rejected, wrote.rows, wrote.bytes)

    def _cancel(self, reason: FallbackReason, wrote: Written, *, flushed: bool) -> None:
        self._state = WindowState.CANCELLED
        self._metrics.count_cancel(
            reason, drafts=self.rows.total_drafts, flushed=flushed, staged=self._staged, wrote=wrote
        )
        self._discard()

    def _require_open(self, action: str) -> None:
        if self._state is not WindowState.OPEN:
            raise StaleWindowError(
                f"{action} on window {self.generation}, which is {self._state}: "
                "open a new window for every step"
            )

    def _checked_dropped(self, dropped: Iterable[int]) -> set[int]:
        gone = set(dropped)
        for index in gone:
            if not 0 <= index < self.rows.num_requests:
                raise AcceptanceError(
                    f"dropped request {index} is not one of {self.rows.num_requests}"
                )
        return gone

    @abstractmethod
    def _check_staged(self, plan: CommitPlan) -> None:
        """Raise a typed error unless every row the plan may keep is staged and has a slot."""

    @abstractmethod
    def _apply(self, plan: CommitPlan) -> Written:
        """Write the kept rows of all layers, or raise `CommitError`."""

    @abstractmethod
    def _flush(self) -> Written:
        """Write all staged rows, or raise `CommitError`."""

    @abstractmethod
    def _discard(self) -> None:
        """Forget what was staged."""


W = TypeVar("W", bound=Window)


class WindowSequence(Generic[W]):
    """One window at a time, numbered."""

    def __init__(self) -> None:
        self._generation = 0
        self._current: W | None = None

    @property
    def current(self) -> W | None:
        """The open window, or None."""
        if self._current is not None and not self._current.is_open:
            self._current = None
        return self._current

    def next_generation(self) -> int:
        """Number the next window.

        Raises:
            WindowOpenError: the last one is still open.
        """
        if self.current is not None:
            raise WindowOpenError(
                f"window {self.current.generation} is still open: commit, abort or flush it first"
            )
        self._generation += 1
        return self._generation

    def opened(self, window: W) -> W:
        """Make `window` the current one."""
        self._current = window
        return window


def checked_counts(accepted: Sequence[int] | Tensor, num_drafts: Sequence[int]) -> list[int]:
    """Return accepted counts as a list of ints within 0…drafts; one transfer if on a device.

    Raises:
        AcceptanceError: names the request and the value.
    """
    if isinstance(accepted, Tensor):
        if accepted.ndim != 1 or accepted.is_floating_point() or accepted.dtype == torch.bool:
            raise AcceptanceError(
                "accepted counts must be a 1-D integer tensor, got "
                f"{accepted.dtype} of shape {tuple(accepted.shape)}"
            )
        accepted = accepted.tolist()
    try:
        counts = [operator.index(n) for n in accepted]
    except TypeError:
        raise AcceptanceError(f"accepted counts must be integers, got {accepted!r}") from None
    if len(counts) != len(num_drafts):
        raise AcceptanceError(f"{len(counts)} accepted counts for {len(num_drafts)} requests")
    for index, (count, limit) in enumerate(zip(counts, num_drafts, strict=True)):
        if not 0 <= count <= limit:
            raise AcceptanceError(f"request {index} accepted {count} of {limit} drafts")
    return counts
