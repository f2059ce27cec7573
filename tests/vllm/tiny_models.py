"""Seeded models of a few thousand weights with a tokenizer of single characters."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from nwor.soak.tiny import VOCAB, tiny_model, write_tokenizer

NOISE = {"llama-draft": 0.02, "llama-near": 0.006}


def write_eagle(path: Path, *, third: bool) -> None:
    """Write an EAGLE head, or one of EAGLE-3, which sees the target's input and first layer.

    What it drafts is of no use. Of its two layers, K and V of the second follow from what the
    attention of the first one reads. Embedding and EAGLE's output are the target's.
    """
    size, inner, ids = 64, 128, [0, 1]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(VOCAB),
        "hidden_size": size,
        "intermediate_size": inner,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "num_hidden_layers": 2,
        "tie_word_embeddings": False,
    }
    shapes = {"fc": (size, 2 * size)}
    norms = []
    if third:
        config |= {
            "eagle_aux_hidden_state_layer_ids": ids,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids},
        }
        shapes["lm_head"] = (len(VOCAB), size)
        norms = ["norm", "layers.0.hidden_norm", "layers.1.hidden_norm"]
    for layer in range(2):
        wide = 2 * size if third and layer == 0 else size
        for part in "qkv":
            shapes[f"layers.{layer}.self_attn.{part}_proj"] = (size, wide)
        shapes[f"layers.{layer}.self_attn.o_proj"] = (size, size)
        shapes[f"layers.{layer}.mlp.gate_proj"] = (inner, size)
        shapes[f"layers.{layer}.mlp.up_proj"] = (inner, size)
        shapes[f"layers.{layer}.mlp.down_proj"] = (size, inner)
        norms.append(f"layers.{layer}.post_attention_layernorm")
        if third or layer:  # the first layer of an EAGLE head has none
            norms.append(f"layers.{layer}.input_layernorm")
    weights = {f"{name}.weight": torch.randn(shape) * 0.1 for name, shape in shapes.items()}
    weights |= {f"{name}.weight": torch.ones(size) for name in norms}
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(weights, path / "model.safetensors")


def write_model(name: str, path: Path) -> None:
    """Write ``llama``, ``llama-draft`` or ``llama-near`` (the same with noise), or ``gemma3``.

    ``llama-eagle`` and ``llama-eagle3`` are EAGLE heads for ``llama``.
    """
    torch.manual_seed(0)
    if "eagle" in name:
        write_eagle(path, third=name.endswith("3"))
        return
    model = tiny_model("gemma3" if name == "gemma3" else "llama")
    if name in NOISE:
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight), alpha=NOISE[name])
    model.save_pretrained(path)
    write_tokenizer(path)
