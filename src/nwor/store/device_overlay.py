"""The overlay on a device: a window's whole bookkeeping runs there, in four launches.

What `nwor.store.overlay` does with tables on the host, for an engine whose tables, positions and
acceptance exist on the device only when they are needed. The host decides who is staged; all else is
worked out by kernels with shapes that do not depend on what was accepted:

    DeviceOverlay.begin      who is staged, on which lease       nwor.store.admission
      upload                 one small copy, not waited for      nwor.store.device_transfer
      begin_kernel           check, edit tables, note            nwor.store.triton_window_kernels
      fill_kernel            copy rows that staging pages lack
    DeviceWindow.commit
      close_kernel           undo the edits, plan, count
      move_rows_kernel       accepted rows of all layers         nwor.store.triton_kernel
    DeviceWindow.abort
      close_kernel           undo the edits, count
    DeviceOverlay.collect    counters, when they arrive          nwor.store.device_counters

Everything happens in the order of the device's current stream. Between begin and commit the engine
may run whatever it likes, captured graphs included, as long as the tables stay where they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np
import torch
from torch import Tensor

from nwor.errors import CommitError, InputError, RowCountError, WindowOpenError
from nwor.metrics import FallbackReason, Metrics
from nwor.store import device_state as at
from nwor.store.admission import Admission, OverlayRefusal, check_room
from nwor.store.device_batch import DeviceBatch, DeviceGroup, Ints, check_integers
from nwor.store.device_counters import DeviceCounters, DeviceFault
from nwor.store.device_state import DeviceState
from nwor.store.device_transfer import UploadRing
from nwor.store.device_window import DeviceWindow
from nwor.store.staging import StagingPages
from nwor.store.torch_rows import bind_torch

__all__ = [
    "DeviceBatch",
    "DeviceFault",
    "DeviceGroup",
    "DeviceOverlay",
    "DeviceWindow",
    "OverlayRefusal",
]


class DeviceOverlay:
    """Staging pages over the durable pages of an engine whose tables lie on a device.

    Args:
        groups: cache groups of the engine, all layers of all of them.
        first_page: first staging page. The engine's own allocator must never hand out this page or
            a higher one.
        num_leases: requests that can be staged at a time; takes ``2 * groups * num_leases`` pages.
        max_requests: batch rows of a step.
        max_tokens: tokens of a step.
        max_drafts: drafts of a request. More work, but take more steps of a loop.
        metrics: counters to add to, by `collect`.

    Attributes:
        device: where the groups are.
        pages: who holds which staging page. What pages show is noted on the device.
        metrics: counters of all windows, as far as they were collected.
        broken: a commit failed for good: every window is written through from then on.

    Raises:
        InputError: no groups, no leases, a bound below 1, no triton, groups on several devices, or
            on one that kernels cannot reach.
        LayoutError: a store has fewer pages than the staging pages need.
    """

    def __init__(
        self,
        groups: Sequence[DeviceGroup],
        *,
        first_page: int,
        num_leases: int,
        max_requests: int,
        max_tokens: int,
        max_drafts: int,
        metrics: Metrics | None = None,
    ) -> None:
        try:
            from nwor.store.triton_window import TritonWindow  # noqa: PLC0415 - optional
        except ImportError as error:
            raise InputError(
                "an overlay on a device needs triton: pip install 'nwor[triton]'"
            ) from error
        if not groups:
            raise InputError("an overlay needs at least one cache group")
        for name, bound in (
            ("max_requests", max_requests),
            ("max_tokens", max_tokens),
            ("max_drafts", max_drafts),
        ):
            if bound < 1:
                raise InputError(f"{name} must be positive, got {bound}")
        self.groups = tuple(groups)
        self.device = _one_device(groups)
        self.pages = StagingPages(
            first_page=first_page, num_leases=num_leases, num_groups=len(groups)
        )
        check_room(groups, self.pages)
        self.metrics = metrics if metrics is not None else Metrics()
        self.broken = False
        self._admission = Admission(self.pages)
        self._max_requests, self._max_tokens = max_requests, max_tokens
        self._shortest = min(group.page_size for group in groups)
        self.state = DeviceState.allocate(
            groups, self.pages, records=2 * max_requests, rows=max_tokens
        )
        self._upload = UploadRing(self.state.window)
        self._counters = DeviceCounters(
            self.state.tallies,
            layers=sum(group.num_layers for group in groups),
            row_bytes=sum(group.row_bytes for group in groups),
        )
        self.launches = TritonWindow(groups, self.pages, self.state, max_drafts=max_drafts)
        self._window: DeviceWindow | None = None

    @property
    def window(self) -> DeviceWindow | None:
        """The open window, or None."""
        window = self._window
        return window if window is not None and window.is_open else None

    @property
    def refused(self) -> Counter[OverlayRefusal]:
        """Requests written through because the host refused them, by reason."""
        return self._admission.refused

    @property
    def faults(self) -> Counter[DeviceFault]:
        """What the device found wrong, as far as it was collected."""
        return self._counters.faults

    @property
    def rows_filled(self) -> int:
        """Durable rows copied to staging pages, summed over groups, as far as collected."""
        return self._counters.rows_filled

    def begin(self, batch: DeviceBatch) -> DeviceWindow:
        """Stage the windows of all requests that can be staged; the others are written through.

        Nothing is read back: a request whose tables turn out to be wrong is left alone by the device
        and counted in `faults`. Its window is then empty.

        Returns:
            The open window. `DeviceWindow.requests` are the staged ones, in the batch's order.

        Raises:
            WindowOpenError: a window is open; it is left as it is.
            RowCountError: more requests, rows or batch rows than the overlay was built for.
            InputError: tensors on another device.
        """
        if self.window is not None:
            raise WindowOpenError("an overlay window is open: commit or abort it first")
        self._check(batch)
        # A window of a page and one row reaches two pages wherever it starts, a longer one may not.
        fits = batch.query_lens <= self._shortest + 1
        fits &= batch.num_drafts < self._shortest
        batch, leases = self._admission.admit(batch, fits, self.metrics, broken=self.broken)
        window = self._window = DeviceWindow(self, batch)
        if batch.requests:
            try:
                self._send(batch, leases)
                self.launches.begin(len(batch.requests), batch.query_start_loc, batch.positions)
                self.launches.fill(len(batch.requests), len(batch.newcomer_rows))
            except BaseException:  # an interrupt too: half an edit must not outlive it
                window.is_open = False
                for request in batch.requests:  # their staging pages may be half filled
                    self.pages.release(request)
                self.undo(batch)
                raise
        return window

    def release(self, request: Hashable) -> None:
        """Take back the pages of a request that finished, was aborted or was preempted.

        Raises:
            WindowOpenError: the request is part of the open window: close that first.
        """
        if self.window is not None and request in self.window.requests:
            raise WindowOpenError(f"request {request!r} is part of the open window: close it first")
        self.pages.release(request)

    def collect(self, *, wait: bool = False) -> None:
        """Add what the device counted to `metrics`, as far as it has arrived on the host.

        Args:
            wait: stay until everything launched so far is counted. Not while serving.
        """
        self._counters.collect(self.metrics, wait=wait)

    def rehearse(self) -> None:
        """Compile all kernels, so that no step waits for a compiler. Touches nothing in use.

        Raises:
            WindowOpenError: a window is open.
        """
        if self.window is not None:
            raise WindowOpenError("an overlay window is open: rehearse before serving")
        self.launches.rehearse()

    # -- what windows do -------------------------------------------------------------------------

    def bring_home(self, batch: DeviceBatch, num_rejected: Tensor) -> None:
        """Undo the edits of the open window and move its accepted rows.

        Launching twice does no harm: a window is closed once on the device, whatever is launched, and
        what rows are moved from is not written in between.

        Raises:
            CommitError: rows could not be moved; nothing will be staged any more.
        """
        requests, newcomers = len(batch.requests), len(batch.newcomer_rows)
        rows = int(batch.query_lens.sum())
        try:
            self.launches.close(requests, newcomers, num_rejected)
            self.launches.move(rows)
        except BaseException as error:
            self.broken = True
            self.launches.close(requests, newcomers, num_rejected)
            if isinstance(error, Exception):
                self._repair(rows)
            else:  # an interrupt: rows must be home before it goes on
                self.launches.move(rows)
            self.broken = False
            if not isinstance(error, Exception):
                raise

    def undo(self, batch: DeviceBatch) -> None:
        """Undo the edits of the open window; no row is moved."""
        self.launches.close(len(batch.requests), len(batch.newcomer_rows), None)

    def _repair(self, rows: int) -> None:
        """Move what a launch failed at, by the plain mover, which waits for the device."""
        self.metrics.fallbacks[FallbackReason.MOVER_FAULT] += 1
        try:
            for group, source, target in zip(
                self.groups, self.state.staged[:, :rows], self.state.masked[:, :rows], strict=True
            ):
                for stored in group.rows:
                    bind_torch(stored, stored)(source[target >= 0], target[target >= 0])
        except Exception as second:
            message = f"rows could not be moved from staging to durable pages: {second}"
            raise CommitError(message, layer_id=None, restored=False) from second

    def _send(self, batch: DeviceBatch, leases: Ints) -> None:
        """Upload what the device cannot know."""
        number = len(leases)
        window = self._upload.open()
        own, others = window[:number], window[number : number + len(batch.newcomer_rows)]
        own[:, at.ROW] = batch.table_rows
        own[:, at.LEASE] = leases
        own[:, at.FIRST] = np.cumsum(batch.query_lens) - batch.query_lens
        own[:, at.LENGTH] = batch.query_lens
        own[:, at.DRAFTS] = batch.num_drafts
        own[:, at.GENERATION] = self.pages.generation[leases]
        others[:, at.ROW] = batch.newcomer_rows
        self._upload.send()

    def _check(self, batch: DeviceBatch) -> None:
        rows = [batch.table_rows, batch.newcomer_rows]
        last = max(int(part.max(initial=-1)) for part in rows)
        shortest = min(group.table.shape[0] for group in self.groups)
        limit = min(self._max_requests, shortest, batch.query_start_loc.shape[0] - 1)
        if last >= limit or max(map(len, rows)) > self._max_requests:
            raise RowCountError(
                f"batch row {last} of {sum(map(len, rows))}, there are {limit} rows"
            )
        tokens = int(batch.query_lens.sum())
        if tokens > self._max_tokens:
            raise RowCountError(
                f"{tokens} rows verify, the overlay was built for {self._max_tokens}"
            )
        check_integers("query_start_loc", batch.query_start_loc, torch.int32, self.device)
        check_integers("positions", batch.positions, torch.int64, self.device)


def _one_device(groups: Sequence[DeviceGroup]) -> torch.device:
    """Return the device of tables, slot mappings and rows.

    Raises:
        InputError: there is not exactly one.
    """
    found = {
        device
        for group in groups
        for device in (
            group.table.device,
            group.slots.device,
            *(rows.device for rows in group.rows),
        )
    }
    if len(found) != 1:
        raise InputError(f"an overlay needs groups on one device, got {sorted(map(str, found))}")
    return found.pop()
