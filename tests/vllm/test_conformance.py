"""Conformance D on the real engine, in one process.

Every case runs stock and staged on the same engine and compares tokens, the bytes of every durable
row, and all durable pages step by step (`harness.Audit`). The audit must object to the stock run, or
it would prove nothing about the staged one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from drafters import ScriptedDrafter
from harness import Engine, check, greedy, prompts
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from nwor.manager import Mode
from nwor.store.overlay import OverlayRefusal

Get = Callable[..., Engine]


@pytest.mark.parametrize("k", range(1, 9))
def test_d1_one_request(engine: Get, monkeypatch: pytest.MonkeyPatch, k: int) -> None:
    llm = engine(k=8)
    texts = prompts(20, seed=k)
    llm.learn(texts, greedy(64))
    monkeypatch.setattr(ScriptedDrafter, "limit", k)
    stock, _ = llm.both(texts, greedy(60))
    assert stock.accepted


def test_d2_d3_ragged_batch_joining_and_finishing_apart(engine: Get) -> None:
    """The drafter also skips some steps of some requests, which are staged again later."""
    llm = engine(k=8)
    texts = prompts(5, 17, 31, 32, 33, 60)
    params = [greedy(n) for n in (48, 20, 33, 5, 40, 61)]
    llm.learn(texts, greedy(64))
    stock, staged = llm.both(texts, params, arrive={1: 2, 3: 5, 5: 9})
    assert stock.accepted > 50
    assert any(resumes(counts) for counts in staged.draft_counts.values())


def resumes(counts: list[int]) -> bool:
    """Whether steps without drafts lie between steps with some."""
    drafting = [step for step, count in enumerate(counts) if count]
    return 0 in counts[drafting[0] : drafting[-1]] if drafting else False


def test_a_request_without_drafts_before_others(
    engine: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A place in the window is not a batch row."""
    texts = prompts(20, 31, 33)
    draft = ScriptedDrafter.draft

    def some(drafter: ScriptedDrafter, tokens: list[int]) -> list[int]:
        return [] if tokens[: len(texts[0])] == texts[0] else draft(drafter, tokens)

    monkeypatch.setattr(ScriptedDrafter, "draft", some)
    llm = engine(k=8)
    llm.learn(texts, greedy(64))
    stock, _ = llm.both(texts, greedy(40))
    assert stock.accepted


def test_d4_shared_prefix(engine: Get) -> None:
    """Three requests share two pages of prefix; the later ones find them cached."""
    llm = engine(k=8)
    shared = prompts(70)[0]
    texts = [shared + tail[1:] for tail in prompts(8, 12, 3, seed=1)]
    llm.learn(texts, greedy(40))
    stock, staged = llm.both(texts, greedy(40), arrive={1: 4, 2: 6})
    computed = {position for name, position, _ in staged.rows if name == "1"}
    assert min(computed) == 64, "the prefix was not taken from the cache"
    assert stock.accepted


def test_d5_chunked_prefill_beside_verification(engine: Get) -> None:
    llm = engine(k=4, max_num_batched_tokens=48)
    texts = prompts(9, 12, 150, 130)
    llm.learn(texts, greedy(40))
    llm.both(texts, greedy(40), arrive={2: 3, 3: 4})


