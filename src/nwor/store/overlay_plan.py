"""Where every row of a window is staged and where it belongs: arithmetic only, no effects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nwor.errors import RowCountError, SlotError
from nwor.store.paged import Ints, VerifyBatch
from nwor.store.staging import StagingPages

Table = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class OverlayPlan:
    """The decisions of one window.

    Attributes:
        leases: ``[requests]``.
        columns: ``[groups, requests, 2]``, first and last logical page of each window; twice the
            same if the window stays within one.
        staging_pages: ``[groups, requests, 2]``, the pages that stand for them.
        durable_pages: ``[groups, requests, 2]``, the pages they stand for.
        owner: ``[rows]``, index of the row's request.
        depth: ``[rows]``, place within the request's query.
        tokens: ``[rows]``, place in the slot mapping.
        staged: ``[groups, rows]``, staging slots.
        durable: ``[groups, rows]``, durable slots.
    """

    leases: Ints
    columns: Ints
    staging_pages: Ints
    durable_pages: Ints
    owner: Ints
    depth: Ints
    tokens: Ints
    staged: Ints
    durable: Ints


def plan_window(
    batch: VerifyBatch,
    leases: Ints,
    *,
    pages: StagingPages,
    tables: Sequence[Table],
    slots: Sequence[Ints],
    page_size: Ints,
) -> OverlayPlan:
    """Plan the window of a batch.

    Args:
        batch: at least one request; no window reaches more than two pages.
        leases: ``[requests]``.
        pages: where the leases' pages are.
        tables: block table of each group.
        slots: slot mapping of each group.
        page_size: ``[groups, 1]``.

    Raises:
        RowCountError: rows or pages outside the engine's buffers.
        SlotError: the slot mapping contradicts the block table, or names a staging page.
    """
    lens = batch.query_lens
    owner = np.repeat(np.arange(len(lens)), lens)
    depth = np.arange(len(owner)) - (np.cumsum(lens) - lens)[owner]
    tokens = batch.first_rows[owner] + depth
    first = batch.computed // page_size
    columns = np.stack((first, (batch.computed + lens - 1) // page_size), -1)
    _check_bounds(tables, slots, batch.table_rows, columns[..., 1], tokens)

    rows = batch.table_rows[:, None]
    durable_pages = np.stack([t[rows, c] for t, c in zip(tables, columns, strict=True)])
    durable_pages = durable_pages.astype(np.int64)
    durable = np.stack([mapping[tokens] for mapping in slots])
    position = batch.computed[owner] + depth
    page = position // page_size
    offset = position - page * page_size
    even = pages.even_pages(leases)
    second = page != first[:, owner]
    home = np.where(second, durable_pages[:, owner, 1], durable_pages[:, owner, 0])
    _check_mapping(durable, home * page_size + offset, durable_pages, pages.first_page)
    return OverlayPlan(
        leases=leases,
        columns=columns,
        staging_pages=even[..., None] + (columns & 1),
        durable_pages=durable_pages,
        owner=owner,
        depth=depth,
        tokens=tokens,
        staged=(even[:, owner] + (page & 1)) * page_size + offset,
        durable=durable,
    )


def plan_fill(
    plan: OverlayPlan, batch: VerifyBatch, pages: StagingPages, page_size: Ints
) -> tuple[Ints, Ints, Ints] | None:
    """Find the durable rows below the watermark that the staging pages do not show yet.

    Only the first page of a window can lack any. In steady state it lacks none: what was committed
    had been written to the staging page before.

    Returns:
        Group, durable slot and staging slot of each missing row, or None if there is none.
    """
    first = plan.columns[..., 0]
    place = (plan.leases, np.arange(pages.num_groups)[:, None], first & 1)
    need = batch.computed - first * page_size
    filled = pages.filled[place]
    current = (
        (pages.held[place] == first)
        & (pages.durable[place] == plan.durable_pages[..., 0])
        & (filled <= need)
    )
    have = np.where(current, filled, 0)
    missing = need - have
    if not missing.any():
        return None
    group, request = np.nonzero(missing)
    count = missing[group, request]
    cell = np.repeat(np.arange(len(count)), count)
    row = np.arange(len(cell)) - (np.cumsum(count) - count)[cell] + have[group, request][cell]
    source = plan.durable_pages[group, request, 0] * page_size[group, 0]
    target = plan.staging_pages[group, request, 0] * page_size[group, 0]
    return group[cell], source[cell] + row, target[cell] + row


def _check_bounds(
    tables: Sequence[Table],
    slots: Sequence[Ints],
    table_rows: Ints,
    last_page: Ints,
    tokens: Ints,
) -> None:
    row, token, last = table_rows.max(), tokens.max(), last_page.max(1)
    for group, (table, mapping) in enumerate(zip(tables, slots, strict=True)):
        if row >= table.shape[0] or last[group] >= table.shape[1]:
            raise RowCountError(
                f"group {group}: batch row {row}, page {last[group]} lie outside a block table of "
                f"shape {table.shape}"
            )
        if token >= mapping.shape[0]:
            raise RowCountError(f"group {group}: row {token} lies outside {len(mapping)} slots")


def _check_mapping(found: Ints, expected: Ints, durable_pages: Ints, first_staging: int) -> None:
    if not np.array_equal(found, expected):
        group, row = (int(axis[0]) for axis in np.nonzero(found != expected))
        raise SlotError(
            f"group {group}, window row {row}: slot mapping says {found[group, row]}, block table "
            f"{expected[group, row]}: this engine maps slots in a way nwor does not know"
        )
    low, high = durable_pages.min(), durable_pages.max()
    if low < 0 or high >= first_staging:
        raise SlotError(
            f"the block table names page {low if low < 0 else high}; durable pages are "
            f"0..{first_staging - 1}"
        )
