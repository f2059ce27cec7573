"""What a soak sends follows from its seed; what it finds wrong has a name and a place."""

from __future__ import annotations

import io
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from nwor.audit import Findings
from nwor.metrics import Metrics, Written
from nwor.soak.cli import Progress, main
from nwor.soak.ledger import Check, Ledger
from nwor.soak.report import checkout, table, untested
from nwor.soak.traffic import Traffic, Visit, Wave

TEXTS = [[1, *range(4 + i, 64 + i)] for i in range(5)]
VOCAB, K = 100, 6


def traffic(seed: int) -> Traffic:
    return Traffic(seed, TEXTS, start=6, k=K, vocabulary=VOCAB)


def everything(made: Traffic, waves: int = 12) -> list[object]:
    """All waves, and what is drafted at every place of every request."""
    found: list[object] = []
    for number in range(waves):
        wave = made.wave(number)
        found.append(wave)
        found += [
            made.draft(number, visit, position, 4)
            for visit in wave.visits
            for position in range(visit.length + 1, visit.length + visit.tokens)
        ]
    return found


def test_same_seed_same_traffic() -> None:
    assert everything(traffic(3)) == everything(traffic(3))
    assert everything(traffic(3)) != everything(traffic(4))
    first = [wave for wave, _ in zip(traffic(3).waves(), range(5), strict=False)]
    assert first == [traffic(3).wave(number) for number in range(5)]


def test_drafts_do_not_depend_on_what_was_asked_before() -> None:
    made = traffic(0)
    visit = made.wave(0).visits[0]
    drafts = {at: made.draft(0, visit, at, K) for at in range(visit.length, visit.length + 9)}
    for at in reversed(drafts):
        assert made.draft(0, visit, at, K) == drafts[at]


def test_traffic_has_everything_that_is_promised() -> None:
    """All kinds of arrival, length, acceptance and ending occur, and no number is out of range."""
    made = traffic(1)
    waves = [made.wave(number) for number in range(60)]
    visits = [visit for wave in waves for visit in wave.visits]
    for visit in visits:
        assert 6 <= visit.length < len(visit.text)
        assert visit.length + visit.tokens <= len(visit.text)
        assert visit.abort == 0 or visit.abort > visit.arrive
        assert visit.prompt + visit.answer == visit.text[: visit.length + visit.tokens]
    assert {visit.k for visit in visits} == set(range(K + 1))
    assert {visit.tokens for visit in visits} >= set(range(1, 40))
    sizes = [len(wave.visits) for wave in waves]
    assert min(sizes) < 5
    assert max(sizes) > 40
    assert {wave.fresh for wave in waves} == {True, False}
    assert 0 < sum(wave.leave > 0 for wave in waves) < 30
    assert 0.1 < sum(visit.abort > 0 for visit in visits) / len(visits) < 0.4
    assert any(len({visit.arrive for visit in wave.visits}) == 1 for wave in waves)
    runs = []  # how many drafts of each are right
    for visit in visits:
        drafts = made.draft(0, visit, visit.length, K)
        assert len(drafts) <= min(K, visit.k)
        right = visit.text[visit.length : visit.length + len(drafts)]
        wrong = [a != b for a, b in zip(drafts, right, strict=False)]
        runs.append((wrong.index(True) if True in wrong else len(wrong), len(drafts)))
    assert {right for right, _ in runs} == set(range(K + 1))
    assert {count for _, count in runs} == set(range(K + 1))
    assert any(right < count for right, count in runs)


def ledger() -> Ledger:
    made = Ledger(check_every=1)
    made.begin(Wave(7, (), leave=0, fresh=False))
    made.step()
    return made


