"""Seeded models of a few thousand weights with a tokenizer of single characters."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
NOISE = {"llama-draft": 0.02, "llama-near": 0.006}
VOCAB = SPECIAL + [chr(c) for c in range(32, 127)] + ["\n"]


def write_model(name: str, path: Path) -> None:
    """Write ``llama``, ``llama-draft`` or ``llama-near`` (the same with noise), or ``gemma3``."""
    torch.manual_seed(0)
    common = {
        "vocab_size": len(VOCAB),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if name == "gemma3":
        model = Gemma3ForCausalLM(
            Gemma3TextConfig(
                **common, num_hidden_layers=6, sliding_window=48, sliding_window_pattern=3
            )
        )
    else:
        model = LlamaForCausalLM(
            LlamaConfig(**common, num_hidden_layers=2, tie_word_embeddings=False)
        )
    if name in NOISE:
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight), alpha=NOISE[name])
    model.to(torch.float32).save_pretrained(path)
    tokenizer = Tokenizer(WordLevel({text: i for i, text in enumerate(VOCAB)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
    ).save_pretrained(path)
