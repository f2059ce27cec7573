"""The windows of one step on the device, from begin to commit or abort."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from nwor.errors import InputError, StaleWindowError
from nwor.metrics import FallbackReason
from nwor.store.device_batch import DeviceBatch, check_integers

if TYPE_CHECKING:
    from nwor.store.device_overlay import DeviceOverlay


class DeviceWindow:
    """The windows of one step's requests, from `DeviceOverlay.begin` to `commit` or `abort`.

    Leaving a ``with`` block without a commit aborts.

    Attributes:
        requests: the staged requests.
        batch: their numbers.
        is_open: whether `commit` and `abort` are still to come.
    """

    def __init__(self, overlay: DeviceOverlay, batch: DeviceBatch) -> None:
        self.requests = tuple(batch.requests)
        self.batch = batch
        self.is_open = True
        self._overlay = overlay

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_open:
            self.abort()

    def commit(self, num_rejected: Tensor) -> None:
        """Undo all edits and move the accepted rows home, in stream order; no value is read.

        Args:
            num_rejected: int32 ``[batch rows]`` or more, on the device: rejected drafts of each
                batch row. Kept are a request's rows less these.

        Raises:
            StaleWindowError: the window is closed.
            InputError: another dtype or device, or too short. Nothing was launched and the window
                is still open.
            CommitError: a kernel could not be launched.
        """
        self._require_open()
        check_integers("num_rejected", num_rejected, torch.int32, self._overlay.device)
        last = int(self.batch.table_rows.max(initial=-1))
        if num_rejected.shape[0] <= last:
            raise InputError(
                f"num_rejected has {num_rejected.shape[0]} rows, batch row {last} verifies"
            )
        self.is_open = False
        if self.requests:
            self._overlay.bring_home(self.batch, num_rejected)

    def abort(self, reason: FallbackReason = FallbackReason.ABORTED) -> None:
        """Undo all edits; no row reaches a durable page.

        Raises:
            StaleWindowError: the window is closed.
        """
        self._require_open()
        if self.requests:
            self._overlay.undo(self.batch)
            self._overlay.metrics.fallbacks[reason] += 1
        self.is_open = False

    def _require_open(self) -> None:
        if not self.is_open:
            raise StaleWindowError("this overlay window has been closed already")
