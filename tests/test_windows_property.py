"""I1, I2 and I6 over random windows: every form of commit equals the plain loop, bit for bit."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from nwor import DeferredWriteManager, Layout, TransactionalCache, WindowRows
from nwor.layout import KVRows
from nwor.testing import Snapshot, make_store, random_rows

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8]


@dataclass
class Case:
    """One window: what each row is, worked out row by row as a person would."""

    drafts: list[int]
    accepted: list[int]
    rows: WindowRows
    slots: torch.Tensor
    kept: list[int]


@st.composite
def windows(draw: st.DrawFn, num_slots: int) -> Case:
    drafts = draw(st.lists(st.integers(0, 8), min_size=1, max_size=8))
    accepted = [draw(st.integers(0, k)) for k in drafts]
    kept: list[int] = []
    row = 0
    lens: list[int] = []
    steps = draw(st.booleans())
    for k, a in zip(drafts, accepted, strict=True):
        prefill = draw(st.integers(0, 3)) if steps else 0
        bonus = int(steps)
        kept += range(row, row + prefill + bonus + a)
        lens.append(prefill + bonus + k)
        row += lens[-1]
    padding = draw(st.integers(0, 3)) if steps else 0
    count = row + padding
    rows = WindowRows.step(drafts, lens, count) if steps else WindowRows.drafts(drafts)
    seed = draw(st.integers(0, 2**16))
    picked = torch.randperm(num_slots, generator=torch.Generator().manual_seed(seed))[:count]
    slots = picked.to(draw(st.sampled_from([torch.int32, torch.int64])))
    if not draw(st.booleans()):
        slots[row:] = -1
    for index in draw(st.lists(st.integers(0, max(count - 1, 0)), max_size=2)) if count else []:
        slots[index] = -1
    kept = [index for index in kept if slots[index] >= 0]
    return Case(drafts, accepted, rows, slots, kept)


def chunks_of(draw: st.DrawFn, count: int) -> list[slice]:
    cuts = sorted({0, count, *draw(st.lists(st.integers(0, count), max_size=2))})
    return [slice(a, b) for a, b in pairwise(cuts)]


def expect(store: KVRows, before: Snapshot, case: Case, keys, values) -> None:
    for layer in range(store.num_layers):
        for row in case.kept:
            before.put(layer, int(case.slots[row]), keys[layer][row], values[layer][row])
    assert before.equals(store)


@given(data=st.data())
def test_arena_commits_equal_the_plain_loop(data: st.DataObject) -> None:
    layers, heads = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    dtype, layout = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(list(Layout)))
    page_size = data.draw(st.sampled_from([1, 4, 16]))
    store = make_store(
        layout, layers=layers, pages=128 // page_size, page_size=page_size, heads=heads, dtype=dtype
    )
    mover = data.draw(st.sampled_from(["torch", "numba"]))
    cache = TransactionalCache(
        {"g": store}, max_rows=128, mover=mover, poison=dtype.is_floating_point
    )
    for _ in range(data.draw(st.integers(1, 3))):
        case = data.draw(windows(store.num_slots))
        count = case.rows.num_rows
        keys = [random_rows(count, heads, 8, dtype, i) for i in range(layers)]
        values = [random_rows(count, heads, 8, dtype, i + 50) for i in range(layers)]
        before = Snapshot.of(store)
        written = cache.metrics.rows_written
        with cache.begin(case.rows, case.slots) as window:
            for layer in data.draw(st.permutations(range(layers))):
                for part in chunks_of(data.draw, count):
                    window.stage("g", layer, keys[layer][part], values[layer][part])
            window.commit(case.accepted)
        expect(store, before, case, keys, values)
        assert cache.metrics.rows_written - written == len(case.kept) * layers
    totals = cache.metrics
    assert totals.staged == totals.committed + totals.rejected
    assert cache.window is None


@given(data=st.data())
def test_writer_commits_equal_the_plain_loop(data: st.DataObject) -> None:
    layers, heads = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    dtype, hold = (
        data.draw(st.sampled_from(DTYPES)),
        data.draw(st.sampled_from(["copy", "reference"])),
    )
    store = make_store(
        Layout.SLOTS, layers=layers, pages=128, page_size=1, heads=heads, dtype=dtype
    )
    manager = DeferredWriteManager(hold=hold, layers=[str(i) for i in range(layers)])
    calls = [0] * layers

    def writer_of(layer: int):
        def write(key, value, key_cache, value_cache, slots, *_):
            calls[layer] += 1
            for row, slot in enumerate(slots.tolist()):
                if slot >= 0:
                    key_cache[slot], value_cache[slot] = key[row], value[row]

        return write

    skips = [data.draw(st.booleans()) for _ in range(layers)]
    for _ in range(data.draw(st.integers(1, 3))):
        case = data.draw(windows(store.num_slots))
        count = case.rows.num_rows
        keys = [random_rows(count + 1, heads, 8, dtype, i) for i in range(layers)]
        values = [random_rows(count + 1, heads, 8, dtype, i + 50) for i in range(layers)]
        before = Snapshot.of(store)
        calls[:] = [0] * layers
        if not manager.begin_window(case.drafts, case.rows if count else None):
            assert not count
            continue
        for layer in data.draw(st.permutations(range(layers))):
            for part in chunks_of(data.draw, count):
                assert manager.stage_layer(
                    layer_id=str(layer),
                    key=keys[layer][part.start :],
                    value=values[layer][part.start :],
                    key_cache=store.key[layer, :, 0],
                    value_cache=store.value[layer, :, 0],
                    slot_mapping=case.slots[part],
                    kv_cache_dtype="auto",
                    k_scale=None,
                    v_scale=None,
                    writer=writer_of(layer),
                    skips_negative=skips[layer],
                )
        manager.commit(case.accepted)
        expect(store, before, case, keys, values)
        assert calls == [1 if case.kept else 0] * layers
    assert not manager.window_active
