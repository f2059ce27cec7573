"""The manager beyond the conformance table: bad input, ownership of memory, changing layers."""

import pytest
import torch

from fake_layers import SLOTS, Layer, ints
from nwor import (
    CommitError,
    DeferredWriteManager,
    KVRows,
    WindowRows,
)
from nwor.errors import (
    AcceptanceError,
    NoStorageError,
    NoWindowError,
    RowCountError,
    ScaleError,
    SlotError,
    StageError,
    TensorMismatchError,
    UnknownLayerError,
)
from nwor.metrics import Metrics
from nwor.testing import FailingWriter


def test_calls_without_a_window_are_declined_or_strict_errors() -> None:
    layer = Layer("layer0", 2)
    manager = DeferredWriteManager()
    manager.commit([1])
    manager.cancel_and_flush("nothing")
    manager.finish_step()
    assert manager.get_metrics()["fallbacks"] == 0
    strict = DeferredWriteManager(strict=True)
    with pytest.raises(NoWindowError):
        strict.commit([1])
    with pytest.raises(NoWindowError):
        strict.cancel_and_flush("nothing")
    with pytest.raises(NoWindowError):
        layer.stage(strict, ints(3, 7))


def test_finish_step_flushes_an_open_window() -> None:
    manager, layer = DeferredWriteManager(), Layer("layer0", 2)
    manager.begin_window([2])
    layer.stage(manager, ints(3, 7))
    manager.finish_step()
    assert layer.holds([3, 7], [0, 1])
    assert manager.fallback_reason == "unfinished_window"
    metrics = manager.get_metrics()
    assert metrics["fallbacks_by_reason"] == {"unfinished_window": 1}
    assert metrics["tokens_fallback"] == 2


def test_window_that_staged_nothing_saves_nothing() -> None:
    manager = DeferredWriteManager()
    manager.begin_window([4])
    manager.commit([1])
    last = manager.pop_last_window_metrics()
    assert last is not None
    assert (last["committed"], last["rejected"]) == (0, 0)
    assert manager.metrics == Metrics(windows=1, empty_windows=1)


def test_no_drafts_open_no_window() -> None:
    manager = DeferredWriteManager()
    assert not manager.begin_window([])
    assert not manager.begin_window([0, 0])
    assert not manager.window_active


@pytest.mark.parametrize("bad", [[-1], [2, -2], [1.5], ["2"]])
def test_bad_draft_counts_are_refused(bad) -> None:
    manager = DeferredWriteManager()
    with pytest.raises(RowCountError):
        manager.begin_window(bad)
    assert not manager.window_active


@pytest.mark.parametrize(
    ("slots", "error"),
    [
        (torch.tensor([3, 3], dtype=torch.int32), "slot 3 is named twice"),
        (torch.tensor([3.0, 7.0]), "1-D int32 or int64"),
        (torch.tensor([[3], [7]]), "1-D int32 or int64"),
        (torch.tensor([3, 7], dtype=torch.int16), "1-D int32 or int64"),
    ],
)
def test_bad_slots_are_refused(slots: torch.Tensor, error: str) -> None:
    manager, layer = DeferredWriteManager(), Layer("layer0", 2)
    manager.begin_window([2])
    with pytest.raises(SlotError, match=error):
        layer.stage(manager, slots)
    layer.stage(manager, ints(3, 7))
    manager.commit([1])
    assert layer.holds([3], [0])


def test_slots_are_checked_against_declared_layouts() -> None:
    manager, layer = DeferredWriteManager(), Layer("layer0", 2)
    manager.begin_window([2])
    with pytest.raises(SlotError, match="slot 16 is outside the store's 16 slots"):
        layer.stage(manager, ints(3, 16), layout="slots")
    view = KVRows(layer.key_cache[None, None], layer.value_cache[None, None])
    with pytest.raises(SlotError, match="slot 16"):
        layer.stage(manager, ints(3, 16), layout=view)
    layer.stage(manager, ints(3, 15), layout=view)
    manager.commit([2])
    assert layer.holds([3, 15], [0, 1])


