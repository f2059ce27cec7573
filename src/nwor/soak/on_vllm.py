"""Traffic on a vLLM engine of this process, and what is looked at between its steps.

The engine has few blocks, so requests are preempted; it shares prefixes and cuts prompts into chunks.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from nwor.audit import AuditLevel
from nwor.errors import InputError
from nwor.soak.ledger import Check, Ledger
from nwor.soak.sizes import MAX_BATCH, MAX_LENGTH, MODEL, K, traffic_of
from nwor.soak.tiny import tiny_model, write_tokenizer
from nwor.soak.traffic import Traffic, Visit, Wave
from nwor.vllm.audit_run import served_audit
from nwor.vllm.interpreter import CHOICE

PAGE, GROUPS, CHUNK = 32, 3, 64
STAGING = 2 * GROUPS * MAX_BATCH
BLOCKS = 42 + STAGING
"""42 for the scheduler, one of them vLLM's null block."""


class TrafficDrafter:
    """Drafts what the traffic says; vLLM loads it by name (``method="custom_class"``).

    Attributes:
        names: returns the request of each batch row.
        draft: returns the drafts of a request with so many tokens, at most so many.
    """

    names: Callable[[], Sequence[str]]
    draft: Callable[[str, int, int], list[int]]

    def __init__(self, config: Any) -> None:  # noqa: ANN401 - vllm.config.VllmConfig
        self.k = config.speculative_config.num_speculative_tokens

    def load_model(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Nothing to load."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[Any],
        token_ids_cpu: NDArray[Any],  # noqa: ARG002 - vLLM's interface
        slot_mappings: Any = None,  # noqa: ANN401, ARG002 - as above
    ) -> list[list[int]]:
        """Draft for every request that sampled."""
        kind = type(self)
        rows = zip(kind.names(), sampled_token_ids, num_tokens_no_spec, strict=False)
        return [
            kind.draft(name, int(length), self.k) if sampled else []
            for name, sampled, length in rows
        ]


