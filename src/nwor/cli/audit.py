"""`nwor audit`: prove or refute the invariants on a running engine.

    nwor audit --model PATH [--level bytes] [--control] [--workload NAME ...] [--json OUT]

Exit code 0: every invariant that applies was put to the test and held. 1: one was broken. 3: none
was broken, but not all were put to the test; the table says what is missing.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from nwor.errors import InputError
from nwor.vllm.audit_rows import Kind
from nwor.vllm.audit_run import WORKLOADS, Report, Verdict, VllmAudit, as_dict, verdicts
from nwor.vllm.settings import AuditLevel

BROKEN, INCOMPLETE = 1, 3


def add(commands: Any) -> None:  # noqa: ANN401 - argparse does not name its type
    """Add the command and its arguments."""
    parser = commands.add_parser("audit", help="prove or refute the invariants on an engine")
    parser.add_argument("--engine", choices=["vllm"], default="vllm")
    parser.add_argument("--model", required=True, help="path or name of a model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--num-draft-tokens", type=int, default=4, metavar="K")
    parser.add_argument("--workload", nargs="+", default=list(WORKLOADS), metavar="NAME")
    parser.add_argument("--level", choices=["metadata", "bytes"], default="metadata")
    parser.add_argument("--control", action="store_true", help="run the stock engine too")
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the audit.

    Raises:
        InputError: an unknown workload, or an engine that nwor does not serve.
    """
    unknown = set(args.workload) - set(WORKLOADS)
    if unknown:
        raise InputError(f"unknown workload {sorted(unknown)}; known: {', '.join(WORKLOADS)}")
    level = AuditLevel(args.level)
    audit = VllmAudit(args.model, level=level, k=args.num_draft_tokens, dtype=args.dtype)
    reports = [audit.run(name, control=args.control) for name in args.workload]
    judged = verdicts(reports, level)
    sys.stdout.write(table(reports, judged))
    if args.json is not None:
        found = {
            "engine": args.engine,
            "model": args.model,
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
