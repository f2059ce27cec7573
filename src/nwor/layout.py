"""Where a row lives: one description for every KV tensor.

A *row* is the K and V of one token in one layer. Whatever an engine's tensor looks like, nwor reads
and writes it through two strided views of shape ``[layer, page, row, head, dim]``, one for K and one
for V. The views own nothing and copy nothing; ``slot = page * page_size + row`` addresses them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor

from nwor.errors import LayoutError


class Layout(StrEnum):
    """Shapes of KV tensors that nwor knows, per layer.

    The first three and `DENSE` are K and V tensors apart; the others hold both.
    """

    SLOTS = "slots"
    """``[slots, heads, dim]``: pages of one row."""
    NHD = "nhd"
    """``[pages, page_size, heads, dim]``."""
    HND = "hnd"
    """``[pages, heads, page_size, dim]``."""
    DENSE = "dense"
    """``[batch, heads, seq, dim]``: a page is one sequence of the batch."""
    INTERLEAVED = "interleaved"
    """``[pages, 2, page_size, heads, dim]``."""
    VLLM_CPU = "vllm_cpu"
    """``[blocks, heads, block_size, 2 * dim]``, K column-major inside its half of a block and head."""
    FUSED = "fused"
    """``[blocks, heads, block_size, 2 * dim]``, any strides: K of a row and head, then its V."""

    @classmethod
    def parse(cls, name: str) -> Layout:
        """Return the layout called `name`, whatever its case; unknown names are refused."""
        try:
            return cls(name.lower())
        except (ValueError, AttributeError):
            known = ", ".join(layout.value for layout in cls)
            raise LayoutError(f"unknown layout {name!r}; known layouts: {known}") from None


_SEPARATE = {Layout.SLOTS: 3, Layout.NHD: 4, Layout.HND: 4, Layout.DENSE: 4}
_JOINT = {Layout.INTERLEAVED: 5, Layout.VLLM_CPU: 4, Layout.FUSED: 4}


def page_views(layout: Layout | str, *caches: Tensor) -> tuple[Tensor, Tensor]:
    """View one layer's cache tensors as K and V of shape ``[page, row, head, dim]``.

    Args:
        layout: how the tensors are laid out.
        caches: the K and the V tensor, or the one tensor that holds both (see `Layout`).

    Raises:
        LayoutError: unknown layout, wrong number of tensors, wrong rank.
    """
    layout = Layout.parse(layout)
    expected = _SEPARATE.get(layout) or _JOINT[layout]
    number = 2 if layout in _SEPARATE else 1
    if len(caches) != number:
        raise LayoutError(f"layout {layout} takes {number} tensor(s) per layer, got {len(caches)}")
    for cache in caches:
        if cache.ndim != expected:
            raise LayoutError(
                f"layout {layout} has {expected} dims, got shape {tuple(cache.shape)}"
            )
    match layout:
        case Layout.SLOTS:
            return caches[0].unsqueeze(1), caches[1].unsqueeze(1)
        case Layout.NHD:
            return caches[0], caches[1]
        case Layout.HND | Layout.DENSE:
            return caches[0].transpose(1, 2), caches[1].transpose(1, 2)
        case _:
            return _joint_views(layout, caches[0])


def _joint_views(layout: Layout, cache: Tensor) -> tuple[Tensor, Tensor]:
    """View the one tensor that holds K and V."""
    shape = tuple(cache.shape)
    if layout is Layout.INTERLEAVED:
        if shape[1] != 2:
            raise LayoutError(f"layout {layout} needs 2 at dim 1 (K and V), got shape {shape}")
        return cache[:, 0], cache[:, 1]
    if shape[3] % 2:
        raise LayoutError(f"layout {layout} is 2 * dim wide, got the odd width {shape[3]}")
    if layout is Layout.VLLM_CPU:
        return _packed_views(cache)
    key, value = cache.transpose(1, 2).chunk(2, dim=-1)
    return key, value


def _packed_views(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Split vLLM's CPU block: K of token t at ``d * block + t``, V at ``block * dim + t * dim + d``."""
    blocks, heads, block, width = cache.shape
    if cache.stride(3) != 1 or cache.stride(2) != width:
        raise LayoutError(f"vllm_cpu blocks must be contiguous, got strides {cache.stride()}")
    dim, start = width // 2, cache.storage_offset()
    page, head = cache.stride(0), cache.stride(1)
    shape = (blocks, block, heads, dim)
    key = cache.as_strided(shape, (page, 1, head, block), start)
    value = cache.as_strided(shape, (page, dim, head, 1), start + block * dim)
    return key, value


def stack_views(views: Sequence[Tensor]) -> Tensor:
    """Join per-layer views into one view with a leading layer dim, without copying.

    The views must be equal in shape, strides and dtype and lie equally spaced in one storage.

    Raises:
        LayoutError: they do not; use one `KVRows` per layer, or allocate the layers together.
    """
    if not views:
        raise LayoutError("no layers")
    first = views[0]
    if len(views) == 1:
        return first.unsqueeze(0)
    for index, view in enumerate(views):
        if (view.shape, view.stride(), view.dtype) != (first.shape, first.stride(), first.dtype):
            raise LayoutError(
                f"layer {index} has shape {tuple(view.shape)}, strides {view.stride()}, {view.dtype}; "
                f"layer 0 has {tuple(first.shape)}, {first.stride()}, {first.dtype}"
            )
        if view.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            raise LayoutError(f"layer {index} lies in another allocation than layer 0")
    offsets = [view.storage_offset() for view in views]
    step = offsets[1] - offsets[0]
    if step <= 0 or any(b - a != step for a, b in pairwise(offsets)):
        raise LayoutError(f"layers are not equally spaced; storage offsets {offsets}")
    return first.as_strided((len(views), *first.shape), (step, *first.stride()))


