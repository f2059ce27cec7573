"""Where a step's rows go: written through, or staged in a window."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nwor.cache import RowWindow
from nwor.engine.step import Segment
from nwor.engine.store import DurableStore, Group, LayerRows
from nwor.metrics import Written


def slots_of(store: DurableStore, segments: Sequence[Segment]) -> dict[str, Tensor]:
    """Return each group's int64 slots ``[rows]`` for the rows of a step."""
    positions, pages = _positions(segments)
    device = next(iter(store.groups.values())).rows.device
    pages, positions = pages.to(device), positions.to(device)
    return {name: group.slots(pages, positions) for name, group in store.groups.items()}


def _positions(segments: Sequence[Segment]) -> tuple[Tensor, Tensor]:
    positions = torch.cat([torch.arange(s.start, s.start + s.length) for s in segments])
    pages = torch.tensor([s.page for s in segments]).repeat_interleave(
        torch.tensor([s.length for s in segments])
    )
    return positions, pages


class WriteThrough:
    """Writes every row where it belongs as soon as its layer has attended.

    For prefill, whose rows nobody can reject, and for the modes without windows. A segment longer
    than a ring would write slots twice: only its last rows reach the store.

    Args:
        store: the store to write to.
        segments: rows of the step.
        wrote: counter of what is written.
    """

    def __init__(self, store: DurableStore, segments: Sequence[Segment], wrote: Written) -> None:
        self._slots = slots_of(store, segments)
        self._segments = segments
        self._wrote = wrote
        self._kept: dict[str, Tensor | None] = {
            name: self._last_rows(group) for name, group in store.groups.items()
        }

    def _last_rows(self, group: Group) -> Tensor | None:
        if all(s.length <= group.capacity for s in self._segments):
            return None
        kept: list[int] = []
        row = 0
        for segment in self._segments:
            row += segment.length
            kept += range(row - min(segment.length, group.capacity), row)
        rows = torch.tensor(kept, device=group.rows.device)
        self._slots[group.name] = self._slots[group.name][rows]
        return rows

    def put(self, layer: LayerRows, key: Tensor, value: Tensor) -> None:
        """Write the rows."""
        kept = self._kept[layer.group.name]
        if kept is not None:
            key, value = key.index_select(0, kept), value.index_select(0, kept)
        layer.write(self._slots[layer.group.name], key, value)
        self._wrote.add(key.shape[0], layer.group.rows.row_bytes)


class Stage:
    """Stages every row in an open window."""

    def __init__(self, window: RowWindow) -> None:
        self._window = window

    def put(self, layer: LayerRows, key: Tensor, value: Tensor) -> None:
        """Stage the rows."""
        self._window.stage(layer.group.name, layer.index, key, value)
