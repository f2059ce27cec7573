"""Audit of a running V2 engine, staged or stock; see `nwor.vllm.audit`.

    finish_requests               requests gone: their pages are nobody's
    prepare_attn, nwor's begin    (rows that are filled in)
    model_state.prepare_attn <--  what will be read and written, as the kernels will see it
    forward, sample, nwor's commit (rows that go home)
    postprocess_sampled           what is durable now, and whether it should be

Tables, positions and counts are vLLM's own buffers, read where they lie: on a CPU, under Triton's
interpreter. What is copied is read from the buffers that nwor's kernels work from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from nwor.audit import AuditLevel, Batch
from nwor.store import device_state as at
from nwor.vllm import seams
from nwor.vllm.audit import RunnerAudit, attach_audit
from nwor.vllm.geometry import device_groups


class RunnerAuditV2(RunnerAudit):
    """Watches one V2 runner."""

    def install(self) -> None:
        """Put the hooks on the runner, and on nwor's launches if it has any."""
        runner = self._runner

        def finish(original: Callable[..., Any]) -> Callable[..., Any]:
            def finish_requests(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
                self.begin(scheduler_output)
                return original(scheduler_output, *args, **kwargs)

            return finish_requests

        def build(original: Callable[..., Any]) -> Callable[..., Any]:
            def prepare_attn(input_batch: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
                if self._output is not None and self.shadow.step is None:
                    self.before_forward_of(input_batch)
                return original(input_batch, *args, **kwargs)

            return prepare_attn

        def after(original: Callable[..., Any]) -> Callable[..., Any]:
            def postprocess_sampled(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
                self.after_commit(*args[2:4])
                return original(*args, **kwargs)

            return postprocess_sampled

        seams.wrap_method(runner, seams.FINISH_V2, finish)
        seams.wrap_method(runner.model_state, seams.METADATA_V2, build)
        seams.wrap_method(runner, seams.AFTER_COMMIT_V2, after)
        _after_call(runner.rejection_sampler, self.shadow.sampled)
        overlay = self._overlay()
        if overlay is not None:
            overlay.launches = _Watched(overlay, self)

    # -- one step --------------------------------------------------------------------------------

    def before_forward_of(self, batch: Any) -> None:  # noqa: ANN401 - InputBatch
        """Tell what the kernels will read and write."""
        starts = batch.query_start_loc[: batch.num_reqs + 1].numpy()
        drafts = batch.num_draft_tokens_per_req
        self.shadow.forward(
            Batch(
                list(batch.req_ids),
                computed=batch.positions.numpy()[starts[:-1]],
                scheduled=np.diff(starts),
                drafts=np.zeros(batch.num_reqs, np.int64) if drafts is None else drafts,
                tables=self._tables,
                slots=self._slots,
            )
        )

    def after_commit(self, num_sampled: torch.Tensor, num_rejected: torch.Tensor) -> None:
        """Tell what was kept."""
        step, self._output = self.shadow.step, None
        if step is None:
            return
        self._count_sampled(step.requests, num_sampled.numpy()[: len(step.requests)])
        durable = self.shadow.end_step(step.scheduled - num_rejected.numpy()[: len(step.requests)])
        if self._bytes is not None:
            self._bytes.check(self.shadow, durable)


class _Watched:
    """The launches of an overlay; says what is copied before it is."""

    def __init__(self, overlay: Any, audit: RunnerAuditV2) -> None:  # noqa: ANN401 - DeviceOverlay
        self._overlay, self._launches, self._audit = overlay, overlay.launches, audit

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._launches, name)

    def fill(self, requests: int, newcomers: int) -> None:
        """Say which rows are filled in."""
        fields = [at.FIRST_HOME, at.STAND_IN, at.SHOWN, at.NEED]
        pages = self._overlay.state.pages[:requests].numpy()[:, :, fields]
        for group, part in enumerate(self._overlay.groups):
            for home, stand_in, shown, need in pages[:, group]:
                rows = np.arange(shown, max(shown, need))
                self._audit.on_move(home * part.page_size + rows, stand_in * part.page_size + rows)
        self._launches.fill(requests, newcomers)

    def move(self, rows: int) -> None:
        """Say which rows go home."""
        staged = self._overlay.state.staged[:, :rows].numpy()
        target = self._overlay.state.masked[:, :rows].numpy()
        self._audit.on_move(staged[target >= 0], target[target >= 0])
        self._launches.move(rows)


def _after_call(called: Any, tell: Callable[[], None]) -> None:  # noqa: ANN401 - RejectionSampler
    """Let one callable object tell when it has been called; its class stays stock."""
    stock = type(called)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        output = stock.__call__(self, *args, **kwargs)
        tell()
        return output

    called.__class__ = type(stock.__name__, (stock,), {"__call__": call})


def attach(runner: Any, level: AuditLevel, first_staging: int) -> None:  # noqa: ANN401 - GPUModelRunner
    """Audit a V2 runner, staged or not; called once its cache tensors exist."""
    attach_audit(runner, lambda: RunnerAuditV2(runner, device_groups(runner), first_staging, level))
