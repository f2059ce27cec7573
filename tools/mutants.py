"""Switch protections off one at a time, and require the tests to notice.

    python tools/mutants.py [--only NAME …] [--jobs 2] [--json OUT]

`tools/mutants*.toml` list changes of text, each of which removes one protection. Every one is applied
to a copy of the tree, never to the tree itself, and the tests named there must fail. Before that they
must pass on an unchanged copy: a test that fails anyhow catches nothing. Exits with 1 if a mutant
survives or no longer applies.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("src", "tests", "bench", "tools", "docs", "pyproject.toml", "README.md", "Makefile")
FAILED = 1
"""pytest's exit code where tests ran and some failed."""
OWN_PROCESS = ("tests/triton/", "tests/vllm/", "tests/vllm_v2/")


class StaleMutantError(ValueError):
    """A mutant whose text is not found exactly once."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One protection to switch off; the fields are explained in the list."""

    name: str
    file: str
    text: str
    instead: str
    removes: str
    invariant: str
    fault: int
    tests: tuple[str, ...]

    def place(self, root: Path) -> Path:
        """Find the file with the text.

        Raises:
            StaleMutantError: not found, or more than once.
        """
        found = {path: path.read_text().count(self.text) for path in root.glob(self.file)}
        if sum(found.values()) != 1:
            raise StaleMutantError(
                f"{self.name}: text found {sum(found.values())} times in {self.file}"
            )
        return next(path for path, count in found.items() if count)

    def apply(self, root: Path) -> None:
        """Change a tree."""
        path = self.place(root)
        path.write_text(path.read_text().replace(self.text, self.instead))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a mutant.

    Attributes:
        verdict: ``caught``, ``SURVIVED``, or ``ERROR`` if it does not apply or the tests cannot run.
        by: the first test that failed, or what went wrong.
    """

    name: str
    verdict: str
    by: str
    seconds: float


def read_mutants() -> list[Mutant]:
    """Read the lists."""
    files = sorted((ROOT / "tools").glob("mutants*.toml"))
    entries = [entry for file in files for entry in tomllib.loads(file.read_text())["mutant"]]
    return [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


@contextmanager
def tree() -> Iterator[Path]:
    """Copy the tree to a place that goes away again."""
    with tempfile.TemporaryDirectory(prefix="nwor-mutant-") as folder:
        for name in COPIED:
            source, target = ROOT / name, Path(folder) / name
            if source.is_dir():
                shutil.copytree(
                    source, target, ignore=shutil.ignore_patterns("__pycache__", "results")
                )
            else:
                shutil.copy(source, target)
        yield Path(folder)


def run_tests(root: Path, tests: Sequence[str], *options: str) -> tuple[int, str]:
    """Run tests of a tree; return pytest's exit code and output."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(root / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    }
    done = subprocess.run(  # noqa: S603 - our own interpreter
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *tests],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def judge(mutant: Mutant) -> Outcome:
    """Apply one mutant to a copy and run its tests there."""
    started = time.perf_counter()

    def outcome(verdict: str, by: str) -> Outcome:
        return Outcome(mutant.name, verdict, by, time.perf_counter() - started)

    with tree() as root:
        try:
            mutant.apply(root)
        except StaleMutantError as error:
            return outcome("ERROR", str(error))
        code, output = run_tests(root, mutant.tests, "-x")
    if code == FAILED:
        failed = re.search(r"^FAILED (\S+)", output, re.MULTILINE)
        return outcome("caught", failed.group(1) if failed else "?")
    if code == 0:
        return outcome("SURVIVED", "")
    return outcome("ERROR", output.strip().splitlines()[-1] if output.strip() else f"exit {code}")


def check_baseline(mutants: Sequence[Mutant]) -> None:
    """See that the tests pass where nothing is changed."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    files = {test for test in tests if "::" not in test}
    tests = [test for test in tests if test.split("::")[0] not in files or test in files]
    print(f"unchanged tree: {len(tests)} tests or files of tests …", file=sys.stderr, flush=True)
    with tree() as root:
        for part in by_process(tests):
            code, output = run_tests(root, part)
            if code:
                sys.exit(f"tests fail without any mutant:\n{output[-3000:]}")


def by_process(tests: Sequence[str]) -> list[list[str]]:
    """Part tests into those that may share a process: these suites each want one of their own."""
    parts: dict[str, list[str]] = {}
    for test in tests:
        folder = next((f for f in OWN_PROCESS if test.startswith(f)), "")
        parts.setdefault(folder, []).append(test)
    return list(parts.values())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutants alone")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time (default: 1)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the outcomes as JSON")
    parser.add_argument("--skip-baseline", action="store_true", help="trust that the tests pass")
    return parser.parse_args()


def chosen(mutants: list[Mutant], names: Sequence[str] | None) -> list[Mutant]:
    """Choose mutants by name."""
    unknown = set(names or ()) - {mutant.name for mutant in mutants}
    if unknown:
        sys.exit(f"unknown mutants: {', '.join(sorted(unknown))}")
    return [mutant for mutant in mutants if not names or mutant.name in names]


def main() -> int:
    args = arguments()
    mutants = chosen(read_mutants(), args.only)
    if not args.skip_baseline:
        check_baseline(mutants)
    width = max(len(mutant.name) for mutant in mutants)
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(args.jobs) as pool:
        for number, (mutant, out) in enumerate(
            zip(mutants, pool.map(judge, mutants), strict=True), 1
        ):
            outcomes.append(out)
            print(
                f"{number:3d}/{len(mutants)}  {out.name:{width}s}  {mutant.invariant:9s}"
                f"{out.verdict:9s} {out.seconds:5.1f} s  {out.by}",
                flush=True,
            )
    counts = {v: sum(o.verdict == v for o in outcomes) for v in ("caught", "SURVIVED", "ERROR")}
    print(", ".join(f"{n} {verdict}" for verdict, n in counts.items()))
    if args.json:
        sys.path.insert(0, str(ROOT / "bench"))
        from common import write_json  # noqa: PLC0415 - a script of ours, next door

        write_json(args.json, {"outcomes": [asdict(outcome) for outcome in outcomes]})
    return int(counts["caught"] < len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
