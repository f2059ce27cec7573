"""Kernels under Triton's interpreter. A pytest process of its own: the switch holds for the process.

pytest tests/triton

On a GPU the overlay's and the mover's tests run with compiled kernels:

NWOR_TEST_DEVICE=cuda pytest tests/triton
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

import pytest

MISSING = "triton is not installed: pip install 'nwor[triton]'"
DEVICE = os.environ.get("NWOR_TEST_DEVICE", "cpu")

if "triton" in sys.modules:
    raise pytest.UsageError("tests/triton needs a process of its own: triton is already imported")
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]


def pytest_report_header() -> str:
    how = "interpreted" if DEVICE == "cpu" else f"compiled for {DEVICE}"
    return f"triton: {how}" if find_spec("triton") else f"tests/triton skipped: {MISSING}"
