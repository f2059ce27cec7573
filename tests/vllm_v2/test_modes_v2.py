"""The V2 runner in other modes than `stage`, and without speculation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness import greedy, prompts
from harness_v2 import EngineV2
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from nwor.manager import Mode
from nwor.vllm import seams

Get = Callable[..., EngineV2]


def test_immediate_counts_and_writes_through(engine: Get) -> None:
    llm = engine(k=4)
    stock = llm.run(prompts(20, 31), greedy(12), Mode.OFF)
    before = llm.counters()
    run = llm.run(prompts(20, 31), greedy(12), Mode.IMMEDIATE)
    after = llm.counters()
    assert run.tokens == stock.tokens
    assert run.foreign == stock.foreign
    assert after["flushed"] - before["flushed"] == run.drafts
    assert after["staged"] == before["staged"]


def test_off_leaves_the_runner_alone(engine: Get) -> None:
    llm = engine(k=4)
    llm.runner.nwor.set_mode(Mode.OFF)
    names = ("execute_model", "prepare_attn", "sample", "sample_tokens")
    assert not set(names) & vars(llm.runner).keys()
    llm.runner.nwor.set_mode(Mode.STAGE)
    assert set(names) <= vars(llm.runner).keys()


def test_not_noticeable_without_speculation_or_switched_off(
    engine: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of nwor on the instances or in the hot path; tokens are those of a staging engine."""

    def tokens(llm: EngineV2) -> list[list[int]]:
        texts = [{"prompt_token_ids": text} for text in prompts(20, 31)]
        outputs = llm.llm.generate(texts, greedy(16), use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def stock_tokens(llm: EngineV2) -> list[list[int]]:
        assert isinstance(llm.runner, GPUModelRunner)
        hot = {seam.name.rsplit(".", 1)[1] for seam in seams.LEDGER if seam.hot}
        for instance in (llm.runner, llm.scheduler, llm.llm.llm_engine.logger_manager):
            assert not hasattr(instance, "nwor")
            assert not hot & vars(instance).keys()
        for seam in seams.V2_SEAMS:
            assert not seam.hot or not hasattr(seams.resolve(seam), seams.MARK)
        assert llm.scheduler.kv_cache_manager.block_pool.num_gpu_blocks == 160
        assert not hasattr(llm.scheduler.kv_cache_config, "nwor")
        return tokens(llm)

    found = [stock_tokens(engine(drafter=None))]
    with monkeypatch.context() as patch:
        patch.setenv("NWOR_MODE", "off")
        found.append(stock_tokens(engine(k=4)))
    llm = engine(k=4)
    staged = llm.counters()["staged"]
    found.append(tokens(llm))
    assert llm.counters()["staged"] > staged
    assert found[0] == found[1] == found[2]
