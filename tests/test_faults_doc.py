"""docs/faults.md names tests: all of them exist, and every kind of fault has some."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs/faults.md").read_text()
SECTIONS = re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]


def named(text: str) -> set[str]:
    return set(re.findall(r"`(test_\w+)`", text))


def existing() -> set[str]:
    texts = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    return {name for text in texts for name in re.findall(r"^ *def (test_\w+)", text, re.MULTILINE)}


def test_thirteen_kinds() -> None:
    numbers = [section.split(".")[0] for section in SECTIONS]
    assert [int(number) for number in numbers if number.isdigit()] == list(range(1, 14))


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.splitlines()[0])
def test_tests_exist(section: str) -> None:
    assert named(section)
    assert not named(section) - existing()


def test_mutants_exist() -> None:
    mutants = (ROOT / "tests/vllm/test_audit_mutants.py").read_text()
    text = "".join(SECTIONS)
    clauses = re.findall(r"mutants? ((?:`\w+`(?:, )?)+)", text)
    assert clauses
    for clause in clauses:
        for name in re.findall(r"`(\w+)`", clause):
            assert f"def {name}(" in mutants
