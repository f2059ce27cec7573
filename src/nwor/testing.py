"""Factories, oracles and faults for tests of nwor, of engines built on it, and of its rivals."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import FrozenInstanceError, dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from nwor import reference
from nwor.cache import TransactionalCache
from nwor.errors import InputError
from nwor.layout import KVRows, Layout
from nwor.store.overlay import Overlay

CANARY = 0x5A
"""Byte that durable stores are filled with: a row nobody wrote is made of it."""


def make_store(
    layout: Layout,
    *,
    layers: int = 2,
    pages: int = 4,
    page_size: int = 4,
    heads: int = 2,
    dim: int = 8,
    dtype: torch.dtype = torch.float32,
) -> KVRows:
    """Allocate canary-filled rows in a layout, all layers in one block as engines have them."""
    shapes = {
        Layout.SLOTS: (2, layers, pages * page_size, heads, dim),
        Layout.NHD: (2, layers, pages, page_size, heads, dim),
        Layout.HND: (2, layers, pages, heads, page_size, dim),
        Layout.DENSE: (2, layers, pages, heads, page_size, dim),
        Layout.INTERLEAVED: (layers, pages, 2, page_size, heads, dim),
        Layout.VLLM_CPU: (layers, pages, heads, page_size, 2 * dim),
        Layout.FUSED: (layers, pages, heads, page_size, 2 * dim),
    }
    size = torch.Size(shapes[layout]).numel() * dtype.itemsize
    block = torch.full((size,), CANARY, dtype=torch.uint8).view(dtype).view(shapes[layout])
    if layout in {Layout.INTERLEAVED, Layout.VLLM_CPU, Layout.FUSED}:
        return KVRows.of(layout, list(block))
    return KVRows.of(layout, list(zip(block[0], block[1], strict=True)))


def random_rows(rows: int, heads: int, dim: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Return ``[rows, heads, dim]`` of random bits; NaN patterns of the dtype are among them."""
    generator = torch.Generator(device="cpu").manual_seed(seed)  # the same bits on every device
    size = rows * heads * dim * dtype.itemsize
    bits = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator, device="cpu")
    return bits.view(dtype).view(rows, heads, dim)


def bits(view: Tensor) -> Tensor:
    """Return a copy of a view's bytes, flat: NaN equals itself there."""
    return view.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors are equal bit for bit."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


@dataclass(slots=True)
class Snapshot:
    """A store's bytes at one time."""

    key: Tensor
    value: Tensor

    @classmethod
    def of(cls, store: KVRows) -> Snapshot:
        """Copy all rows."""
        return cls(store.key.clone(), store.value.clone())

    def equals(self, store: KVRows) -> bool:
        """Tell whether the store is what it was, bit for bit."""
        return same_bits(self.key, store.key) and same_bits(self.value, store.value)

    def put(self, layer: int, slot: int, key: Tensor, value: Tensor) -> None:
        """Write one row by plain indexing: what the store is expected to hold."""
        page, row = divmod(slot, self.key.shape[2])
        self.key[layer, page, row] = key
        self.value[layer, page, row] = value


class FailingWriter:
    """A writer of slots caches ``[slots, heads, dim]`` that records its calls and fails on demand.

    Args:
        fail: raise on every call.
        rows_first: rows it still writes before it raises.
    """

    def __init__(self, *, fail: bool = False, rows_first: int = 0) -> None:
        self.fail = fail
        self.rows_first = rows_first
        self.calls: list[tuple[Tensor, ...]] = []

    def __call__(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor | None,
        v_scale: Tensor | None,
    ) -> None:
        """Write the rows whose slot is not negative, one by one."""
        del kv_cache_dtype
        self.calls.append((key.clone(), value.clone(), slot_mapping.clone()))
        self.scales = (k_scale, v_scale)
        for row, slot in enumerate(slot_mapping.tolist()):
            if self.fail and row == self.rows_first:
                raise RuntimeError("injected writer fault")
            if slot >= 0:
                key_cache[slot] = key[row]
                value_cache[slot] = value[row]
        if self.fail:
            raise RuntimeError("injected writer fault")

    @property
    def slots(self) -> list[list[int]]:
        """Slots of each call."""
        return [slots.tolist() for _, _, slots in self.calls]


Place = tuple[object, str]
"""An owner and the name of one of its attributes, a callable: what `fail_at` makes fail."""

Doing = Callable[..., object]
"""``doing(original, *args, **kwargs)``: what a call still gets done before it raises."""


