"""The counters where users look: Prometheus metrics and the periodic log line."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nwor.vllm import seams
from nwor.vllm.stats import Sample, merge, take_sample

logger = logging.getLogger("vllm.nwor")

PREFIX = "nwor:"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: the sample's name for it, and what it counts."""

    name: str
    help: str


COUNTERS = (
    Metric("windows", "Verify steps whose drafted rows were staged."),
    Metric("cancelled_windows", "Windows that ended without a commit: nothing was written."),
    Metric("staged", "Draft tokens staged."),
    Metric("committed", "Draft tokens committed: accepted."),
    Metric("rejected", "Draft tokens rejected: they never reached a durable page."),
    Metric("bonus", "Bonus tokens committed, one per request and window."),
    Metric(
        "flushed", "Draft tokens written through unverified, by a fallback or by mode immediate."
    ),
    Metric("rows_written", "KV rows committed, summed over layers (first tensor parallel rank)."),
    Metric("bytes_written", "Bytes of K and V committed (first tensor parallel rank)."),
    Metric("rows_avoided", "Staged KV rows never written to durable pages, summed over layers."),
    Metric("bytes_avoided", "Bytes of K and V never written to durable pages."),
    Metric("begin_seconds", "Time spent beginning windows."),
    Metric("commit_seconds", "Time spent committing windows."),
    Metric("audit_rows_checked", "Rows whose place was checked, with NWOR_AUDIT."),
)
GAUGES = (
    Metric("staging_pages_in_use", "Staging pages that requests hold."),
    Metric("staging_pages", "Staging pages kept back from the scheduler."),
)


class FrontEnd:
    """Metrics of all engines behind one front end.

    Counters carry vLLM's labels, ``model_name`` and ``engine``; fallbacks also ``reason``.
    """

    def __init__(self, model_name: str, engines: list[int]) -> None:
        import prometheus_client as prometheus  # noqa: PLC0415 - vLLM's dependency, not nwor's

        _unregister(prometheus.REGISTRY)
        labels = ["model_name", "engine"]
        self._labels = {engine: (model_name, str(engine)) for engine in engines}
        self._counters = {
            metric.name: prometheus.Counter(PREFIX + metric.name, metric.help, labels)
            for metric in COUNTERS
        }
        self._gauges = {
            metric.name: prometheus.Gauge(
                PREFIX + metric.name, metric.help, labels, multiprocess_mode="mostrecent"
            )
            for metric in GAUGES
        }
        self._fallbacks = prometheus.Counter(
            PREFIX + "fallbacks",
            "Requests, windows or engines that were not staged, by reason.",
            [*labels, "reason"],
        )
        self._violations = prometheus.Counter(
            PREFIX + "audit_violations",
            "What the audit objected to, by invariant and kind.",
            [*labels, "invariant", "kind"],
        )
        for values in self._labels.values():
            for child in (*self._counters.values(), *self._gauges.values()):
                child.labels(*values)
        self._interval: Sample = {}

    def record(self, sample: Sample, engine: int) -> None:
        """Add a sample to the metrics and to the current log interval."""
        labels = self._labels[engine]
        for name, counter in self._counters.items():
            if added := sample.get(name):
                counter.labels(*labels).inc(added)
        for name, gauge in self._gauges.items():
            if name in sample:
                gauge.labels(*labels).set(sample[name])
        for reason, count in sample.get("fallbacks", {}).items():
            self._fallbacks.labels(*labels, reason).inc(count)
        for what, count in sample.get("audit_violations", {}).items():
            self._violations.labels(*labels, *what.split(" ", 1)).inc(count)
        merge(self._interval, sample)

    def log(self) -> None:
        """Print what happened since the last call, if anything did."""
        sample, self._interval = self._interval, {}
        if not sample.get("windows") and not sample.get("fallbacks"):
            return
        fallbacks = ", ".join(f"{r}={n}" for r, n in sample.get("fallbacks", {}).items()) or "none"
        logger.info(
            "NWOR metrics: Windows: %d, Staged: %d drafts, Committed: %d, Rejected: %d, "
            "Rows written: %d, avoided: %d, Bytes avoided: %d, Staging pages: %d of %d in use, "
            "Begin + commit: %.3f ms per window, Fallbacks: %s",
            sample.get("windows", 0),
            sample.get("staged", 0),
            sample.get("committed", 0),
            sample.get("rejected", 0),
            sample.get("rows_written", 0),
            sample.get("rows_avoided", 0),
            sample.get("bytes_avoided", 0),
            sample.get("staging_pages_in_use", 0),
            sample.get("staging_pages", 0),
            1e3
            * (sample.get("begin_seconds", 0.0) + sample.get("commit_seconds", 0.0))
            / max(sample.get("windows", 0), 1),
            fallbacks,
        )


def hook_manager(manager: Any, config: Any) -> None:  # noqa: ANN401 - StatLoggerManager, VllmConfig
    """Record and log nwor's samples of one front end."""
    front_end = FrontEnd(config.model_config.served_model_name, list(manager.engine_indexes))

    def make_record(original: Callable[..., None]) -> Callable[..., None]:
        def record(
            scheduler_stats: Any,  # noqa: ANN401
            iteration_stats: Any,  # noqa: ANN401
            mm_cache_stats: Any = None,  # noqa: ANN401
            engine_idx: int | None = None,
            *args: Any,  # noqa: ANN401
            **kwargs: Any,  # noqa: ANN401
        ) -> None:
            sample = take_sample(scheduler_stats)
            original(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx, *args, **kwargs)
            if sample is not None:
                front_end.record(sample, engine_idx or 0)

        return record

    def make_log(original: Callable[..., None]) -> Callable[..., None]:
        def log(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401
            original(*args, **kwargs)
            front_end.log()

        return log

    seams.wrap_method(manager, seams.RECORD, make_record)
    seams.wrap_method(manager, seams.LOG, make_log)


def _unregister(registry: Any) -> None:  # noqa: ANN401 - prometheus_client.CollectorRegistry
    """Drop the metrics of an earlier engine of this process, as vLLM does with its own."""
    for collector in list(registry._collector_to_names):  # noqa: SLF001 - vLLM does the same
        if getattr(collector, "_name", "").startswith(PREFIX):
            registry.unregister(collector)
