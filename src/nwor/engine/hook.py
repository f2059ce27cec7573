"""The seam to transformers: an attention function and a mask function under names of our own.

transformers looks attention up by ``config._attn_implementation``. A keyword argument given to a
model's forward travels to the attention function, so each forward carries its own step and nothing is
global but the name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from nwor.errors import NoWindowError, StateError

STEP_ARGUMENT = "nwor_step"
ATTENTION = "nwor"
PROBE = "nwor_probe"


class AttentionStep(Protocol):
    """What one forward brings along: it answers every layer's attention call."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, call: dict[str, Any]
    ) -> Tensor:
        """Return ``[1, heads, rows, dim]`` for the packed rows of the batch.

        Args:
            module: the attention layer; ``module.layer_idx`` is its index.
            query: ``[1, heads, rows, dim]``.
            key: ``[1, kv_heads, rows, dim]``.
            value: the same for V.
            call: the other arguments of the call (scaling, softcap, s_aux, sliding_window, …).
        """
        ...


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object = None,
    **call: Any,  # noqa: ANN401 - whatever the model passes
) -> tuple[Tensor, None]:
    """Attention as transformers calls it; returns ``[1, rows, heads, dim]``.

    Raises:
        NoWindowError: the model was called by somebody else while an engine holds it.
    """
    step: AttentionStep | None = call.pop(STEP_ARGUMENT, None)
    if step is None:
        raise NoWindowError(
            "this model's attention belongs to an nwor engine: close the engine before calling it"
        )
    call["attention_mask"] = attention_mask
    return step.attend(module, query, key, value, call).transpose(1, 2), None


class MaskRule:
    """What a model asked of its mask; handed to the attention function in the mask's place."""

    def __init__(self, **request: Any) -> None:  # noqa: ANN401 - transformers' mask arguments
        self.function = request["mask_function"]


def register() -> None:
    """Make both names known. A name without a mask function gets no mask, which is what we want."""
    AttentionInterface.register(ATTENTION, attention)
    AttentionInterface.register(PROBE, attention)
    AttentionMaskInterface.register(PROBE, MaskRule)


@contextmanager
def attention_of(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Let `model` use the attention called `name`, and give the previous one back.

    Raises:
        StateError: another engine holds the model.
    """
    register()
    before = model.config._attn_implementation  # noqa: SLF001 - there is no public getter
    if before in (ATTENTION, PROBE):
        raise StateError("another nwor engine holds this model: close it first")
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
