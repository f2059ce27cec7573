"""Counters on their way: worker -> model runner output -> scheduler statistics -> front end.

A worker counts; only the front end has a /metrics page. vLLM already sends an output per step from
the worker to the engine core and statistics from there to the front end, so the counters ride along:
what was counted since the last output, as a plain dictionary. The output carries it in an attribute
of its own (outputs are pickled); the statistics in `kv_connector_stats`, their one open dictionary
(statistics are msgpack with fixed fields), from which the front end takes it out again before any
connector looks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any

from nwor.vllm import seams
from nwor.vllm.reservation import Reservation

SAMPLE_ATTRIBUTE = "nwor_stats"
"""Name under which a runner's output carries its `Sample`."""

KEY = "nwor"

Sample = dict[str, Any]
"""Increments and gauges by name; ``fallbacks`` and ``audit_violations``: increments by reason."""

GAUGES = ("staging_pages_in_use", "staging_pages")


class Increments:
    """Turns running totals into what was added since the last call, and knows which gauges moved."""

    def __init__(self) -> None:
        self._last: Mapping[str, float] = {}
        self._last_fallbacks: Mapping[str, float] = {}
        self._last_gauges: Mapping[str, int] = {}

    def since(
        self, totals: Mapping[str, float], fallbacks: Mapping[str, float], **gauges: int
    ) -> Sample | None:
        """Return the non-zero increments and the gauges, None if all is as it was."""
        added = _added(totals, self._last)
        reasons = _added(fallbacks, self._last_fallbacks)
        if not added and not reasons and gauges == self._last_gauges:
            return None
        self._last, self._last_fallbacks, self._last_gauges = totals, fallbacks, gauges
        return {**added, "fallbacks": reasons, **gauges}


def _added(totals: Mapping[str, float], last: Mapping[str, float]) -> dict[str, float]:
    return {name: n - last.get(name, 0) for name, n in totals.items() if n != last.get(name, 0)}


def merge(into: Sample, sample: Sample) -> None:
    """Add a sample to another one."""
    for name, value in sample.items():
        if isinstance(value, dict):
            counts = into.setdefault(name, {})
            for reason, count in value.items():
                counts[reason] = counts.get(reason, 0) + count
        elif name in GAUGES:
            into[name] = value
        else:
            into[name] = into.get(name, 0) + value


def merged(*samples: Sample | None) -> Sample | None:
    """Return the sum of samples, None if there are none."""
    total: Sample = {}
    for sample in samples:
        merge(total, sample or {})
    return total or None


def attach_sample(output: Any, sample: Sample) -> None:  # noqa: ANN401 - ModelRunnerOutput
    """Let a step's output carry a sample to the engine core."""
    setattr(output, SAMPLE_ATTRIBUTE, sample)


def with_sample(output: Any, sample: Sample) -> Any:  # noqa: ANN401 - ModelRunnerOutput
    """Return a copy that carries a sample: vLLM's empty output is one object for all steps."""
    carrier = copy(output)
    attach_sample(carrier, sample)
    return carrier


def hook_update(scheduler: Any, reservation: Reservation) -> None:  # noqa: ANN401 - vLLM's Scheduler
    """Pass samples on with the scheduler's statistics; those of steps without any are kept."""
    pending: Sample = {}
    for refusal in reservation.refusals:
        merge(pending, {"fallbacks": {refusal.reason.value: 1}})

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def update_from_output(
            scheduler_output: Any,  # noqa: ANN401
            model_runner_output: Any,  # noqa: ANN401
            *args: Any,  # noqa: ANN401
            **kwargs: Any,  # noqa: ANN401
        ) -> Any:  # noqa: ANN401
            outputs = original(scheduler_output, model_runner_output, *args, **kwargs)
            sample = getattr(model_runner_output, SAMPLE_ATTRIBUTE, None)
            if sample:
                merge(pending, sample)
            if pending:
                _ride(pending, outputs)
            return outputs

        return update_from_output

    seams.wrap_method(scheduler, seams.UPDATE, make)


def _ride(pending: Sample, outputs: dict[int, Any]) -> None:
    for output in outputs.values():
        stats = output.scheduler_stats
        if stats is not None:
            stats.kv_connector_stats = {**(stats.kv_connector_stats or {}), KEY: dict(pending)}
            pending.clear()
            return


def take_sample(stats: Any) -> Sample | None:  # noqa: ANN401 - SchedulerStats
    """Take a sample out of the statistics, which then look as if nwor were not there."""
    carried = stats.kv_connector_stats if stats is not None else None
    if not carried or KEY not in carried:
        return None
    sample: Sample = carried[KEY]
    rest = {name: value for name, value in carried.items() if name != KEY}
    stats.kv_connector_stats = rest or None
    return sample
