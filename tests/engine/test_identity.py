"""I5: greedy output of every mode and drafter is stock transformers' greedy output, float32."""

from functools import cache

import pytest

from engine import models
from engine.helpers import Oracle, run
from nwor.engine.drafters import AssistantDrafter, NoDrafter, PromptLookup
from nwor.engine.options import Options

NEW = 12
# Shorter than, at, just beyond, and 20 times the sliding window.
LENGTHS = (3, models.WINDOW, models.WINDOW + 1, 20 * models.WINDOW)
# One model of each kind of attention, for the tests that need not run on all.
KINDS = ("llama", "gemma2", "gemma3", "gpt-oss")


@cache
def answers(name: str) -> dict[tuple[int, ...], list[int]]:
    model = models.tiny(name)
    prompts = [models.prompt(n, seed) for seed, n in enumerate(LENGTHS * 2)]
    return {tuple(p): models.stock_greedy(model, p, NEW) for p in prompts}


@pytest.mark.parametrize("name", sorted(models.CONFIGS))
def test_stock_output_is_worth_comparing(name: str) -> None:
    """A model that repeats one token would make every test below pass."""
    tokens = [token for answer in answers(name).values() for token in answer]
    assert len(set(tokens)) >= 6


@pytest.mark.parametrize("name", sorted(models.CONFIGS))
@pytest.mark.parametrize("mode", ["off", "immediate", "stage"])
def test_ragged_batch_equals_stock(name: str, mode: str) -> None:
    """Eight prompts of four lengths in a batch of three: requests leave and others enter."""
    expected = answers(name)
    out, engine = run(
        models.tiny(name), list(expected), Options(max_new_tokens=NEW, num_draft_tokens=4),
        drafter=Oracle(expected, right=2), mode=mode, max_batch=3,
    )  # fmt: skip
    assert out == list(expected.values())
    assert sum(engine.stats.drafted) > sum(engine.stats.accepted) > 0


@pytest.mark.parametrize("name", sorted(models.CONFIGS))
def test_no_drafts_equals_stock(name: str) -> None:
    expected = answers(name)
    out, _ = run(
        models.tiny(name),
        list(expected),
        Options(max_new_tokens=NEW),
        drafter=NoDrafter(),
        max_batch=8,
    )
    assert out == list(expected.values())


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("drafts", range(1, 9))
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_any_window_and_batch(name: str, drafts: int, batch: int) -> None:
    """k up to the sliding window, so that a window is as long as what a query may see."""
    expected = answers(name)
    out, _ = run(
        models.tiny(name), list(expected), Options(max_new_tokens=NEW, num_draft_tokens=drafts),
        drafter=Oracle(expected, right=max(drafts - 2, 1)), max_batch=batch,
    )  # fmt: skip
    assert out == list(expected.values())


@pytest.mark.parametrize("name", sorted(models.CONFIGS.keys() - KINDS))
@pytest.mark.parametrize("drafts", range(1, 9))
def test_any_window(name: str, drafts: int) -> None:
    """The other architectures, with each batch size in turn."""
    expected = answers(name)
    out, _ = run(
        models.tiny(name), list(expected), Options(max_new_tokens=NEW, num_draft_tokens=drafts),
        drafter=Oracle(expected, right=max(drafts - 2, 1)), max_batch=(1, 3, 8)[drafts % 3],
    )  # fmt: skip
    assert out == list(expected.values())


@pytest.mark.parametrize("name", KINDS)
def test_windows_longer_than_the_sliding_window(name: str) -> None:
    expected = answers(name)
    out, _ = run(
        models.tiny(name), list(expected), Options(max_new_tokens=NEW, num_draft_tokens=11),
        drafter=Oracle(expected, right=10), max_batch=3,
    )  # fmt: skip
    assert out == list(expected.values())


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    "quality",
    [
        {"right": 0},
        {},
        {"silent": True},
        {"extra": 3},
        {"right": 1, "silent": True, "extra": 5},
    ],
    ids=["adversarial", "perfect", "often silent", "too many", "all at once"],
)
def test_drafters_of_any_quality(name: str, quality: dict[str, int]) -> None:
    expected = answers(name)
    out, engine = run(
        models.tiny(name), list(expected), Options(max_new_tokens=NEW, num_draft_tokens=3),
        drafter=Oracle(expected, **quality), max_batch=3,
    )  # fmt: skip
    assert out == list(expected.values())
    metrics = engine.metrics
    assert metrics.staged == sum(engine.stats.drafted)
    assert metrics.committed == sum(engine.stats.accepted)
    assert metrics.rejected == metrics.staged - metrics.committed
    if quality.get("right") == 0:
        assert metrics.committed == 0
    if not quality:
        assert metrics.rejected == 0


@pytest.mark.parametrize("chunk", [1, 5, 33, 64])
@pytest.mark.parametrize("name", KINDS)
def test_prefill_in_chunks(name: str, chunk: int) -> None:
    expected = answers(name)
    out, _ = run(
        models.tiny(name), list(expected), Options(max_new_tokens=NEW, num_draft_tokens=2),
        drafter=PromptLookup(), max_batch=4, prefill_chunk=chunk,
    )  # fmt: skip
    assert out == list(expected.values())


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("helper", ["itself", "another"])
def test_assistant(name: str, helper: str) -> None:
    expected = answers(name)
    assistant = models.build(models.CONFIGS[name if helper == "itself" else "mistral"])
    drafter = AssistantDrafter(assistant)
    out, engine = run(
        models.tiny(name), list(expected), Options(max_new_tokens=NEW, num_draft_tokens=4),
        drafter=drafter, max_batch=3,
    )  # fmt: skip
    assert out == list(expected.values())
    if helper == "itself":
        assert sum(engine.stats.accepted) == sum(engine.stats.drafted)
    assert drafter.metrics.staged > 0


def test_numba_mover() -> None:
    pytest.importorskip("numba")
    expected = answers("gemma3")
    out, _ = run(
        models.tiny("gemma3"), list(expected), Options(max_new_tokens=NEW, num_draft_tokens=4),
        drafter=Oracle(expected, right=2), max_batch=3, mover="numba",
    )  # fmt: skip
    assert out == list(expected.values())
