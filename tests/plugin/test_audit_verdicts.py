"""What `nwor audit` concludes from findings, and what it refuses; no engine needed."""

import json
from pathlib import Path

import pytest

from nwor.audit import AuditLevel, Findings, Kind, Violation
from nwor.audit.verdicts import Report, verdicts
from nwor.audit.workload_file import find
from nwor.audit.workloads import WORKLOADS, Job, stop_tokens
from nwor.cli import audit, main
from nwor.engine.audit_run import EngineAudit
from nwor.vllm.audit_run import VllmAudit


def findings(**counts: int) -> Findings:
    found = Findings()
    for name, count in counts.items():
        setattr(found, name, count)
    return found


def busy() -> Findings:
    """All that the invariants are put to the test by."""
    counts = {"steps": 9, "rows_checked": 100, "reads": 70, "drafts": 20, "rejected": 5}
    return findings(**counts, adopted=3, ended=2, final_rows=7, final_answers=4, tokens=20)


def report(name: str = "code", **options: object) -> Report:
    """A workload that put everything to the test, and its control."""
    ran = {"findings": busy(), "control": busy(), "same_tokens": True, "tokens": {"0": [1, 2]}}
    return Report(name, **(ran | options))


def held(reports: list[Report], level: AuditLevel) -> dict[str, bool | None]:
    return {verdict.invariant: verdict.held for verdict in verdicts(reports, level)}


def test_everything_put_to_the_test_and_held() -> None:
    assert held([report()], AuditLevel.BYTES) == dict.fromkeys(
        ("I1", "I2", "I3", "I4", "I5", "I6"), True
    )


@pytest.mark.parametrize(
    ("unproven", "counts"),
    [
        ({"I1"}, {"rejected": 0}),
        ({"I2"}, {"rejected": 20}),  # nothing was accepted: windows moved no draft home
        ({"I2"}, {"final_answers": 0}),  # rows of prompts alone: no window wrote them
        ({"I3"}, {"adopted": 0}),
        ({"I4"}, {"reads": 0}),  # rows were checked, none of them one that attention reads
        ({"I1", "I2", "I5"}, {"drafts": 0, "rejected": 0}),
        ({"I6"}, {"ended": 0}),  # steps, but nobody gave staging pages back
    ],
)
def test_what_did_not_happen_is_not_proven(unproven: set[str], counts: dict[str, int]) -> None:
    quiet = busy()
    for name, count in counts.items():
        setattr(quiet, name, count)
    judged = held([report(findings=quiet)], AuditLevel.BYTES)
    assert judged == {name: None if name in unproven else True for name in judged}


def test_what_was_not_looked_at_is_not_proven() -> None:
    """No bytes, no control; and a control whose answers are as empty as the run's."""
    judged = held([report(control=None, same_tokens=None)], AuditLevel.METADATA)
    assert [name for name, value in judged.items() if value is None] == ["I2", "I5"]
    assert held([report(tokens={"0": []})], AuditLevel.BYTES)["I5"] is None


def test_nothing_ran() -> None:
    assert not any(held([], AuditLevel.BYTES).values())


@pytest.mark.parametrize("kind", list(Kind))
def test_any_violation_breaks_its_invariant_and_names_the_place(kind: Kind) -> None:
    broken = busy()
    broken.add(Violation(kind, 7, request="r", group=1, position=33, slot=161), 4)
    judged = verdicts([report("repetitive"), report(findings=broken)], AuditLevel.BYTES)
    assert {v.invariant for v in judged if v.held is False} == {kind.invariant}
    text = next(v.text for v in judged if v.held is False)
    assert text.startswith("code: ")
    for part in (kind.value, "step 7", "request r", "group 1", "position 33", "slot 161"):
        assert part in text


