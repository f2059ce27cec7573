"""The device overlay on its own: what it finds wrong, what it refuses."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from steps import batch_of, engine, everything, rejecting, same
from twins import DEVICE, MAX_TOKENS, Spec, Twins

from nwor.errors import (
    InputError,
    LayoutError,
    RowCountError,
    StaleWindowError,
    WindowOpenError,
)
from nwor.store.device_overlay import DeviceBatch, DeviceFault, DeviceGroup, DeviceOverlay
from nwor.store.overlay import OverlayRefusal
from nwor.testing import Snapshot, same_bits


class TestFaults:
    """Where the host's overlay raises, the device leaves the request alone, in all groups."""

    def wrong(self, twins: Twins, fault: DeviceFault) -> DeviceBatch:
        if fault == DeviceFault.MAPPING_DIFFERS:
            twins.their_slots[1][1] += 1
        elif fault == DeviceFault.NOT_DURABLE:
            twins.their_tables[1][0, 0] = twins.first_page
            twins.their_slots[1][:2] = twins.first_page * 8 + torch.tensor([6, 7])
        elif fault == DeviceFault.OUTSIDE_TABLE:
            twins.positions[:3] += 4 * MAX_TOKENS
        elif fault == DeviceFault.LENGTH_DIFFERS:
            twins.positions[0] = -1
        return batch_of(twins)

    @pytest.mark.parametrize("fault", ["mapping_differs", "not_durable", "outside_table"])
    def test_one_request_is_wrong_in_one_group(self, fault: str) -> None:
        twins = engine()
        batch = self.wrong(twins, DeviceFault(fault))
        before, stores = everything(twins), [Snapshot.of(rows) for rows in twins.copies]
        window = twins.device.begin(batch)
        opened = everything(twins)
        for group in range(2):
            assert torch.equal(opened[group][0], before[group][0])
            assert opened[group][1, 0] >= twins.first_page
            assert torch.equal(opened[2 + group][:3], before[2 + group][:3])
            assert (opened[2 + group][3:7] >= twins.first_page * twins.specs[group].page_size).all()
        window.commit(rejecting(twins, 0, 1))
        after = everything(twins)
        assert same(before[:4], after[:4])
        assert not same(before[4:], after[4:])  # the other request's rows
        for pages, rows, then in zip(twins.requests["a"].pages, twins.copies, stores, strict=True):
            assert same_bits(rows.key[:, pages], then.key[:, pages])
            assert same_bits(rows.value[:, pages], then.value[:, pages])
        twins.device.collect(wait=True)
        assert twins.device.faults == {DeviceFault(fault): 1}
        metrics = twins.device.metrics
        assert (metrics.flushed, metrics.staged, metrics.committed, metrics.bonus) == (2, 3, 2, 1)
        assert metrics.rows_written == 3 * 2 * len(twins.specs)

    def test_rows_that_were_not_announced(self) -> None:
        for change in ({"query_lens": np.array([4, 4])}, {}):
            twins = engine()
            batch = batch_of(twins, **change)
            if not change:
                twins.positions[0] = -1
            before = everything(twins)
            twins.device.begin(batch).abort()
            assert same(before[:4], everything(twins)[:4])
            twins.device.collect(wait=True)
            assert twins.device.faults == {DeviceFault.LENGTH_DIFFERS: 1}

    def test_slots_that_end_early(self) -> None:
        twins = engine(Spec(4))
        group = twins.device.groups[0]
        device = DeviceOverlay(
            [DeviceGroup(group.table, group.slots[:5], group.rows)],
            first_page=twins.first_page,
            num_leases=3,
            max_requests=6,
            max_tokens=20,
            max_drafts=3,
        )
        before = everything(twins)
        device.begin(batch_of(twins)).abort()
        assert same(before[:2], everything(twins)[:2])
        device.collect(wait=True)
        assert device.faults == {DeviceFault.OUTSIDE_SLOTS: 1}

    @pytest.mark.parametrize(("wrong", "taken"), [(-1, 0), (4, 3), (2**31 - 1, 3), (-(2**31), 0)])
    def test_impossible_counts_become_the_nearest_possible(self, wrong: int, taken: int) -> None:
        twins, right = engine(), engine()
        for side, count in ((twins, wrong), (right, taken)):
            side.device.begin(batch_of(side)).commit(rejecting(side, 1, count))
            side.device.collect(wait=True)
        assert same(everything(twins), everything(right))
        assert twins.device.faults == {DeviceFault.BAD_COUNT: 1}
        assert twins.device.metrics == right.device.metrics


