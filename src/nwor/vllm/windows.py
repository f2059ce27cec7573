"""The windows of a runner, step after step: what the V1 and the V2 runner have in common.

A runner's own module says where in a step windows begin and end; here is what holds wherever that
is. Hooks sit on the runner's instance and go with the mode. Whatever raises between begin and
commit, the edits are undone before the error goes on; it is vLLM's own error that the user sees. A
request that finished, was preempted or starts anew holds no staging pages. Counters ride on the
step's output, also on that of a step without tokens, which tells who is gone.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Generic, Protocol, TypeVar

from nwor.errors import CommitError, NworError, StageError
from nwor.manager import Mode
from nwor.metrics import FallbackReason, Metrics, Written
from nwor.store.staging import StagingPages
from nwor.vllm import seams
from nwor.vllm.audit import audit_of
from nwor.vllm.geometry import GeometryError
from nwor.vllm.reservation import Reservation
from nwor.vllm.stats import Increments, attach_sample, merged, with_sample

logger = logging.getLogger("vllm.nwor")

WINDOWS_ATTRIBUTE = "nwor"
"""Name under which a runner carries its `RunnerWindows`."""

Hook = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Takes vLLM's method, returns it with ours around it."""


class StepOverlay(Protocol):
    """What is asked of an overlay, whatever it runs on."""

    @property
    def pages(self) -> StagingPages:
        """Who holds which staging page."""

    @property
    def metrics(self) -> Metrics:
        """Counters of all windows."""

    @property
    def refused(self) -> Mapping[Any, int]:
        """Requests written through, by reason."""

    def release(self, request: Hashable) -> None:
        """Take a request's pages back."""


class StepWindow(Protocol):
    """What is asked of a window, whatever it runs on."""

    @property
    def is_open(self) -> bool:
        """Whether commit and abort are still to come."""

    def abort(self, reason: FallbackReason) -> None:
        """Undo all edits."""


OverlayT = TypeVar("OverlayT", bound=StepOverlay)
WindowT = TypeVar("WindowT", bound=StepWindow)


