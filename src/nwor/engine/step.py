"""One forward over packed rows: who owns which row, what each row sees, where its K and V go.

The input is ``[1, rows]``: the new tokens of each request, request after request, without padding.
For each layer, attention runs over the request's durable rows (an exact slice of its page; a longer
slice would read rows that nobody wrote) and over the step's own rows, and the two are merged.

Short segments of a step are stacked into one padded batch: padding repeats the request's own last row,
comes after all real rows, and is dropped. Long segments (prefill) are attended one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from nwor.attention import Partial, Visibility, attend, fold_heads, merge, unfold_heads
from nwor.cache import RowWindow
from nwor.engine.probe import scale_of
from nwor.engine.store import DurableStore, Group, LayerRows

# Up to this many rows a query reads K and V once per K/V head instead of once per query head.
_SHORT = 32


@dataclass(frozen=True, slots=True)
class Segment:
    """The rows of one request in a step.

    Attributes:
        page: the request's page in the durable store.
        start: position of its first row.
        length: its rows in this step.
        staged: rows before the first that are staged in the open window, not durable.
    """

    page: int
    start: int
    length: int
    staged: int = 0

    @property
    def durable(self) -> int:
        """Durable rows the request has."""
        return self.start - self.staged


@dataclass(frozen=True, slots=True, eq=False)
class Earlier:
    """Rows that earlier forwards of the same window have staged: a drafter's chain grows in steps.

    Attributes:
        window: the open window.
        rows: int64 ``[requests * count]``, rows of the window, request after request.
        count: rows of each request.
    """

    window: RowWindow
    rows: Tensor
    count: int


class Sink(Protocol):
    """Where the K and V of a step's rows go."""

    def put(self, layer: LayerRows, key: Tensor, value: Tensor) -> None:
        """Take the rows ``[rows, kv_heads, dim]`` of one layer, after it has attended."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """Requests of a block whose pages are neighbours and equally long: read in one call."""

    first: int
    last: int
    page: int
    rows: int
    visibility: Visibility | None


class _Block:
    """Segments that are attended together, and for each group what they read."""

    def __init__(self, first_row: int, segments: Sequence[Segment], device: torch.device) -> None:
        self.segments = segments
        self.width = max(s.length for s in segments)
        self.short = self.width <= _SHORT
        self._first = first_row
        self._total = sum(s.length for s in segments)
        self._pad: Tensor | None = None
        if any(s.length != self.width for s in segments):
            self._pad, self._unpad = _padding(segments, first_row, self.width, device)

    def take(self, rows: Tensor) -> Tensor:
        """Cut this block out of ``[1, heads, rows, dim]``: ``[requests, heads, width, dim]``."""
        part = (
            rows[0].narrow(1, self._first, self._total)
            if self._pad is None
            else rows[0].index_select(1, self._pad)
        )
        heads, _, dim = part.shape
        return part.view(heads, len(self.segments), self.width, dim).transpose(0, 1)

    def give(self, out: Tensor) -> Tensor:
        """Undo `take` for ``[requests, heads, width, dim]``: ``[rows, heads, dim]``."""
        rows = out.transpose(1, 2).flatten(0, 1)
        return rows if self._pad is None else rows.index_select(0, self._unpad)


def _padding(
    segments: Sequence[Segment], first_row: int, width: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the row each padded place shows, and the place of each row."""
    pad: list[int] = []
    unpad: list[int] = []
    row = first_row
    for index, segment in enumerate(segments):
        pad += [row + min(i, segment.length - 1) for i in range(width)]
        unpad += [index * width + i for i in range(segment.length)]
        row += segment.length
    return torch.tensor(pad, device=device), torch.tensor(unpad, device=device)


