"""The Triton mover equals the plain loop bit for bit, in one launch, without sync or allocation."""

import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from nwor import KVRows, Layout, reference
from nwor.errors import InputError, TensorMismatchError
from nwor.store import triton_rows
from nwor.store.movers import get_mover
from nwor.store.triton_rows import TritonMove, bind_triton, widest_word
from nwor.testing import ForbidSync, Snapshot, make_store, random_rows, same_bits

DEVICE = torch.device(os.environ.get("NWOR_TEST_DEVICE", "cpu"))
ON_HOST = pytest.mark.skipif(DEVICE.type != "cpu", reason="about the host, or its sparse memory")


@pytest.fixture(scope="module", autouse=True)
def on_device() -> Iterator[None]:
    """Whatever a test of this file allocates lies where the kernels run."""
    with DEVICE:
        yield


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8]


def fill(store: KVRows, seed: int = 0) -> KVRows:
    """Random bits everywhere, different in K and V."""
    for part, view in enumerate((store.key, store.value)):
        rows = view.shape[0] * view.shape[1] * view.shape[2]
        data = random_rows(rows, *view.shape[3:], view.dtype, seed * 2 + part)
        view.copy_(data.view(view.shape))
    return store


def by_hand(src: KVRows, dst: KVRows, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """The specification takes no padding: leave it out first."""
    kept = slots >= 0
    reference.move_rows(src, dst, rows[kept], slots[kept])


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A fresh process: this one is interpreted for good."""
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


class Recorder:
    """Stands where the kernel does and records launches instead of running them."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, ...], tuple[object, ...]]] = []

    def __getitem__(self, grid):
        return lambda *args, **constants: self.launches.append((grid, args))


class CountOps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_size", [1, 16, 128])
@pytest.mark.parametrize("layout", list(Layout))
def test_moves_are_bit_exact(layout: Layout, page_size: int, dtype: torch.dtype) -> None:
    """Slots on, before and after page edges, padding between them; all other bytes stay the canary."""
    for heads, dim in ((1, 64), (2, 5)):
        sizes = {"layers": 2, "page_size": page_size, "heads": heads, "dim": dim, "dtype": dtype}
        src = fill(make_store(Layout.NHD, pages=1, **sizes | {"page_size": 9}))
        dst, twin = (make_store(layout, pages=3, **sizes) for _ in range(2))
        slots = torch.tensor([3 * page_size - 1, -1, page_size, 0, -7, 2 * page_size])
        rows = torch.tensor([8, 0, 3, 5, 1, 7])
        get_mover("triton")(src, dst)(rows, slots)
        by_hand(src, twin, rows, slots)
        assert Snapshot.of(twin).equals(dst)
        assert not Snapshot.of(make_store(layout, pages=3, **sizes)).equals(dst)


@given(data=st.data())
def test_any_pair_of_layouts_and_ragged_slots(data: st.DataObject) -> None:
    layouts = st.sampled_from(list(Layout))
    heads, dim = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([1, 3, 8, 64]))
    sizes = {"layers": data.draw(st.integers(1, 3)), "heads": heads, "dim": dim}
    sizes["dtype"] = data.draw(st.sampled_from(DTYPES))
    src = fill(make_store(data.draw(layouts), pages=2, page_size=8, **sizes))
    layout, page_size = data.draw(layouts), data.draw(st.sampled_from([1, 2, 16]))
    dst, twin = (make_store(layout, pages=4, page_size=page_size, **sizes) for _ in range(2))
    count = data.draw(st.integers(0, min(12, dst.num_slots)))
    rows = torch.tensor(data.draw(st.permutations(range(16)))[:count], dtype=torch.int64)
    free = data.draw(st.permutations(range(dst.num_slots)))[:count]
    padded = [data.draw(st.sampled_from([slot, slot, -1])) for slot in free]
    slots = torch.tensor(padded, dtype=torch.int64)
    bind_triton(src, dst)(rows, slots)
    by_hand(src, twin, rows, slots)
    assert Snapshot.of(twin).equals(dst)


