"""Is a row where we think it is? One marked row, written by the stock writer, found by our view.

Layouts inside a block are vLLM's private matter and differ by backend, dtype and instruction set.
Before anything is staged, every layer writes marked rows into a staging page through its own writer.
All elements must turn up in our view in their places, nothing else may have changed, and a negative
slot must have been skipped.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nwor.errors import LayoutError
from nwor.layout import KVRows, Layout
from nwor.vllm import seams

Writer = Callable[[Tensor, Tensor, Tensor], None]
"""``write(key, value, slots)``: key and value ``[rows, heads, dim]``, slots int64 ``[rows]``."""

MARKS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, -0.5, -1.0, -2.0, -3.0, -4.0)
"""Exact in every float format down to fp8; 11 of them, so that no power of two repeats them."""


def probe_rows(rows: KVRows, write: Writer, page: int, *, dtype: torch.dtype, fp8: str) -> None:
    """Check one layer; its page is zero afterwards.

    Args:
        rows: the layer, ``[1, page, row, head, dim]``.
        write: the engine's writer for this layer, with scales of 1.
        page: a page that belongs to nwor.
        dtype: dtype of the K and V that the engine hands to the writer.
        fp8: the cache's fp8 format, ``e4m3`` or ``e5m2``, if its elements are bytes.

    Raises:
        LayoutError: a row is not where the view says.
    """
    size, (heads, dim) = rows.page_size, rows.key.shape[3:]
    at = torch.tensor([1, size - 1], device=rows.device)
    slots = torch.cat((at + page * size, at.new_tensor([-1])))
    key = marks(3 * heads * dim, 0).view(3, heads, dim).to(rows.device, dtype)
    value = marks(3 * heads * dim, 5).view(3, heads, dim).to(rows.device, dtype)
    last = rows.num_slots - 1
    for view in (rows.key, rows.value):
        view[0, page] = 0
    guard = [view[0, last // size, last % size].clone() for view in (rows.key, rows.value)]
    write(key, value, slots)
    for name, view, wrote, before in (
        ("K", rows.key, key, guard[0]),
        ("V", rows.value, value, guard[1]),
    ):
        found = as_float(view[0, page], fp8)
        expected = torch.zeros_like(found)
        expected[at] = wrote[:2].to(found.dtype)
        if not torch.equal(found, expected):
            wrong = (found != expected).sum().item()
            raise LayoutError(
                f"{name}: {wrong} of {found.numel()} elements of a page are not where the view says "
                f"after the engine wrote rows {at.tolist()}"
            )
        if page != last // size and not torch.equal(view[0, last // size, last % size], before):
            raise LayoutError(f"{name}: the engine's writer does not skip slot -1")
        view[0, page] = 0


def marks(number: int, shift: int) -> Tensor:
    """Return `number` marked values, float32."""
    return torch.tensor(MARKS).roll(shift).repeat(number // len(MARKS) + 1)[:number]


def as_float(view: Tensor, fp8: str) -> Tensor:
    """Read elements as float32; bytes are fp8 codes."""
    if view.dtype == torch.uint8:
        kind = torch.float8_e5m2 if fp8 == "e5m2" else torch.float8_e4m3fn
        view = view.contiguous().view(kind)
    return view.to(torch.float32)


def fp8_kind(cache_dtype: str) -> str:
    """Name the fp8 format of vLLM's `cache_dtype`."""
    return "e5m2" if "e5m2" in cache_dtype else "e4m3"


def probe_cpu_layout(
    *, heads: int, dim: int, page_size: int, dtype: torch.dtype, cache_dtype: str
) -> None:
    """Probe the layout of vLLM's CPU attention on a scratch cache, without an engine.

    Raises:
        LayoutError: a row is not where the view says.
    """
    from vllm import _custom_ops as ops  # noqa: PLC0415 - only where vLLM is

    fp8 = cache_dtype.startswith("fp8")
    cache = torch.zeros((3, heads, page_size, 2 * dim), dtype=torch.uint8 if fp8 else dtype)
    key_cache, value_cache = cache.view(3, heads, 2 * page_size, dim).chunk(2, dim=2)
    isa = seams.resolve(seams.CPU_ATTENTION_ISA)(dtype, page_size, dim, cache_dtype)

    def write(key: Tensor, value: Tensor, slots: Tensor) -> None:
        ops.cpu_attn_reshape_and_cache(
            key, value, key_cache, value_cache, slots, isa, kv_cache_dtype=cache_dtype
        )

    rows = KVRows.of(Layout.VLLM_CPU, [cache])
    probe_rows(rows, write, 1, dtype=dtype, fp8=fp8_kind(cache_dtype))
