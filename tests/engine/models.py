"""Tiny seeded models of many architectures, and what stock transformers generates with them."""

import copy
from functools import cache

import torch
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    Starcoder2Config,
)

VOCAB = 97
WINDOW = 8
CONTEXT = 512

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.4,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
_SLIDING = {"sliding_window": WINDOW}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_COMMON),
    "mistral": MistralConfig(**_COMMON, **_SLIDING),
    "qwen2": Qwen2Config(**_COMMON),
    "qwen2-sliding": Qwen2Config(
        **_COMMON, **_SLIDING, use_sliding_window=True, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**_COMMON),
    "qwen3-moe": Qwen3MoeConfig(
        **_COMMON, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "gemma2": Gemma2Config(
        **_COMMON, **_SLIDING, layer_types=_MIXED, attn_logit_softcapping=5.0, query_pre_attn_scalar=8
    ),
    "gemma3": Gemma3TextConfig(
        **_COMMON, **_SLIDING, layer_types=_MIXED, query_pre_attn_scalar=8
    ),
    "gpt-oss": GptOssConfig(**_COMMON, **_SLIDING, **_EXPERTS, layer_types=_MIXED),
    "cohere2": Cohere2Config(**_COMMON, **_SLIDING, layer_types=_MIXED),
    "phi3": Phi3Config(**_COMMON, **_SLIDING),
    "mixtral": MixtralConfig(**_COMMON, **_SLIDING, **_EXPERTS),
    "starcoder2": Starcoder2Config(**_COMMON, **_SLIDING),
    "olmo2": Olmo2Config(**_COMMON),
    "olmo3": Olmo3Config(**_COMMON, **_SLIDING, layer_types=_MIXED),
    "granite": GraniteConfig(**_COMMON),
    "smollm3": SmolLM3Config(**_COMMON),
    "gpt-neox": GPTNeoXConfig(**_COMMON),
    "gpt2": GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=CONTEXT,
        initializer_range=0.4, tie_word_embeddings=False, bos_token_id=1, eos_token_id=None,
    ),
    "opt": OPTConfig(
        vocab_size=VOCAB, hidden_size=32, ffn_dim=48, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=CONTEXT, word_embed_proj_dim=32, init_std=0.4,
        tie_word_embeddings=False,
        pad_token_id=0, bos_token_id=1, eos_token_id=None,
    ),
}  # fmt: skip


def build(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Build a float32 model with seeded weights; norms, biases and sinks are not left trivial."""
    torch.manual_seed(seed)
    # The plain implementation knows softcaps and sinks, which sdpa ignores or refuses.
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and "norm" not in name:
                parameter.normal_(0.0, 0.5)
    model.generation_config.eos_token_id = None
    return model


@cache
def tiny(name: str) -> PreTrainedModel:
    return build(CONFIGS[name])


def prompt(length: int, seed: int) -> list[int]:
    """Ids with repeats, so that prompt lookup finds something."""
    generator = torch.Generator().manual_seed(seed)
    phrase = torch.randint(2, VOCAB, (max(length // 3, 3),), generator=generator).tolist()
    tail = torch.randint(2, VOCAB, (length,), generator=generator).tolist()
    return (phrase + phrase + tail)[:length]


@torch.inference_mode()
def stock_greedy(model: PreTrainedModel, ids: list[int], count: int) -> list[int]:
    """Stock greedy decoding of one prompt, no speculation."""
    out = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
    )
    return out[0, len(ids) :].tolist()
