"""What the audit remembers of each request: the rows it should find, the pages it may use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from nwor.audit.names import Ints, Names, RowNames
from nwor.audit.step import IntArray, Step
from nwor.errors import InputError

EVERYTHING = 2**40
"""A window longer than any request."""


class Records:
    """Arrays over records; a request has one from its first step until it is gone.

    Attributes:
        known: ``[records]``, accepted rows: the watermark.
        serial: ``[records]``, name of the owner, never used twice.
        speculated: ``[records]``, drafts of the request have been verified.
        owner: ``[groups, records, positions]``, owner of the row that should be there.
        written: the same, step that wrote it.
        pages: ``[groups, records, columns]``, page the request uses there; 0 for none.
    """

    def __init__(self, windows: Ints, number: int, length: int, page_size: int) -> None:
        groups = len(windows)
        self._windows, self._page_size = windows, page_size
        self._index: dict[str, int] = {}
        self._free = list(range(number))
        self._serials = 0
        self.known = np.zeros(number, np.int64)
        self.serial = np.zeros(number, np.int32)
        self.speculated = np.zeros(number, np.bool_)
        self.owner: Names = np.zeros((groups, number, length), np.int32)
        self.written: Names = np.zeros((groups, number, length), np.int32)
        self.pages: Ints = np.zeros((groups, number, (length - 1) // page_size + 1), np.int64)

    def __contains__(self, request: str) -> bool:
        return request in self._index

    @property
    def requests(self) -> list[str]:
        """Requests that have a record."""
        return list(self._index)

    def find(self, requests: Sequence[str]) -> Ints:
        """Return the requests' records; new requests get one.

        Raises:
            InputError: more requests than records.
        """
        new = [request for request in requests if request not in self._index]
        if len(new) > len(self._free):
            raise InputError(
                f"{len(self._index) + len(new)} requests at a time, max_requests is "
                f"{len(self.known)}: say `freed` when a request is finished, aborted or preempted"
            )
        for request in new:
            index = self._index[request] = self._free.pop()
            self._serials += 1
            self.serial[index] = self._serials
        return np.array([self._index[request] for request in requests], np.int64)

    def __len__(self) -> int:
        return len(self._index)

    def has_speculated(self, request: str) -> bool:
        """Say whether drafts of a request have been verified; False for one that has no record."""
        index = self._index.get(request)
        return index is not None and bool(self.speculated[index])

    def slots(self, request: str) -> Ints | None:
        """Return the slots of a request's accepted rows, ``[groups, rows]``, 0 where it has no page."""
        index = self._index.get(request)
        if index is None:
            return None
        column, offset = np.divmod(np.arange(self.known[index]), self._page_size)
        pages = self.pages[:, index, column]
        slots: Ints = np.where(pages > 0, pages * self._page_size + offset, 0)
        return slots

    def drop(self, request: str, names: RowNames) -> int | None:
        """Forget a request, and that it uses pages; return its record."""
        index = self._index.pop(request, None)
        if index is None:
            return None
        np.subtract.at(names.users, self.pages[:, index].ravel(), 1)
        self.pages[:, index] = 0
        self.owner[:, index] = self.written[:, index] = 0  # nothing the next owner should find
        self.known[index] = 0
        self.speculated[index] = False
        self._free.append(index)
        return index

    def first_read(self, computed: Ints) -> Ints:
        """Return the first position that attention sees, ``[groups, requests]``."""
        first: Ints = np.maximum(0, computed + 1 - self._windows[:, None])
        return first

    def note_pages(self, step: Step, tables: Iterable[IntArray], names: RowNames) -> None:
        """Count who uses which page; those a sliding window has left are the scheduler's again."""
        size, number = self._page_size, len(step.index)
        last = (step.computed + step.scheduled - 1) // size
        columns = int(last.max()) + 1
        pages = np.stack([table[:number, :columns] for table in tables]).astype(np.int64)
        start = self.first_read(self.known[step.index]) // size
        column = np.arange(columns)
        pages[(column > last[:, None]) | (column < start[..., None])] = 0
        pages[(pages < 0) | (pages >= len(names.users))] = 0
        old = self.pages[:, step.index, :columns]
        changed = old != pages
        if not changed.any():
            return
        np.subtract.at(names.users, old[changed], 1)
        np.add.at(names.users, pages[changed], 1)
        self.pages[:, step.index, :columns] = pages
        names.users[0] = 0
