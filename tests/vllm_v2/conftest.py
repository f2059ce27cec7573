"""Tests on vLLM's V2 model runner, which runs on CPUs under Triton's interpreter only.

A pytest process of its own: the interpreter is switched on for the whole process, and vLLM is told
that Triton has a backend for CPUs.

pytest tests/vllm_v2
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FOUND = bool(find_spec("vllm") and find_spec("triton"))
MISSING = "vLLM or Triton is not installed"

for name in ("triton", "vllm"):
    if name in sys.modules:
        raise pytest.UsageError(f"tests/vllm_v2 needs a process of its own: {name} is imported")

sys.path[:0] = [str(HERE), str(HERE.parent / "vllm"), str(HERE.parent / "triton")]

from fixtures import allow_warnings, models, one_at_a_time, use_vllm  # noqa: E402, F401 - a fixture

use_vllm(TRITON_INTERPRET="1", VLLM_USE_V2_MODEL_RUNNER="1")
collect_ignore_glob = [] if FOUND else ["test_*.py"]

if FOUND:
    from nwor.vllm.interpreter import offer_interpreter

    offer_interpreter()
    with warnings.catch_warnings():  # importing vLLM warns; nwor's tests turn warnings into errors
        warnings.simplefilter("ignore")
        import harness_v2  # noqa: F401


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    allow_warnings(items, HERE)


def pytest_report_header() -> str:
    return "vllm V2: interpreted" if FOUND else f"tests/vllm_v2 skipped: {MISSING}"


@pytest.fixture
def engine(models: Callable[[str], str]) -> Callable[..., object]:  # noqa: F811
    """One engine at a time, kept while tests ask for the same one."""
    from harness_v2 import EngineV2

    def make(model: str, drafter: str | None = "llama-near", **options: object) -> EngineV2:
        return EngineV2(model, drafter=drafter and models(drafter), **options)

    return one_at_a_time(make, models)
