"""The Triton row mover: rows of all layers, K and V, of all groups, in one launch.

Everything that differs between layers stands in a *lane table* on the device, built once when the
mover is bound; a lane is one (group, layer, K or V). The grid is rows by lanes and does not depend on
what was accepted: a program whose destination slot is negative (rejected, padding) ends at once. A
slot mapping masked on the device is therefore moved without the host ever learning the counts.

Tensors are addressed by the pointers found when the mover was bound, as CUDA graphs do: a store must
stay where it is. Not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from nwor.errors import InputError
from nwor.layout import KVRows
from nwor.store.movers import Move, check_pair

FIELDS = 16
MAX_BLOCK = 1024
WORDS = (8, 4, 2, 1)


@triton.jit(
    do_not_specialize=["src_group_step", "dst_group_step"],
    do_not_specialize_on_alignment=["src_slots", "dst_slots"],
)  # type: ignore[untyped-decorator]
def move_rows_kernel(  # pragma: no cover - compiled
    table: Any,  # noqa: ANN401 - int64 [lanes, FIELDS], see `lane_table`
    src_slots: Any,  # noqa: ANN401 - int64 [groups, rows] or [rows]
    dst_slots: Any,  # noqa: ANN401 - the same
    src_group_step: Any,  # noqa: ANN401 - stride of the groups, 0 for slots that all share
    dst_group_step: Any,  # noqa: ANN401
    FIELDS: tl.constexpr,  # noqa: N803 - Triton's custom for constants
    BLOCK: tl.constexpr,  # noqa: N803 - words per step of the loop
) -> None:
    """Copy one row of one lane."""
    row = tl.program_id(0)
    lane = table + tl.program_id(1) * FIELDS
    group = tl.load(lane + 14)
    dst_slot = tl.load(dst_slots + group * dst_group_step + row)
    if dst_slot < 0:
        return
    src_slot = tl.load(src_slots + group * src_group_step + row)
    src = tl.load(lane) + _row_offset(src_slot, tl.load(lane + 2), lane + 4)
    dst = tl.load(lane + 1) + _row_offset(dst_slot, tl.load(lane + 3), lane + 8)
    word = tl.load(lane + 15)
    if word == 8:
        _copy_row(src, dst, lane, tl.int64, BLOCK)
    elif word == 4:
        _copy_row(src, dst, lane, tl.int32, BLOCK)
    elif word == 2:
        _copy_row(src, dst, lane, tl.int16, BLOCK)
    else:
        _copy_row(src, dst, lane, tl.int8, BLOCK)


@triton.jit  # type: ignore[untyped-decorator]
def _row_offset(slot: Any, page_size: Any, steps: Any) -> Any:  # pragma: no cover # noqa: ANN401
    # Bytes, in int64: slots and steps come from int64 tables, so every product of them is int64.
    page = slot // page_size
    return page * tl.load(steps) + (slot - page * page_size) * tl.load(steps + 1)


@triton.jit  # type: ignore[untyped-decorator]
def _copy_row(  # pragma: no cover - compiled
    src: Any,  # noqa: ANN401 - int64 address
    dst: Any,  # noqa: ANN401
    lane: Any,  # noqa: ANN401
    WORD: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    src_head = tl.load(lane + 6)
    src_dim = tl.load(lane + 7)
    dst_head = tl.load(lane + 10)
    dst_dim = tl.load(lane + 11)
    dim = tl.load(lane + 12).to(tl.int32)  # 32 bits: a 64-bit division per word would cost more
    words = tl.load(lane + 13).to(tl.int32)
    for start in range(0, words, BLOCK):
        word = start + tl.arange(0, BLOCK)
        head = word // dim
        inside = word - head * dim
        take = (src + head * src_head + inside * src_dim).to(tl.pointer_type(WORD))
        put = (dst + head * dst_head + inside * dst_dim).to(tl.pointer_type(WORD))
        tl.store(put, tl.load(take, mask=word < words), mask=word < words)


def bind_triton(src: KVRows, dst: KVRows) -> Move:
    """Bind the mover to one pair of stores; see `TritonMove`."""
    return TritonMove([(src, dst)])


class TritonMove:
    """Move rows of several groups of layers in one launch, without allocation or host sync.

    Unlike the other movers it takes padding: rows whose destination slot is negative stay. Programs
    run in any order, so no row's destination may be another row's source.

    Args:
        pairs: source and destination of each group; heads, dim, dtype, page size and strides may
            differ from group to group.

    Raises:
        InputError: no pairs, several devices, or a device this process's kernel cannot reach.
        TensorMismatchError: source and destination rows of a pair differ.
    """

    def __init__(self, pairs: Sequence[tuple[KVRows, KVRows]]) -> None:
        for src, dst in pairs:
            check_pair(src, dst)
        self._device = _check_device(pairs)
        self._pairs = list(pairs)  # keeps the memory behind the table's pointers alive
        self._groups = len(pairs)
        table = lane_table(pairs)
        self._lanes = len(table)
        longest = max((lane[13] for lane in table), default=1)
        self._block = min(MAX_BLOCK, triton.next_power_of_2(longest))
        self._warps = max(1, min(4, self._block // 64))
        self._table = torch.tensor(table, dtype=torch.int64, device=self._device)

    def __call__(self, src_slots: Tensor, dst_slots: Tensor) -> None:
        """Move rows.

        Args:
            src_slots: int64 ``[rows]`` for all groups or ``[groups, rows]``, dense in the last dim;
                never negative where the destination is not.
            dst_slots: the same; negative for rows that stay. Slots are not checked for range here.

        Raises:
            InputError: wrong shape, dtype, strides or device.
        """
        src_step = self._group_step("src_slots", src_slots)
        dst_step = self._group_step("dst_slots", dst_slots)
        rows = dst_slots.shape[-1]
        if src_slots.shape[-1] != rows:
            raise InputError(f"{src_slots.shape[-1]} source slots for {rows} destination slots")
        if rows and self._lanes:
            move_rows_kernel[(rows, self._lanes)](
                *(self._table, src_slots, dst_slots, src_step, dst_step),
                FIELDS=FIELDS,
                BLOCK=self._block,
                num_warps=self._warps,
            )

    def _group_step(self, name: str, slots: Tensor) -> int:
        shape = tuple(slots.shape)
        if slots.dtype != torch.int64 or slots.device != self._device:
            raise InputError(
                f"{name} must be int64 on {self._device}, got {slots.dtype} on {slots.device}"
            )
        if slots.ndim not in {1, 2} or (slots.ndim == 2 and shape[0] != self._groups):
            raise InputError(f"{name} must be [rows] or [{self._groups}, rows], got {shape}")
        if shape[-1] > 1 and slots.stride(-1) != 1:
            raise InputError(f"{name} must be dense, got strides {slots.stride()}: .contiguous()")
        return slots.stride(0) if slots.ndim == 2 else 0


def lane_table(pairs: Sequence[tuple[KVRows, KVRows]]) -> list[list[int]]:
    """Build one row per (group, layer, K or V) whose rows are not empty.

    Fields: source and destination address (0, 1), page sizes in rows (2, 3), source steps of page,
    row, head, dim in bytes (4 to 7), destination steps (8 to 11), words per head (12), words per row
    (13), group (14), bytes per word (15).
    """
    lanes = []
    for group, (src, dst) in enumerate(pairs):
        for a, b in ((src.key, dst.key), (src.value, dst.value)):
            word = widest_word(a, b)
            dim = a.shape[4] * a.element_size() // word
            words = a.shape[3] * dim
            tail = [*_byte_steps(a, word), *_byte_steps(b, word), dim, words, group, word]
            lanes += [
                [a[layer].data_ptr(), b[layer].data_ptr(), a.shape[2], b.shape[2], *tail]
                for layer in range(a.shape[0] if words else 0)
            ]
    return lanes


def widest_word(src: Tensor, dst: Tensor) -> int:
    """Bytes of the widest integer that rows of both views are made of, aligned wherever they lie."""
    return next(word for word in WORDS if _fits(src, word) and _fits(dst, word))


def _fits(view: Tensor, word: int) -> bool:
    size, dim = view.element_size(), view.shape[4]
    if dim > 1 and view.stride(4) != 1 and word != size:
        return False
    outer = zip(view.shape[:4], view.stride()[:4], strict=True)
    steps = [step * size for count, step in outer if count > 1]
    return all(n % word == 0 for n in (view.data_ptr(), dim * size, *steps))


def _byte_steps(view: Tensor, word: int) -> list[int]:
    """Steps of page, row, head and of the words of a head, in bytes."""
    size = view.element_size()
    page, row, head, dim = (step * size for step in view.stride()[1:])
    return [page, row, head, dim if word == size else word]


def _check_device(pairs: Sequence[tuple[KVRows, KVRows]]) -> torch.device:
    devices = {rows.device for pair in pairs for rows in pair}
    if len(devices) != 1:
        raise InputError(
            f"mover 'triton' needs stores on one device, got {sorted(map(str, devices))}"
        )
    device = devices.pop()
    interpreted = not isinstance(move_rows_kernel, JITFunction)
    if interpreted and device.type != "cpu":
        raise InputError(
            f"Triton's interpreter reads host memory, these rows are on {device}: unset "
            "TRITON_INTERPRET, or use mover 'torch'"
        )
    if not interpreted and device.type == "cpu":
        raise InputError(
            "mover 'triton' moves rows on a GPU, these are on the CPU: use mover 'torch' or 'numba', "
            "or set TRITON_INTERPRET=1 before triton is imported (slow, for tests)"
        )
    return device
