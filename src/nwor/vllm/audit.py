"""Audit of a running V1 engine, staged or stock: what vLLM's buffers say, told to a shadow map.

    _update_states                      requests gone: their pages are nobody's
    _prepare_inputs, nwor's begin       (copies are seen as they happen)
    _build_attention_metadata  <------  what will be read and written, as the kernels will see it
    forward, _sample, nwor's commit     (copies are seen as they happen)
    _update_states_after_model_execute  what is durable now, and whether it should be

Another runner can be watched by telling `ShadowMap` the same things, whatever its buffers are called:
requests that finished or were preempted, before their pages are given away (`freed`); for each batch
row the request, its computed length (exact, not an optimistic bound), its scheduled rows and drafts,
the block tables and slot mappings as kernels will read them (`forward`); that sampling is done
(`sampled`); copies between staging and durable pages (`moved`); and the rows that each request keeps
(`end_step`). All of them on the host: a runner whose counts stay on the device has to wait for them.

The hooks sit on other symbols than nwor's own and stay when nwor's go, so the same audit watches an
engine in every mode. Tables, slot mappings and acceptance come from vLLM's buffers, copies from the
overlay as it makes them; of the overlay's own bookkeeping only the leases are read, to find leaks.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from nwor.audit import AuditLevel, Batch, Findings, Kind, ShadowMap, Violation
from nwor.audit.bytes import ByteAudit
from nwor.audit.names import Ints
from nwor.errors import LayoutError
from nwor.vllm import seams
from nwor.vllm.geometry import CacheGroup, cache_groups

logger = logging.getLogger("vllm.nwor")

AUDIT_ATTRIBUTE = "nwor_audit"
"""Name under which a runner carries its `RunnerAudit`."""

REJECTED = -1
INTEGRITY_STEPS = 64

FinalGroup = tuple[Ints, tuple[torch.Tensor, torch.Tensor]]
"""Positions ``[n]``, and K and V ``[layers, n, heads, dim]``, of one cache group."""


class RunnerAudit:
    """Watches one runner.

    Args:
        runner: vLLM's `GPUModelRunner`, its cache tensors allocated.
        groups: the target's cache groups.
        first_staging: first page that is not the scheduler's; the number of pages if there is none.

    Attributes:
        shadow: the books.
        keep_final: copy the rows of requests that end.
        sampled: by request, tokens that came out of its steps; None: not counted, as while serving.
        final: by request, for each cache group, slots and K and V of its accepted rows.

    Raises:
        LayoutError: groups with different page sizes.
    """

    def __init__(
        self,
        runner: Any,  # noqa: ANN401 - vLLM's GPUModelRunner
        groups: Sequence[CacheGroup[Any]],
        first_staging: int,
        level: AuditLevel,
    ) -> None:
        sizes = {group.overlay.page_size for group in groups}
        if len(sizes) != 1:
            raise LayoutError(f"the audit needs one page size, this engine has {sorted(sizes)}")
        self._runner = runner
        self._groups = groups
        self._tables = [group.overlay.table.numpy() for group in groups]
        self._slots = [group.overlay.slots.numpy() for group in groups]
        self.shadow = ShadowMap(
            num_pages=runner.kv_cache_config.num_blocks,
            page_size=sizes.pop(),
            windows=[_window(runner, group) for group in groups],
            max_requests=runner.max_num_reqs,
            max_length=runner.max_model_len + 1,
            first_staging=first_staging,
            told=_log,
        )
        self.keep_final = False
        self.sampled: Counter[str] | None = None
        self.final: dict[str, list[FinalGroup]] = {}
        self._output: Any = None
        self._reported = Findings()
        self._bytes: ByteAudit | None = None
        self.watch(level)

    @property
    def findings(self) -> Findings:
        """What was found and how much was looked at."""
        return self.shadow.findings

    # -- hooks -----------------------------------------------------------------------------------

    def install(self) -> None:
        """Put the hooks on the runner, and on nwor's row movers if it has any."""

        def update(original: Callable[..., Any]) -> Callable[..., Any]:
            def _update_states(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
                self.begin(scheduler_output)
                return original(scheduler_output, *args, **kwargs)

            return _update_states

        def build(original: Callable[..., Any]) -> Callable[..., Any]:
            def _build_attention_metadata(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
                if self._output is not None and self.shadow.step is None:
                    self.before_forward()
                return original(*args, **kwargs)

            return _build_attention_metadata

        def after(original: Callable[..., Any]) -> Callable[..., Any]:
            def _update_states_after_model_execute(
                output_token_ids: Any,  # noqa: ANN401
                *args: Any,  # noqa: ANN401
                **kwargs: Any,  # noqa: ANN401
            ) -> Any:  # noqa: ANN401
                self.after_sampling(output_token_ids)
                return original(output_token_ids, *args, **kwargs)

            return _update_states_after_model_execute

        seams.wrap_method(self._runner, seams.UPDATE_STATES, update)
        seams.wrap_method(self._runner, seams.BUILD_METADATA, build)
        seams.wrap_method(self._runner, seams.AFTER_EXECUTE, after)
        self._runner.rejection_sampler.register_forward_hook(self._on_sampled)
        overlay = self._overlay()
        if overlay is not None:
            overlay.effects.observers.append(self.on_move)

    def _overlay(self) -> Any:  # noqa: ANN401 - Overlay or None
        return getattr(getattr(self._runner, "nwor", None), "overlay", None)

    def _on_sampled(self, *_: Any) -> None:  # noqa: ANN401 - torch's hook
        self.shadow.sampled()

    def watch(self, level: AuditLevel) -> None:
        """Change the level and start a new report. No request may be running."""
        self.level = level
        self._bytes = None
        if level is AuditLevel.BYTES:
            rows = [group.overlay.rows for group in self._groups]
            self._bytes = ByteAudit(rows, self.shadow.first_staging)
        self.reset()

    def reset(self) -> None:
        """Start a new report; at the byte level, with fresh pages. No request may be running."""
        self.shadow.reset()
        self._reported = Findings()
        if self._bytes is not None:
            self._bytes.fill()

    # -- one step --------------------------------------------------------------------------------

    def begin(self, scheduler_output: Any) -> None:  # noqa: ANN401 - SchedulerOutput
        """Forget requests that are gone; remember what is scheduled."""
        self._output = None
        if self.level is AuditLevel.OFF:
            return
        if scheduler_output.num_scheduled_tokens:
            self._output = scheduler_output
        if self.keep_final:  # their pages may be another's now, but nobody has written to them
            for request in scheduler_output.finished_req_ids:
                self._keep(request)
        preempted = scheduler_output.preempted_req_ids or ()
        self.findings.preempted += len(preempted)
        self.shadow.freed(
            (
                *scheduler_output.finished_req_ids,
                *preempted,
                *scheduler_output.scheduled_cached_reqs.resumed_req_ids,
            )
        )
        self._check_leases()

    def _keep(self, request: str) -> None:
        held = self.shadow.held(request)
        for group, slots in zip(
            self._groups, () if held is None else held, strict=held is not None
        ):
            positions = np.flatnonzero(slots)
            page, row = np.divmod(slots[positions], group.overlay.page_size)
            key, value = (
                torch.cat([getattr(rows, part)[:, page, row] for rows in group.overlay.rows])
                for part in ("key", "value")
            )
            self.final.setdefault(request, []).append((positions, (key, value)))

    def before_forward(self) -> None:
        """Tell what the kernels will read and write."""
        output, batch = self._output, self._runner.input_batch
        requests = list(batch.req_ids)
        drafts = output.scheduled_spec_decode_tokens
        self.shadow.forward(
            Batch(
                requests,
                computed=batch.num_computed_tokens_cpu[: len(requests)],
                scheduled=np.array([output.num_scheduled_tokens[r] for r in requests], np.int64),
                drafts=np.array([len(drafts.get(r, ())) for r in requests], np.int64),
                tables=self._tables,
                slots=self._slots,
            )
        )

    def on_move(self, source: Ints, target: Ints) -> None:
        """Follow a copy of rows between staging and durable pages."""
        if self.level is not AuditLevel.OFF:
            self.shadow.moved(source, target)

    def after_sampling(self, sampled: torch.Tensor) -> None:
        """Tell what was accepted."""
        step, self._output = self.shadow.step, None
        if step is None:
            return
        tokens = (sampled.numpy()[: len(step.requests)] != REJECTED).sum(1)
        accepted = np.where(step.drafts > 0, np.maximum(tokens - 1, 0), 0)
        discarded = self._runner.discard_request_mask.np[: len(step.requests)]
        kept = np.where(discarded, step.scheduled, step.scheduled - step.drafts + accepted)
        self._count_sampled(step.requests, np.where(discarded, 0, tokens))
        durable = self.shadow.end_step(kept)
        if self._bytes is not None:
            self._bytes.check(self.shadow, durable)

    def _count_sampled(self, requests: Sequence[str], tokens: Ints) -> None:
        self.findings.tokens += int(tokens.sum())
        if self.sampled is not None:
            self.sampled.update(dict(zip(requests, tokens.tolist(), strict=True)))

    def _check_leases(self) -> None:
        overlay = self._overlay()
        if overlay is None:
            return
        self.shadow.check_leases(map(str, overlay.pages.requests))
        if self.findings.steps % INTEGRITY_STEPS == 0:
            try:
                overlay.pages.check_integrity()
            except AssertionError as error:
                self.shadow.report(Kind.LEAK, request=str(error))

    def take_sample(self) -> dict[str, Any] | None:
        """Return what was found since the last call, for /metrics."""
        now, before = self.findings, self._reported
        added = now.counts - before.counts
        if now.rows_checked == before.rows_checked and not added:
            return None
        sample: dict[str, Any] = {"audit_rows_checked": now.rows_checked - before.rows_checked}
        if added:
            sample["audit_violations"] = {f"{k.invariant} {k.value}": n for k, n in added.items()}
        before.rows_checked = now.rows_checked
        before.counts = now.counts.copy()
        return sample


def attach(runner: Any, level: AuditLevel, first_staging: int) -> None:  # noqa: ANN401 - GPUModelRunner
    """Audit a V1 runner, staged or not; called once its cache tensors exist."""
    attach_audit(runner, lambda: RunnerAudit(runner, cache_groups(runner), first_staging, level))


def attach_audit(runner: Any, make: Callable[[], RunnerAudit]) -> None:  # noqa: ANN401 - GPUModelRunner
    """Make an audit and put its hooks on; what cannot be audited is said and left alone."""
    try:
        if runner.device.type != "cpu":
            raise LayoutError(  # noqa: TRY301 - said like the others
                f"the audit reads vLLM's buffers on a CPU, this runner is on {runner.device}"
            )
        audit = make()
    except LayoutError as error:
        logger.error("nwor audit: this worker is not audited: %s", error)  # noqa: TRY400
        return
    audit.install()
    setattr(runner, AUDIT_ATTRIBUTE, audit)
    logger.info("nwor audit: watching, level %s", audit.level.value)


def audit_of(runner: Any) -> RunnerAudit | None:  # noqa: ANN401 - GPUModelRunner
    """Return the runner's audit, if it has one."""
    return getattr(runner, AUDIT_ATTRIBUTE, None)


def _window(runner: Any, group: CacheGroup[Any]) -> int | None:  # noqa: ANN401 - GPUModelRunner
    """Positions that attention of a group looks back, itself included."""
    spec = runner.kv_cache_config.kv_cache_groups[group.index].kv_cache_spec
    return getattr(spec, "sliding_window", None) or None


def _log(violation: Violation) -> None:
    logger.error("nwor audit: %s (later ones of this kind are only counted)", violation)
