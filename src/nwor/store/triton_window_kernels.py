"""Kernels of the device overlay's windows. No annotations: the compiler would read them.

`nwor.store.overlay_loops` is the specification; names are the same where the thing is the same.
Buffers and their fields are described in `nwor.store.device_state`. A request is one program that
handles all cache groups at once, one per lane of a vector: a request is staged in all groups or in
none. Programs write only what belongs to their own request, so none waits for another.

Within a program, what is read at an address that the program writes later is separated from the write
by a barrier: lanes of a small vector are held by several threads.

A condition of the request alone is not combined with a vector of them by ``&``: the interpreter gets
the dtype wrong. It goes into a bound instead.

Offsets are int64: whatever is multiplied comes from an int64 table or is cast first.
"""

import triton
import triton.language as tl

from nwor.store.triton_kernel import copy_row
from nwor.store.triton_kernel_parts import (
    BEHIND,
    COLUMNS,
    FIRST_HOME,
    FIRST_PAGE,
    GROUP,
    LAST_HOME,
    LAST_PAGE,
    LENGTH_DIFFERS,
    LINES,
    MAPPING_DIFFERS,
    NEED,
    NOT_DURABLE,
    NOTES,
    OPEN,
    OUTSIDE_SLOTS,
    OUTSIDE_TABLE,
    PAGES,
    REFUSED,
    ROWS_FILLED,
    SAVED,
    SHOWN,
    STAND_IN,
    START,
    T_FLUSHED,
    TALLIES,
    TOKEN,
    TOKENS,
    any_of,
    count_window,
    int32,
    is_mapped,
    list_rows,
    note_page,
    point_tables,
    read_engine,
    read_entry,
    read_newcomer,
    rows_shown,
)


@triton.jit(
    do_not_specialize=["requests", "first_page", "num_tokens", "row_step"],
    do_not_specialize_on_alignment=["query_start_loc", "positions"],
)
def begin_kernel(  # pragma: no cover - compiled
    window,
    groups,
    query_start_loc,  # int32 [batch rows + 1]
    positions,  # int64 [tokens]
    saved,
    pages,
    staged,
    notes,
    under,
    tallies,
    requests,  # staged ones
    first_page,  # of the staging pages
    num_tokens,  # length of `positions`
    row_step,  # stride of the groups in `staged`
    GROUPS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,  # power of 2
    BLOCK: tl.constexpr,  # rows of a window per step of the loop
):
    """Check one request, lay its staging pages over its durable ones, note what is missing."""
    request = tl.program_id(0)
    if request >= requests:
        return
    row, lease, first, length, drafts, generation = read_entry(window, request)
    token = tl.load(query_start_loc + row).to(tl.int64)
    end = tl.load(query_start_loc + row + 1).to(tl.int64)
    known = (token >= 0) & (end - token == length) & (end <= num_tokens)
    start = tl.load(positions + token, mask=known, other=-1)
    known = known & (start >= 0)
    start = tl.where(known, start, 0)

    group, real, size, table, slots = read_engine(groups, row, token, GROUPS, GROUP_BLOCK)
    page0, page1 = start // size, (start + length - 1) // size
    about = groups + group * GROUP
    lines = tl.where(known, tl.load(about + LINES, mask=real, other=0), 0)
    in_table = (row < lines) & (page1 < tl.load(about + COLUMNS, mask=real, other=0))
    in_slots = token + length <= tl.load(about + TOKENS, mask=real, other=0)
    home0 = tl.load(int32(table + page0 * 4), mask=real & in_table, other=-1).to(tl.int64)
    home1 = tl.load(int32(table + page1 * 4), mask=real & in_table, other=-1).to(tl.int64)
    durable = (home0 >= 0) & (home0 < first_page) & (home1 >= 0) & (home1 < first_page)
    readable = real & in_table & in_slots & durable
    mapped = is_mapped(slots, start, length, size, page0, home0, home1, readable, BLOCK)
    reason = tl.where(any_of(real & (mapped == 0)), MAPPING_DIFFERS, 0)
    reason = tl.where(any_of(real & (durable == 0)), NOT_DURABLE, reason)
    reason = tl.where(any_of(real & (in_slots == 0)), OUTSIDE_SLOTS, reason)
    reason = tl.where(any_of(real & (in_table == 0)), OUTSIDE_TABLE, reason)
    reason = tl.where(known, reason, LENGTH_DIFFERS)
    ok = group < tl.where(reason == 0, GROUPS, 0)

    even = first_page + 2 * (lease * GROUPS + group)
    stand_in0, stand_in1 = even + page0 % 2, even + page1 % 2
    note0 = notes + (stand_in0 - first_page) * NOTES
    note1 = notes + (stand_in1 - first_page) * NOTES
    need = start - page0 * size
    shown = rows_shown(note0, page0, home0, need, generation, ok)
    tally = tallies + request * TALLIES
    refused, flushed = tl.load(tally + REFUSED + reason), tl.load(tally + T_FLUSHED)
    filled = tl.load(tally + ROWS_FILLED)
    tl.debug_barrier()

    point_tables(table, slots, start, length, size, page0, page1, stand_in0, stand_in1, ok, BLOCK)
    rows = staged + group * row_step + first
    list_rows(rows, start, length, length, size, page0, stand_in0, stand_in1, ok, BLOCK)
    note_page(note1, page1, home1, generation, start, size, ok)
    note_page(note0, page0, home0, generation, start, size, ok)
    cover = under + group * first_page
    tl.store(cover + home0, stand_in0.to(tl.int32), mask=ok)
    tl.store(cover + home1, stand_in1.to(tl.int32), mask=ok)

    keep = pages + (request * GROUPS + group) * PAGES
    tl.store(keep + FIRST_PAGE, page0, mask=real)
    tl.store(keep + LAST_PAGE, page1, mask=real)
    tl.store(keep + FIRST_HOME, home0, mask=real)
    tl.store(keep + LAST_HOME, home1, mask=real)
    tl.store(keep + STAND_IN, stand_in0, mask=real)
    tl.store(keep + SHOWN, shown, mask=real)
    tl.store(keep + NEED, tl.where(ok, need, 0), mask=real)
    hold = saved + request * SAVED
    tl.store(hold + START, tl.where(reason == 0, start, -1))
    tl.store(hold + TOKEN, token)
    tl.store(hold + OPEN, 1)
    tl.store(tally + REFUSED + reason, refused + (reason != 0))
    tl.store(tally + T_FLUSHED, flushed + tl.where(reason == 0, 0, drafts))
    tl.store(tally + ROWS_FILLED, filled + tl.sum(tl.where(ok, need - shown, 0), axis=0))


