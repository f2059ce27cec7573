"""EAGLE on the V2 runner: drafters that reuse the target's metadata and slot mappings.

Drafts are accepted at random, so tokens follow from what the drafter reads.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness import greedy, prompts
from harness_v2 import EngineV2

from nwor.manager import Mode
from nwor.store.triton_window import TritonWindow

Get = Callable[..., EngineV2]
TEXTS = prompts(5, 17, 31, 32, 33, 60)


@pytest.mark.parametrize("drafter", ["llama-eagle3", "llama-eagle"])
def test_ragged_batch_on_page_edges(engine: Get, drafter: str) -> None:
    llm = engine(k=4, drafter=drafter)
    params = [greedy(n, seed=n) for n in (16, 9, 20, 5, 12, 14)]
    stock, _ = llm.both(TEXTS, params, arrive={1: 1, 3: 3}, abort={5: "5"})
    assert stock.accepted > 20


def test_shared_prefix(engine: Get) -> None:
    llm = engine(k=4, drafter="llama-eagle")
    shared = prompts(97)[0]
    texts = [shared + tail[1:] for tail in prompts(8, 1, 3, seed=1)]
    llm.both(texts, greedy(10, seed=1), arrive={1: 3, 2: 4})


def test_asynchronous_scheduling(engine: Get) -> None:
    llm = engine(k=4, drafter="llama-eagle", asynchronous=True)
    assert llm.core.batch_queue is not None
    llm.both(TEXTS[:4], greedy(12, seed=1), arrive={2: 3})


@pytest.mark.parametrize("part", ["tables", "slots"])
def test_both_restores_are_needed(engine: Get, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """With either left out, the drafter's K and V are not stock's."""
    llm = engine(k=4, drafter="llama-eagle")
    stock = llm.run(TEXTS[:3], greedy(10, seed=1), Mode.OFF)
    close, tables = TritonWindow.close, llm.runner.block_tables
    kept = tables.input_block_tables if part == "tables" else [tables.slot_mappings]

    def leaves_out(self: TritonWindow, *args: object) -> None:
        edited = [tensor.clone() for tensor in kept]
        close(self, *args)
        for tensor, before in zip(kept, edited, strict=True):
            tensor.copy_(before)

    monkeypatch.setattr(TritonWindow, "close", leaves_out)
    staged = llm.run(TEXTS[:3], greedy(10, seed=1), Mode.STAGE)
    assert staged.unrestored
    assert staged.drafter != stock.drafter
