"""Conformance D on the V2 runner: stock and staged on one engine, compared row by row."""

from __future__ import annotations

from collections.abc import Callable

from harness import greedy, prompts
from harness_v2 import EngineV2

Get = Callable[..., EngineV2]


def test_ragged_batch_joining_and_finishing_apart(engine: Get) -> None:
    llm = engine()
    texts = prompts(5, 17, 31, 32, 33, 60)
    params = [greedy(n) for n in (24, 10, 17, 5, 20, 25)]
    stock, _ = llm.both(texts, params, arrive={1: 2, 3: 4, 5: 6})
    assert stock.accepted
    llm.drain()
    assert llm.overlay.pages.pages_in_use == 0
