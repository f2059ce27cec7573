"""How far the device overlay reaches: offsets that 32 bits do not hold, in sparse memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from twins import DEVICE

from nwor import KVRows
from nwor.store.device_overlay import DeviceBatch, DeviceGroup, DeviceOverlay

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="sparse memory of the host")


@dataclass
class Far:
    """One request on sparse memory: offsets beyond 2**32 bytes in a table, a slot mapping and a store.

    Its window is the last row of durable page 17 and the first two of page 16; pages have 2**28 rows.
    Staging pages are 18 (page 16's) and 19 (page 17's). Of each slot number the lower 32 bits name a
    slot of pages 0 to 3, so what loses the upper ones reads and writes there.

    Attributes:
        spared: rows below the window that staging page 19 already shows; a page takes too long to copy.
    """

    spared: int
    size: int = 2**28
    token: int = 2**30
    row: int = 3

    def __post_init__(self) -> None:
        size, token, row = self.size, self.token, self.row
        flat = torch.from_numpy(np.zeros(20 * size * 2, np.uint8))
        shape, steps = (1, 20, size, 1, 1), (1, 2 * size, 2, 1, 1)
        self.rows = KVRows(*(flat.as_strided(shape, steps, at) for at in (0, 1)))
        stride = 2**30 + 7
        self.table = torch.from_numpy(np.zeros(4 * stride, np.int32)).view(4, stride)[:, :5]
        self.slots, positions = (torch.from_numpy(np.zeros(token + 8, np.int64)) for _ in range(2))
        starts = torch.tensor([0, 0, 0, token, token + 3], dtype=torch.int32)
        self.device = DeviceOverlay(
            [DeviceGroup(self.table, self.slots, (self.rows,))],
            first_page=18,
            num_leases=1,
            max_requests=4,
            max_tokens=8,
            max_drafts=2,
        )
        self.home = [17 * size + size - 1, 16 * size, 16 * size + 1]
        self.staged = [19 * size + size - 1, 18 * size, 18 * size + 1]
        self.table[row, 1:3] = torch.tensor([17, 16])
        self.slots[token : token + 3] = torch.tensor(self.home)
        positions[token : token + 3] = 2 * size - 1 + torch.arange(3)
        self.device.state.notes[0, 0, 1] = torch.tensor([1, 17, self.spared, 0])
        self.batch = DeviceBatch(["r"], *np.array([[row], [3], [2]]), starts, positions)

    def put(self, slot: int, number: int) -> None:
        for view, value in ((self.rows.key, number), (self.rows.value, number + 100)):
            view[0, slot // self.size, slot % self.size] = value

    def found(self, slots: Iterable[int]) -> list[tuple[int, int]]:
        where = [(0, slot // self.size, slot % self.size) for slot in slots]
        return [(int(self.rows.key[at]), int(self.rows.value[at])) for at in where]


def test_far_tables_slots_and_rows() -> None:
    """Edits, undone edits and the commit, with nothing to fill in."""
    far = Far(spared=2**28 - 1)
    window = far.device.begin(far.batch)
    assert far.table[far.row, :4].tolist() == [0, 19, 18, 0]
    assert far.slots[far.token : far.token + 3].tolist() == far.staged
    for number, slot in enumerate(far.staged):
        far.put(slot, number + 1)
    window.commit(torch.tensor([0, 0, 0, 1], dtype=torch.int32))
    assert far.table[far.row, :4].tolist() == [0, 17, 16, 0]
    assert far.slots[far.token : far.token + 3].tolist() == far.home
    assert far.found(far.home) == [(1, 101), (2, 102), (0, 0)]
    far.device.collect(wait=True)
    assert not far.device.faults


def test_fill_in_of_far_rows() -> None:
    """The last rows below the window are copied to the staging page: no others, no wrong ones."""
    far = Far(spared=2**28 - 4)
    lacking = [17 * far.size + at for at in range(far.size - 5, far.size)]
    for number, slot in enumerate(lacking):
        far.put(slot, number + 1)
        far.put(slot % 2**32, number + 51)
    window = far.device.begin(far.batch)
    shown = far.found(slot + 2 * far.size for slot in lacking)
    assert shown == [(0, 0), (2, 102), (3, 103), (4, 104), (0, 0)]
    assert far.found(slot % 2**32 for slot in lacking) == [(n + 51, n + 151) for n in range(5)]
    assert far.found((slot + 2 * far.size) % 2**32 for slot in lacking) == [(0, 0)] * 5
    window.abort()
    far.device.collect(wait=True)
    assert not far.device.faults
    assert far.device.rows_filled == 3