class VllmSoak:
    """vLLM, staged and audited, on a tiny Gemma 3: three cache groups, two of them sliding windows.

    Attributes:
        settings: sizes, for the record.
        impossible: what this engine never does.

    Raises:
        InputError: nwor refuses this engine, or the environment asks for vLLM's V2 runner.
    """

    impossible: dict[str, str] = {}  # noqa: RUF012 - read only

    def __init__(self) -> None:
        if os.environ.get(CHOICE, "0") != "0":
            raise InputError(f"soak runs vLLM's V1 runner only: unset {CHOICE}")
        self._model = tiny_model(MODEL)
        self._folder = tempfile.TemporaryDirectory(prefix="nwor-soak-")
        self._model.save_pretrained(self._folder.name)
        write_tokenizer(Path(self._folder.name))
        self._llm = _start(self._folder.name)
        core = self._llm.llm_engine.engine_core.engine_core
        self._scheduler = core.scheduler
        self._runner = core.model_executor.driver_worker.worker.model_runner
        try:
            self._audit = served_audit(self._runner, self._scheduler)
        except BaseException:
            self.close()
            raise
        TrafficDrafter.names = lambda: list(self._runner.input_batch.req_ids)
        self._preempted = 0
        self._watch_preemption()
        self.settings = {
            "model": MODEL,
            "max_num_seqs": MAX_BATCH,
            "num_speculative_tokens": K,
            "blocks": BLOCKS - STAGING,
            "staging_pages": STAGING,
            "block_size": PAGE,
            "max_num_batched_tokens": CHUNK,
            "audit": AuditLevel.METADATA.value,
        }

    def _watch_preemption(self) -> None:
        schedule = self._scheduler.schedule

        def counted(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            output = schedule(*args, **kwargs)
            self._preempted += len(output.preempted_req_ids or ())
            return output

        self._scheduler.schedule = counted

    def traffic(self, seed: int) -> Traffic:
        """Let stock transformers write texts with the same weights; return traffic made of them."""
        return traffic_of(self._model, seed)

    def run(self, wave: Wave, traffic: Traffic, ledger: Ledger) -> None:
        """Run a wave."""
        if wave.fresh:
            emptied = self._llm.reset_prefix_cache()
            ledger.require(Check.RETURNED, [emptied], [True], "cache emptied")
        guests = _Guests(self._llm.llm_engine, wave, ledger)
        TrafficDrafter.draft = lambda name, position, limit: traffic.draft(
            wave.number, guests.visits[name.rsplit("-", 1)[0]], position, limit
        )
        while guests.any and not ledger.violations:
            guests.come_and_go()
            guests.step()
            if ledger.step():
                self.check(ledger)
        if not ledger.violations:
            self._llm.llm_engine.step()  # tells the worker that all have finished
            ledger.all_ended(guests.names)
            self.check_idle(ledger)

    # -- integrity -------------------------------------------------------------------------------

    def check(self, ledger: Ledger) -> None:
        """Look at everything that can be wrong between two steps."""
        windows = self._runner.nwor
        ledger.require(Check.WINDOW, windows.overlay.window, None, "window")
        self._check_staging(ledger)
        self._check_blocks(ledger)
        self._check_watermarks(ledger)
        ledger.require(Check.STAGED, dict(windows.refused()), {}, "refused")
        ledger.audit(self._audit.findings)
        ledger.reconcile(windows.metrics, self._audit.findings)
        ledger.totals.preempted = self._preempted

    def _check_staging(self, ledger: Ledger) -> None:
        """Leases: free or held once, by requests that live or whose end the worker learns next."""
        pages, scheduler = self._runner.nwor.overlay.pages, self._scheduler
        try:
            pages.check_integrity()
        except AssertionError as error:
            ledger.broken(Check.STAGING, str(error))
        strangers = {*pages.requests} - {*scheduler.requests} - {*scheduler.finished_req_ids}
        ledger.require(Check.STAGING, strangers, set(), "staging pages of requests that are gone")

    def _check_blocks(self, ledger: Ledger) -> None:
        """Blocks of the scheduler: free once, or owned as often as counted, none of them staging."""
        manager = self._scheduler.kv_cache_manager
        pool = manager.block_pool
        free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        owners: Counter[int] = Counter()
        for each in manager.coordinator.single_type_managers:
            for blocks in each.req_to_blocks.values():
                owners.update(block.block_id for block in blocks if not block.is_null)
        null = pool.null_block.block_id
        ledger.partition(Check.PAGES, free, [null, *owners], range(len(pool.blocks)))
        counted = {b.block_id: b.ref_cnt for b in pool.blocks if b.ref_cnt and not b.is_null}
        ledger.require(Check.PAGES, counted, dict(owners), "owners by block")
        first = self._runner.nwor.overlay.pages.first_page
        ledger.require(Check.STAGING, len(pool.blocks), first, "blocks, and first staging page")

    def _check_watermarks(self, ledger: Ledger) -> None:
        """Rows that the audit saw going home are the tokens that the scheduler calls computed."""
        for request in self._scheduler.running:
            held = self._audit.shadow.held(request.request_id)
            rows = 0 if held is None else held.shape[1]
            ledger.require(
                Check.WATERMARK, rows, request.num_computed_tokens, f"request {request.request_id}"
            )

    def check_idle(self, ledger: Ledger) -> None:
        """Look at what must be back when nobody runs."""
        pool, pages = self._scheduler.kv_cache_manager.block_pool, self._runner.nwor.overlay.pages
        ledger.require(Check.RETURNED, pages.pages_in_use, 0, "staging pages in use")
        free, blocks = pool.get_num_free_blocks(), len(pool.blocks) - 1
        ledger.require(Check.RETURNED, free, blocks, "free blocks")
        ledger.require(Check.RETURNED, list(self._scheduler.requests), [], "requests")
        self.check(ledger)
        ledger.totals.checks += 1

    def close(self) -> None:
        """Stop the engine."""
        self._llm.llm_engine.engine_core.shutdown()
        self._folder.cleanup()


class _Guests:
    """The requests of a wave: who still waits, who runs, what was said so far.

    Args:
        engine: vLLM's ``LLMEngine``.
        wave: the wave.
        ledger: hears of every answer.

    Attributes:
        visits: all requests, by name.
    """

    def __init__(self, engine: Any, wave: Wave, ledger: Ledger) -> None:  # noqa: ANN401
        self._engine, self._wave, self._ledger = engine, wave, ledger
        self.visits = {f"{wave.number}.{visit.index}": visit for visit in wave.visits}
        self._waiting = dict(self.visits)
        self._running: dict[str, Visit] = {}
        self._answers: dict[str, list[int]] = {name: [] for name in self.visits}

    @property
    def names(self) -> list[str]:
        """Those that wait or run, as far as anybody has said."""
        return [*self._waiting, *self._running]

    @property
    def any(self) -> bool:
        """Whether anybody waits or runs."""
        return bool(self._waiting) or self._engine.has_unfinished_requests()

    def come_and_go(self) -> None:
        """Before a step: send the requests that are due, abort those whose time has come."""
        step = self._ledger.step_of_wave
        for name in [n for n, visit in self._waiting.items() if visit.arrive <= step]:
            visit = self._running[name] = self._waiting.pop(name)
            self._engine.add_request(name, *_request(visit))
        everybody = 0 < self._wave.leave <= step
        for name, visit in list(self._running.items()):
            if everybody or 0 < visit.abort <= step:
                self._engine.abort_request([name])
                self._end(self._running, name, aborted=True)
        for name in list(self._waiting) if everybody else ():
            self._end(self._waiting, name, aborted=True)

    def step(self) -> None:
        """Run an engine step."""
        for output in self._engine.step():
            self._answers[output.request_id] = list(output.outputs[0].token_ids)
            if output.finished:
                self._end(self._running, output.request_id, aborted=False)

    def _end(self, group: dict[str, Visit], name: str, *, aborted: bool) -> None:
        self._ledger.answered(group.pop(name), self._answers[name], aborted=aborted)


def _start(model: str) -> Any:  # noqa: ANN401 - vllm.LLM
    os.environ.update(
        NWOR_MODE="stage",
        NWOR_AUDIT=AuditLevel.METADATA.value,
        NWOR_STAGING_PAGES=str(STAGING),
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
    )
    for name, value in (
        ("VLLM_CPU_KVCACHE_SPACE", "1"),
        ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
        ("VLLM_LOGGING_LEVEL", "ERROR"),
        ("OMP_NUM_THREADS", "1"),  # tiny layers are faster on one
    ):
        os.environ.setdefault(name, value)
    from vllm import LLM  # noqa: PLC0415 - takes seconds, and reads the environment

    from nwor.vllm.plugin import register  # noqa: PLC0415 - VLLM_PLUGINS may leave it out

    register()
    return LLM(
        model,
        dtype="float32",
        max_model_len=MAX_LENGTH,
        max_num_seqs=MAX_BATCH,
        max_num_batched_tokens=CHUNK,
        block_size=PAGE,
        num_gpu_blocks_override=BLOCKS,
        enforce_eager=True,
        disable_log_stats=False,
        seed=0,
        speculative_config={
            "method": "custom_class",
            "model": "nwor.soak.on_vllm.TrafficDrafter",
            "num_speculative_tokens": K,
        },
    )


def _request(visit: Visit) -> tuple[Any, Any]:
    """Return a request's prompt and parameters, as vLLM takes them."""
    from vllm import SamplingParams  # noqa: PLC0415 - as above

    params = SamplingParams(temperature=0, max_tokens=visit.tokens, ignore_eos=True)
    return {"prompt_token_ids": visit.prompt}, params
