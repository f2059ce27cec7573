"""What a window costs on the host: four launches, one upload; nothing is read, nothing is awaited."""

from __future__ import annotations

import pytest
import torch
from guards import COPY, READING, HostWaits, host_work
from twins import DEVICE, Spec, Twins


def prepared(requests: int = 1, k: int = 1, specs: tuple[Spec, ...] = (Spec(),)) -> Twins:
    """An engine about to open a window, after one that warmed everything up."""
    twins = Twins(specs, leases=requests, lines=requests, durable=8 * requests * len(specs) + 8)
    names = [f"r{at}" for at in range(requests)]
    for name in names:
        twins.add(name, 5)
    drafts, rejected = dict.fromkeys(names, k), dict.fromkeys(names, 1)
    twins.step(drafts, rejected)
    twins.prepare(dict.fromkeys(names, k + 1))
    twins.drafts, twins.rejected = drafts, torch.ones(requests, dtype=torch.int32, device=DEVICE)
    return twins


def open_theirs(twins: Twins):
    """The device's window alone: the host's reads what it likes."""
    twins.begin(twins.drafts)
    batch = twins.their_window.batch
    twins.their_window.abort()
    return batch


@pytest.mark.parametrize("layers", [1, 5])
@pytest.mark.parametrize("requests", [1, 3])
@pytest.mark.parametrize("k", [1, 3])
def test_four_launches_and_one_upload(layers: int, requests: int, k: int) -> None:
    """Whatever the number of layers, groups, requests and drafts, and whatever is accepted."""
    twins = prepared(requests, k, (Spec(layers=layers), Spec(8, layers=layers)))
    batch = open_theirs(twins)
    with host_work() as work:
        window = twins.device.begin(batch)
        assert [name for name, _ in work.launches] == ["begin_kernel", "fill_kernel"]
        window.commit(twins.rejected)
    assert work.launches == [
        ("begin_kernel", (requests,)),
        ("fill_kernel", (requests, 4 * layers)),
        ("close_kernel", (requests,)),
        ("move_rows_kernel", (requests * (k + 1), 4 * layers)),
    ]
    assert work.ops == [COPY]


def test_an_abort_is_one_launch() -> None:
    twins = prepared(2)
    batch = open_theirs(twins)
    with host_work() as work:
        twins.device.begin(batch).abort()
    assert [name for name, _ in work.launches] == ["begin_kernel", "fill_kernel", "close_kernel"]
    assert work.ops == [COPY]


def test_nothing_staged_launches_nothing() -> None:
    twins = prepared(2)
    batch = open_theirs(twins)
    twins.device.broken = True
    with host_work() as work:
        twins.device.begin(batch).commit(twins.rejected)
        twins.device.begin(batch).abort()
    assert (work.launches, work.ops) == ([], [])


@pytest.mark.parametrize("where", ["begin", "move"])
@pytest.mark.parametrize("read", READING)
def test_the_guard_notices(monkeypatch, read: str, where: str) -> None:
    """The tests above can fail: a read beside any of the launches is an error."""
    twins = prepared()
    batch = open_theirs(twins)
    launches = twins.device.launches
    original = getattr(launches, where)

    def reading(*args):
        original(*args)
        READING[read](twins.device.state.saved[0, 0])

    monkeypatch.setattr(launches, where, reading)
    with host_work(), pytest.raises(HostWaits):
        twins.device.begin(batch).commit(twins.rejected)
