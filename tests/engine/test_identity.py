"""I5: greedy output of every mode and drafter is stock transformers' greedy output, float32."""

from functools import cache

import pytest

from engine import models
from engine.helpers import Oracle, run
from nwor.engine.drafters import PromptLookup
from nwor.engine.options import Options

NEW = 12
# Shorter than, at, just beyond, and 20 times the sliding window.
LENGTHS = (3, models.WINDOW, models.WINDOW + 1, 20 * models.WINDOW)


@cache
def answers(name: str) -> dict[tuple[int, ...], list[int]]:
    model = models.tiny(name)
    prompts = [models.prompt(n, seed) for seed, n in enumerate(LENGTHS * 2)]
    return {tuple(p): models.stock_greedy(model, p, NEW) for p in prompts}


@pytest.mark.parametrize("name", sorted(models.CONFIGS))
@pytest.mark.parametrize("mode", ["off", "immediate", "stage"])
def test_ragged_batch_equals_stock(name: str, mode: str) -> None:
    """Eight prompts of four lengths in a batch of three: requests leave and others enter."""
    expected = answers(name)
    prompts = [list(p) for p in expected]
    options = Options(max_new_tokens=NEW, num_draft_tokens=4)
    out, _ = run(
        models.tiny(name), prompts, options, drafter=Oracle(expected, right=2), mode=mode, max_batch=3
    )
    assert out == list(expected.values())
