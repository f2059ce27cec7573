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

from nwor.store import device_state as at
from nwor.store import overlay_loops
from nwor.store.triton_kernel import copy_row

ENTRY, SAVED, PAGES, NOTES = map(tl.constexpr, (at.ENTRY, at.SAVED, at.PAGES, at.NOTES))
GROUP, TALLIES = map(tl.constexpr, (at.GROUP, at.TALLIES))
ROW, LEASE, FIRST = map(tl.constexpr, (at.ROW, at.LEASE, at.FIRST))
LENGTH, DRAFTS, GENERATION = map(tl.constexpr, (at.LENGTH, at.DRAFTS, at.GENERATION))
START, TOKEN, OPEN = map(tl.constexpr, (at.START, at.TOKEN, at.OPEN))
FIRST_PAGE, LAST_PAGE = map(tl.constexpr, (at.FIRST_PAGE, at.LAST_PAGE))
FIRST_HOME, LAST_HOME = map(tl.constexpr, (at.FIRST_HOME, at.LAST_HOME))
STAND_IN, SHOWN, NEED = map(tl.constexpr, (at.STAND_IN, at.SHOWN, at.NEED))
HELD, BEHIND, FILLED, NOTED = map(tl.constexpr, (at.HELD, at.BEHIND, at.FILLED, at.NOTED))
TABLE, STRIDE, LINES = map(tl.constexpr, (at.TABLE, at.STRIDE, at.LINES))
COLUMNS, SLOTS, TOKENS, SIZE = map(tl.constexpr, (at.COLUMNS, at.SLOTS, at.TOKENS, at.SIZE))

OUTSIDE_TABLE = tl.constexpr(overlay_loops.OUTSIDE_TABLE)
OUTSIDE_SLOTS = tl.constexpr(overlay_loops.OUTSIDE_SLOTS)
MAPPING_DIFFERS = tl.constexpr(overlay_loops.MAPPING_DIFFERS)
NOT_DURABLE = tl.constexpr(overlay_loops.NOT_DURABLE)
LENGTH_DIFFERS = tl.constexpr(at.LENGTH_DIFFERS)

