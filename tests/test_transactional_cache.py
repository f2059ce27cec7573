"""The native form: arena, one movement per group, a redo when the mover fails."""

import pytest
import torch

from nwor import FallbackReason, KVRows, Layout, TransactionalCache, WindowRows, WindowState
from nwor.errors import (
    AcceptanceError,
    CommitError,
    InputError,
    NoStorageError,
    RowCountError,
    SlotError,
    StaleWindowError,
    TensorMismatchError,
    UnknownLayerError,
    WindowOpenError,
)
from nwor.testing import (
    Snapshot,
    fail_at,
    first_rows,
    make_store,
    movers,
    random_rows,
    same_bits,
)

HEADS, DIM = 2, 8


def make_cache(**options) -> tuple[TransactionalCache, dict[str, KVRows]]:
    """Two groups, with other page sizes and dtypes: full attention and a sliding window, say."""
    groups = {
        "full": make_store(Layout.NHD, layers=3, pages=4, page_size=4),
        "sliding": make_store(Layout.HND, layers=2, pages=8, page_size=2, dtype=torch.bfloat16),
    }
    return TransactionalCache(groups, max_rows=12, **options), groups


SLOTS = {"full": torch.tensor([3, 4, 5, 15, 0]), "sliding": torch.tensor([1, 2, 3, 9, 8])}


class Rows:
    """Distinct rows for every layer of every group."""

    def __init__(self, groups: dict[str, KVRows], count: int) -> None:
        self.rows = {
            (name, layer, part): random_rows(count, HEADS, DIM, store.key.dtype, seed)
            for name, store in groups.items()
            for layer in range(store.num_layers)
            for seed, part in ((layer * 2, "key"), (layer * 2 + 1, "value"))
        }

    def of(self, group: str, layer: int, rows=slice(None)) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rows[group, layer, "key"][rows], self.rows[group, layer, "value"][rows]

    def stage_all(self, window, groups: dict[str, KVRows]) -> None:
        for name, store in groups.items():
            for layer in range(store.num_layers):
                window.stage(name, layer, *self.of(name, layer))


def expected_after(groups, before, rows: Rows, slots, kept) -> bool:
    """The stores equal what plain writes of the kept rows give."""
    for name, store in groups.items():
        for layer in range(store.num_layers):
            key, value = rows.of(name, layer)
            for row in kept:
                before[name].put(layer, int(slots[name][row]), key[row], value[row])
    return all(before[name].equals(store) for name, store in groups.items())


@pytest.mark.parametrize("mover", ["torch", "numba"])
def test_commit_moves_exactly_the_accepted_rows(mover: str) -> None:
    cache, groups = make_cache(mover=mover)
    rows = Rows(groups, 5)
    before = {name: Snapshot.of(store) for name, store in groups.items()}
    with cache.begin(WindowRows.step([2, 1]), SLOTS) as window:
        rows.stage_all(window, groups)
        assert all(before[name].equals(store) for name, store in groups.items())
        key, value = window.staged("full", 1)
        assert same_bits(key, rows.of("full", 1)[0])
        assert same_bits(value, rows.of("full", 1)[1])
        report = window.commit([1, 0])
    assert expected_after(groups, before, rows, SLOTS, [0, 1, 3])
    assert (report.committed, report.rejected, report.rows_written) == (1, 2, 3 * 5)
    assert report.bytes_written == 3 * 2 * HEADS * DIM * (3 * 4 + 2 * 2)
    assert window.state is WindowState.COMMITTED
    assert cache.window is None


def test_layers_stage_in_any_order_and_in_chunks() -> None:
    cache, groups = make_cache()
    rows = Rows(groups, 5)
    before = {name: Snapshot.of(store) for name, store in groups.items()}
    with cache.begin(WindowRows.step([2, 1]), SLOTS) as window:
        for part in (slice(0, 2), slice(2, 2), slice(2, 5)):
            for name, layer in (
                ("sliding", 1),
                ("full", 2),
                ("full", 0),
                ("sliding", 0),
                ("full", 1),
            ):
                window.stage(name, layer, *rows.of(name, layer, part))
        window.commit([2, 1])
    assert expected_after(groups, before, rows, SLOTS, range(5))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_one_slot_mapping_for_all_groups(dtype: torch.dtype) -> None:
    cache, groups = make_cache()
    rows = Rows(groups, 3)
    slots = torch.tensor([5, -1, 2], dtype=dtype)
    before = {name: Snapshot.of(store) for name, store in groups.items()}
    with cache.begin(WindowRows.drafts([3]), slots) as window:
        rows.stage_all(window, groups)
        slots.zero_()  # engines reuse the buffer
        window.commit([3])
    slots = torch.tensor([5, -1, 2])
    assert expected_after(groups, before, rows, dict.fromkeys(groups, slots), [0, 2])


