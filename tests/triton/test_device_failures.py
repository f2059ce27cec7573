"""Launches of the device overlay that fail or are interrupted, before or after their work."""

from __future__ import annotations

import pytest
from steps import batch_of, engine, everything, rejecting, same

from nwor.errors import (
    CommitError,
)
from nwor.metrics import FallbackReason
from nwor.store import device_overlay
from nwor.store.overlay import OverlayRefusal
from nwor.testing import everything as everything_of
from nwor.testing import fail_at


class TestFailures:
    @pytest.mark.parametrize("where", ["begin", "fill"])
    @pytest.mark.parametrize("after", [False, True])
    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
    def test_a_begin_that_fails_leaves_no_edit(self, where, after, error) -> None:
        """Not even one of the window before, whose record is still on the device."""
        twins = engine()
        twins.device.begin(batch_of(twins)).commit(rejecting(twins, 0, 1))
        twins.finish("a")
        twins.add("c", 9)
        twins.drafts = {"b": 2, "c": 1}
        twins.prepare({"b": 3, "c": 2})
        before = everything(twins)
        doing = everything_of if after else None
        with (
            fail_at((twins.device.launches, where), error=error, doing=doing),
            pytest.raises(error),
        ):
            twins.device.begin(batch_of(twins))
        assert same(before[:4], everything(twins)[:4])
        assert twins.device.window is None
        assert twins.device.pages.pages_in_use == 0

    @pytest.mark.parametrize("where", ["close", "move"])
    @pytest.mark.parametrize("after", [False, True])
    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
    def test_a_commit_that_fails_once_is_finished(self, where, after, error) -> None:
        twins, right = engine(), engine()
        for side in (twins, right):
            side.window = side.device.begin(batch_of(side))
            side.begun = everything(side)
        right.window.commit(rejecting(right, 1, 2))
        doing = everything_of if after else None
        with fail_at((twins.device.launches, where), error=error, doing=doing):
            if error is KeyboardInterrupt:
                with pytest.raises(error):
                    twins.window.commit(rejecting(twins, 1, 2))
            else:
                twins.window.commit(rejecting(twins, 1, 2))
        assert same(everything(twins), everything(right))
        assert not twins.device.broken
        for side in (twins, right):
            side.device.collect(wait=True)
        faults = {FallbackReason.MOVER_FAULT: 1} if error is RuntimeError else {}
        assert twins.device.metrics.fallbacks == faults
        twins.device.metrics.fallbacks.clear()
        assert twins.device.metrics == right.device.metrics

    def test_a_commit_that_fails_for_good(self, monkeypatch) -> None:
        """Tables are restored all the same, and nothing is staged on rows that may be half moved."""
        twins = engine()
        before = everything(twins)
        window = twins.device.begin(batch_of(twins))

        def fail(*_args) -> None:
            raise RuntimeError("no mover moves")

        monkeypatch.setattr(twins.device.launches, "move", fail)
        monkeypatch.setattr(device_overlay, "bind_torch", fail)
        with pytest.raises(CommitError, match="no mover moves"):
            window.commit(rejecting(twins, 0, 0))
        assert same(before[:4], everything(twins)[:4])
        monkeypatch.undo()
        window = twins.device.begin(batch_of(twins))
        assert window.requests == ()
        assert twins.device.refused == {OverlayRefusal.OVERLAY_BROKEN: 2}
