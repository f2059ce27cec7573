"""The overlay on a paged engine of our own: reads, writes, undo, bounds, faults."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_engine import ToyEngine, step

from nwor.store.overlay import OverlayRefusal


@pytest.mark.parametrize(("mover", "loops"), [("torch", "python"), ("numba", "numba")])
@pytest.mark.parametrize("page_sizes", [[8], [8, 8, 8], [4, 8, 16]])
def test_every_acceptance_at_every_page_edge(mover: str, loops: str, page_sizes: list[int]) -> None:
    """Windows that end before, on and after a page edge, and over two pages, k = 1..3."""
    for prompt, k in itertools.product(range(1, 10), range(1, 4)):
        for accepted in range(k + 1):
            engine = ToyEngine(page_sizes, mover=mover, loops=loops)
            engine.add("a", list(range(prompt)))
            for _ in range(3):
                step(engine, {"a": list(range(100, 100 + k))}, {"a": accepted})


def test_ragged_batch_with_a_request_without_drafts_between() -> None:
    engine = ToyEngine([4, 8])
    for name, length in (("a", 3), ("b", 5), ("c", 8)):
        engine.add(name, list(range(length)))
    for accepted in itertools.product(range(4), range(2)):
        drafts = {"a": [50, 51, 52], "b": [], "c": [60]}
        step(engine, drafts, {"a": accepted[0], "c": accepted[1]})


def test_rows_before_the_bonus_row_are_always_kept() -> None:
    engine = ToyEngine([8, 16])
    engine.add("a", [1, 2, 3])
    step(engine, {"a": [50, 51]}, {"a": 0}, extra=2)
    assert len(engine.requests["a"].tokens) == 6


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_random_lives(data: st.DataObject) -> None:
    """Requests come, verify, skip, are reordered, finish and are preempted, in any order."""
    page_sizes = data.draw(st.sampled_from([[4], [4, 4], [4, 8], [8, 4, 4], [16, 4]]))
    engine = ToyEngine(
        page_sizes,
        num_leases=data.draw(st.integers(1, 4)),
        share=data.draw(st.booleans()),
        loops=data.draw(st.sampled_from(["python", "numba"])),
        durable_pages=400,
    )
    names = itertools.count()
    for _ in range(data.draw(st.integers(1, 12))):
        action = data.draw(st.sampled_from(["add", "step", "step", "step", "end", "order", "fail"]))
        if action == "add" and len(engine.batch) < 5:
            engine.add(chr(65 + next(names)), list(range(data.draw(st.integers(1, 12)))))
        elif action == "end" and engine.batch:
            engine.finish(data.draw(st.sampled_from(engine.batch)))
        elif action == "order":
            engine.batch = data.draw(st.permutations(engine.batch))
        elif action in {"step", "fail"} and engine.batch:
            drafts = {
                name: data.draw(st.lists(st.integers(100, 200), max_size=5))
                for name in engine.batch
                if data.draw(st.booleans())
            }
            if action == "fail":
                fail(engine, drafts)
                continue
            accepted = {n: data.draw(st.integers(0, len(d))) for n, d in drafts.items()}
            step(engine, drafts, accepted)
    for name in list(engine.batch):
        engine.finish(name)
    assert engine.overlay.pages.pages_in_use == 0
    engine.audit()


def fail(engine: ToyEngine, drafts: dict[str, list[int]]) -> None:
    """A forward that raises half way: nothing durable, tables as they were.

    Requests that were not staged write through, so only fully staged steps are audited here.
    """
    rows = engine.prepare(drafts)
    before = engine.snapshot()
    window = engine.overlay.begin(engine.verify_batch(drafts))
    with pytest.raises(RuntimeError, match="forward failed"), window:
        for group in range(len(engine.page_sizes)):
            for token, (name, position, drafted) in enumerate(rows):
                if name in window.requests:
                    slot = int(engine.slots[group][token])
                    engine.write(group, slot, name, position, drafted)
        raise RuntimeError("forward failed")
    for now, then in zip(engine.snapshot(), before, strict=True):
        assert torch.equal(now, then)
    engine.audit()


def test_steady_state_copies_nothing_into_staging_pages() -> None:
    """After the first window the staging page is current; a step without drafts costs one row."""
    engine = ToyEngine([16])
    engine.add("a", list(range(5)))
    moved: list[int] = []
    engine.overlay.effects.observers.append(lambda source, target: moved.append(len(source)))
    step(engine, {"a": [50, 51]}, {"a": 1})
    assert moved == [5, 2]
    step(engine, {"a": [52, 53]}, {"a": 0})
    assert moved == [5, 2, 1]
    step(engine, {"a": []}, {})
    step(engine, {"a": [54]}, {"a": 1})
    assert moved == [5, 2, 1, 1, 2]


def test_more_requests_than_leases_are_written_through_and_counted() -> None:
    engine = ToyEngine([8], num_leases=2)
    for name in "abc":
        engine.add(name, [1, 2])
    drafts = {name: [50, 51] for name in "abc"}
    rows = engine.prepare(drafts)
    window = engine.overlay.begin(engine.verify_batch(drafts))
    assert window.requests == ("a", "b")
    engine.forward(rows)
    window.commit([1, 1])
    assert engine.overlay.refused == {OverlayRefusal.OUT_OF_STAGING_PAGES: 1}
    assert engine.overlay.metrics.flushed == 2


def test_a_request_that_sits_out_lends_its_pages() -> None:
    engine = ToyEngine([8], num_leases=1)
    for name in "ab":
        engine.add(name, [1, 2, 3])
    for name in "abab":
        step(engine, {name: [50, 51]}, {name: 1})
    assert not engine.overlay.refused
    assert engine.overlay.pages.requests == ("b",)


def test_window_over_more_than_two_pages_is_written_through() -> None:
    engine = ToyEngine([4, 32])
    engine.add("a", [1, 2, 3])
    drafts = {"a": list(range(50, 56))}
    rows = engine.prepare(drafts)
    with engine.overlay.begin(engine.verify_batch(drafts)) as window:
        assert window.requests == ()
        engine.forward(rows)
        window.commit([])
    assert engine.overlay.refused == {OverlayRefusal.WINDOW_OVER_TWO_PAGES: 1}
    assert engine.overlay.metrics.windows == 0


def test_a_page_that_changed_owner_is_filled_in_again() -> None:
    """Preempted, then resumed on other pages: what the staging page showed is not trusted."""
    engine = ToyEngine([8])
    engine.add("a", [1, 2, 3])
    step(engine, {"a": [50]}, {"a": 1})
    tokens = engine.requests["a"].tokens
    engine.finish("a")
    engine.add("b", [9, 9, 9, 9])
    engine.add("a", [*tokens, 4])
    step(engine, {"a": [51], "b": [52]}, {"a": 0, "b": 1})


@pytest.mark.parametrize("loops", ["python", "numba"])
def test_another_page_at_the_same_place_is_not_trusted(loops: str) -> None:
    """As many rows at the same place, but other ones on another page; nobody told the overlay."""
    engine = ToyEngine([8], loops=loops)
    engine.add("a", [1, 2, 3])
    step(engine, {"a": [50]}, {"a": 1})
    before = engine.requests.pop("a")
    engine.batch.remove("a")
    engine.add("a", [token + 1 for token in before.tokens])
    assert engine.requests["a"].pages != before.pages
    step(engine, {"a": [51]}, {"a": 0})


def test_metrics_reconcile() -> None:
    engine = ToyEngine([8, 8], layers=3)
    for name in "ab":
        engine.add(name, [1, 2])
    step(engine, {"a": [50, 51, 52], "b": [53]}, {"a": 1, "b": 1})
    step(engine, {"a": [50, 51, 52], "b": []}, {"a": 0})
    rows = engine.prepare({"a": [60]})
    engine.overlay.begin(engine.verify_batch({"a": [60]})).abort()
    del rows
    metrics = engine.overlay.metrics
    assert (metrics.windows, metrics.cancelled_windows) == (3, 1)
    assert (metrics.staged, metrics.committed, metrics.rejected) == (8, 2, 5)
    assert metrics.cancelled == 1
    assert metrics.bonus == 3
    layers = 2 * 3
    row_bytes = 2 * (2 * 4 * 4)
    assert metrics.rows_written == (2 + 2 + 1) * layers
    assert metrics.bytes_written == metrics.rows_written * row_bytes
    assert metrics.rows_avoided == 5 * layers


@pytest.mark.parametrize("loops", ["python", "numba"])
def test_a_rehearsal_leaves_no_trace(loops: str) -> None:
    engine = ToyEngine([8, 4], loops=loops)
    before = engine.snapshot()
    engine.overlay.rehearse()
    assert all(torch.equal(a, b) for a, b in zip(engine.snapshot(), before, strict=True))
    assert engine.overlay.pages.pages_in_use == 0
    assert engine.overlay.metrics.windows == 0
    engine.add("a", [1, 2, 3])
    step(engine, {"a": [50, 51]}, {"a": 1})


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_newcomers_read_the_page_whose_last_row_is_staged(end: str) -> None:
    """An engine may share a page in the step that fills it: without this, a row is missing."""
    engine = ToyEngine([4, 8])
    engine.add("a", list(range(7)))
    drafts = {"a": [5, 6]}
    engine.prepare(drafts)
    shared = [engine.requests["a"].pages[0][1], engine.requests["a"].pages[1][0]]
    for table, page in zip(engine.tables, shared, strict=True):
        table[3, 1] = page
    before = engine.snapshot()
    window = engine.overlay.begin(engine.verify_batch(drafts), np.array([3]))
    for table, column in zip(engine.tables, (1, 0), strict=True):
        assert table[3, 1] == table[0, column] >= engine.first_staging
        assert table[3, 0] == 0
    window.commit([1]) if end == "commit" else window.abort()
    for then, now in zip(before, engine.snapshot(), strict=True):
        assert torch.equal(then, now)
