"""The kernel of the Triton row mover. No annotations: the compiler would read them.

Rows are copied by `copy_row`, which the kernels of `nwor.store.triton_window_kernels` use too.
"""

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["src_group_step", "dst_group_step"],
    do_not_specialize_on_alignment=["src_slots", "dst_slots"],
)
def move_rows_kernel(  # pragma: no cover - compiled
    table,  # int64 [lanes, FIELDS], see `lane_table`
    src_slots,  # int64 [groups, rows] or [rows]
    dst_slots,  # the same
    src_group_step,  # stride of the groups, 0 for slots that all share
    dst_group_step,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,  # words per step of the loop
):
    """Copy one row of one lane."""
    row = tl.program_id(0)
    lane = table + tl.program_id(1) * FIELDS
    group = tl.load(lane + 14)
    dst_slot = tl.load(dst_slots + group * dst_group_step + row)
    if dst_slot < 0:
        return
    src_slot = tl.load(src_slots + group * src_group_step + row)
    copy_row(lane, src_slot, dst_slot, BLOCK)


@triton.jit
def copy_row(lane, src_slot, dst_slot, BLOCK: tl.constexpr):  # pragma: no cover - compiled
    """Copy one row of one lane, in words as wide as the lane allows."""
    src = tl.load(lane) + _row_offset(src_slot, tl.load(lane + 2), lane + 4)
    dst = tl.load(lane + 1) + _row_offset(dst_slot, tl.load(lane + 3), lane + 8)
    word = tl.load(lane + 15)
    if word == 8:
        _copy_words(src, dst, lane, tl.int64, BLOCK)
    elif word == 4:
        _copy_words(src, dst, lane, tl.int32, BLOCK)
    elif word == 2:
        _copy_words(src, dst, lane, tl.int16, BLOCK)
    else:
        _copy_words(src, dst, lane, tl.int8, BLOCK)


@triton.jit
def _row_offset(slot, page_size, steps):  # pragma: no cover - compiled
    # Bytes, in int64: slots and steps come from int64 tables, so every product of them is int64.
    page = slot // page_size
    return page * tl.load(steps) + (slot - page * page_size) * tl.load(steps + 1)


@triton.jit
def _copy_words(  # pragma: no cover - compiled
    src,  # int64 address
    dst,
    lane,
    WORD: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