WINDOWS, CANCELLED_WINDOWS = map(
    tl.constexpr, (0 + at.Tally.WINDOWS, 0 + at.Tally.CANCELLED_WINDOWS)
)
T_STAGED, T_COMMITTED = map(tl.constexpr, (0 + at.Tally.STAGED, 0 + at.Tally.COMMITTED))
T_REJECTED, T_CANCELLED = map(tl.constexpr, (0 + at.Tally.REJECTED, 0 + at.Tally.CANCELLED))
T_BONUS, T_FLUSHED = map(tl.constexpr, (0 + at.Tally.BONUS, 0 + at.Tally.FLUSHED))
ROWS_STAGED, ROWS_WRITTEN = map(tl.constexpr, (0 + at.Tally.ROWS_STAGED, 0 + at.Tally.ROWS_WRITTEN))
ROWS_CANCELLED, ROWS_FILLED = map(
    tl.constexpr, (0 + at.Tally.ROWS_CANCELLED, 0 + at.Tally.ROWS_FILLED)
)
BAD_COUNT, REFUSED = map(tl.constexpr, (0 + at.Tally.BAD_COUNT, 0 + at.Tally.REFUSED))


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
    entry = window + request * ENTRY
    row = tl.load(entry + ROW).to(tl.int64)
    lease = tl.load(entry + LEASE).to(tl.int64)
    first = tl.load(entry + FIRST).to(tl.int64)
    length = tl.load(entry + LENGTH)
    drafts = tl.load(entry + DRAFTS).to(tl.int64)
    generation = tl.load(entry + GENERATION).to(tl.int64)

    token = tl.load(query_start_loc + row).to(tl.int64)
    end = tl.load(query_start_loc + row + 1).to(tl.int64)
    known = (token >= 0) & (end - token == length) & (end <= num_tokens)
    start = tl.load(positions + token, mask=known, other=-1)
    known = known & (start >= 0)
    start = tl.where(known, start, 0)

    group = tl.arange(0, GROUP_BLOCK).to(tl.int64)
    real = group < GROUPS
    about = groups + group * GROUP
    size = tl.load(about + SIZE, mask=real, other=1)
    table = tl.load(about + TABLE, mask=real, other=0)
    table += row * tl.load(about + STRIDE, mask=real, other=0) * 4
    slots = tl.load(about + SLOTS, mask=real, other=0) + token * 8
    page0, page1 = start // size, (start + length - 1) // size
    entry0 = (table + page0 * 4).to(tl.pointer_type(tl.int32))
    entry1 = (table + page1 * 4).to(tl.pointer_type(tl.int32))

    lines = tl.where(known, tl.load(about + LINES, mask=real, other=0), 0)
    columns = tl.load(about + COLUMNS, mask=real, other=0)
    in_table = (row < lines) & (page1 < columns)
    in_slots = token + length <= tl.load(about + TOKENS, mask=real, other=0)
    home0 = tl.load(entry0, mask=real & in_table, other=-1).to(tl.int64)
    home1 = tl.load(entry1, mask=real & in_table, other=-1).to(tl.int64)
    durable = (home0 >= 0) & (home0 < first_page) & (home1 >= 0) & (home1 < first_page)
    readable = real & in_table & in_slots & durable
    mapped = real
    for depth in range(0, length, BLOCK):
        inside, there = _window_rows(slots, readable, depth, length, BLOCK)
        slot = _slots(start, depth, size, page0, home0, home1, BLOCK)
        found = tl.load(there, mask=inside, other=0)
        mapped = mapped & (tl.max((inside & (found != slot)).to(tl.int32), axis=1) == 0)

    reason = tl.where(_any(real & (mapped == 0)), MAPPING_DIFFERS, 0)
    reason = tl.where(_any(real & (durable == 0)), NOT_DURABLE, reason)
    reason = tl.where(_any(real & (in_slots == 0)), OUTSIDE_SLOTS, reason)
    reason = tl.where(_any(real & (in_table == 0)), OUTSIDE_TABLE, reason)
    reason = tl.where(known, reason, LENGTH_DIFFERS)
    ok = group < tl.where(reason == 0, GROUPS, 0)

    # What the first staging page shows already; see `overlay_loops.rows_shown`.
    stand_in0 = first_page + 2 * (lease * GROUPS + group) + page0 % 2
    stand_in1 = first_page + 2 * (lease * GROUPS + group) + page1 % 2
    note0 = notes + ((lease * GROUPS + group) * 2 + page0 % 2) * NOTES
    note1 = notes + ((lease * GROUPS + group) * 2 + page1 % 2) * NOTES
    need = start - page0 * size
    shown = tl.load(note0 + FILLED, mask=ok, other=0)
    trusted = (tl.load(note0 + HELD, mask=ok, other=-1) == page0) & (shown <= need)
    trusted = trusted & (tl.load(note0 + BEHIND, mask=ok, other=-1) == home0)
    trusted = trusted & (tl.load(note0 + NOTED, mask=ok, other=-1) == generation)
    shown = tl.where(trusted, shown, 0)
    tally = tallies + request * TALLIES
    refused, flushed = tl.load(tally + REFUSED + reason), tl.load(tally + T_FLUSHED)
    filled = tl.load(tally + ROWS_FILLED)
    tl.debug_barrier()

    tl.store(entry1, stand_in1.to(tl.int32), mask=ok)
    tl.store(entry0, stand_in0.to(tl.int32), mask=ok)
    for depth in range(0, length, BLOCK):
        inside, there = _window_rows(slots, ok, depth, length, BLOCK)
        slot = _slots(start, depth, size, page0, stand_in0, stand_in1, BLOCK)
        rows = (group * row_step + first + depth)[:, None] + tl.arange(0, BLOCK)[None, :]
        tl.store(there, slot, mask=inside)
        tl.store(staged + rows, slot, mask=inside)
    _note(note1, page1, home1, generation, start, size, ok)
    _note(note0, page0, home0, generation, start, size, ok)
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
            line, columns = _newcomer(window, groups, requests + place // GROUPS, group)
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
            line, columns = _newcomer(window, groups, requests + place // GROUPS, group)
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
    entry = window + request * ENTRY
    row = tl.load(entry + ROW).to(tl.int64)
    lease = tl.load(entry + LEASE).to(tl.int64)
    first = tl.load(entry + FIRST).to(tl.int64)
    length = tl.load(entry + LENGTH)
    drafts = tl.load(entry + DRAFTS)
    generation = tl.load(entry + GENERATION).to(tl.int64)
    hold = saved + request * SAVED
    start = tl.load(hold + START)
    token = tl.load(hold + TOKEN)
    fresh = tl.load(hold + OPEN)
    if fresh == 0:
        return
    staged = start >= 0
    kept = length * 0
    rejected = length * 0
    if COMMIT:
        rejected = tl.load(num_rejected + row)
        kept = length - tl.minimum(tl.maximum(rejected, 0), drafts)
        kept = tl.where(staged, kept, 0)

    group = tl.arange(0, GROUP_BLOCK).to(tl.int64)
    real = group < GROUPS
    about = groups + group * GROUP
    size = tl.load(about + SIZE, mask=real, other=1)
    table = tl.load(about + TABLE, mask=real, other=0)
    table += row * tl.load(about + STRIDE, mask=real, other=0) * 4
    slots = tl.load(about + SLOTS, mask=real, other=0) + token * 8
    keep = pages + (request * GROUPS + group) * PAGES
    page0 = tl.load(keep + FIRST_PAGE, mask=real, other=0)
    page1 = tl.load(keep + LAST_PAGE, mask=real, other=0)
    home0 = tl.load(keep + FIRST_HOME, mask=real, other=0)
    home1 = tl.load(keep + LAST_HOME, mask=real, other=0)
    ok = group < tl.where(staged, GROUPS, 0)

    tl.store((table + page1 * 4).to(tl.pointer_type(tl.int32)), home1.to(tl.int32), mask=ok)
    tl.store((table + page0 * 4).to(tl.pointer_type(tl.int32)), home0.to(tl.int32), mask=ok)
    for depth in range(0, length, BLOCK):
        inside, there = _window_rows(slots, ok, depth, length, BLOCK)
        slot = _slots(start, depth, size, page0, home0, home1, BLOCK)
        tl.store(there, slot, mask=inside)
        if COMMIT:
            offset = depth + tl.arange(0, BLOCK)[None, :]
            rows = (group * row_step + first)[:, None] + offset
            inside, there = _window_rows(slots, real, depth, length, BLOCK)
            tl.store(masked + rows, tl.where(offset < kept, slot, -1), mask=inside)
    if COMMIT:
        note0 = notes + ((lease * GROUPS + group) * 2 + page0 % 2) * NOTES
        note1 = notes + ((lease * GROUPS + group) * 2 + page1 % 2) * NOTES
        _note(note1, page1, home1, generation, start + kept, size, ok)
        _note(note0, page0, home0, generation, start + kept, size, ok)
    cover = under + group * first_page
    tl.store(cover + home0, home0.to(tl.int32) * 0 - 1, mask=ok)
    tl.store(cover + home1, home1.to(tl.int32) * 0 - 1, mask=ok)

    count = tl.arange(0, TALLIES)
    here = staged.to(tl.int32)
    more = tl.where(count == WINDOWS, (request == 0).to(tl.int32), 0)
    more += tl.where(count == T_STAGED, here * drafts, 0)
    more += tl.where(count == ROWS_STAGED, here * length, 0)
    if COMMIT:
        lost = length - kept
        more += tl.where(count == T_COMMITTED, here * (drafts - lost), 0)
        more += tl.where(count == T_REJECTED, here * lost, 0)
        more += tl.where(count == T_BONUS, here, 0)
        more += tl.where(count == ROWS_WRITTEN, here * kept, 0)
        more += tl.where(count == BAD_COUNT, here * (rejected != lost).to(tl.int32), 0)
    else:
        more += tl.where(count == CANCELLED_WINDOWS, (request == 0).to(tl.int32), 0)
        more += tl.where(count == T_CANCELLED, here * drafts, 0)
        more += tl.where(count == ROWS_CANCELLED, here * length, 0)
    tally = tallies + request * TALLIES + count
    before = tl.load(tally)
    tl.debug_barrier()
    tl.store(tally, before + more)
    tl.store(hold + OPEN, 0)


@triton.jit
def _newcomer(window, groups, place, group):  # pragma: no cover - compiled
    row = tl.load(window + place * ENTRY + ROW).to(tl.int64)
    about = groups + group * GROUP
    line = tl.load(about + TABLE) + row * tl.load(about + STRIDE) * 4
    return line.to(tl.pointer_type(tl.int32)), tl.load(about + COLUMNS).to(tl.int32)


@triton.jit
def _window_rows(slots, use, depth, length, BLOCK: tl.constexpr):  # pragma: no cover - compiled
    # [groups, rows]: which rows there are, and where the slot mappings have them.
    offset = depth + tl.arange(0, BLOCK)
    there = (slots[:, None] + offset.to(tl.int64)[None, :] * 8).to(tl.pointer_type(tl.int64))
    return use[:, None] & (offset < length)[None, :], there


@triton.jit
def _slots(start, depth, size, page0, first, last, BLOCK: tl.constexpr):  # pragma: no cover
    # [groups, rows]: slots of a window whose pages are `first` and `last`.
    position = start + depth + tl.arange(0, BLOCK).to(tl.int64)[None, :]
    page = position // size[:, None]
    named = tl.where(page == page0[:, None], first[:, None], last[:, None])
    return named * size[:, None] + position - page * size[:, None]


@triton.jit
def _note(note, page, home, generation, watermark, size, ok):  # pragma: no cover - compiled
    # See `overlay_loops.note`.
    tl.store(note + HELD, page, mask=ok)
    tl.store(note + BEHIND, home, mask=ok)
    filled = tl.minimum(tl.maximum(watermark - page * size, 0), size)
    tl.store(note + FILLED, filled, mask=ok)
    tl.store(note + NOTED, generation, mask=ok)


@triton.jit
def _any(flags):  # pragma: no cover - compiled
    return tl.max(flags.to(tl.int32), axis=0) > 0