def test_d6_preemption_and_resume(engine: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NWOR_STAGING_PAGES", "8")
    llm = engine(k=4, blocks=24, max_num_seqs=4)
    texts = prompts(60, 62, 50, 58)
    llm.learn(texts, greedy(120))
    stock, staged = llm.both(texts, greedy(120))
    assert stock.preempted
    assert staged.preempted


def test_d7_abort(engine: Get) -> None:
    llm = engine(k=8)
    texts = prompts(20, 25, 30)
    llm.learn(texts, greedy(60))
    stock, staged = llm.both(texts, greedy(60), abort={6: "1"})
    assert len(stock.tokens["0"]) == 60
    assert len(staged.tokens.get("1", [])) < 60


def test_d8_stops_inside_an_accepted_run(engine: Get) -> None:
    """Stop token, stop string and max_tokens cut windows of which more was accepted."""
    llm = engine(k=8)
    texts = prompts(20, 22, 24, 26)
    run = llm.learn(texts, greedy(64))
    stop_id, stop = run.tokens["1"][37], run.texts["2"][40:43]
    params = [
        greedy(33),
        SamplingParams(temperature=0, max_tokens=64, stop_token_ids=[stop_id]),
        SamplingParams(temperature=0, max_tokens=64, stop=[stop]),
        SamplingParams(temperature=0, max_tokens=11),
    ]
    _, staged = llm.both(texts, params)
    assert len(staged.tokens["1"]) <= 38
    assert staged.stop_reasons == {"0": None, "1": stop_id, "2": stop, "3": None}
    for i, text in enumerate(texts):
        last = max(position for name, position, _ in staged.rows if name == str(i))
        without_a_cut = len(text) + len(staged.tokens[str(i)]) - 2  # the last token has no row
        assert last > without_a_cut, f"request {i}: nothing was accepted past its stop"


@pytest.mark.parametrize("length", [29, 30, 31, 32, 33, 63, 64, 65])
def test_d9_page_edges(engine: Get, length: int) -> None:
    llm = engine(k=8)
    texts = prompts(length, length + 1, seed=length)
    llm.learn(texts, greedy(44))
    llm.both(texts, greedy(40))


def test_d10_sliding_windows_and_several_groups(
    engine: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contexts below, at and far beyond the window of 48, on three cache groups."""
    monkeypatch.setenv("NWOR_STAGING_PAGES", "30")
    llm = engine("gemma3", k=4)
    assert len(llm.overlay.groups) > 1
    texts = prompts(10, 44, 48, 120, 150)
    llm.learn(texts, greedy(60))
    llm.both(texts, greedy(60), arrive={2: 2})


def test_d11_fp8_cache(engine: Get) -> None:
    llm = engine(k=4, kv_cache_dtype="fp8")
    assert llm.overlay.groups[0].rows[0].key.element_size() == 1
    texts = prompts(20, 31, 40)
    llm.learn(texts, greedy(50))
    llm.both(texts, greedy(50))


def test_d12_logprobs(engine: Get) -> None:
    llm = engine(k=8)
    texts = prompts(20, 31)
    llm.learn(texts, greedy(50))
    stock, staged = llm.both(texts, greedy(50, logprobs=3))

    def values(run: Any) -> list[Any]:
        return [
            [{token: value.logprob for token, value in step.items()} for step in run.logprobs[name]]
            for name in sorted(run.logprobs)
        ]

    assert values(staged) == values(stock)


def test_d13_structured_output(engine: Get) -> None:
    """A grammar cuts drafts short before they are verified."""
    llm = engine(k=8)
    texts = prompts(20, 31)
    shape = StructuredOutputsParams(regex="[a-zA-Z0-9 ]{50}")
    params = SamplingParams(temperature=0, max_tokens=50, structured_outputs=shape)
    run = llm.learn(texts, params)
    assert all(text.replace(" ", "a").isalnum() for text in run.texts.values())
    stock, _ = llm.both(texts, params)
    assert stock.accepted


def test_d14_seeded_sampling(engine: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's CPU rejection sampler does not repeat a seeded run, nwor or not.

    So what the sampler said in the stock run is replayed in the staged one, which must hand it the
    very same logits at every step: same distribution, and same tokens for the same randomness.
    """
    llm = engine(k=8)
    texts = prompts(20, 31, 33)
    params = [
        SamplingParams(temperature=0.8, top_p=0.9, seed=i, max_tokens=50, ignore_eos=True)
        for i in range(3)
    ]
    runner = type(llm.runner)
    sample, tape = runner._sample, []

    def record(self: Any, logits: torch.Tensor, metadata: Any) -> Any:
        seen = logits.clone()
        output = sample(self, logits, metadata)
        tape.append((seen, output))
        return output

    def replay(self: Any, logits: torch.Tensor, metadata: Any) -> Any:
        seen, output = tape.pop(0)
        assert torch.equal(logits, seen)
        return output

    monkeypatch.setattr(runner, "_sample", record)
    llm.learn(texts, params)
    tape.clear()
    stock = llm.run(texts, params, Mode.OFF)
    before = llm.counters()
    monkeypatch.setattr(runner, "_sample", replay)
    staged = llm.run(texts, params, Mode.STAGE)
    assert not tape
    check(llm, stock, staged, before)


def test_d15_ngram(engine: Get) -> None:
    llm = engine(
        k=4, speculative={"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    )
    texts = [(prompt * 3)[:60] for prompt in prompts(12, 20, 7)]
    stock, _ = llm.both(texts, greedy(60))
    assert stock.accepted


def test_d15_draft_model(engine: Get, models: Callable[[str], str]) -> None:
    """The drafter's layers share the target's groups; only the target's rows are staged."""
    llm = engine(k=3, speculative={"method": "draft_model", "model": models("llama-draft")})
    assert llm.overlay.groups[0].num_layers == 2
    texts = prompts(20, 31, 60)
    stock, _ = llm.both(texts, greedy(60), arrive={2: 3})
    assert stock.accepted


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_d16_compiled(engine: Get, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """Traced by Dynamo and run as it is, as vLLM's own tests do, and compiled, as for users."""
    if backend == "inductor" and not shutil.which(os.environ.get("CXX", "g++")):
        pytest.skip("Inductor needs a C++ compiler")
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1" if backend == "eager" else "0")
    llm = engine(k=4, enforce_eager=False)
    assert llm.runner.compilation_config.backend == backend
    texts = prompts(20, 31, 60)
    llm.learn(texts, greedy(50))
    llm.both(texts, greedy(50))


def test_d19_more_requests_than_staging_pages(engine: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NWOR_STAGING_PAGES", "4")
    llm = engine(k=4, max_num_seqs=7)
    assert llm.overlay.pages.num_leases == 2
    texts = prompts(10, 20, 30, 40, 50)
    llm.learn(texts, greedy(40))
    stock = llm.run(texts, greedy(40), Mode.OFF)
    before = llm.counters()
    staged = llm.run(texts, greedy(40), Mode.STAGE)
    after = llm.counters()
    assert staged.tokens == stock.tokens
    assert llm.overlay.refused[OverlayRefusal.OUT_OF_STAGING_PAGES]
    assert 0 < staged.foreign < stock.foreign
    added = {name: after[name] - before[name] for name in ("staged", "flushed")}
    assert sum(added.values()) == staged.drafts
    assert min(added.values()) > 0


def test_requests_at_the_models_maximum_length(engine: Get) -> None:
    llm = engine(k=8)
    texts = prompts(230, 240)
    llm.learn(texts, greedy(26))
    params = [greedy(26), greedy(16)]
    llm.both(texts, params)


def test_immediate_counts_and_writes_through(engine: Get) -> None:
    llm = engine(k=8)
    texts = prompts(20, 31)
    llm.learn(texts, greedy(40))
    stock = llm.run(texts, greedy(40), Mode.OFF)
    before = llm.counters()
    run = llm.run(texts, greedy(40), Mode.IMMEDIATE)
    after = llm.counters()
    assert run.tokens == stock.tokens
    assert run.foreign == stock.foreign
    assert after["flushed"] - before["flushed"] == run.drafts
    assert after["staged"] == before["staged"]
    assert after["empty_windows"] > before["empty_windows"]