class InjectedFaultError(RuntimeError):
    """What `fail_at` raises unless told otherwise."""


class Fault:
    """One injected fault; made by `fail_at`.

    Attributes:
        calls: calls of its places so far, all together.
        raised: how many of them it made fail.
    """

    def __init__(
        self,
        at: Collection[int] | None,
        error: BaseException | type[BaseException],
        doing: Doing | None,
    ) -> None:
        self.calls = 0
        self.raised = 0
        self._at, self._error, self._doing = at, error, doing

    def around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return `original` with this fault in it."""

        @wraps(original)
        def faulty(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever it takes and gives
            self.calls += 1
            if self._at is not None and self.calls not in self._at:
                return original(*args, **kwargs)
            if self._doing is not None:
                self._doing(original, *args, **kwargs)
            self.raised += 1
            raise self._error

        return faulty


@contextmanager
def fail_at(
    *places: Place,
    call: int | Collection[int] | None = 1,
    error: BaseException | type[BaseException] = InjectedFaultError,
    doing: Doing | None = None,
) -> Iterator[Fault]:
    """Make the n-th call of a function fail, as long as the ``with`` block lasts.

    A row mover that is interrupted half way through its second movement, and a sampler that runs out
    of memory::

        with fail_at(*movers(cache), call=2, error=KeyboardInterrupt, doing=first_rows()):
            ...
        with fail_at((nwor.engine.core, "verify"), error=MemoryError):
            ...

    Args:
        *places: owner and attribute of what shall fail: an object, a class or a module, and the name
            of a method or function in it. Several places share one count of calls.
        call: number of the call that fails, from 1; several numbers; None for every call.
        error: what is raised. `KeyboardInterrupt` stands for a user's Ctrl-C.
        doing: what still gets done before that: nothing (None), a part (`first_rows`), all
            (`everything`), or ``doing(original, *args, **kwargs)`` of your own.

    Raises:
        InputError: no place, or a call below 1.
        AttributeError: a place that does not exist.
    """
    at = {call} if isinstance(call, int) else call
    if not places or (at is not None and min(at, default=1) < 1):
        raise InputError(f"fail_at needs a place, and calls from 1 on; got {places}, call={call}")
    fault = Fault(at, error, doing)
    with ExitStack() as stack:
        for owner, name in places:
            stack.enter_context(_replaced(owner, name, fault.around(getattr(owner, name))))
        yield fault


def first_rows(count: int | None = None) -> Doing:
    """Let a row mover move its first `count` rows, or half of them, before it raises."""

    def some(move: Callable[..., object], source: Tensor, target: Tensor) -> None:
        end = len(source) // 2 if count is None else count
        move(source[:end], target[:end])

    return some


def everything(original: Callable[..., object], *args: object, **kwargs: object) -> None:
    """Let a call do all of its work before it raises."""
    original(*args, **kwargs)


def movers(store: TransactionalCache | Overlay, *, plain: bool = False) -> list[Place]:
    """Return the row movers of a store, as places to fail at.

    Args:
        store: what moves rows at its commits.
        plain: the movers that finish what a mover failed at, instead.
    """
    if isinstance(store, Overlay):
        return [(storage, "repair" if plain else "move") for storage in store.effects.storages]
    if plain:
        return [(reference, "move_rows")]
    return [(group, "move") for group in store._groups.values()]  # noqa: SLF001


@contextmanager
def _replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Replace an attribute, also of an owner that is frozen, has slots, or inherits it."""
    held = getattr(owner, "__dict__", None)
    inherited = held is not None and name not in held
    before = getattr(owner, name) if held is None or inherited else held[name]
    _assign(owner, name, value)
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            _assign(owner, name, before)


def _assign(owner: object, name: str, value: object) -> None:
    try:
        setattr(owner, name, value)
    except FrozenInstanceError:
        object.__setattr__(owner, name, value)


_SYNCS = (
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::is_nonzero",
    "aten::equal",
    "aten::unique",
    "aten::_unique2",
)


class ForbidSync(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fails on ops that would make a device wait for the host, on any device.

    Reading a value (`.item()`, `.tolist()`, `if tensor:`) and shapes that depend on data are such
    ops; on a CPU they cost nothing, which is why a test must look for them.
    """

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Refuse syncs, run everything else."""
        del types
        name = str(func.name()).split(".")[0]  # type: ignore[no-untyped-call]
        if name in _SYNCS:
            raise AssertionError(f"{name} would sync with the device")
        return func(*args, **(kwargs or {}))
