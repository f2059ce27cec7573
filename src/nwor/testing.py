"""Factories and oracles for tests of nwor, of engines built on it, and of its rivals."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from nwor.layout import KVRows, Layout

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
    }
    size = torch.Size(shapes[layout]).numel() * dtype.itemsize
    block = torch.full((size,), CANARY, dtype=torch.uint8).view(dtype).view(shapes[layout])
    if layout in {Layout.INTERLEAVED, Layout.VLLM_CPU}:
        return KVRows.of(layout, list(block))
    return KVRows.of(layout, list(zip(block[0], block[1], strict=True)))


def random_rows(rows: int, heads: int, dim: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Return ``[rows, heads, dim]`` of random bits; NaN patterns of the dtype are among them."""
    generator = torch.Generator().manual_seed(seed)
    size = rows * heads * dim * dtype.itemsize
    bits = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
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
