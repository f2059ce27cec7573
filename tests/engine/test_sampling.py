"""Rejection sampling follows the target's distribution, whatever the drafter says."""

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine import models
from engine.helpers import run
from nwor.engine import (
    AssistantDrafter,
    Drafter,
    Options,
    PromptLookup,
    Proposal,
    Request,
    Sampling,
)
from nwor.engine.sampling import argmax, draw, probabilities, verify_greedy, verify_sampled


def agree(observed: torch.Tensor, expected: torch.Tensor) -> bool:
    """Chi-square test at p < 5e-5, by the tail bound of Laurent and Massart (2000), x = 10."""
    assert observed[expected == 0].sum() == 0
    keep = expected > 0
    observed, expected = observed[keep].double(), expected[keep].double()
    freedom = len(observed) - 1
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return statistic < freedom + 2 * (freedom * 10) ** 0.5 + 2 * 10


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 5])
@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_probabilities_are_transformers(temperature: float, top_k: int, top_p: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 40) * 2
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    expected = warpers(None, logits.clone()).softmax(-1)
    found = probabilities(logits, Sampling(temperature, top_k, top_p))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("drawn", [False, True], ids=["point draft", "drawn draft"])
def test_first_two_tokens_follow_the_target(drawn: bool) -> None:
    """Chi-square over pairs: the first token, and the one after it if it was an accepted draft."""
    generator = torch.Generator().manual_seed(1)
    target = torch.tensor([[0.5, 0.2, 0.2, 0.1, 0.0], [0.1, 0.1, 0.2, 0.3, 0.3]])
    proposed = torch.tensor([[0.1, 0.6, 0.1, 0.1, 0.1]])
    first: Counter[int] = Counter()
    second: Counter[int] = Counter()
    rounds = 20_000
    for _ in range(rounds):
        draft = draw(proposed[0], generator) if drawn else 1
        verdict = verify_sampled(target, [draft], proposed if drawn else None, generator)
        if verdict.accepted:
            first[draft] += 1
            second[verdict.token] += 1
        else:
            first[verdict.token] += 1
    assert agree(torch.tensor([first[i] for i in range(5)]), target[0] * rounds)
    after = torch.tensor([second[i] for i in range(5)])
    assert agree(after, target[1] * after.sum())


class Guess(Drafter):
    """Drafts the same two tokens whatever has been said."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> Proposal:
        return Proposal([self._tokens for _ in requests])


def _similar(name: str) -> PreTrainedModel:
    """A model that often, but not always, says what the tiny model of this name says."""
    model = models.build(models.CONFIGS[name])
    with torch.no_grad():
        model.lm_head.weight += 0.1 * torch.randn_like(model.lm_head.weight)
    return model


@pytest.mark.parametrize("drafter", ["guess", "assistant"])
def test_whole_engine_follows_the_target(drafter: str) -> None:
    """Second emitted tokens of many requests against the exact distribution of the model."""
    model, ids = models.tiny("llama"), [5, 9, 5, 9, 5, 9]
    sampling = Sampling(temperature=1.5, top_k=4, seed=0)
    likely = models.stock_greedy(model, ids, 3)[1:]
    helper = Guess(likely) if drafter == "guess" else AssistantDrafter(_similar("llama"))
    rounds = 1500
    out, engine = run(
        model, [ids] * rounds, Options(max_new_tokens=3, num_draft_tokens=2, sampling=sampling),
        drafter=helper, max_batch=50,
    )  # fmt: skip
    assert sum(engine.stats.drafted) > sum(engine.stats.accepted) > 0
    with torch.inference_mode():
        first = probabilities(model(torch.tensor([ids])).logits[0, -1:], sampling)[0]
        exact = torch.zeros(models.VOCAB)
        for token in first.nonzero().flatten().tolist():
            after = model(torch.tensor([[*ids, token]])).logits[0, -1:]
            exact += first[token] * probabilities(after, sampling)[0]
    counts = torch.bincount(torch.tensor([o[1] for o in out]), minlength=models.VOCAB)
    expected = exact.double() * rounds
    # Rare tokens are too few each for a chi-square: they count together.
    rare = (expected > 0) & (expected < 5)
    groups = [counts[~rare].double(), counts[rare].sum()[None].double()]
    assert agree(torch.cat(groups), torch.cat([expected[~rare], expected[rare].sum()[None]]))


@pytest.mark.parametrize("drafter", [None, "lookup"])
def test_seed_decides_and_batch_does_not(drafter: str | None) -> None:
    prompts = [models.prompt(12, seed) for seed in range(5)]

    def go(seed: int, batch: int) -> list[list[int]]:
        options = Options(max_new_tokens=10, sampling=Sampling(1.2, seed=seed))
        out, _ = run(
            models.tiny("llama"),
            prompts,
            options,
            drafter=PromptLookup() if drafter else None,
            max_batch=batch,
        )
        return out

    assert go(3, 1) == go(3, 5) == go(3, 2)
    assert go(3, 5) != go(4, 5)


def test_temperature_zero_needs_no_generator() -> None:
    assert verify_greedy([4, 5, 6], [4, 7]).accepted == 1
    assert verify_greedy([4, 5, 6], [4, 7]).token == 5
    assert verify_greedy([4, 5, 6], [4, 5]).token == 6
    assert verify_greedy([4], []).token == 4
    assert verify_greedy([1, 2, 3], [9, 2]).accepted == 0  # a match after a mismatch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [512, 2048, 2049, 97])
def test_argmax_takes_the_first_of_equals(dtype: torch.dtype, vocab: int) -> None:
    torch.manual_seed(0)
    logits = torch.randint(-3, 4, (7, vocab)).to(dtype)  # ties everywhere
    assert argmax(logits).tolist() == logits.float().numpy().argmax(-1).tolist()
