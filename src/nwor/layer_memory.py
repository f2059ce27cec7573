"""What a manager remembers of each layer between windows: checked facts, and buffers to hold rows.

A layer stages the same kind of rows in every window. What it staged is checked in full once; from
then on a few comparisons tell that nothing has changed, since staging runs once per layer and step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from nwor.errors import RowCountError, ScaleError, TensorMismatchError
from nwor.scales import ScaleAxis, resolve_axis
from nwor.tensors import require_storage
from nwor.writers import Home, LayerRows


@dataclass(frozen=True, slots=True, eq=False)
class KnownLayer:
    """Facts about a layer's rows and caches, derived from rows that passed all checks.

    Attributes:
        rows: those rows.
        key_tail, value_tail: their shapes without the row dim.
        axes: axes of the K and the V scale.
        axes_fixed: True if the axes do not depend on the number of rows.
        home: view of the caches, if their layout is known.
        num_slots: slots of the store if the layout is declared, for the bounds check; else None.
        row_bytes: bytes of one row in the caches, K and V together.
    """

    rows: LayerRows
    key_tail: torch.Size
    value_tail: torch.Size
    axes: tuple[ScaleAxis, ScaleAxis]
    axes_fixed: bool
    home: Home | None
    num_slots: int | None
    row_bytes: int

    @classmethod
    def of(cls, rows: LayerRows, count: int) -> Self:
        """Check rows of a layer and derive the facts.

        Args:
            rows: the layer's rows.
            count: how many of them count: the length of the slot mapping.

        Raises:
            RowCountError: fewer K/V rows than slots.
            TensorMismatchError: tensors on different devices.
            NoStorageError, ScaleError, LayoutError: see there.
        """
        _check_parts(rows, count)
        axes = _axes(rows, count)
        home = Home.of(rows)
        row_bytes = rows.key[:1].numel() * rows.key_cache.element_size()
        row_bytes += rows.value[:1].numel() * rows.value_cache.element_size()
        return cls(
            rows,
            rows.key.shape[1:],
            rows.value.shape[1:],
            axes,
            all(s is None or s.numel() == 1 for s in (rows.k_scale, rows.v_scale)),
            home,
            home.num_slots if home is not None and home.declared else None,
            row_bytes,
        )

    def fits(self, rows: LayerRows, count: int) -> bool:
        """Tell whether other rows of the layer need no check of their own."""
        mine = self.rows
        key, value = rows.key, rows.value
        return (
            self.axes_fixed
            and rows.k_scale is mine.k_scale
            and rows.v_scale is mine.v_scale
            and rows.scale_axis is mine.scale_axis
            and rows.layout is mine.layout
            and rows.key_cache is mine.key_cache
            and rows.value_cache is mine.value_cache
            and type(key) is type(value) is Tensor
            and key.dtype is mine.key.dtype
            and value.dtype is mine.value.dtype
            and key.shape[1:] == self.key_tail
            and value.shape[1:] == self.value_tail
            and key.shape[0] >= count <= value.shape[0]
            and key.device == value.device == rows.slots.device == mine.key.device
            and key.data_ptr() != 0 != value.data_ptr()
        )


@dataclass(slots=True, eq=False)
class LayerMemory:
    """Known layers by name, and their buffers for `Hold.COPY`; bounded by the number of layers."""

    layers: dict[str, KnownLayer] = field(default_factory=dict)
    buffers: dict[tuple[str, str], Tensor] = field(default_factory=dict)

    def hold(self, layer: str, part: str, start: int, rows: Tensor, limit: int) -> Tensor:
        """Copy `rows` into the layer's buffer from row `start` on; `limit` rows fit at the most."""
        held = self.buffers.get((layer, part))
        if (
            held is None
            or held.shape[0] < limit
            or held.shape[1:] != rows.shape[1:]
            or held.dtype != rows.dtype
            or held.device != rows.device
        ):
            held = self.buffers[layer, part] = rows.new_empty((limit, *rows.shape[1:]))
        return held.narrow(0, start, rows.shape[0]).copy_(rows)


def check_same(
    layer: str, known: KnownLayer, first: LayerRows, now: KnownLayer, rows: LayerRows
) -> None:
    """Refuse a chunk that is not more of what the layer began its window with.

    Raises:
        TensorMismatchError: shapes, dtypes or caches differ.
        ScaleError: scales differ, or their axes do.
    """
    for name in ("key", "value", "key_cache", "value_cache"):
        a, b = getattr(rows, name), getattr(first, name)
        outer = 1 if name in {"key", "value"} else 0
        if a.shape[outer:] != b.shape[outer:] or a.dtype != b.dtype:
            raise TensorMismatchError(
                f"layer {layer!r}: {name} {tuple(a.shape)} {a.dtype} differs from "
                f"{tuple(b.shape)} {b.dtype} of its first rows"
            )
        if not outer and a.data_ptr() != b.data_ptr():
            raise TensorMismatchError(f"layer {layer!r}: {name} is another tensor than before")
    if now.axes != known.axes:
        raise ScaleError(f"layer {layer!r}: scale axes {now.axes}, its first rows {known.axes}")
    for a, b, axis in zip(
        (rows.k_scale, rows.v_scale), (first.k_scale, first.v_scale), known.axes, strict=True
    ):
        if a is b or a is None or b is None or axis is ScaleAxis.TOKEN or torch.equal(a, b):
            continue
        raise ScaleError(f"layer {layer!r}: scale {a}, its first rows had {b}")


def _check_parts(rows: LayerRows, count: int) -> None:
    """Refuse K/V without storage, shorter than their slot mapping, or scattered over devices."""
    for name, part in (("key", rows.key), ("value", rows.value)):
        require_storage(name, part)
        if part.ndim < 2 or part.shape[0] < count:
            raise RowCountError(f"{name} has shape {tuple(part.shape)} for {count} slots")
        if part.device != rows.slots.device:
            raise TensorMismatchError(
                f"{name} is on {part.device}, its slot mapping on {rows.slots.device}"
            )
    for name, cache in (("key_cache", rows.key_cache), ("value_cache", rows.value_cache)):
        require_storage(name, cache)
        if cache.device != rows.key.device:
            raise TensorMismatchError(f"{name} is on {cache.device}, K/V on {rows.key.device}")


def _axes(rows: LayerRows, count: int) -> tuple[ScaleAxis, ScaleAxis]:
    heads = rows.key.shape[1]
    return (
        resolve_axis("k_scale", rows.k_scale, rows.scale_axis, count, heads),
        resolve_axis("v_scale", rows.v_scale, rows.scale_axis, count, heads),
    )