class RunnerWindows(ABC, Generic[OverlayT, WindowT]):
    """The windows of one runner.

    Attributes:
        metrics: counters of all windows.
        fallbacks: what was not staged, by reason.
        overlay: None if the runner's rows could not be found.
        mode: `Mode.STAGE`, `Mode.IMMEDIATE`, or `Mode.OFF` with no hook in place.
        begin_seconds: host time spent beginning windows.
        commit_seconds: host time spent committing them.
    """

    def __init__(self, runner: Any, reservation: Reservation, overlay: OverlayT | None) -> None:  # noqa: ANN401
        self.overlay = overlay
        self.metrics = overlay.metrics if overlay is not None else Metrics()
        self.fallbacks: Counter[str] = Counter()
        self.mode = Mode.OFF
        self.begin_seconds = 0.0
        self.commit_seconds = 0.0
        self._runner = runner
        self._strict = reservation.settings.strict
        self._window: WindowT | None = None
        self._increments = Increments()

    @abstractmethod
    def hooks(self) -> tuple[tuple[seams.Seam, Hook], ...]:
        """Say what is wrapped, and with what."""

    def set_mode(self, mode: Mode) -> None:
        """Switch between steps: hooks come with any mode but `Mode.OFF`, and go with it."""
        self.close(FallbackReason.UNFINISHED)
        if self.overlay is not None:
            for request in self.overlay.pages.requests:
                self.overlay.release(request)
        hooks = self.hooks()
        for seam, _ in hooks:
            seams.unwrap_method(self._runner, seam)
        self.mode = mode
        if mode is not Mode.OFF:
            for seam, hook in hooks:
                seams.wrap_method(self._runner, seam, hook)

    # -- hooks that any runner needs -------------------------------------------------------------

    def execute_hook(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Close what the last step left open, release who is gone; undo if the forward raises.

        A step without tokens is never sampled: its output is this one, and takes the counters along.
        """

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            self.close(FallbackReason.UNFINISHED)
            self.step_begins(scheduler_output)
            try:
                output = original(scheduler_output, *args, **kwargs)
            except BaseException:
                self.close(FallbackReason.ABORTED)
                raise
            if output is None or scheduler_output.total_num_scheduled_tokens:
                return output
            sample = self._take_counted()
            return output if sample is None else with_sample(output, sample)

        return execute_model

    def sample_tokens_hook(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Undo if sampling raises; attach the counters to the output."""

        def sample_tokens(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            try:
                output = original(*args, **kwargs)
            finally:
                self.close(FallbackReason.ABORTED)
            sample = self._take_counted()
            if sample is not None and output is not None:
                attach_sample(getattr(output, "model_runner_output", output), sample)
            return output

        return sample_tokens

    # -- one window ------------------------------------------------------------------------------

    def step_begins(self, scheduler_output: Any) -> None:  # noqa: ANN401 - SchedulerOutput
        """Release the pages of requests that are gone or start anew."""
        overlay = self.overlay
        if overlay is None:
            return
        for gone in (
            scheduler_output.finished_req_ids,
            scheduler_output.preempted_req_ids or (),
            scheduler_output.scheduled_cached_reqs.resumed_req_ids,
            [request.req_id for request in scheduler_output.scheduled_new_reqs],
        ):
            for request in gone:
                overlay.release(request)

    def open(self, num_drafts: int, begin: Callable[[OverlayT], WindowT]) -> None:
        """Open the windows of a step that verifies drafts, or count that they are written through.

        Args:
            num_drafts: drafts of all requests.
            begin: begins the windows.

        Raises:
            NworError: only with ``NWOR_STRICT=1``: something could not be staged.
        """
        if self.overlay is None or self.mode is Mode.IMMEDIATE:
            self.metrics.count_written_through(num_drafts, Written())
            return
        try:
            self._window = begin(self.overlay)
        except (StageError, CommitError) as error:
            if self._strict:
                raise
            logger.error("nwor: step written through: %s", error)  # noqa: TRY400
            self.fallbacks[FallbackReason.STAGE_REFUSED] += 1
            self.metrics.flushed += num_drafts
            return
        self._check_refused()

    def close(self, reason: FallbackReason) -> None:
        """Abort a window that nobody committed; without one, nothing happens."""
        window = self._window
        if window is not None and window.is_open:
            window.abort(reason)
        self._window = None

    def refused(self) -> Counter[str]:
        """Count the requests that the overlay could not stage, by reason."""
        overlay = self.overlay
        if overlay is None:
            return Counter()
        return Counter({str(reason): n for reason, n in overlay.refused.items()})

    def _check_refused(self) -> None:
        if self._strict and (reasons := self.refused()):
            self.close(FallbackReason.ABORTED)
            raise NworError(f"NWOR_STRICT=1 and requests could not be staged: {dict(reasons)}")

    # -- counters --------------------------------------------------------------------------------

    def _take_counted(self) -> dict[str, Any] | None:
        return merged(self._take_sample(), self._take_audit())

    def _take_audit(self) -> dict[str, Any] | None:
        audit = audit_of(self._runner)
        return audit.take_sample() if audit is not None else None

    def collect(self) -> None:
        """Take over what was counted elsewhere."""

    def _take_sample(self) -> dict[str, Any] | None:
        self.collect()
        overlay = self.overlay
        return self._increments.since(
            {
                **self.metrics.totals(),
                "begin_seconds": self.begin_seconds,
                "commit_seconds": self.commit_seconds,
            },
            self._all_fallbacks(),
            staging_pages_in_use=overlay.pages.pages_in_use if overlay is not None else 0,
            staging_pages=overlay.pages.num_pages if overlay is not None else 0,
        )

    def _all_fallbacks(self) -> dict[str, int]:
        """Count what was not staged as it should be, by reason; a new dictionary each time."""
        found = dict(self.fallbacks)
        for more in (self.metrics.fallbacks, self.refused()):
            for reason, count in more.items():
                found[str(reason)] = found.get(str(reason), 0) + count
        return found


def attach(
    runner: Any,  # noqa: ANN401 - vLLM's GPUModelRunner
    reservation: Reservation,
    build: Callable[[Any, Reservation], OverlayT],
    windows: Callable[[Any, Reservation, OverlayT | None], RunnerWindows[OverlayT, Any]],
) -> None:
    """Build the overlay of a runner and hook its steps; called once its cache tensors exist.

    Raises:
        GeometryError: only with ``NWOR_STRICT=1``; otherwise vLLM writes through and says why.
    """
    try:
        attached = windows(runner, reservation, build(runner, reservation))
    except GeometryError as error:
        if reservation.settings.strict:
            raise
        logger.error("nwor: rows are written through on this worker: %s", error)  # noqa: TRY400
        attached = windows(runner, reservation, None)
        attached.fallbacks[error.refusal.reason] += 1
    setattr(runner, WINDOWS_ATTRIBUTE, attached)
    attached.set_mode(reservation.settings.mode)
