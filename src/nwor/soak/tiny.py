"""Seeded models of a few thousand weights, a tokenizer of single characters, and plain greedy texts.

The texts come from stock transformers, without nwor and without speculation. What a greedy model says
after any beginning of such a text is its rest, so one text gives the right answers to many prompts.
"""

from __future__ import annotations

import importlib
import random
from pathlib import Path
from typing import Any

import torch

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
VOCAB = SPECIAL + [chr(c) for c in range(32, 127)] + ["\n"]
FIRST = len(SPECIAL)
"""First id that is a character."""

_CLEAR = 1e-3
"""Least distance of the best logit to the second: above any rounding by another batch shape."""

_COMMON: dict[str, Any] = {
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


def tiny_model(name: str) -> Any:  # noqa: ANN401 - a transformers model
    """Build a float32 model.

    ``gemma3`` has 6 layers, windows of 48 but in every third one, and says the same token for ever,
    since its output is its embedding; ``gemma3-untied`` does not. ``llama`` has 2 layers.
    """
    transformers: Any = importlib.import_module("transformers")  # takes seconds; may be missing
    torch.manual_seed(0)
    if name.startswith("gemma3"):
        config = transformers.Gemma3TextConfig(
            **_COMMON,
            num_hidden_layers=6,
            sliding_window=48,
            sliding_window_pattern=3,
            tie_word_embeddings=name == "gemma3",
        )
        model = transformers.Gemma3ForCausalLM(config)
    else:
        config = transformers.LlamaConfig(**_COMMON, num_hidden_layers=2, tie_word_embeddings=False)
        model = transformers.LlamaForCausalLM(config)
    return model.to(torch.float32).eval()


def write_tokenizer(path: Path) -> None:
    """Write a tokenizer of single characters beside a model."""
    transformers: Any = importlib.import_module("transformers")
    tokenizers: Any = importlib.import_module("tokenizers")
    unknown = SPECIAL[3]
    words = tokenizers.models.WordLevel(
        {text: i for i, text in enumerate(VOCAB)}, unk_token=unknown
    )
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(
        tokenizers.Regex(r"[\s\S]"), "isolated"
    )
    tokenizer.decoder = tokenizers.decoders.Fuse()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL[1],
        eos_token=SPECIAL[2],
        pad_token=SPECIAL[0],
        unk_token=unknown,
    ).save_pretrained(path)


@torch.inference_mode()
def greedy_texts(
    model: Any,  # noqa: ANN401 - a transformers model
    count: int,
    *,
    start: int,
    length: int,
    seed: int,
) -> list[list[int]]:
    """Let stock transformers write texts, greedily and without speculation.

    A text ends where the model was undecided: there, another batch shape could choose another token.

    Args:
        model: a causal transformers model.
        count: texts to write.
        start: random tokens each begins with.
        length: tokens of a text; no text is shorter than half of it.
        seed: of the random tokens.
    """
    rng = random.Random(seed)  # noqa: S311 - repeatable, not secret
    texts: list[list[int]] = []
    while len(texts) < count:
        prompts = [
            [1, *(rng.randrange(FIRST, len(VOCAB)) for _ in range(start - 1))] for _ in range(count)
        ]
        texts += [text for text in _continued(model, prompts, length) if 2 * len(text) >= length]
    return texts[:count]


def _continued(
    model: Any,  # noqa: ANN401 - a transformers model
    prompts: list[list[int]],
    length: int,
) -> list[list[int]]:
    """Continue prompts of one length; each ends where the model was undecided."""
    ids = torch.tensor(prompts)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=length - ids.shape[1],
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack(out.logits, 1).float().topk(2).values  # [prompts, steps, 2]
    clear = (best[..., 0] - best[..., 1] > _CLEAR).long().cumprod(1).sum(1)
    return [
        text[: ids.shape[1] + int(end)]
        for text, end in zip(out.sequences.tolist(), clear, strict=True)
    ]
