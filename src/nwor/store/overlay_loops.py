"""The overlay's bookkeeping as plain loops over groups, requests and rows.

Every function is a few dozen scalar steps per request: too many for Python in a serving loop, too
ragged for numpy, whose calls cost more than the work. They are written once and run either as they
stand or compiled by numba (`get_loops`); both do the same thing.

Shapes: ``tables`` and ``slots`` are tuples of one array per group; ``page_size`` is ``[groups]``;
``columns``, ``staging_pages``, ``durable_pages`` are ``[groups, requests, 2]`` for the first and the
last page of a window (the same page twice if it stays within one); ``staged`` and ``durable`` are
slots ``[groups, rows]`` of the windows' rows, request after request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nwor.errors import InputError

Ints = NDArray[np.int64]
Tables = tuple[NDArray[np.int32], ...]
Slots = tuple[Ints, ...]

OK, OUTSIDE_TABLE, OUTSIDE_SLOTS, MAPPING_DIFFERS, NOT_DURABLE = range(5)
"""What `plan_window` found, with the group and the request (or row) it concerns."""


def plan_window(
    tables: Tables,
    slots: Slots,
    page_size: Ints,
    leases: Ints,
    first_staging: int,
    table_rows: Ints,
    first_rows: Ints,
    computed: Ints,
    query_lens: Ints,
    columns: Ints,
    staging_pages: Ints,
    durable_pages: Ints,
    staged: Ints,
    durable: Ints,
) -> tuple[int, int, int]:
    """Fill in `columns` and what follows it; read the tables, change nothing.

    Staging pages follow from `leases` by the arithmetic of `nwor.store.staging.StagingPages`.
    """
    groups = len(tables)
    for group in range(groups):
        table, mapping, size = tables[group], slots[group], page_size[group]
        row = 0
        for request in range(len(computed)):
            start, length = computed[request], query_lens[request]
            first, last = start // size, (start + length - 1) // size
            line = table_rows[request]
            even = first_staging + 2 * (leases[request] * groups + group)
            if line >= table.shape[0] or last >= table.shape[1]:
                return OUTSIDE_TABLE, group, request
            if first_rows[request] + length > mapping.shape[0]:
                return OUTSIDE_SLOTS, group, request
            for side, page in enumerate((first, last)):
                home = table[line, page]
                if home < 0 or home >= first_staging:
                    return NOT_DURABLE, group, request
                columns[group, request, side] = page
                staging_pages[group, request, side] = even + page % 2
                durable_pages[group, request, side] = home
            for depth in range(length):
                page, offset = (start + depth) // size, (start + depth) % size
                side = 0 if page == first else 1
                slot = durable_pages[group, request, side] * size + offset
                if mapping[first_rows[request] + depth] != slot:
                    return MAPPING_DIFFERS, group, row
                durable[group, row] = slot
                staged[group, row] = staging_pages[group, request, side] * size + offset
                row += 1
    return OK, 0, 0


def point(
    tables: Tables,
    slots: Slots,
    table_rows: Ints,
    first_rows: Ints,
    query_lens: Ints,
    columns: Ints,
    pages: Ints,
    targets: Ints,
) -> None:
    """Let the tables name `pages` and the slot mappings `targets`, in place."""
    for group in range(len(tables)):
        table, mapping = tables[group], slots[group]
        row = 0
        for request in range(len(table_rows)):
            for side in range(2):
                page = columns[group, request, side]
                table[table_rows[request], page] = pages[group, request, side]
            for depth in range(query_lens[request]):
                mapping[first_rows[request] + depth] = targets[group, row]
                row += 1


def rows_shown(
    page_size: Ints,
    leases: Ints,
    computed: Ints,
    columns: Ints,
    durable_pages: Ints,
    held: Ints,
    behind: Ints,
    filled: Ints,
    shown: Ints,
) -> int:
    """Say how many rows below the watermark each first staging page shows; return those missing.

    Only the first page of a window can lack any. In steady state it lacks none: what was committed
    had been written to the staging page before. A page that stands for something else, or shows
    more than the watermark allows, is not trusted and shows none.
    """
    missing = 0
    for group in range(len(page_size)):
        for request in range(len(leases)):
            page = columns[group, request, 0]
            lease, side = leases[request], page % 2
            need = computed[request] - page * page_size[group]
            count = filled[lease, group, side]
            if (
                held[lease, group, side] != page
                or behind[lease, group, side] != durable_pages[group, request, 0]
                or count > need
            ):
                count = 0
            shown[group, request] = count
            missing += need - count
    return missing


def rows_missing(
    page_size: Ints,
    computed: Ints,
    columns: Ints,
    durable_pages: Ints,
    staging_pages: Ints,
    shown: Ints,
    of_group: Ints,
    source: Ints,
    target: Ints,
) -> None:
    """List the missing rows: group, durable slot, staging slot."""
    at = 0
    for group in range(len(page_size)):
        size = page_size[group]
        for request in range(len(computed)):
            need = computed[request] - columns[group, request, 0] * size
            for row in range(shown[group, request], need):
                of_group[at] = group
                source[at] = durable_pages[group, request, 0] * size + row
                target[at] = staging_pages[group, request, 0] * size + row
                at += 1


def note(
    page_size: Ints,
    leases: Ints,
    watermark: Ints,
    columns: Ints,
    durable_pages: Ints,
    held: Ints,
    behind: Ints,
    filled: Ints,
) -> None:
    """Note which page each staging page stands for and how many durable rows it shows."""
    for group in range(len(page_size)):
        size = page_size[group]
        for request in range(len(leases)):
            for side in range(2):
                page = columns[group, request, side]
                place = leases[request], group, page % 2
                held[place] = page
                behind[place] = durable_pages[group, request, side]
                filled[place] = min(max(watermark[request] - page * size, 0), size)


def rows_kept(
    query_lens: Ints,
    kept: Ints,
    staged: Ints,
    durable: Ints,
    source: Ints,
    target: Ints,
) -> None:
    """List the rows that go home, ``[groups, sum(kept)]``: staging slot and durable slot."""
    for group in range(staged.shape[0]):
        row, at = 0, 0
        for request in range(len(query_lens)):
            for depth in range(kept[request]):
                source[group, at] = staged[group, row + depth]
                target[group, at] = durable[group, row + depth]
                at += 1
            row += query_lens[request]


_LOOPS = (plan_window, point, rows_shown, rows_missing, note, rows_kept)


@dataclass(frozen=True, slots=True)
class Loops:
    """The functions above, as they stand or compiled."""

    plan_window: Callable[..., tuple[int, int, int]]
    point: Callable[..., None]
    rows_shown: Callable[..., int]
    rows_missing: Callable[..., None]
    note: Callable[..., None]
    rows_kept: Callable[..., None]


def get_loops(name: str) -> Loops:
    """Return the loops as ``python`` or compiled by ``numba``.

    Raises:
        InputError: no such kind, or numba is not installed.
    """
    if name == "python":
        return Loops(*_LOOPS)
    if name == "numba":
        try:
            from numba import njit  # noqa: PLC0415 - an optional dependency
        except ImportError as error:
            raise InputError("loops 'numba' need numba: pip install 'nwor[numba]'") from error
        compiled: list[Any] = [njit(nogil=True, cache=True)(loop) for loop in _LOOPS]
        return Loops(*compiled)
    raise InputError(f"unknown loops {name!r}; known: python, numba")