def test_same_slot_in_two_chunks_is_refused_before_any_write() -> None:
    manager, layer = DeferredWriteManager(), Layer("layer0", 2)
    manager.begin_window([2])
    layer.stage(manager, ints(3), slice(0, 1))
    layer.stage(manager, ints(3), slice(1, 2))
    with pytest.raises(SlotError, match="slot 3 is named twice"):
        manager.commit([2])
    assert layer.writer.calls == []
    assert manager.window_active


def test_chunks_of_one_layer_must_agree() -> None:
    manager, layer = DeferredWriteManager(), Layer("layer0", 4)
    manager.begin_window([4])
    layer.stage(manager, ints(3, 7), slice(0, 2))
    for name, bad in (
        ("key", torch.zeros(2, 2, 2)),
        ("value", torch.zeros(2, 1, 2, dtype=torch.float16)),
        ("key_cache", torch.zeros(SLOTS, 1, 2)),
    ):
        with pytest.raises(TensorMismatchError, match=name):
            layer.stage(manager, ints(8, 9), slice(2, 4), **{name: bad})
    with pytest.raises(ScaleError, match="scale axes"):
        layer.stage(manager, ints(8, 9), slice(2, 4), k_scale=torch.ones(2), scale_axis="token")
    with pytest.raises(RowCountError, match="for 2 slots"):
        layer.stage(manager, ints(8, 9), slice(2, 3))
    layer.stage(manager, ints(8, 9), slice(2, 4))
    manager.commit([3])
    assert layer.holds([3, 7, 8], [0, 1, 2])


def test_named_layers_must_all_stage_and_no_others() -> None:
    manager = DeferredWriteManager(layers=["layer0", "layer1"])
    layers = [Layer("layer0", 2), Layer("layer1", 2)]
    manager.begin_window([2])
    with pytest.raises(UnknownLayerError, match="'layer9'"):
        Layer("layer9", 2).stage(manager, ints(3, 7))
    layers[0].stage(manager, ints(3, 7))
    with pytest.raises(RowCountError, match="'layer1' has staged no rows"):
        manager.commit([1])
    assert layers[0].writer.calls == []
    layers[1].stage(manager, ints(3, 7))
    manager.commit([1])
    assert all(layer.holds([3], [0]) for layer in layers)


