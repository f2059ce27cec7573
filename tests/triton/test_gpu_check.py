"""The prepared run for a GPU, as far as it goes without one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "bench" / "gpu_check.sh"


def check(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, *map(str, arguments)],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_dry_run_goes_through_all_parts_and_says_so(tmp_path: Path) -> None:
    """In the order and under the names of docs/gpu.md."""
    done = check("--dry-run", "--json", tmp_path / "out.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failed: none; not run: ['vllm']" in done.stdout
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["dry_run"]
    parts = found["parts"]
    table = (ROOT / "docs" / "gpu.md").read_text().split("| part |")[1].split("\n\n")[0]
    assert list(parts) == re.findall(r"^\| (\w+) \|", table, re.MULTILINE)
    assert parts["tests"]["device"] == "cpu"
    assert re.match(r"\d+ passed", parts["tests"]["summary"])
    assert set(parts["host"]["window_us_without_launches"]) == {"1", "32", "256"}
    assert parts["windows"]["rows_filled_in_steady_state"] == 0
    assert parts["windows"]["faults"] == {}
    assert [row["requests"] for row in parts["commit"]["windows"]] == [1, 2, 8]
    assert parts["graph"]["durable_rows_are_the_accepted_ones"]
    assert parts["vllm"]["not_run"].startswith(("a dry run starts no engine", "vLLM cannot be"))


def test_a_run_that_is_short_of_time_says_what_it_left_out(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = check("--dry-run", "--parts", "graph", "--seconds", 9, "--json", out)
    assert done.returncode == 0
    assert "not run: ['graph']" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="about hosts without a GPU")
def test_without_a_gpu_nothing_is_claimed(tmp_path: Path) -> None:
    done = check("--json", tmp_path / "out.json")
    assert done.returncode == 1
    assert "nothing was run" in done.stderr
    assert not (tmp_path / "out.json").exists()
