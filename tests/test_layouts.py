"""Conformance cases C: rows are where each layout says, and moving them moves exactly them."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nwor import KVRows, Layout, reference
from nwor.errors import InputError, LayoutError, TensorMismatchError
from nwor.layout import overlaps_itself, page_views
from nwor.store.movers import get_mover
from nwor.testing import Snapshot, make_store, random_rows, same_bits

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
]
MOVERS = ["torch", "numba"]
JOINT = {Layout.INTERLEAVED, Layout.VLLM_CPU, Layout.FUSED}


def element(layout: Layout, block: torch.Tensor, part: int, slot: int, head: int, d: int) -> int:
    """Offset of one element within one layer's block, written out from the layout's definition."""
    if layout is Layout.VLLM_CPU:
        _, heads, size, width = block.shape
        dim = width // 2
        page, row = divmod(slot, size)
        inside = d * size + row if part == 0 else size * dim + row * dim + d
        return (page * heads + head) * size * width + inside
    if layout is Layout.FUSED:
        _, heads, size, width = block.shape
        page, row = divmod(slot, size)
        return ((page * heads + head) * size + row) * width + part * width // 2 + d
    if layout is Layout.INTERLEAVED:
        _, _, size, heads, dim = block.shape
        page, row = divmod(slot, size)
        return (((page * 2 + part) * size + row) * heads + head) * dim + d
    if layout is Layout.SLOTS:
        _, heads, dim = block.shape
        return (slot * heads + head) * dim + d
    if layout is Layout.NHD:
        _, size, heads, dim = block.shape
        return (slot * heads + head) * dim + d
    _, heads, size, dim = block.shape
    page, row = divmod(slot, size)
    return ((page * heads + head) * size + row) * dim + d


@pytest.mark.parametrize("layout", list(Layout))
def test_views_find_every_element(layout: Layout) -> None:
    pages, size, heads, dim = 3, 4, 2, 3
    shape = {
        Layout.SLOTS: (pages * size, heads, dim),
        Layout.NHD: (pages, size, heads, dim),
        Layout.HND: (pages, heads, size, dim),
        Layout.DENSE: (pages, heads, size, dim),
        Layout.INTERLEAVED: (pages, 2, size, heads, dim),
        Layout.VLLM_CPU: (pages, heads, size, 2 * dim),
        Layout.FUSED: (pages, heads, size, 2 * dim),
    }[layout]
    count = torch.Size(shape).numel()
    joint = layout in JOINT
    blocks = [torch.arange(count).view(shape)]
    if not joint:
        blocks.append(torch.arange(count).view(shape) + 1000)
    views = page_views(layout, *blocks)
    for part, view in enumerate(views):
        size_here = view.shape[1]
        for slot, head, d in itertools.product(range(pages * size), range(heads), range(dim)):
            block = blocks[0 if joint else part]
            expected = element(layout, block, part, slot, head, d) + (0 if joint else 1000 * part)
            page, row = divmod(slot, size_here)
            assert view[page, row, head, d] == expected


@pytest.mark.parametrize("mover", MOVERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_size", [1, 16, 32, 128])
@pytest.mark.parametrize("layout", list(Layout))
def test_moves_are_bit_exact(
    layout: Layout, page_size: int, dtype: torch.dtype, mover: str
) -> None:
    """Rows move to slots on, before and after page edges; all other bytes stay the canary."""
    for heads, dim in ((1, 64), (2, 80), (8, 8)):
        sizes = {"layers": 3, "page_size": page_size, "heads": heads, "dim": dim, "dtype": dtype}
        store = make_store(layout, pages=3, **sizes)
        staged = make_store(Layout.NHD, pages=1, **sizes | {"page_size": 9})
        for layer in range(3):
            for row in range(9):
                staged.key[layer, 0, row] = random_rows(1, heads, dim, dtype, layer * 20 + row)[0]
                staged.value[layer, 0, row] = random_rows(1, heads, dim, dtype, row + 90)[0]
        edges = sorted(
            {0, page_size - 1, page_size, 2 * page_size - 1, 2 * page_size, 3 * page_size - 1}
        )
        slots = torch.tensor(edges[::-1])
        rows = torch.tensor([8, 0, 3, 5, 1, 7][: len(edges)])
        expected = Snapshot.of(store)
        for layer in range(3):
            for row, slot in zip(rows.tolist(), slots.tolist(), strict=True):
                expected.put(layer, slot, staged.key[layer, 0, row], staged.value[layer, 0, row])
        get_mover(mover)(staged, store)(rows, slots)
        assert expected.equals(store)


@pytest.mark.parametrize("mover", MOVERS)
@given(data=st.data())
def test_movers_equal_the_reference(mover: str, data: st.DataObject) -> None:
    """Any pair of layouts, any slots: same bytes as the plain loop."""
    layouts = st.sampled_from(list(Layout))
    heads, dim = data.draw(st.integers(1, 8)), data.draw(st.sampled_from([1, 3, 8, 64]))
    dtype = data.draw(st.sampled_from(DTYPES))
    page_size, layers = data.draw(st.sampled_from([1, 2, 16])), data.draw(st.integers(1, 4))
    sizes = {"layers": layers, "heads": heads, "dim": dim, "dtype": dtype}
    src = make_store(data.draw(layouts), pages=2, page_size=8, **sizes)
    src.key.copy_(random_rows(16 * layers, heads, dim, dtype, 1).view(src.key.shape))
    src.value.copy_(random_rows(16 * layers, heads, dim, dtype, 2).view(src.value.shape))
    layout = data.draw(layouts)
    dst = make_store(layout, pages=4, page_size=page_size, **sizes)
    twin = make_store(layout, pages=4, page_size=page_size, **sizes)
    count = data.draw(st.integers(0, min(16, dst.num_slots)))
    rows = torch.tensor(data.draw(st.permutations(range(16)))[:count], dtype=torch.int64)
    slots = torch.tensor(
        data.draw(st.permutations(range(dst.num_slots)))[:count], dtype=torch.int64
    )
    move = get_mover(mover)(src, dst)
    move(rows, slots)
    reference.move_rows(src, twin, rows, slots)
    assert Snapshot.of(twin).equals(dst)


@pytest.mark.parametrize("mover", MOVERS)
def test_moves_within_one_store(mover: str) -> None:
    """Staging pages of a paged engine lie in the cache itself."""
    store = make_store(Layout.VLLM_CPU, pages=6, page_size=4)
    for slot in range(20, 24):
        store.key[:, *divmod(slot, 4)] = slot
        store.value[:, *divmod(slot, 4)] = -slot
    expected = Snapshot.of(store)
    for layer in range(2):
        for src, dst in ((20, 3), (21, 4)):
            expected.put(
                layer, dst, store.key[layer, *divmod(src, 4)], store.value[layer, *divmod(src, 4)]
            )
    get_mover(mover)(store, store)(torch.tensor([20, 21]), torch.tensor([3, 4]))
    assert expected.equals(store)


@pytest.mark.parametrize("mover", MOVERS)
def test_key_and_value_interleaved_without_runs(mover: str) -> None:
    """K and V alike in one block, dims strided: neither runs of a row, nor layers in a row."""

    def build() -> KVRows:
        block = torch.zeros(3, 4, 2, 2, 8, 4, dtype=torch.int16)  # layer, page, kv, head, dim, row
        views = block.permute(2, 0, 1, 5, 3, 4)
        return KVRows(views[0], views[1])

    src, dst, twin = build(), build(), build()
    src.key.copy_(torch.arange(src.key.numel()).view(src.key.shape))
    src.value.copy_(-src.key)
    rows, slots = torch.tensor([15, 0, 6]), torch.tensor([3, 4, 14])
    get_mover(mover)(src, dst)(rows, slots)
    reference.move_rows(src, twin, rows, slots)
    assert Snapshot.of(twin).equals(dst)
    assert dst.key.any()


def test_mixed_shapes_of_key_and_value() -> None:
    """dk != dv."""
    key = torch.zeros(2, 3, 4, 1, 8)
    value = torch.zeros(2, 3, 4, 2, 5)
    store = KVRows(key, value)
    staged = KVRows(torch.rand(2, 1, 6, 1, 8), torch.rand(2, 1, 6, 2, 5))
    get_mover("torch")(staged, store)(torch.tensor([5, 0]), torch.tensor([11, 2]))
    assert same_bits(store.key[:, 2, 3], staged.key[:, 0, 5])
    assert same_bits(store.value[:, 0, 2], staged.value[:, 0, 0])
    assert store.row_bytes == (8 + 10) * 4


@pytest.mark.parametrize("layout", [Layout.NHD, Layout.HND, *sorted(JOINT)])
def test_offsets_beyond_int32(layout: Layout) -> None:
    """A store of hundreds of GiB on the meta device: chunk numbers and strides stay exact."""
    shape = {
        Layout.NHD: (1 << 21, 16, 8, 128),
        Layout.HND: (1 << 21, 8, 16, 128),
        Layout.INTERLEAVED: (1 << 21, 2, 16, 8, 128),
        Layout.VLLM_CPU: (1 << 21, 8, 16, 256),
        Layout.FUSED: (1 << 21, 8, 16, 256),
    }[layout]
    cache = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    joint = layout in JOINT
    key, value = page_views(layout, *((cache,) if joint else (cache, cache)))
    slot = key.shape[0] * key.shape[1] - 1
    page, row = divmod(slot, key.shape[1])
    offset = key[page, row].storage_offset()
    assert offset * 2 > 2**33
    assert offset == element(layout, cache, 0, slot, 0, 0)
    assert value[page, row].storage_offset() == element(layout, cache, 1, slot, 0, 0)


def test_moves_far_into_a_store() -> None:
    """Slots whose byte offset exceeds 2**31, in a sparse 5 GiB mapping nobody ever touches whole."""
    slots = 5 * 2**30 // 4096
    block = torch.from_numpy(np.zeros((1, slots, 2, 8, 128), np.int16))
    store = KVRows(block[:, :, None, 0], block[:, :, None, 1])
    staged = make_store(
        Layout.NHD, layers=1, pages=1, page_size=4, heads=8, dim=128, dtype=torch.int16
    )
    staged.key.copy_(random_rows(4, 8, 128, torch.int16, 0).view(staged.key.shape))
    far = torch.tensor([slots - 1, slots // 2 + 1])
    get_mover("torch")(staged, store)(torch.tensor([0, 2]), far)
    assert same_bits(store.key[0, slots - 1, 0], staged.key[0, 0, 0])
    assert same_bits(store.key[0, slots // 2 + 1, 0], staged.key[0, 0, 2])
    assert not store.key[0, :16].any()


class TestRefusals:
    def test_unknown_layout_and_mover(self) -> None:
        with pytest.raises(LayoutError, match="unknown layout 'NDH'; known layouts: slots, nhd"):
            Layout.parse("NDH")
        with pytest.raises(InputError, match="unknown mover 'cuda'"):
            get_mover("cuda")

    @pytest.mark.parametrize(
        ("layout", "shapes", "error"),
        [
            ("nhd", [(2, 4, 2)], "takes 2 tensor"),
            ("nhd", [(2, 4, 2), (2, 4, 2)], "has 4 dims, got shape"),
            ("interleaved", [(2, 3, 4, 2, 8)], "needs 2 at dim 1"),
            ("vllm_cpu", [(2, 2, 4, 7)], "odd width 7"),
            ("vllm_cpu", [(2, 2, 4, 8), (2, 2, 4, 8)], "takes 1 tensor"),
        ],
    )
    def test_shapes_that_are_not_the_layout(self, layout, shapes, error) -> None:
        with pytest.raises(LayoutError, match=error):
            page_views(layout, *(torch.zeros(shape) for shape in shapes))

    def test_packed_blocks_must_be_contiguous(self) -> None:
        with pytest.raises(LayoutError, match="contiguous"):
            page_views("vllm_cpu", torch.zeros(2, 2, 8, 4).transpose(2, 3))

    def test_layers_that_are_not_equally_spaced(self) -> None:
        block = torch.zeros(4, 2, 4, 1, 8)
        with pytest.raises(LayoutError, match="not equally spaced"):
            KVRows.of("nhd", [(block[i], block[3]) for i in (0, 1, 3)])
        with pytest.raises(LayoutError, match="another allocation"):
            KVRows.of("nhd", [(block[0], block[1]), (block[0].clone(), block[1].clone())])
        with pytest.raises(LayoutError, match="layer 1 has shape"):
            KVRows.of("nhd", [(block[0], block[1]), (block[2][:1], block[3][:1])])
        with pytest.raises(LayoutError, match="no layers"):
            KVRows.of("nhd", [])

    def test_overlapping_views(self) -> None:
        row = torch.zeros(1, 1, 1, 2, 8)
        with pytest.raises(LayoutError, match="overlaps itself"):
            KVRows(row.expand(1, 1, 4, 2, 8), torch.zeros(1, 1, 4, 2, 8))
        block = torch.zeros(1, 1, 4, 2, 8)
        with pytest.raises(LayoutError, match="share elements"):
            KVRows(block, block)
        long = torch.zeros(2 * 64)
        shape, strides = (1, 1, 4, 2, 8), (64, 64, 16, 8, 1)
        with pytest.raises(LayoutError, match="share elements"):
            KVRows(long.as_strided(shape, strides, 0), long.as_strided(shape, strides, 32))
        KVRows(long.as_strided(shape, strides, 0), long.as_strided(shape, strides, 64))

    def test_views_that_do_not_belong_together(self) -> None:
        with pytest.raises(LayoutError, match="must be"):
            KVRows(torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2, 8))
        with pytest.raises(LayoutError, match="disagree"):
            KVRows(torch.zeros(1, 1, 4, 2, 8), torch.zeros(1, 1, 5, 2, 8))

    @pytest.mark.parametrize("mover", MOVERS)
    def test_rows_that_are_not_the_same_thing(self, mover) -> None:
        src = make_store(Layout.NHD)
        for other in (
            make_store(Layout.NHD, heads=1),
            make_store(Layout.NHD, layers=3),
            make_store(Layout.NHD, dtype=torch.float16),
        ):
            with pytest.raises(TensorMismatchError, match="cannot move to"):
                get_mover(mover)(src, other)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=4))
def test_overlap_is_never_missed(dims: list[tuple[int, int]]) -> None:
    """Exact by enumeration; the fast answer may only err on the safe side."""
    shape, strides = [size for size, _ in dims], [step for _, step in dims]
    reached = [
        sum(i * step for i, step in zip(index, strides, strict=True))
        for index in itertools.product(*map(range, shape))
    ]
    if len(set(reached)) < len(reached):
        assert overlaps_itself(shape, strides)
