"""Conformance D on the V2 runner: stock and staged on one engine, compared row by row.

`Engine.both` compares tokens, K and V of every committed row, the drafter's K and V, vLLM's tables
after every commit, all durable pages with what they were before, and nwor's counters with vLLM's.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from harness import greedy, prompts
from harness_v2 import EngineV2
from vllm import SamplingParams

from nwor.manager import Mode
from nwor.store.admission import OverlayRefusal
from nwor.store.device_batch import DeviceBatch
from nwor.store.triton_window import TritonWindow

Get = Callable[..., EngineV2]


def cut(llm: EngineV2, limit: Callable[[int, int], int]) -> Callable[[int], None]:
    """Before a step, let request i verify at most ``limit(step, i)`` of its drafts."""

    def before_step(step: int) -> None:
        for request in llm.scheduler.running:
            name = int(request.request_id.rsplit("-", 1)[0])
            del request.spec_token_ids[limit(step, name) :]

    return before_step


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_every_number_of_drafts(engine: Get, k: int) -> None:
    llm = engine(k=4)
    stock, staged = llm.both(prompts(20, seed=k), greedy(24), before_step=cut(llm, lambda *_: k))
    assert stock.accepted
    assert staged.drafts <= k * staged.steps


def test_nine_requests_joining_and_finishing_apart(engine: Get) -> None:
    """Batches of one to nine, their first windows on, before and after page edges."""
    llm = engine(k=4)
    texts = prompts(5, 17, 29, 30, 31, 32, 33, 60, 64)
    params = [greedy(n) for n in (16, 7, 11, 5, 12, 9, 14, 10, 15)]
    stock, staged = llm.both(texts, params, arrive={1: 1, 3: 2, 5: 3})
    assert stock.accepted
    assert staged.verifying >= 7


def test_ragged_drafts_with_requests_that_have_none(engine: Get) -> None:
    llm = engine(k=4)

    def limit(step: int, request: int) -> int:
        return random.Random(f"{step} {request}").choice([0, 0, 1, 2, 3, 4])

    stock, _ = llm.both(prompts(20, 31, 33, 50), greedy(16), before_step=cut(llm, limit))
    assert stock.accepted


def test_steps_in_which_nobody_has_drafts(engine: Get) -> None:
    """Staging pages fall behind and are filled in again."""
    llm = engine(k=4)
    limit = cut(llm, lambda step, _: 0 if step % 4 < 2 else 4)
    llm.both(prompts(20, 30), greedy(20), before_step=limit)


def test_shared_prefix_and_a_newcomer_that_verifies_at_once(engine: Get) -> None:
    """Later requests find two pages cached; vLLM pads the one that lacks a single token with drafts.

    The page they share is staged by its owner while they begin.
    """
    llm = engine(k=4)
    shared = prompts(65)[0]
    texts = [shared + tail[1:] for tail in prompts(8, 1, 3, seed=1)]
    stock, staged = llm.both(texts, greedy(12), arrive={1: 3, 2: 4})
    assert min(position for name, position, _ in staged.rows if name == "1") == 64
    assert staged.first_drafts == {"0": 0, "1": 4, "2": 0}
    assert stock.accepted


def test_a_page_shared_while_it_is_staged(engine: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer continues another request's text whose last page that one is filling just now."""
    llm = engine(k=4)
    fill, met = TritonWindow.fill, []

    def watched(self: TritonWindow, requests: int, newcomers: int) -> None:
        before = [table.clone() for table in llm.runner.block_tables.input_block_tables]
        fill(self, requests, newcomers)
        same = map(torch.equal, before, llm.runner.block_tables.input_block_tables)
        met.append(newcomers > 0 and not all(same))

    monkeypatch.setattr(TritonWindow, "fill", watched)
    first = prompts(24)[0]
    text = first + llm.run([first], greedy(24), Mode.OFF).tokens["0"]
    texts, params = [first, text[:40]], [greedy(20), greedy(4)]
    for step in range(5, 8):  # one of them meets the page in the step that fills it
        stock, _ = llm.both(texts, params, arrive={1: step})
        if any(met):
            break
    else:
        pytest.fail("no newcomer met a staged page")
    monkeypatch.setattr(DeviceBatch, "newcomer_rows", np.empty(0, np.int64))
    staged = llm.run(texts, params, Mode.STAGE, arrive={1: step})
    assert staged.rows != stock.rows, "a newcomer that reads the durable page must be noticed"


def test_chunked_prefill_beside_verification(engine: Get) -> None:
    llm = engine(k=4, max_num_batched_tokens=80)
    llm.both(prompts(9, 12, 150, 130), greedy(12), arrive={2: 2, 3: 3})


