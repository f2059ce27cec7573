"""All kernels compile ahead of time for GPUs that are not here, without spills."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
KERNELS = {"move_rows", "fill", "begin", "close, commit", "close, abort"}
TARGETS = {"sm_80", "sm_90", "sm_100", "gfx942"}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> list[dict]:
    """In a process of its own, which must not be interpreted."""
    folder = tmp_path_factory.mktemp("kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        patch.setenv("TRITON_CACHE_DIR", str(folder / "cache"))
        done = subprocess.run(
            [sys.executable, BENCH / "kernel_report.py", "--json", folder / "kernels.json"],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "kernels.json").read_text())["kernels"]


def test_every_kernel_for_every_target(compiled: list[dict]) -> None:
    assert {(k["kernel"], k["target"]) for k in compiled} == {
        (kernel, target) for kernel in KERNELS for target in TARGETS
    }
    for kernel in compiled:
        assert kernel["registers"] > 0
        assert kernel["spills"] == 0, kernel
        copies = kernel["kernel"] in {"move_rows", "fill"}
        assert kernel["shared_bytes"] <= (0 if copies else 64), kernel  # 64: never limits occupancy


def recorded_report() -> dict:
    return json.loads((BENCH / "results" / "kernels.json").read_text())


def test_the_table_of_the_docs_shows_the_figures_on_record() -> None:
    lines = (BENCH.parent / "docs" / "gpu.md").read_text().splitlines()
    targets = ["sm_80", "sm_90", "sm_100", "gfx942"]
    header = f"| kernel | size | warps | {' | '.join(targets)} | spills | shared |"
    start = lines.index(header) + 2
    shown = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        shown.append([cell.strip() for cell in line.strip("|").split("|")])
    kernels = recorded_report()["kernels"]
    expected = []
    for each in [kernels[at : at + len(targets)] for at in range(0, len(kernels), len(targets))]:
        assert [kernel["target"] for kernel in each] == targets
        same = {(k["kernel"], k["size"], k["num_warps"]) for k in each}
        largest = (max(kernel[name] for kernel in each) for name in ("spills", "shared_bytes"))
        expected.append([*map(str, (*same.pop(), *(k["registers"] for k in each), *largest))])
        assert not same
    assert shown == expected


def test_figures_on_record_are_those_of_the_kernels(compiled: list[dict]) -> None:
    """bench/results/kernels.json is made again when a kernel changes."""
    recorded = recorded_report()
    if recorded["environment"]["versions"]["triton"] != version("triton"):
        pytest.skip("recorded with another version of triton")
    assert recorded["kernels"] == compiled
