"""The audit's workloads on a vLLM engine of this process."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

import numpy as np

from nwor.audit import AuditLevel, Findings
from nwor.audit.final import compare
from nwor.audit.reporter import unlogged
from nwor.audit.verdicts import Report
from nwor.audit.workloads import (
    MAX_BATCH,
    MAX_LENGTH,
    PAGE,
    Job,
    Workload,
    prompt_ids,
    stop_tokens,
    undisturbed,
)
from nwor.errors import InputError
from nwor.manager import Mode
from nwor.vllm import seams
from nwor.vllm.audit import RunnerAudit, audit_of
from nwor.vllm.interpreter import CHOICE, prepare_v2
from nwor.vllm.startup import reservation_of

logger = logging.getLogger("vllm.nwor")

NOT_ON_V2 = {
    "adversary": "vLLM's V2 runner loads no drafters of one's own class",
    "prompt-lookup": "the V2 runner's n-gram kernels fail under Triton's interpreter, so nwor was "
    "never run with them and refuses them",
}
"""Drafters that the V2 runner cannot be audited with, and why."""


def _speculation(drafter: str) -> dict[str, Any]:
    """Return vLLM's speculative config for a drafter.

    Raises:
        InputError: no such drafter.
    """
    if drafter == "adversary":
        return {"method": "custom_class", "model": "nwor.vllm.adversary.Adversary"}
    if drafter == "prompt-lookup":
        return {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    kind, _, path = drafter.partition(":")
    if kind != "model" or not path:
        raise InputError(
            f"unknown drafter {drafter!r}; known: adversary, prompt-lookup, model:PATH_OR_ID"
        )
    return {"method": "draft_model", "model": path}


class VllmAudit:
    """An engine of this process, staged and audited.

    The V2 runner if ``VLLM_USE_V2_MODEL_RUNNER=1`` asks for it, else the one that vLLM takes.

    Attributes:
        control: what the control group is.
        runner: the model runner that is audited, ``v1`` or ``v2``.
        shares: pages leave their requests, through the prefix cache.

    Raises:
        InputError: vLLM finds no such model, or nwor refuses this engine.
    """

    control = "stock vLLM with the same drafter"
    runner: str | None = None
    shares = True

    def __init__(
        self,
        model: str,
        *,
        level: AuditLevel,
        k: int,
        dtype: str = "auto",
        drafter: str = "adversary",
    ) -> None:
        speculation = {**_speculation(drafter), "num_speculative_tokens": k}
        if prepare_v2() and drafter in NOT_ON_V2:
            raise InputError(
                f"--drafter {drafter} with {CHOICE}=1: {NOT_ON_V2[drafter]}. Use model:PATH_OR_ID, or "
                f"unset {CHOICE}"
            )
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
                max_model_len=MAX_LENGTH,
                max_num_seqs=MAX_BATCH,
                block_size=PAGE,
                num_gpu_blocks_override=160,
                enforce_eager=True,
                disable_log_stats=False,
                seed=0,
                speculative_config=speculation,
            )
        except (OSError, ValueError) as error:  # what vLLM raises where there is no such model
            raise InputError(
                f"vLLM cannot start on {model!r}: give a folder with config.json and weights, or a "
                f"model id. It said: {error}"
            ) from error
        client: Any = self.llm.llm_engine.engine_core
        core = client.engine_core
        self._scheduler = core.scheduler
        self._runner = core.model_executor.driver_worker.worker.model_runner
        self._level = level
        self._audit = served_audit(self._runner, self._scheduler)
        self.runner = "v2" if core.vllm_config.use_v2_model_runner else "v1"

    def run(self, name: str, workload: Workload, *, control: bool) -> Report:
        """Run one workload, staged and (with `control`) stock."""
        jobs = workload.jobs
        nowhere = [None] * len(jobs)
        stops = stop_tokens(jobs, lambda jobs: self._stock(jobs, nowhere) and self._steps)
        tokens, findings = self._once(Mode.STAGE, jobs, stops, workload.scarce)
        if self._level is AuditLevel.BYTES:
            self._compare_final(jobs, findings)
        report = Report(name, findings, tokens=tokens)
        report.not_exercised = workload.not_exercised(findings, "vllm")
        if control:
            stock, report.control = self._stock(jobs, stops, workload.scarce)
            report.same_tokens = stock == tokens
        return report

    def _compare_final(self, jobs: Sequence[Job], findings: Findings) -> None:
        """Compare the rows of a run with those of one without speculation, as far as tokens agree."""
        found, tokens, prompts = self._audit.final, self._emitted, self._prompts
        with self._no_drafts():
            plain, _ = self._stock(undisturbed(jobs), [None] * len(jobs))
        reference = {name.partition("-")[0]: rows for name, rows in self._audit.final.items()}
        for name, groups in found.items():
            key = name.partition("-")[0]
            pairs = zip(tokens[key], plain[key], strict=False)
            same = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
            for number, (mine, theirs) in enumerate(zip(groups, reference[key], strict=True)):
                at, a, b = np.intersect1d(mine[0], theirs[0], return_indices=True)
                prompt = len(prompts[int(key)])
                end = int(np.searchsorted(at, prompt + same))
                rows = [
                    [part[:, i[:end]] for part in each[1]] for each, i in ((mine, a), (theirs, b))
                ]
                compare(findings, name, number, at[:end], prompt, *rows)

    @contextmanager
    def _no_drafts(self) -> Iterator[None]:
        """Let the scheduler take no drafts, whoever makes them: nothing is speculated."""

        def forget(_: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args, **kwargs: None  # noqa: ARG005 - vLLM's arguments

        seams.wrap_method(self._scheduler, seams.DRAFTS, forget)
        try:
            yield
        finally:
            seams.unwrap_method(self._scheduler, seams.DRAFTS)

    def _stock(
        self, jobs: Sequence[Job], stops: Sequence[int | None], scarce: int = 0
    ) -> tuple[dict[str, list[int]], Findings]:
        with unlogged(logger):
            return self._once(Mode.OFF, jobs, stops, scarce)

    def _once(
        self, mode: Mode, jobs: Sequence[Job], stops: Sequence[int | None], scarce: int = 0
    ) -> tuple[dict[str, list[int]], Findings]:
        self.llm.reset_prefix_cache()
        self._runner.nwor.set_mode(mode)
        self._audit.watch(self._level)
        self._audit.keep_final, self._audit.final = self._level is AuditLevel.BYTES, {}
        self._audit.sampled = Counter()
        self._prompts = [prompt_ids(job, self.llm.get_tokenizer()) for job in jobs]
        with self._only(scarce):
            answers = self._answers(jobs, stops)
        findings = self._audit.findings
        sampled = {name.partition("-")[0]: n for name, n in self._audit.sampled.items()}
        findings.cut = sum(sampled[name] - len(answers[name]) for name in self._stopped)
        return answers, findings

    @contextmanager
    def _only(self, pages: int) -> Iterator[None]:
        """Keep all free pages but so many per cache group from requests, as another tenant would."""
        pool = self._scheduler.kv_cache_manager.block_pool
        left = pages * len(self._scheduler.kv_cache_config.kv_cache_groups)
        held = pool.get_new_blocks(max(pool.get_num_free_blocks() - left, 0)) if pages else []
        try:
            yield
        finally:
            pool.free_blocks(held)

    def _answers(self, jobs: Sequence[Job], stops: Sequence[int | None]) -> dict[str, list[int]]:
        from vllm import SamplingParams  # noqa: PLC0415 - as above

        engine = self.llm.llm_engine
        waiting = dict(enumerate(jobs))
        answers: dict[str, list[int]] = {}
        self._emitted: dict[str, list[int]] = {str(i): [] for i in waiting}  # of aborted ones too
        self._steps: dict[str, list[list[int]]] = {str(i): [] for i in waiting}
        self._stopped: set[str] = set()
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
                engine.add_request(str(i), {"prompt_token_ids": self._prompts[i]}, params)
            self._abort([str(i) for i, job in enumerate(jobs) if job.abort == step > 0], answers)
            for output in engine.step():
                tokens = list(output.outputs[0].token_ids)
                self._steps[output.request_id].append(
                    tokens[len(self._emitted[output.request_id]) :]
                )
                self._emitted[output.request_id] = tokens
                if output.finished:
                    answers[output.request_id] = self._emitted[output.request_id]
                    if output.outputs[0].finish_reason == "stop":
                        self._stopped.add(output.request_id)
            step += 1
        engine.step()  # tells the worker that all have finished
        return answers

    def _abort(self, requests: list[str], answers: Mapping[str, list[int]]) -> None:
        """Abort requests; count those that had a window, if any goes on without them."""
        running = {name.partition("-")[0] for name in self._audit.shadow.speculated()} - set(
            answers
        )
        if running - set(requests):
            self._audit.findings.aborted += len(running & set(requests))
        self.llm.llm_engine.abort_request(requests)


def served_audit(runner: Any, scheduler: Any) -> RunnerAudit:  # noqa: ANN401 - vLLM's
    """Return the audit of an engine that nwor serves.

    Raises:
        InputError: nwor refuses the engine, its worker found no rows, or it cannot be watched.
    """
    reservation = reservation_of(scheduler.kv_cache_config)
    if reservation is not None and reservation.refusals:
        reasons = "; ".join(map(str, reservation.refusals))
        raise InputError(f"nwor does not serve this engine: {reasons}")
    audit = audit_of(runner)
    if reservation is None or audit is None or runner.nwor.overlay is None:
        raise InputError("nwor does not serve this engine: the log says why; see `nwor doctor`")
    return audit