def test_preemption_and_resume(engine: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NWOR_STAGING_PAGES", "8")
    llm = engine(k=4, blocks=18, max_num_seqs=4)
    stock, staged = llm.both(prompts(60, 62, 50, 58), greedy(70))
    assert stock.preempted
    assert staged.preempted


def test_more_requests_than_staging_pages(engine: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NWOR_STAGING_PAGES", "4")
    llm = engine(k=4, blocks=60, max_num_seqs=4)
    assert llm.overlay.pages.num_leases == 2
    texts = prompts(10, 20, 30)
    stock = llm.run(texts, greedy(16), Mode.OFF)
    before = llm.counters()
    staged = llm.run(texts, greedy(16), Mode.STAGE)
    after = llm.counters()
    assert staged.tokens == stock.tokens
    assert llm.overlay.refused[OverlayRefusal.OUT_OF_STAGING_PAGES]
    assert 0 < staged.foreign < stock.foreign
    added = {name: after[name] - before[name] for name in ("staged", "flushed")}
    assert sum(added.values()) == staged.drafts
    assert min(added.values()) > 0


def test_abort(engine: Get) -> None:
    llm = engine(k=4)
    stock, staged = llm.both(prompts(20, 25, 30), greedy(20), abort={5: "1"})
    assert len(stock.tokens["0"]) == 20
    assert len(staged.tokens.get("1", [])) < 20


def test_stops_inside_an_accepted_run(engine: Get) -> None:
    """max_tokens, stop tokens and stop strings cut windows of which more was accepted.

    Three of each, a token apart: where accepted runs end is not known beforehand.
    """
    llm = engine(k=4)
    texts = [text for text in prompts(20, 22, 24) for _ in range(3)]
    run = llm.run(texts[::3], greedy(40), Mode.OFF)
    ids, text = run.tokens["1"], run.texts["2"]
    params = [
        *(greedy(n) for n in (19, 20, 21)),
        *(greedy(40, stop_token_ids=[ids[n]]) for n in (20, 21, 22)),
        *(greedy(40, stop=[text[n : n + 2]]) for n in (24, 25, 26)),
    ]
    _, staged = llm.both(texts, params)
    for i, param in enumerate(params):
        name = str(i)
        if param.stop_token_ids:
            end = ids.index(param.stop_token_ids[0]) + 1
            assert staged.tokens[name] == ids[:end]
        if param.stop:
            assert staged.texts[name] == text[: text.index(param.stop[0])]
    for kind in (range(3), range(3, 6), range(6, 9)):
        past = [(str(i), len(texts[i]) + len(staged.tokens[str(i)]), 0) for i in kind]
        assert any(row in staged.rows for row in past), "no stop cut an accepted draft"


def test_seeded_sampling(engine: Get) -> None:
    llm = engine(k=4)
    params = [
        SamplingParams(temperature=0.8, seed=i, max_tokens=16, ignore_eos=True) for i in range(3)
    ]
    llm.both(prompts(20, 31, 33), params)


def test_logprobs(engine: Get) -> None:
    llm = engine(k=4)
    stock, staged = llm.both(prompts(20, 31), greedy(10, logprobs=3))

    def values(run: Any) -> list[Any]:
        return [
            [{token: value.logprob for token, value in step.items()} for step in run.logprobs[name]]
            for name in sorted(run.logprobs)
        ]

    assert values(staged) == values(stock)


def test_requests_at_the_models_maximum_length(engine: Get) -> None:
    """Windows cut short by the end of the block table."""
    llm = engine(k=4)
    llm.both(prompts(243, 247), [greedy(13), greedy(9)])


def test_fp8_cache(engine: Get) -> None:
    llm = engine(k=4, kv_cache_dtype="fp8")
    assert llm.overlay.groups[0].rows[0].key.element_size() == 1
    llm.both(prompts(20, 31), greedy(10))


def test_pages_of_128_rows(engine: Get) -> None:
    llm = engine(k=4, block_size=128, blocks=64)
    llm.both(prompts(126, 127, 128), greedy(10))


def test_sliding_windows_and_several_groups(
    engine: Get, models: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NWOR_STAGING_PAGES", "30")
    llm = engine("gemma3", k=3)
    assert len(llm.overlay.groups) > 1
    llm.both(prompts(10, 46, 120), greedy(12))


@pytest.fixture
def asynchronous(engine: Get, monkeypatch: pytest.MonkeyPatch) -> EngineV2:
    """An engine that schedules a step before it has seen the last one's tokens."""
    llm = engine(k=4, asynchronous=True)
    assert llm.core.batch_queue is not None
    return llm


def test_asynchronous_scheduling(asynchronous: EngineV2) -> None:
    llm = asynchronous
    texts = prompts(5, 17, 31, 32, 60)
    params = [greedy(n) for n in (16, 9, 12, 5, 15)]
    stock, _ = llm.both(texts, params, arrive={1: 2, 3: 4}, abort={6: "2"})
    assert stock.accepted


def test_counters_travel_to_the_front_end(engine: Get) -> None:
    from prometheus_client import REGISTRY

    def value(name: str) -> float:
        samples = [s for m in REGISTRY.collect() for s in m.samples if s.name == name]
        return sum(sample.value for sample in samples)

    names = {
        "nwor:staged_total": "vllm:spec_decode_num_draft_tokens_total",
        "nwor:committed_total": "vllm:spec_decode_num_accepted_tokens_total",
        "nwor:bonus_total": "vllm:spec_decode_num_drafts_total",
    }
    llm = engine(k=4)
    before = {name: value(name) for pair in names.items() for name in pair}
    llm.run(prompts(20, 31), greedy(12), Mode.STAGE)
    added = {name: value(name) - before[name] for name in before}
    assert added["nwor:staged_total"] > added["nwor:committed_total"] > 0
    for ours, theirs in names.items():
        assert added[ours] == added[theirs], (ours, theirs)
