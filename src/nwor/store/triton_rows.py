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

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from nwor.errors import InputError
from nwor.layout import KVRows
from nwor.store.moves import Move, check_pair
from nwor.store.triton_kernel import move_rows_kernel

FIELDS = 16
MAX_BLOCK = 1024
WORDS = (8, 4, 2, 1)


def bind_triton(src: KVRows, dst: KVRows) -> Move:
    """Bind the mover to one pair of stores; see `TritonMove`."""
    return TritonMove([(src, dst)])


class TritonMove:
    """Move rows of several groups of layers in one launch, without allocation or host sync.

    Unlike the other movers it takes padding: rows whose destination slot is negative stay. Programs
    run in any order, so no row's destination may be another row's source.

    Args:
        pairs: source and destination; heads, dim, dtype, page size and strides may differ from pair
            to pair.
        groups: whose slots each pair takes; one group for each pair if not given.

    Attributes:
        table: int64 ``[lanes, FIELDS]``, see `lane_table`.
        block: words per step of the loop over a row.
        warps: warps per program.

    Raises:
        InputError: no pairs, several devices, or a device this process's kernel cannot reach.
        TensorMismatchError: source and destination rows of a pair differ.
    """

    def __init__(
        self, pairs: Sequence[tuple[KVRows, KVRows]], groups: Sequence[int] | None = None
    ) -> None:
        for src, dst in pairs:
            check_pair(src, dst)
        self._device = check_device(pairs)
        self._pairs = list(pairs)  # keeps the memory behind the table's pointers alive
        groups = range(len(pairs)) if groups is None else groups
        self._groups = max(groups) + 1
        table = lane_table(pairs, groups)
        longest = max((lane[13] for lane in table), default=1)
        self.block = min(MAX_BLOCK, triton.next_power_of_2(longest))
        self.warps = max(1, min(4, self.block // 64))
        self.table = torch.tensor(table, dtype=torch.int64, device=self._device)

    @property
    def num_lanes(self) -> int:
        """Lanes: K and V of all layers, as far as their rows are not empty."""
        return self.table.shape[0]

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
        self.launch(src_slots, dst_slots, rows, src_step, dst_step)

    def launch(
        self, src_slots: Tensor, dst_slots: Tensor, rows: int, src_step: int, dst_step: int
    ) -> None:
        """Move the first `rows` of two slot lists, unchecked; steps lead from group to group."""
        if rows and self.num_lanes:
            move_rows_kernel[(rows, self.num_lanes)](
                *(self.table, src_slots, dst_slots, src_step, dst_step),
                FIELDS=FIELDS,
                BLOCK=self.block,
                num_warps=self.warps,
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


def lane_table(pairs: Sequence[tuple[KVRows, KVRows]], groups: Sequence[int]) -> list[list[int]]:
    """Build one row per (pair, layer, K or V) whose rows are not empty.

    Fields: source and destination address (0, 1), page sizes in rows (2, 3), source steps of page,
    row, head, dim in bytes (4 to 7), destination steps (8 to 11), words per head (12), words per row
    (13), group (14), bytes per word (15).
    """
    lanes = []
    for group, (src, dst) in zip(groups, pairs, strict=True):
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


def check_device(pairs: Sequence[tuple[KVRows, KVRows]]) -> torch.device:
    """Return the one device the rows are on, if this process's kernels can reach it.

    Raises:
        InputError: several devices, or one that kernels cannot reach.
    """
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
