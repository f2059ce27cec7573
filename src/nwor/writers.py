"""What an opaque writer is, and what nwor must know of a cache to undo what one has written."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, Self

import torch
from torch import Tensor

from nwor.layout import KVRows, Layout, page_views
from nwor.scales import ScaleAxis
from nwor.store.moves import split_slots


class Writer(Protocol):
    """An engine's cache writer, as vLLM's `reshape_and_cache` family takes its arguments."""

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
        /,
    ) -> object:
        """Write rows ``[n, heads, dim]`` to slots ``[n]``."""


class Hold(StrEnum):
    """How rows are held until the commit."""

    COPY = "copy"
    """In buffers of nwor's own: always safe."""
    REFERENCE = "reference"
    """As the tensors the caller passed: free, and only right if nothing reuses their memory before
    the commit. In-place writes by eager torch ops are detected; those of CUDA graph replays and of
    compiled code are not."""


@dataclass(slots=True, eq=False)
class LayerRows:
    """Rows of one layer as handed to `WriterWindow.stage`. Made per layer and step: not frozen.

    Attributes:
        key, value: ``[n, …]``; rows beyond the slot mapping are padding and ignored.
        slots: int32 or int64 ``[n]``, negative for padding.
        key_cache, value_cache: passed on to the writer.
        kv_cache_dtype: passed on.
        k_scale, v_scale: passed on, cut to the written rows if per token.
        scale_axis: axis of both scales; None: see `resolve_axis`.
        writer: writes rows to the cache.
        skips_negative: True if the writer skips negative slots.
        layout: of the caches, or a view of them, for bounds checks and for restoring after a
            fault; None: taken from the shapes where they fit one layout only.
    """

    key: Tensor
    value: Tensor
    slots: Tensor
    key_cache: Tensor
    value_cache: Tensor
    kv_cache_dtype: str
    k_scale: Tensor | None
    v_scale: Tensor | None
    writer: Writer
    scale_axis: ScaleAxis | str | None = None
    skips_negative: bool = False
    layout: Layout | str | KVRows | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Home:
    """A layer's caches as views ``[page, row, head, dim]``.

    Attributes:
        key, value: the views.
        declared: True if the caller named the layout; slots are then checked against its bounds.
    """

    key: Tensor
    value: Tensor
    declared: bool

    @classmethod
    def of(cls, rows: LayerRows) -> Self | None:
        """View the caches as declared, or as their shapes allow; None if that leaves a doubt.

        A wrong guess could only make a restore incomplete, never damage anything: what is put back
        was read through the same view before the commit wrote a byte.

        Raises:
            LayoutError: the declared layout does not fit the caches.
        """
        if isinstance(rows.layout, KVRows):
            return cls(rows.layout.key[0], rows.layout.value[0], declared=True)
        if rows.layout is not None:
            return cls(*page_views(rows.layout, rows.key_cache, rows.value_cache), declared=True)
        layouts = {
            _only_layout(rows.key_cache, rows.key),
            _only_layout(rows.value_cache, rows.value),
        }
        layout = layouts.pop()
        if layouts or layout is None:
            return None
        return cls(*page_views(layout, rows.key_cache, rows.value_cache), declared=False)

    @property
    def num_slots(self) -> int:
        """Slots of the cache."""
        return self.key.shape[0] * self.key.shape[1]


class Undo:
    """The rows of one layer's cache that a commit is about to overwrite."""

    @classmethod
    def save(cls, home: Home | None, slots: Tensor) -> Self | None:
        """Save the rows at `slots` ``[n]``; None if the cache's view is unknown or too small."""
        if home is None or (not home.declared and int(slots.max()) >= home.num_slots):
            return None
        return cls(home, slots.to(torch.int64))

    def __init__(self, home: Home, slots: Tensor) -> None:
        self._home = home
        self._page, self._row = split_slots(slots, home.key.shape[1])
        self._key = home.key[self._page, self._row]
        self._value = home.value[self._page, self._row]

    def restore(self) -> None:
        """Put the saved rows back."""
        self._home.key[self._page, self._row] = self._key
        self._home.value[self._page, self._row] = self._value


def _only_layout(cache: Tensor, rows: Tensor) -> Layout | None:
    """Return the one layout of K and V apart that fits a cache of rows like `rows`, if there is one."""
    if rows.ndim != 3:
        return None
    heads, dim = rows.shape[1:]
    if cache.ndim == 3 and cache.shape[1:] == (heads, dim):
        return Layout.SLOTS
    if cache.ndim != 4 or cache.shape[3] != dim:
        return None
    fits = [lay for lay, at in ((Layout.NHD, 2), (Layout.HND, 1)) if cache.shape[at] == heads]
    return fits[0] if len(fits) == 1 else None
