"""What kernels write: before the forward by the slots, after sampling by what is durable."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nwor.audit.findings import Kind
from nwor.audit.names import OWNER, POSITION, STEP, Ints, RowNames
from nwor.audit.records import Records
from nwor.audit.reporter import Reporter
from nwor.audit.step import Batch, IntArray, Step


class Writes:
    """Checks the rows that a step writes, and those that it leaves in durable pages."""

    def __init__(
        self, names: RowNames, records: Records, reporter: Reporter, first_staging: int
    ) -> None:
        self._names, self._records, self._reporter = names, records, reporter
        self._first_staging = first_staging

    def check(self, step: Step, batch: Batch) -> None:
        """Check the step's slots; those that the cache does not have go to the null page's first."""
        size, names, offend = self._names.page_size, self._names, self._reporter.offend
        slots, index = step.written, step.index[step.of_row]
        named = self._named(step, batch.tables)
        self._reporter.findings.rows_checked += slots.size
        offend(step, Kind.NULL_WRITE, slots, slots < size)
        offend(step, Kind.OUTSIDE, slots, slots >= len(names.rows))
        offend(step, Kind.DISAGREE, slots, slots != named)
        slots = step.written = np.where((slots < 0) | (slots >= len(names.rows)), 0, slots)
        ordered = np.sort(slots, axis=None)
        if (ordered[1:] == ordered[:-1]).any():
            _, inverse, count = np.unique(slots, return_inverse=True, return_counts=True)
            offend(step, Kind.DOUBLE_WRITE, slots, count[inverse].reshape(slots.shape) > 1)
        page = slots // size
        durable = page < self._first_staging
        mine = self._records.pages[:, index, step.position // size] == page
        offend(step, Kind.SHARED_WRITE, slots, durable & (names.users[page] > mine))
        below = step.position < self._records.known[index]
        offend(step, Kind.OVERWRITTEN, slots, durable & mine & names.accepted[slots] & below)

    def check_durable(
        self,
        step: Step,
        tables: Sequence[IntArray],
        mappings: Sequence[IntArray],
        good: NDArray[np.bool_],
    ) -> Ints:
        """Compare the names in the durable pages with acceptance; return the durable slots."""
        names, offend = self._names, self._reporter.offend
        slots = self._named(step, tables)
        end = self._first_staging * self._names.page_size
        mapping = np.stack([mapping[: len(step.position)] for mapping in mappings])
        staging = (slots >= end) | (mapping >= end)
        offend(step, Kind.NOT_RESTORED, slots, staging)
        outside = (slots < 0) | (slots >= len(names.rows))
        offend(step, Kind.OUTSIDE, slots, outside)
        slots = np.where(outside, 0, slots)
        found = names.rows[slots]
        here = (
            (found[..., OWNER] == self._records.serial[step.index[step.of_row]])
            & (found[..., POSITION] == step.position)
            & (found[..., STEP] == self._reporter.findings.steps)
        )
        self._reporter.findings.rows_checked += slots.size
        offend(step, Kind.ROW_LOST, slots, good & ~here)
        offend(step, Kind.REJECTED_IN_DURABLE, slots, ~good & here & ~staging)
        names.accepted[slots[good & here]] = True
        names.accepted[step.written[:, good]] = True
        return slots

    def _named(self, step: Step, tables: Sequence[IntArray]) -> Ints:
        """Return the slots that the tables name for the step's rows, ``[groups, rows]``."""
        column, offset = np.divmod(step.position, self._names.page_size)
        pages = np.stack([table[step.of_row, column] for table in tables]).astype(np.int64)
        slots: Ints = pages * self._names.page_size + offset
        return slots
