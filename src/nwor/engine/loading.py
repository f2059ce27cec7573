"""Loading a model by path or id: refused by name before its weights are read, where possible."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as hf_logging

from nwor.engine.errors import ModelLoadError, UnsupportedModelError
from nwor.engine.probe import check_config
from nwor.errors import InputError

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A model and its tokenizer.

    Attributes:
        model: the model.
        tokenizer: None if the model comes without one.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None


def load(name: str, dtype: str = "auto") -> Loaded:
    """Load a model and its tokenizer.

    Args:
        name: a directory or a model id.
        dtype: ``auto`` (as stored), ``float32``, ``bfloat16`` or ``float16``.

    Raises:
        UnsupportedModelError: a kind of model that the engine does not run.
        ModelLoadError: no model there, or no weights.
        InputError: unknown dtype.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise InputError(f"unknown dtype {dtype!r}; known: auto, {', '.join(DTYPES)}")
    if (path := Path(name).expanduser()).exists():
        name = str(path)
    check_config(_config(name))
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=DTYPES.get(dtype, "auto"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot load the weights of {name!r}: {error}") from error
    return Loaded(model, _tokenizer(name))


def _config(name: str) -> PreTrainedConfig:
    path = Path(name)
    if not path.exists() and (name.startswith((".", "~", os.sep)) or name.count("/") > 1):
        raise ModelLoadError(
            f"there is no folder {name!r} (looked for {path.expanduser().resolve()}): give the folder "
            "that holds config.json and the weights, or a model id such as 'org/name'"
        )
    if path.exists() and not path.is_dir():
        raise ModelLoadError(f"{name!r} is a file: give the directory of a model, or its id")
    if path.is_dir():
        if not (path / "config.json").exists():
            raise ModelLoadError(f"{name!r} has no config.json: it is not a model directory")
        if not any(any(path.glob(pattern)) for pattern in _WEIGHTS):
            raise ModelLoadError(f"{name!r} has no weights ({', '.join(_WEIGHTS)})")
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"no model called {name!r}: {error}") from error
    if type(config) not in AutoModelForCausalLM._model_mapping:  # noqa: SLF001 - no public query
        check_config(config)
        raise UnsupportedModelError(f"{config.model_type} is not a causal language model")
    return cast("PreTrainedConfig", config)


def _tokenizer(name: str) -> PreTrainedTokenizerBase | None:
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError):
        return None
