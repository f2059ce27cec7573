"""Windows over opaque writers: each layer's rows reach its cache through the engine's own writer.

This is the form for engines whose `reshape_and_cache` nwor cannot or should not replace. Rows are
held until the commit, which calls each layer's writer once: with the masked slot mapping if the
caller has declared that the writer skips negative slots, with gathered rows otherwise.

A writer that raises in layer j of L must not leave j layers committed. Before anything is written,
the rows about to be overwritten are saved through a view of each cache; a fault restores them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nwor.errors import CommitError, RowCountError, StageError, UnknownLayerError
from nwor.layer_memory import KnownLayer, LayerMemory, check_same
from nwor.metrics import Metrics, Written
from nwor.plan import CommitPlan
from nwor.scales import ScaleAxis, cut_scale
from nwor.slots import check_slot_tensor, check_slot_values
from nwor.tensors import version
from nwor.window import Window
from nwor.window_rows import WindowRows
from nwor.writers import Hold, LayerRows, Undo

Mask = Callable[[Tensor], Tensor]
"""Slot mapping ``[rows]`` to the same with -1 for rows that are not to be written."""

_UNRESTORED = (
    "rows of earlier layers could not be restored, since the layout of a cache is unknown: declare it "
    "with layout=…; the window is still open and holds all rows: commit again or abort"
)


@dataclass(frozen=True, slots=True, eq=False)
class _Mapping:
    """A slot mapping as held until the commit; layers staged with the same one share it."""

    given: Tensor
    held: Tensor


@dataclass(slots=True, eq=False)
class _Chunk:
    """Consecutive rows of a layer, cut to their slot mapping."""

    key: Tensor
    value: Tensor
    slots: _Mapping
    k_scale: Tensor | None
    v_scale: Tensor | None
    versions: tuple[int, int] | None


@dataclass(slots=True, eq=False)
class _Layer:
    """What one layer has staged so far; `first` are the rows it began with."""

    name: str
    known: KnownLayer
    first: LayerRows
    count: int = 0
    chunks: list[_Chunk] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """The rows of a layer that are written; shared by all layers staged with the same mappings."""

    masked: Tensor
    rows: Tensor
    slots: Tensor


class WriterWindow(Window):
    """A window whose rows are written by opaque writers; made by `DeferredWriteManager`.

    Args:
        rows: what each row is.
        generation: number of the window.
        metrics: counters to add to.
        memory: buffers and views to reuse from window to window.
        hold: how rows are held until the commit.
        layers: names of the layers that must stage; None accepts any that do.
        undo: save the rows a commit overwrites, so that a writer's fault can be undone.
    """

    def __init__(
        self,
        rows: WindowRows,
        generation: int,
        metrics: Metrics,
        memory: LayerMemory,
        *,
        hold: Hold = Hold.COPY,
        layers: Collection[str] | None = None,
        undo: bool = True,
    ) -> None:
        super().__init__(rows, generation, metrics)
        self._memory = memory
        self._hold = hold
        self._names = layers
        self._undo = undo
        self._layers: dict[str, _Layer] = {}
        self._mappings: dict[tuple[object, ...], _Mapping] = {}
        self._cuts: dict[tuple[int, ...], _Cut] = {}

    def stage(self, layer: str, rows: LayerRows) -> None:
        """Hold the next rows of one layer.

        Raises:
            UnknownLayerError: not one of the layers named at construction.
            RowCountError: more rows than the window has, or fewer K/V rows than slots.
            SlotError: bad slot mapping; ranges are checked where the layout is declared.
            TensorMismatchError: device, or shape, dtype or caches other than the layer began with.
            ScaleError: see `resolve_axis`.
            NoStorageError: a fake or meta tensor.
            StaleWindowError: the window is closed.
        """
        self._require_open("stage")
        state = self._layers.get(layer)
        start = 0 if state is None else state.count
        slots = self._within_budget(layer, rows.slots, start)
        count = slots.shape[0]
        known = self._known_layer(layer, rows, count)
        if state is None:
            state = _Layer(layer, known, rows)
        else:
            check_same(layer, state.known, state.first, known, rows)
        mapping = self._mapping(slots, known)
        self._layers[layer] = state
        state.chunks.append(self._held(layer, rows, mapping, start))
        state.count += count
        self._staged.add(count, known.row_bytes)

    def _within_budget(self, layer: str, slots: Tensor, start: int) -> Tensor:
        """Cut the slot mapping to the rows the window has left; what is cut off must be padding."""
        if self._names is not None and layer not in self._names:
            raise UnknownLayerError(f"no layer {layer!r}; layers: {sorted(self._names)}")
        check_slot_tensor(slots)
        room = self.rows.num_rows - start
        if slots.shape[0] <= room:
            return slots
        if bool((slots[room:] >= 0).any()):
            raise RowCountError(
                f"layer {layer!r} stages {slots.shape[0]} rows after {start}, "
                f"the window has {self.rows.num_rows}"
            )
        return slots[:room]

    def _known_layer(self, layer: str, rows: LayerRows, count: int) -> KnownLayer:
        """Check the rows, unless they are more of what this layer staged last time."""
        known = self._memory.layers.get(layer)
        if known is None or not known.fits(rows, count):
            known = self._memory.layers[layer] = KnownLayer.of(rows, count)
        return known

    def _mapping(self, slots: Tensor, known: KnownLayer) -> _Mapping:
        """Check a slot mapping's values and hold it; both once for all layers that share it."""
        where = (slots.data_ptr(), slots.shape[0], slots.stride(0), slots.dtype)
        key = (*where, version(slots), known.num_slots)
        mapping = self._mappings.get(key)
        if mapping is None:
            check_slot_values(slots, known.num_slots)
            held = slots.clone() if self._hold is Hold.COPY else slots
            mapping = self._mappings[key] = _Mapping(slots, held)
        return mapping

    def _held(self, layer: str, rows: LayerRows, mapping: _Mapping, start: int) -> _Chunk:
        count, limit = mapping.held.shape[0], self.rows.num_rows
        key = rows.key if rows.key.shape[0] == count else rows.key[:count]
        value = rows.value if rows.value.shape[0] == count else rows.value[:count]
        if self._hold is Hold.COPY:
            key = self._memory.hold(layer, "key", start, key, limit)
            value = self._memory.hold(layer, "value", start, value, limit)
            versions = None
        else:
            versions = version(key), version(value)
        return _Chunk(key, value, mapping, rows.k_scale, rows.v_scale, versions)

    def _check_staged(self, plan: CommitPlan) -> None:
        if not self._layers:
            return
        for name in self._names or ():
            if name not in self._layers:
                raise RowCountError(f"layer {name!r} has staged no rows")
        for layer in self._layers.values():
            if layer.count != self.rows.num_rows:
                raise RowCountError(
                    f"layer {layer.name!r} has staged {layer.count} of {self.rows.num_rows} rows"
                )
            _check_untouched(layer)
        self._cut_all(plan.masked)

    def _cut_all(self, mask: Mask) -> None:
        """Decide what is written, for every set of mappings once, before anything is."""
        self._cuts.clear()
        for layer in self._layers.values():
            ids = _mapping_ids(layer)
            if ids in self._cuts:
                continue
            parts = [chunk.slots.held for chunk in layer.chunks]
            slots = parts[0] if len(parts) == 1 else torch.cat(parts)
            if len(parts) > 1:
                check_slot_values(slots, None)
            masked = mask(slots)
            rows = torch.nonzero(masked >= 0).flatten()
            self._cuts[ids] = _Cut(masked, rows, masked.index_select(0, rows))

    def _apply(self, plan: CommitPlan) -> Written:
        del plan  # `_check_staged` has cut the mappings by it
        return self._write()

    def _flush(self) -> Written:
        for layer in self._layers.values():
            _check_untouched(layer)
        self._cut_all(lambda slots: slots)
        return self._write()

    def _write(self) -> Written:
        """Call every layer's writer once: all layers, or none."""
        work = [(layer, self._cuts[_mapping_ids(layer)]) for layer in self._layers.values()]
        work = [(layer, cut) for layer, cut in work if cut.rows.shape[0]]
        saved = [
            Undo.save(layer.known.home, cut.slots) if self._undo else None for layer, cut in work
        ]
        wrote = Written()
        for index, (layer, cut) in enumerate(work):
            try:
                _call_writer(layer, cut)
            except BaseException as error:  # an interrupt must not leave half a commit either
                self._torn = True
                restored = _restore(saved[: index + 1])
                self._torn = not restored
                if not isinstance(error, Exception):
                    raise
                raise CommitError(
                    f"writer of layer {layer.name!r} failed: {error!r}; "
                    + ("all caches are as before" if restored else _UNRESTORED),
                    layer_id=layer.name,
                    restored=restored,
                ) from error
            wrote.add(cut.rows.shape[0], layer.known.row_bytes)
        return wrote

    def _discard(self) -> None:
        self._layers.clear()
        self._mappings.clear()
        self._cuts.clear()


