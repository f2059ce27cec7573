"""The numba row mover: one compiled loop and no gather buffer. CPU only, chosen explicitly."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from nwor.errors import InputError
from nwor.layout import KVRows
from nwor.store.chunks import Chunks, chunk_pair, view_pairs
from nwor.store.moves import Move, check_pair, in_turn


def bind_numba(src: KVRows, dst: KVRows) -> Move:
    """Bind the compiled mover.

    Raises:
        InputError: the rows are not on the CPU.
        TensorMismatchError: source and destination rows differ.
    """
    check_pair(src, dst)
    if dst.device.type != "cpu":
        raise InputError(f"mover 'numba' moves rows on the CPU, these are on {dst.device}")
    return in_turn([_bind_view(*views) for views in view_pairs(src, dst)])


def _bind_view(src: Tensor, dst: Tensor) -> Move:
    pair = chunk_pair(src, dst)
    if pair:
        return _chunk_move(*pair)
    if src.ndim == 6:  # K and V joined, but not made of runs: the loop below takes one at a time
        return in_turn([_strided_move(a, b) for a, b in zip(src, dst, strict=True)])
    return _strided_move(src, dst)


def _chunk_move(src: Chunks, dst: Chunks) -> Move:
    words, home = _integers(src.words), _integers(dst.words)
    lanes, home_lanes = src.lanes.numpy(), dst.lanes.numpy()
    steps = np.array([[side.page_size, side.page_step, side.row_step] for side in (src, dst)])

    def move(src_slots: Tensor, dst_slots: Tensor) -> None:
        _copy_chunks(words, home, lanes, home_lanes, steps, src_slots.numpy(), dst_slots.numpy())

    return move


def _integers(words: Tensor) -> NDArray[np.generic]:
    """Return words as an integer array: numba's loops have no 16-byte one."""
    return (words.view(torch.int64) if words.is_complex() else words).numpy()


def _strided_move(src: Tensor, dst: Tensor) -> Move:
    # Flat storage and integer steps: the loop below then adds where indexing would multiply.
    words, home = _flat(src), _flat(dst)
    steps = np.array([src.stride(), dst.stride()])
    first = np.array([src.storage_offset(), dst.storage_offset()])
    pages = np.array([src.shape[2], dst.shape[2]])
    layers, heads, dim = src.shape[0], src.shape[3], src.shape[4]

    def move(src_slots: Tensor, dst_slots: Tensor) -> None:
        _copy_runs(
            *(words, home, steps, first, pages),
            *(layers, heads, dim, src_slots.numpy(), dst_slots.numpy()),
        )

    return move


def _flat(view: Tensor) -> Any:  # noqa: ANN401 - a numpy array of whichever integer fits
    elements = view.untyped_storage().nbytes() // view.element_size()
    return view.as_strided((elements,), (1,), 0).numpy()


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _copy_chunks(  # pragma: no cover - compiled
    src: Any,  # noqa: ANN401 - numpy arrays of whichever word fits
    dst: Any,  # noqa: ANN401
    src_lanes: Any,  # noqa: ANN401
    dst_lanes: Any,  # noqa: ANN401
    steps: Any,  # noqa: ANN401 - int64 [2, 3]: page size, chunks per page, chunks per row
    src_slots: Any,  # noqa: ANN401
    dst_slots: Any,  # noqa: ANN401
) -> int:
    words, rows, touched = src.shape[1], src_slots.shape[0], 0
    take, put = np.empty(rows, np.int64), np.empty(rows, np.int64)
    for i in range(rows):  # `Chunks.rows_of`, without a dispatch for every operation
        a, b = src_slots[i] // steps[0, 0], dst_slots[i] // steps[1, 0]
        take[i] = a * steps[0, 1] + (src_slots[i] - a * steps[0, 0]) * steps[0, 2]
        put[i] = b * steps[1, 1] + (dst_slots[i] - b * steps[1, 0]) * steps[1, 2]
    for lane in range(src_lanes.shape[0]):
        if lane + 1 < src_lanes.shape[0]:
            # Chunks lie far apart, each on a page of its own: start the next lane's page walks and
            # cache misses now, so that they overlap with this lane's copies.
            for i in range(rows):
                b = dst_lanes[lane + 1] + put[i]
                touched ^= dst[b, 0] ^ dst[b, words // 2]
        for i in range(rows):
            a, b = src_lanes[lane] + take[i], dst_lanes[lane] + put[i]
            for word in range(words):
                dst[b, word] = src[a, word]
    return touched


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _copy_runs(  # pragma: no cover - compiled
    src: Any,  # noqa: ANN401
    dst: Any,  # noqa: ANN401
    steps: Any,  # noqa: ANN401 - int64 [2, 5], strides of source and destination
    first: Any,  # noqa: ANN401 - int64 [2], where the views begin
    pages: Any,  # noqa: ANN401 - int64 [2], page sizes
    layers: int,
    heads: int,
    dim: int,
    src_slots: Any,  # noqa: ANN401
    dst_slots: Any,  # noqa: ANN401
) -> None:
    start, rows = 0, src_slots.shape[0]
    while start < rows:
        a, b = src_slots[start] // pages[0], dst_slots[start] // pages[1]
        c, d = src_slots[start] - a * pages[0], dst_slots[start] - b * pages[1]
        # Rows that follow each other on both sides share cache lines where dims come before rows.
        length, limit = 1, min(pages[0] - c, pages[1] - d, rows - start)
        while (
            length < limit
            and src_slots[start + length] == src_slots[start] + length
            and dst_slots[start + length] == dst_slots[start] + length
        ):
            length += 1
        for layer in range(layers):
            for head in range(heads):
                x = first[0] + layer * steps[0, 0] + a * steps[0, 1] + c * steps[0, 2]
                y = first[1] + layer * steps[1, 0] + b * steps[1, 1] + d * steps[1, 2]
                x += head * steps[0, 3]
                y += head * steps[1, 3]
                for _ in range(dim):
                    for row in range(length):
                        dst[y + row * steps[1, 2]] = src[x + row * steps[0, 2]]
                    x += steps[0, 4]
                    y += steps[1, 4]
        start += length