def groups() -> list[tuple[KVRows, KVRows]]:
    """Groups that have nothing in common, one with words of a single byte, one with dk != dv."""
    mla = [
        KVRows(torch.zeros(1, pages, 4, 1, 12), torch.zeros(1, pages, 4, 2, 5, dtype=torch.int8))
        for pages in (2, 3)
    ]
    return [
        (
            fill(make_store(Layout.NHD, layers=3, heads=2, dim=64, dtype=torch.bfloat16), 1),
            make_store(Layout.HND, layers=3, heads=2, dim=64, page_size=2, dtype=torch.bfloat16),
        ),
        (
            fill(make_store(Layout.DENSE, heads=1, dim=7, dtype=torch.uint8), 2),
            make_store(Layout.VLLM_CPU, heads=1, dim=7, page_size=16, dtype=torch.uint8),
        ),
        (
            fill(make_store(Layout.VLLM_CPU, heads=4, dim=8), 3),
            make_store(Layout.VLLM_CPU, heads=4, dim=8, page_size=2),
        ),
        (fill(mla[0], 4), mla[1]),
    ]


@pytest.mark.parametrize("shared", [True, False])
def test_different_groups_in_one_launch(shared: bool) -> None:
    pairs, twins = groups(), groups()
    rows = torch.tensor([[3, 0, 5], [1, 2, 0], [7, 6, 1], [0, 4, 2]])
    slots = torch.tensor([[5, -1, 0], [-1, -1, 3], [1, 2, 7], [-1, 4, 6]])
    move = TritonMove(pairs)
    move(rows[0], slots[0]) if shared else move(rows, slots)
    for index, (src, dst) in enumerate(twins):
        at = 0 if shared else index
        by_hand(src, dst, rows[at], slots[at])
        assert Snapshot.of(dst).equals(pairs[index][1])


def test_within_one_store() -> None:
    """Staging pages lie in the cache itself; rows that stay staged are not touched either."""
    store, twin = (fill(make_store(Layout.VLLM_CPU, pages=6)) for _ in range(2))
    rows, slots = torch.tensor([20, 21, 22]), torch.tensor([3, -1, 4])
    bind_triton(store, store)(rows, slots)
    by_hand(twin, twin, rows, slots)
    assert Snapshot.of(twin).equals(store)


@pytest.mark.parametrize("layers", [1, 80])
@pytest.mark.parametrize("rows", [1, 300])
def test_one_launch_and_not_one_torch_op(monkeypatch, layers: int, rows: int) -> None:
    store = make_store(Layout.NHD, layers=layers, pages=80)
    move = bind_triton(store, store)
    slots = torch.arange(rows)
    recorder = Recorder()
    monkeypatch.setattr(triton_rows, "move_rows_kernel", recorder)
    with CountOps() as count:
        move(slots, slots)
    assert [grid for grid, _ in recorder.launches] == [(rows, 2 * layers)]
    assert count.ops == []