class Step:
    """A forward's rows; answers the attention calls of all layers.

    Args:
        store: the durable rows that are read.
        segments: rows of each request, in batch order.
        sink: where new rows go.
        earlier: rows of these requests that are staged already; segments are then of one length.
    """

    def __init__(
        self,
        store: DurableStore,
        segments: Sequence[Segment],
        sink: Sink,
        earlier: Earlier | None = None,
    ) -> None:
        self._store, self._sink, self._earlier = store, sink, earlier
        self._device = next(iter(store.groups.values())).rows.device
        self.segments = segments
        self._blocks = self._split(segments)
        self._plans: dict[tuple[int, str], tuple[list[_Read], Visibility | None]] = {}

    def _split(self, segments: Sequence[Segment]) -> list[_Block]:
        blocks: list[_Block] = []
        short: list[Segment] = []
        row = first = 0
        for segment in segments:
            if segment.length > _SHORT:
                if short:
                    blocks.append(_Block(first, short, self._device))
                    short = []
                blocks.append(_Block(row, [segment], self._device))
            else:
                if not short:
                    first = row
                short.append(segment)
            row += segment.length
        if short:
            blocks.append(_Block(first, short, self._device))
        return blocks

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, call: dict[str, Any]
    ) -> Tensor:
        """Attend, then hand the layer's new rows to the sink; see `hook.AttentionStep`."""
        layer = self._store.layers[module.layer_idx]  # type: ignore[index]
        scale, softcap, sinks = scale_of(query, call), call.get("softcap"), call.get("s_aux")
        outs = [
            self._attend_block(at, block, layer, query, key, value, scale, softcap, sinks)
            for at, block in enumerate(self._blocks)
        ]
        self._sink.put(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out.transpose(0, 1).unsqueeze(0)

    def _attend_block(
        self,
        at: int,
        block: _Block,
        layer: LayerRows,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        q, k, v = block.take(query), block.take(key), block.take(value)
        if self._earlier is not None:
            k, v = _with_earlier(self._earlier, layer, k, v)
        heads, kv_heads = q.shape[1], k.shape[1]
        fold = block.short and heads != kv_heads
        copies = heads // kv_heads if fold else 1
        reads, own = self._plan(at, block, layer.group, copies, q.dtype)
        if fold:
            q = fold_heads(q, kv_heads)
        staged = attend(
            q,
            k,
            v,
            scale=scale,
            visibility=own,
            causal=own is None and block.width > 1,
            softcap=softcap,
        )
        durable = _read(layer, reads, q, scale, softcap)
        if fold:
            staged = _unfolded(staged, heads, block.width)
            durable = durable and _unfolded(durable, heads, block.width)
        return block.give(merge(durable, staged, sinks))

    def _plan(
        self, at: int, block: _Block, group: Group, copies: int, dtype: torch.dtype
    ) -> tuple[list[_Read], Visibility | None]:
        """What a block reads of a group's layers: worked out by the first of them."""
        known = self._plans.get((at, group.name))
        if known is None:
            earlier = self._earlier.count if self._earlier else 0
            known = (
                _durable_reads(block, group, copies, dtype),
                _own_rows(block, group, copies, earlier, dtype),
            )
            self._plans[at, group.name] = known
        return known


def _with_earlier(
    earlier: Earlier, layer: LayerRows, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    """Put the rows staged before this forward in front of ``[requests, kv_heads, width, dim]``."""
    staged = earlier.window.staged(layer.group.name, layer.index)
    before = [
        rows.index_select(0, earlier.rows).view(-1, earlier.count, *rows.shape[1:]).transpose(1, 2)
        for rows in staged
    ]
    return torch.cat((before[0], key), 2), torch.cat((before[1], value), 2)


def _unfolded(part: Partial, heads: int, rows: int) -> Partial:
    return Partial(
        unfold_heads(part.out, heads, rows), part.lse.reshape(part.lse.shape[0], heads, rows)
    )


def _read(
    layer: LayerRows, reads: Sequence[_Read], query: Tensor, scale: float, softcap: float | None
) -> Partial | None:
    """Attend to the durable rows of a block's requests; None if none has any."""
    if not any(read.rows for read in reads):
        return None
    parts = [
        attend(
            query[read.first : read.last],
            layer.key[read.page : read.page + read.last - read.first, :, : read.rows],
            layer.value[read.page : read.page + read.last - read.first, :, : read.rows],
            scale=scale,
            visibility=read.visibility,
            softcap=softcap,
        )
        for read in reads
    ]
    if len(parts) == 1:
        return parts[0]
    return Partial(torch.cat([p.out for p in parts]), torch.cat([p.lse for p in parts]))


def _durable_reads(block: _Block, group: Group, copies: int, dtype: torch.dtype) -> list[_Read]:
    reads: list[_Read] = []
    segments = block.segments
    first = 0
    while first < len(segments):
        head = segments[first]
        rows = min(head.durable, group.capacity)
        last = first + 1
        while (
            last < len(segments)
            and segments[last].page == head.page + last - first
            and min(segments[last].durable, group.capacity) == rows
        ):
            last += 1
        visibility = _durable_visibility(
            segments[first:last], block.width, rows, group, copies, dtype
        )
        reads.append(_Read(first, last, head.page, rows, visibility))
        first = last
    return reads


def _durable_visibility(
    segments: Sequence[Segment],
    width: int,
    rows: int,
    group: Group,
    copies: int,
    dtype: torch.dtype,
) -> Visibility | None:
    """Say which durable rows are inside the window of each query row: ``[B, 1, copies * n, rows]``."""
    window = group.window
    if window is None or not rows or all(s.start + width <= window for s in segments):
        return None
    device = group.rows.device
    start = torch.tensor([s.start for s in segments], device=device)[:, None, None]
    newest = torch.tensor([s.durable - 1 for s in segments], device=device)[:, None, None]
    position = newest - (newest - torch.arange(rows, device=device)) % group.capacity
    query = start + torch.arange(width, device=device)[:, None]
    visible = query - position < window
    return Visibility.of(visible.repeat(1, copies, 1).unsqueeze(1), dtype)


def _own_rows(
    block: _Block, group: Group, copies: int, earlier: int, dtype: torch.dtype
) -> Visibility | None:
    """Say which staged rows each row sees; None where plain causal attention says it."""
    width, window = block.width, group.window
    windowed = window is not None and earlier + width > window
    if not windowed and (width == 1 or (copies == 1 and not earlier)):
        return None
    row = torch.arange(earlier + width, device=group.rows.device)
    distance = row[earlier:, None] - row[None, :]
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    return Visibility.of(visible.repeat(copies, 1), dtype)