@pytest.mark.parametrize("ended", ["abort", "left", "raised"])
def test_windows_without_a_commit_write_nothing(ended: str) -> None:
    cache, groups = make_cache()
    rows = Rows(groups, 5)
    before = {name: Snapshot.of(store) for name, store in groups.items()}
    window = cache.begin(WindowRows.step([2, 1]), SLOTS)
    if ended == "abort":
        rows.stage_all(window, groups)
        window.abort()
    elif ended == "left":
        with window:
            rows.stage_all(window, groups)
    else:
        with pytest.raises(ZeroDivisionError), window:
            rows.stage_all(window, groups)
            raise ZeroDivisionError
    assert all(before[name].equals(store) for name, store in groups.items())
    reason = FallbackReason.UNFINISHED if ended == "left" else FallbackReason.ABORTED
    assert cache.metrics.fallbacks == {reason: 1}
    assert (cache.metrics.staged, cache.metrics.cancelled) == (3, 3)
    assert cache.metrics.rows_written == 0
    assert cache.window is None


def test_flush_writes_every_row() -> None:
    cache, groups = make_cache()
    rows = Rows(groups, 5)
    before = {name: Snapshot.of(store) for name, store in groups.items()}
    window = cache.begin(WindowRows.step([2, 1]), SLOTS)
    rows.stage_all(window, groups)
    window.flush()
    assert expected_after(groups, before, rows, SLOTS, range(5))
    assert cache.metrics.flushed == 3


def test_closed_windows_refuse_everything() -> None:
    cache, groups = make_cache()
    rows = Rows(groups, 5)
    window = cache.begin(WindowRows.step([2, 1]), SLOTS)
    rows.stage_all(window, groups)
    window.commit([0, 0])
    newer = cache.begin(WindowRows.step([2, 1]), SLOTS)
    before = {name: Snapshot.of(store) for name, store in groups.items()}
    for call in (
        lambda: window.stage("full", 0, *rows.of("full", 0)),
        lambda: window.staged("full", 0),
        lambda: window.commit([0, 0]),
        window.abort,
        window.flush,
    ):
        with pytest.raises(StaleWindowError, match="window 1, which is committed"):
            call()
    assert newer.is_open
    assert newer.generation == 2
    assert all(before[name].equals(store) for name, store in groups.items())


def test_begin_while_open_is_refused() -> None:
    cache, _ = make_cache()
    window = cache.begin(WindowRows.step([2, 1]), SLOTS)
    with pytest.raises(WindowOpenError):
        cache.begin(WindowRows.step([2, 1]), SLOTS)
    assert cache.window is window


def test_bad_windows_are_refused() -> None:
    cache, _ = make_cache()
    step = WindowRows.step([2, 1])
    full = SLOTS["full"]
    for error, rows, slots in (
        (RowCountError, WindowRows.step([12]), torch.arange(13)),
        (RowCountError, step, full[:4]),
        (SlotError, step, full.to(torch.float32)),
        (SlotError, step, torch.tensor([0, 1, 2, 3, 16])),
        (SlotError, step, torch.tensor([0, 1, 2, 3, 3])),
        (UnknownLayerError, step, {"full": full}),
        (UnknownLayerError, step, {"full": full, "sliding": full, "other": full}),
    ):
        with pytest.raises(error):
            cache.begin(rows, slots)
    assert cache.window is None
    with pytest.raises(InputError):
        TransactionalCache({}, max_rows=4)
    with pytest.raises(InputError, match="max_rows must be at least 1, got 0"):
        TransactionalCache({"g": make_store(Layout.NHD)}, max_rows=0)
    with pytest.raises(UnknownLayerError, match="no group 'other'"):
        cache.durable("other")


def test_bad_rows_leave_the_window_as_it_is() -> None:
    cache, groups = make_cache()
    rows = Rows(groups, 5)
    before = {name: Snapshot.of(store) for name, store in groups.items()}
    window = cache.begin(WindowRows.step([2, 1]), SLOTS)
    key, value = rows.of("full", 0)
    for error, call in (
        (UnknownLayerError, ("other", 0, key, value)),
        (UnknownLayerError, ("full", 3, key, value)),
        (UnknownLayerError, ("full", -1, key, value)),
        (TensorMismatchError, ("full", 0, key[:, :1], value)),
        (TensorMismatchError, ("full", 0, key, value[:4])),
        (TensorMismatchError, ("full", 0, key.to(torch.float16), value)),
        (TensorMismatchError, ("sliding", 0, key, value)),
        (NoStorageError, ("full", 0, key.to("meta"), value)),
        (RowCountError, ("full", 0, torch.cat([key, key]), torch.cat([value, value]))),
    ):
        with pytest.raises(error):
            window.stage(*call)
    window.stage("full", 0, key, value)
    with pytest.raises(RowCountError, match="stages 5 rows after 5"):
        window.stage("full", 0, key, value)
    with pytest.raises(RowCountError, match=r"layer full\[1\] has staged 0 of 5"):
        window.commit([1, 0])
    for name, layer in (("full", 1), ("full", 2), ("sliding", 0), ("sliding", 1)):
        window.stage(name, layer, *rows.of(name, layer))
    with pytest.raises(AcceptanceError):
        window.commit([1, 2])
    with pytest.raises(AcceptanceError, match="window of chains"):
        window.commit_paths([[0], [0]])
    assert all(before[name].equals(store) for name, store in groups.items())
    window.commit([2, 0])
    assert expected_after(groups, before, rows, SLOTS, [0, 1, 2, 3])


