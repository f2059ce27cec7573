"""The manager as its first users call it: conformance cases A1-A20."""

import gc
import random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fake_layers import SLOTS, Layer, ints
from nwor import (
    CommitError,
    DeferredWriteManager,
    Layout,
    ScaleAxis,
    ShouldFallback,
    WindowRows,
)
from nwor.errors import (
    AcceptanceError,
    ModeError,
    NoStorageError,
    RowCountError,
    ScaleError,
    StaleWindowError,
    WindowOpenError,
)
from nwor.reference import kept_rows
from nwor.testing import FailingWriter, everything, fail_at
from nwor.writers import Undo


def test_partial_acceptance_writes_one_row() -> None:  # A1
    manager, layer = DeferredWriteManager(), Layer("layer0", 2)
    assert manager.begin_window([2])
    assert layer.stage(manager, ints(3, 7))
    assert layer.written() == set()
    manager.commit([1])
    assert layer.writer.slots == [[3]]
    assert layer.holds([3], [0])
    assert manager.pop_last_window_metrics() == {
        "mode": "stage",
        "committed": 1,
        "rejected": 1,
        "fallback": 0,
    }
    assert manager.pop_last_window_metrics() is None


def test_first_api_caches_need_no_shape() -> None:
    """The first tests hand over caches of two rows with slots 3 and 7: only writers see caches."""
    manager, layer = DeferredWriteManager(), Layer("layer0", 2)
    calls = []
    manager.begin_window([2])
    layer.stage(
        manager,
        ints(3, 7),
        key_cache=torch.empty(2, 1, 2),
        value_cache=torch.empty(2, 1, 2),
        writer=lambda *args: calls.append(args[4].tolist()),
    )
    manager.commit([1])
    assert calls == [[3]]


def test_deferred_manager_multiple_layers_full_window() -> None:  # A2
    manager = DeferredWriteManager()
    layers = [Layer("layer0", 5), Layer("layer1", 5, seed=1)]
    slots = torch.arange(5, dtype=torch.int32)
    assert manager.begin_window([2, 3])
    for layer in layers:
        layer.stage(manager, slots)
    manager.commit([2, 0])
    for layer in layers:
        assert layer.writer.slots == [[0, 1]]
        assert layer.holds([0, 1], [0, 1])
    assert manager.pop_last_window_metrics() == {
        "mode": "stage",
        "committed": 2,
        "rejected": 3,
        "fallback": 0,
    }


@pytest.mark.parametrize("hold", ["copy", "reference"])
def test_interleaved_chunks_keep_layers_apart(hold: str) -> None:  # A3
    manager = DeferredWriteManager(hold=hold)
    first, second = Layer("layer0", 5), Layer("layer1", 5, seed=1)
    slots = ints(10, 11, 12, 13, 14)
    manager.begin_window([2, 3])
    first.stage(manager, slots[:2], slice(0, 2))
    second.stage(manager, slots)
    first.stage(manager, slots[2:], slice(2, 5))
    manager.commit([1, 2])
    for layer in (first, second):
        assert layer.writer.slots == [[10, 12, 13]]
        assert layer.holds([10, 12, 13], [0, 2, 3])


def test_cancel_flushes_every_staged_row() -> None:  # A4
    manager = DeferredWriteManager()
    layers = [Layer("layer0", 1), Layer("layer1", 1, seed=1)]
    manager.begin_window([1, 1])
    for layer in layers:
        layer.stage(manager, ints(5))
    manager.cancel_and_flush("test_cancel")
    for layer in layers:
        assert layer.writer.slots == [[5]]
        assert layer.holds([5], [0])
    last = manager.pop_last_window_metrics()
    assert last == {
        "mode": "stage",
        "committed": 0,
        "rejected": 0,
        "fallback": 1,
        "reason": "test_cancel",
    }
    assert manager.fallback_reason == "test_cancel"
    assert not manager.window_active
    assert manager.get_metrics()["fallbacks_by_reason"] == {"caller": 1}


def test_nothing_accepted_writes_nothing() -> None:  # A5
    manager, layer = DeferredWriteManager(), Layer("layer0", 3)
    manager.begin_window([3])
    layer.stage(manager, ints(1, 2, 3))
    manager.commit([0])
    assert layer.writer.calls == []
    last = manager.pop_last_window_metrics()
    assert last is not None
    assert (last["committed"], last["rejected"]) == (0, 3)


