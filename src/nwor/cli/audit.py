"""`nwor audit`: prove or refute the invariants on a running engine.

    nwor audit [--engine vllm|transformers] --model PATH [--level bytes] [--control]
               [--workload NAME ...] [--json OUT]
    nwor audit --list-workloads

Exit code 0: every invariant that applies was put to the test and held. 1: one was broken. 3: none
was broken, but not all were put to the test; the table says what is missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from nwor.audit import AuditLevel, Kind
from nwor.audit.verdicts import Report, Verdict, report_dict, verdict_dict, verdicts
from nwor.audit.workload_file import find
from nwor.audit.workloads import PAGE, WORKLOADS, Workload
from nwor.cli.workload_list import ENGINES, ListWorkloads
from nwor.errors import InputError
from nwor.output_file import check_writable, save

BROKEN, INCOMPLETE = 1, 3
WIDTH = 80

_EXAMPLES = """examples:
  nwor audit --model ./gemma-3-270m --control
  nwor audit --model ./gemma-3-270m --level bytes --control --json audit.json
  nwor audit --engine transformers --model ./gemma-3-270m --level bytes
  nwor audit --model ./gemma-3-270m --workload stops aborts --num-draft-tokens 8

exit codes:
  0  every invariant was put to the test and held
  1  one was broken
  2  bad input
  3  none was broken, but not all were put to the test
"""


def add(commands: Any) -> None:  # noqa: ANN401 - argparse does not name its type
    """Add the command and its arguments."""
    parser = commands.add_parser(
        "audit",
        help="prove or refute the invariants on an engine",
        description="Watch the KV cache of a running engine, slot by slot, and judge I1 to I6.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--engine",
        metavar="NAME",
        help="vllm, or transformers: the embedded engine (default: vllm if it is installed)",
    )
    parser.add_argument("--model", required=True, help="folder or id of a model")
    parser.add_argument(
        "--dtype", default="auto", help="as the engine takes it (default: %(default)s)"
    )
    parser.add_argument("--num-draft-tokens", type=int, default=4, metavar="K")
    parser.add_argument(
        "--drafter",
        default="adversary",
        metavar="NAME",
        help="adversary (prompt lookup that turns wrong at random), prompt-lookup, or "
        "model:PATH_OR_ID (default: %(default)s)",
    )
    parser.add_argument(
        "--workload",
        nargs="+",
        default=list(WORKLOADS),
        metavar="NAME|FILE",
        help=f"default: all of {', '.join(WORKLOADS)}; or a file of prompts (JSON or JSON lines, each "
        'with "prompt" and perhaps "max_tokens", "stop_at", "abort_after", "arrive")',
    )
    parser.add_argument(
        "--level",
        choices=["metadata", "bytes"],
        default="metadata",
        help="bytes also compares all durable pages in every step (default: %(default)s)",
    )
    parser.add_argument(
        "--list-workloads",
        action=ListWorkloads,
        help="say what each workload exercises and where it runs, and exit",
    )
    parser.add_argument("--control", action="store_true", help="run without nwor too")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the findings here")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the audit.

    Raises:
        InputError: an unknown workload, an engine that is unknown, not installed or not served, or a
            file for the findings that cannot be written.
    """
    asked = {name: find(name) for name in args.workload}
    if not 1 <= args.num_draft_tokens < PAGE:
        raise InputError(f"--num-draft-tokens is {args.num_draft_tokens}, allowed: 1 to {PAGE - 1}")
    if args.json is not None:
        check_writable(args.json, "--json")
    engine = installed_engine(args.engine)
    workloads = {name: each for name, each in asked.items() if engine not in each.absent}
    absent = {name: each.absent[engine] for name, each in asked.items() if engine in each.absent}
    if not workloads:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in absent.items())
        raise InputError(f"nothing to run on {engine}. {reasons}. See --list-workloads")
    level = AuditLevel(args.level)
    audit = _start(engine, args, level)
    reports = list(_reports(audit, workloads, control=args.control))
    judged = verdicts(reports, level, shares=audit.shares)
    sys.stdout.write(table(reports, judged, audit.control, absent))
    if args.json is not None:
        found = {
            "engine": engine,
            "runner": audit.runner,
            "model": Path(args.model).name,
            "level": args.level,
            "drafter": args.drafter.partition(":")[0],
            "control": audit.control if args.control else None,
            "verdicts": [verdict_dict(verdict) for verdict in judged],
            "workloads": [report_dict(report) for report in reports],
            "absent": absent,
        }
        save(args.json, "--json", json.dumps(found, indent=1) + "\n")
    if any(verdict.held is False for verdict in judged):
        return BROKEN
    done = all(verdict.held for verdict in judged if verdict.applies)
    return 0 if done and not any(report.not_exercised for report in reports) else INCOMPLETE


