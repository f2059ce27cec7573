"""A short soak of vLLM is clean, one of a broken engine is not, and a refused one is not soaked."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from soak_mutants import MUTANTS

HERE = Path(__file__).parent

Said = dict[str, tuple[int, str]]


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("soak") / "soak.json"


@pytest.fixture(scope="module")
def said(record: Path) -> Said:
    """Exit codes and tables of all soaks; in a process that is forked, with one thread."""
    done = subprocess.run(
        [sys.executable, str(HERE / "soak_mutants.py"), str(record)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: Said = json.loads(done.stdout.partition("FOUND ")[2])
    return found


def test_a_sound_engine(said: Said, record: Path) -> None:
    code, text = said["sound"]
    assert code == 0, text
    found = json.loads(record.read_text())
    totals: dict[str, Any] = found["totals"]
    assert found["violations"] == []
    assert found["not_tested"] == [], "preemption, aborts and rejections are what it is for"
    assert totals["drafted"] == totals["accepted"] + totals["rejected"]
    assert totals["requests"] == totals["finished"] + totals["aborted"]
    assert totals["tokens"] > totals["requests"]
    assert totals["checks"] > totals["steps"] // 2
    assert str(record.parent) not in record.read_text()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_broken_engine(said: Said, mutant: Any) -> None:
    code, text = said[mutant.__name__]
    assert re.search(f"first: {MUTANTS[mutant]}", text), text
    assert "python -m nwor.soak --engine vllm --seed 3 " in text
    assert code == 1


REFUSED = """
import sys
from nwor.soak.cli import main
from nwor.vllm import reservation
from nwor.vllm.eligibility import EngineRefusal, Refusal

why = Refusal(EngineRefusal.NO_ROOM, "a problem", "a remedy")
reservation._cache_refusals = lambda config, cache: [why]
sys.exit(main(["--engine", "vllm", "--seconds", "1"]))
"""


@pytest.mark.parametrize(
    ("program", "settings", "says"),
    [
        (
            ["-c", REFUSED],
            {},
            "nwor soak: nwor does not serve this engine: no_room_for_staging: a problem",
        ),
        (
            ["-m", "nwor.soak", "--engine", "vllm"],
            {"VLLM_USE_V2_MODEL_RUNNER": "1"},
            "nwor soak: soak runs vLLM's V1 runner only: unset VLLM_USE_V2_MODEL_RUNNER",
        ),
    ],
    ids=["refused", "v2"],
)
def test_an_engine_that_is_not_soaked(
    program: list[str], settings: dict[str, str], says: str
) -> None:
    done = subprocess.run(
        [sys.executable, *program],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert "violations" not in done.stdout
