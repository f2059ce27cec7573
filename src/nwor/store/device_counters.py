"""Counters that accumulate on the device and reach `Metrics` when they happen to arrive."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nwor.metrics import Metrics
from nwor.store import overlay_loops
from nwor.store.device_state import LENGTH_DIFFERS, TALLIES, Tally
from nwor.store.device_transfer import Readback


class DeviceFault(StrEnum):
    """What the device found wrong with a request, where the host's overlay would have raised.

    All but the last: the request was not staged, in no group; its rows went to its durable pages.
    """

    OUTSIDE_TABLE = "outside_table"
    """Its batch row or its pages lie outside a block table."""
    OUTSIDE_SLOTS = "outside_slots"
    """Its rows lie outside a slot mapping."""
    MAPPING_DIFFERS = "mapping_differs"
    """A slot mapping contradicts the block table."""
    NOT_DURABLE = "not_durable"
    """A block table names a page that is not durable."""
    LENGTH_DIFFERS = "length_differs"
    """Other rows in ``query_start_loc`` than the batch announced, or a negative position."""
    BAD_COUNT = "bad_count"
    """A number of rejected drafts below zero or above the drafts; the nearest possible was taken."""


_REASONS = {
    Tally.REFUSED + overlay_loops.OUTSIDE_TABLE: DeviceFault.OUTSIDE_TABLE,
    Tally.REFUSED + overlay_loops.OUTSIDE_SLOTS: DeviceFault.OUTSIDE_SLOTS,
    Tally.REFUSED + overlay_loops.MAPPING_DIFFERS: DeviceFault.MAPPING_DIFFERS,
    Tally.REFUSED + overlay_loops.NOT_DURABLE: DeviceFault.NOT_DURABLE,
    Tally.REFUSED + LENGTH_DIFFERS: DeviceFault.LENGTH_DIFFERS,
    int(Tally.BAD_COUNT): DeviceFault.BAD_COUNT,
}


class DeviceCounters:
    """Adds what the device counted to `Metrics`, as often as it is asked.

    Args:
        tallies: int64 ``[records, TALLIES]`` on the device.
        layers: layers of all groups together.
        row_bytes: bytes of one token in all layers.

    Attributes:
        faults: what the device found wrong.
        rows_filled: durable rows copied to staging pages, summed over groups, per layer of a group.
    """

    def __init__(self, tallies: Tensor, *, layers: int, row_bytes: int) -> None:
        self._readback = Readback(tallies)
        self._seen = np.zeros(TALLIES, np.int64)
        self._layers, self._row_bytes = layers, row_bytes
        self.faults: Counter[DeviceFault] = Counter()
        self.rows_filled = 0

    def collect(self, metrics: Metrics, *, wait: bool = False) -> None:
        """Add what has arrived since the last call, and ask for what came after it.

        Args:
            metrics: where to add.
            wait: stay until all that the device was told to do so far is counted.
        """
        if wait:
            self._add(self._readback.take(wait=True), metrics)
        self._readback.ask()
        self._add(self._readback.take(wait=wait), metrics)

    def _add(self, tallies: NDArray[np.int64] | None, metrics: Metrics) -> None:
        if tallies is None:
            return
        total = tallies.sum(0)
        more, self._seen = total - self._seen, total
        for fault, name in _REASONS.items():
            if more[fault]:
                self.faults[name] += int(more[fault])
        self.rows_filled += int(more[Tally.ROWS_FILLED])
        metrics.windows += int(more[Tally.WINDOWS])
        metrics.cancelled_windows += int(more[Tally.CANCELLED_WINDOWS])
        metrics.staged += int(more[Tally.STAGED])
        metrics.committed += int(more[Tally.COMMITTED])
        metrics.rejected += int(more[Tally.REJECTED])
        metrics.cancelled += int(more[Tally.CANCELLED])
        metrics.bonus += int(more[Tally.BONUS])
        metrics.flushed += int(more[Tally.FLUSHED])
        staged, written = int(more[Tally.ROWS_STAGED]), int(more[Tally.ROWS_WRITTEN])
        avoided = staged - written - int(more[Tally.ROWS_CANCELLED])
        metrics.rows_staged += staged * self._layers
        metrics.bytes_staged += staged * self._row_bytes
        metrics.rows_written += written * self._layers
        metrics.bytes_written += written * self._row_bytes
        metrics.rows_avoided += avoided * self._layers
        metrics.bytes_avoided += avoided * self._row_bytes
