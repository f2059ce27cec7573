"""Models and values that are refused, by name, before anything runs."""

import copy
import json
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    DeepseekV3Config,
    FalconConfig,
    Lfm2Config,
    Llama4TextConfig,
    MambaConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
    T5Config,
)

from engine import models
from nwor.engine import (
    AssistantDrafter,
    Drafter,
    Engine,
    ModelLoadError,
    Options,
    PromptLookup,
    Proposal,
    Sampling,
    UnsupportedModelError,
    generate,
    load,
)
from nwor.engine.probe import check_config, probe_layers
from nwor.errors import InputError, ModeError

SMALL = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (T5Config(vocab_size=50, d_model=32, num_layers=2), "encoder-decoder"),
        (MambaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2), "recurrent"),
        (RecurrentGemmaConfig(**SMALL), "recurrent"),
        (Qwen3NextConfig(**SMALL), "recurrent"),
        (Lfm2Config(**SMALL), "recurrent"),
        (DeepseekV3Config(**SMALL), "MLA"),
        (Llama4TextConfig(**SMALL), "chunked"),
    ],
    ids=lambda value: getattr(value, "model_type", value),
)
def test_kinds_are_refused_before_weights_are_read(
    config: PreTrainedConfig, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        check_config(config)
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not weights: nobody must read this")
    with pytest.raises(UnsupportedModelError, match=reason):
        load(str(tmp_path))


def test_attention_that_bypasses_the_interface() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FalconConfig(**SMALL))
    with pytest.raises(UnsupportedModelError, match="bypass"):
        probe_layers(model.eval())


def test_window_that_only_the_mask_knows() -> None:
    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        **SMALL, num_key_value_heads=2, intermediate_size=32, moe_intermediate_size=16, num_experts=2,
        num_experts_per_tok=1, shared_expert_intermediate_size=16, use_sliding_window=True,
        sliding_window=4, max_window_layers=0, layer_types=["sliding_attention"] * 2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(UnsupportedModelError, match="mask of layer"):
        probe_layers(model)


def test_bidirectional_model() -> None:
    torch.manual_seed(0)
    model = BertLMHeadModel(BertConfig(**SMALL, intermediate_size=32, is_decoder=False)).eval()
    with pytest.raises(UnsupportedModelError):
        probe_layers(model)


def test_a_model_that_does_more_than_attention_tells() -> None:
    """State carried between tokens outside attention shows in the logits."""
    model = copy.deepcopy(models.tiny("llama"))
    layer = model.model.layers[0]
    layer.register_forward_hook(lambda _, __, out: out + out.cumsum(1))
    with pytest.raises(UnsupportedModelError, match="logits differ"):
        Engine(model)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 0},
        {"num_draft_tokens": -1},
        {"num_draft_tokens": 65},
        {"stop_strings": ("",)},
    ],
)
def test_options_out_of_range(options: dict[str, object]) -> None:
    with pytest.raises(InputError):
        Options(**options)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
    ],
)
def test_sampling_out_of_range(values: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(values))):
        Sampling(**values)


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"max_batch": 0}, "max_batch"),
        ({"max_length": 0}, "max_length"),
        ({"max_length": models.CONTEXT + 1}, "context"),
        ({"max_draft": -1}, "max_draft"),
        ({"prefill_chunk": 0}, "prefill_chunk"),
        ({"mover": "teleport"}, "teleport"),
    ],
)
def test_engine_sizes(sizes: dict[str, object], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        Engine(models.tiny("llama"), **sizes)
    assert models.tiny("llama").config._attn_implementation == "eager"


def test_unknown_mode() -> None:
    with pytest.raises(ModeError, match="sideways"):
        Engine(models.tiny("llama"), mode="sideways")


@pytest.mark.parametrize(
    ("prompts", "reason"),
    [
        ([], "no prompts"),
        ([[]], "prompt 0 is empty"),
        ([[3], [3] * 40], "prompt 1 has 40 tokens"),
        ([[3, models.VOCAB]], "outside"),
        ([[-1]], "outside"),
    ],
)
def test_prompts(prompts: list[list[int]], reason: str) -> None:
    with Engine(models.tiny("llama"), max_length=42) as engine:
        with pytest.raises(InputError, match=reason):
            engine.run(prompts, Options(max_new_tokens=3))
        assert len(list(engine.run([[3, 4]], Options(max_new_tokens=3)))) > 0


def test_more_drafts_than_the_engine_has_room_for() -> None:
    with (
        Engine(models.tiny("llama"), max_draft=2) as engine,
        pytest.raises(InputError, match="made for 2"),
    ):
        engine.run([[3]], Options(num_draft_tokens=3))


def test_assistant_with_another_vocabulary() -> None:
    config = copy.deepcopy(models.CONFIGS["llama"])
    config.vocab_size = models.VOCAB + 1
    assistant = models.build(config)
    with pytest.raises(InputError, match="98 token ids, the target 97"):
        Engine(models.tiny("llama"), drafter=AssistantDrafter(assistant))
    assert models.tiny("llama").config._attn_implementation == "eager"


class _Bad(Drafter):
    def __init__(self, proposal: Proposal) -> None:
        self._proposal = proposal

    def propose(self, requests: object, limits: object) -> Proposal:
        return self._proposal


@pytest.mark.parametrize(
    "proposal",
    [
        Proposal([[models.VOCAB]]),
        Proposal([[-1]]),
        Proposal([]),
        Proposal([[1], [1]]),
        Proposal([[1, 2]], [torch.ones(1, models.VOCAB)]),
        Proposal([[1]], [torch.ones(1, models.VOCAB - 1)]),
        Proposal([[1]], [torch.ones(models.VOCAB)]),
    ],
)
def test_drafters_that_talk_nonsense(proposal: Proposal) -> None:
    with Engine(models.tiny("llama"), drafter=_Bad(proposal)) as engine:
        with pytest.raises(InputError, match="_Bad"):
            list(engine.run([[3, 4]], Options()))
        assert engine.cache.window is None
        assert engine.free_pages == 8


def test_prompt_lookup_sizes() -> None:
    with pytest.raises(InputError, match="ngram"):
        PromptLookup(max_ngram=1, min_ngram=2)


def test_nothing_to_load(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ModelLoadError, match="no weights"):
        load(str(tmp_path))
    with pytest.raises(ModelLoadError, match="is a file"):
        load(str(tmp_path / "config.json"))
    for missing in (str(tmp_path / "nope"), "./nope", "~/nope"):
        with pytest.raises(ModelLoadError, match=r"no folder .*nope.* give the folder"):
            load(missing)
    with pytest.raises(InputError, match="float8"):
        load(str(tmp_path), "float8")


def test_text_needs_a_tokenizer() -> None:
    with pytest.raises(InputError, match="no tokenizer"):
        generate(models.tiny("llama"), "hello")
    with pytest.raises(InputError, match="prompt 0 is empty"):
        generate(models.tiny("llama"), [""])
    with pytest.raises(InputError, match="batch_size"):
        generate(models.tiny("llama"), [[3]], batch_size=0)
    with pytest.raises(InputError, match="oracle"):
        generate(models.tiny("llama"), [[3]], drafter="oracle")
