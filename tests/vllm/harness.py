"""An in-process engine that tests drive step by step, and the audit that watches it.

The audit knows nothing of nwor's bookkeeping. After each step it asks vLLM's scheduler which rows
became durable, and compares all durable pages, bit for bit, with what they were before the step:
nothing but those rows may have changed.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from drafters import ScriptedDrafter
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.triton_utils import dispatcher

from nwor.layout import KVRows
from nwor.manager import Mode
from nwor.store.overlay import Overlay

CANARY = 0.5
SCRIPTED = {"method": "custom_class", "model": "drafters.ScriptedDrafter"}


@dataclass
class Run:
    """What a run gave.

    Attributes:
        tokens: output tokens by request.
        rows: K and V bytes by (request, position, group), as they were when they became durable.
        foreign: durable slots that changed although no durable row lives there.
        logprobs: by request, if asked for.
        draft_counts: by request, drafts verified in each of its steps.
        stop_reasons: by request, the stop token or string that ended it, None for its length.
    """

    tokens: dict[str, list[int]] = field(default_factory=dict)
    rows: dict[tuple[str, int, int], bytes] = field(default_factory=dict)
    foreign: int = 0
    steps: int = 0
    drafts: int = 0
    accepted: int = 0
    logprobs: dict[str, Any] = field(default_factory=dict)
    preempted: int = 0
    texts: dict[str, str] = field(default_factory=dict)
    draft_counts: dict[str, list[int]] = field(default_factory=dict)
    stop_reasons: dict[str, int | str | None] = field(default_factory=dict)


class Engine:
    """A vLLM engine in this process whose mode can be switched between runs."""

    def __init__(
        self,
        model: str,
        *,
        k: int = 4,
        speculative: dict[str, Any] | None = None,
        blocks: int = 96,
        block_size: int = 32,
        **options: Any,
    ) -> None:
        speculative = {"num_speculative_tokens": k, **(speculative or SCRIPTED)}
        if "none" in speculative:
            speculative = None
        defaults = {
            "dtype": "float32",
            "max_model_len": 256,
            "max_num_seqs": 8,
            "enforce_eager": True,
            "disable_log_stats": False,
            "seed": 0,
        }
        self.llm = LLM(
            model,
            block_size=block_size,
            num_gpu_blocks_override=blocks,
            speculative_config=speculative,
            **{**defaults, **options},
        )
        # vLLM registers its CPU kernels for every engine anew and stumbles over other libraries'
        # modules when it does so again; once is enough.
        dispatcher.register_kernels = lambda overrides: None
        core = self.llm.llm_engine.engine_core.engine_core
        self.core = core
        self.scheduler = core.scheduler
        self.runner = core.model_executor.driver_worker.worker.model_runner
        self._update = self.scheduler.update_from_output

    @property
    def overlay(self) -> Overlay:
        overlay = self.runner.nwor.overlay
        assert overlay is not None
        return overlay

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        self.__dict__.clear()
        gc.collect()
        cleanup_dist_env_and_memory()

    def learn(self, prompts: Sequence[Sequence[int]], params: Any) -> Run:
        """Run without drafts and stock, and let the drafter know the continuations."""
        ScriptedDrafter.silent = True
        run = self.run(prompts, params, Mode.OFF)
        ScriptedDrafter.silent = False
        ScriptedDrafter.scripts = [
            [*prompt, *run.tokens[str(i)]] for i, prompt in enumerate(prompts)
        ]
        return run

    def run(
        self,
        prompts: Sequence[Sequence[int] | str],
        params: Any,
        mode: Mode,
        *,
        arrive: dict[int, int] | None = None,
        abort: dict[int, str] | None = None,
        before_step: Callable[[int], None] | None = None,
        keep_prefix: bool = False,
    ) -> Run:
        """Run the prompts in a mode under audit.

        Args:
            prompts: token ids or text; request i is called ``str(i)``.
            params: sampling parameters, one for all or one each.
            mode: mode for the run.
            arrive: step before which request i is added; at once if left out.
            abort: request to abort before a step.
            before_step: called before every step.
            keep_prefix: leave cached prefixes of the last run in place.
        """
        llm_engine = self.llm.llm_engine
        if not keep_prefix:
            assert self.llm.reset_prefix_cache()
        run = self.make_run()
        audit = self.audit(run)
        self.runner.nwor.set_mode(mode)
        each = params if isinstance(params, list) else [params] * len(prompts)
        waiting = {i: (arrive or {}).get(i, 0) for i in range(len(prompts))}
        step = 0
        try:
            while waiting or llm_engine.has_unfinished_requests():
                for i in [i for i, when in waiting.items() if when <= step]:
                    prompt = prompts[i]
                    ready = prompt if isinstance(prompt, str) else {"prompt_token_ids": [*prompt]}
                    llm_engine.add_request(str(i), ready, each[i])
                    del waiting[i]
                if abort and step in abort:
                    llm_engine.abort_request([abort[step]])
                if before_step is not None:
                    before_step(step)
                for output in llm_engine.step():
                    if output.finished:
                        run.tokens[output.request_id] = list(output.outputs[0].token_ids)
                        run.logprobs[output.request_id] = output.outputs[0].logprobs
                        run.texts[output.request_id] = output.outputs[0].text
                        run.stop_reasons[output.request_id] = output.outputs[0].stop_reason
                step += 1
                assert step < 2000, "the engine does not finish"
        finally:
            audit.close()
        run.steps = step
        return run

    def both(self, prompts: Sequence[Any], params: Any, **options: Any) -> tuple[Run, Run]:
        """Run stock and staged; compare tokens and durable bytes; return both runs.

        In the end no request may hold a staging page.
        """
        stock = self.run(prompts, params, Mode.OFF, **options)
        before = self.counters()
        staged = self.run(prompts, params, Mode.STAGE, **options)
        self.check(stock, staged, before)
        self.drain()
        assert self.overlay.pages.pages_in_use == 0, f"leases of {self.overlay.pages.requests}"
        self.overlay.pages.check_integrity()
        return stock, staged

    def check(self, stock: Run, staged: Run, before: dict[str, Any]) -> None:
        check(self, stock, staged, before)

    def make_run(self) -> Run:
        return Run()

    def audit(self, run: Run) -> Audit:
        return Audit(self, run)

    def counters(self) -> dict[str, Any]:
        return self.runner.nwor.metrics.snapshot()

    def drain(self) -> None:
        """A step without requests tells the worker that all have finished."""
        self.llm.llm_engine.step()


def check(engine: Engine, stock: Run, staged: Run, before: dict[str, Any]) -> None:
    """The three promises of a staged run: same tokens, same rows, nothing else written."""
    assert staged.tokens == stock.tokens
    assert staged.foreign == 0, f"{staged.foreign} durable slots hold rows nobody accepted"
    assert staged.rows == stock.rows
    assert stock.drafts > stock.accepted, "a run without a rejected draft proves nothing"
    assert stock.foreign > 0, "the audit sees nothing on the stock engine"
    after = engine.counters()
    added = {name: after[name] - before[name] for name in ("staged", "committed", "rejected")}
    assert added == {
        "staged": staged.drafts,
        "committed": staged.accepted,
        "rejected": staged.drafts - staged.accepted,
    }
    engine.overlay.pages.check_integrity()
    assert engine.overlay.window is None


class Audit:
    """Watches durable pages of all layers, through vLLM's own scheduler."""

    def __init__(self, engine: Engine, run: Run) -> None:
        self.engine, self.run = engine, run
        self.durable = engine.overlay.pages.first_page
        self.groups = [group.rows for group in engine.overlay.groups]
        self.sizes = [group.page_size for group in engine.overlay.groups]
        storages = {id_of(rows): rows for group in self.groups for rows in group}
        self.storages = list(storages.values())
        for rows in self.storages:
            for view in (rows.key, rows.value):
                view[:, : self.durable].copy_(pattern(view[:, : self.durable]))
        self.before = self.snapshot()
        self.update = engine.scheduler.update_from_output
        engine.scheduler.update_from_output = self.step

    def close(self) -> None:
        self.engine.scheduler.update_from_output = self.update

    def snapshot(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        end = self.durable
        return [(r.key[:, :end].clone(), r.value[:, :end].clone()) for r in self.storages]

    def step(self, scheduled: Any, output: Any) -> Any:
        """Called when a step has run and the scheduler is about to learn its result."""
        durable = {storage: set() for storage in range(len(self.storages))}
        place = {id_of(rows): i for i, rows in enumerate(self.storages)}
        start = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        cached = scheduled.scheduled_cached_reqs
        start |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        self.run.preempted += len(scheduled.preempted_req_ids or ())
        for request, length in scheduled.num_scheduled_tokens.items():
            drafts = scheduled.scheduled_spec_decode_tokens.get(request, [])
            sampled = output.sampled_token_ids[output.req_id_to_index[request]]
            accepted = max(len(sampled) - 1, 0) if drafts else 0
            if drafts:
                self.run.drafts += len(drafts)
                self.run.accepted += accepted
            kept = length - len(drafts) + accepted
            blocks = self.engine.scheduler.kv_cache_manager.get_block_ids(request)
            name = request.rsplit("-", 1)[0]
            self.run.draft_counts.setdefault(name, []).append(len(drafts))
            for group, (rows, size) in enumerate(zip(self.groups, self.sizes, strict=True)):
                for position in range(start[request], start[request] + kept):
                    page, offset = blocks[group][position // size], position % size
                    for part in rows:
                        durable[place[id_of(part)]].add((page, offset))
                    self.run.rows[name, position, group] = b"".join(
                        bits(view[:, page, offset])
                        for part in rows
                        for view in (part.key, part.value)
                    )
        after = self.snapshot()
        for storage, (old, new) in enumerate(zip(self.before, after, strict=True)):
            changed = torch.zeros(old[0].shape[1:3], dtype=torch.bool)
            for then, now in zip(old, new, strict=True):
                changed |= (then != now).flatten(3).any(-1).any(0)
            for page, offset in durable[storage]:
                changed[page, offset] = False
            self.run.foreign += int(changed.sum())
        self.before = after
        return self.update(scheduled, output)


def id_of(rows: KVRows) -> tuple[int, int]:
    return rows.key.data_ptr(), rows.value.data_ptr()


def bits(view: torch.Tensor) -> bytes:
    return view.contiguous().view(torch.uint8).numpy().tobytes()


def pattern(view: torch.Tensor) -> torch.Tensor:
    """A finite pattern: NaN would spoil stock attention, which multiplies masked rows by zero."""
    if view.dtype == torch.uint8:
        return torch.full_like(view, 0x2A)
    return torch.full_like(view, CANARY)


def greedy(max_tokens: int = 48, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **options)


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of the given lengths."""
    rng = random.Random(seed)
    return [[1, *(rng.randrange(4, 100) for _ in range(n - 1))] for n in lengths]
