"""The durable store: the rows of all requests of a batch, at fixed addresses.

A request owns one *page* in each group; row ``position % capacity`` of the page holds the position.
Layers that see everything have room for the longest sequence. Sliding layers need their window only,
so their page is a ring of ``window + spare`` rows: a row is overwritten when no later query can see
it. ``spare`` rows keep modes that write drafts through from destroying rows that a rejection would
bring back into sight; staged windows would not need them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nwor.engine.probe import LayerSpec
from nwor.layout import KVRows


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Layers of one geometry, in one allocation.

    Attributes:
        name: group name in the transactional cache.
        rows: ``[layers, pages, capacity, kv_heads, dim]``.
        window: rows a query sees, itself included; None for all.
    """

    name: str
    rows: KVRows
    window: int | None

    @property
    def capacity(self) -> int:
        """Rows of one request."""
        return self.rows.page_size

    def slots(self, pages: Tensor, positions: Tensor) -> Tensor:
        """Return the slot of each row, int64, from its request's page and its position."""
        return pages * self.capacity + positions % self.capacity


@dataclass(frozen=True, slots=True, eq=False)
class LayerRows:
    """One layer's durable rows.

    Attributes:
        group: the layer's group.
        index: its index within the group.
        key: ``[pages, kv_heads, capacity, dim]``, as attention reads them.
        value: the same for V.
    """

    group: Group
    index: int
    key: Tensor
    value: Tensor

    def write(self, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Write rows ``[n, kv_heads, dim]`` to int64 slots ``[n]``."""
        rows = self.group.rows
        rows.key[self.index].flatten(0, 1).index_copy_(0, slots, key)
        rows.value[self.index].flatten(0, 1).index_copy_(0, slots, value)


class DurableStore:
    """Durable rows of `pages` requests of up to `max_length` tokens each.

    Args:
        layers: geometry of each layer.
        pages: requests that can be held at a time.
        max_length: longest sequence.
        spare: rows a ring has beyond its window, at least the most drafts of a window.
        dtype: dtype of the rows.
        device: device of the rows.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        *,
        pages: int,
        max_length: int,
        spare: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        members: dict[tuple[int, int, int | None], list[int]] = {}
        for spec in layers:
            members.setdefault((spec.kv_heads, spec.dim, spec.window), []).append(spec.index)
        self.groups: dict[str, Group] = {}
        self.layers: dict[int, LayerRows] = {}
        for (heads, dim, window), indices in members.items():
            capacity = max_length if window is None else min(max_length, window + spare)
            name = f"{'full' if window is None else f'window {window}'}, {heads} x {dim}"
            rows = KVRows.allocate(
                layers=len(indices),
                pages=pages,
                page_size=capacity,
                heads=heads,
                dim=dim,
                dtype=dtype,
                device=device,
            )
            group = self.groups[name] = Group(name, rows, window)
            for at, index in enumerate(indices):
                key, value = rows.key[at].transpose(1, 2), rows.value[at].transpose(1, 2)
                self.layers[index] = LayerRows(group, at, key, value)

    def row_bytes(self) -> int:
        """Bytes of one token's K and V over all layers."""
        return sum(g.rows.row_bytes * g.rows.num_layers for g in self.groups.values())

    def durable_bytes(self, lengths: Sequence[int]) -> int:
        """Bytes of the rows that requests of these lengths hold."""
        return sum(
            min(length, g.capacity) * g.rows.row_bytes * g.rows.num_layers
            for g in self.groups.values()
            for length in lengths
        )

    def poison(self) -> None:
        """Fill everything with NaN, so that a row that is read before it is written shows."""
        for group in self.groups.values():
            group.rows.key.fill_(float("nan"))
            group.rows.value.fill_(float("nan"))
