"""What the kernels of `nwor.store.triton_window_kernels` are made of, and names of all fields.

Vectors are per cache group, ``[groups]``, unless said otherwise; addresses are int64 until they are
used.
"""

import triton
import triton.language as tl

from nwor.store import device_state as at
from nwor.store import overlay_loops

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


@triton.jit
def count_window(
    first, staged, length, drafts, kept, rejected, COMMIT: tl.constexpr
):  # pragma: no cover
    """Return what a closed request adds to each counter; the first one counts the window."""
    count = tl.arange(0, TALLIES)
    one, here = first.to(tl.int32), staged.to(tl.int32)
    more = tl.where(count == WINDOWS, one, 0)
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
        more += tl.where(count == CANCELLED_WINDOWS, one, 0)
        more += tl.where(count == T_CANCELLED, here * drafts, 0)
        more += tl.where(count == ROWS_CANCELLED, here * length, 0)
    return more


@triton.jit
def read_entry(window, request):  # pragma: no cover - compiled
    """Return a request's row, lease, first row, rows, drafts and generation."""
    entry = window + request * ENTRY
    row = tl.load(entry + ROW).to(tl.int64)
    lease = tl.load(entry + LEASE).to(tl.int64)
    first = tl.load(entry + FIRST).to(tl.int64)
    generation = tl.load(entry + GENERATION).to(tl.int64)
    return row, lease, first, tl.load(entry + LENGTH), tl.load(entry + DRAFTS), generation


@triton.jit
def read_engine(  # pragma: no cover - compiled
    groups, row, token, GROUPS: tl.constexpr, GROUP_BLOCK: tl.constexpr
):
    """Return group, whether there is one, page size, where the request's entries and slots begin."""
    group = tl.arange(0, GROUP_BLOCK).to(tl.int64)
    real = group < GROUPS
    about = groups + group * GROUP
    size = tl.load(about + SIZE, mask=real, other=1)
    table = tl.load(about + TABLE, mask=real, other=0)
    table += row * tl.load(about + STRIDE, mask=real, other=0) * 4
    slots = tl.load(about + SLOTS, mask=real, other=0) + token * 8
    return group, real, size, table, slots


@triton.jit
def int32(address):  # pragma: no cover - compiled
    """View addresses as those of table entries."""
    return address.to(tl.pointer_type(tl.int32))


@triton.jit
def read_newcomer(window, groups, place, group):  # pragma: no cover - compiled
    """Return where a newcomer's table entries begin in one group, and how many there are."""
    row = tl.load(window + place * ENTRY + ROW).to(tl.int64)
    about = groups + group * GROUP
    line = tl.load(about + TABLE) + row * tl.load(about + STRIDE) * 4
    return int32(line), tl.load(about + COLUMNS).to(tl.int32)


@triton.jit
def is_mapped(  # pragma: no cover - compiled
    slots, start, length, size, page0, home0, home1, readable, BLOCK: tl.constexpr
):
    """Tell whether the slot mappings say what the block tables say."""
    mapped = readable | (readable == 0)
    for depth in range(0, length, BLOCK):
        inside, there = window_rows(slots, readable, depth, length, BLOCK)
        slot = slots_of(start, depth, size, page0, home0, home1, BLOCK)
        found = tl.load(there, mask=inside, other=0)
        mapped = mapped & (tl.max((inside & (found != slot)).to(tl.int32), axis=1) == 0)
    return mapped


@triton.jit
def point_tables(  # pragma: no cover - compiled
    table, slots, start, length, size, page0, page1, first, last, ok, BLOCK: tl.constexpr
):
    """Let tables and slot mappings name two pages; see `overlay_loops.point`."""
    tl.store(int32(table + page1 * 4), last.to(tl.int32), mask=ok)
    tl.store(int32(table + page0 * 4), first.to(tl.int32), mask=ok)
    for depth in range(0, length, BLOCK):
        inside, there = window_rows(slots, ok, depth, length, BLOCK)
        tl.store(there, slots_of(start, depth, size, page0, first, last, BLOCK), mask=inside)


@triton.jit
def list_rows(  # pragma: no cover - compiled
    rows, start, length, kept, size, page0, first, last, real, BLOCK: tl.constexpr
):
    """List slots of the first `kept` rows, -1 for the others; see `overlay_loops.rows_kept`."""
    for depth in range(0, length, BLOCK):
        offset = depth + tl.arange(0, BLOCK)[None, :]
        slot = slots_of(start, depth, size, page0, first, last, BLOCK)
        slot = tl.where(offset < kept, slot, -1)
        tl.store(rows[:, None] + offset, slot, mask=real[:, None] & (offset < length))


@triton.jit
def window_rows(slots, use, depth, length, BLOCK: tl.constexpr):  # pragma: no cover - compiled
    """Return ``[groups, rows]``: which rows there are, and where the slot mappings have them."""
    offset = depth + tl.arange(0, BLOCK)
    there = (slots[:, None] + offset.to(tl.int64)[None, :] * 8).to(tl.pointer_type(tl.int64))
    return use[:, None] & (offset < length)[None, :], there


@triton.jit
def slots_of(start, depth, size, page0, first, last, BLOCK: tl.constexpr):  # pragma: no cover
    """Return slots ``[groups, rows]`` of a window whose pages are `first` and `last`."""
    position = start + depth + tl.arange(0, BLOCK).to(tl.int64)[None, :]
    page = position // size[:, None]
    named = tl.where(page == page0[:, None], first[:, None], last[:, None])
    return named * size[:, None] + position - page * size[:, None]


@triton.jit
def rows_shown(note, page, home, need, generation, ok):  # pragma: no cover - compiled
    """Return the durable rows that the first staging pages show; see `overlay_loops.rows_shown`."""
    shown = tl.load(note + FILLED, mask=ok, other=0)
    trusted = (tl.load(note + HELD, mask=ok, other=-1) == page) & (shown <= need)
    trusted = trusted & (tl.load(note + BEHIND, mask=ok, other=-1) == home)
    trusted = trusted & (tl.load(note + NOTED, mask=ok, other=-1) == generation)
    return tl.where(trusted, shown, 0)


@triton.jit
def note_page(note, page, home, generation, watermark, size, ok):  # pragma: no cover - compiled
    """Note what a staging page stands for and shows; see `overlay_loops.note`."""
    tl.store(note + HELD, page, mask=ok)
    tl.store(note + BEHIND, home, mask=ok)
    filled = tl.minimum(tl.maximum(watermark - page * size, 0), size)
    tl.store(note + FILLED, filled, mask=ok)
    tl.store(note + NOTED, generation, mask=ok)


@triton.jit
def any_of(flags):  # pragma: no cover - compiled
    """Tell whether a flag of any group is set."""
    return tl.max(flags.to(tl.int32), axis=0) > 0
