"""Movers that fail, interrupts in begin and commit: rows home or not at all, tables restored."""

from __future__ import annotations

import pytest
import torch
from toy_engine import ToyEngine, step

from nwor.errors import CommitError
from nwor.metrics import FallbackReason
from nwor.store.overlay import OverlayRefusal
from nwor.testing import Doing, everything, fail_at, first_rows, movers


@pytest.mark.parametrize("doing", [None, first_rows(), first_rows(1), everything])
def test_a_mover_that_fails_is_repaired(doing: Doing | None) -> None:
    engine = ToyEngine([8, 8])
    engine.add("a", [1, 2, 3])
    with fail_at(*movers(engine.overlay), call=None, error=OSError("half way"), doing=doing):
        step(engine, {"a": [50, 51]}, {"a": 1})
    assert engine.overlay.metrics.fallbacks[FallbackReason.MOVER_FAULT] == 2
    assert not engine.overlay.effects.broken


def test_commit_that_fails_for_good_undoes_the_edits_and_stages_no_more() -> None:
    engine = ToyEngine([8])
    engine.add("a", [1, 2, 3])
    drafts = {"a": [50]}
    rows = engine.prepare(drafts)
    before = engine.snapshot()
    window = engine.overlay.begin(engine.verify_batch(drafts))
    engine.forward(rows)
    broken = [*movers(engine.overlay), *movers(engine.overlay, plain=True)]
    with (
        fail_at(*broken, call=None, error=OSError("disk on fire")),
        pytest.raises(CommitError, match="disk on fire"),
    ):
        window.commit([1])
    assert engine.overlay.window is None
    for now, then in zip(engine.snapshot(), before, strict=True):
        assert torch.equal(now, then)
    assert engine.overlay.begin(engine.verify_batch(drafts)).requests == ()
    assert engine.overlay.refused == {OverlayRefusal.OVERLAY_BROKEN: 1}


@pytest.mark.parametrize("at", [1, 2])
def test_an_interrupted_commit_is_finished_before_the_interrupt_goes_on(at: int) -> None:
    """Two storages, interrupted in the first or in the second: all rows home, edits undone."""
    engine = ToyEngine([8, 8], share=False)
    engine.add("a", [1, 2, 3])
    drafts = {"a": [50, 51, 52]}
    rows = engine.prepare(drafts)
    before = engine.snapshot()
    window = engine.overlay.begin(engine.verify_batch(drafts))
    engine.forward(rows)
    places = movers(engine.overlay)
    assert len(places) == 2
    with (
        fail_at(*places, call=at, error=KeyboardInterrupt, doing=first_rows()),
        pytest.raises(KeyboardInterrupt),
    ):
        window.commit([2])
    assert all(torch.equal(a, b) for a, b in zip(engine.snapshot(), before, strict=True))
    engine.accept(drafts, {"a": 2}, rows)
    engine.audit()
    assert not window.is_open
    assert not engine.overlay.effects.broken
    assert engine.overlay.metrics.committed == 2
    step(engine, {"a": [60, 61]}, {"a": 1})


def test_a_commit_interrupted_twice_restores_the_tables_and_stages_no_more() -> None:
    engine = ToyEngine([8, 8], share=False)
    engine.add("a", [1, 2, 3])
    drafts = {"a": [50]}
    rows = engine.prepare(drafts)
    before = engine.snapshot()
    window = engine.overlay.begin(engine.verify_batch(drafts))
    engine.forward(rows)
    with (
        fail_at(*movers(engine.overlay), call={2, 3}, error=KeyboardInterrupt, doing=first_rows()),
        pytest.raises(KeyboardInterrupt),
    ):
        window.commit([1])
    assert all(torch.equal(a, b) for a, b in zip(engine.snapshot(), before, strict=True))
    assert not window.is_open
    assert engine.overlay.effects.broken
    assert engine.overlay.begin(engine.verify_batch(drafts)).requests == ()


@pytest.mark.parametrize("doing", [None, everything])
@pytest.mark.parametrize("part", ["fill_in", "point", "note"])
def test_an_interrupted_begin_leaves_no_edit_and_no_lease(part: str, doing: Doing | None) -> None:
    engine = ToyEngine([8, 8])
    engine.add("a", [1, 2, 3])
    drafts = {"a": [50, 51]}
    engine.prepare(drafts)
    before = engine.snapshot()
    with (
        fail_at((engine.overlay.effects, part), error=KeyboardInterrupt, doing=doing),
        pytest.raises(KeyboardInterrupt),
    ):
        engine.overlay.begin(engine.verify_batch(drafts))
    assert engine.overlay.window is None
    assert engine.overlay.pages.pages_in_use == 0
    assert all(torch.equal(a, b) for a, b in zip(engine.snapshot(), before, strict=True))
    engine.audit()
    step(engine, drafts, {"a": 1})
