"""The two ways between host and device: one small upload per window, counters whenever they arrive."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

RING = 4
"""Uploads that may be under way. Engines schedule one or two steps ahead."""


class UploadRing:
    """Host buffers in turn, so that none is rewritten while it may still be read.

    Args:
        target: the buffer on the device.

    Attributes:
        waits: how often the host had to wait for a buffer, which takes more than `RING` steps under
            way at a time.
    """

    def __init__(self, target: Tensor) -> None:
        self._target = target
        self._cuda = target.device.type == "cuda"
        self._sources = [
            torch.zeros(target.shape, dtype=target.dtype, pin_memory=self._cuda)
            for _ in range(RING)
        ]
        self._arrays = [source.numpy() for source in self._sources]
        self._read: list[Any] = _events(RING) if self._cuda else []
        self._next = 0
        self.waits = 0

    def open(self) -> NDArray[np.int32]:
        """Return the next host buffer, to be written and sent by `send`."""
        if self._cuda and not self._read[self._next].query():
            self.waits += 1
            self._read[self._next].synchronize()
        return self._arrays[self._next]

    def send(self) -> None:
        """Copy the buffer that `open` returned to the device, in stream order."""
        self._target.copy_(self._sources[self._next], non_blocking=True)
        if self._cuda:
            self._read[self._next].record()
        self._next = (self._next + 1) % RING


class Readback:
    """The newest copy of a device buffer that has arrived on the host.

    Args:
        source: the buffer on the device.
    """

    def __init__(self, source: Tensor) -> None:
        self._source = source
        self._cuda = source.device.type == "cuda"
        self._copy = torch.zeros(source.shape, dtype=source.dtype, pin_memory=self._cuda)
        self._array = self._copy.numpy()
        self._arrived: Any = _events(1)[0] if self._cuda else None
        self._asked = False

    def ask(self) -> None:
        """Start a copy, unless one is under way."""
        if not self._asked:
            self._copy.copy_(self._source, non_blocking=True)
            if self._arrived is not None:
                self._arrived.record()
            self._asked = True

    def take(self, *, wait: bool = False) -> NDArray[np.int64] | None:
        """Return what was asked for once it is there, else None; with `wait` it is."""
        if not self._asked:
            return None
        if self._arrived is not None and not self._arrived.query():
            if not wait:
                return None
            self._arrived.synchronize()
        self._asked = False
        return self._array


def _events(number: int) -> list[Any]:
    return [torch.cuda.Event() for _ in range(number)]  # type: ignore[no-untyped-call]
