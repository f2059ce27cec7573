"""The engine of `tests/vllm/harness.py` on the V2 runner, and an audit that works on its device.

Under asynchronous scheduling the scheduler learns of a step when the next one has run, so this audit
sits in the runner. It knows nothing of nwor's bookkeeping: which rows a step makes durable follows
from vLLM's own positions, source tables and counts of rejected drafts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from harness import Engine, Run, bits, id_of, pattern
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from nwor.layout import KVRows, Layout
from nwor.manager import Mode

LENIENT = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5}
"""Drafts are accepted at random, so the output is as much the drafter's as the target's."""

_stock_update = CpuPlatform.check_and_update_config


def _stay_asynchronous(config: Any) -> None:
    """vLLM switches asynchronous scheduling off on CPUs, where it is of no use."""
    _stock_update(config)
    config.scheduler_config.async_scheduling = True


@dataclass
class RunV2(Run):
    """What a run gave.

    Attributes:
        drafter: the drafter's K and V by (request, position), after it has drafted.
        unrestored: steps after whose commit tables or slot mappings were not vLLM's.
        verifying: most requests that verified in one step.
        first_drafts: by request, drafts in its first step.
    """

    drafter: dict[tuple[str, int], bytes] = field(default_factory=dict)
    unrestored: int = 0
    verifying: int = 0
    first_drafts: dict[str, int] = field(default_factory=dict)


class EngineV2(Engine):
    """A V2 engine in this process, with a draft model, an EAGLE head, or without speculation."""

    def __init__(
        self,
        model: str,
        *,
        drafter: str | None,
        k: int = 3,
        asynchronous: bool = False,
        **options: Any,
    ) -> None:
        speculative: dict[str, Any] = {"method": "draft_model", "model": drafter}
        if drafter is None:
            speculative = {"none": True}
        elif "eagle" in drafter:
            method = drafter.rsplit("-", 1)[1]
            speculative = {"method": method, "model": drafter, **LENIENT}
        options = {"max_num_seqs": 9, "blocks": 160, **options}
        with pytest.MonkeyPatch.context() as patch:
            if asynchronous:
                stay = staticmethod(_stay_asynchronous)
                patch.setattr(CpuPlatform, "check_and_update_config", stay)
                options["async_scheduling"] = True
            super().__init__(model, k=k, speculative=speculative, **options)

    def audit(self, run: Run) -> Any:
        return AuditV2(self, run)

    def make_run(self) -> RunV2:
        return RunV2()

    def run(self, prompts: Any, params: Any, mode: Mode, **options: Any) -> Any:
        """Also: a staged run leaves nothing behind; the next one's mode would release it all."""
        run = super().run(prompts, params, mode, **options)
        if mode is Mode.STAGE:
            self.check_all_returned()
        return run

    def check_all_returned(self) -> None:
        """No window is open, and once the worker knows who has finished, nobody holds a page."""
        pages = self.overlay.pages
        pages.check_integrity()
        self.drain()
        assert self.overlay.window is None
        assert pages.pages_in_use == 0, f"{pages.requests} still hold staging pages"
        pages.check_integrity()

    def give_up(self) -> None:
        """Abort what a failed step has left in the engine."""
        core = self.llm.llm_engine
        core.abort_request([name.rsplit("-", 1)[0] for name in self.scheduler.requests])
        self.runner.execute_model_state = None
        self.drain()

    def check(self, stock: Run, staged: Run, before: dict[str, Any]) -> None:
        """Also: everything restored, and the drafter saw what stock's sees."""
        super().check(stock, staged, before)
        assert self.counters()["refused"] == before["refused"]
        assert stock.unrestored == 0
        assert staged.unrestored == 0, f"{staged.unrestored} steps left edits in vLLM's tables"
        assert staged.drafter == stock.drafter, "the drafter computed other K and V"

    def counters(self) -> dict[str, Any]:
        self.runner.nwor.collect()
        return {**super().counters(), "refused": self.runner.nwor.refused()}


