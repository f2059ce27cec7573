"""Counters on their way from the worker to the front end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from nwor.audit import Findings
from nwor.audit.findings import Kind
from nwor.vllm import stats
from nwor.vllm.audit import RunnerAudit
from nwor.vllm.eligibility import EngineRefusal


def test_increments_add_up_to_the_totals() -> None:
    increments = stats.Increments()
    start = increments.since({"windows": 0}, {}, staging_pages=4)
    assert start == {"fallbacks": {}, "staging_pages": 4}
    assert increments.since({"windows": 0}, {}, staging_pages=4) is None
    first = increments.since({"windows": 2}, {"aborted": 1}, staging_pages=4)
    assert first == {"windows": 2, "fallbacks": {"aborted": 1}, "staging_pages": 4}
    second = increments.since({"windows": 5}, {"aborted": 1}, staging_pages=6)
    assert second == {"windows": 3, "fallbacks": {}, "staging_pages": 6}
    total: stats.Sample = {}
    for sample in (start, first, second):
        stats.merge(total, sample)
    assert total == {"windows": 5, "fallbacks": {"aborted": 1}, "staging_pages": 6}


def test_a_gauge_that_falls_is_sent_though_nothing_was_counted() -> None:
    """The last requests end: nothing is counted any more, but their pages are free."""
    increments = stats.Increments()
    increments.since({"windows": 2}, {}, staging_pages_in_use=4)
    idle = increments.since({"windows": 2}, {}, staging_pages_in_use=0)
    assert idle == {"fallbacks": {}, "staging_pages_in_use": 0}
    assert increments.since({"windows": 2}, {}, staging_pages_in_use=0) is None


def test_the_shared_empty_output_carries_nothing() -> None:
    shared = SimpleNamespace(req_ids=[])
    carrier = stats.with_sample(shared, {"windows": 1})
    assert vars(carrier) == {"req_ids": [], stats.SAMPLE_ATTRIBUTE: {"windows": 1}}
    assert vars(shared) == {"req_ids": []}


class SchedulerLike:
    """Sends statistics with every second step, like a scheduler that has nothing to tell."""

    def __init__(self) -> None:
        self.steps = 0

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        self.steps += 1
        with_stats = SimpleNamespace(kv_connector_stats={"other": 1})
        return {0: SimpleNamespace(scheduler_stats=with_stats if self.steps % 2 == 0 else None)}


def test_samples_wait_for_statistics_and_leave_no_trace_in_them() -> None:
    scheduler = SchedulerLike()
    stats.hook_update(scheduler, SimpleNamespace(refusals=()))
    outputs = []
    for count in (1, 2, 3):
        output = SimpleNamespace()
        stats.attach_sample(output, {"windows": count, "fallbacks": {}})
        outputs.append(scheduler.update_from_output(None, output))
    assert outputs[0][0].scheduler_stats is None
    carried = outputs[1][0].scheduler_stats
    assert stats.take_sample(carried) == {"windows": 3, "fallbacks": {}}
    assert carried.kv_connector_stats == {"other": 1}
    assert stats.take_sample(carried) is None
    assert stats.take_sample(None) is None


def test_a_refused_engine_reports_its_reasons_once() -> None:
    scheduler = SchedulerLike()
    refusal = SimpleNamespace(reason=EngineRefusal.PLATFORM)
    stats.hook_update(scheduler, SimpleNamespace(refusals=[refusal]))
    seen = []
    for _ in range(4):
        output = scheduler.update_from_output(None, SimpleNamespace())[0]
        seen.append(stats.take_sample(output.scheduler_stats))
    assert seen == [None, {"fallbacks": {"platform": 1}}, None, None]


def test_a_violation_of_an_idle_step_is_reported_without_new_rows() -> None:
    audit: Any = SimpleNamespace(findings=Findings(), _reported=Findings())
    audit.findings.rows_checked = 5
    assert RunnerAudit.take_sample(audit) == {"audit_rows_checked": 5}
    assert RunnerAudit.take_sample(audit) is None
    audit.findings.counts[Kind.LEAK] += 1
    sample = {"audit_rows_checked": 0, "audit_violations": {"I6 " + Kind.LEAK.value: 1}}
    assert RunnerAudit.take_sample(audit) == sample
    assert RunnerAudit.take_sample(audit) is None
