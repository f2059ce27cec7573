"""`nwor audit` on the V2 runner, as a user starts it: a process of its own, vLLM's variables alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nwor.cli import main

Models = Callable[[str], str]


def audit(models: Models, out: Path, *options: str, program: str = "") -> tuple[int, str, Any]:
    """Exit code, stdout and JSON of the command; `program` runs before it."""
    start = ["-c", program] if program else ["-m", "nwor.cli"]
    arguments = ["audit", "--engine", "vllm", "--model", models("llama"), "--dtype", "float32"]
    arguments += ["--drafter", f"model:{models('llama-near')}", "--json", str(out), *options]
    settings = {name: value for name, value in os.environ.items() if not name.startswith("NWOR_")}
    done = subprocess.run(
        [sys.executable, *start, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=settings,
    )
    assert out.exists(), done.stderr
    return done.returncode, done.stdout, json.loads(out.read_text())


def test_every_invariant_is_put_to_the_test_and_holds(models: Models, tmp_path: Path) -> None:
    """Bytes, final rows and the stock engine as control included."""
    options = ("--level", "bytes", "--control", "--workload", "prefixes", "preemption")
    code, table, found = audit(models, tmp_path / "audit.json", *options)
    assert code == 0, table
    assert found["runner"] == "v2"
    assert [verdict["held"] for verdict in found["verdicts"]] == [True] * 6
    for workload in found["workloads"]:
        staged, stock = workload["staged"], workload["control"]
        assert workload["not_exercised"] is None
        assert staged["violations"] == {}
        assert staged["final_rows"] > 100
        assert 0 < staged["rejected"] < staged["drafts"]
        assert stock["violations"]["rejected_row_in_durable_page"] == stock["rejected"] > 0


_KEEPS_ONE_TOO_MANY = """
import sys
from nwor.cli import main
from nwor.store.device_window import DeviceWindow

commit = DeviceWindow.commit
DeviceWindow.commit = lambda window, rejected: commit(window, (rejected - 1).clamp(min=0))
sys.exit(main(sys.argv[1:]))
"""


def test_a_commit_that_keeps_a_rejected_row_is_found_and_placed(
    models: Models, tmp_path: Path
) -> None:
    out = tmp_path / "audit.json"
    mine = tmp_path / "mine.jsonl"
    mine.write_text('{"prompt": "1, 2, 3, 4,", "max_tokens": 12}\n')
    code, table, found = audit(models, out, "--workload", str(mine), program=_KEEPS_ONE_TOO_MANY)
    assert code == 1, table
    assert "I1  BROKEN      mine: I1 rejected_row_in_durable_page: step " in table
    verdicts = {verdict["invariant"]: verdict["held"] for verdict in found["verdicts"]}
    assert verdicts["I1"] is False
    place = found["workloads"][0]["staged"]["first"]["rejected_row_in_durable_page"]
    assert place["step"] > 1
    assert place["request"]
    assert place["group"] == 0
    assert place["slot"] % 128 == place["position"] % 128


@pytest.mark.parametrize(
    ("drafter", "interpret", "reason"),
    [
        ("adversary", "1", "loads no drafters of one's own class. Use model:PATH_OR_ID"),
        ("prompt-lookup", "1", "n-gram kernels fail under Triton's interpreter"),
        ("model:nope", "0", "Set TRITON_INTERPRET=1, or unset VLLM_USE_V2_MODEL_RUNNER"),
    ],
)
def test_what_cannot_be_audited_is_said_before_an_engine_starts(
    drafter: str,
    interpret: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    code = main(["audit", "--engine", "vllm", "--model", "nope", "--drafter", drafter])
    assert code == 2
    assert reason in capsys.readouterr().err
