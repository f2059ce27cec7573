"""The four launches of a window on the device: begin, fill in, close, move.

Grids depend on how many requests are staged and how many rows they have, which the host knows, and
not on what was accepted. Nothing is allocated, no value is read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from nwor.store.device_state import DeviceState
from nwor.store.paged import PagedGroup
from nwor.store.staging import StagingPages
from nwor.store.triton_rows import FIELDS, TritonMove
from nwor.store.triton_window_kernels import begin_kernel, close_kernel, fill_kernel

ENTRIES = 256
"""Table entries of a newcomer per step of a loop."""
ROWS_PER_PROGRAM, MAX_CHUNKS = 16, 8
"""Rows of a page that one program of fill-in copies, unless pages are longer than all of these."""


class TritonWindow:
    """Kernels bound to the groups and buffers of one overlay.

    Args:
        groups: the engine's cache groups.
        pages: who holds which staging page.
        state: buffers on the device.
        max_drafts: drafts of a request; longer windows take more steps of a loop.

    Raises:
        InputError: groups on several devices, or on one that kernels cannot reach.
    """

    def __init__(
        self,
        groups: Sequence[PagedGroup],
        pages: StagingPages,
        state: DeviceState,
        *,
        max_drafts: int,
    ) -> None:
        lanes = [(rows, index) for index, group in enumerate(groups) for rows in group.rows]
        self._mover = TritonMove([(rows, rows) for rows, _ in lanes], [index for _, index in lanes])
        self._state = state
        self._first_page = pages.first_page
        self._end_page = pages.first_page + pages.num_pages
        self._row_step = state.staged.stride(0)
        longest = max(group.page_size for group in groups)
        self._chunks = min(triton.cdiv(longest, ROWS_PER_PROGRAM), MAX_CHUNKS)
        self._groups = len(groups)
        self._shape = {
            "GROUPS": self._groups,
            "GROUP_BLOCK": triton.next_power_of_2(self._groups),
            "BLOCK": triton.next_power_of_2(max_drafts + 1),
            "num_warps": 1,
        }

    def begin(self, requests: int, query_start_loc: Tensor, positions: Tensor) -> None:
        """Edit tables and slot mappings, and note what is missing."""
        state = self._state
        begin_kernel[(max(requests, 1),)](
            *(state.window, state.groups, query_start_loc, positions, state.saved, state.pages),
            *(state.staged, state.notes, state.under, state.tallies),
            *(requests, self._first_page, positions.shape[0], self._row_step),
            **self._shape,
        )

    def fill(self, requests: int, newcomers: int) -> None:
        """Copy missing rows, and show newcomers the staging pages."""
        state, mover = self._state, self._mover
        programs = requests * self._chunks + newcomers * self._groups
        fill_kernel[(max(programs, 1), max(mover.num_lanes, 1))](
            *(mover.table, state.window, state.groups, state.pages, state.under),
            *(requests, newcomers, self._first_page, self._chunks),
            GROUPS=self._groups,
            FIELDS=FIELDS,
            BLOCK=mover.block,
            ENTRIES=ENTRIES,
            num_warps=mover.warps,
        )

    def close(self, requests: int, newcomers: int, num_rejected: Tensor | None) -> None:
        """Undo the edits; with `num_rejected` plan the way home, without it abort."""
        state = self._state
        close_kernel[(max(requests + newcomers * self._groups, 1),)](
            *(state.window, state.groups),
            state.window if num_rejected is None else num_rejected,
            *(state.saved, state.pages, state.masked, state.notes, state.under, state.tallies),
            *(requests, newcomers, self._first_page, self._end_page, self._row_step),
            COMMIT=num_rejected is not None,
            ENTRIES=ENTRIES,
            **self._shape,
        )

    def move(self, rows: int) -> None:
        """Move the first `rows` of the window, those whose masked slot is not negative."""
        state, step = self._state, self._row_step
        self._mover.launch(state.staged, state.masked, rows, step, step)

    def rehearse(self) -> None:
        """Compile everything; no program finds anything to do."""
        state = self._state
        integers = torch.empty(0, dtype=torch.int32, device=state.window.device)
        self.begin(0, integers, torch.empty(0, dtype=torch.int64, device=integers.device))
        self.fill(0, 0)
        self.close(0, 0, integers)
        self.close(0, 0, None)
        state.masked.fill_(-1)
        self.move(1)
