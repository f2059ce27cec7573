"""What a row mover is: rows of *all* layers, K and V, from slots of one `KVRows` to slots of another.

A mover is *bound* once to a source and a destination, which analyses strides and builds every view,
and called once per commit with two slot lists. `nwor.reference.move_rows` is the specification; movers
equal it bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nwor.errors import TensorMismatchError
from nwor.layout import KVRows

Move = Callable[[Tensor, Tensor], None]
"""``move(src_slots, dst_slots)``: int64 ``[n]`` each, no padding, destination slots distinct."""

Binder = Callable[[KVRows, KVRows], Move]
"""``bind(src, dst)`` returns a `Move`, or raises `TensorMismatchError` if their rows differ."""


def check_pair(src: KVRows, dst: KVRows) -> None:
    """Refuse a pair whose rows are not the same thing.

    Raises:
        TensorMismatchError: layers, heads, dim, dtype or device differ.
    """
    for name, a, b in (("key", src.key, dst.key), ("value", src.value, dst.value)):
        found, expected = (a.shape[0], *a.shape[3:]), (b.shape[0], *b.shape[3:])
        if found != expected or a.dtype != b.dtype or a.device != b.device:
            raise TensorMismatchError(
                f"{name}: rows [layers, heads, dim] {found} {a.dtype} on {a.device} cannot move to "
                f"{expected} {b.dtype} on {b.device}"
            )


def in_turn(moves: list[Move]) -> Move:
    """Join the moves of K and V; nothing is launched for an empty list."""

    def move(src_slots: Tensor, dst_slots: Tensor) -> None:
        if src_slots.shape[0]:
            for part in moves:
                part(src_slots, dst_slots)

    return move


def split_slots(slots: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Split int64 slots ``[n]`` into pages and rows within the page.

    Slots must not be negative: indexing would take -1 for the last slot of the store.
    """
    page = torch.div(slots, page_size, rounding_mode="floor")
    return page, slots - page * page_size