class Audit(Protocol):
    """An engine under audit.

    Attributes:
        control: what the control group is.
        runner: which of an engine's model runners was audited; None if it has only one.
        shares: requests of the engine take over pages of others.
    """

    control: str
    runner: str | None
    shares: bool

    def run(self, name: str, workload: Workload, *, control: bool) -> Report:
        """Run one workload."""


def installed_engine(name: str | None) -> str:
    """Return the engine that was asked for, or the first one that is installed."""
    installed = [each for each, (module, _) in ENGINES.items() if importlib.util.find_spec(module)]
    if name is None:
        name = installed[0] if installed else next(iter(ENGINES))
    if name not in ENGINES:
        raise InputError(f"unknown engine {name!r}; known: {', '.join(ENGINES)}")
    if name not in installed:
        raise InputError(f"{name} is not installed here: pip install 'nwor[{ENGINES[name][1]}]'")
    return name


def _start(engine: str, args: argparse.Namespace, level: AuditLevel) -> Audit:
    _say(f"starting the engine ({engine})")
    options = {"k": args.num_draft_tokens, "dtype": args.dtype, "drafter": args.drafter}
    if engine == "vllm":
        from nwor.vllm.audit_run import VllmAudit  # noqa: PLC0415 - only where it is installed

        return VllmAudit(args.model, level=level, **options)
    from nwor.engine.audit_run import EngineAudit  # noqa: PLC0415 - as above

    return EngineAudit(args.model, level=level, **options)


def _reports(audit: Audit, workloads: Mapping[str, Workload], *, control: bool) -> Iterator[Report]:
    """Run the workloads, saying on stderr how far it is."""
    for number, (name, workload) in enumerate(workloads.items(), 1):
        _say(f"workload {number} of {len(workloads)}: {name}")
        yield audit.run(Path(name).stem, workload, control=control)
    _say("done")


_BEGAN = time.monotonic()


def _say(text: str) -> None:
    sys.stderr.write(f"nwor audit: {time.monotonic() - _BEGAN:4.0f} s  {text}\n")


def table(
    reports: Sequence[Report],
    judged: Sequence[Verdict],
    control: str,
    absent: Mapping[str, str],
) -> str:
    """Lay out what was run and what follows from it, in 80 columns."""
    lines = ["", "workload      steps  drafts  rejected  rows checked  violations  left behind"]
    for report in reports:
        found = report.findings
        behind = "-" if report.control is None else str(_behind([report])[0])
        lines.append(
            f"{report.workload:12s}  {found.steps:5d}  {found.drafts:6d}  {found.rejected:8d}  "
            f"{found.rows_checked:12d}  {sum(found.counts.values()):10d}  {behind:>11s}"
        )
    lines.append("")
    left_out = {name: f"does not apply: {reason}" for name, reason in absent.items()}
    for report in reports:
        if report.not_exercised:
            left_out[report.workload] = f"not exercised: {report.not_exercised}"
    for name, reason in left_out.items():
        lines += [*_wrapped(f"{name:12s}  {reason}", " " * 14), ""]
    if any(report.control for report in reports):
        rows, per = _behind(reports)
        text = (
            f"left behind: {rows} rejected rows in durable pages ({per:.0f} per 1,000 tokens) by "
        )
        lines += [*_wrapped(text + control, ""), ""]
    words = {True: "held", False: "BROKEN", None: "not tested"}
    for verdict in judged:
        word = words[verdict.held] if verdict.applies else "-"
        lines += _wrapped(f"{verdict.invariant}  {word:10s}  {verdict.text}", " " * 16)
    return "\n".join([*lines, "", ""])


def _behind(reports: Sequence[Report]) -> tuple[int, float]:
    """Return the rejected rows that the control left in durable pages, also per 1,000 tokens."""
    controls = [report.control for report in reports if report.control is not None]
    rows = sum(control.counts[Kind.REJECTED_IN_DURABLE] for control in controls)
    return rows, 1000 * rows / max(sum(control.tokens for control in controls), 1)


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, subsequent_indent=indent, break_long_words=False, drop_whitespace=True
    )
