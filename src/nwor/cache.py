"""The transactional cache: durable rows of all layers, an arena that stages them, one window a time.

This is the *held* form for engines that own their KV store. Attention reads the durable rows and,
through `RowWindow.staged`, the staged ones; `RowWindow.commit` then moves the accepted rows of all
layers of a group in one movement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nwor import reference
from nwor.errors import (
    CommitError,
    InputError,
    RowCountError,
    TensorMismatchError,
    UnknownLayerError,
)
from nwor.layout import KVRows
from nwor.metrics import FallbackReason, Metrics, Written
from nwor.plan import CommitPlan
from nwor.slots import check_slots
from nwor.store.movers import get_mover
from nwor.store.moves import Binder, Move
from nwor.tensors import require_storage
from nwor.window import Window, WindowSequence
from nwor.window_rows import WindowRows


class TransactionalCache:
    """Durable rows in groups of equal layers, and the windows that write to them.

    Layers of a group share one slot mapping, head count, dim and dtype. The arena is allocated once
    and has a fixed address.

    Args:
        groups: durable rows by group name; the views are kept, nothing is copied.
        max_rows: most rows a window may hold.
        mover: row mover, ``torch`` or ``numba``; see `nwor.store.movers`.
        metrics: counters to add to; new ones if left out.
        poison: fill the arena with a pattern (NaN for floats) whenever a window closes, so that a
            view used after its window shows. For tests.

    Raises:
        InputError: no groups, or `max_rows` below 1.
        LayoutError: see `KVRows`.
    """

    def __init__(
        self,
        groups: Mapping[str, KVRows],
        *,
        max_rows: int,
        mover: str = "torch",
        metrics: Metrics | None = None,
        poison: bool = False,
    ) -> None:
        if not groups:
            raise InputError("a cache needs at least one group of layers")
        if max_rows < 1:
            raise InputError(f"max_rows must be at least 1, got {max_rows}")
        bind = get_mover(mover)
        self.metrics = metrics if metrics is not None else Metrics()
        self.max_rows = max_rows
        self._groups = {name: _Group.build(rows, max_rows, bind) for name, rows in groups.items()}
        self._poison = poison
        self._windows: WindowSequence[RowWindow] = WindowSequence()

    @property
    def window(self) -> RowWindow | None:
        """The open window, or None."""
        return self._windows.current

    def durable(self, group: str) -> KVRows:
        """Return the durable rows of a group."""
        return self._group(group).durable

    def staged_bytes(self) -> int:
        """Return the size of the arena in bytes."""
        return sum(
            group.arena.row_bytes * group.arena.num_layers * self.max_rows
            for group in self._groups.values()
        )

    def begin(self, rows: WindowRows, slots: Tensor | Mapping[str, Tensor]) -> RowWindow:
        """Open a window.

        Args:
            rows: what each row is.
            slots: durable slot of each row, int32 or int64 ``[rows]``, negative for padding; one for
                all groups or one by group name.

        Raises:
            WindowOpenError: a window is open; it is left as it is.
            RowCountError: more rows than `max_rows`.
            SlotError: wrong length or dtype, out of range, or a slot named twice.
            UnknownLayerError: slots for a group that does not exist, or none for one that does.
        """
        if rows.num_rows > self.max_rows:
            raise RowCountError(f"window has {rows.num_rows} rows, max_rows is {self.max_rows}")
        by_group = dict.fromkeys(self._groups, slots) if isinstance(slots, Tensor) else dict(slots)
        if by_group.keys() != self._groups.keys():
            raise UnknownLayerError(
                f"slots for groups {sorted(by_group)}, the cache has {sorted(self._groups)}"
            )
        seen: set[tuple[int, int]] = set()
        for name, mapping in by_group.items():
            limit = self._groups[name].durable.num_slots
            if (id(mapping), limit) not in seen:
                check_slots(mapping, rows.num_rows, limit)
                seen.add((id(mapping), limit))
        generation = self._windows.next_generation()
        # Engines edit their slot mappings in place: a window keeps what it was given.
        copies = {id(m): m.to(torch.int64, copy=True) for m in by_group.values()}
        held = {name: copies[id(mapping)] for name, mapping in by_group.items()}
        window = RowWindow(rows, generation, self.metrics, self._groups, held, poison=self._poison)
        return self._windows.opened(window)

    def _group(self, name: str) -> _Group:
        return _known(self._groups, name)


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """A group's durable rows, its arena, and the bound mover between them."""

    durable: KVRows
    arena: KVRows
    move: Move
    # One ``[max_rows, heads, dim]`` view per layer, made once: indexing per stage call costs more.
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @classmethod
    def build(cls, durable: KVRows, max_rows: int, bind: Binder) -> _Group:
        arena = _arena(durable, max_rows)
        keys, values = arena.key[:, 0].unbind(), arena.value[:, 0].unbind()
        return cls(durable, arena, bind(arena, durable), keys, values)

    def poison(self) -> None:
        for view in (self.arena.key, self.arena.value):
            view.fill_(float("nan") if view.is_floating_point() else 0x55)


def _arena(durable: KVRows, max_rows: int) -> KVRows:
    """Allocate staging rows like a group's: one page per layer; K and V in one block if alike."""

    def shape(view: Tensor) -> tuple[int, ...]:
        return (view.shape[0], 1, max_rows, *view.shape[3:])

    key, value = durable.key, durable.value
    if (shape(key), key.dtype) == (shape(value), value.dtype):
        return KVRows(*key.new_zeros((2, *shape(key))))
    return KVRows(key.new_zeros(shape(key)), value.new_zeros(shape(value)))


