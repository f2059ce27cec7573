"""``python -m nwor.soak``: the command line."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO, TypeVar

from nwor.cli import BAD_INPUT, FAILED, INTERRUPTED
from nwor.cli.audit import installed_engine
from nwor.errors import InputError
from nwor.output_file import check_writable, save
from nwor.soak.ledger import Ledger
from nwor.soak.report import checkout, record, table
from nwor.soak.run import SoakEngine, soak

Number = TypeVar("Number", int, float)
ENGINES = ("transformers", "vllm")

_EXAMPLES = """examples:
  python -m nwor.soak --engine transformers
  python -m nwor.soak --engine vllm --seconds 600 --json soak.json
  python -m nwor.soak --engine vllm --seed 7 --check-every 1

exit codes:
  0    nothing was wrong (the table says what the time did not suffice to test)
  1    something was: the first place and the seed to reproduce it are printed
  2    bad arguments, or an engine that nwor refuses
  130  interrupted; the table says how far it was
"""


def parser() -> argparse.ArgumentParser:
    """Build the parser."""
    made = argparse.ArgumentParser(
        prog="python -m nwor.soak",
        description="Random requests on a tiny model (nothing is downloaded): arrival, lengths, "
        "drafts, acceptance, aborts and preemption follow from a seed. Pages, leases, windows, "
        "counters and the metadata audit are checked all along, and every token is compared with "
        "greedy decoding by stock transformers. Stops at the first violation.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--engine", required=True, choices=ENGINES)
    made.add_argument(
        "--seconds",
        type=_seconds,
        default=60.0,
        metavar="S",
        help="begin no new wave of requests after this time (default: %(default)s)",
    )
    made.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    made.add_argument(
        "--check-every",
        type=_steps,
        default=10,
        metavar="N",
        help="engine steps between two looks at its books; the audit watches every step anyhow "
        "(default: %(default)s)",
    )
    made.add_argument("--json", type=Path, metavar="PATH", help="also write a record here")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = parser().parse_args(argv)
    try:
        installed_engine(args.engine)
        if args.json is not None:
            check_writable(args.json, "--json")
        return _run(args)
    except InputError as error:
        sys.stderr.write(f"nwor soak: {error}\n")
        return BAD_INPUT
    except KeyboardInterrupt:
        sys.stderr.write("nwor soak: interrupted\n")
        return INTERRUPTED


def start(engine: str) -> SoakEngine:
    """Start an engine by name.

    Raises:
        InputError: nwor refuses it.
    """
    if engine == "vllm":
        from nwor.soak.on_vllm import VllmSoak  # noqa: PLC0415 - only where it is installed

        return VllmSoak()
    from nwor.soak.on_transformers import TransformersSoak  # noqa: PLC0415 - as above

    return TransformersSoak()


def _run(args: argparse.Namespace) -> int:
    sys.stderr.write(f"nwor soak: starting the engine ({args.engine})\n")
    sources = checkout()
    engine = start(args.engine)
    interrupted = False
    try:
        traffic = engine.traffic(args.seed)
        began = time.monotonic()
        progress = Progress(args.seconds, sys.stderr)
        ledger = Ledger(args.check_every, progress.tell)
        try:
            soak(engine, traffic, ledger, lambda: time.monotonic() - began >= args.seconds)
        except KeyboardInterrupt:
            interrupted = True
        progress.end()
        seconds = time.monotonic() - began
    finally:
        engine.close()
    sys.stdout.write(
        table(ledger, engine.impossible, engine=args.engine, seed=args.seed, seconds=seconds)
    )
    if args.json is not None:
        found = record(
            ledger,
            engine.impossible,
            engine.settings,
            engine=args.engine,
            seed=args.seed,
            seconds_asked=args.seconds,
            seconds=round(seconds, 1),
            check_every=args.check_every,
            interrupted=interrupted,
            **sources,
        )
        save(args.json, "--json", json.dumps(found, indent=1) + "\n")
    if ledger.violations:
        return FAILED
    return INTERRUPTED if interrupted else 0


class Progress:
    """One line that is rewritten on a terminal; one a minute in a log.

    Args:
        seconds: how long it will take.
        out: where to write.
        now: a clock in seconds.
    """

    def __init__(
        self, seconds: float, out: TextIO, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds, self._out, self._now = seconds, out, now
        self._live = out.isatty()
        self._began = self._last = now()

    def tell(self, ledger: Ledger) -> None:
        """Say how far it is, if it is time to."""
        now = self._now()
        if now - self._last < (0.5 if self._live else 60.0):
            return
        self._last, totals = now, ledger.totals
        text = (
            f"nwor soak: {now - self._began:4.0f} of {self._seconds:.0f} s  "
            f"{totals.requests} requests  {totals.steps} steps  {totals.checks} checks"
        )
        self._out.write(f"\r{text}\x1b[K" if self._live else f"{text}\n")
        self._out.flush()

    def end(self) -> None:
        """Leave the line to what comes next."""
        if self._live:
            self._out.write("\r\x1b[K")
            self._out.flush()


def _seconds(text: str) -> float:
    return _positive(float, "finite number", text)


def _steps(text: str) -> int:
    return _positive(int, "whole number", text)


def _positive(kind: Callable[[str], Number], what: str, text: str) -> Number:
    try:
        value = kind(text)
    except ValueError:
        value = kind("0")
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a {what} above 0")
    return value
