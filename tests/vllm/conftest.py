"""Tests on the real engine. Run them in a pytest process of their own: vLLM changes process globals.

pytest tests/vllm
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MISSING = "vLLM is not installed: `make venv` adds it where a CPU wheel exists"

sys.path.insert(0, str(HERE))

from fixtures import allow_warnings, models, one_at_a_time, use_vllm  # noqa: E402, F401 - a fixture

use_vllm()
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]

if find_spec("vllm"):
    with warnings.catch_warnings():  # importing vLLM warns; nwor's tests turn warnings into errors
        warnings.simplefilter("ignore")
        import harness  # noqa: F401


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    allow_warnings(items, HERE)


def pytest_report_header() -> str:
    return "" if find_spec("vllm") else f"tests/vllm skipped: {MISSING}"


@pytest.fixture
def engine(models: Callable[[str], str]) -> Callable[..., object]:  # noqa: F811
    """One engine at a time, kept while tests ask for the same one."""
    from harness import Engine

    return one_at_a_time(Engine, models)
