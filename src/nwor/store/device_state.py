"""What the device overlay keeps on the device, and where in it everything stands.

All buffers are allocated once. A *record* is the row of a buffer that belongs to one request of the
window; records are in the order of the upload, staged requests first.

    window    int32 [records, ENTRY]              ROW LEASE FIRST LENGTH DRAFTS GENERATION
    saved     int64 [records, SAVED]              START TOKEN OPEN
    pages     int64 [records, groups, PAGES]      FIRST_PAGE LAST_PAGE FIRST_HOME LAST_HOME
                                                  STAND_IN SHOWN NEED
    notes     int64 [leases, groups, 2, NOTES]    HELD BEHIND FILLED NOTED
    groups    int64 [groups, GROUP]               TABLE STRIDE LINES COLUMNS SLOTS TOKENS SIZE
    staged    int64 [groups, rows]                staging slot of each row of the window
    masked    int64 [groups, rows]                durable slot of each row that is kept, else -1
    under     int32 [groups, durable pages]       staging page that lies over a page, else -1
    tallies   int64 [records, TALLIES]            counters, one program each: see `Tally`

`window` is uploaded: batch row, lease, first row of the request in `staged` and `masked`, rows,
drafts, generation of the lease; newcomers give their batch row only. `saved` and `pages` are what
begin found and commit needs: the watermark (-1 if the request is not staged after all), its first
token in the slot mapping, whether it is still to be counted; logical pages and durable pages of the
window, the staging page over the first one, how many of its rows below the watermark it showed at
begin, and how many there are. `notes` say of each staging page which logical page it stands for, over
which durable page, how many rows equal that one's, and under which generation of its lease that was
noted. `groups` are addresses and sizes of the engine's tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from nwor.store.paged import PagedGroup
from nwor.store.staging import NOBODY, PAGES_PER_LEASE, StagingPages

ENTRY = 8
ROW, LEASE, FIRST, LENGTH, DRAFTS, GENERATION = range(6)
SAVED = 4
START, TOKEN, OPEN = range(3)
PAGES = 8
FIRST_PAGE, LAST_PAGE, FIRST_HOME, LAST_HOME, STAND_IN, SHOWN, NEED = range(7)
NOTES = 4
HELD, BEHIND, FILLED, NOTED = range(4)
GROUP = 8
TABLE, STRIDE, LINES, COLUMNS, SLOTS, TOKENS, SIZE = range(7)
TALLIES = 32
LENGTH_DIFFERS = 5
"""Other rows than announced: a reason of its own, beside those of `nwor.store.overlay_loops`."""


class Tally(IntEnum):
    """Columns of `DeviceState.tallies`. Drafts, and rows of one layer."""

    WINDOWS = 0
    CANCELLED_WINDOWS = 1
    STAGED = 2
    COMMITTED = 3
    REJECTED = 4
    CANCELLED = 5
    BONUS = 6
    ROWS_STAGED = 7
    ROWS_WRITTEN = 8
    ROWS_CANCELLED = 9
    FLUSHED = 10
    BAD_COUNT = 11
    ROWS_FILLED = 12
    REFUSED = 16
    """Requests that turned out not to be stageable; the reason's number is added to the column."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceState:
    """The buffers above, on the device of the groups."""

    window: Tensor
    saved: Tensor
    pages: Tensor
    notes: Tensor
    groups: Tensor
    staged: Tensor
    masked: Tensor
    under: Tensor
    tallies: Tensor

    @classmethod
    def allocate(
        cls, groups: Sequence[PagedGroup], pages: StagingPages, *, records: int, rows: int
    ) -> DeviceState:
        """Allocate everything a window needs."""
        device, number = groups[0].table.device, len(groups)

        def full(shape: tuple[int, ...], value: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        return cls(
            window=full((records, ENTRY), 0, torch.int32),
            saved=full((records, SAVED), NOBODY),
            pages=full((records, number, PAGES), 0),
            notes=full((pages.num_leases, number, PAGES_PER_LEASE, NOTES), NOBODY),
            groups=torch.tensor([_describe(group) for group in groups], device=device),
            staged=full((number, rows), 0),
            masked=full((number, rows), NOBODY),
            under=full((number, pages.first_page), NOBODY, torch.int32),
            tallies=full((records, TALLIES), 0),
        )


def _describe(group: PagedGroup) -> list[int]:
    table, slots = group.table, group.slots
    return [
        *(table.data_ptr(), table.stride(0), *table.shape),
        *(slots.data_ptr(), slots.shape[0], group.page_size, 0),
    ]