def test_everything_accepted_writes_all_rows_once() -> None:  # A6
    manager = DeferredWriteManager()
    layers = [Layer("layer0", 3), Layer("layer1", 3, seed=1)]
    manager.begin_window([2, 1])
    for layer in layers:
        layer.stage(manager, ints(4, 5, 9))
    manager.commit([2, 1])
    for layer in layers:
        assert layer.writer.slots == [[4, 5, 9]]
        assert layer.holds([4, 5, 9], [0, 1, 2])


def test_request_without_drafts_in_the_middle() -> None:  # A7
    manager, layer = DeferredWriteManager(), Layer("layer0", 5)
    manager.begin_window([2, 0, 3])
    layer.stage(manager, ints(0, 1, 2, 3, 4))
    manager.commit([1, 0, 3])
    assert layer.holds([0, 2, 3, 4], [0, 2, 3, 4])


class TestScales:  # A8
    def commit_one_of_two(self, k_scale, v_scale, *, heads=1, axis=None):
        """Stage two fp8 rows at slots 3 and 7, accept one, return what the writer got."""
        seen = []
        manager = DeferredWriteManager()
        manager.begin_window([2])
        manager.stage_layer(
            layer_id="layer0",
            key=torch.zeros(2, heads, 2),
            value=torch.zeros(2, heads, 2),
            key_cache=torch.zeros(SLOTS, heads, 2, dtype=torch.uint8),
            value_cache=torch.zeros(SLOTS, heads, 2, dtype=torch.uint8),
            slot_mapping=ints(3, 7),
            kv_cache_dtype="fp8",
            k_scale=k_scale,
            v_scale=v_scale,
            writer=lambda *args: seen.append(args),
            scale_axis=axis,
        )
        manager.commit([1])
        ((_, _, _, _, slots, dtype, k_out, v_out),) = seen
        assert slots.tolist() == [3]
        assert dtype == "fp8"
        return k_out, v_out

    @pytest.mark.parametrize("axis", [None, "token", ScaleAxis.TOKEN])
    @pytest.mark.parametrize("sentinel", [[], [9.9]])
    def test_per_token_scales_follow_their_rows(self, axis, sentinel) -> None:
        k_out, v_out = self.commit_one_of_two(
            torch.tensor([0.5, 0.7, *sentinel]), torch.tensor([0.6, 0.9, *sentinel]), axis=axis
        )
        assert torch.equal(k_out, torch.tensor([0.5]))
        assert torch.equal(v_out, torch.tensor([0.6]))

    @pytest.mark.parametrize(
        ("scale", "axis"),
        [
            (torch.tensor(0.5), None),
            (torch.tensor([0.5]), None),
            (torch.tensor([0.5, 0.6, 0.7, 0.8]), None),
            (torch.tensor([0.5, 0.6]), "head"),
            (torch.tensor([0.5, 0.6]), "tensor"),
        ],
    )
    def test_other_scales_pass_unchanged(self, scale, axis) -> None:
        k_out, v_out = self.commit_one_of_two(scale, scale, axis=axis)
        assert k_out is scale
        assert v_out is scale

    def test_per_head_scale_as_long_as_the_rows(self) -> None:
        """Two heads, two rows: the length says nothing, so the axis must be stated."""
        scale = torch.tensor([0.5, 0.6])
        k_out, _ = self.commit_one_of_two(scale, scale, heads=2, axis="head")
        assert k_out is scale
        k_out, _ = self.commit_one_of_two(scale, scale, heads=2, axis="token")
        assert torch.equal(k_out, torch.tensor([0.5]))
        with pytest.raises(ScaleError, match="scale_axis='token'"):
            self.commit_one_of_two(scale, scale, heads=2)

    def test_impossible_axis_is_refused(self) -> None:
        with pytest.raises(ScaleError, match="not per token"):
            self.commit_one_of_two(torch.tensor([0.5]), None, axis="token")
        with pytest.raises(ScaleError, match="'rows'"):
            self.commit_one_of_two(torch.tensor([0.5]), None, axis="rows")

    def test_chunked_scales_are_joined_without_sentinels(self) -> None:
        manager, layer = DeferredWriteManager(), Layer("layer0", 4)
        manager.begin_window([4])
        for start, scale in ((0, [0.1, 0.2, -1.0]), (2, [0.3, 0.4, -1.0])):
            layer.stage(
                manager,
                torch.arange(start, start + 2),
                slice(start, start + 2),
                k_scale=torch.tensor(scale),
                scale_axis="token",
            )
        manager.commit([3])
        assert torch.equal(layer.writer.scales[0], torch.tensor([0.1, 0.2, 0.3]))
        assert layer.writer.scales[1] is None

    def test_chunks_of_one_layer_share_its_scale(self) -> None:
        manager, layer = DeferredWriteManager(), Layer("layer0", 4)
        manager.begin_window([4])
        layer.stage(manager, ints(1, 2), slice(0, 2), k_scale=torch.tensor(0.5))
        with pytest.raises(ScaleError, match="its first rows had"):
            layer.stage(manager, ints(3, 4), slice(2, 4), k_scale=torch.tensor(0.6))
        layer.stage(manager, ints(3, 4), slice(2, 4), k_scale=torch.tensor(0.5))


