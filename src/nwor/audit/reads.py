"""What attention reads: every position inside its window must hold the row with the right name.

Only pages that changed, or are new to a request, since they were last looked at are looked at again.
"""

from __future__ import annotations

import numpy as np

from nwor.audit.findings import Kind
from nwor.audit.names import OWNER, POSITION, STEP, Ints, RowNames
from nwor.audit.records import Records
from nwor.audit.reporter import Reporter
from nwor.audit.step import Batch, Step


class Reads:
    """Checks the rows that attention sees before those of its own step."""

    def __init__(self, names: RowNames, records: Records, reporter: Reporter) -> None:
        self._names, self._records, self._reporter = names, records, reporter
        self._seen_page = np.full_like(records.pages, -1)
        self._seen_version = np.full_like(records.pages, -1)

    def forget(self, index: int) -> None:
        """Look at everything again for the next owner of a record."""
        self._seen_page[:, index] = -1

    def adopt(self, step: Step, batch: Batch) -> None:
        """Take over the rows of a cached prefix under the names they have, if they are accepted.

        Engines may share a page in the step that fills it: some rows may have been written just now.
        """
        size, records, names = self._names.page_size, self._records, self._names
        for row in np.flatnonzero(records.known[step.index] == 0):
            until = int(step.computed[row])
            if not until:
                continue
            index = step.index[row]
            first = records.first_read(step.computed)[:, row]
            for group, table in enumerate(batch.tables):
                position = np.arange(first[group], until)
                slots = self._inside(
                    table[row, position // size].astype(np.int64) * size + position % size
                )
                found = names.rows[slots]
                self._reporter.offend_at(
                    Kind.PUBLISHED,
                    ~names.accepted[slots] | (found[:, POSITION] != position),
                    requests=step.requests,
                    request=np.full(len(position), row),
                    group=np.full(len(position), group),
                    position=position,
                    slots=slots,
                )
                records.owner[group, index, position] = found[:, OWNER]
                records.written[group, index, position] = found[:, STEP]
            records.known[index] = until
            self._reporter.findings.adopted += until

    def check(self, step: Step, batch: Batch) -> None:
        """Compare names in the pages of the step's requests with the rows that should be there."""
        size, records = self._names.page_size, self._records
        groups, rows, cols, pages = self._dirty(step, batch)
        low = np.maximum(cols * size, records.first_read(step.computed)[groups, rows])
        counts = np.maximum(np.minimum((cols + 1) * size, step.computed[rows]) - low, 0)
        total = int(counts.sum())
        if not total:
            return
        which = np.repeat(np.arange(len(rows)), counts)
        position = np.arange(total) - (np.cumsum(counts) - counts - low)[which]
        index, group = step.index[rows][which], groups[which]
        named = (pages * size)[which] + position % size
        slots = self._inside(named)
        found = self._names.rows[slots]
        wrong = (
            (found[:, OWNER] != records.owner[group, index, position])
            | (found[:, POSITION] != position)
            | (found[:, STEP] != records.written[group, index, position])
        )
        self._reporter.findings.rows_checked += total
        self._reporter.findings.reads += total
        if wrong.any():
            wrong &= named == slots  # those outside the cache are reported as such
            self._accuse(step, rows[which][wrong], group[wrong], position[wrong], slots[wrong])

    def _accuse(self, step: Step, row: Ints, group: Ints, position: Ints, slots: Ints) -> None:
        """Say what the wrong rows are; called for those alone, so that sound steps do not pay."""
        found = self._names.rows[slots]
        owner, reader = found[:, OWNER], self._records.serial[step.index[row]]
        earlier = found[:, STEP] != self._reporter.findings.steps
        kinds = {
            Kind.UNWRITTEN_READ: owner == 0,
            Kind.FOREIGN_READ: owner != reader,
            Kind.REJECTED_READ: earlier & ~self._names.accepted[slots],
        }
        is_kind = np.select(list(kinds.values()), range(len(kinds)), len(kinds))
        for number, kind in enumerate((*kinds, Kind.STALE_READ)):
            self._reporter.offend_at(
                kind,
                is_kind == number,
                requests=step.requests,
                request=row,
                group=group,
                position=position,
                slots=slots,
            )

    def _dirty(self, step: Step, batch: Batch) -> tuple[Ints, Ints, Ints, Ints]:
        """Return group, batch row, column and page of what has to be looked at."""
        size = self._names.page_size
        last = step.computed // size
        columns = min(int(last.max()) + 1, self._seen_page.shape[2])
        number = len(step.index)
        pages = np.stack([table[:number, :columns] for table in batch.tables]).astype(np.int64)
        known = np.clip(pages, 0, len(self._names.version) - 1)
        version = self._names.version[known]
        start = self._records.first_read(step.computed)
        column = np.arange(columns)
        used = (column >= (start // size)[..., None]) & (column <= last[:, None])
        seen_page, seen_version = (
            seen[:, step.index, :columns] for seen in (self._seen_page, self._seen_version)
        )
        dirty = ((pages != seen_page) | (version != seen_version)) & used
        self._seen_page[:, step.index, :columns] = pages
        self._seen_version[:, step.index, :columns] = version
        groups, rows, cols = np.nonzero(dirty)
        return groups, rows, cols, pages[groups, rows, cols]

    def _inside(self, slots: Ints) -> Ints:
        """Report slots that the cache does not have, and look at the null page in their place."""
        outside = (slots < 0) | (slots >= len(self._names.rows))
        if outside.any():
            at = int(slots[outside][0])
            self._reporter.report(Kind.OUTSIDE, int(outside.sum()), slot=at)
        return np.where(outside, 0, slots)
