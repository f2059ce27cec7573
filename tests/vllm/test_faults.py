"""What goes wrong on purpose: forward, sampling, commit, layout, symbols; and what is refused."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from drafters import ScriptedDrafter
from harness import Audit, Engine, Run, greedy, prompts
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from nwor.errors import CommitError, NworError, SlotError
from nwor.manager import Mode
from nwor.metrics import FallbackReason
from nwor.store.overlay import OverlayRefusal
from nwor.testing import Doing, InjectedFaultError, everything, fail_at, first_rows, movers
from nwor.vllm import reservation, seams
from nwor.vllm.eligibility import EngineRefusal
from nwor.vllm.startup import EngineRefusedError

Get = Callable[..., Engine]
TEXTS = prompts(20, 31, 33)


@pytest.fixture(autouse=True)
def every_request_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a request without drafts are durable at once, also in a step that fails later."""
    monkeypatch.setattr(ScriptedDrafter, "least", 1)


def break_off(llm: Engine, error: type[BaseException], match: str = "") -> None:
    """Run until the error; then see that the failed step left nothing behind."""
    engine = llm.llm.llm_engine
    assert llm.llm.reset_prefix_cache()
    llm.runner.nwor.set_mode(Mode.STAGE)
    audit = Audit(llm, Run())
    for i, text in enumerate(TEXTS):
        engine.add_request(str(i), {"prompt_token_ids": text}, greedy(40))
    with pytest.raises(error, match=match):
        while engine.has_unfinished_requests():
            engine.step()
    audit.close()
    assert audit.run.steps == 0
    for then, now in zip(audit.before, audit.snapshot(), strict=True):
        assert torch.equal(then[0], now[0])
        assert torch.equal(then[1], now[1])
    assert llm.overlay.window is None
    for group in llm.overlay.groups:
        first = llm.overlay.pages.first_page
        assert group.table.max() < first
        assert group.slots.max() < first * group.page_size
    engine.abort_request([str(i) for i in range(len(TEXTS))])
    llm.runner.execute_model_state = None
    llm.drain()
    assert llm.overlay.pages.pages_in_use == 0
    llm.overlay.pages.check_integrity()


@pytest.mark.parametrize("error", [InjectedFaultError, KeyboardInterrupt])
@pytest.mark.parametrize("method", ["_model_forward", "_build_attention_metadata"])
def test_an_exception_in_the_forward(engine: Get, method: str, error: type[BaseException]) -> None:
    llm = engine(k=8)
    llm.learn(TEXTS, greedy(40))
    with fail_at((llm.runner, method), call=4, error=error):
        break_off(llm, error)
    llm.both(TEXTS, greedy(40))


@pytest.mark.parametrize("doing", [None, everything])
def test_an_exception_in_sampling(engine: Get, doing: Doing | None) -> None:
    llm = engine(k=8)
    llm.learn(TEXTS, greedy(40))
    with fail_at((llm.runner, "rejection_sampler"), call=3, error=KeyboardInterrupt, doing=doing):
        break_off(llm, KeyboardInterrupt)
    llm.both(TEXTS, greedy(40))


def test_a_failing_mover_is_repaired(engine: Get) -> None:
    llm = engine(k=8)
    llm.learn(TEXTS, greedy(40))
    faults = llm.overlay.metrics.fallbacks[FallbackReason.MOVER_FAULT]
    with fail_at(*movers(llm.overlay), call=5, doing=first_rows()):
        llm.both(TEXTS, greedy(40))
    assert llm.overlay.metrics.fallbacks[FallbackReason.MOVER_FAULT] == faults + 1


def test_a_commit_that_fails_for_good(engine: Get) -> None:
    """The error reaches the user; the tables are restored; later requests are written through."""
    llm = engine(k=8)
    stock = llm.learn(TEXTS, greedy(40))
    with (
        fail_at(*movers(llm.overlay), call=2),  # the first move fills in
        fail_at(*movers(llm.overlay, plain=True), error=OSError("on purpose")),
    ):
        break_off(llm, CommitError, "on purpose")
    assert llm.overlay.effects.broken
    staged = llm.run(TEXTS, greedy(40), Mode.STAGE)
    assert staged.tokens == stock.tokens
    assert llm.overlay.refused[OverlayRefusal.OVERLAY_BROKEN]
    llm.overlay.effects.broken = False
    llm.both(TEXTS, greedy(40))