def test_tree_windows_commit_paths() -> None:
    parents = [-1, 0, 0, 1, 1, 2]
    cache, groups = make_cache()
    rows = Rows(groups, 6)
    slots = torch.arange(4, 10)
    before = {name: Snapshot.of(store) for name, store in groups.items()}
    with cache.begin(WindowRows.tree([parents]), slots) as window:
        rows.stage_all(window, groups)
        with pytest.raises(AcceptanceError, match="use commit_paths"):
            window.commit([2])
        with pytest.raises(AcceptanceError, match="not a path"):
            window.commit_paths([[0, 5]])
        report = window.commit_paths([[0, 2, 5]])
    for name, store in groups.items():
        for layer in range(store.num_layers):
            key, value = rows.of(name, layer)
            for slot, row in ((4, 0), (5, 2), (6, 5)):
                before[name].put(layer, slot, key[row], value[row])
        assert before[name].equals(store)
    assert (report.committed, report.rejected) == (2, 3)
    assert cache.metrics.bonus == 1


@pytest.mark.parametrize("again", [RuntimeError("second fault"), KeyboardInterrupt()])
def test_double_fault_keeps_the_rows(again: BaseException) -> None:
    """Neither mover works: the error says so, and the window still holds everything."""
    cache, groups = make_cache()
    rows = Rows(groups, 5)
    before = {name: Snapshot.of(store) for name, store in groups.items()}
    window = cache.begin(WindowRows.step([2, 1]), SLOTS)
    rows.stage_all(window, groups)
    with (
        fail_at(*movers(cache), call=2, error=RuntimeError("first fault"), doing=first_rows(1)),
        fail_at(*movers(cache, plain=True), error=again),
        pytest.raises((CommitError, KeyboardInterrupt)) as caught,
    ):
        window.commit([1, 1])
    if isinstance(again, RuntimeError):
        assert isinstance(caught.value, CommitError)
        assert "commit again or abort" in str(caught.value)
        assert not caught.value.restored
    assert window.is_open
    window.commit([1, 1])
    assert expected_after(groups, before, rows, SLOTS, [0, 1, 3, 4])


def test_an_interrupted_flush_is_finished_and_the_interrupt_goes_on() -> None:
    cache, groups = make_cache()
    rows = Rows(groups, 5)
    before = {name: Snapshot.of(store) for name, store in groups.items()}
    window = cache.begin(WindowRows.step([2, 1]), SLOTS)
    rows.stage_all(window, groups)
    with (
        fail_at(*movers(cache), error=KeyboardInterrupt, doing=first_rows(1)),
        pytest.raises(KeyboardInterrupt),
    ):
        window.flush()
    assert window.state is WindowState.CANCELLED
    assert expected_after(groups, before, rows, SLOTS, range(5))


def test_poison_shows_views_used_after_their_window() -> None:
    cache, groups = make_cache(poison=True)
    window = cache.begin(WindowRows.step([2, 1]), SLOTS)
    Rows(groups, 5).stage_all(window, groups)
    key, value = window.staged("full", 0)
    window.commit([0, 0])
    assert key.isnan().all()
    assert value.isnan().all()


def test_arena_has_a_fixed_address() -> None:
    cache, groups = make_cache()
    rows = Rows(groups, 5)
    seen = set()
    for _ in range(3):
        with cache.begin(WindowRows.step([2, 1]), SLOTS) as window:
            rows.stage_all(window, groups)
            seen.add(window.staged("sliding", 1)[0].data_ptr())
            window.commit([2, 1])
    assert len(seen) == 1
    assert cache.staged_bytes() == 12 * 2 * HEADS * DIM * (3 * 4 + 2 * 2)


def test_dropped_request_and_truncation_have_counters() -> None:
    cache, groups = make_cache()
    rows = Rows(groups, 5)
    before = {name: Snapshot.of(store) for name, store in groups.items()}
    with cache.begin(WindowRows.step([2, 1]), SLOTS) as window:
        rows.stage_all(window, groups)
        window.commit([1, 1], dropped=[1], truncated=1)
    assert expected_after(groups, before, rows, SLOTS, [0, 1])
    totals = cache.metrics.snapshot()
    assert totals["staged"] == 3
    assert totals["committed"] == totals["rejected"] == totals["cancelled"] == 1
    assert totals["truncated"] == totals["bonus"] == 1