@triton.jit(do_not_specialize=["requests", "newcomers", "first_page", "chunks"])
def fill_kernel(  # pragma: no cover - compiled
    lanes,  # of the row mover, see `nwor.store.triton_rows.lane_table`
    window,
    groups,
    pages,
    under,
    requests,
    newcomers,
    first_page,
    chunks,  # programs that share the rows of one page
    GROUPS: tl.constexpr,
    FIELDS: tl.constexpr,  # of a lane
    BLOCK: tl.constexpr,  # words per step of the loop over a row
    ENTRIES: tl.constexpr,  # table entries per step of the loop over a newcomer's pages
):
    """Copy the durable rows that one staging page lacks, in one lane; show newcomers the pages."""
    part = tl.program_id(0)
    number = tl.program_id(1)
    if part < requests * chunks:
        lane = lanes + number * FIELDS
        group = tl.load(lane + 14)
        request = part // chunks
        page = pages + (request * GROUPS + group) * PAGES
        shown = tl.load(page + SHOWN)
        need = tl.load(page + NEED)
        if shown < need:
            size = tl.load(lane + 2)
            source = tl.load(page + FIRST_HOME) * size
            target = tl.load(page + STAND_IN) * size
            begin = shown.to(tl.int32) + part - request * chunks
            for row in range(begin, need.to(tl.int32), chunks):
                copy_row(lane, source + row, target + row, BLOCK)
    elif number == 0:
        place = part - requests * chunks
        if place < newcomers * GROUPS:
            group = (place % GROUPS).to(tl.int64)
            line, columns = read_newcomer(window, groups, requests + place // GROUPS, group)
            for column in range(0, columns, ENTRIES):
                column_ = column + tl.arange(0, ENTRIES)
                page = tl.load(line + column_, mask=column_ < columns, other=-1).to(tl.int64)
                durable = (page >= 0) & (page < first_page)
                cover = tl.load(under + group * first_page + page, mask=durable, other=-1)
                tl.store(line + column_, cover, mask=cover >= 0)


@triton.jit(
    do_not_specialize=["requests", "newcomers", "first_page", "end_page", "row_step"],
    do_not_specialize_on_alignment=["num_rejected"],
)
def close_kernel(  # pragma: no cover - compiled
    window,
    groups,
    num_rejected,  # int32 [batch rows]; not read unless COMMIT
    saved,
    pages,
    masked,
    notes,
    under,
    tallies,
    requests,
    newcomers,
    first_page,
    end_page,  # behind the last staging page
    row_step,
    COMMIT: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Undo the edits of one request, or of one newcomer in one group; plan the way home; count."""
    request = tl.program_id(0)
    if request < requests:
        _close_request(
            window,
            groups,
            num_rejected,
            saved,
            pages,
            masked,
            notes,
            under,
            tallies,
            request,
            first_page,
            row_step,
            COMMIT,
            GROUPS,
            GROUP_BLOCK,
            BLOCK,
        )
    else:
        place = request - requests
        if place < newcomers * GROUPS:
            group = (place % GROUPS).to(tl.int64)
            line, columns = read_newcomer(window, groups, requests + place // GROUPS, group)
            for column in range(0, columns, ENTRIES):
                column_ = column + tl.arange(0, ENTRIES)
                page = tl.load(line + column_, mask=column_ < columns, other=-1).to(tl.int64)
                staging = (page >= first_page) & (page < end_page)
                # Staging pages and notes are numbered alike: lease, group, parity.
                note = notes + (page - first_page) * NOTES
                home = tl.load(note + BEHIND, mask=staging, other=-1)
                tl.store(line + column_, home.to(tl.int32), mask=staging)


@triton.jit
def _close_request(  # pragma: no cover - compiled
    window,
    groups,
    num_rejected,
    saved,
    pages,
    masked,
    notes,
    under,
    tallies,
    request,
    first_page,
    row_step,
    COMMIT: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, lease, first, length, drafts, generation = read_entry(window, request)
    hold = saved + request * SAVED
    start = tl.load(hold + START)
    token = tl.load(hold + TOKEN)
    if tl.load(hold + OPEN) == 0:
        return
    staged = start >= 0
    kept = length * 0
    rejected = length * 0
    if COMMIT:
        rejected = tl.load(num_rejected + row)
        kept = length - tl.minimum(tl.maximum(rejected, 0), drafts)
        kept = tl.where(staged, kept, 0)

    group, real, size, table, slots = read_engine(groups, row, token, GROUPS, GROUP_BLOCK)
    keep = pages + (request * GROUPS + group) * PAGES
    page0 = tl.load(keep + FIRST_PAGE, mask=real, other=0)
    page1 = tl.load(keep + LAST_PAGE, mask=real, other=0)
    home0 = tl.load(keep + FIRST_HOME, mask=real, other=0)
    home1 = tl.load(keep + LAST_HOME, mask=real, other=0)
    ok = group < tl.where(staged, GROUPS, 0)
    tally = tallies + request * TALLIES + tl.arange(0, TALLIES)
    counted = tl.load(tally)
    tl.debug_barrier()

    point_tables(table, slots, start, length, size, page0, page1, home0, home1, ok, BLOCK)
    if COMMIT:
        rows = masked + group * row_step + first
        list_rows(rows, start, length, kept, size, page0, home0, home1, real, BLOCK)
        note = notes + (lease * GROUPS + group) * 2 * NOTES
        note_page(note + page1 % 2 * NOTES, page1, home1, generation, start + kept, size, ok)
        note_page(note + page0 % 2 * NOTES, page0, home0, generation, start + kept, size, ok)
    cover = under + group * first_page
    tl.store(cover + home0, home0.to(tl.int32) * 0 - 1, mask=ok)
    tl.store(cover + home1, home1.to(tl.int32) * 0 - 1, mask=ok)
    more = count_window(request == 0, staged, length, drafts, kept, rejected, COMMIT)
    tl.store(tally, counted + more)
    tl.store(hold + OPEN, 0)
