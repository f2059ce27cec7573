"""The audit's workloads on the embedded engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from typing import Any

from nwor.audit import AuditLevel, Findings
from nwor.audit.adversary import draft
from nwor.audit.reporter import unlogged
from nwor.audit.verdicts import Report
from nwor.audit.workloads import (
    MAX_BATCH,
    Job,
    Workload,
    prompt_ids,
    stop_tokens,
)
from nwor.engine.audited import AuditedEngine, logger
from nwor.engine.core import TokenRun
from nwor.engine.drafters import Drafter, EngineSizes, Proposal
from nwor.engine.generate import make_drafter
from nwor.engine.loading import load
from nwor.engine.options import Options
from nwor.engine.request import FinishReason, Request
from nwor.engine.stopping import Cut, Stopper
from nwor.errors import InputError
from nwor.manager import Mode


class Adversary(Drafter):
    """Right often enough to be accepted, wrong often enough to be rejected; sometimes silent."""

    def bind(self, sizes: EngineSizes) -> None:
        """Learn the vocabulary."""
        self._vocabulary = sizes.vocab_size

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> Proposal:
        """Draft from each request's own tokens."""
        return Proposal(
            [
                draft(request.tokens.tolist(), limit, self._vocabulary)
                for request, limit in zip(requests, limits, strict=True)
            ]
        )


class _Stops(Stopper):
    """Each request has a stop token of its own."""

    def __init__(self, stops: Sequence[int | None]) -> None:
        self._each = [
            Stopper(Options(stop_token_ids=frozenset(() if s is None else (s,))), None)
            for s in stops
        ]

    def cut(self, request: Request, run: Sequence[int]) -> Cut:
        """See `Stopper.cut`."""
        return self._each[request.index].cut(request, run)


class JobEngine(AuditedEngine):
    """An audited engine whose requests arrive, stop and are aborted as jobs say."""

    jobs: Sequence[Job] = ()
    _clock = 0

    def start(
        self, jobs: Sequence[Job], prompts: Sequence[list[int]], k: int
    ) -> Generator[TokenRun, None, None]:
        """Run jobs; see `stops` for where they end."""
        self.jobs, self._clock = jobs, 0
        options = Options(max_new_tokens=max(job.tokens for job in jobs), num_draft_tokens=k)
        requests = self._requests(prompts, options)
        for request, job in zip(requests, jobs, strict=True):
            request.limit = request.prompt_length + job.tokens
        return self._run(requests, options, _Stops(self.stops))

    stops: Sequence[int | None] = ()

    def _admit(self, waiting: deque[Request]) -> list[Request]:
        due: deque[Request] = deque()
        while waiting and self.jobs[waiting[0].index].arrive <= self._clock:
            due.append(waiting.popleft())
        admitted = super()._admit(due)
        waiting.extendleft(reversed(due))
        self._clock += 1
        return admitted

    def _retire(self, active: Sequence[Request]) -> list[Request]:
        due = []
        for request in active:
            abort = self.jobs[request.index].abort
            if request.finish is None and 0 < abort <= self._clock:
                request.finish = FinishReason.INTERRUPTED
                due.append(str(request.index))
        if any(request.finish is None for request in active):
            self.findings.aborted += len(set(due) & set(self.books.shadow.speculated()))
        return super()._retire(active)


_Steps = dict[str, list[list[int]]]
"""By the job's number, the tokens of each step."""


def _joined(steps: _Steps) -> dict[str, list[int]]:
    return {name: [token for step in each for token in step] for name, each in steps.items()}


class EngineAudit:
    """The embedded engine, staged and audited.

    Attributes:
        control: what the control group is.
        runner: None, there is one way to run.
        shares: pages never leave their requests.

    Raises:
        InputError: no such model, or one that the engine does not run; see `nwor.engine.load`.
    """

    control = "the same engine with mode immediate: drafts are written through, as stock caches do"
    runner: str | None = None
    shares = False

    def __init__(
        self,
        model: str,
        *,
        level: AuditLevel,
        k: int,
        dtype: str = "auto",
        drafter: str = "adversary",
    ) -> None:
        self._loaded = load(model, dtype)
        self._drafter, self._dtype = drafter, dtype
        self._new_drafter().close()
        if self._loaded.tokenizer is None:
            raise InputError(f"{model!r} has no tokenizer: the workloads are texts")
        self._level, self._k = level, k

    def _new_drafter(self) -> Drafter:
        if self._drafter == "adversary":
            return Adversary()
        if self._drafter != "prompt-lookup" and not self._drafter.startswith("model:"):
            raise InputError(
                f"unknown drafter {self._drafter!r}; known: adversary, prompt-lookup, model:PATH_OR_ID"
            )
        return make_drafter(self._drafter, self._loaded, self._dtype)

    def run(self, name: str, workload: Workload, *, control: bool) -> Report:
        """Run one workload, staged and (with `control`) written through."""
        jobs = workload.jobs
        nowhere = [None] * len(jobs)
        stops = stop_tokens(jobs, lambda jobs: self._written_through(jobs, nowhere)[0])
        steps, findings = self._once(Mode.STAGE, jobs, stops, self._level)
        tokens = _joined(steps)
        report = Report(name, findings, tokens=tokens)
        report.not_exercised = workload.not_exercised(findings, "transformers")
        if control:
            other, report.control = self._written_through(jobs, stops)
            report.same_tokens = _joined(other) == tokens
        return report

    def _written_through(
        self, jobs: Sequence[Job], stops: Sequence[int | None]
    ) -> tuple[_Steps, Findings]:
        with unlogged(logger):
            return self._once(Mode.IMMEDIATE, jobs, stops)

    def _once(
        self,
        mode: Mode,
        jobs: Sequence[Job],
        stops: Sequence[int | None],
        level: AuditLevel = AuditLevel.METADATA,
    ) -> tuple[_Steps, Findings]:
        tokenizer: Any = self._loaded.tokenizer
        prompts = [prompt_ids(job, tokenizer) for job in jobs]
        answers: _Steps = {str(i): [] for i in range(len(jobs))}
        with JobEngine(
            self._loaded.model,
            level=level,
            drafter=self._new_drafter(),
            mode=mode.value,
            max_batch=MAX_BATCH,
            max_length=max(map(len, prompts)) + max(job.tokens for job in jobs),
            max_draft=self._k,
        ) as engine:
            engine.stops = stops
            for run in engine.start(jobs, prompts, self._k):
                answers[str(run.request.index)].append(run.tokens)
            if engine.final is not None:
                engine.final.check(engine.runner, engine.books.shadow, engine.prefill_chunk)
            return answers, engine.findings