@pytest.mark.parametrize("mode", ["immediate", "off", "OFF"])
def test_other_modes_decline(mode: str) -> None:  # A9
    manager, layer = DeferredWriteManager(mode=mode), Layer("layer0", 2)
    assert not manager.begin_window([2])
    assert manager.get_mode() == mode.lower()
    assert not layer.stage(manager, ints(3, 7))
    assert manager.get_metrics()["windows"] == (1 if mode == "immediate" else 0)


@pytest.mark.parametrize("mode", ["staged", "", None, 3])
def test_unknown_mode_is_refused(mode) -> None:  # A9
    with pytest.raises(ModeError, match="known modes: off, immediate, stage"):
        DeferredWriteManager(mode=mode)
    manager = DeferredWriteManager()
    with pytest.raises(ModeError):
        manager.set_mode(mode)
    assert manager.get_mode() == "stage"


def test_too_many_rows_leave_the_window_usable() -> None:  # A10
    manager, layer = DeferredWriteManager(), Layer("layer0", 3)
    manager.begin_window([2])
    with pytest.raises(RowCountError, match="stages 3 rows after 0, the window has 2"):
        layer.stage(manager, ints(1, 2, 3))
    layer.stage(manager, ints(1, 2), slice(0, 2))
    with pytest.raises(RowCountError, match="stages 2 rows after 2"):
        layer.stage(manager, ints(1, 2), slice(0, 2))
    assert layer.writer.calls == []
    manager.commit([2])
    assert layer.holds([1, 2], [0, 1])


def test_too_few_rows_are_refused_before_any_write() -> None:  # A11
    manager = DeferredWriteManager()
    whole, partial = Layer("layer0", 5), Layer("layer1", 5)
    manager.begin_window([2, 3])
    whole.stage(manager, ints(0, 1, 2, 3, 4))
    partial.stage(manager, ints(0, 1, 2, 3), slice(0, 4))
    with pytest.raises(RowCountError, match="'layer1' has staged 4 of 5"):
        manager.commit([2, 3])
    assert whole.writer.calls == partial.writer.calls == []
    partial.stage(manager, ints(4), slice(4, 5))
    manager.commit([2, 3])
    assert whole.holds(list(range(5)), list(range(5)))
    assert partial.holds(list(range(5)), list(range(5)))


@pytest.mark.parametrize(
    "counts",
    [
        [1],
        [3, 0],
        [-1, 0],
        [5, 0],
        [0, 5],
        [1.0, 2],
        [None, 0],
        torch.tensor([1.0, 2.0]),
        [[1], [2]],
    ],
)
def test_wrong_counts_are_refused(counts) -> None:  # A12
    manager, layer = DeferredWriteManager(), Layer("layer0", 5)
    manager.begin_window([2, 3])
    layer.stage(manager, ints(0, 1, 2, 3, 4))
    with pytest.raises(AcceptanceError):
        manager.commit(counts)
    assert layer.writer.calls == []
    assert manager.window_active
    manager.commit([2, 0])
    assert layer.holds([0, 1], [0, 1])


