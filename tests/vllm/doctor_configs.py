"""Configurations of tiny models of every kind of cache, without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

COMMON = {
    "vocab_size": 128,
    "max_position_embeddings": 1024,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "dtype": "float32",
}
LLAMA: dict[str, Any] = COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "head_dim": 32,
}
GEMMA: dict[str, Any] = LLAMA | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "sliding_window": 48,
    "layer_types": ["sliding_attention", "full_attention"],
}
MLA: dict[str, Any] = COMMON | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
}
RECURRENT: dict[str, Any] = COMMON | {
    "architectures": ["MambaForCausalLM"],
    "model_type": "mamba",
    "state_size": 16,
    "conv_kernel": 4,
    "expand": 2,
    "time_step_rank": 4,
}
HYBRID: dict[str, Any] = COMMON | {
    "architectures": ["JambaForCausalLM"],
    "model_type": "jamba",
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_dt_rank": 4,
    "use_mamba_kernels": False,
}
CHUNKED: dict[str, Any] = LLAMA | {
    "architectures": ["Llama4ForCausalLM"],
    "model_type": "llama4_text",
    "num_hidden_layers": 4,
    "intermediate_size_mlp": 128,
    "attention_chunk_size": 64,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "no_rope_layers": [1, 1, 1, 0],
}


def write_config(folder: Path, config: object) -> str:
    """Write the `config.json` of a model; return the folder."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)