def test_other_answers_than_stock_break_identity() -> None:
    assert held([report(same_tokens=False)], AuditLevel.BYTES)["I5"] is False


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--workload", "unheard"], "unheard"),
        (["--num-draft-tokens", "0"], "num-draft-tokens is 0"),
        (["--num-draft-tokens", "128"], "1 to 127"),
    ],
)
def test_bad_input(options: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--model", "anything", *options]) == 2
    assert word in capsys.readouterr().err


@pytest.mark.parametrize(
    ("installed", "options", "words"),
    [
        ((), [], "nwor[vllm]"),
        ((), ["--engine", "transformers"], "nwor[engine]"),
        (("transformers",), ["--engine", "vllm"], "nwor[vllm]"),
        (("vllm",), ["--engine", "sglang"], "unknown engine 'sglang'; known: vllm, transformers"),
    ],
)
def test_engines_that_are_not_there(
    installed: tuple[str, ...],
    options: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name in installed or None)
    assert main(["audit", "--model", "anything", *options]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("installed", "chosen"),
    [(("transformers",), EngineAudit), (("vllm", "transformers"), VllmAudit)],
)
def test_the_default_engine(
    installed: tuple[str, ...], chosen: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name in installed or None)
    started = []
    for engine in (EngineAudit, VllmAudit):
        monkeypatch.setattr(engine, "__init__", lambda self, *_, **__: started.append(type(self)))
        monkeypatch.setattr(engine, "run", lambda *_, **__: Report("code", busy()))
    assert main(["audit", "--model", "anything", "--workload", "code"]) == audit.INCOMPLETE
    assert started == [chosen]


def test_an_invariant_that_does_not_apply_does_not_count() -> None:
    alone = busy()
    alone.adopted = 0
    judged = verdicts([report(findings=alone)], AuditLevel.BYTES, shares=False)
    assert [(v.invariant, v.held) for v in judged if not v.applies] == [("I3", None)]
    assert all(v.held for v in judged if v.applies)
    assert "7 final rows" in next(v.text for v in judged if v.invariant == "I2")


def test_the_table_fits_a_terminal() -> None:
    broken = busy()
    broken.add(Violation(Kind.FINAL_DIFFERS, 123456, "3-aa17691f", 11, 17, 100000, 9999999), 4)
    reports = [report("repetitive", findings=broken)]
    shown = audit.table(reports, verdicts(reports, AuditLevel.BYTES), EngineAudit.control, {})
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize(
    ("reports", "code"),
    [
        ([report()], 0),
        ([report(same_tokens=False)], audit.BROKEN),
        ([report(control=None, same_tokens=None)], audit.INCOMPLETE),
    ],
)
def test_exit_code_table_and_json(
    reports: list[Report],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(VllmAudit, "__init__", lambda *_, **__: None)
    monkeypatch.setattr(VllmAudit, "run", lambda *_, **__: reports[0])
    out = tmp_path / "audit.json"
    command = ["audit", "--model", "x/gemma", "--level", "bytes", "--workload", "code"]
    assert main([*command, "--json", str(out)]) == code
    shown, progress = capsys.readouterr()
    assert "workload 1 of 1: code" in progress
    assert shown.count("\nI") == 6
    found = json.loads(out.read_text())
    assert found["model"] == "gemma"
    assert found["runner"] is None, "no engine was started"
    assert [v["invariant"] for v in found["verdicts"]] == ["I1", "I2", "I3", "I4", "I5", "I6"]
    staged = found["workloads"][0]["staged"]
    assert (staged["rejected"], staged["reads"], staged["ended"]) == (5, 70, 2)
    assert "70 rows that attention reads checked" in shown


def test_a_workload_that_did_not_do_what_it_is_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet = report("preemption", not_exercised="nobody waited")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(VllmAudit, "__init__", lambda *_, **__: None)
    monkeypatch.setattr(VllmAudit, "run", lambda *_, **__: quiet)
    out = tmp_path / "audit.json"
    command = ["audit", "--model", "x", "--level", "bytes", "--workload", "preemption"]
    assert main([*command, "--json", str(out)]) == audit.INCOMPLETE
    assert "preemption    not exercised: nobody waited\n" in capsys.readouterr().out
    assert json.loads(out.read_text())["workloads"][0]["not_exercised"] == "nobody waited"


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_every_workload_says_if_what_it_is_for_did_not_happen(name: str, engine: str) -> None:
    workload, found = WORKLOADS[name], Findings()
    assert workload.needs, "nothing is asked of it"
    for count in workload.needs:
        said = workload.not_exercised(found, engine)
        assert (engine in workload.remarks) is (workload.needs[count] not in said)
        found.drafts += 1  # what it is for may be a draft that was accepted
        if count not in {"accepted", "drafts"}:
            setattr(found, count, 1)
    assert workload.not_exercised(found, engine) == ""


@pytest.mark.parametrize(
    ("stop", "steps", "token"),
    [
        (3, [[5], [6, 7, 8], [9]], 7),  # 8 ends its step, 9 is alone; 7 has 8 behind it
        (1, [[5], [6, 7, 8], [9]], 6),
        (4, [[5], [6], [7], [8], [9, 10]], 9),
        (4, [[5], [6, 5], [6, 6], [8]], 6),  # 6 stops in the second step, wherever it is meant
        (2, [[5], [5, 5], [5, 5]], 5),  # no place to stop at but the first
        (2, [[5], [6], [7], [8]], 7),
    ],
)
def test_a_stop_inside_a_run(stop: int, steps: list[list[int]], token: int) -> None:
    jobs = [Job("a", stop=stop, inside=True), Job("b"), Job("c", stop=1)]
    answers = {"0": steps, "1": [[1], [2]], "2": [[3, 4, 5]]}
    assert stop_tokens(jobs, lambda _: answers) == [token, None, 4]


def test_a_workload_that_does_not_apply_is_named_and_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = []

    def run(_: object, name: str, *__: object, **___: object) -> Report:
        ran.append(name)
        return report(name)

    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(EngineAudit, "__init__", lambda *_, **__: None)
    monkeypatch.setattr(EngineAudit, "run", run)
    out = tmp_path / "audit.json"
    command = ["audit", "--engine", "transformers", "--model", "x", "--level", "bytes"]
    assert main([*command, "--json", str(out)]) == 0
    assert set(ran) == set(WORKLOADS) - {"preemption"}
    assert "preemption    does not apply: an admitted request" in capsys.readouterr().out
    assert list(json.loads(out.read_text())["absent"]) == ["preemption"]
    assert main([*command, "--workload", "preemption"]) == 2
    assert "nothing to run on transformers. preemption: an" in capsys.readouterr().err


def test_the_list_of_workloads_is_shown_without_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["audit", "--list-workloads"])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["workload", "vllm", "transformers", "exercises"]
    shown = {line.split()[0]: line.split()[1:3] for line in lines if line[:1].islower()}
    del shown["workload"], shown["is"]  # the head, and the second line of the text below
    assert shown == {n: ["yes", "no" if n == "preemption" else "yes"] for n in WORKLOADS}
    assert all(workload.about in "\n".join(lines) for workload in WORKLOADS.values())
    told = lines.index(next(line for line in lines if line.startswith("preemption"))) + 1
    assert lines[told].strip().startswith("transformers: an admitted request")


def test_the_list_names_engines_that_are_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "vllm" or None)
    with pytest.raises(SystemExit):
        main(["audit", "--list-workloads"])
    said = capsys.readouterr().out
    assert "transformers is not installed here: pip install 'nwor[engine]'" in said
    assert "vllm is not installed" not in said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no prompts"),
        ('{"prompt": "a"}\n\n{"prompt": ', "line 3: not JSON"),
        ('[{"prompt": "a"},\n{"prompt" "b"}]', "line 2: not JSON"),
        ('[{"prompt": "a"}, 7]', "prompt 2: give an object"),
        ('{"prompt": ""}', "line 1: prompt is ''"),
        ('{"prompt": "a", "tokens": 3}', "unknown ['tokens']; known: prompt, max_tokens"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens is 0"),
        ('{"prompt": "a", "abort_after": "3"}', "abort_after is '3'"),
        ('{"prompt": "a", "max_tokens": 5, "stop_at": 5}', "stop_at is 5"),
    ],
)
def test_bad_workload_files(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(text)
    assert main(["audit", "--model", "anything", "--workload", str(file)]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("separator", ["\n", ","])
def test_a_workload_file(separator: str, tmp_path: Path) -> None:
    lines = ['{"prompt": "a"}', '{"prompt": "b", "max_tokens": 9, "stop_at": 3, "arrive": 2}']
    text = separator.join([*lines, '{"prompt": "c", "abort_after": 4}'])
    file = tmp_path / "mine.json"
    file.write_text(f"[{text}]" if separator == "," else text)
    jobs = (Job("a"), Job("b", 9, arrive=2, stop=3), Job("c", abort=4))
    assert find(str(file)).jobs == jobs
