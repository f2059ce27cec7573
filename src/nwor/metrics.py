"""Counters that reconcile: ``staged = committed + rejected + cancelled``, drafts once per window.

Rows and bytes are counted per layer, by whoever wrote them. Nothing is inferred from acceptance: a
window in which no layer staged anything is *empty* and saves nothing, whatever was rejected in it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum


class FallbackReason(StrEnum):
    """Why a window did not end with an undisturbed commit."""

    CALLER = "caller"
    """`cancel_and_flush` with a text of the caller's own."""
    UNFINISHED = "unfinished_window"
    """The step ended with the window still open."""
    WRITER_FAULT = "writer_fault"
    """A writer raised inside commit or flush."""
    MOVER_FAULT = "mover_fault"
    """A row mover raised; the plain mover finished the commit."""
    ABORTED = "aborted"
    """The window was left without a commit: nothing was written."""
    STAGE_REFUSED = "stage_refused"
    """Rows that could not be staged."""


@dataclass(slots=True)
class Written:
    """What reached a durable store."""

    rows: int = 0
    bytes: int = 0

    def add(self, rows: int, row_bytes: int) -> None:
        """Count `rows` of `row_bytes` each."""
        self.rows += rows
        self.bytes += rows * row_bytes


@dataclass(slots=True)
class Metrics:
    """Totals since construction.

    Drafts: `staged`, `committed`, `rejected`, `cancelled`, `truncated`. Rows and bytes are summed
    over layers. `flushed` are drafts written through unverified, by a fallback or in mode
    ``immediate``.
    """

    windows: int = 0
    empty_windows: int = 0
    cancelled_windows: int = 0
    staged: int = 0
    committed: int = 0
    rejected: int = 0
    cancelled: int = 0
    truncated: int = 0
    flushed: int = 0
    bonus: int = 0
    rows_staged: int = 0
    bytes_staged: int = 0
    rows_written: int = 0
    bytes_written: int = 0
    rows_avoided: int = 0
    bytes_avoided: int = 0
    fallbacks: Counter[FallbackReason] = field(default_factory=Counter)

    def count_commit(
        self,
        *,
        drafts: int,
        committed: int,
        cancelled: int,
        bonus: int,
        truncated: int,
        staged: Written,
        wrote: Written,
    ) -> None:
        """Count a committed window; `cancelled` are drafts of requests that were dropped."""
        self.windows += 1
        self._count_rows(staged, wrote)
        if not staged.rows:
            self.empty_windows += 1
            return
        self.staged += drafts
        self.committed += committed
        self.rejected += drafts - committed - cancelled
        self.cancelled += cancelled
        self.truncated += truncated
        self.bonus += bonus
        self.rows_avoided += staged.rows - wrote.rows
        self.bytes_avoided += staged.bytes - wrote.bytes

    def count_cancel(
        self, reason: FallbackReason, *, drafts: int, flushed: bool, staged: Written, wrote: Written
    ) -> None:
        """Count a window that ended without a commit."""
        self.windows += 1
        self.cancelled_windows += 1
        self.fallbacks[reason] += 1
        self._count_rows(staged, wrote)
        if staged.rows:
            self.staged += drafts
            self.cancelled += drafts
            self.flushed += drafts if flushed else 0

    def count_written_through(self, drafts: int, wrote: Written) -> None:
        """Count a window of mode ``immediate``: nothing is staged, nothing is avoided."""
        self.windows += 1
        self.empty_windows += 1
        self.flushed += drafts
        self.rows_written += wrote.rows
        self.bytes_written += wrote.bytes

    def _count_rows(self, staged: Written, wrote: Written) -> None:
        self.rows_staged += staged.rows
        self.bytes_staged += staged.bytes
        self.rows_written += wrote.rows
        self.bytes_written += wrote.bytes

    def snapshot(self) -> dict[str, int | dict[str, int]]:
        """Return all counters, JSON-ready; `fallbacks` maps reason to count."""
        return {
            **self.totals(),
            "fallbacks": {reason.value: n for reason, n in self.fallbacks.items()},
        }

    def totals(self) -> dict[str, int]:
        """Return all counters but `fallbacks`."""
        return {name: getattr(self, name) for name in _TOTALS}


_TOTALS = tuple(name for name in Metrics.__slots__ if name != "fallbacks")
