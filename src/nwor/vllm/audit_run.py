"""Workloads that bring out every kind of fault, run on a vLLM engine under audit."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from nwor.audit import AuditLevel, Findings
from nwor.errors import InputError
from nwor.manager import Mode
from nwor.vllm.audit import RunnerAudit, audit_of

logger = logging.getLogger("vllm.nwor")

PAGE = 128
CODE = (
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\ndef mul(a, b):\n"
)
LIST = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20,"
FACTS = "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is"
ROWS = '{"name": "Ann", "age": 31}\n{"name": "Bob", "age": 42}\n{"name":'


@dataclass(frozen=True, slots=True)
class Job:
    """One request: a text cut or filled to `length` tokens (0: as it is), and how it goes.

    Attributes:
        arrive: step before which it arrives.
        abort: step before which it is aborted, 0 for never.
        stop: stop at the n-th token of its undisturbed answer, 0 for not at all.
    """

    text: str
    tokens: int = 32
    length: int = 0
    arrive: int = 0
    abort: int = 0
    stop: int = 0


WORKLOADS: dict[str, tuple[Job, ...]] = {
    "repetitive": tuple(Job(text) for text in (LIST, FACTS, ROWS, LIST[:30])),
    "code": (Job(CODE, 48), Job(CODE * 2, 48)),
    "ragged": tuple(
        Job(text, 8 + 9 * i, arrive=3 * i) for i, text in enumerate((CODE, LIST, FACTS, ROWS))
    ),
    "long": (Job(FACTS, 24, 900), Job(CODE, 24, 640)),
    "edges": tuple(Job(LIST, 24, PAGE + shift) for shift in (-5, -4, -1, 0)),
    "stops": (Job(LIST, 40, stop=17), Job(CODE, 11), Job(FACTS, 40, stop=9)),
    "aborts": (Job(LIST, 40, abort=6), Job(CODE, 40, abort=9), Job(FACTS, 40)),
    "prefixes": tuple(Job(FACTS, 24, 2 * PAGE + 9 * i, arrive=2 * i) for i in range(3)),
}
"""By name. Prompts of one text and different lengths share a prefix."""


@dataclass
class Report:
    """What one workload showed.

    Attributes:
        tokens: answers of the staged run, by request.
        findings: the staged run's.
        control: the stock engine's, None if it was not asked for.
        same_tokens: both gave the same answers, None without control.
    """

    workload: str
    findings: Findings
    control: Findings | None = None
    same_tokens: bool | None = None
    tokens: dict[str, list[int]] = field(default_factory=dict)


class VllmAudit:
    """An engine of this process, staged and audited.

    Raises:
        InputError: vLLM finds no such model, or nwor refuses this engine.
    """

    def __init__(self, model: str, *, level: AuditLevel, k: int, dtype: str = "auto") -> None:
        os.environ.update(
            NWOR_MODE="stage", NWOR_AUDIT=level.value, VLLM_ENABLE_V1_MULTIPROCESSING="0"
        )
        for name, value in (("VLLM_CPU_KVCACHE_SPACE", "1"), ("VLLM_LOGGING_LEVEL", "ERROR")):
            os.environ.setdefault(name, value)
        os.environ.setdefault("NWOR_STAGING_PAGES", "64")
        from vllm import LLM  # noqa: PLC0415 - takes seconds, and reads the environment

        from nwor.vllm.plugin import register  # noqa: PLC0415 - VLLM_PLUGINS may leave it out

        register()
        try:
            self.llm: Any = LLM(
                model,
                dtype=dtype,  # type: ignore[arg-type]
                max_model_len=1024,
                max_num_seqs=4,
                block_size=PAGE,
                num_gpu_blocks_override=160,
                enforce_eager=True,
                disable_log_stats=False,
                seed=0,
                speculative_config={
                    "method": "custom_class",
                    "model": "nwor.vllm.adversary.Adversary",
                    "num_speculative_tokens": k,
                },
            )
        except (OSError, ValueError) as error:  # what vLLM raises where there is no such model
            raise InputError(
                f"vLLM cannot start on {model!r}: give a folder with config.json and weights, or a "
                f"model id. It said: {error}"
            ) from error
        client: Any = self.llm.llm_engine.engine_core
        core = client.engine_core
        self._runner = core.model_executor.driver_worker.worker.model_runner
        self._level = level
        audit = audit_of(self._runner)
        if audit is None:
            refusals = core.scheduler.kv_cache_config.nwor.refusals
            raise InputError(f"nwor does not serve this engine: {'; '.join(map(str, refusals))}")
        self._audit: RunnerAudit = audit

    def run(self, name: str, *, control: bool) -> Report:
        """Run one workload, staged and (with `control`) stock."""
        stops = self._stops(WORKLOADS[name])
        tokens, findings = self._once(Mode.STAGE, WORKLOADS[name], stops)
        report = Report(name, findings, tokens=tokens)
        if control:
            level = logger.level
            logger.setLevel(logging.CRITICAL)  # what stock leaves behind is no news, and is counted
            try:
                stock, report.control = self._once(Mode.OFF, WORKLOADS[name], stops)
            finally:
                logger.setLevel(level)
            report.same_tokens = stock == tokens
        return report

    def _stops(self, jobs: Sequence[Job]) -> list[int | None]:
        """Find the tokens to stop at in undisturbed answers."""
        stops: list[int | None] = [None] * len(jobs)
        if any(job.stop for job in jobs):
            plain = [Job(job.text, job.tokens, job.length) for job in jobs]
            answers, _ = self._once(Mode.OFF, plain, stops)
            for i, job in enumerate(jobs):
                stops[i] = answers[str(i)][job.stop] if job.stop else None
        return stops

    def _once(
        self, mode: Mode, jobs: Sequence[Job], stops: Sequence[int | None]
    ) -> tuple[dict[str, list[int]], Findings]:
        from vllm import SamplingParams  # noqa: PLC0415 - as above

        engine = self.llm.llm_engine
        self.llm.reset_prefix_cache()
        self._runner.nwor.set_mode(mode)
        self._audit.watch(self._level)
        waiting = dict(enumerate(jobs))
        answers: dict[str, list[int]] = {}
        step = 0
        while waiting or engine.has_unfinished_requests():
            for i in [i for i, job in waiting.items() if job.arrive <= step]:
                job, stop = waiting.pop(i), stops[i]
                params = SamplingParams(
                    temperature=0,
                    max_tokens=job.tokens,
                    ignore_eos=True,
                    stop_token_ids=None if stop is None else [stop],
                )
                engine.add_request(str(i), {"prompt_token_ids": self._prompt(job)}, params)
            engine.abort_request([str(i) for i, job in enumerate(jobs) if job.abort == step > 0])
            for output in engine.step():
                if output.finished:
                    answers[output.request_id] = list(output.outputs[0].token_ids)
            step += 1
        engine.step()  # tells the worker that all have finished
        return answers, self._audit.findings

    def _prompt(self, job: Job) -> list[int]:
        tokenizer = self.llm.get_tokenizer()
        tokens: list[int] = tokenizer.encode(job.text, add_special_tokens=False)
        first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        if job.length:
            tokens = (tokens * (job.length // len(tokens) + 1))[: job.length - len(first)]
        return first + tokens


@dataclass(frozen=True, slots=True)
class Verdict:
    """One invariant: whether it held, was broken, or was not put to the test, and why."""

    invariant: str
    held: bool | None
    text: str


def verdicts(reports: Sequence[Report], level: AuditLevel) -> list[Verdict]:
    """Judge the invariants over all workloads."""
    total: Counter[str] = Counter()
    for report in reports:
        found = report.findings
        for name in ("rejected", "rows_checked", "adopted", "drafts", "steps"):
            total[name] += getattr(found, name)
    compared = [report.same_tokens for report in reports if report.same_tokens is not None]
    exercised: dict[str, tuple[bool, str]] = {
        "I1": (total["rejected"] > 0, f"{total['rejected']} drafts rejected"),
        "I2": (
            level is AuditLevel.BYTES and total["drafts"] > 0,
            "bytes of all durable pages compared in every step"
            if level is AuditLevel.BYTES
            else "needs --level bytes",
        ),
        "I3": (total["adopted"] > 0, f"{total['adopted']} rows of cached prefixes taken over"),
        "I4": (total["rows_checked"] > 0, f"{total['rows_checked']} rows checked"),
        "I5": (
            bool(compared),
            f"answers of {len(compared)} workloads compared" if compared else "needs --control",
        ),
        "I6": (total["steps"] > 0, f"staging pages followed over {total['steps']} steps"),
    }
    judge: Callable[[str], str | None] = lambda name: next(  # noqa: E731
        (
            f"{report.workload}: {violation}"
            for report in reports
            for kind, violation in report.findings.first.items()
            if kind.invariant == name
        ),
        None,
    )
    result = []
    for name, (done, text) in exercised.items():
        broken = judge(name)
        if name == "I5" and not all(compared):
            broken = "answers differ from the stock engine's"
        held = False if broken else (True if done else None)
        result.append(Verdict(name, held, broken or text))
    return result


def as_dict(report: Report) -> dict[str, Any]:
    """Report as plain values."""

    def plain(found: Findings | None) -> dict[str, Any] | None:
        if found is None:
            return None
        return {
            "rows_checked": found.rows_checked,
            "steps": found.steps,
            "tokens": found.tokens,
            "drafts": found.drafts,
            "rejected": found.rejected,
            "adopted": found.adopted,
            "violations": {kind.value: count for kind, count in found.counts.items()},
            "first": {kind.value: asdict(v) for kind, v in found.first.items()},
        }

    return {
        "workload": report.workload,
        "same_tokens": report.same_tokens,
        "staged": plain(report.findings),
        "control": plain(report.control),
    }