@pytest.mark.parametrize("skips_negative", [False, True])
@pytest.mark.parametrize("rows_first", [0, 1])
@pytest.mark.parametrize("accepted", [[1, 0], [2, 2], [2, 3]])
@pytest.mark.parametrize("faulty", range(4))
def test_writer_fault_leaves_all_layers_as_before(  # A13
    faulty: int, accepted: list[int], rows_first: int, skips_negative: bool
) -> None:
    """A writer that fails in layer j of 4, having written some of its rows already or none."""
    manager = DeferredWriteManager()
    layers = [Layer(f"layer{i}", 5, seed=i) for i in range(4)]
    layers[faulty].writer = FailingWriter(fail=True, rows_first=rows_first)
    slots = ints(8, 9, 2, 3, 4)

    def run_window() -> None:
        manager.begin_window([2, 3])
        for layer in layers:
            layer.stage(manager, slots, skips_negative=skips_negative)
        manager.commit(accepted)

    with pytest.raises(CommitError, match=f"'layer{faulty}'") as caught:
        run_window()
    assert isinstance(caught.value, ShouldFallback)
    assert caught.value.restored
    assert caught.value.layer_id == f"layer{faulty}"
    for layer in layers:
        assert layer.written() == set()
    last = manager.pop_last_window_metrics()
    assert last is not None
    assert last["fallback"] == 1
    assert last["reason"] == f"writer_fault:layer{faulty}"
    assert manager.get_metrics()["rows_written"] == 0

    layers[faulty].writer = FailingWriter()
    run_window()
    kept = kept_rows([2, 3], accepted, bonus=False)
    for layer in layers:
        assert layer.holds([slots[row].item() for row in kept], kept)


def test_interrupt_in_a_writer_is_undone_too() -> None:  # A13
    manager = DeferredWriteManager()
    layers = [Layer("layer0", 2), Layer("layer1", 2)]
    with fail_at((layers[1], "writer"), error=KeyboardInterrupt, doing=everything):
        manager.begin_window([2])
        for layer in layers:
            layer.stage(manager, ints(3, 7))
        with pytest.raises(KeyboardInterrupt):
            manager.commit([1])
    assert layers[0].written() == layers[1].written() == set()
    assert not manager.window_active


