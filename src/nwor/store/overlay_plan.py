"""Where every row of a window is staged and where it belongs: decisions only, no effects."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nwor.errors import RowCountError, SlotError
from nwor.store.overlay_loops import (
    MAPPING_DIFFERS,
    NOT_DURABLE,
    OK,
    OUTSIDE_SLOTS,
    OUTSIDE_TABLE,
    Ints,
    Loops,
    Slots,
    Tables,
)
from nwor.store.paged import VerifyBatch
from nwor.store.staging import PAGES_PER_LEASE, StagingPages


@dataclass(frozen=True, slots=True, eq=False)
class Buffers:
    """The engine's tables, one per group, and the page sizes ``[groups]``."""

    tables: Tables
    slots: Slots
    page_size: Ints


@dataclass(frozen=True, slots=True, eq=False)
class OverlayPlan:
    """The decisions of one window; shapes as in `nwor.store.overlay_loops`."""

    batch: VerifyBatch
    leases: Ints
    columns: Ints
    staging_pages: Ints
    durable_pages: Ints
    staged: Ints
    durable: Ints

    @property
    def num_rows(self) -> int:
        """Rows of the window in each group."""
        return int(self.staged.shape[1])


def plan_window(
    batch: VerifyBatch, leases: Ints, pages: StagingPages, buffers: Buffers, loops: Loops
) -> OverlayPlan:
    """Plan the window of a batch whose requests reach two pages at most.

    Raises:
        RowCountError: rows or pages outside the engine's buffers.
        SlotError: the slot mapping contradicts the block table, or the table names a page that is
            not durable.
    """
    groups, rows = len(buffers.tables), int(batch.query_lens.sum())
    columns, staging_pages, durable_pages = np.empty(
        (3, groups, len(leases), PAGES_PER_LEASE), np.int64
    )
    staged, durable = np.empty((2, groups, rows), np.int64)
    found, group, place = loops.plan_window(
        buffers.tables,
        buffers.slots,
        buffers.page_size,
        leases,
        pages.first_page,
        batch.table_rows,
        batch.first_rows,
        batch.computed,
        batch.query_lens,
        columns,
        staging_pages,
        durable_pages,
        staged,
        durable,
    )
    if found != OK:
        raise _refusal(found, group, place, batch, buffers, pages)
    return OverlayPlan(batch, leases, columns, staging_pages, durable_pages, staged, durable)


def plan_fill(
    plan: OverlayPlan, pages: StagingPages, page_size: Ints, loops: Loops
) -> tuple[Ints, Ints, Ints] | None:
    """List the durable rows below the watermark that the staging pages do not show yet.

    Returns:
        Group, durable slot and staging slot of each, or None if nothing is missing.
    """
    computed = plan.batch.computed
    shown = np.empty(plan.columns.shape[:2], np.int64)
    missing = loops.rows_shown(
        page_size,
        plan.leases,
        computed,
        plan.columns,
        plan.durable_pages,
        pages.held,
        pages.durable,
        pages.filled,
        shown,
    )
    if not missing:
        return None
    group, source, target = np.empty((3, missing), np.int64)
    loops.rows_missing(
        page_size,
        computed,
        plan.columns,
        plan.durable_pages,
        plan.staging_pages,
        shown,
        group,
        source,
        target,
    )
    return group, source, target


def plan_home(plan: OverlayPlan, kept: Ints, loops: Loops) -> tuple[Ints, Ints]:
    """List the rows that are kept: staging and durable slots, ``[groups, sum(kept)]`` each."""
    source, target = np.empty((2, plan.staged.shape[0], int(kept.sum())), np.int64)
    loops.rows_kept(plan.batch.query_lens, kept, plan.staged, plan.durable, source, target)
    return source, target


def _refusal(
    found: int, group: int, place: int, batch: VerifyBatch, buffers: Buffers, pages: StagingPages
) -> RowCountError | SlotError:
    """Say what `plan_window` found wrong."""
    if found == MAPPING_DIFFERS:
        return SlotError(
            f"group {group}, window row {place}: the slot mapping contradicts the block table: this "
            "engine maps slots in a way nwor does not know"
        )
    request = batch.requests[place]
    last = batch.computed[place] + batch.query_lens[place] - 1
    if found == NOT_DURABLE:
        line = buffers.tables[group][batch.table_rows[place]]
        first = batch.computed[place] // buffers.page_size[group]
        named = line[first : last // buffers.page_size[group] + 1].tolist()
        return SlotError(
            f"group {group}, request {request!r}: the block table names pages {named}; durable pages "
            f"are 0..{pages.first_page - 1}"
        )
    limit = {
        OUTSIDE_TABLE: f"a block table of shape {buffers.tables[group].shape}",
        OUTSIDE_SLOTS: f"a slot mapping of {buffers.slots[group].shape[0]} rows",
    }[found]
    return RowCountError(
        f"group {group}, request {request!r}: batch row {batch.table_rows[place]}, rows from "
        f"{batch.first_rows[place]}, positions to {last} lie outside {limit}"
    )
