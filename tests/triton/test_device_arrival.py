"""Between host and device: uploads that are still read, counters that have not arrived."""

from __future__ import annotations

import torch
from steps import batch_of, engine, rejecting
from twins import DEVICE

from nwor.store.device_transfer import RING, UploadRing


def test_counters_arrive_when_they_arrive_and_only_once() -> None:
    twins = engine()
    for _ in range(3):
        twins.device.begin(batch_of(twins)).commit(rejecting(twins, 1, 0))
    assert twins.device.metrics.windows == 0
    for _ in range(3):
        twins.device.collect(wait=True)
        metrics = twins.device.metrics
        assert (metrics.windows, metrics.staged, metrics.rejected) == (3, 15, 3)
        assert metrics.staged == metrics.committed + metrics.rejected + metrics.cancelled
        assert metrics.rows_staged == metrics.rows_written + metrics.rows_avoided
    twins.device.begin(batch_of(twins)).abort()
    twins.device.collect(wait=True)
    assert (metrics.windows, metrics.cancelled_windows, metrics.cancelled) == (4, 1, 5)
    assert metrics.rows_avoided == 3 * 4
    assert sum(metrics.fallbacks.values()) == metrics.cancelled_windows


def test_an_upload_under_way_is_not_overwritten() -> None:
    """Buffers take turns: what the device may still have to read stays as it was sent."""
    target = torch.zeros(2, 3, dtype=torch.int32, device=DEVICE)
    ring = UploadRing(target)
    sources = []
    for number in range(2 * RING):
        buffer = ring.open()
        buffer[:] = number
        sources.append(buffer)
        ring.send()
        assert (target == number).all()
    assert len({source.ctypes.data for source in sources}) == RING
    assert all(sources[at] is sources[at + RING] for at in range(RING))


class SlowEvent:
    """A CUDA event that has not happened until somebody waits for it."""

    def __init__(self) -> None:
        self.recorded, self.happened, self.waits = False, True, 0

    def record(self) -> None:
        self.recorded, self.happened = True, False

    def query(self) -> bool:
        return self.happened

    def synchronize(self) -> None:
        self.waits += 1
        self.happened = True


def test_a_fifth_upload_waits_for_the_first() -> None:
    ring = UploadRing(torch.zeros(2, dtype=torch.int32, device=DEVICE))
    ring._cuda, ring._read = True, [SlowEvent() for _ in range(RING)]
    for _ in range(RING):
        ring.open()
        ring.send()
    assert ring.waits == 0
    ring.open()
    assert ring.waits == 1
    assert [event.waits for event in ring._read] == [1, 0, 0, 0]


def test_counters_that_have_not_arrived_are_not_waited_for() -> None:
    twins = engine()
    event = twins.device._counters._readback._arrived = SlowEvent()
    twins.device.begin(batch_of(twins)).commit(rejecting(twins, 1, 0))
    for _ in range(2):
        twins.device.collect()
        assert (event.waits, twins.device.metrics.windows) == (0, 0)
    event.happened = True
    twins.device.collect()
    assert (event.waits, twins.device.metrics.windows) == (0, 1)
    twins.device.begin(batch_of(twins)).commit(rejecting(twins, 1, 0))
    twins.device.collect(wait=True)
    assert event.waits == 1
    assert twins.device.metrics.windows == 2