class TestRefusals:
    def test_windows_that_may_reach_three_pages(self) -> None:
        for drafts, rows in ((4, 5), (2, 6)):
            self.refused(drafts, rows)

    def refused(self, drafts: int, rows: int) -> None:
        twins = engine(Spec(4), drafts={"a": drafts, "b": 3})
        twins.prepare({"a": rows, "b": 4})
        before = everything(twins)
        window = twins.device.begin(batch_of(twins))
        assert window.requests == ("b",)
        window.commit(rejecting(twins, 0, 0))
        assert same(before[:2], everything(twins)[:2])
        assert twins.device.refused == {OverlayRefusal.WINDOW_OVER_TWO_PAGES: 1}
        assert twins.device.metrics.flushed == drafts

    def test_begin_while_open(self) -> None:
        twins = engine()
        window = twins.device.begin(batch_of(twins))
        opened = everything(twins)
        for attempt in (
            lambda: twins.device.begin(batch_of(twins)),
            lambda: twins.device.release("a"),
            twins.device.rehearse,
        ):
            with pytest.raises(WindowOpenError):
                attempt()
        assert same(opened, everything(twins))
        assert twins.device.window is window

    def test_closed_windows(self) -> None:
        twins = engine()
        with twins.device.begin(batch_of(twins)) as window:
            pass
        assert twins.device.window is None
        for again in (window.abort, lambda: window.commit(rejecting(twins, 0, 0))):
            with pytest.raises(StaleWindowError):
                again()

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            (torch.zeros(6), "num_rejected must be a dense torch.int32"),
            (torch.zeros(12, dtype=torch.int32)[::2], "dense"),
            (torch.zeros(6, dtype=torch.int32, device="meta"), "on meta"),
            (torch.zeros(1, dtype=torch.int32, device=DEVICE), "has 1 rows, batch row 1 verifies"),
        ],
    )
    def test_counts_of_another_kind(self, wrong: torch.Tensor, message: str) -> None:
        twins = engine()
        window = twins.device.begin(batch_of(twins))
        opened = everything(twins)
        with pytest.raises(InputError, match=message):
            window.commit(wrong)
        assert window.is_open
        assert same(opened, everything(twins))
        window.commit(rejecting(twins, 0, 0))

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"num_drafts": np.array([0, 3])}, RowCountError, "at least one draft"),
            ({"query_lens": np.array([2, 4])}, RowCountError, "one row more than drafts"),
            ({"query_lens": np.array([2])}, RowCountError, "2 requests verify"),
            ({"table_rows": np.array([0, -1])}, RowCountError, "must not be negative"),
            ({"newcomers": np.array([-1])}, RowCountError, "must not be negative"),
            ({"table_rows": np.array([0, 6])}, RowCountError, "batch row 6 of 2, there are 6"),
            ({"newcomers": np.array([6])}, RowCountError, "batch row 6 of 3, there are 6"),
            ({"query_start_loc": torch.zeros(2, dtype=torch.int32)}, RowCountError, "there are 1"),
            ({"query_lens": np.array([9, MAX_TOKENS])}, RowCountError, "was built for 400"),
            ({"positions": torch.zeros(20)}, InputError, "positions must be a dense torch.int64"),
            ({"query_start_loc": torch.zeros(7)}, InputError, "must be a dense torch.int32"),
            ({"positions": torch.zeros(9, dtype=torch.int64, device="meta")}, InputError, "meta"),
        ],
    )
    def test_batches(self, change, error, message) -> None:
        twins = engine()
        before = everything(twins)
        with pytest.raises(error, match=message):
            twins.device.begin(batch_of(twins, **change))
        assert same(before, everything(twins))
        twins.device.begin(batch_of(twins)).abort()

    def test_groups(self) -> None:
        twins = engine(Spec(4))
        group = twins.device.groups[0]
        meta = DeviceGroup(group.table.to("meta"), group.slots, group.rows)
        rest = {"num_leases": 3, "max_requests": 6, "max_tokens": 9, "max_drafts": 3}
        with pytest.raises(InputError, match=r"groups on one device, got \['cpu.*', 'meta'\]|cuda"):
            DeviceOverlay([meta], first_page=8, **rest)
        with pytest.raises(InputError, match="at least one"):
            DeviceOverlay([], first_page=8, **rest)
        with pytest.raises(LayoutError, match=r"staging needs pages 62\.\.67"):
            DeviceOverlay(twins.device.groups, first_page=62, **rest)
        for name in ("max_requests", "max_tokens", "max_drafts"):
            with pytest.raises(InputError, match=f"{name} must be positive, got 0"):
                DeviceOverlay(twins.device.groups, first_page=60, **rest | {name: 0})
        for table, slots in (
            (group.table.long(), group.slots),
            (group.table, group.slots.int()),
            (group.table[:, ::2], group.slots),
            (group.table, group.slots[::2]),
            (group.table[0], group.slots),
        ):
            with pytest.raises(LayoutError):
                DeviceGroup(table, slots, group.rows)


def test_a_rehearsal_compiles_and_touches_nothing() -> None:
    twins = engine()
    before = everything(twins)
    twins.device.rehearse()
    assert same(before, everything(twins))
    twins.device.collect(wait=True)
    assert twins.device.metrics.windows == 0
    assert (twins.device.state.notes == -1).all()


@pytest.mark.skipif(DEVICE.type != "cpu", reason="about hosts without a GPU")
@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        ("", "on a GPU, these are on the CPU"),
        ("import sys; sys.modules['triton'] = None", r"needs triton: pip install 'nwor\[triton\]'"),
    ],
)
def test_without_the_interpreter_or_triton(monkeypatch, prepare: str, message: str) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    program = f"""
{prepare}
import torch
from nwor import Layout
from nwor.store.device_overlay import DeviceGroup, DeviceOverlay
from nwor.testing import make_store
table, slots = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
DeviceOverlay([DeviceGroup(table, slots, (make_store(Layout.NHD),))], first_page=1, num_leases=1,
              max_requests=1, max_tokens=1, max_drafts=1)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    with pytest.raises(InputError, match=message):
        raise InputError(done.stderr.splitlines()[-1])
