"""One step as an engine tells it: whose rows, which positions, which pages, which slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nwor.audit.names import Ints
from nwor.errors import InputError

IntArray = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class Batch:
    """What a forward will read and write; rows are the step's query tokens, request after request.

    Arrays are kept, not copied: they may be an engine's own buffers, longer than the step needs.

    Attributes:
        requests: names, one per batch row.
        computed: ``[requests]``, rows that each request has already; its first row is this position.
        scheduled: ``[requests]``, rows of each request in this step, at least 1.
        drafts: ``[requests]``, how many of them, at the end, are drafts that may be rejected.
        tables: for each cache group ``[requests, columns]``: the pages that attention will read.
        slots: for each cache group ``[rows]``: where the writer puts the rows.
    """

    requests: Sequence[str]
    computed: IntArray
    scheduled: IntArray
    drafts: IntArray
    tables: Sequence[IntArray]
    slots: Sequence[IntArray]


@dataclass(slots=True)
class Step:
    """A checked batch, with arrays over its rows.

    Attributes:
        index: ``[requests]``, the requests' records.
        of_row: ``[rows]``, batch row of each row.
        depth: ``[rows]``, place of each row among its request's.
        position: ``[rows]``.
        written: ``[groups, rows]``, slots as they were written.
    """

    requests: Sequence[str]
    index: Ints
    computed: Ints
    scheduled: Ints
    drafts: Ints
    of_row: Ints
    depth: Ints
    position: Ints
    written: Ints


def checked(batch: Batch, groups: int, page_size: int, max_length: int) -> Step:
    """Check a batch and lay out its rows; records are still to be looked up.

    Raises:
        InputError: arrays that contradict each other, or a request that is too long.
    """
    number = len(batch.requests)
    computed, scheduled, drafts = (
        np.asarray(values, np.int64) for values in (batch.computed, batch.scheduled, batch.drafts)
    )
    for name, values in (("computed", computed), ("scheduled", scheduled), ("drafts", drafts)):
        if values.shape != (number,):
            raise InputError(f"{name} has shape {values.shape}, there are {number} requests")
    if len(set(batch.requests)) != number:
        raise InputError(f"a request is named twice in a batch: {list(batch.requests)}")
    if (computed < 0).any() or (drafts < 0).any() or (scheduled <= drafts).any():
        raise InputError(
            "each request needs computed >= 0 and scheduled > drafts >= 0 (the bonus row is no draft), "
            f"got computed {computed}, scheduled {scheduled}, drafts {drafts}"
        )
    ends = computed + scheduled
    if number and ends.max() > max_length:
        raise InputError(
            f"request {batch.requests[int(ends.argmax())]} would have {ends.max()} rows, max_length is "
            f"{max_length}"
        )
    rows = int(scheduled.sum())
    _check_buffers(batch, groups, number, rows, (int(ends.max(initial=1)) - 1) // page_size + 1)
    of_row = np.repeat(np.arange(number), scheduled)
    depth = np.arange(rows) - (np.cumsum(scheduled) - scheduled)[of_row]
    written = np.stack([slots[:rows] for slots in batch.slots]).astype(np.int64)
    return Step(
        batch.requests,
        np.zeros(number, np.int64),
        computed,
        scheduled,
        drafts,
        of_row,
        depth,
        depth + computed[of_row],
        written,
    )


def _check_buffers(batch: Batch, groups: int, number: int, rows: int, columns: int) -> None:
    for name, arrays in (("tables", batch.tables), ("slots", batch.slots)):
        if len(arrays) != groups:
            raise InputError(f"{name} for {len(arrays)} cache groups, the map has {groups}")
    for group, (table, slots) in enumerate(zip(batch.tables, batch.slots, strict=True)):
        if table.ndim != 2 or table.shape[0] < number or table.shape[1] < columns:
            raise InputError(
                f"the table of group {group} has shape {table.shape}, the step needs "
                f"{(number, columns)} (requests, pages)"
            )
        if slots.ndim != 1 or len(slots) < rows:
            raise InputError(
                f"the slots of group {group} have shape {slots.shape}, the step has {rows} rows"
            )