def _known(groups: Mapping[str, _Group], name: str) -> _Group:
    try:
        return groups[name]
    except KeyError:
        raise UnknownLayerError(f"no group {name!r}; groups: {sorted(groups)}") from None


class RowWindow(Window):
    """A window whose rows are staged in the cache's arena; made by `TransactionalCache.begin`."""

    def __init__(
        self,
        rows: WindowRows,
        generation: int,
        metrics: Metrics,
        groups: Mapping[str, _Group],
        slots: Mapping[str, Tensor],
        *,
        poison: bool,
    ) -> None:
        super().__init__(rows, generation, metrics)
        self._groups = groups
        self._slots = slots
        self._poison = poison
        self._progress = {name: [0] * group.durable.num_layers for name, group in groups.items()}

    def stage(self, group: str, layer: int, key: Tensor, value: Tensor) -> None:
        """Copy the next rows of one layer into the arena.

        Layers may stage in any order and each in several chunks.

        Args:
            group: group name.
            layer: index of the layer within its group.
            key: ``[rows, heads, dim]`` in the group's dtype, any strides.
            value: the same for V.

        Raises:
            UnknownLayerError: no such group or layer.
            RowCountError: more rows than the window has.
            TensorMismatchError: shape, dtype or device differ from the group's.
            NoStorageError: a fake or meta tensor.
            StaleWindowError: the window is closed.
        """
        self._require_open("stage")
        target, start = self._at(group, layer)
        keys, values = target.keys[layer], target.values[layer]
        count = key.shape[0]
        check_rows("key", key, count, keys)
        check_rows("value", value, count, values)
        if start + count > self.rows.num_rows:
            raise RowCountError(
                f"layer {group}[{layer}] stages {count} rows after {start}, "
                f"the window has {self.rows.num_rows}"
            )
        keys.narrow(0, start, count).copy_(key)
        values.narrow(0, start, count).copy_(value)
        self._progress[group][layer] = start + count
        self._staged.add(count, target.durable.row_bytes)

    def staged(self, group: str, layer: int) -> tuple[Tensor, Tensor]:
        """Return views ``[staged rows, heads, dim]`` of a layer's K and V, valid until the close."""
        self._require_open("staged")
        target, count = self._at(group, layer)
        return target.keys[layer][:count], target.values[layer][:count]

    def _at(self, group: str, layer: int) -> tuple[_Group, int]:
        target = _known(self._groups, group)
        progress = self._progress[group]
        if not 0 <= layer < len(progress):
            raise UnknownLayerError(
                f"group {group!r} has {len(progress)} layers, not layer {layer}"
            )
        return target, progress[layer]

    def _check_staged(self, plan: CommitPlan) -> None:
        del plan  # slots were checked by `begin`
        if not self._staged.rows:
            return
        for name, progress in self._progress.items():
            for layer, count in enumerate(progress):
                if count != self.rows.num_rows:
                    raise RowCountError(
                        f"layer {name}[{layer}] has staged {count} of {self.rows.num_rows} rows"
                    )

    def _apply(self, plan: CommitPlan) -> Written:
        if not self._staged.rows:
            return Written()
        moves = [
            (group, moved.rows, moved.slots)
            for name, group in self._groups.items()
            for moved in (plan.moves(self._slots[name]),)
        ]
        try:
            for group, rows, slots in moves:
                group.move(rows, slots)
        except BaseException as error:  # noqa: BLE001 - an interrupt must not tear a commit
            # The staged rows are a redo log: moving them again, all of them, is always right.
            self._redo(moves, error)
        wrote = Written()
        for group, rows, _ in moves:
            wrote.add(rows.shape[0] * group.durable.num_layers, group.durable.row_bytes)
        return wrote

    def _redo(self, moves: list[tuple[_Group, Tensor, Tensor]], error: BaseException) -> None:
        self._metrics.fallbacks[FallbackReason.MOVER_FAULT] += 1
        self._torn = True
        try:
            for group, rows, slots in moves:
                reference.move_rows(group.arena, group.durable, rows, slots)
            self._torn = False
        except Exception as second:  # noqa: BLE001 - whatever it was, it is reported
            raise CommitError(
                f"the row mover failed ({error!r}), and so did the plain one ({second!r}): the "
                "window is still open and holds all rows; commit again or abort",
                layer_id=None,
                restored=False,
            ) from error
        if not isinstance(error, Exception):
            self._interrupted = error

    def _flush(self) -> Written:
        everything = CommitPlan(torch.ones(self.rows.num_rows, dtype=torch.bool))
        self._check_staged(everything)
        return self._apply(everything)

    def _discard(self) -> None:
        if self._poison:
            for group in self._groups.values():
                group.poison()


def check_rows(name: str, rows: Tensor, count: int, like: Tensor) -> None:
    """Refuse rows that are not ``[count, heads, dim]`` of the dtype and device of `like`."""
    if rows.shape != (count, *like.shape[1:]) or rows.dtype != like.dtype:
        raise TensorMismatchError(
            f"{name} has shape {tuple(rows.shape)} {rows.dtype}, expected "
            f"{(count, *like.shape[1:])} {like.dtype}"
        )
    if rows.device != like.device:
        require_storage(name, rows)
        raise TensorMismatchError(f"{name} is on {rows.device}, the cache on {like.device}")
    require_storage(name, rows)
