"""The specification, in plain loops. Fast paths are tested against it bit for bit.

It is also what finishes a commit when a fast mover raises: it allocates nothing that could fail.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from nwor.layout import KVRows


def kept_rows(num_drafts: Sequence[int], accepted: Sequence[int], *, bonus: bool) -> list[int]:
    """Rows kept of a batch that is ``[bonus?, draft 1, …, draft k]`` request after request."""
    kept = []
    start = 0
    for k, a in zip(num_drafts, accepted, strict=True):
        if bonus:
            kept.append(start)
            start += 1
        for draft in range(k):
            if draft < a:
                kept.append(start)
            start += 1
    return kept


def accepted_prefix(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """Count drafts that equal what was sampled at their position, up to the first that does not."""
    accepted = 0
    for draft, token in zip(drafts, sampled, strict=False):
        if draft != token:
            break
        accepted += 1
    return accepted


def masked_slots(slots: Sequence[int], kept: Sequence[int]) -> list[int]:
    """Slot mapping in which every row that is not kept has slot -1."""
    return [slot if row in set(kept) else -1 for row, slot in enumerate(slots)]


def move_rows(src: KVRows, dst: KVRows, src_slots: Tensor, dst_slots: Tensor) -> None:
    """Copy rows of all layers, K and V, one by one."""
    for view, home in ((src.key, dst.key), (src.value, dst.value)):
        for layer in range(view.shape[0]):
            for a, b in zip(src_slots.tolist(), dst_slots.tolist(), strict=True):
                page, row = divmod(b, home.shape[2])
                from_page, from_row = divmod(a, view.shape[2])
                home[layer, page, row].copy_(view[layer, from_page, from_row])