def test_an_abort_between_the_forward_and_the_commit(
    engine: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages are free before its rows go home; nobody has them yet, and nobody is harmed."""
    llm = engine(k=8)
    stock = llm.learn(TEXTS, greedy(40))
    core = llm.llm.llm_engine

    forward, calls = llm.runner._model_forward, itertools.count(1)

    def abort_in_call_4(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if next(calls) == 4:
            staged = {request.rsplit("-", 1)[0] for request in llm.overlay.window.requests}
            assert "1" in staged
            core.abort_request(["1"])
        return output

    assert llm.llm.reset_prefix_cache()
    llm.runner.nwor.set_mode(Mode.STAGE)
    for i, text in enumerate(TEXTS):
        core.add_request(str(i), {"prompt_token_ids": text}, greedy(40))
    tokens: dict[str, list[int]] = {}
    with monkeypatch.context() as patch:
        patch.setattr(llm.runner, "_model_forward", abort_in_call_4)
        while core.has_unfinished_requests():
            for output in core.step():
                if output.finished:
                    tokens[output.request_id] = list(output.outputs[0].token_ids)
    llm.drain()
    assert {name: tokens[name] for name in "02"} == {name: stock.tokens[name] for name in "02"}
    assert len(tokens.get("1", [])) < 40
    assert llm.overlay.pages.pages_in_use == 0
    llm.overlay.pages.check_integrity()
    llm.both(TEXTS, greedy(40))


def test_a_step_that_cannot_be_staged_is_written_through(
    engine: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engine(k=8)
    stock = llm.learn(TEXTS, greedy(40))

    def refuse(batch: Any, newcomers: Any) -> None:
        raise SlotError("no such mapping")

    with monkeypatch.context() as patch:
        patch.setattr(llm.overlay, "begin", refuse)
        staged = llm.run(TEXTS, greedy(40), Mode.STAGE)
    assert staged.tokens == stock.tokens
    assert llm.runner.nwor.fallbacks[FallbackReason.STAGE_REFUSED]


def test_strict_raises_where_a_request_would_be_written_through(
    engine: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NWOR_STAGING_PAGES", "2")
    monkeypatch.setenv("NWOR_STRICT", "1")
    llm = engine(k=4, max_num_seqs=6)
    llm.learn(TEXTS, greedy(40))
    break_off(llm, NworError, "out_of_staging_pages")


# -- engines that are refused: they run, unstaged, and say why --------------------------------------


def refused(engine: Get, reason: EngineRefusal, **options: Any) -> Engine:
    llm = engine(**options)
    assert reason in {r.reason for r in llm.scheduler.kv_cache_config.nwor.refusals}
    return llm


def generate(llm: Engine) -> list[list[int]]:
    outputs = llm.llm.generate(
        [{"prompt_token_ids": text} for text in TEXTS], greedy(40), use_tqdm=False
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture
def expected(engine: Get) -> list[list[int]]:
    run = engine(k=8).learn(TEXTS, greedy(40))
    return [run.tokens[str(i)] for i in range(len(TEXTS))]


def test_pages_no_longer_than_a_window_are_refused(engine: Get, expected: list[list[int]]) -> None:
    llm = refused(engine, EngineRefusal.PAGE_TOO_SMALL, k=32)
    assert generate(llm) == expected
    assert llm.scheduler.kv_cache_manager.block_pool.num_gpu_blocks == 96


def test_a_renamed_symbol_is_refused(
    engine: Get, monkeypatch: pytest.MonkeyPatch, expected: list[list[int]]
) -> None:
    renamed = dataclasses.replace(seams.SAMPLE, name="GPUModelRunner._sample_renamed")
    monkeypatch.setattr(reservation, "check_seams", lambda _: seams.check_seams([renamed]))
    llm = refused(engine, EngineRefusal.SEAM, k=5)
    assert not hasattr(llm.runner, "nwor")
    assert generate(llm) == expected


def test_strict_refuses_to_start(engine: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NWOR_STRICT", "1")
    with pytest.raises(EngineRefusedError, match="page_smaller_than_window"):
        engine(k=33)


def test_rows_that_are_elsewhere_are_noticed(
    engine: Get, monkeypatch: pytest.MonkeyPatch, expected: list[list[int]]
) -> None:
    """A writer that puts rows one slot further is what an unknown block layout looks like."""
    write = CPUAttentionBackendImpl.do_kv_cache_update

    def shifted(self: Any, layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
        write(self, layer, key, value, cache, torch.where(slots < 0, slots, slots - 1))

    with monkeypatch.context() as patch:
        patch.setattr(CPUAttentionBackendImpl, "do_kv_cache_update", shifted)
        llm = engine(k=6)
    assert llm.runner.nwor.overlay is None
    assert llm.runner.nwor.fallbacks == {EngineRefusal.LAYOUT: 1}
    assert generate(llm) == expected


# -- engines nwor has no business with --------------------------------------------------------------


def hot(instance: Any) -> list[str]:
    names = [seam.name.rsplit(".", 1)[1] for seam in seams.SEAMS if seam.hot]
    return [name for name in names if name in vars(instance)]


@pytest.mark.parametrize("case", ["no speculation", "off"])
def test_d20_nothing_is_patched_in_the_hot_path(
    engine: Get, monkeypatch: pytest.MonkeyPatch, expected: list[list[int]], case: str
) -> None:
    if case == "off":
        monkeypatch.setenv("NWOR_MODE", "off")
        llm = engine(k=7)
    else:
        llm = engine(speculative={"none": True})
    manager = llm.llm.llm_engine.logger_manager
    for instance in (llm.runner, llm.scheduler, manager):
        assert not hasattr(instance, "nwor")
        assert hot(instance) == []
    for seam in seams.SEAMS:
        wrapped = not seam.hot and seam is not seams.MAX_CONCURRENCY  # that one is called
        assert hasattr(seams.resolve(seam), seams.MARK) is wrapped
    assert llm.scheduler.kv_cache_manager.block_pool.num_gpu_blocks == 96
    assert not hasattr(llm.scheduler.kv_cache_config, "nwor")
    assert generate(llm) == expected
