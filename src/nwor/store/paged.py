"""What an engine hands to the overlay: its tables once, its verifying requests every step."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nwor.errors import LayoutError, RowCountError
from nwor.layout import KVRows

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class PagedGroup:
    """One cache group of an engine: a block table, a slot mapping, and the rows they address.

    Attributes:
        table: int32 ``[batch rows, pages]``, the buffer that kernels read.
        slots: int64 ``[tokens]``, the buffer that kernels read.
        rows: durable and staging rows of the group's layers, one `KVRows` per run of equally spaced
            layers. Groups may share one: pages are told apart by number.

    Raises:
        LayoutError: page sizes differ, or a tensor of another shape or dtype.
    """

    table: Tensor
    slots: Tensor
    rows: tuple[KVRows, ...]

    def __post_init__(self) -> None:
        if not self.rows or len({rows.page_size for rows in self.rows}) != 1:
            raise LayoutError("a group needs rows, all with the same page size")
        if self.table.ndim != 2 or self.slots.ndim != 1:
            shapes = f"{tuple(self.table.shape)} and {tuple(self.slots.shape)}"
            raise LayoutError(f"expected table [rows, pages] and slots [tokens], got {shapes}")
        self._check("table", self.table, torch.int32)
        self._check("slots", self.slots, torch.int64)

    def _check(self, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
        if tensor.dtype != dtype or tensor.stride(-1) != 1:
            raise LayoutError(
                f"{name} must be {dtype} and dense in the last dim, got {tensor.dtype} with strides "
                f"{tensor.stride()}"
            )

    @property
    def page_size(self) -> int:
        """Rows per page."""
        return self.rows[0].page_size

    @property
    def num_layers(self) -> int:
        """Layers of the group."""
        return sum(rows.num_layers for rows in self.rows)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in all layers of the group."""
        return sum(rows.row_bytes * rows.num_layers for rows in self.rows)


class OverlayGroup(PagedGroup):
    """A cache group whose table and slot mapping lie on the host.

    Raises:
        LayoutError: they do not, or are not contiguous.
    """

    __slots__ = ()

    def _check(self, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
        if tensor.device.type != "cpu" or tensor.dtype != dtype or not tensor.is_contiguous():
            raise LayoutError(
                f"{name} must be contiguous {dtype} on the CPU, got {tensor.dtype} on "
                f"{tensor.device} with strides {tensor.stride()}"
            )


@dataclass(frozen=True, slots=True, eq=False)
class VerifyBatch:
    """The verifying requests of one step.

    Attributes:
        requests: one identity per request, the same from step to step whatever its batch row.
        table_rows: int64 ``[requests]``, row in the block tables.
        first_rows: int64 ``[requests]``, first of the request's rows in the slot mappings.
        computed: int64 ``[requests]``, the watermark: durable rows so far.
        query_lens: int64 ``[requests]``, rows of the request; the last `num_drafts` are drafts.
        num_drafts: int64 ``[requests]``, at least 1.

    Raises:
        RowCountError: lengths differ, or fewer rows than drafts and bonus take.
    """

    requests: Sequence[Hashable]
    table_rows: Ints
    first_rows: Ints
    computed: Ints
    query_lens: Ints
    num_drafts: Ints

    def __post_init__(self) -> None:
        check_counts(self)
        for name in ("first_rows", "computed"):
            check_length(self, name)
        if (self.computed < 0).any() or (self.first_rows < 0).any() or (self.table_rows < 0).any():
            raise RowCountError("computed, first_rows and table_rows must not be negative")

    def take(self, chosen: NDArray[np.bool_]) -> VerifyBatch:
        """Return the batch of the chosen requests."""
        return VerifyBatch(
            [request for request, use in zip(self.requests, chosen, strict=True) if use],
            self.table_rows[chosen],
            self.first_rows[chosen],
            self.computed[chosen],
            self.query_lens[chosen],
            self.num_drafts[chosen],
        )


class _Counts(Protocol):
    @property
    def requests(self) -> Sequence[Hashable]: ...
    @property
    def table_rows(self) -> Ints: ...
    @property
    def query_lens(self) -> Ints: ...
    @property
    def num_drafts(self) -> Ints: ...


def check_counts(batch: _Counts) -> None:
    """See that every request of a batch has a batch row, drafts, and rows enough for them.

    Raises:
        RowCountError: it has not.
    """
    for name in ("table_rows", "query_lens", "num_drafts"):
        check_length(batch, name)
    if ((batch.num_drafts < 1) | (batch.query_lens <= batch.num_drafts)).any():
        raise RowCountError(
            f"requests need at least one draft and one row more than drafts, got "
            f"{batch.num_drafts.tolist()} drafts in {batch.query_lens.tolist()} rows"
        )


def check_length(batch: _Counts, name: str) -> None:
    """See that the batch says something called `name` of each request.

    Raises:
        RowCountError: of more or fewer of them.
    """
    found, number = getattr(batch, name).shape, len(batch.requests)
    if found != (number,):
        raise RowCountError(f"{name} has shape {found}, {number} requests verify")