def test_an_interrupted_undo_leaves_the_window_open() -> None:
    """Rows of one layer are written and not undone: the window alone still holds the others."""
    manager = DeferredWriteManager()
    layers = [Layer("layer0", 2), Layer("layer1", 2)]
    manager.begin_window([2])
    layers[1].writer = FailingWriter(fail=True)
    for layer in layers:
        layer.stage(manager, ints(3, 7))
    with (
        fail_at((Undo, "restore"), call=2, error=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        manager.commit([1])
    assert manager.window_active
    layers[1].writer.fail = False
    manager.commit([1])
    assert all(layer.holds([3], [0]) for layer in layers)


def test_fault_with_caches_of_unknown_layout_is_told() -> None:  # A13
    """Four heads, pages of four: NHD or HND? Restoring needs to know, guessing is not knowing."""
    manager = DeferredWriteManager()
    cache = torch.zeros(2, 4, 4, 2)
    arguments = {
        "key": torch.ones(2, 4, 2),
        "value": torch.ones(2, 4, 2),
        "key_cache": cache,
        "value_cache": cache.clone(),
        "slot_mapping": ints(0, 1),
        "kv_cache_dtype": "auto",
        "k_scale": None,
        "v_scale": None,
    }

    def failing(*_: object) -> None:
        raise RuntimeError("no")

    for layout in (None, Layout.NHD):
        manager.begin_window([2])
        manager.stage_layer(layer_id="a", writer=lambda *_: None, layout=layout, **arguments)
        manager.stage_layer(layer_id="b", writer=failing, layout=layout, **arguments)
        with pytest.raises(CommitError) as caught:
            manager.commit([2])
        assert caught.value.restored is (layout is not None)
        assert ("declare it with layout" in str(caught.value)) is (layout is None)
        assert not manager.window_active


def test_flush_fault_writes_nothing() -> None:
    manager = DeferredWriteManager()
    layers = [Layer("layer0", 2), Layer("layer1", 2)]
    layers[1].writer = FailingWriter(fail=True, rows_first=1)
    manager.begin_window([2])
    for layer in layers:
        layer.stage(manager, ints(3, 7))
    with pytest.raises(CommitError):
        manager.cancel_and_flush("test")
    assert all(layer.written() == set() for layer in layers)
    assert not manager.window_active


def test_begin_while_open_keeps_the_window() -> None:  # A14
    manager, layer = DeferredWriteManager(), Layer("layer0", 2)
    manager.begin_window([2])
    layer.stage(manager, ints(3, 7))
    with pytest.raises(WindowOpenError, match="window 1 is still open"):
        manager.begin_window([1])
    with pytest.raises(WindowOpenError):
        manager.set_mode("off")
    manager.commit([2])
    assert layer.holds([3, 7], [0, 1])


def test_late_commit_of_an_older_generation_is_refused() -> None:  # A15
    manager, layer = DeferredWriteManager(), Layer("layer0", 2)
    manager.begin_window([2])
    old = manager.window
    assert old is not None
    layer.stage(manager, ints(3, 7))
    manager.cancel_and_flush("test")
    layer.key_cache.fill_(-7.0)
    layer.value_cache.fill_(-7.0)
    manager.begin_window([2])
    layer.stage(manager, ints(3, 7))
    with pytest.raises(StaleWindowError, match="window 1, which is cancelled"):
        old.commit([2])
    with pytest.raises(StaleWindowError, match="for window 1, the open one is 2"):
        manager.commit([2], generation=old.generation)
    assert layer.written() == set()
    manager.commit([1], generation=2)
    assert layer.holds([3], [0])


@pytest.mark.parametrize("hold", ["copy", "reference"])
@pytest.mark.parametrize("skips_negative", [False, True])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slot_dtypes_views_and_padding(dtype, strided, skips_negative, hold) -> None:  # A16
    """Slot -1 is padding; Python's indexing would make it the last slot of the store."""
    manager, layer = DeferredWriteManager(hold=hold), Layer("layer0", 4)
    slots = ints(3, -1, 7, 9, dtype=dtype)
    if strided:
        slots = torch.stack([slots, ints(15, 15, 15, 15, dtype=dtype)], 1)[:, 0]
    manager.begin_window([2, 2])
    layer.stage(manager, slots, skips_negative=skips_negative)
    manager.commit([2, 1])
    assert layer.holds([3, 7], [0, 2])
    assert manager.get_metrics()["rows_written"] == 2
    manager.begin_window([2, 2])
    layer.stage(manager, slots, skips_negative=skips_negative)
    manager.cancel_and_flush("test")
    assert layer.holds([3, 7, 9], [0, 2, 3])


def test_kv_longer_than_slots_counts_slot_rows_only() -> None:  # A17
    manager, layer = DeferredWriteManager(), Layer("layer0", 6)
    layer.key[3:] = float("nan")
    manager.begin_window([3])
    layer.stage(manager, ints(3, 7, 8))
    manager.commit([2])
    assert layer.holds([3, 7], [0, 1])


def test_padding_slots_beyond_the_window_are_ignored() -> None:  # A17
    manager, layer = DeferredWriteManager(), Layer("layer0", 4)
    manager.begin_window([2])
    layer.stage(manager, ints(3, 7, -1, -1))
    manager.commit([2])
    assert layer.holds([3, 7], [0, 1])


@pytest.mark.parametrize("prefill", ["before", "between", "after"])
def test_step_rows_beside_prefill_and_padding(prefill: str) -> None:  # A18
    """Rows ``[b,d,d | b,d]``, three prefill rows somewhere, two padding rows; commit [1, 0]."""
    at = {"before": [3, 6], "between": [0, 6], "after": [0, 3]}[prefill]
    rows = WindowRows.located([2, 1], at, num_rows=10)
    slots = ints(0, 1, 2, 3, 4, 5, 6, 7, -1, -1)
    expected = {
        "before": [0, 1, 2, 3, 4, 6],
        "between": [0, 1, 3, 4, 5, 6],
        "after": [0, 1, 3, 5, 6, 7],
    }
    manager, layer = DeferredWriteManager(), Layer("layer0", 10)
    assert manager.begin_window([2, 1], rows)
    layer.stage(manager, slots)
    manager.commit([1, 0])
    assert layer.holds(expected[prefill], expected[prefill])
    last = manager.pop_last_window_metrics()
    assert last is not None
    assert (last["committed"], last["rejected"]) == (1, 2)
    assert manager.metrics.bonus == 2


def test_eight_requests_of_four_drafts_are_forty_step_rows() -> None:
    """The public attempt expected 32 rows, met 40, and fell back on every real batch."""
    manager, layer = DeferredWriteManager(), Layer("layer0", 40)
    layer.key_cache = torch.full((40, 1, 2), -7.0)
    layer.value_cache = torch.full((40, 1, 2), -7.0)
    manager.begin_window([4] * 8, WindowRows.step([4] * 8))
    layer.stage(manager, torch.arange(40))
    accepted = [0, 1, 2, 3, 4, 0, 4, 2]
    manager.commit(accepted)
    kept = kept_rows([4] * 8, accepted, bonus=True)
    assert layer.holds(kept, kept)
    assert manager.metrics.rows_written == 8 + sum(accepted)


def test_tensors_without_storage_are_refused() -> None:  # A19
    manager, layer = DeferredWriteManager(), Layer("layer0", 2)
    manager.begin_window([2])
    with FakeTensorMode():
        fake = torch.empty(2, 1, 2)
    meta = torch.empty(2, 1, 2, device="meta")
    freed = torch.empty(2, 1, 2)
    freed.untyped_storage().resize_(0)
    for bad in (fake, meta, freed):
        for name in ("key", "value", "key_cache", "value_cache"):
            with pytest.raises(NoStorageError, match=f"^{name} ") as caught:
                layer.stage(manager, ints(3, 7), **{name: bad})
            assert isinstance(caught.value, ShouldFallback)
    layer.stage(manager, ints(3, 7))
    manager.commit([1])
    assert layer.holds([3], [0])


def test_many_windows_equal_a_plain_loop() -> None:  # A20
    """10,000 random windows, one to eight requests, one to four layers; memory does not grow."""
    rng = random.Random(20)
    manager = DeferredWriteManager()
    layers = [Layer(f"layer{i}", 64, seed=i) for i in range(4)]
    slots_of_store = 96
    for layer in layers:
        layer.key_cache = torch.full((slots_of_store, 1, 2), -7.0)
        layer.value_cache = layer.key_cache.clone()
    expected = [(layer.key_cache.clone(), layer.value_cache.clone()) for layer in layers]
    totals = [0, 0]
    for _ in range(10_000):
        drafts = [rng.randrange(9) for _ in range(rng.randint(1, 8))]
        accepted = [rng.randint(0, k) for k in drafts]
        used = layers[: rng.randint(1, 4)]
        picked = rng.sample(range(slots_of_store), sum(drafts))
        slots = torch.tensor(picked, dtype=torch.int32)
        shift = rng.randrange(64 - sum(drafts) + 1)
        if not manager.begin_window(drafts):
            assert not sum(drafts)
            continue
        for layer in used:
            layer.stage(manager, slots, slice(shift, shift + len(picked)))
        manager.commit(accepted)
        for row in kept_rows(drafts, accepted, bonus=False):
            for layer, (key, value) in zip(used, expected, strict=False):
                key[picked[row]] = layer.key[shift + row]
                value[picked[row]] = layer.value[shift + row]
        totals[0] += sum(drafts)
        totals[1] += sum(accepted)
    for layer, (key, value) in zip(layers, expected, strict=True):
        assert torch.equal(layer.key_cache, key)
        assert torch.equal(layer.value_cache, value)
        layer.writer.calls.clear()
    metrics = manager.get_metrics()
    assert (metrics["tokens_staged"], metrics["tokens_committed"]) == tuple(totals)
    assert metrics["tokens_rejected"] == totals[0] - totals[1]


def test_windows_leave_no_tensors_behind() -> None:  # A20
    """Whatever a window allocated is gone, or reused by the next one."""
    manager, layer = DeferredWriteManager(), Layer("layer0", 5)
    layer.writer = lambda *_: None

    def run(windows: int) -> int:
        for accepted in range(windows):
            manager.begin_window([2, 3])
            layer.stage(manager, torch.arange(5))
            manager.commit([accepted % 3, accepted % 4])
        gc.collect()
        return sum(type(thing) is torch.Tensor for thing in gc.get_objects())

    assert run(20) == run(500)