@pytest.mark.parametrize(
    ("free", "owned", "says"),
    [
        ([0, 1], [2, 3], None),
        ([0, 1, 1], [2, 3], "twice: [1]"),
        ([0, 1], [1, 2, 3], "twice: [1]"),
        ([0, 1], [3], "neither free nor owned: [2]"),
    ],
)
def test_pages(free: list[int], owned: list[int], says: str | None) -> None:
    made = ledger()
    made.partition(Check.PAGES, free, owned, range(4))
    assert bool(made.violations) == (says is not None)
    if says is not None:
        told = str(made.violations[0])
        assert told.startswith("I6 pages_are_free_or_owned_by_one: wave 7, step 1, ")
        assert says in told


def counted(drafts: int, committed: int, seen: int, rejected: int) -> tuple[Metrics, Findings]:
    metrics, findings = Metrics(), Findings()
    metrics.count_commit(
        drafts=drafts, committed=committed, cancelled=0, bonus=1, truncated=0,
        staged=Written(1, 1), wrote=Written(),
    )  # fmt: skip
    findings.drafts, findings.rejected = seen, rejected
    return metrics, findings


def test_counters() -> None:
    made = ledger()
    made.reconcile(*counted(5, 2, 5, 3))
    assert not made.violations
    assert (made.totals.drafted, made.totals.accepted, made.totals.rejected) == (5, 2, 3)


@pytest.mark.parametrize(
    ("change", "check"),
    [
        (lambda m, f: setattr(m, "rejected", 4), Check.COUNTERS),
        (lambda m, f: setattr(f, "drafts", 6), Check.COUNTERS),
        (lambda m, f: setattr(f, "rejected", 2), Check.COUNTERS),
        (lambda m, f: setattr(m, "flushed", 1), Check.STAGED),
        (lambda m, f: setattr(m, "cancelled", 1), Check.STAGED),
    ],
)
def test_counters_that_do_not_reconcile(
    change: Callable[[Metrics, Findings], None], check: Check
) -> None:
    made = ledger()
    metrics, findings = counted(5, 2, 5, 3)
    change(metrics, findings)
    made.reconcile(metrics, findings)
    assert made.violations[0].name == check.value


VISIT = Visit(2, 0, 0, text=(1, 5, 6, 7, 8, 9), length=2, tokens=3, k=1, right=1.0)


@pytest.mark.parametrize(
    ("tokens", "aborted", "says"),
    [
        ([6, 7, 8], False, None),
        ([6, 7], True, None),
        ([], True, None),
        ([6, 7], False, "token 2 of 3: [], expected [8]"),
        ([6, 9, 8], False, "token 1 of 3: [9], expected [7]"),
        ([6, 9], True, "token 1 of 2: [9], expected [7]"),
        ([6, 7, 8, 9], False, "token 3 of 3: [9], expected []"),
    ],
)
def test_answers(tokens: list[int], aborted: bool, says: str | None) -> None:
    made = ledger()
    made.answered(VISIT, tokens, aborted=aborted)
    told = [str(violation) for violation in made.violations]
    assert told == ([] if says is None else [
        f"I5 tokens_are_those_without_speculation: wave 7, step 1, request 2, {says}"
    ])  # fmt: skip
    assert (made.totals.finished, made.totals.aborted) == (not aborted, aborted)


def test_all_requests_end_once() -> None:
    made = Ledger(check_every=1)
    made.begin(Wave(0, (VISIT,) * 3, leave=0, fresh=False))
    made.answered(VISIT, [6, 7, 8], aborted=False)
    made.answered(VISIT, [6], aborted=True)
    made.answered(VISIT, [6, 7, 8], aborted=False)
    made.all_ended([])
    assert not made.violations
    assert (made.totals.tokens, made.totals.compared) == (7, 7)
    made.all_ended(["2"])
    made.answered(VISIT, [6], aborted=True)  # one more end than requests
    made.all_ended([])
    assert [violation.detail for violation in made.violations] == [
        "requests that never ended: ['2'], expected []",
        "finished and aborted requests: 4, expected 3",
    ]


