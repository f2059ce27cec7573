"""Four ways to decode the same prompts, and what each did."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from nwor.demo.prompts import Prompt
from nwor.engine import Loaded, Result, generate

STOCK, LOOKUP = "stock greedy", "stock + prompt lookup"
IMMEDIATE, STAGE = "nwor immediate", "nwor stage"
LANES = (STOCK, LOOKUP, IMMEDIATE, STAGE)


@dataclass(slots=True)
class Lane:
    """One way to decode.

    Attributes:
        name: one of `LANES`.
        tokens: generated ids per prompt.
        seconds: time of prefill and decoding.
        tokens_per_second: all generated tokens by `seconds`.
        result: what nwor says of itself; None for stock.
    """

    name: str
    tokens: list[list[int]]
    seconds: float
    result: Result | None = None

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second, prefill included."""
        return sum(map(len, self.tokens)) / self.seconds


@dataclass(slots=True)
class Comparison:
    """All lanes on the same prompts.

    Attributes:
        name: what the prompts are.
        prompts: their texts.
        texts: what stock greedy says to each.
        lanes: in the order of `LANES`.
    """

    name: str
    prompts: list[str]
    texts: list[str] = field(default_factory=list)
    lanes: list[Lane] = field(default_factory=list)

    @property
    def identical(self) -> bool:
        """True if all lanes generated the same tokens."""
        return all(lane.tokens == self.lanes[0].tokens for lane in self.lanes)


def compare(
    loaded: Loaded,
    name: str,
    prompts: Sequence[Prompt],
    new: int,
    drafts: int,
    done: Callable[[str], None],
) -> Comparison:
    """Run all lanes; `done` is told after each."""
    texts = [prompt.text for prompt in prompts]
    found = Comparison(name, texts)
    for lane in LANES:
        if lane in (STOCK, LOOKUP):
            found.lanes.append(_stock(loaded, lane, texts, new, drafts))
        else:
            mode = "stage" if lane == STAGE else "immediate"
            found.lanes.append(_nwor(loaded, lane, texts, new, drafts, mode))
        done(f"{name}: {lane}")
    assert loaded.tokenizer is not None  # noqa: S101 - the demo's model has one
    found.texts = [str(loaded.tokenizer.decode(ids)) for ids in found.lanes[0].tokens]
    return found


def _stock(loaded: Loaded, name: str, texts: Sequence[str], new: int, drafts: int) -> Lane:
    """Run prompts one after the other: assisted generation takes no more than one."""
    assert loaded.tokenizer is not None  # noqa: S101
    options = {"prompt_lookup_num_tokens": drafts} if name == LOOKUP else {}
    tokens: list[list[int]] = []
    began = time.perf_counter()
    for text in texts:
        ids = torch.tensor([loaded.tokenizer(text).input_ids])
        with torch.inference_mode():
            out = loaded.model.generate(  # type: ignore[operator]
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new,
                do_sample=False,
                **options,
            )
        tokens.append(out[0, ids.shape[1] :].tolist())
    return Lane(name, tokens, time.perf_counter() - began)


def _nwor(
    loaded: Loaded, name: str, texts: Sequence[str], new: int, drafts: int, mode: str
) -> Lane:
    result = generate(loaded, list(texts), mode=mode, num_draft_tokens=drafts, max_new_tokens=new)
    # Like loading, the checks that an engine makes when it takes a model over come once.
    seconds = result.stats.prefill_seconds + result.stats.decode_seconds
    return Lane(name, [output.token_ids for output in result.outputs], seconds, result)
