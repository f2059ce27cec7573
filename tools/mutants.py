"""Switch protections off one at a time, and require the tests to notice.

    python tools/mutants.py [--only NAME …] [--jobs 2] [--json OUT [--resume]]

`tools/mutants*.toml` list changes of text, each of which removes one protection. Every one is applied
to a copy of the tree, never to the tree itself, and the tests named there must fail. Before that they
must pass on an unchanged copy: a test that fails anyhow catches nothing. Exits with 1 if a mutant
survives or no longer applies.

With `--json OUT` each outcome is written as soon as it is known, in place of the one OUT has of the
same mutant; the others stay. `--resume` leaves out those that OUT says were caught, as they are now in
the lists.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("src", "tests", "bench", "tools", "docs", "pyproject.toml", "README.md", "Makefile")
FAILED = 1
"""pytest's exit code where tests ran and some failed."""
LIMIT = 900
"""Seconds a mutant's tests may take: one that hangs must not hold up the others."""
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

    @property
    def key(self) -> str:
        """What an outcome is an outcome of: it changes with what is replaced and with the tests."""
        what = repr((self.file, self.text, self.instead, self.tests))
        return hashlib.sha256(what.encode()).hexdigest()[:8]

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
        commit: the tree it was judged in, with ``-dirty`` if that had changes.
        key: of the mutant that was judged.
    """

    name: str
    verdict: str
    by: str
    seconds: float
    commit: str
    key: str


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


def run_tests(
    root: Path, tests: Sequence[str], *options: str, limit: float | None = None
) -> tuple[int, str]:
    """Run tests of a tree, for `limit` seconds at most; return pytest's exit code and output."""
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
        timeout=limit,
    )
    return done.returncode, done.stdout + done.stderr


def judge(mutant: Mutant) -> Outcome:
    """Apply one mutant to a copy and run its tests there."""
    started = time.perf_counter()
    commit = head()

    def outcome(verdict: str, by: str) -> Outcome:
        seconds = round(time.perf_counter() - started, 1)
        return Outcome(mutant.name, verdict, by, seconds, commit, mutant.key)

    with tree() as root:
        try:
            mutant.apply(root)
            code, output = run_tests(root, mutant.tests, "-x", limit=LIMIT)
        except (StaleMutantError, subprocess.TimeoutExpired) as error:
            return outcome("ERROR", str(error))
    if code == FAILED:
        failed = re.search(r"^FAILED (\S+)", output, re.MULTILINE)
        return outcome("caught", failed.group(1) if failed else "?")
    if code == 0:
        return outcome("SURVIVED", "")
    return outcome("ERROR", output.strip().splitlines()[-1] if output.strip() else f"exit {code}")


def head() -> str:
    """Name the commit of the tree, with ``-dirty`` if what is copied has changes."""

    def git(*command: str) -> str:
        full = ["git", "-C", str(ROOT), *command]
        done = subprocess.run(full, capture_output=True, text=True, check=False)  # noqa: S603
        return done.stdout.strip()

    changes = git("status", "--porcelain", "--", *COPIED, ":!bench/results")
    return git("rev-parse", "--short", "HEAD") + ("-dirty" if changes else "")


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
    parser.add_argument("--json", type=Path, metavar="OUT", help="also keep the outcomes in a file")
    parser.add_argument("--resume", action="store_true", help="not those that OUT says were caught")
    parser.add_argument("--skip-baseline", action="store_true", help="trust that the tests pass")
    args = parser.parse_args()
    if args.resume and args.json is None:
        parser.error("--resume needs --json OUT: the outcomes that are known")
    return args


def chosen(mutants: list[Mutant], names: Sequence[str] | None) -> list[Mutant]:
    """Choose mutants by name."""
    unknown = set(names or ()) - {mutant.name for mutant in mutants}
    if unknown:
        sys.exit(f"unknown mutants: {', '.join(sorted(unknown))}")
    return [mutant for mutant in mutants if not names or mutant.name in names]


def recorded(path: Path) -> dict[str, Outcome]:
    """Read the outcomes of a file, by name; none if there is no file."""
    if not path.exists():
        return {}
    outcomes = [Outcome(**entry) for entry in json.loads(path.read_text())["outcomes"]]
    return {outcome.name: outcome for outcome in outcomes}


def record(path: Path, outcome: Outcome) -> None:
    """Put an outcome in the place of the one a file has of its mutant; the others stay.

    In the order of the lists; what is no longer in them is left out.
    """
    sys.path.insert(0, str(ROOT / "bench"))
    from common import save_json  # noqa: PLC0415 - a script of ours, next door

    known = recorded(path) | {outcome.name: outcome}
    kept = [asdict(known[mutant.name]) for mutant in read_mutants() if mutant.name in known]
    save_json(path, {"outcomes": kept})


def left_over(mutants: list[Mutant], outcomes: Mapping[str, Outcome]) -> list[Mutant]:
    """Leave out mutants that were caught as they are now."""
    done = {(out.name, out.key) for out in outcomes.values() if out.verdict == "caught"}
    return [mutant for mutant in mutants if (mutant.name, mutant.key) not in done]


def judge_all(mutants: Sequence[Mutant], jobs: int) -> Iterator[tuple[Mutant, Outcome]]:
    """Judge mutants, some at a time, in the order in which they end."""
    pool = ThreadPoolExecutor(jobs)
    try:
        running = {pool.submit(judge, mutant): mutant for mutant in mutants}
        for future in as_completed(running):
            yield running[future], future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def main() -> int:
    args = arguments()
    mutants = chosen(read_mutants(), args.only)
    if args.resume:
        mutants = left_over(mutants, recorded(args.json))
    if not args.skip_baseline:
        check_baseline(mutants)
    width = max((len(mutant.name) for mutant in mutants), default=0)
    outcomes: list[Outcome] = []
    for mutant, out in judge_all(mutants, args.jobs):
        outcomes.append(out)
        if args.json:
            record(args.json, out)
        print(
            f"{len(outcomes):3d}/{len(mutants)}  {out.name:{width}s}  {mutant.invariant:9s}"
            f"{out.verdict:9s} {out.seconds:5.1f} s  {out.by}",
            flush=True,
        )
    counts = {v: sum(o.verdict == v for o in outcomes) for v in ("caught", "SURVIVED", "ERROR")}
    print(", ".join(f"{n} {verdict}" for verdict, n in counts.items()))
    return int(counts["caught"] < len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
