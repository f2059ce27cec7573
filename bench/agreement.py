"""Why two greedy runs of one model disagree: a tie, rounding by batch shape, or a fault."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

SPLIT_ROWS = 5
"""Rows of a verify step with four drafts."""


@dataclass
class Difference:
    """The first token at which a run leaves its reference.

    Attributes:
        prompt: index of the prompt.
        position: index of the token among the generated ones.
        gap: difference of the two tokens' logits when the common prefix is computed at once.
        noise: how far the logits of the two move when the last rows are computed as a verify step
            of their own: the rounding that batch shape alone causes.
        cause: ``tie``, ``batch shape``, or ``unexplained``.
    """

    prompt: int
    position: int
    gap: float
    noise: float
    cause: str

    def __str__(self) -> str:
        return (
            f"prompt {self.prompt} leaves at token {self.position}: {self.cause} "
            f"(gap {self.gap:.3g}, noise {self.noise:.3g})"
        )


def differences(
    model: PreTrainedModel,
    prompts: Sequence[list[int]],
    ours: Sequence[list[int]],
    theirs: Sequence[list[int]],
) -> list[Difference]:
    """Return the first difference of each prompt's two continuations; equal ones are left out."""
    found = []
    for index, (prompt, a, b) in enumerate(zip(prompts, ours, theirs, strict=True)):
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        if at is not None:
            found.append(_explain(model, index, at, prompt + a[:at], (a[at], b[at])))
    return found


@torch.inference_mode()
def _explain(
    model: PreTrainedModel, prompt: int, position: int, prefix: list[int], pair: tuple[int, int]
) -> Difference:
    ids = torch.tensor([prefix])
    whole = model(ids, use_cache=False).logits[0, -1].float()
    split = _in_two(model, ids)
    gap = float((whole[pair[0]] - whole[pair[1]]).abs())
    noise = float((whole - split)[list(pair)].abs().max())
    cause = "tie" if gap == 0 else "batch shape" if gap <= 2 * noise else "unexplained"
    return Difference(prompt, position, gap, noise, cause)


def _in_two(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the last row's logits, its last rows computed like a verify step."""
    first = model(ids[:, :-SPLIT_ROWS], use_cache=True)
    last = model(ids[:, -SPLIT_ROWS:], past_key_values=first.past_key_values, use_cache=True)
    logits: Tensor = last.logits
    return logits[0, -1].float()
