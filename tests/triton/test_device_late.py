"""The host runs ahead of the device, as under asynchronous scheduling; the outcome is the same."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from guards import LateDevice, late_device
from twins import DEVICE, Spec, Twins, whole_bytes

from nwor.store.device_overlay import DeviceBatch
from nwor.testing import random_rows

STEPS = (
    # drafts of each verifying request, who ends before the step, who comes
    ({"a": 2, "b": 3}, "", ""),
    ({"a": 3, "b": 1}, "", ""),
    ({"b": 2, "c": 1}, "a", "c"),  # c takes a's lease, and a's pages soon after
    ({"c": 3, "d": 2}, "b", "d"),
    ({"d": 1, "c": 2}, "", ""),
    ({"e": 3, "d": 3}, "c", "e"),
    ({"e": 1, "d": 2}, "", ""),
)


def write(twins: Twins, seed: int) -> None:
    """The engine's writer: reads the slot mappings when the device gets there."""
    for group, spec in enumerate(twins.specs):
        for token, slot in enumerate(twins.their_slots[group].tolist()):
            if slot >= 0:
                page, row = divmod(slot, spec.page_size)
                for part, view in enumerate((twins.copies[group].key, twins.copies[group].value)):
                    data = random_rows(
                        spec.layers, 1, spec.dim, spec.dtype, seed * 99 + token + part
                    )
                    view[:, page, row] = data.to(view.device)


def run(late: LateDevice | None, behind: int) -> tuple[list[torch.Tensor], dict]:
    """All steps, the device `behind` steps late; its stores and counters at the end."""
    twins = Twins([Spec(4, layers=1), Spec(8, layers=1)], leases=2, durable=14)
    do = late.do if late else lambda work, *args: work(*args)
    twins.publish = lambda theirs, ours: do(theirs.copy_, ours.clone())
    for name in "ab":
        twins.add(name, 5)
    sizes = []
    for number, (drafts, ends, comes) in enumerate(STEPS):
        for name in ends:
            twins.finish(name)
        for name in comes:
            twins.add(name, 2)
        twins.prepare({name: k + 1 for name, k in drafts.items()})
        names = list(drafts)
        window = twins.device.begin(
            DeviceBatch(
                names,
                np.array([twins.lines[name] for name in names]),
                np.array([twins.counts[name] for name in names]),
                np.array([drafts[name] for name in names]),
                twins.query_start_loc,
                twins.positions,
            )
        )
        do(partial(write, twins, number))
        rejected = torch.zeros(6, dtype=torch.int32, device=DEVICE)
        do(rejected.fill_, 1)  # the sampler's answer comes with the forward, not before
        window.commit(rejected)
        twins.advance(dict.fromkeys(names, 1))
        if late:
            sizes = [*sizes, len(late.queue) - sum(sizes)]
            while len(sizes) > behind:
                late.catch_up(sum(sizes[1:]))
                sizes = sizes[1:]
    if late:
        late.catch_up()
    twins.device.collect(wait=True)
    stores = [whole_bytes(rows) for rows in twins.copies]
    return [*stores, *twins.their_tables, *twins.their_slots], twins.device.metrics.snapshot()


@pytest.fixture(scope="module")
def prompt() -> tuple[list[torch.Tensor], dict]:
    """What a device that keeps up with the host ends with."""
    return run(None, 0)


@pytest.mark.parametrize("behind", [1, 3])
def test_a_device_that_is_steps_behind_ends_up_the_same(prompt, behind: int) -> None:
    """Leases and pages have changed hands, uploads were overwritten, before it gets there."""
    state, counters = prompt
    with late_device() as late:
        later, late_counters = run(late, behind)
    assert late_counters == counters
    assert counters["windows"] == len(STEPS)
    for now, then in zip(later, state, strict=True):
        assert torch.equal(now, then)


def test_a_device_more_steps_behind_than_there_are_buffers_would_not(prompt) -> None:
    """The test above can fail: a fifth upload overwrites the first (the real ring waits for it)."""
    with late_device() as late:
        later, _ = run(late, 4)
    assert not all(torch.equal(now, then) for now, then in zip(later, prompt[0], strict=True))