def _check_untouched(layer: _Layer) -> None:
    """See that nobody has overwritten the tensors that `Hold.REFERENCE` refers to."""
    for chunk in layer.chunks:
        if chunk.versions not in (None, (version(chunk.key), version(chunk.value))):
            raise StageError(
                f"layer {layer.name!r}: staged K/V was overwritten before the commit; "
                "hold rows with hold='copy'"
            )


def _mapping_ids(layer: _Layer) -> tuple[int, ...]:
    return tuple(id(chunk.slots) for chunk in layer.chunks)


def _call_writer(layer: _Layer, cut: _Cut) -> None:
    first, chunks = layer.first, layer.chunks
    key, value = _joined([c.key for c in chunks]), _joined([c.value for c in chunks])
    k_scale = _joined_scale(layer.known.axes[0], [(c.k_scale, c.key) for c in chunks])
    v_scale = _joined_scale(layer.known.axes[1], [(c.v_scale, c.value) for c in chunks])
    slots = cut.masked
    if not first.skips_negative and cut.rows.shape[0] < key.shape[0]:
        rows, slots = cut.rows, cut.slots
        key, value = key.index_select(0, rows), value.index_select(0, rows)
        k_scale = cut_scale(k_scale, layer.known.axes[0], rows)
        v_scale = cut_scale(v_scale, layer.known.axes[1], rows)
    first.writer(
        key,
        value,
        first.key_cache,
        first.value_cache,
        slots,
        first.kv_cache_dtype,
        k_scale,
        v_scale,
    )


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _joined_scale(axis: ScaleAxis, parts: list[tuple[Tensor | None, Tensor]]) -> Tensor | None:
    """Join per-token scales without their sentinels; any other scale is the layer's own."""
    if axis is not ScaleAxis.TOKEN:
        return parts[0][0]
    return _joined([scale[: rows.shape[0]] for scale, rows in parts if scale is not None])


def _restore(saved: list[Undo | None]) -> bool:
    """Put back what was saved; False if a layer's rows were not saved."""
    for undo in saved:
        if undo is not None:
            undo.restore()
    return None not in saved
