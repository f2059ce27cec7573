"""What a model is, found out by asking it: the kinds that cannot be run exactly are refused.

Three questions. Does its configuration name a kind we do not run (`check_config`, before any weight
is loaded)? Do all its layers come to our attention function, with which K/V geometry, and is what
they tell it all there is to their mask (`probe_layers`)? Does the engine compute what the model
itself computes (`nwor.engine.core.Engine` compares logits once at load)?
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from nwor import attention
from nwor.engine.errors import UnsupportedModelError
from nwor.engine.hook import PROBE, STEP_ARGUMENT, MaskRule, attention_of

_RECURRENT_LAYERS = {"linear_attention", "mamba", "mamba2", "recurrent", "conv", "hybrid", "ssm"}
_RECURRENT_FIELDS = (
    "ssm_cfg",
    "state_size",
    "mamba_d_state",
    "mamba_n_heads",
    "conv_L_cache",
    "attention_layers_block_type",
    "block_types",
    "linear_num_key_heads",
)
_RECURRENT_TYPES = ("mamba", "rwkv", "recurrent", "xlstm", "jamba", "zamba", "bamba")
_HARMLESS = {
    "attention_mask", "scaling", "dropout", "sliding_window", "softcap", "s_aux", "position_ids",
    "use_cache", "cache_position", "output_attentions", "output_hidden_states", "return_dict",
    "logits_to_keep", "num_items_in_batch", "output_router_logits", "is_causal",
}  # fmt: skip
_PROBE_ROWS = 6


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Geometry of one layer's attention.

    Attributes:
        index: ``layer_idx`` of the attention module.
        kv_heads: K/V heads.
        dim: size of a head, of K and V alike.
        window: rows a query sees, itself included; None for all.
    """

    index: int
    kv_heads: int
    dim: int
    window: int | None


def check_config(config: PretrainedConfig) -> None:
    """Refuse a configuration of a kind that the engine does not run.

    Raises:
        UnsupportedModelError: encoder-decoder, recurrent or hybrid, latent attention (MLA), chunked
            attention.
    """
    name, text = config.model_type, config.get_text_config()
    if config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder model; causal models only")
    layers = set(getattr(text, "layer_types", None) or ())
    fields = [f for f in _RECURRENT_FIELDS if getattr(text, f, None) not in (None, 0)]
    if layers & _RECURRENT_LAYERS or fields or name.startswith(_RECURRENT_TYPES):
        why = sorted(layers & _RECURRENT_LAYERS) or fields or [name]
        raise UnsupportedModelError(
            f"{name} keeps recurrent state ({', '.join(why)}), which has no rows to reject"
        )
    if getattr(text, "kv_lora_rank", None):
        raise UnsupportedModelError(f"{name} has latent attention (MLA): K and V differ in shape")
    if "chunked_attention" in layers:
        raise UnsupportedModelError(f"{name} has chunked attention, which only its mask tells")


@torch.inference_mode()
def probe_layers(model: PreTrainedModel) -> tuple[LayerSpec, ...]:
    """Run a few tokens through the model and see what each layer hands to its attention.

    Raises:
        UnsupportedModelError: layers that do not come to the attention interface, K and V of
            different sizes, a mask that says more than the sliding window, arguments we do not know.
    """
    check_config(model.config)
    name = model.config.model_type
    step = _ProbeStep(name)
    ids = (
        torch.arange(_PROBE_ROWS, device=model.device).unsqueeze(0)
        % model.config.get_text_config().vocab_size
    )
    with attention_of(model, PROBE):
        model(
            ids,
            position_ids=torch.arange(_PROBE_ROWS, device=model.device).unsqueeze(0),
            use_cache=False,
            **{STEP_ARGUMENT: step},
        )
    expected = model.config.get_text_config().num_hidden_layers
    if sorted(step.layers) != list(range(expected)):
        raise UnsupportedModelError(
            f"{name} has {expected} layers, of which {sorted(step.layers) or 'none'} call the "
            "attention interface: the others bypass it or keep state of their own"
        )
    return tuple(step.layers[index] for index in sorted(step.layers))


class _ProbeStep:
    """Answers with plain causal attention and writes down what it was asked."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._masks: dict[tuple[int, int | None], MaskRule] = {}
        self.layers: dict[int, LayerSpec] = {}

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, call: dict[str, Any]
    ) -> Tensor:
        index: int = module.layer_idx  # type: ignore[assignment]
        self._check_call(index, key, value, call)
        window = call.get("sliding_window")
        self._check_mask(index, call["attention_mask"], window)
        self.layers[index] = LayerSpec(index, key.shape[1], key.shape[3], window)
        part = attention.attend(query, key, value, scale=scale_of(query, call), causal=True)
        return part.out

    def _check_call(self, index: int, key: Tensor, value: Tensor, call: dict[str, Any]) -> None:
        if index in self.layers:
            raise UnsupportedModelError(f"{self._name}: layer {index} attends twice in one forward")
        if key.shape != value.shape:
            raise UnsupportedModelError(
                f"{self._name}: layer {index} has K {tuple(key.shape)} and V {tuple(value.shape)}"
            )
        if key.shape[2] != _PROBE_ROWS:
            raise UnsupportedModelError(
                f"{self._name}: layer {index} attends to {key.shape[2]} rows of {_PROBE_ROWS}"
            )
        unknown = sorted(
            k for k, v in call.items() if k not in _HARMLESS and v is not None and v is not False
        )
        if unknown:
            raise UnsupportedModelError(
                f"{self._name}: layer {index} passes {', '.join(unknown)} to attention"
            )
        if call.get("is_causal") is False:
            raise UnsupportedModelError(f"{self._name}: layer {index} is not causal")

    def _check_mask(self, index: int, mask: object, window: int | None) -> None:
        if not isinstance(mask, MaskRule):
            raise UnsupportedModelError(
                f"{self._name}: layer {index} gets a mask made elsewhere ({type(mask).__name__})"
            )
        if (id(mask), window) in self._masks:
            return
        self._masks[id(mask), window] = mask
        steps = {0, 1, 2, 3, *(2**i + d for i in range(2, 16) for d in (-1, 0, 1))}
        if window:
            steps |= {max(window * m + d, 0) for m in (1, 2, 3) for d in (-1, 0, 1)}
        query = torch.tensor(sorted(steps))[:, None]
        row = torch.arange(int(query.max()) + 1)[None, :]
        allowed = torch.as_tensor(mask.function(0, 0, query, row)).expand(
            query.shape[0], row.shape[1]
        )
        expected = row <= query
        if window is not None:
            expected = expected & (query - row < window)
        if not torch.equal(allowed, expected):
            raise UnsupportedModelError(
                f"{self._name}: the mask of layer {index} restricts more than its sliding window "
                f"({window}) says; an engine that builds no masks would be silently wrong"
            )


def scale_of(query: Tensor, call: dict[str, Any]) -> float:
    """Return the factor on the scores: the model's, or ``dim ** -0.5``."""
    scale = call.get("scaling")
    return query.shape[-1] ** -0.5 if scale is None else float(scale)
