"""What a window may not do on the host: read a value, wait, allocate, launch more than it should."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nwor.store import triton_rows, triton_window
from nwor.store.device_transfer import UploadRing

EVENT = torch.cuda.Event  # vLLM on a CPU puts a placeholder there later
READS = (
    "item",
    "tolist",
    "cpu",
    "to",  # from a CPU to a CPU it is not even an op
    "numpy",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__array__",
)
READING = {
    "item": lambda tensor: tensor.item(),
    "tolist": lambda tensor: tensor.tolist(),
    "cpu": lambda tensor: tensor.cpu(),
    "to": lambda tensor: tensor.to("cpu"),
    "numpy": lambda tensor: tensor.numpy(),
    "bool": bool,
    "int": int,
    "synchronize": lambda tensor: torch.cuda.synchronize(),
    "event": lambda tensor: EVENT.synchronize(None),
    "blocking copy": lambda tensor: tensor.clone().copy_(tensor),
}
"""What a careless line would do with a tensor of no dims; each makes the host wait on a GPU."""
WAITS = (
    (torch.cuda, "synchronize"),
    (EVENT, "synchronize"),
    (torch.cuda.Stream, "synchronize"),
)
COPY = "aten.copy_.default"
KERNELS = (
    (triton_window, "begin_kernel"),
    (triton_window, "fill_kernel"),
    (triton_window, "close_kernel"),
    (triton_rows, "move_rows_kernel"),
)


class HostWaits(BaseException):
    """Not an Exception: a repair of failed launches must not swallow it."""


class HostWork(TorchDispatchMode):
    """Everything that the host does between launches, while it is switched on.

    Launches are made, and recorded with their grids. What happens inside one is not looked at:
    Triton's interpreter reads whatever it likes.

    Attributes:
        launches: name and grid of every launch.
        ops: torch ops outside of launches; each of them may allocate, and on a GPU launches a kernel
            or starts a copy.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[tuple[str, tuple[int, ...]]] = []
        self.ops: list[str] = []
        self.inside = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self.inside:
            self.ops.append(str(func))
            if str(func) == COPY and not (args[2:] or (kwargs or {})):
                raise HostWaits("a blocking copy")
        return func(*args, **(kwargs or {}))

    def launch(self, name: str, kernel: Any) -> Any:
        work = self

        class Launcher:
            def __getitem__(self, grid):
                def run(*args, **constants):
                    work.launches.append((name, grid))
                    work.inside = True
                    try:
                        return kernel[grid](*args, **constants)
                    finally:
                        work.inside = False

                return run

        return Launcher()

    def forbid(self, name: str, original: Callable[..., object]) -> Callable[..., object]:
        def refuse(*args, **kwargs):
            if self.inside:
                return original(*args, **kwargs)
            raise HostWaits(name)

        return refuse


@contextmanager
def host_work() -> Iterator[HostWork]:
    """Record launches and ops; reading a value or waiting for the device is an error."""
    work = HostWork()
    with pytest.MonkeyPatch.context() as patch:
        for module, name in KERNELS:
            patch.setattr(module, name, work.launch(name, getattr(module, name)))
        for owner, name in (*((torch.Tensor, read) for read in READS), *WAITS):
            patch.setattr(owner, name, work.forbid(name, getattr(owner, name)))
        with work:
            yield work


class LateDevice:
    """A device that runs behind the host: launches and uploads wait in a queue.

    An upload reads its host buffer when its turn comes, as a copy from pinned memory does.
    """

    def __init__(self) -> None:
        self.queue: deque[Callable[[], object]] = deque()

    def do(self, work: Callable[..., object], *args: object) -> None:
        """Put work in the queue."""
        self.queue.append(lambda: work(*args))

    def catch_up(self, left: int = 0) -> None:
        """Run what is in the queue, but for the last `left`."""
        while len(self.queue) > left:
            self.queue.popleft()()

    def launcher(self, kernel: Any) -> Any:
        late = self

        class Launcher:
            def __getitem__(self, grid):
                return lambda *args, **constants: late.queue.append(
                    lambda: kernel[grid](*args, **constants)
                )

        return Launcher()

    def send(self, ring: UploadRing) -> None:
        self.do(ring._target.copy_, ring._sources[ring._next])
        ring._next = (ring._next + 1) % len(ring._sources)


@contextmanager
def late_device() -> Iterator[LateDevice]:
    """Let launches and uploads wait until the test lets the device catch up."""
    late = LateDevice()
    with pytest.MonkeyPatch.context() as patch:
        for module, name in KERNELS:
            patch.setattr(module, name, late.launcher(getattr(module, name)))
        patch.setattr(UploadRing, "send", lambda ring: late.send(ring))  # noqa: PLW0108 - it binds
        yield late
