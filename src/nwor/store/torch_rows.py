"""The default row mover: torch index ops, any device, any layout.

Where rows are made of contiguous chunks, one `index_select` and one `index_copy_` along dim 0 of a
flat list of 16-byte words move all layers. On CPU these run at memcpy speed, where advanced indexing
over ``[layer, slot]`` is several times slower (bench/commit.py). Rows without runs, such as
vLLM-CPU's column-major K, take advanced indexing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nwor.layout import KVRows
from nwor.store.chunks import Chunks, chunk_pair, view_pairs
from nwor.store.moves import Move, check_pair, in_turn, split_slots


def bind_torch(src: KVRows, dst: KVRows) -> Move:
    """Bind the default mover: torch index ops, any device, any layout."""
    check_pair(src, dst)
    return in_turn([_bind_view(*views) for views in view_pairs(src, dst)])


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