@dataclass(frozen=True, slots=True, eq=False)
class KVRows:
    """All rows of a group of equal layers, as strided views.

    Attributes:
        key: ``[layers, pages, page_size, heads, dim]``, any strides.
        value: the same, with its own dtype, heads and dim (MLA-like stores have dk != dv).

    Raises:
        LayoutError: ranks or leading dims differ, or two indices reach the same element.
    """

    key: Tensor
    value: Tensor

    def __post_init__(self) -> None:
        for name, view in (("key", self.key), ("value", self.value)):
            if view.ndim != 5:
                raise LayoutError(f"{name} must be [layer, page, row, head, dim], got {view.shape}")
            if overlaps_itself(view.shape, view.stride()):
                raise LayoutError(f"{name} overlaps itself: {view.shape}, strides {view.stride()}")
        if self.key.shape[:3] != self.value.shape[:3]:
            raise LayoutError(
                f"key and value disagree on [layer, page, row]: "
                f"{tuple(self.key.shape)} and {tuple(self.value.shape)}"
            )
        if self.key.device != self.value.device:
            raise LayoutError(f"key on {self.key.device}, value on {self.value.device}")
        if _key_meets_value(self.key, self.value):
            raise LayoutError("key and value views share elements")

    @classmethod
    def of(cls, layout: Layout | str, layers: Iterable[Tensor | tuple[Tensor, Tensor]]) -> Self:
        """View the caches of several layers, each given as one tensor or as a (K, V) pair.

        Raises:
            LayoutError: see `page_views` and `stack_views`.
        """
        pairs = [
            page_views(layout, *((layer,) if isinstance(layer, Tensor) else layer))
            for layer in layers
        ]
        return cls(stack_views([key for key, _ in pairs]), stack_views([val for _, val in pairs]))

    @classmethod
    def allocate(
        cls,
        *,
        layers: int,
        pages: int,
        page_size: int,
        heads: int,
        dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Allocate zeroed rows, K and V of all layers in one block (NHD inside a page)."""
        shape = (2, layers, pages, page_size, heads, dim)
        both = torch.zeros(shape, dtype=dtype, device=device)
        return cls(both[0], both[1])

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return self.key.shape[0]

    @property
    def page_size(self) -> int:
        """Rows per page."""
        return self.key.shape[2]

    @property
    def num_slots(self) -> int:
        """Slots per layer: pages times page size."""
        return self.key.shape[1] * self.key.shape[2]

    @property
    def device(self) -> torch.device:
        """Device of the rows."""
        return self.key.device

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of one layer, K and V together."""
        return sum(
            view.shape[3] * view.shape[4] * view.element_size() for view in (self.key, self.value)
        )

    def layer(self, index: int) -> KVRows:
        """Return a view of one layer."""
        return KVRows(self.key[index : index + 1], self.value[index : index + 1])


def overlaps_itself(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Tell whether two different indices of a strided view may reach the same element.

    Exact for views whose dims nest (every stride spans all smaller dims), which all KV layouts do;
    anything else counts as overlapping.
    """
    if 0 in shape:
        return False
    reach = 0
    for stride, size in sorted(
        (stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1
    ):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _extent(view: Tensor) -> tuple[int, int]:
    start = int(view.storage_offset())
    reach = sum((size - 1) * step for size, step in zip(view.shape, view.stride(), strict=True))
    return start, start + reach


def _key_meets_value(key: Tensor, value: Tensor) -> bool:
    """Tell whether K and V share an element; exact where their pages do not interleave."""
    same_storage = key.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
    if key.is_meta or not same_storage or not key.numel() or not value.numel():
        return False
    (k_first, k_last), (v_first, v_last) = _extent(key), _extent(value)
    if k_last < v_first or v_last < k_first:
        return False
    if key.shape == value.shape and key.stride() == value.stride():
        offset = abs(v_first - k_first)
        return overlaps_itself((2, *key.shape), (offset, *key.stride()))
    if key.stride()[:2] != value.stride()[:2]:
        return True
    # Pages interleave but rows are laid out differently inside them: compare one page element by
    # element, and see that a page of either ends before the next one begins.
    k_page = _page_elements(key)
    v_page = _page_elements(value)
    if bool(torch.isin(k_page, v_page).any()):
        return True
    span = int(max(k_page.max(), v_page.max()) - min(k_page.min(), v_page.min()))
    return any(
        0 < step <= span
        for size, step in zip(key.shape[:2], key.stride()[:2], strict=True)
        if size > 1
    )


def _page_elements(view: Tensor) -> Tensor:
    """Storage offsets of all elements of page 0 of layer 0."""
    total = torch.tensor([view.storage_offset()])
    for size, step in zip(view.shape[2:], view.stride()[2:], strict=True):
        total = (total[:, None] + torch.arange(size) * step).flatten()
    return total
