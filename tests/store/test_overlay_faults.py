"""Movers that fail, interrupts in begin and commit: rows home or not at all, tables restored."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from toy_engine import ToyEngine, step

from nwor.errors import CommitError
from nwor.metrics import FallbackReason
from nwor.store.overlay import OverlayRefusal


@pytest.mark.parametrize("moved", ["key", "both"])
def test_a_mover_that_fails_is_repaired(moved: str) -> None:
    engine = ToyEngine([8, 8])
    engine.add("a", [1, 2, 3])
    storage = engine.overlay.effects.storages[0]
    move = storage.move

    def faulty(source: torch.Tensor, target: torch.Tensor) -> None:
        if moved == "both":
            move(source, target)
        else:
            rows = engine.rows[0]
            rows.key[:, target // 8, target % 8] = rows.key[:, source // 8, source % 8]
        raise OSError("half way")

    object.__setattr__(storage, "move", faulty)
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
    storage = engine.overlay.effects.storages[0]

    def faulty(source: torch.Tensor, target: torch.Tensor) -> None:
        raise OSError("disk on fire")

    object.__setattr__(storage, "move", faulty)
    object.__setattr__(storage, "repair", faulty)
    with pytest.raises(CommitError, match="disk on fire"):
        window.commit([1])
    assert engine.overlay.window is None
    for now, then in zip(engine.snapshot(), before, strict=True):
        assert torch.equal(now, then)
    assert engine.overlay.begin(engine.verify_batch(drafts)).requests == ()
    assert engine.overlay.refused == {OverlayRefusal.OVERLAY_BROKEN: 1}


def interrupt_moves(engine: ToyEngine, at: set[int]) -> None:
    """A ctrl-C after half of the n-th row movement, for every n in `at`."""
    calls = itertools.count()
    for storage in engine.overlay.effects.storages:

        def move(
            source: torch.Tensor,
            target: torch.Tensor,
            original: Callable[..., None] = storage.move,
        ) -> None:
            if next(calls) in at:
                original(source[: len(source) // 2], target[: len(target) // 2])
                raise KeyboardInterrupt
            original(source, target)

        object.__setattr__(storage, "move", move)


@pytest.mark.parametrize("at", [0, 1])
def test_an_interrupted_commit_is_finished_before_the_interrupt_goes_on(at: int) -> None:
    """Two storages, interrupted in the first or in the second: all rows home, edits undone."""
    engine = ToyEngine([8, 8], share=False)
    engine.add("a", [1, 2, 3])
    drafts = {"a": [50, 51, 52]}
    rows = engine.prepare(drafts)
    before = engine.snapshot()
    window = engine.overlay.begin(engine.verify_batch(drafts))
    engine.forward(rows)
    assert len(engine.overlay.effects.storages) > 1
    interrupt_moves(engine, {at})
    with pytest.raises(KeyboardInterrupt):
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
    interrupt_moves(engine, {1, 2})
    with pytest.raises(KeyboardInterrupt):
        window.commit([1])
    assert all(torch.equal(a, b) for a, b in zip(engine.snapshot(), before, strict=True))
    assert not window.is_open
    assert engine.overlay.effects.broken
    assert engine.overlay.begin(engine.verify_batch(drafts)).requests == ()


@pytest.mark.parametrize("part", ["fill_in", "point", "note"])
def test_an_interrupted_begin_leaves_no_edit_and_no_lease(
    monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    engine = ToyEngine([8, 8])
    engine.add("a", [1, 2, 3])
    drafts = {"a": [50, 51]}
    engine.prepare(drafts)
    before = engine.snapshot()
    original = getattr(engine.overlay.effects, part)

    def interrupted(*args: object) -> None:
        monkeypatch.setattr(engine.overlay.effects, part, original)
        original(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.overlay.effects, part, interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.overlay.begin(engine.verify_batch(drafts))
    assert engine.overlay.window is None
    assert engine.overlay.pages.pages_in_use == 0
    assert all(torch.equal(a, b) for a, b in zip(engine.snapshot(), before, strict=True))
    engine.audit()
    step(engine, drafts, {"a": 1})
