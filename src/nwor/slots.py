"""Checks on slot mappings, before anything is written."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nwor.errors import RowCountError, SlotError


def check_slots(slots: Tensor, num_rows: int, num_slots: int | None) -> None:
    """Refuse a slot mapping that could write outside the store, or twice to the same slot.

    Args:
        slots: int32 or int64 ``[num_rows]``; negative slots are padding. On an accelerator this
            costs one transfer.
        num_rows: rows it must name.
        num_slots: slots of the store; None if the store's shape is not known.

    Raises:
        RowCountError: another length.
        SlotError: another dtype or rank, a slot out of range, or a slot named twice.
    """
    check_slot_tensor(slots)
    if slots.shape[0] != num_rows:
        raise RowCountError(f"slot mapping has {slots.shape[0]} entries for {num_rows} rows")
    check_slot_values(slots, num_slots)


def check_slot_tensor(slots: Tensor) -> None:
    """Check rank and dtype alone, which needs no look at the values."""
    if slots.ndim != 1 or slots.dtype not in (torch.int32, torch.int64):
        raise SlotError(
            "a slot mapping is a 1-D int32 or int64 tensor, got "
            f"{slots.dtype} of shape {tuple(slots.shape)}"
        )


def check_slot_values(slots: Tensor, num_slots: int | None) -> None:
    """Check range and uniqueness of the slots that are not padding."""
    values = slots.numpy(force=True)
    used = np.sort(values[values >= 0])
    if not used.size:
        return
    if num_slots is not None and used[-1] >= num_slots:
        raise SlotError(f"slot {used[-1]} is outside the store's {num_slots} slots")
    twice = used[1:] == used[:-1]
    if twice.any():
        raise SlotError(f"slot {used[1:][twice][0]} is named twice in one window")
