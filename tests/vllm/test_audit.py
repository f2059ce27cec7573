"""The audit on the real engine: stock is convicted, nwor acquitted, and every mutant caught."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import TestCase

import pytest
from drafters import ScriptedDrafter
from harness import Engine, greedy, prompts
from tiny_models import write_model

from nwor.audit import Findings, Kind
from nwor.manager import Mode
from nwor.vllm.audit import RunnerAudit, audit_of

Get = Callable[..., Engine]
TEXTS = prompts(20, 31, 33, 60)


@pytest.fixture(params=["metadata", "bytes"])
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("NWOR_AUDIT", request.param)
    return request.param


def watching(llm: Engine) -> RunnerAudit:
    audit = audit_of(llm.runner)
    assert audit is not None
    return audit


def audited(llm: Engine, mode: Mode, **options: Any) -> Findings:
    """Findings of one run, on an audit that starts anew."""
    llm.drain()
    audit = watching(llm)
    params = [greedy(n) for n in (48, 20, 40, 33)]

    def fresh(step: int) -> None:
        if step == 0:  # after the harness has filled the pages with a pattern of its own
            audit.reset()

    llm.run(TEXTS, params, mode, arrive={1: 2, 3: 5}, before_step=fresh, **options)
    llm.drain()
    return audit.findings


def test_nothing_on_nwor(engine: Get, level: str) -> None:
    llm = engine(k=8)
    llm.learn(TEXTS, greedy(64))
    found = audited(llm, Mode.STAGE)
    assert not found.counts, found.first
    assert found.rejected > 0
    assert found.rows_checked > 1000


def test_rejected_rows_on_stock(engine: Get, level: str) -> None:
    """Attention of the stock engine is right all the same; what it leaves behind is not."""
    llm = engine(k=8)
    llm.learn(TEXTS, greedy(64))
    with TestCase().assertLogs("vllm.nwor", "ERROR") as said:
        found = audited(llm, Mode.OFF)
    kinds = {Kind.REJECTED_IN_DURABLE}
    if level == "bytes":
        kinds.add(Kind.BYTES_FOREIGN)
    assert set(found.counts) == kinds
    assert found.counts[Kind.REJECTED_IN_DURABLE] == found.rejected
    assert str(found.first[Kind.REJECTED_IN_DURABLE]).startswith("I1 rejected_row")
    assert sorted(said.output) == sorted(
        f"ERROR:vllm.nwor:nwor audit: {first} (later ones of this kind are only counted)"
        for first in found.first.values()
    )


@pytest.mark.parametrize("mode", [Mode.STAGE, Mode.OFF])
def test_groups_windows_prefixes_and_preemption(
    engine: Get, monkeypatch: pytest.MonkeyPatch, mode: Mode
) -> None:
    """Three groups with sliding windows, too little memory, shared prefixes, chunked prompts."""
    monkeypatch.setenv("NWOR_AUDIT", "bytes")
    monkeypatch.setenv("NWOR_STAGING_PAGES", "24")
    llm = engine("gemma3", k=4, blocks=54, max_num_seqs=4, max_num_batched_tokens=64)
    shared = prompts(70)[0]
    texts = [*prompts(60, 120, 100), *(shared + tail[1:] for tail in prompts(8, 12, seed=1))]
    llm.learn(texts, greedy(100))
    audit = watching(llm)

    def fresh(step: int) -> None:
        if step == 0:
            audit.reset()

    run = llm.run(texts, greedy(100), mode, arrive={3: 9, 4: 30}, before_step=fresh)
    llm.drain()
    assert run.preempted
    found = audit.findings
    if mode is Mode.STAGE:
        assert not found.counts, found.first
    else:
        assert set(found.counts) == {Kind.REJECTED_IN_DURABLE, Kind.BYTES_FOREIGN}


@pytest.mark.parametrize("mode", [Mode.STAGE, Mode.OFF])
def test_a_page_published_in_the_step_that_stages_its_last_row(
    engine: Get, monkeypatch: pytest.MonkeyPatch, mode: Mode
) -> None:
    """vLLM shares a page as soon as it schedules the row that fills it: here, a bonus token.

    The newcomer's attention reads that row in the very step in which it is staged.
    """
    monkeypatch.setenv("NWOR_AUDIT", "metadata")
    llm = engine(k=4)
    audit = watching(llm)
    caught = 0
    for length in range(20, 32):
        (text,) = prompts(length, seed=length)
        whole = text + llm.learn([text], greedy(80)).tokens["0"]
        follower = [*whole[:64], *prompts(9, seed=1)[0][1:]]
        ScriptedDrafter.silent = True
        alone = llm.run([follower], greedy(8), Mode.OFF).tokens["0"]
        ScriptedDrafter.silent = False
        llm.drain()
        assert llm.llm.reset_prefix_cache()
        llm.runner.nwor.set_mode(mode)
        audit.reset()
        core = llm.llm.llm_engine
        core.add_request("first", {"prompt_token_ids": text}, greedy(80))
        joined, answers = False, {}
        while core.has_unfinished_requests():
            running = [r for r in llm.scheduler.running if r.num_computed_tokens == 63]
            if running and running[0].spec_token_ids and not joined:
                core.add_request("second", {"prompt_token_ids": follower}, greedy(8))
                joined = True
            for output in core.step():
                if output.finished:
                    answers[output.request_id] = list(output.outputs[0].token_ids)
        llm.drain()
        if joined:
            caught += 1
            assert answers["second"] == alone
            wrong = set(audit.findings.counts) - {Kind.REJECTED_IN_DURABLE}
            assert not wrong, audit.findings.first
            assert mode is Mode.OFF or not audit.findings.counts
    assert caught, "the case did not occur"


def test_a_model_that_is_not_there_is_bad_input() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nwor.cli", "audit", "--model", "./nope"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "vLLM cannot start on './nope': give a folder" in done.stderr
    assert "Traceback" not in done.stderr


_FINAL = """
import sys
from nwor.audit import AuditLevel
from nwor.audit.workloads import Job, Workload
from nwor.vllm.audit import RunnerAudit
from nwor.vllm.audit_run import VllmAudit

