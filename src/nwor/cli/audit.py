"""`nwor audit`: prove or refute the invariants on a running engine.

    nwor audit --model PATH [--level bytes] [--control] [--workload NAME ...] [--json OUT]

Exit code 0: every invariant that applies was put to the test and held. 1: one was broken. 3: none
was broken, but not all were put to the test; the table says what is missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nwor.audit import AuditLevel, Kind
from nwor.errors import InputError
from nwor.vllm.audit_run import PAGE, WORKLOADS, Report, Verdict, VllmAudit, as_dict, verdicts

BROKEN, INCOMPLETE = 1, 3
_EXAMPLES = """examples:
  nwor audit --model ./gemma-3-270m --control
  nwor audit --model ./gemma-3-270m --level bytes --control --json audit.json
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
    parser.add_argument("--engine", choices=["vllm"], default="vllm", help="default: %(default)s")
    parser.add_argument("--model", required=True, help="folder or id of a model")
    parser.add_argument("--dtype", default="auto", help="as in vLLM (default: %(default)s)")
    parser.add_argument("--num-draft-tokens", type=int, default=4, metavar="K")
    parser.add_argument(
        "--workload",
        nargs="+",
        default=list(WORKLOADS),
        metavar="NAME",
        help=f"default: all of {', '.join(WORKLOADS)}",
    )
    parser.add_argument(
        "--level",
        choices=["metadata", "bytes"],
        default="metadata",
        help="bytes also compares all durable pages in every step (default: %(default)s)",
    )
    parser.add_argument("--control", action="store_true", help="run the stock engine too")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the findings here")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the audit.

    Raises:
        InputError: an unknown workload, no vLLM, or an engine that nwor does not serve.
    """
    unknown = set(args.workload) - set(WORKLOADS)
    if unknown:
        raise InputError(f"unknown workload {sorted(unknown)}; known: {', '.join(WORKLOADS)}")
    if not 1 <= args.num_draft_tokens < PAGE:
        raise InputError(f"--num-draft-tokens is {args.num_draft_tokens}, allowed: 1 to {PAGE - 1}")
    if importlib.util.find_spec("vllm") is None:
        raise InputError("vLLM is not installed here: pip install 'nwor[vllm]'")
    level = AuditLevel(args.level)
    reports = list(_reports(args, level))
    judged = verdicts(reports, level)
    sys.stdout.write(table(reports, judged))
    if args.json is not None:
        found = {
            "engine": args.engine,
            "model": Path(args.model).name,
            "level": args.level,
            "verdicts": [
                {"invariant": v.invariant, "held": v.held, "text": v.text} for v in judged
            ],
            "workloads": [as_dict(report) for report in reports],
        }
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    if any(verdict.held is False for verdict in judged):
        return BROKEN
    return 0 if all(verdict.held for verdict in judged) else INCOMPLETE


def _reports(args: argparse.Namespace, level: AuditLevel) -> Iterator[Report]:
    """Run the workloads, saying on stderr how far it is."""
    began = time.monotonic()

    def say(text: str) -> None:
        sys.stderr.write(f"nwor audit: {time.monotonic() - began:4.0f} s  {text}\n")

    say("starting the engine")
    audit = VllmAudit(args.model, level=level, k=args.num_draft_tokens, dtype=args.dtype)
    for number, name in enumerate(args.workload, 1):
        say(f"workload {number} of {len(args.workload)}: {name}")
        yield audit.run(name, control=args.control)
    say("done")


def table(reports: list[Report], judged: list[Verdict]) -> str:
    """Lay out what was run and what follows from it."""
    lines = [
        "",
        "workload     steps  drafts  rejected  rows checked  violations  stock leaves behind",
    ]
    for report in reports:
        found, control = report.findings, report.control
        behind = "not run"
        if control is not None:
            rows = control.counts[Kind.REJECTED_IN_DURABLE]
            per = 1000 * rows / max(control.tokens, 1)
            behind = f"{rows} rejected rows, {per:.0f} per 1,000 tokens"
        lines.append(
            f"{report.workload:11s}  {found.steps:5d}  {found.drafts:6d}  {found.rejected:8d}  "
            f"{found.rows_checked:12d}  {sum(found.counts.values()):10d}  {behind}"
        )
    lines.append("")
    words = {True: "held", False: "BROKEN", None: "not tested"}
    lines += [f"{v.invariant}  {words[v.held]:10s}  {v.text}" for v in judged]
    return "\n".join([*lines, "", ""])
