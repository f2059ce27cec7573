"""vLLM's configuration of the engine that `nwor doctor` is asked about, or a line that says why not."""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from pathlib import Path
from typing import Any

from nwor.errors import InputError

NGRAM = '{"method": "ngram", "num_speculative_tokens": 4}'
CONFIGS = ("config.json", "params.json")
"""What vLLM looks for in the folder of a model."""

OPTIONS = {
    "dtype": "dtype",
    "cache_dtype": "kv_cache_dtype",
    "block_size": "block_size",
    "kv_cache_memory_bytes": "kv_cache_memory_bytes",
    "max_num_seqs": "max_num_seqs",
    "max_model_len": "max_model_len",
    "tensor_parallel_size": "tensor_parallel_size",
    "pipeline_parallel_size": "pipeline_parallel_size",
}
"""Field of vLLM's configuration: our argument."""

OFFLINE = ("couldn't connect", "outgoing traffic", "offline mode")
"""Words of the hub's client without a network."""


def engine_config(args: argparse.Namespace) -> Any:  # noqa: ANN401 - VllmConfig
    """Let vLLM make its configuration of the arguments.

    Raises:
        InputError: it cannot; names the option, its value and what to give instead.
    """
    speculation = _speculation(args.speculative_config)
    _check_model(args.model)
    from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415 - heavy, and optional

    given = {name: getattr(args, name) for name in OPTIONS.values()}
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if isinstance(value, int) and value < 1 and name != "max_model_len":  # -1: what fits
            raise InputError(f"--{name.replace('_', '-')} {value}: give 1 or more")
    try:
        return EngineArgs(
            model=args.model, speculative_config=speculation, **given
        ).create_engine_config()
    except Exception as error:  # vLLM, transformers, pydantic and the hub have no base in common
        raise InputError(_one_line(error, args)) from error


def _speculation(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(
            f"--speculative-config {text!r} is not JSON ({error}); give an object like {NGRAM}"
        ) from error
    if not isinstance(found, dict):
        raise InputError(f"--speculative-config {text!r} is no object; give one like {NGRAM}")
    return found


def _check_model(model: str) -> None:
    """Refuse what vLLM's own message would not explain."""
    path = Path(model)
    if path.is_dir():
        there = [path / name for name in CONFIGS if (path / name).is_file()]
        if not there:
            raise InputError(
                f"--model {model!r} has no {CONFIGS[0]}; give the folder of a model, or its id"
            )
        _check_json(model, there[0])
    elif path.is_file() and path.suffix != ".gguf":
        raise InputError(
            f"--model {model!r} is a file; give the folder of a model, with {CONFIGS[0]} in it"
        )
    elif (
        not path.exists()
        and "://" not in model
        and not re.fullmatch(r"\w[\w.-]*(/[\w.:-]+)?", model)
    ):
        raise InputError(
            f"--model {model!r}: no such folder, and not the id of a model (OWNER/NAME)"
        )


def _check_json(model: str, file: Path) -> None:
    wrong = None
    try:
        if not isinstance(json.loads(file.read_text()), dict):
            wrong = "no object"
    except (OSError, ValueError) as error:
        wrong = str(error)
    if wrong:
        raise InputError(
            f"--model {model!r}: its {file.name} is not a model's configuration ({wrong}); download "
            "the model again, or give another one"
        )


def _one_line(error: Exception, args: argparse.Namespace) -> str:
    """Name the option that an error of vLLM's is about, its value, what vLLM says and what to do."""
    details: list[dict[str, Any]] = [{"loc": (), "msg": str(error)}]
    if hasattr(error, "errors"):  # pydantic's
        details = error.errors()
    field = next(iter(details[0]["loc"]), "")
    said = details[0]["msg"].removeprefix("Value error, ") or type(error).__name__
    if "tensor parallel size" in said:
        field = "tensor_parallel_size"
    option, remedy = _option(str(field), getattr(error, "title", ""))
    if any(words in said for words in OFFLINE):
        remedy = "give the folder of a model, or go online to have it downloaded"
    value = getattr(args, option)
    name = option.replace("_", "-")
    return (
        f"--{name} {value!r}: vLLM says: {textwrap.shorten(said, 240, placeholder=' …')}; {remedy}"
    )


def _option(field: str, title: str) -> tuple[str, str]:
    if field in OPTIONS:
        return OPTIONS[field], "give a value that vLLM allows"
    if title == "SpeculativeConfig":
        return "speculative_config", f"give an object like {NGRAM}"
    return "model", "give a model that this vLLM knows, by folder or id"
