"""Row movers: copy rows of *all* layers, K and V, from slots of one `KVRows` to slots of another.

A mover is chosen by name and never replaced by another one behind the caller's back. It is *bound*
once to a source and a destination, which analyses strides and builds every view, and called once per
commit with two slot lists. `nwor.reference.move_rows` is the specification; movers equal it bit for
bit.

Where rows are made of contiguous chunks, one `index_select` and one `index_copy_` along dim 0 of a
flat list of 16-byte words move all layers. On CPU these run at memcpy speed, where advanced indexing
over ``[layer, slot]`` is several times slower (bench/commit.py). Rows without runs, such as
vLLM-CPU's column-major K, take advanced indexing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nwor.errors import InputError, TensorMismatchError
from nwor.layout import KVRows
from nwor.store.chunks import Chunks, chunk_pair, view_pairs

Move = Callable[[Tensor, Tensor], None]
"""``move(src_slots, dst_slots)``: int64 ``[n]`` each, no padding, destination slots distinct."""

Binder = Callable[[KVRows, KVRows], Move]
"""``bind(src, dst)`` returns a `Move`, or raises `TensorMismatchError` if their rows differ."""

MOVERS = ("torch", "numba", "triton")


def get_mover(name: str) -> Binder:
    """Return the mover called `name`: ``torch``, ``numba`` (CPU) or ``triton`` (GPU), extras of nwor.

    Raises:
        InputError: no such mover, or its package is not installed.
    """
    if name == "torch":
        return bind_torch
    if name == "numba":
        try:
            from nwor.store.jit import bind_numba  # noqa: PLC0415 - an optional dependency
        except ImportError as error:
            raise InputError("mover 'numba' needs numba: pip install 'nwor[numba]'") from error
        return bind_numba
    if name == "triton":
        try:
            from nwor.store.triton_rows import bind_triton  # noqa: PLC0415 - an optional dependency
        except ImportError as error:
            raise InputError("mover 'triton' needs triton: pip install 'nwor[triton]'") from error
        return bind_triton
    raise InputError(f"unknown mover {name!r}; known movers: {', '.join(MOVERS)}")


def bind_torch(src: KVRows, dst: KVRows) -> Move:
    """Bind the default mover: torch index ops, any device, any layout."""
    check_pair(src, dst)
    return in_turn([_bind_view(*views) for views in view_pairs(src, dst)])


def in_turn(moves: list[Move]) -> Move:
    """Join the moves of K and V; nothing is launched for an empty list."""

    def move(src_slots: Tensor, dst_slots: Tensor) -> None:
        if src_slots.shape[0]:
            for part in moves:
                part(src_slots, dst_slots)

    return move


def check_pair(src: KVRows, dst: KVRows) -> None:
    """Refuse a pair whose rows are not the same thing.

    Raises:
        TensorMismatchError: layers, heads, dim, dtype or device differ.
    """
    for name, a, b in (("key", src.key, dst.key), ("value", src.value, dst.value)):
        found, expected = (a.shape[0], *a.shape[3:]), (b.shape[0], *b.shape[3:])
        if found != expected or a.dtype != b.dtype or a.device != b.device:
            raise TensorMismatchError(
                f"{name}: rows [layers, heads, dim] {found} {a.dtype} on {a.device} cannot move to "
                f"{expected} {b.dtype} on {b.device}"
            )


def _bind_view(src: Tensor, dst: Tensor) -> Move:
    pair = chunk_pair(src, dst)
    return _ChunkMove(*pair) if pair else _IndexedMove(src, dst)


class _ChunkMove:
    """One gather and one scatter over flat chunks, through a buffer that is kept and only grows."""

    def __init__(self, src: Chunks, dst: Chunks) -> None:
        self._src, self._dst = src, dst
        self._buffer = src.words.new_empty((0, src.words.shape[1]))

    def __call__(self, src_slots: Tensor, dst_slots: Tensor) -> None:
        src, dst = self._src, self._dst
        take = (src.lanes[:, None] + src.rows_of(src_slots)).flatten()
        put = (dst.lanes[:, None] + dst.rows_of(dst_slots)).flatten()
        if self._buffer.shape[0] < take.shape[0]:
            self._buffer = src.words.new_empty((take.shape[0], src.words.shape[1]))
        held = self._buffer[: take.shape[0]]
        torch.index_select(src.words, 0, take, out=held)
        dst.words.index_copy_(0, put, held)


class _IndexedMove:
    """Advanced indexing over ``[…, page, row]``: right for any strides."""

    def __init__(self, src: Tensor, dst: Tensor) -> None:
        self._src, self._dst = src, dst

    def __call__(self, src_slots: Tensor, dst_slots: Tensor) -> None:
        src_page, src_row = split_slots(src_slots, self._src.shape[-3])
        dst_page, dst_row = split_slots(dst_slots, self._dst.shape[-3])
        self._dst[..., dst_page, dst_row, :, :] = self._src[..., src_page, src_row, :, :]


def split_slots(slots: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Split int64 slots ``[n]`` into pages and rows within the page.

    Slots must not be negative: indexing would take -1 for the last slot of the store.
    """
    page = torch.div(slots, page_size, rounding_mode="floor")
    return page, slots - page * page_size