def test_only_what_has_a_right_answer_counts_as_compared() -> None:
    made = ledger()
    made.answered(VISIT, [6, 7, 8, 9, 9], aborted=False)
    assert (made.totals.tokens, made.totals.compared) == (5, 3)


def test_the_table_says_what_was_not_tested_and_how_to_reproduce() -> None:
    made = ledger()
    made.reconcile(*counted(5, 2, 5, 3))
    why = {"preempted": "it cannot, " + "and never could, " * 4 + "so it does not"}
    assert untested(made, {}) == ["aborted", "preempted"]
    assert untested(made, why) == ["aborted"]
    made.broken(Check.RUNS, "raised KeyError: 'x' " + "very " * 20 + "long")
    text = table(made, why, engine="vllm", seed=11, seconds=41.0)
    assert "n/a  it cannot" in text
    assert "not put to the test in this time: aborted" in text
    assert "first: I6 the_engine_runs: wave 7, step 1, raised KeyError: 'x'" in text
    assert "python -m nwor.soak --engine vllm --seed 11 --seconds 82 --check-every 1" in text
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line != line.rstrip()] == []
    reason = next(i for i, line in enumerate(lines) if "n/a" in line)
    indent = lines[reason].index("it cannot")
    assert lines[reason + 1][:indent].isspace()
    assert not lines[reason + 1][indent].isspace()


def test_the_commit_is_that_of_the_file(tmp_path: Path) -> None:
    """A package installed below a foreign repository has no commit, rather than the foreign one."""

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    ours, foreign = tmp_path / "package" / "ours.py", tmp_path / "foreign.py"
    ours.parent.mkdir()
    for file in (ours, foreign):
        file.write_text("1\n")
    assert checkout(ours) == {"commit": "", "modified": False}
    git("init", "--quiet")
    git("add", "foreign.py")
    git("commit", "--quiet", "--message", "foreign")
    assert checkout(ours) == {"commit": "", "modified": False}
    git("add", ".")
    git("commit", "--quiet", "--message", "ours")
    commit = git("rev-parse", "--short", "HEAD")
    assert checkout(ours) == {"commit": commit, "modified": False}
    foreign.write_text("2\n")
    assert checkout(ours) == {"commit": commit, "modified": True}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "required"),
        (["--engine", "sglang"], "invalid choice"),
        (["--engine", "transformers", "--seconds", "0"], "0 is not a finite number above 0"),
        (["--engine", "transformers", "--seconds", "nan"], "nan is not a finite number above 0"),
        (["--engine", "transformers", "--seconds", "inf"], "inf is not a finite number above 0"),
        (["--engine", "transformers", "--seconds", "ten"], "ten is not a finite number above 0"),
        (["--engine", "transformers", "--check-every", "0"], "0 is not a whole number above 0"),
        (["--engine", "transformers", "--check-every", "1.5"], "1.5 is not a whole number above 0"),
        (["--engine", "transformers", "--seed", "x"], "invalid int value"),
    ],
)
def test_bad_arguments(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    told = capsys.readouterr().err
    assert (arguments[-2] if arguments else "--engine") in told
    assert says in told


def test_a_record_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--engine", "transformers", "--json", "/no/such/folder/x.json"]) == 2
    assert "--json /no/such/folder/x.json cannot be written" in capsys.readouterr().err


class Screen(io.StringIO):
    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.mark.parametrize(("terminal", "lines"), [(True, 60), (False, 2)])
def test_progress(terminal: bool, lines: int) -> None:
    """One line on a terminal, rewritten twice a second; one a minute in a log."""
    screen, clock = Screen(terminal=terminal), [0.0]
    progress = Progress(120, screen, lambda: clock[0])
    made = ledger()
    for _ in range(240 if terminal else 960):
        clock[0] += 0.125  # exact in binary
        progress.tell(made)
    progress.end()
    text = screen.getvalue()
    assert text.count("nwor soak:") == lines
    assert text.count("\n") == (0 if terminal else 2)
