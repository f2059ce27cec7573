"""The device overlay does what the host's does, bit for bit, at every stage of a window."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from twins import Spec, Twins

from nwor import Layout

LAYOUTS = [layout for layout in Layout if layout != Layout.SLOTS]
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8]


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


@pytest.mark.parametrize("page_size", [4, 16, 32, 128])
@pytest.mark.parametrize(
    ("layout", "dtype"), list(zip(LAYOUTS, itertools.cycle(DTYPES), strict=False)), ids=str
)
def test_layouts_dtypes_and_page_sizes(layout: Layout, dtype: torch.dtype, page_size: int) -> None:
    """First window, windows over a page edge, steady state; beside a group that differs in all."""
    twins = Twins([Spec(page_size, layout, dtype, layers=1, heads=2, dim=5), Spec(8)], durable=80)
    twins.add("a", page_size - 4)
    twins.add("b", 3)
    for rejected in (0, 2, 1):
        twins.step({"a": 2, "b": 3}, {"a": rejected, "b": 2})


@pytest.mark.parametrize("page_sizes", [(4,), (8, 4), (16, 4, 8)])
def test_newcomers_read_the_page_whose_last_row_is_staged(page_sizes: tuple[int, ...]) -> None:
    """An engine may share a page in the step that fills it, with several, in any batch order."""
    for computed, abort, order in itertools.product((15, 16, 18), (False, True), ("abc", "bca")):
        twins = Twins([Spec(size) for size in page_sizes], lines=4)
        twins.add("a", computed)
        twins.join("b", "a")
        twins.join("c", "a")
        twins.batch = list(order)
        rows = {"b": 1, "c": 2}
        twins.step({"a": 3}, {"a": 1}, rows=rows, newcomers="bc", abort=abort)
        assert twins.edited_newcomers == (computed == 15)
        twins.step({"a": 2, "b": 1}, {"a": 1, "b": 0}, rows={"c": 1})


def test_steady_state_copies_nothing_into_staging_pages() -> None:
    """After the first window the staging page is current; a step without drafts costs its rows."""
    twins = Twins([Spec(16), Spec(16)])
    twins.add("a", 5)
    filled = []
    for drafts, rejected, rows in ((2, 1, 0), (2, 2, 0), (0, 0, 1), (1, 0, 0), (3, 3, 0)):
        twins.step({"a": drafts}, {"a": rejected}, rows={"a": rows} if rows else {})
        filled.append(twins.device.rows_filled)
    assert filled == [10, 10, 10, 12, 12]


def test_more_requests_than_leases_and_one_that_sits_out() -> None:
    twins = Twins([Spec(8)], leases=2)
    for name in "abc":
        twins.add(name, 3)
    for names in ("abc", "bc", "ca", "abc"):
        twins.step(dict.fromkeys(names, 2), dict.fromkeys(names, 1))
    assert sum(twins.device.refused.values()) == 2


def test_a_lease_that_changed_hands_is_not_trusted() -> None:
    """The same logical page over the same durable page, and yet another request's rows."""
    twins = Twins([Spec(8)], leases=1, durable=9)
    twins.add("a", 3)
    twins.step({"a": 2}, {"a": 0})
    twins.finish("a")
    twins.free.sort()  # the page comes back at once
    twins.add("b", 7)  # more rows than are shown: nothing but the holder tells them apart
    twins.scramble(twins.requests["b"].pages[0][0])
    twins.step({"b": 2}, {"b": 1})
    assert twins.device.rows_filled == 3 + 7


def test_another_page_at_the_same_place_is_not_trusted() -> None:
    """A request that goes on elsewhere without being released, as after a copy on write."""
    twins = Twins([Spec(8)])
    twins.add("a", 3)
    twins.step({"a": 2}, {"a": 0})
    twins.requests["a"].pages[0][0] = twins.free.pop()
    twins.step({"a": 2}, {"a": 0})
    twins.requests["a"].computed -= 2  # rolled back: more is shown than is durable
    twins.step({"a": 2}, {"a": 0})
    assert twins.device.rows_filled == 3 + 6 + 7


def test_a_page_that_comes_back_at_another_place() -> None:
    """The same durable page, two pages further on, with more rows than are shown."""
    twins = Twins([Spec(4)])
    twins.add("a", 1)
    twins.step({"a": 1}, {"a": 1})
    pages = twins.requests["a"].pages[0]
    pages[:] = [twins.free.pop(), twins.free.pop(), pages[0]]
    twins.requests["a"].computed = 11
    twins.scramble(pages[2])
    twins.step({"a": 1}, {"a": 1})
    assert twins.device.rows_filled == 1 + 3


def test_rows_before_the_bonus_row_are_always_kept() -> None:
    """A prefill chunk that ends in the same step; the window takes several steps of the loop."""
    twins = Twins([Spec(16)], max_drafts=1)
    twins.add("a", 3)
    twins.step({"a": 2}, {"a": 2}, rows={"a": 9})
    assert twins.requests["a"].computed == 10


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
@settings(max_examples=60, deadline=None)
def test_random_lives(data: st.DataObject) -> None:
    """Requests come, verify, skip, are reordered, share pages, finish and abort, in any order."""
    specs = data.draw(st.lists(SPECS, min_size=1, max_size=3))
    shared = None
    if data.draw(st.booleans()):
        specs, shared = [specs[0]] * len(specs), [0] * len(specs)
    twins = Twins(specs, shared=shared, leases=data.draw(st.integers(1, 3)), durable=160)
    names = iter("abcdefghijkl")
    for _ in range(data.draw(st.integers(2, 9))):
        actions = ["add", "step", "step", "step", "share", "end", "order", "abort"]
        action = data.draw(st.sampled_from(actions))
        if action == "add" and len(twins.batch) < 5:
            twins.add(next(names), data.draw(st.integers(0, 12)))
        elif not twins.batch:
            continue
        elif action == "share" and len(twins.batch) < 5:
            new, base = next(names), data.draw(st.sampled_from(twins.batch))
            twins.join(new, base)
            verify(data, twins, new)
        elif action == "end":
            twins.finish(data.draw(st.sampled_from(twins.batch)))
        elif action == "order":
            twins.batch = data.draw(st.permutations(twins.batch))
        elif action in {"step", "abort"}:
            verify(data, twins, abort=action == "abort")


def verify(
    data: st.DataObject, twins: Twins, newcomer: str | None = None, *, abort: bool = False
) -> None:
    """A step of some requests; a newcomer has no drafts."""
    drafts, rows, rejected = {}, {}, {}
    for name in twins.batch:
        kind = data.draw(st.sampled_from(["verify", "verify", "decode", "out"]))
        if name == newcomer:
            rows[name] = data.draw(st.integers(1, 3))
        elif kind == "verify":
            drafts[name] = data.draw(st.integers(1, 3))
            rejected[name] = data.draw(st.integers(0, drafts[name]))
        elif kind == "decode":
            rows[name] = data.draw(st.integers(1, 3))
    newcomers = [newcomer] if newcomer else []
    twins.step(drafts, rejected, rows=rows, newcomers=newcomers, abort=abort)
