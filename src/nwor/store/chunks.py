"""See a strided store as one flat list of contiguous chunks, so that moving rows is moving chunks.

A *chunk* is the longest contiguous run that rows are made of: the whole row for NHD stores, one head
of a row for HND ones. A *lane* is where a (layer, head) starts; chunk number = lane + row offset.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# complex128 is torch's widest plain word. Index ops only copy it, so any bit pattern survives.
_WORDS = (torch.complex128, torch.int64, torch.int32, torch.int16, torch.uint8)
_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Chunks:
    """A ``[layer, page, row, head, dim]`` view as chunks.

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


def as_bits(view: Tensor) -> Tensor:
    """Reinterpret elements as integers: index ops exist for those, not for every float8."""
    return view.view(_INTS[view.element_size()])


def chunk_pair(src: Tensor, dst: Tensor) -> tuple[Chunks, Chunks] | None:
    """See source and destination as chunks of the same size; None if their rows have no runs."""
    run = min(_run_length(src), _run_length(dst))
    if not run or not src.numel() or not dst.numel():
        return None
    if not (_is_whole(src, run) and _is_whole(dst, run)):
        return None
    word = next(w for w in _WORDS if _fits(src, run, w) and _fits(dst, run, w))
    return _chunks(src, run, word), _chunks(dst, run, word)


def _run_length(view: Tensor) -> int:
    """Elements of the longest contiguous run rows of `view` are made of; 0 if there is none."""
    heads, dim = view.shape[3:]
    if dim > 1 and view.stride(4) != 1:
        return 0
    return heads * dim if heads == 1 or view.stride(3) == dim else dim


def _outer_dims(view: Tensor, run: int) -> int:
    """Leading dims outside a run: heads are inside it if the run is longer than one head."""
    return 3 if run == view.shape[3] * view.shape[4] else 4


def _is_whole(view: Tensor, run: int) -> bool:
    """Tell whether all steps between runs are whole runs."""
    outer = _outer_dims(view, run)
    dims = zip(view.shape[:outer], view.stride()[:outer], strict=True)
    return all(step % run == 0 for size, step in dims if size > 1)


def _fits(view: Tensor, run: int, word: torch.dtype) -> bool:
    size = view.element_size()
    return run * size % word.itemsize == 0 and view.storage_offset() * size % word.itemsize == 0


def _chunks(view: Tensor, run: int, word: torch.dtype) -> Chunks:
    outer = _outer_dims(view, run)
    steps = view.stride()
    last = sum((n - 1) * s for n, s in zip(view.shape[:outer], steps[:outer], strict=True))
    words = view.as_strided((last // run + 1, run), (run, 1)).view(word)
    lanes = torch.arange(view.shape[0], device=view.device) * (steps[0] // run)
    if outer == 4:
        heads = torch.arange(view.shape[3], device=view.device) * (steps[3] // run)
        lanes = (lanes[:, None] + heads).flatten()
    return Chunks(words, lanes, steps[1] // run, steps[2] // run, view.shape[2])