class AuditV2:
    """Watches durable pages of all target layers, step by step, in the runner."""

    NAMES = ("finish_requests", "prepare_attn", "postprocess_sampled", "sample_tokens")

    def __init__(self, engine: EngineV2, run: RunV2) -> None:
        self.run, self.runner = run, engine.runner
        self.durable = engine.overlay.pages.first_page
        self.groups = [group.rows for group in engine.overlay.groups]
        self.sizes = [group.page_size for group in engine.overlay.groups]
        self.storages = list({id_of(r): r for group in self.groups for r in group}.values())
        self.place = {id_of(rows): i for i, rows in enumerate(self.storages)}
        context = self.runner.compilation_config.static_forward_context
        self.drafter = [
            KVRows.of(Layout.VLLM_CPU, [context[name].kv_cache])
            for name in sorted(self.runner.speculator.draft_attn_layer_names)
        ]
        for rows in (*self.storages, *self.drafter):
            for view in (rows.key, rows.value):
                view[:, : self.durable].copy_(pattern(view[:, : self.durable]))
        self.before = self.snapshot()
        self.stock = {name: getattr(GPUModelRunner, name) for name in self.NAMES}
        for name in self.NAMES:
            setattr(GPUModelRunner, name, self.wrap(name))

    def close(self) -> None:
        for name, stock in self.stock.items():
            setattr(GPUModelRunner, name, stock)

    def wrap(self, name: str) -> Any:
        stock, mine = self.stock[name], getattr(self, name)
        return lambda runner, *args, **kwargs: mine(stock, *args, **kwargs)

    def snapshot(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        end = self.durable
        return [(r.key[:, :end].clone(), r.value[:, :end].clone()) for r in self.storages]

    def tables(self) -> list[torch.Tensor]:
        tables = self.runner.block_tables
        return [t.clone() for t in (*tables.input_block_tables, tables.slot_mappings)]

    # -- vLLM's methods --------------------------------------------------------------------------

    def finish_requests(self, stock: Any, scheduled: Any) -> Any:
        self.run.preempted += len(scheduled.preempted_req_ids or ())
        return stock(self.runner, scheduled)

    def prepare_attn(self, stock: Any, batch: Any) -> Any:
        """Called by nwor's hook, or by the runner: tables are as vLLM made them."""
        prepared = stock(self.runner, batch)
        self.batch, self.expected = batch, self.tables()
        return prepared

    def postprocess_sampled(
        self, stock: Any, index: Any, sampled: Any, num_sampled: Any, num_rejected: Any, loc: Any
    ) -> Any:
        """Nwor has committed, the watermark has not moved yet."""
        same = zip(self.tables(), self.expected, strict=True)
        self.run.unrestored += not all(torch.equal(a, b) for a, b in same)
        if self.batch.num_draft_tokens:
            drafts = self.batch.num_draft_tokens_per_req
            self.run.verifying = max(self.run.verifying, int((drafts > 0).sum()))
            self.run.drafts += int(drafts.sum())
            self.run.accepted += int(drafts.sum() - num_rejected.sum())
        for row, request in enumerate(self.batch.req_ids):
            drafts = self.batch.num_draft_tokens_per_req
            self.run.first_drafts.setdefault(
                request.rsplit("-", 1)[0], 0 if drafts is None else int(drafts[row])
            )
        self.new = self.find_durable(num_rejected)
        self.compare()
        return stock(self.runner, index, sampled, num_sampled, num_rejected, loc)

    def sample_tokens(self, stock: Any, *args: Any) -> Any:
        output = stock(self.runner, *args)
        for name, position, pages in self.new:
            page, offset = pages[0][position // self.sizes[0]], position % self.sizes[0]
            self.run.drafter[name, position] = b"".join(
                bits(view[:, page, offset]) for r in self.drafter for view in (r.key, r.value)
            )
        return output

    # -- what must be true -----------------------------------------------------------------------

    def find_durable(self, num_rejected: torch.Tensor) -> list[tuple[str, int, list[Any]]]:
        """List request, position and pages by group of the rows that this step makes durable."""
        batch, found = self.batch, []
        for row, request in enumerate(batch.req_ids):
            first, end = batch.query_start_loc[row : row + 2].tolist()
            start = int(batch.positions[first])
            pages = [
                table.gpu[batch.idx_mapping[row]].tolist()
                for table in self.runner.block_tables.block_tables
            ]
            name = request.rsplit("-", 1)[0]
            kept = end - first - int(num_rejected[row])
            found += [(name, position, pages) for position in range(start, start + kept)]
        return found

    def compare(self) -> None:
        """Count changes of durable pages outside the new rows; note the new rows' bytes."""
        allowed: list[set[tuple[int, int]]] = [set() for _ in self.storages]
        for name, position, pages in self.new:
            for group, (rows, size) in enumerate(zip(self.groups, self.sizes, strict=True)):
                page, offset = pages[group][position // size], position % size
                for part in rows:
                    allowed[self.place[id_of(part)]].add((page, offset))
                self.run.rows[name, position, group] = b"".join(
                    bits(view[:, page, offset]) for part in rows for view in (part.key, part.value)
                )
        after = self.snapshot()
        for old, new, slots in zip(self.before, after, allowed, strict=True):
            changed = torch.zeros(old[0].shape[1:3], dtype=torch.bool)
            for then, now in zip(old, new, strict=True):
                changed |= (then != now).flatten(3).any(-1).any(0)
            for page, offset in slots:
                changed[page, offset] = False
            self.run.foreign += int(changed.sum())
        self.before = after
