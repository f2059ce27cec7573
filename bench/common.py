"""What all benchmarks share: interleaved timing, one table, a JSON record of how it was made."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from nwor.soak.report import checkout, versions

SEEDS = (
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\ndef mul(a, b):\n",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20,",
    "Monday: rain. Tuesday: sun. Wednesday: rain. Thursday: sun. Friday: rain. Saturday:",
    "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is",
    '{"name": "Ann", "age": 31, "city": "Oslo"}\n{"name": "Bob", "age": 42, "city": "Bonn"}\n{"name":',
    "| city | country |\n|---|---|\n| Paris | France |\n| Rome | Italy |\n| Madrid | Spain |\n|",
    "A red apple, a green apple, a red pear, a green pear, a red plum, a green plum, a red",
    "Q: What is 2 + 2?\nA: 4\n\nQ: What is 3 + 3?\nA: 6\n\nQ: What is 4 + 4?\nA:",
)
"""Texts that repeat themselves to different degrees, for drafters that look up."""


def add_common_arguments(parser: argparse.ArgumentParser, *, threads: int) -> None:
    """Add ``--json`` and ``--threads``, with the default this benchmark wants."""
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the results as JSON")
    parser.add_argument(
        "--threads",
        type=int,
        default=threads,
        help="torch threads (default: %(default)s)",
    )


def interleaved(
    modes: Mapping[str, Callable[[], float]], *, rounds: int, warmup: int = 3
) -> dict[str, list[float]]:
    """Run all modes in turn, `rounds` times after a warm-up; each returns the seconds it measured.

    One after the other in every round, so that a noisy neighbour hits all modes alike.
    """
    times: dict[str, list[float]] = {name: [] for name in modes}
    for index in range(warmup + rounds):
        for name, run in modes.items():
            seconds = run()
            if index >= warmup:
                times[name].append(seconds)
    return times


def timed(work: Callable[[], object]) -> float:
    """Seconds one call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Median and spread (10th and 90th percentile) in microseconds."""
    deciles = statistics.quantiles(seconds, n=10, method="inclusive")
    micro = {"median": statistics.median(seconds), "p10": deciles[0], "p90": deciles[-1]}
    return {name: value * 1e6 for name, value in micro.items()}


def environment() -> dict[str, object]:
    """Versions, commit, machine and load: what a figure means nothing without."""
    return {
        "argv": sys.argv,
        **checkout(Path(__file__)),
        "versions": versions(),
        "python": platform.python_version(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "load_average": os.getloadavg(),
    }


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows in columns: text to the left, figures to the right."""
    cells = [list(map(str, row)) for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    for index, row in enumerate(cells):
        line = [
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(line))
        if index == 0:
            print("  ".join("-" * width for width in widths))


def write_json(path: Path | None, results: Mapping[str, object]) -> None:
    """Write results beside the environment they were measured in, and say where."""
    if path is not None:
        save_json(path, results)
        print(f"written: {path}")


def save_json(path: Path, results: Mapping[str, object]) -> None:
    """Write results beside the environment they were measured in; killed here, the old file stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"environment": environment(), **results}, indent=1) + "\n")
    part.replace(path)


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
