"""Windows of vLLM's V2 model runner: everything between begin and commit stays on the device.

One step, stock on the left, nwor on the right:

    execute_model   finish_requests, add_requests      (who is gone gives its pages back before)
                    prepare_inputs
                    prepare_attn     ------------->  begin: edit the gathered tables, fill in
                    attention metadata (views)
                    forward, or a captured graph
    sample_tokens   sample           ------------->  commit: accepted rows home, undo edits
                    AsyncOutput starts its copies
                    postprocess_sampled
                    speculator.propose (sees durable tables)
                    AsyncOutput      ------------->  counters attached, as far as they have arrived

`prepare_attn` runs for real batches only; dummy runs and graph captures take another way. Tables are
gathered anew in every step, but only as many columns as a request has pages, and drafters read both
the tables and the slot mappings: both are restored. How many drafts a request verifies is known on
the host; where its window starts and how many drafts are rejected, the device alone knows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import torch

from nwor.errors import InputError, LayoutError
from nwor.metrics import FallbackReason
from nwor.store.device_batch import DeviceBatch
from nwor.store.device_overlay import DeviceOverlay
from nwor.store.device_window import DeviceWindow
from nwor.vllm import seams, windows
from nwor.vllm.eligibility import EngineRefusal, Refusal
from nwor.vllm.geometry import GeometryError, device_groups, probe_groups
from nwor.vllm.reservation import Reservation
from nwor.vllm.windows import Hook, RunnerWindows

UNKNOWN_PARTS = (
    "pcp_manager",
    "batch_sharder",
    "adaptive_verification",
    "ubatch_runner",
    "pp_handler",
    "fast_prefill",
    "pooling_runner",
)
"""Parts of a runner, None in those that nwor knows: each has tables, rows or counts of its own."""


def attach(runner: Any, reservation: Reservation) -> None:  # noqa: ANN401 - vLLM's GPUModelRunner
    """Build the overlay of a runner and hook its steps; called once its cache tensors exist.

    Raises:
        GeometryError: only with ``NWOR_STRICT=1``; otherwise vLLM writes through and says why.
    """
    windows.attach(runner, reservation, build_overlay, WindowsV2)


def build_overlay(runner: Any, reservation: Reservation) -> DeviceOverlay:  # noqa: ANN401
    """Find the rows of all groups, probe them, and lay staging pages over them.

    Raises:
        GeometryError: a part that nwor does not know, or rows that are not where they should be.
    """
    _check_parts(runner)
    groups = device_groups(runner)
    first_page = runner.kv_cache_config.num_blocks - reservation.num_pages
    with torch.inference_mode():
        probe_groups(runner, groups, first_page)
    with torch.inference_mode(mode=False):  # counters are also asked for between steps
        try:
            overlay = DeviceOverlay(
                [group.overlay for group in groups],
                first_page=first_page,
                num_leases=reservation.num_leases,
                max_requests=runner.max_num_reqs,
                max_tokens=runner.max_num_tokens,
                max_drafts=runner.num_speculative_steps,
            )
        except (InputError, LayoutError) as error:
            raise GeometryError(
                Refusal(EngineRefusal.LAYOUT, str(error), "`nwor doctor` shows the details")
            ) from error
        overlay.rehearse()
    return overlay


def _check_parts(runner: Any) -> None:  # noqa: ANN401
    found = [name for name in UNKNOWN_PARTS if getattr(runner, name) is not None]
    if runner.model_state.num_new_sampled_tokens_per_step != 1:
        found.append("model_state that samples several tokens per step")
    if found:
        raise GeometryError(
            Refusal(EngineRefusal.RUNNER, f"a V2 runner with {', '.join(found)}", "none")
        )


class WindowsV2(RunnerWindows[DeviceOverlay, DeviceWindow]):
    """The windows of a V2 runner."""

    def __init__(
        self,
        runner: Any,  # noqa: ANN401 - vLLM's GPUModelRunner
        reservation: Reservation,
        overlay: DeviceOverlay | None,
    ) -> None:
        super().__init__(runner, reservation, overlay)
        self._newcomers: frozenset[str] = frozenset()

    def hooks(self) -> tuple[tuple[seams.Seam, Hook], ...]:
        """Say what is wrapped, and with what."""
        return (
            (seams.EXECUTE_V2, self.execute_hook),
            (seams.PREPARE_V2, self._prepare),
            (seams.SAMPLE_V2, self._sample),
            (seams.SAMPLE_TOKENS_V2, self.sample_tokens_hook),
        )

    def _prepare(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def prepare_attn(input_batch: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            prepared = original(input_batch, *args, **kwargs)
            if input_batch.num_draft_tokens:
                self.begin(input_batch)
            return prepared

        return prepare_attn

    def _sample(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def sample(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            sampled = original(*args, **kwargs)
            if self._window is not None:
                self.commit(sampled[2])
            return sampled

        return sample

    # -- one window ------------------------------------------------------------------------------

    def step_begins(self, scheduler_output: Any) -> None:  # noqa: ANN401
        """Release who is gone; remember whose first pages are somebody else's.

        Resumed requests come as new ones here.
        """
        super().step_begins(scheduler_output)
        self._newcomers = frozenset(
            new.req_id for new in scheduler_output.scheduled_new_reqs if new.num_computed_tokens
        )

    def begin(self, input_batch: Any) -> None:  # noqa: ANN401 - vLLM's InputBatch
        """Begin the windows of a step that verifies drafts."""
        started = perf_counter()
        drafts = input_batch.num_draft_tokens_per_req
        rows = np.flatnonzero(drafts)
        names = input_batch.req_ids
        newcomers = None
        if self._newcomers:
            newcomers = np.array(
                [row for row, name in enumerate(names) if name in self._newcomers], np.int64
            )
        batch = DeviceBatch(
            [names[row] for row in rows],
            table_rows=rows,
            query_lens=input_batch.num_scheduled_tokens[rows].astype(np.int64),
            num_drafts=drafts[rows].astype(np.int64),
            query_start_loc=input_batch.query_start_loc,
            positions=input_batch.positions,
            newcomers=newcomers,
        )
        self.open(input_batch.num_draft_tokens, lambda overlay: overlay.begin(batch))
        self.begin_seconds += perf_counter() - started

    def commit(self, num_rejected: torch.Tensor) -> None:
        """Commit the open window.

        Args:
            num_rejected: vLLM's int32 ``[batch rows]`` on the device.
        """
        started = perf_counter()
        window = self._window
        assert window is not None  # noqa: S101 - the hook checked
        try:
            window.commit(num_rejected)
        finally:
            self.close(FallbackReason.ABORTED)
        self.commit_seconds += perf_counter() - started

    # -- counters --------------------------------------------------------------------------------

    def collect(self) -> None:
        """Take over what the device has counted, as far as it has arrived."""
        if self.overlay is not None:
            self.overlay.collect()

    def refused(self) -> Counter[str]:
        """Count the requests that host or device could not stage, by reason."""
        refused = super().refused()
        if self.overlay is not None:
            refused.update({str(fault): n for fault, n in self.overlay.faults.items()})
        return refused
