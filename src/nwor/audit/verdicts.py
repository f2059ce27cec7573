"""From what was found to a verdict on each invariant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from nwor.audit.findings import Findings
from nwor.audit.level import AuditLevel

INVARIANTS = ("I1", "I2", "I3", "I4", "I5", "I6")
_COUNTS = (
    "rejected",
    "accepted",
    "reads",
    "adopted",
    "ended",
    "preempted",
    "steps",
    "final_answers",
)


@dataclass
class Report:
    """What one workload showed.

    Attributes:
        tokens: answers of the staged run, by request.
        findings: the staged run's.
        control: the control's, None if it was not asked for.
        same_tokens: both gave the same answers, None without control.
        not_exercised: why the workload did not do what it is for; empty if it did.
    """

    workload: str
    findings: Findings
    control: Findings | None = None
    same_tokens: bool | None = None
    tokens: dict[str, list[int]] = field(default_factory=dict)
    not_exercised: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One invariant: whether it held, was broken (False), or was not put to the test (None).

    Attributes:
        text: the first offending place, or what was looked at, or why nothing was.
        applies: False if this engine cannot break it; such an invariant does not count.
    """

    invariant: str
    held: bool | None
    text: str
    applies: bool = True


def verdicts(reports: Sequence[Report], level: AuditLevel, *, shares: bool = True) -> list[Verdict]:
    """Judge the invariants over all workloads.

    Args:
        reports: what each workload showed.
        level: how closely it was watched.
        shares: requests of the engine take over pages of others.
    """
    return [_judge(name, reports, level, shares=shares) for name in INVARIANTS]


def _judge(name: str, reports: Sequence[Report], level: AuditLevel, *, shares: bool) -> Verdict:
    broken = next(
        (
            f"{report.workload}: {violation}"
            for report in reports
            for kind, violation in report.findings.first.items()
            if kind.invariant == name
        ),
        None,
    )
    differ = [report.workload for report in reports if report.same_tokens is False]
    if name == "I5" and differ:
        broken = f"{differ[0]}: answers differ from the control's"
    if broken:
        return Verdict(name, held=False, text=broken)
    if name == "I3" and not shares:
        text = "does not apply: this engine neither shares nor exports pages"
        return Verdict(name, held=None, text=text, applies=False)
    done, text = _exercised(name, reports, level)
    return Verdict(name, held=True if done else None, text=text)


def _exercised(name: str, reports: Sequence[Report], level: AuditLevel) -> tuple[bool, str]:
    """Say whether an invariant was put to the test, and how."""
    total: Counter[str] = Counter()
    for report in reports:
        for count in _COUNTS:
            total[count] += getattr(report.findings, count)
    match name:
        case "I1":
            done, text = total["rejected"] > 0, f"{total['rejected']} drafts rejected"
        case "I2" if level is not AuditLevel.BYTES:
            done, text = False, "needs --level bytes"
        case "I2":
            done = min(total["accepted"], total["final_answers"]) > 0
            text = _bytes_text(reports, total["accepted"], total["final_answers"])
        case "I3":
            done, text = (
                total["adopted"] > 0,
                f"{total['adopted']} rows of cached prefixes taken over",
            )
        case "I4":
            done, text = total["reads"] > 0, f"{total['reads']} rows that attention reads checked"
        case "I5":
            done, text = _answers(reports)
        case _:
            done = total["ended"] > 0
            text = f"staging pages followed over {total['steps']} steps, "
            text += f"requests that ended after verified drafts: {total['ended']}"
            if total["preempted"]:
                text += f", preemptions: {total['preempted']}"
    return done, text


def _answers(reports: Sequence[Report]) -> tuple[bool, str]:
    """Say whether answers were compared, and those of a run that speculated at all."""
    compared = [report for report in reports if report.same_tokens is not None]
    tokens = sum(len(answer) for report in compared for answer in report.tokens.values())
    drafts = sum(report.findings.drafts for report in compared)
    if not compared:
        return False, "needs --control"
    text = f"answers of {len(compared)} workloads compared, {tokens} tokens"
    return tokens > 0 < drafts, text if drafts else f"{text}, but nothing was drafted"


def _bytes_text(reports: Sequence[Report], accepted: int, answers: int) -> str:
    text = "bytes of all durable pages compared in every step"
    if not accepted:
        return f"{text}; no draft was accepted"
    if not answers:
        return f"{text}; no answer's rows compared with a run without speculation"
    final = sum(report.findings.final_rows for report in reports)
    equal = sum(report.findings.final_equal for report in reports)
    error = max(report.findings.final_error for report in reports)
    limit = max(report.findings.final_limit for report in reports)
    return (
        f"{text}; {final} final rows compared with a run without speculation: {equal} equal bit for "
        f"bit, largest error {error:.2g} of a row's norm (limit {limit:.2g})"
    )


def verdict_dict(verdict: Verdict) -> dict[str, Any]:
    """Verdict as plain values."""
    return asdict(verdict)


def report_dict(report: Report) -> dict[str, Any]:
    """Report as plain values."""
    return {
        "workload": report.workload,
        "same_tokens": report.same_tokens,
        "not_exercised": report.not_exercised or None,
        "staged": _findings_dict(report.findings),
        "control": None if report.control is None else _findings_dict(report.control),
    }


def _findings_dict(found: Findings) -> dict[str, Any]:
    counts = {name: value for name, value in vars(found).items() if name not in {"counts", "first"}}
    return {
        **counts,
        "violations": {kind.value: count for kind, count in found.counts.items()},
        "first": {kind.value: asdict(v) for kind, v in found.first.items()},
    }