class TestKnownLayers:
    """What a layer staged last time is not checked again, unless anything about it has changed."""

    def manager_that_knows(self, layer: Layer, hold: str = "copy") -> DeferredWriteManager:
        manager = DeferredWriteManager(hold=hold)
        manager.begin_window([2])
        layer.stage(manager, ints(3, 7))
        manager.commit([0])
        manager.begin_window([2])
        return manager

    @pytest.mark.parametrize("name", ["key", "value"])
    def test_storage(self, name: str) -> None:
        """By reference: without the check nothing would read them before the commit, and crash."""
        layer = Layer("layer0", 2)
        manager = self.manager_that_knows(layer, hold="reference")
        freed = torch.empty(2, 1, 2)
        freed.untyped_storage().resize_(0)
        with pytest.raises(NoStorageError, match=f"^{name} "):
            layer.stage(manager, ints(3, 7), **{name: freed})

    def test_shapes_and_bytes(self) -> None:
        layer = Layer("layer0", 2)
        manager = self.manager_that_knows(layer)
        layer.value, layer.value_cache = torch.rand(2, 1, 6), torch.full((SLOTS, 1, 6), -7.0)
        layer.stage(manager, ints(3, 7))
        manager.commit([1])
        assert layer.holds([3], [0])
        assert manager.metrics.bytes_written == (2 + 6) * 4

    @pytest.mark.parametrize("name", ["key_cache", "value_cache"])
    def test_caches_are_restored_where_they_are_now(self, name: str) -> None:
        layer = Layer("layer0", 2)
        manager = self.manager_that_knows(layer)
        setattr(layer, name, torch.full((SLOTS, 1, 2), -7.0))
        layer.writer = FailingWriter(fail=True, rows_first=1)
        layer.stage(manager, ints(3, 7))
        with pytest.raises(CommitError):
            manager.commit([1])
        assert layer.holds([], [])

    def test_shape_of_one_part_alone(self) -> None:
        layer = Layer("layer0", 2)
        manager = self.manager_that_knows(layer)
        layer.stage(manager, ints(3, 7), value=torch.rand(2, 1, 6), writer=lambda *_: None)
        manager.commit([1])
        assert manager.metrics.bytes_written == (2 + 6) * 4

    def test_layouts(self) -> None:
        layer = Layer("layer0", 2)
        manager = self.manager_that_knows(layer)
        with pytest.raises(SlotError, match="outside the store's 16"):
            layer.stage(manager, ints(3, 16), layout="slots")

    @pytest.mark.parametrize("name", ["k_scale", "v_scale"])
    def test_scales(self, name: str) -> None:
        layer = Layer("layer0", 2)
        manager = self.manager_that_knows(layer)
        layer.stage(manager, ints(3, 7), **{name: torch.tensor([0.5, 0.7])})
        manager.commit([1])
        scale = dict(zip(("k_scale", "v_scale"), layer.writer.scales, strict=True))[name]
        assert torch.equal(scale, torch.tensor([0.5]))


def test_dropped_request_is_not_written() -> None:
    """Its pages may belong to somebody else by now."""
    manager, layer = DeferredWriteManager(), Layer("layer0", 5)
    manager.begin_window([1, 2], WindowRows.step([1, 2]))
    layer.stage(manager, ints(0, 1, 2, 3, 4))
    with pytest.raises(AcceptanceError, match="dropped request 2"):
        manager.commit([1, 1], dropped=[2])
    manager.commit([1, 1], dropped=[1])
    assert layer.holds([0, 1], [0, 1])
    metrics = manager.metrics
    assert (metrics.staged, metrics.committed, metrics.rejected, metrics.cancelled) == (3, 1, 0, 2)


def test_copied_rows_survive_reuse_of_the_activations() -> None:
    """Compiled code and graph replays reuse buffers: what was staged must not change with them."""
    manager, layer = DeferredWriteManager(), Layer("layer0", 2)
    slots = ints(3, 7)
    manager.begin_window([2])
    layer.stage(manager, slots)
    kept = layer.key.clone()
    layer.key.fill_(99.0)
    slots.fill_(0)
    manager.commit([1])
    assert torch.equal(layer.key_cache[3], kept[0])
    assert layer.written() == {3}


def test_referenced_rows_overwritten_in_place_are_noticed() -> None:
    manager, layer = DeferredWriteManager(hold="reference"), Layer("layer0", 2)
    manager.begin_window([2])
    layer.stage(manager, ints(3, 7))
    layer.key.fill_(99.0)
    with pytest.raises(StageError, match="overwritten before the commit"):
        manager.commit([1])
    assert layer.writer.calls == []


def test_inference_tensors_can_be_staged() -> None:
    """vLLM runs in inference mode, where tensors have no version counter."""
    manager, layer = DeferredWriteManager(), Layer("layer0", 2)
    with torch.inference_mode():
        key, value = layer.key.clone(), layer.value.clone()
        manager.begin_window([2])
        layer.stage(manager, ints(3, 7), key=key, value=value)
        manager.commit([1])
    assert layer.holds([3], [0])


def test_counts_may_be_a_tensor() -> None:
    manager, layer = DeferredWriteManager(), Layer("layer0", 3)
    manager.begin_window([2, 1])
    layer.stage(manager, ints(3, 7, 8))
    manager.commit(torch.tensor([1, 1]))
    assert layer.holds([3, 8], [0, 2])
