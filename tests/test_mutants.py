"""The list of mutants does not rot: each still applies, and names tests that exist."""

import json
import re
import sys
import time
from pathlib import Path
from unittest.mock import patch

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import mutants  # noqa: E402
from mutants import (  # noqa: E402
    Mutant,
    Outcome,
    StaleMutantError,
    by_process,
    judge,
    read_mutants,
    recorded,
)

MUTANTS = read_mutants()


def test_there_are_enough_and_no_two_of_a_name() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 35


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_it_applies_and_its_tests_exist(mutant: Mutant) -> None:
    text = mutant.place(ROOT).read_text().replace(mutant.text, mutant.instead)
    compile(text, mutant.file, "exec")
    assert mutant.text != mutant.instead
    assert mutant.tests
    assert mutant.invariant in {"I1", "I2", "I3", "I4", "I5", "I6", "input", "counts"}
    assert mutant.fault in range(1, 14)
    for test in mutant.tests:
        path, _, name = test.partition("::")
        kind = "class" if name.startswith("Test") else "def"
        bare = name.split("[")[0]
        assert not name or re.search(rf"^{kind} {bare}\b", (ROOT / path).read_text(), re.MULTILINE)
        assert (ROOT / path).exists()


def test_the_recorded_run_is_of_these_mutants_and_caught_them_all() -> None:
    outcomes = recorded(ROOT / "bench" / "results" / "mutants.json")
    judged = {name: (out.key, out.verdict) for name, out in outcomes.items()}
    stale = "judge what has changed: make mutants MUTANTS=--resume"
    assert judged == {mutant.name: (mutant.key, "caught") for mutant in MUTANTS}, stale
    faults = (ROOT / "docs" / "faults.md").read_text()
    assert set(re.findall(r"(\d+) (?:of them off|were caught)", faults)) == {str(len(MUTANTS))}


def changed(mutant: Mutant, **fields: object) -> Mutant:
    names = Mutant.__dataclass_fields__
    return Mutant(**{**{name: getattr(mutant, name) for name in names}, **fields})


def test_a_text_that_is_not_there_or_there_twice_is_an_error() -> None:
    for text in ("no such text anywhere", "import"):
        with pytest.raises(StaleMutantError, match=r"found \d+ times"):
            changed(MUTANTS[0], text=text).place(ROOT)
        assert judge(changed(MUTANTS[0], text=text)).verdict == "ERROR"


def test_caught_survived_and_tests_that_cannot_run() -> None:
    """On tests of nothing but an import, so that it takes a second."""
    first = changed(MUTANTS[0], tests=("tests/test_acceptance.py::test_nothing_of_that_name",))
    assert judge(first).verdict == "ERROR"
    assert judge(changed(MUTANTS[0], instead=MUTANTS[0].text)).verdict == "SURVIVED"
    caught = judge(MUTANTS[0])
    assert caught.verdict == "caught"
    assert caught.by == MUTANTS[0].tests[0]


def test_suites_that_change_a_process_do_not_share_one() -> None:
    """As `make test` runs them: a list that mixes them fails before any mutant is tried."""
    tests = [test for mutant in MUTANTS for test in mutant.tests]
    parts = by_process(tests)
    assert sorted(test for part in parts for test in part) == sorted(tests)
    for part in parts:
        suites = {test.split("/")[1] for test in part} & {"triton", "vllm", "vllm_v2"}
        assert not suites or len({test.split("/")[1] for test in part}) == 1
    assert len(parts) > 1


def outcome_of(mutant: Mutant, verdict: str = "caught", commit: str = "0000000") -> Outcome:
    return Outcome(mutant.name, verdict, "a test", 1.0, commit, mutant.key)


def run(judged: object, *options: str) -> None:
    command = ["mutants.py", "--skip-baseline", *options]
    with patch.object(mutants, "judge", judged), patch.object(sys, "argv", command):
        mutants.main()


def test_a_run_replaces_its_own_outcomes_and_loses_none(tmp_path: Path) -> None:
    """An interrupt at the third mutant: the first two are on file, and `--resume` does the rest."""
    out = tmp_path / "out.json"
    first, second, third, fourth = MUTANTS[:4]
    names = [mutant.name for mutant in MUTANTS[:4]]

    def stops_at_the_third(mutant: Mutant) -> Outcome:
        if mutant.name == third.name:
            for _ in range(1000):
                if second.name in recorded(out):
                    break
                time.sleep(0.01)
            raise KeyboardInterrupt
        return outcome_of(mutant, "SURVIVED" if mutant.name == second.name else "caught")

    with pytest.raises(KeyboardInterrupt):
        run(stops_at_the_third, "--json", str(out), "--only", *names[:3])
    assert list(recorded(out).values()) == [outcome_of(first), outcome_of(second, "SURVIVED")]

    run(
        lambda mutant: outcome_of(mutant, commit="1111111"),
        *("--json", str(out), "--resume", "--only", *names),
    )
    later = [outcome_of(mutant, commit="1111111") for mutant in (second, third, fourth)]
    assert list(recorded(out).values()) == [outcome_of(first), *later]
    assert json.loads(out.read_text())["environment"]["commit"]

    run(
        lambda mutant: outcome_of(mutant, commit="2222222"),
        *("--json", str(out), "--only", third.name),
    )
    later[1] = outcome_of(third, commit="2222222")
    assert list(recorded(out).values()) == [outcome_of(first), *later]


def test_a_mutant_that_changed_has_no_outcome() -> None:
    known = {MUTANTS[0].name: outcome_of(MUTANTS[0])}
    assert mutants.left_over([MUTANTS[0]], known) == []
    for fields in ({"instead": "pass"}, {"tests": ("tests/test_layouts.py",)}):
        other = changed(MUTANTS[0], **fields)
        assert mutants.left_over([other], known) == [other]
