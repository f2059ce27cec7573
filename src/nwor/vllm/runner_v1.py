"""Windows of vLLM's V1 model runner.

One step, stock on the left, nwor on the right:

    execute_model   _update_states
                    _prepare_inputs  ------------->  begin: fill in, edit tables
                    _build_attention_metadata
                    forward
    sample_tokens   _sample          ------------->  commit: accepted rows home, undo edits
                    propose drafts (sees durable tables)
                    ModelRunnerOutput ------------>  counters attached

The block tables and slot mappings are vLLM's persistent buffers: everything that attention metadata
refers to is a view of them. Whatever raises in between, the edits are undone before the error goes
on; it is vLLM's own error that the user sees.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import torch

from nwor.metrics import FallbackReason
from nwor.store.overlay import Overlay
from nwor.store.overlay_window import OverlayWindow
from nwor.store.paged import VerifyBatch
from nwor.vllm import seams, windows
from nwor.vllm.geometry import cache_groups, probe_groups
from nwor.vllm.reservation import Reservation
from nwor.vllm.windows import Hook, RunnerWindows

REJECTED = -1
"""vLLM's placeholder after the last token of a request."""


def attach(runner: Any, reservation: Reservation) -> None:  # noqa: ANN401 - vLLM's GPUModelRunner
    """Build the overlay of a runner and hook its steps; called once its cache tensors exist.

    Raises:
        GeometryError: only with ``NWOR_STRICT=1``; otherwise vLLM writes through and says why.
    """
    windows.attach(runner, reservation, build_overlay, WindowsV1)


def build_overlay(runner: Any, reservation: Reservation) -> Overlay:  # noqa: ANN401
    """Find the rows of all groups, probe them, and lay staging pages over them.

    Raises:
        GeometryError: rows are not where they should be.
    """
    groups = cache_groups(runner)
    settings = reservation.settings
    first_page = runner.kv_cache_config.num_blocks - reservation.num_pages
    with torch.inference_mode():
        probe_groups(runner, groups, first_page)
        overlay = Overlay(
            [group.overlay for group in groups],
            first_page=first_page,
            num_leases=reservation.num_leases,
            mover=settings.mover,
            loops="numba" if settings.mover == "numba" else "python",
        )
        overlay.rehearse()
    return overlay


class WindowsV1(RunnerWindows[Overlay, OverlayWindow]):
    """The windows of a V1 runner."""

    def hooks(self) -> tuple[tuple[seams.Seam, Hook], ...]:
        """Say what is wrapped, and with what."""
        return (
            (seams.EXECUTE, self.execute_hook),
            (seams.PREPARE, self._prepare),
            (seams.SAMPLE, self._sample),
            (seams.SAMPLE_TOKENS, self.sample_tokens_hook),
        )

    def _prepare(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _prepare_inputs(
            scheduler_output: Any,  # noqa: ANN401
            num_scheduled_tokens: Any,  # noqa: ANN401
            *args: Any,  # noqa: ANN401
            **kwargs: Any,  # noqa: ANN401
        ) -> Any:  # noqa: ANN401
            prepared = original(scheduler_output, num_scheduled_tokens, *args, **kwargs)
            if scheduler_output.scheduled_spec_decode_tokens:
                self.begin(
                    scheduler_output.scheduled_spec_decode_tokens,
                    num_scheduled_tokens,
                    self._newcomers(scheduler_output),
                )
            return prepared

        return _prepare_inputs

    def _sample(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _sample(
            logits: Any,  # noqa: ANN401
            spec_decode_metadata: Any,  # noqa: ANN401
            *args: Any,  # noqa: ANN401
            **kwargs: Any,  # noqa: ANN401
        ) -> Any:  # noqa: ANN401
            sampled = original(logits, spec_decode_metadata, *args, **kwargs)
            if self._window is not None:
                self.commit(sampled.sampled_token_ids)
            return sampled

        return _sample

    # -- one window ------------------------------------------------------------------------------

    def begin(
        self,
        drafts: dict[str, list[int]],
        num_scheduled: np.ndarray[Any, Any],
        newcomers: np.ndarray[Any, Any] | None = None,
    ) -> None:
        """Begin the windows of a step.

        Args:
            drafts: draft tokens by request.
            num_scheduled: query tokens of each batch row.
            newcomers: batch rows of requests that begin on a cached prefix.
        """
        started = perf_counter()
        batch = self._batch(drafts, num_scheduled)
        if batch is None:
            return
        self.open(int(batch.num_drafts.sum()), lambda overlay: overlay.begin(batch, newcomers))
        self.begin_seconds += perf_counter() - started

    def commit(self, sampled: torch.Tensor) -> None:
        """Commit the open window.

        Args:
            sampled: vLLM's ``[batch rows, columns]``, -1 after each request's last token.
        """
        started = perf_counter()
        window = self._window
        assert window is not None  # noqa: S101 - the hook checked
        try:
            tokens = (sampled.numpy()[window.batch.table_rows] != REJECTED).sum(1)
            window.commit(tokens - 1)
        finally:
            self.close(FallbackReason.ABORTED)
        self.commit_seconds += perf_counter() - started

    def _batch(
        self, drafts: dict[str, list[int]], num_scheduled: np.ndarray[Any, Any]
    ) -> VerifyBatch | None:
        runner = self._runner
        batch = runner.input_batch
        index = batch.req_id_to_index
        # A request whose tokens will be discarded keeps all rows, drafts included: vLLM does not
        # roll it back. It is no window.
        discarded = runner.discard_request_mask.np
        verifying = [
            (index[request], request, len(tokens))
            for request, tokens in drafts.items()
            if tokens and not discarded[index[request]]
        ]
        if not verifying:
            return None
        verifying.sort()
        table_rows = np.array([row for row, _, _ in verifying], np.int64)
        return VerifyBatch(
            [request for _, request, _ in verifying],
            table_rows=table_rows,
            first_rows=runner.query_start_loc.np[table_rows].astype(np.int64),
            computed=batch.num_computed_tokens_cpu[table_rows].astype(np.int64),
            query_lens=num_scheduled[table_rows].astype(np.int64),
            num_drafts=np.array([count for _, _, count in verifying], np.int64),
        )

    def _newcomers(self, scheduler_output: Any) -> np.ndarray[Any, Any] | None:  # noqa: ANN401
        """Batch rows of requests whose first pages are somebody else's.

        vLLM publishes a page when it schedules the row that fills it, so such a page may be filled
        in this very step, and by a bonus token that is staged.
        """
        resumed = scheduler_output.scheduled_cached_reqs.resumed_req_ids
        new = scheduler_output.scheduled_new_reqs
        if not new and not resumed:
            return None
        names = [request.req_id for request in new if request.num_computed_tokens]
        index = self._runner.input_batch.req_id_to_index
        return np.array([index[name] for name in (*names, *resumed)], np.int64)