audit = VllmAudit(sys.argv[1], level=AuditLevel.BYTES, k=4, dtype="float32")
jobs = Workload((Job("1, 2, 3, 4, 5, 6,", 24), Job("a b a b a b c", 30, abort=7)))


def say():
    found = audit.run("final", jobs, control=False).findings
    print(audit._audit.findings.drafts, found.final_rows, found.final_error, *found.counts)


say()
keep = RunnerAudit._keep


def shifted(self, request):
    keep(self, request)
    if self._runner.nwor.mode == "stage":
        groups = self.final[request]
        self.final[request] = [(at[1:], tuple(p[:, :-1] for p in rows)) for at, rows in groups]


RunnerAudit._keep = shifted
say()
"""


def test_final_rows_are_those_of_a_run_without_speculation(tmp_path: Path) -> None:
    """And rows that are one place off are told from them."""
    write_model("gemma3", tmp_path / "gemma3")
    done = subprocess.run(
        [sys.executable, "-c", _FINAL, str(tmp_path / "gemma3")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    sound, shifted = (line.split() for line in done.stdout.splitlines() if line[0].isdigit())
    assert int(sound[0]) == 0, "the run without speculation had drafts"
    assert int(sound[1]) > 100
    assert float(sound[2]) < 1e-4
    assert sound[3:] == []
    assert shifted[3:] == [Kind.FINAL_DIFFERS.value]


def command(*options: str) -> subprocess.CompletedProcess[str]:
    """`nwor audit` on vLLM, as the shell would run it."""
    line = [sys.executable, "-m", "nwor.cli", "audit", "--engine", "vllm", "--dtype", "float32"]
    return subprocess.run([*line, *options], capture_output=True, text=True, check=False)


_ENOUGH_PAGES = """
import sys
from dataclasses import replace
from nwor.audit.workloads import WORKLOADS
from nwor.cli import main

WORKLOADS["enough"] = replace(WORKLOADS["preemption"], scarce=24)
options = ["--workload", "preemption", "enough", "--control", "--json", sys.argv[2]]
sys.exit(main(["audit", "--engine", "vllm", "--dtype", "float32", "--model", sys.argv[1], *options]))
"""


def test_preemption_happens_or_the_audit_says_that_it_did_not(
    models: Callable[[str], str], tmp_path: Path
) -> None:
    """The same requests with enough pages prove nothing about preemption."""
    out = tmp_path / "audit.json"
    done = subprocess.run(
        [sys.executable, "-c", _ENOUGH_PAGES, models("gemma3"), str(out)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    assert "enough        not exercised: no request was preempted" in done.stdout
    scarce, enough = json.loads(out.read_text())["workloads"]
    assert scarce["staged"]["preempted"] > 0 == enough["staged"]["preempted"]
    assert scarce["control"]["preempted"] > 0
    assert scarce["not_exercised"] is None
    for workload in (scarce, enough):
        assert workload["same_tokens"]
        assert not workload["staged"]["violations"]


@pytest.mark.parametrize(("drafter", "code"), [("prompt-lookup", 3), ("model", 0)])
def test_the_command_with_other_drafters(
    drafter: str, code: int, models: Callable[[str], str], tmp_path: Path
) -> None:
    """vLLM's own n-gram drafter, and a draft model with pages of its own that the target never sees.

    Prompt lookup finds nothing new in the answers of random weights: no stop falls inside a run.
    """
    out = tmp_path / "audit.json"
    name = f"model:{models('llama-near')}" if drafter == "model" else drafter
    options = ["--level", "bytes", "--control", "--json", str(out), "--drafter", name]
    workloads = ["ragged", "stops", "aborts", "prefixes", "preemption"]
    done = command("--model", models("llama"), *options, "--workload", *workloads)
    assert done.returncode == code, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["drafter"] == drafter
    for workload in found["workloads"]:
        idle = code == 3 and workload["workload"] == "stops"
        assert ("no stop fell inside" in (workload["not_exercised"] or "")) is idle
        assert (workload["staged"]["cut"] > 0) is (workload["workload"] == "stops" and not idle)
        assert workload["staged"]["aborted"] == 2 * (workload["workload"] == "aborts")
    assert all(verdict["held"] for verdict in found["verdicts"])
    rejected = 0
    for workload in found["workloads"]:
        assert workload["same_tokens"]
        left = workload["control"]["violations"].get(Kind.REJECTED_IN_DURABLE.value, 0)
        assert left == workload["control"]["rejected"]  # one group
        rejected += workload["staged"]["rejected"]
    assert rejected > 20


def test_an_unknown_drafter_is_bad_input(models: Callable[[str], str]) -> None:
    done = command("--model", models("llama"), "--drafter", "medusa")
    assert done.returncode == 2
    assert "unknown drafter 'medusa'; known: adversary, prompt-lookup, model:" in done.stderr