def test_nothing_to_move_launches_nothing(monkeypatch) -> None:
    store = make_store(Layout.NHD)
    empty = make_store(Layout.NHD, heads=0)
    recorder = Recorder()
    monkeypatch.setattr(triton_rows, "check_device", lambda pairs: store.device)
    monkeypatch.setattr(triton_rows, "move_rows_kernel", recorder)
    bind_triton(store, store)(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    bind_triton(empty, empty)(torch.tensor([0]), torch.tensor([1]))
    assert recorder.launches == []


def test_masked_on_the_device_and_moved_without_sync() -> None:
    """From sampled tokens to moved rows: no value is read by the host."""
    src, dst, twin = (make_store(Layout.NHD, pages=4) for _ in range(3))
    fill(src)
    move = bind_triton(src, dst)
    rows, slots, request = torch.arange(6), torch.arange(6) + 9, torch.tensor([0, 0, 0, 1, 1, 1])
    accepted, position = torch.tensor([2, 1]), torch.tensor([0, 1, 2, 0, 1, 2])
    with ForbidSync():
        move(rows, torch.where(position < accepted[request], slots, -1))
    reference.move_rows(src, twin, torch.tensor([0, 1, 3]), torch.tensor([9, 10, 12]))
    assert Snapshot.of(twin).equals(dst)


@ON_HOST
def test_far_slots() -> None:
    """Byte offsets beyond 2**32 by page and by row, in a sparse mapping nobody touches whole."""
    slots = 5 * 2**30 // 4096
    block = torch.from_numpy(np.zeros((1, slots, 2, 8, 128), np.int16))
    src = fill(make_store(Layout.NHD, layers=1, pages=1, heads=8, dim=128, dtype=torch.int16))
    for pages in (slots, 1):
        views = block.view(1, pages, slots // pages, 2, 8, 128).unbind(3)
        store = KVRows(*views)
        bind_triton(src, store)(torch.tensor([0, 2]), torch.tensor([slots - 1, slots // 2 + 1]))
        for row, slot in ((0, slots - 1), (2, slots // 2 + 1)):
            page, inside = divmod(slot, slots // pages)
            assert same_bits(store.key[0, page, inside], src.key[0, 0, row])
            assert same_bits(store.value[0, page, inside], src.value[0, 0, row])
            store.key[0, page, inside] = store.value[0, page, inside] = 0


@ON_HOST
def test_slot_numbers_beyond_int32() -> None:
    flat = torch.from_numpy(np.zeros(5 * 2**30, np.uint8))
    last = 5 * 2**29 - 1
    key, value = (flat.as_strided((1, last + 1, 1, 1, 1), (1, 2, 1, 1, 1), at) for at in (0, 1))
    src = fill(make_store(Layout.NHD, layers=1, pages=1, heads=1, dim=1, dtype=torch.uint8))
    assert src.key[0, 0, 1]
    bind_triton(src, KVRows(key, value))(torch.tensor([1]), torch.tensor([last]))
    assert same_bits(key[0, last], src.key[0, 0, 1:2])
    assert same_bits(value[0, last], src.value[0, 0, 1:2])


@ON_HOST
def test_far_heads_and_dims() -> None:
    """Heads and dims gigabytes apart: `head * step` is int64 too."""
    flat = torch.from_numpy(np.zeros(5 * 2**30, np.uint8))
    src = fill(make_store(Layout.NHD, layers=1, pages=1, heads=2, dim=2, dtype=torch.uint8))
    for steps in ((4, 1, 2**32, 2), (4, 1, 2, 2**32)):
        key, value = (flat.as_strided((1, 1, 1, 2, 2), (8, *steps), start) for start in (0, 1))
        bind_triton(src, KVRows(key, value))(torch.tensor([3]), torch.tensor([0]))
        assert same_bits(key[0, 0, 0], src.key[0, 0, 3])
        assert same_bits(value[0, 0, 0], src.value[0, 0, 3])
        key.zero_()
        value.zero_()


def test_words_are_as_wide_as_rows_allow() -> None:
    wide, odd = (make_store(Layout.NHD, dim=d, dtype=torch.bfloat16).key for d in (128, 6))
    assert widest_word(wide, wide) == 8
    assert widest_word(odd, odd) == 4  # heads are 12 bytes apart
    column = make_store(Layout.VLLM_CPU, dim=128, dtype=torch.bfloat16).key
    assert widest_word(wide, column) == 2


class TestRefusals:
    def test_slots(self) -> None:
        store = make_store(Layout.NHD)
        move = bind_triton(store, store)
        good = torch.tensor([0, 1])
        for bad, message in (
            (good.int(), "must be int64"),
            (good[None].expand(3, 2), r"\[rows\] or \[1, rows\], got \(3, 2\)"),
            (torch.arange(4)[::2], "must be dense"),
            (torch.tensor([0]), "1 source slots for 2"),
        ):
            with pytest.raises(InputError, match=message):
                move(bad, good)

    def test_rows_that_are_not_the_same_thing(self) -> None:
        for other in (make_store(Layout.NHD, heads=1), make_store(Layout.NHD, dtype=torch.int8)):
            with pytest.raises(TensorMismatchError, match="cannot move to"):
                bind_triton(make_store(Layout.NHD), other)

    @ON_HOST
    def test_devices(self) -> None:
        rows = KVRows(*(torch.empty(1, 1, 1, 1, 8, device="meta") for _ in range(2)))
        with pytest.raises(InputError, match="unset TRITON_INTERPRET"):
            bind_triton(rows, rows)
        store = make_store(Layout.NHD)
        with pytest.raises(InputError, match="on one device"):
            TritonMove([(store, store), (rows, rows)])
        with pytest.raises(InputError, match="on one device"):
            TritonMove([])

    @ON_HOST
    @pytest.mark.parametrize(
        ("prepare", "message"),
        [
            ("", "on a GPU, these are on the CPU"),
            ("import sys; sys.modules['triton'] = None", r"pip install 'nwor\[triton\]'"),
        ],
    )
    def test_without_the_interpreter_or_triton(self, monkeypatch, prepare, message) -> None:
        monkeypatch.delenv("TRITON_INTERPRET")
        program = f"""
{prepare}
from nwor import Layout
from nwor.store.movers import get_mover
from nwor.testing import make_store
store = make_store(Layout.NHD)
get_mover("triton")(store, store)
"""
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=False
        )
        assert done.returncode == 1
        with pytest.raises(InputError, match=message):
            raise InputError(done.stderr.splitlines()[-1])
