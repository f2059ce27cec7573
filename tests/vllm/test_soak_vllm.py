"""A short soak of vLLM is clean, and one of a broken engine is not.

Both in one process of their own, with one engine: starting it takes longer than both.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

_BOTH = """
import sys
import nwor.soak.cli as cli
from nwor.soak.on_vllm import VllmSoak
from nwor.store.staging import StagingPages

engine = VllmSoak()
engine.close = lambda: None
cli.start = lambda name: engine
common = ["--engine", "vllm", "--seed", "3", "--check-every", "2"]
sound = cli.main([*common, "--seconds", "6", "--json", sys.argv[1]])
print("CODE", sound)
StagingPages.release = lambda self, request: None
print("CODE", cli.main([*common, "--seconds", "60"]))
del engine.close
engine.close()
"""


def test_a_sound_engine_and_one_that_leaks(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    done = subprocess.run(
        [sys.executable, "-c", _BOTH, str(out)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    sound, leaking, _ = done.stdout.split("CODE")
    assert leaking.split()[0] == "0", sound
    found = json.loads(out.read_text())
    totals = found["totals"]
    assert found["violations"] == []
    assert found["not_tested"] == [], "preemption, aborts and rejections are what it is for"
    assert totals["drafted"] == totals["accepted"] + totals["rejected"]
    assert totals["requests"] == totals["finished"] + totals["aborted"]
    assert totals["compared"] == totals["tokens"] > totals["requests"]
    assert totals["checks"] > totals["steps"] // 2
    assert str(tmp_path) not in out.read_text()
    text = " ".join(leaking.split())
    assert "first: I6 staging_pages_are_free_or_owned_by_one: wave 0, step " in text
    assert "staging pages of requests that are gone" in text
    assert "python -m nwor.soak --engine vllm --seed 3 " in text
    assert done.stdout.split()[-1] == "1"
