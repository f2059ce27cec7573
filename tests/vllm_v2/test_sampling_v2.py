"""Sampling and grammars on the V2 runner: stock repeats itself with a seed, staged runs do the same.

Two of vLLM's kernels fail under Triton's interpreter, nwor or not. Each test goes around the one that
it meets, for stock and staged runs alike; neither has to do with the cache.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from harness import greedy, prompts
from harness_v2 import EngineV2
from triton.runtime import interpreter
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.sample.ops import topk_topp_sampler

from nwor.manager import Mode

Get = Callable[..., EngineV2]


def sampled(seed: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.8, seed=seed, max_tokens=16, ignore_eos=True, **options)


def test_temperature_top_k_and_top_p_side_by_side(
    engine: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With vLLM's own torch version of `_topk_topp_kernel`, which calls `.to` of a loop's plain int."""
    monkeypatch.setattr(topk_topp_sampler, "HAS_TRITON", False)
    llm = engine(k=4)
    texts = prompts(20, 31, 33, 40, 12)
    narrow = [{"top_k": 5}, {"top_p": 0.8}, {"top_k": 20, "top_p": 0.8}]
    params = [greedy(16), *(sampled(seed, **each) for seed, each in enumerate([*narrow, {}]))]
    first = llm.run(texts, params, Mode.OFF)
    stock, _ = llm.both(texts, params)
    assert stock.tokens == first.tokens, "stock does not repeat itself with a seed"
    other = [greedy(16), *(sampled(seed + 9, **each) for seed, each in enumerate([*narrow, {}]))]
    changed = llm.run(texts, other, Mode.OFF).tokens
    assert [name for name in "01234" if changed[name] != stock.tokens[name]] == [*"1234"]


@pytest.fixture
def masks_of_bools(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scalar condition `&` a row of them is an int32 in the interpreter, which its own store refuses.

    vLLM's grammar kernel stores under such a mask.
    """
    store = interpreter.InterpreterBuilder.create_masked_store

    def with_bools(self: Any, pointers: Any, value: Any, mask: Any, policy: Any) -> Any:
        as_bools = interpreter.TensorHandle(mask.data.astype(bool), mask.dtype)
        return store(self, pointers, value, as_bools, policy)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_store", with_bools)


@pytest.mark.usefixtures("masks_of_bools")
def test_a_grammar_beside_requests_without_one(engine: Get) -> None:
    """Drafts behind the first one that the grammar forbids are dropped, so windows are ragged."""
    llm = engine(k=4)
    grammar = StructuredOutputsParams(regex="[!-Z]{40}")
    params = [greedy(16, structured_outputs=grammar), greedy(16)]
    params.append(sampled(1, structured_outputs=grammar))
    stock, staged = llm.both(prompts(20, 31, 33), params)
    for name in "02":
        assert re.fullmatch("[!-Z]{16}", staged.texts[name])
    assert not re.fullmatch("[!-Z]*", staged.texts["1"]), "a grammar that forbids nothing"
    assert stock.accepted
