"""See a strided store as one flat list of contiguous chunks, so that moving rows is moving chunks.

A *chunk* is the longest contiguous run that rows are made of: the whole row for NHD stores, one head
of a row for HND ones. A *lane* is where a (K or V, layer, head) starts; chunk = lane + row offset.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nwor.layout import KVRows

# complex128 is torch's widest plain word. Index ops only copy it, so any bit pattern survives.
_WORDS = (torch.complex128, torch.int64, torch.int32, torch.int16, torch.uint8)
_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Chunks:
    """A ``[…lanes, page, row, head, dim]`` view as chunks.

    Attributes:
        words: ``[chunks, words]``, contiguous; shares the view's memory.
        lanes: int64 ``[lanes]``, chunk number of slot 0 in each lane.
        page_step: chunks from one page to the next.
        row_step: chunks from one row to the next within a page.
        page_size: rows per page.
    """

    words: Tensor
    lanes: Tensor
    page_step: int
    row_step: int
    page_size: int

    def rows_of(self, slots: Tensor) -> Tensor:
        """Chunk numbers of slots ``[n]``, relative to a lane."""
        if self.page_step == self.page_size * self.row_step:
            return slots * self.row_step if self.row_step != 1 else slots
        page = torch.div(slots, self.page_size, rounding_mode="floor")
        return slots * self.row_step + page * (self.page_step - self.page_size * self.row_step)


def view_pairs(src: KVRows, dst: KVRows) -> list[tuple[Tensor, Tensor]]:
    """Return the views to move, as integers: K and V as one view each side, where both allow it."""
    one_src, one_dst = _joined(src), _joined(dst)
    if one_src is not None and one_dst is not None:
        return [(one_src, one_dst)]
    return [(_as_bits(src.key), _as_bits(dst.key)), (_as_bits(src.value), _as_bits(dst.value))]


def chunk_pair(src: Tensor, dst: Tensor) -> tuple[Chunks, Chunks] | None:
    """See source and destination as chunks of the same size; None if their rows have no runs."""
    run = min(_run_length(src), _run_length(dst))
    if not run or not src.numel() or not dst.numel():
        return None
    if not (_is_whole(src, run) and _is_whole(dst, run)):
        return None
    word = next(w for w in _WORDS if _fits(src, run, w) and _fits(dst, run, w))
    return _chunks(src, run, word), _chunks(dst, run, word)


def _as_bits(view: Tensor) -> Tensor:
    """Reinterpret elements as integers: index ops exist for those, not for every float8."""
    return view.view(_INTS[view.element_size()])


def _joined(rows: KVRows) -> Tensor | None:
    """View K and V as one ``[2, layer, page, row, head, dim]``; None if they are not alike."""
    key, value = rows.key, rows.value
    if (key.shape, key.stride(), key.dtype) != (value.shape, value.stride(), value.dtype):
        return None
    step = value.storage_offset() - key.storage_offset()
    if step <= 0 or key.untyped_storage().data_ptr() != value.untyped_storage().data_ptr():
        return None
    return _as_bits(key).as_strided((2, *key.shape), (step, *key.stride()))


def _run_length(view: Tensor) -> int:
    """Elements of the longest contiguous run rows of `view` are made of; 0 if there is none."""
    heads, dim = view.shape[-2:]
    if dim > 1 and view.stride(-1) != 1:
        return 0
    return heads * dim if heads == 1 or view.stride(-2) == dim else dim


def _outer(view: Tensor, run: int) -> tuple[list[int], list[int]]:
    """Sizes and strides of the dims outside a run; heads are inside a run longer than one head."""
    inside = 2 if run == view.shape[-2] * view.shape[-1] else 1
    return list(view.shape[:-inside]), list(view.stride()[:-inside])


def _is_whole(view: Tensor, run: int) -> bool:
    """Tell whether all steps between runs are whole runs."""
    return all(step % run == 0 for size, step in zip(*_outer(view, run), strict=True) if size > 1)


def _fits(view: Tensor, run: int, word: torch.dtype) -> bool:
    size = view.element_size()
    return run * size % word.itemsize == 0 and view.storage_offset() * size % word.itemsize == 0


def _chunks(view: Tensor, run: int, word: torch.dtype) -> Chunks:
    sizes, steps = _outer(view, run)
    last = sum((n - 1) * step for n, step in zip(sizes, steps, strict=True))
    words = view.as_strided((last // run + 1, run), (run, 1)).view(word)
    lead = view.ndim - 4
    page_step, row_step = (step // run for step in steps[lead : lead + 2])
    lanes = torch.zeros(1, dtype=torch.int64, device=view.device)
    for dim in (*range(lead), *range(lead + 2, len(sizes))):
        starts = torch.arange(sizes[dim], device=view.device) * (steps[dim] // run)
        lanes = (lanes[:, None] + starts).flatten()
    return Chunks(words, lanes, page_step, row_step, view.shape[lead + 1])
