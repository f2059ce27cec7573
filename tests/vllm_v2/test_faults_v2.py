"""What goes wrong on purpose on the V2 runner."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import greedy, prompts
from harness_v2 import AuditV2, EngineV2

from nwor.cli import main
from nwor.errors import CommitError, NworError, SlotError
from nwor.manager import Mode
from nwor.metrics import FallbackReason
from nwor.store import device_overlay
from nwor.store.admission import OverlayRefusal
from nwor.store.device_window import DeviceWindow
from nwor.store.triton_window import TritonWindow
from nwor.testing import InjectedFaultError, fail_at

Get = Callable[..., EngineV2]
TEXTS = prompts(20, 31, 33)


def break_off(llm: EngineV2, error: type[BaseException], match: str = "") -> None:
    """Run until the error; then see that the failed step left nothing behind."""
    engine = llm.llm.llm_engine
    assert llm.llm.reset_prefix_cache()
    run = llm.make_run()
    audit = AuditV2(llm, run)
    llm.runner.nwor.set_mode(Mode.STAGE)
    for i, text in enumerate(TEXTS):
        engine.add_request(str(i), {"prompt_token_ids": text}, greedy(20))
    with pytest.raises(error, match=match):
        while engine.has_unfinished_requests():
            engine.step()
    audit.close()
    assert run.foreign == 0
    for then, now in zip(audit.before, audit.snapshot(), strict=True):
        assert torch.equal(then[0], now[0])
        assert torch.equal(then[1], now[1])
    assert all(map(torch.equal, audit.tables(), audit.expected)), "edits were left in the tables"
    assert llm.overlay.window is None
    llm.give_up()
    assert llm.overlay.pages.pages_in_use == 0
    llm.overlay.pages.check_integrity()


@pytest.mark.parametrize("error", [InjectedFaultError, KeyboardInterrupt])
def test_an_exception_in_the_forward(engine: Get, error: type[BaseException]) -> None:
    llm = engine(k=4)
    cancelled = llm.counters()["cancelled_windows"]
    with fail_at((llm.runner.model, "forward"), call=4, error=error):
        break_off(llm, error)
    assert llm.counters()["cancelled_windows"] == cancelled + 1
    llm.both(TEXTS, greedy(8))


def test_an_exception_while_metadata_is_built(engine: Get) -> None:
    llm = engine(k=4)
    with fail_at((llm.runner.model_state, "prepare_attn"), call=4):
        break_off(llm, InjectedFaultError)


def test_an_exception_in_sampling(engine: Get) -> None:
    llm = engine(k=4)
    with fail_at((llm.runner, "rejection_sampler"), call=3, error=KeyboardInterrupt):
        break_off(llm, KeyboardInterrupt)
    llm.both(TEXTS, greedy(8))


def test_a_step_that_is_never_sampled(engine: Get) -> None:
    """Nobody asks for its tokens: the next step undoes its edits before it does anything else."""
    llm = engine(k=4)
    core, metrics = llm.llm.llm_engine, llm.runner.nwor.metrics
    unfinished = metrics.fallbacks[FallbackReason.UNFINISHED]
    assert llm.llm.reset_prefix_cache()
    llm.runner.nwor.set_mode(Mode.STAGE)
    for i, text in enumerate(TEXTS):
        core.add_request(str(i), {"prompt_token_ids": text}, greedy(20))
    with fail_at((llm.runner, "sample_tokens"), call=4), pytest.raises(InjectedFaultError):
        while core.has_unfinished_requests():
            core.step()
    assert llm.overlay.window is not None
    llm.give_up()
    assert llm.overlay.window is None
    assert metrics.fallbacks[FallbackReason.UNFINISHED] == unfinished + 1
    assert llm.overlay.pages.pages_in_use == 0
    llm.both(TEXTS, greedy(8))


def test_an_exception_before_the_commit_has_begun(engine: Get) -> None:
    llm = engine(k=4)
    with fail_at((DeviceWindow, "commit"), call=3):
        break_off(llm, InjectedFaultError)
    assert llm.runner.nwor.metrics.fallbacks[FallbackReason.ABORTED]
    llm.both(TEXTS, greedy(8))


def test_a_move_that_fails_is_repaired(engine: Get) -> None:
    llm = engine(k=4)
    faults = llm.overlay.metrics.fallbacks[FallbackReason.MOVER_FAULT]
    with fail_at((TritonWindow, "move"), call=3):
        llm.both(TEXTS, greedy(8))
    assert llm.overlay.metrics.fallbacks[FallbackReason.MOVER_FAULT] == faults + 1


def test_a_commit_that_fails_for_good(engine: Get) -> None:
    """The error reaches the user; tables are restored; later requests are written through."""
    llm = engine(k=4)
    stock = llm.run(TEXTS, greedy(8), Mode.OFF)
    with (
        fail_at((TritonWindow, "move"), call=1),
        fail_at((device_overlay, "bind_torch"), error=OSError("on purpose")),
    ):
        break_off(llm, CommitError, "on purpose")
    assert llm.overlay.broken
    staged = llm.run(TEXTS, greedy(8), Mode.STAGE)
    assert staged.tokens == stock.tokens
    assert staged.foreign == stock.foreign
    assert llm.overlay.refused[OverlayRefusal.OVERLAY_BROKEN]
    llm.overlay.broken = False
    llm.both(TEXTS, greedy(8))


def test_a_step_that_cannot_be_staged_is_written_through(
    engine: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engine(k=4)
    stock = llm.run(TEXTS, greedy(8), Mode.OFF)

    def refuse(batch: Any) -> None:
        raise SlotError("no such mapping")

    with monkeypatch.context() as patch:
        patch.setattr(llm.overlay, "begin", refuse)
        staged = llm.run(TEXTS, greedy(8), Mode.STAGE)
    assert staged.tokens == stock.tokens
    assert staged.foreign == stock.foreign
    assert llm.runner.nwor.fallbacks[FallbackReason.STAGE_REFUSED]


@pytest.mark.parametrize("strict", [False, True])
def test_what_the_device_finds_wrong_is_counted_and_with_strict_raised(
    engine: Get, monkeypatch: pytest.MonkeyPatch, strict: bool
) -> None:
    """A slot mapping that contradicts its table, in one step: that request is left alone."""
    llm = engine(k=4)
    begin, calls = llm.overlay.begin, itertools.count(1)
    refused, before = llm.runner.nwor.refused, llm.runner.nwor.refused()

    def new(before: Counter[str]) -> Counter[str]:
        return refused() - before

    def corrupted(batch: Any) -> Any:
        if next(calls) == 2:
            llm.overlay.groups[0].slots[batch.query_start_loc[batch.table_rows[0]]] += 1
        return begin(batch)

    with monkeypatch.context() as patch:
        patch.setattr(llm.overlay, "begin", corrupted)
        if strict:
            patch.setattr(llm.runner.nwor, "_strict", True)
            patch.setattr(llm.runner.nwor, "refused", lambda: new(before))
            with pytest.raises(NworError, match="mapping_differs"):
                llm.run(TEXTS, greedy(8), Mode.STAGE)
            assert next(calls) == 4, "the step after the one that was left alone raises"
            llm.give_up()
        else:
            llm.run(TEXTS, greedy(8), Mode.STAGE)
    llm.counters()
    assert new(before) == {"mapping_differs": 1}
    assert llm.overlay.pages.pages_in_use == 0


def test_doctor(
    engine: Get, models: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    """`nwor doctor` knows that this process would run the V2 runner."""
    for method, drafter, code in (("draft_model", "llama-near", 0), ("ngram", None, 1)):
        speculative = {"method": method, "model": drafter and models(drafter)}
        arguments = [
            "doctor",
            "--model",
            models("llama"),
            "--block-size",
            "32",
            "--dtype",
            "float32",
        ]
        speculative |= {"num_speculative_tokens": 4, "prompt_lookup_max": 3}
        assert main([*arguments, "--speculative-config", json.dumps(speculative)]) == code
        assert "worker.gpu.model_runner.GPUModelRunner.prepare_attn" in capsys.readouterr().out


@pytest.mark.parametrize("part", ["tables", "slots", "rows"])
def test_what_a_commit_leaves_out_is_seen(
    engine: Get, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """The checks of this file can fail: each restore is needed, and so is every row."""
    llm = engine(k=4)
    stock = llm.run(TEXTS, greedy(12), Mode.OFF)
    close, tables = TritonWindow.close, llm.runner.block_tables

    def undone(self: TritonWindow, *args: Any) -> None:
        kept = [*tables.input_block_tables] if part == "tables" else [tables.slot_mappings]
        before = [tensor.clone() for tensor in kept]
        close(self, *args)
        if part == "rows":
            llm.overlay.state.masked[:, :1] = -1
            return
        for tensor, edited in zip(kept, before, strict=True):
            tensor.copy_(edited)

    monkeypatch.setattr(TritonWindow, "close", undone)
    staged = llm.run(TEXTS, greedy(12), Mode.STAGE)
    assert (staged.unrestored > 0) == (part != "rows")
    if part == "tables":  # the draft model works its slots out anew, but reads the tables
        assert staged.drafter != stock.drafter
    if part == "rows":
        assert staged.rows != stock.rows
