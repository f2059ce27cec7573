"""What an engine hands to the device overlay: its groups once, its verifying requests every step."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nwor.errors import InputError, RowCountError
from nwor.store.paged import PagedGroup, check_counts

Ints = NDArray[np.int64]
NO_ROWS: Ints = np.empty(0, np.int64)


class DeviceGroup(PagedGroup):
    """A cache group whose table and slot mapping lie where the rows do.

    Both are addressed by the pointers found when the overlay is built: they must stay where they are.
    """

    __slots__ = ()


@dataclass(frozen=True, slots=True, eq=False)
class DeviceBatch:
    """The verifying requests of one step.

    Attributes:
        requests: one identity per request, the same from step to step whatever its batch row.
        table_rows: int64 ``[requests]``, batch row of each.
        query_lens: int64 ``[requests]``, rows of each in this step, exact.
        num_drafts: int64 ``[requests]``, at least 1; the last rows of a request are its drafts.
        query_start_loc: int32 ``[batch rows + 1]`` or more, on the device: first token of each row.
        positions: int64 ``[tokens]`` on the device. That of a request's first token is its
            watermark: the number of durable rows.
        newcomers: int64, batch rows of requests that begin in this step on a cached prefix. An
            engine may share a page in the very step that fills it; where that step stages the last
            row, a newcomer reads the staging page too. None of them verifies.

    Raises:
        RowCountError: lengths differ, fewer rows than drafts and bonus take, or negative rows.
        InputError: a device tensor of another dtype or rank.
    """

    requests: Sequence[Hashable]
    table_rows: Ints
    query_lens: Ints
    num_drafts: Ints
    query_start_loc: Tensor
    positions: Tensor
    newcomers: Ints | None = field(default=None)

    def __post_init__(self) -> None:
        check_counts(self)
        if (self.table_rows < 0).any() or (self.newcomer_rows < 0).any():
            raise RowCountError("batch rows must not be negative")
        check_integers("query_start_loc", self.query_start_loc, torch.int32)
        check_integers("positions", self.positions, torch.int64)

    @property
    def newcomer_rows(self) -> Ints:
        """Batch rows of the newcomers, none if there are none."""
        return NO_ROWS if self.newcomers is None else self.newcomers

    def take(self, chosen: NDArray[np.bool_]) -> DeviceBatch:
        """Return the batch of the chosen requests."""
        return DeviceBatch(
            [request for request, use in zip(self.requests, chosen, strict=True) if use],
            self.table_rows[chosen],
            self.query_lens[chosen],
            self.num_drafts[chosen],
            self.query_start_loc,
            self.positions,
            self.newcomers,
        )


def check_integers(
    name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device | None = None
) -> None:
    """See that a tensor is what kernels take it for.

    Raises:
        InputError: another dtype, rank, stride or device.
    """
    wrong_place = device is not None and tensor.device != device
    if tensor.dtype != dtype or tensor.ndim != 1 or tensor.stride(0) != 1 or wrong_place:
        place = "" if device is None else f" on {device}"
        raise InputError(
            f"{name} must be a dense {dtype} vector{place}, got {tensor.dtype} of shape "
            f"{tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}"
        )
