"""The device overlay does what the host's does, bit for bit, at every stage of a window."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from twins import Spec, Twins

from nwor import Layout


@pytest.mark.parametrize("page_size", [4, 16])
def test_every_acceptance_at_every_page_edge(page_size: int) -> None:
    for k, rejected in ((1, 0), (3, 0), (3, 1), (3, 3)):
        twins = Twins([Spec(page_size)])
        twins.add("a", page_size - 3)
        for _ in range(6):
            twins.step({"a": k}, {"a": rejected})


def test_ragged_batch_with_a_request_without_drafts_between() -> None:
    twins = Twins([Spec(4), Spec(8)])
    for name, length in (("a", 3), ("b", 5), ("c", 8)):
        twins.add(name, length)
    for a, c in itertools.product(range(3), range(2)):
        twins.step({"a": 3, "b": 0, "c": 1}, {"a": a, "c": c}, rows={"b": 2})


LAYOUTS = [layout for layout in Layout if layout != Layout.SLOTS]
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8]
SPECS = st.builds(
    Spec,
    page_size=st.sampled_from([4, 8, 16]),
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from(DTYPES),
    layers=st.integers(1, 2),
    heads=st.integers(1, 2),
    dim=st.sampled_from([3, 4, 8]),
)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_random_lives(data: st.DataObject) -> None:
    """Requests come, verify, skip, are reordered, share pages, finish and abort, in any order."""
    specs = data.draw(st.lists(SPECS, min_size=1, max_size=3))
    shared = None
    if data.draw(st.booleans()):
        specs, shared = [specs[0]] * len(specs), [0] * len(specs)
    twins = Twins(specs, shared=shared, leases=data.draw(st.integers(1, 3)), durable=120)
    names = itertools.count()
    fresh: set[str] = set()
    for _ in range(data.draw(st.integers(2, 9))):
        action = data.draw(
            st.sampled_from(["add", "step", "step", "step", "end", "order", "abort"])
        )
        if action == "add" and len(twins.batch) < 5:
            name = chr(97 + next(names))
            twins.add(name, data.draw(st.integers(0, 12)))
            fresh.add(name)
        elif action == "end" and twins.batch:
            name = data.draw(st.sampled_from(twins.batch))
            fresh.discard(name)
            twins.finish(name)
        elif action == "order":
            twins.batch = data.draw(st.permutations(twins.batch))
        elif action in {"step", "abort"} and twins.batch:
            verify(data, twins, fresh, abort=action == "abort")


def verify(data: st.DataObject, twins: Twins, fresh: set[str], *, abort: bool) -> None:
    """A step of some requests; those in `fresh` have not run yet."""
    drafts, rows, rejected = {}, {}, {}
    for name in twins.batch:
        kind = data.draw(st.sampled_from(["verify", "verify", "decode", "out"]))
        if kind == "verify" and name not in fresh:
            drafts[name] = data.draw(st.integers(1, 3))
            rejected[name] = data.draw(st.integers(0, drafts[name]))
        elif kind != "out":
            rows[name] = data.draw(st.integers(1, 3))
    newcomers = sorted(fresh & set(rows))
    twins.step(drafts, rejected, rows=rows, newcomers=newcomers, abort=abort)
    if not abort:
        fresh.difference_update(newcomers)
