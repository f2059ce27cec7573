"""Bad input of the overlay: a typed error, and nothing has changed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from toy_engine import ToyEngine

from nwor.errors import (
    AcceptanceError,
    InputError,
    LayoutError,
    RowCountError,
    SlotError,
    StaleWindowError,
    WindowOpenError,
)
from nwor.layout import KVRows
from nwor.store.overlay import Overlay
from nwor.store.paged import OverlayGroup, VerifyBatch
from nwor.store.staging import StagingPages


def open_window(engine: ToyEngine) -> None:
    engine.prepare({"a": [50]})
    engine.overlay.begin(engine.verify_batch({"a": [50]}))


@pytest.fixture
def engine() -> ToyEngine:
    toy = ToyEngine([8])
    toy.add("a", [1, 2, 3])
    return toy


@pytest.mark.parametrize("accepted", [[], [1, 1], [-1], [2]])
def test_wrong_counts_leave_the_window_open(engine: ToyEngine, accepted: list[int]) -> None:
    open_window(engine)
    window = engine.overlay.window
    assert window is not None
    with pytest.raises(AcceptanceError):
        window.commit(accepted)
    engine.audit()
    assert window.is_open
    window.commit([0])


def test_second_begin_release_of_a_member_and_late_close_are_refused(engine: ToyEngine) -> None:
    open_window(engine)
    window = engine.overlay.window
    assert window is not None
    with pytest.raises(WindowOpenError):
        engine.overlay.begin(engine.verify_batch({"a": [50]}))
    with pytest.raises(WindowOpenError, match="'a'"):
        engine.overlay.release("a")
    window.abort()
    for late in (window.abort, lambda: window.commit([0])):
        with pytest.raises(StaleWindowError):
            late()
    engine.overlay.release("a")
    engine.overlay.release("never seen")


def test_a_mapping_that_contradicts_the_table_is_refused(engine: ToyEngine) -> None:
    engine.prepare({"a": [50]})
    engine.slots[0][1] += 1
    before = engine.snapshot()
    with pytest.raises(SlotError, match="contradicts the block table"):
        engine.overlay.begin(engine.verify_batch({"a": [50]}))
    assert all(torch.equal(a, b) for a, b in zip(engine.snapshot(), before, strict=True))
    engine.audit()


@pytest.mark.parametrize("page", [-1, ToyEngine([8]).first_staging])
def test_a_table_that_names_no_durable_page_is_refused(engine: ToyEngine, page: int) -> None:
    """An engine whose allocator hands out our pages would overwrite staged rows.

    The slot mapping agrees with the table: it is the page alone that is wrong.
    """
    engine.prepare({"a": [50]})
    engine.tables[0][0, 0] = page
    engine.slots[0][:2] = torch.tensor([3, 4]) + page * 8
    with pytest.raises(SlotError, match="durable pages are"):
        engine.overlay.begin(engine.verify_batch({"a": [50]}))


def numbers(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"table_rows": numbers(99)}, "block table"),
        ({"first_rows": numbers(255)}, "slot mapping"),
        ({"computed": numbers(10_000)}, "block table"),
    ],
)
def test_places_outside_the_buffers_are_refused(
    engine: ToyEngine, change: dict[str, np.ndarray], match: str
) -> None:
    engine.prepare({"a": [50]})
    good = engine.verify_batch({"a": [50]})
    fields = {name: getattr(good, name) for name in VerifyBatch.__slots__} | change
    with pytest.raises(RowCountError, match=match):
        engine.overlay.begin(VerifyBatch(**fields))
    assert engine.overlay.window is None


@pytest.mark.parametrize(
    "change",
    [
        {"num_drafts": numbers(0)},
        {"query_lens": numbers(1)},
        {"computed": numbers(-1)},
        {"num_drafts": numbers(1, 1)},
    ],
)
def test_batches_that_contradict_themselves_are_refused(change: dict[str, np.ndarray]) -> None:
    fields = {
        "requests": ["a"],
        "table_rows": numbers(0),
        "first_rows": numbers(0),
        "computed": numbers(3),
        "query_lens": numbers(2),
        "num_drafts": numbers(1),
    }
    with pytest.raises(RowCountError):
        VerifyBatch(**{**fields, **change})  # type: ignore[arg-type]


def test_construction_is_checked(engine: ToyEngine) -> None:
    group = engine.overlay.groups[0]
    with pytest.raises(InputError, match="at least one"):
        Overlay([], first_page=1, num_leases=1)
    with pytest.raises(LayoutError, match="staging needs pages"):
        Overlay([group], first_page=engine.first_staging, num_leases=99)
    with pytest.raises(InputError, match="num_leases"):
        StagingPages(first_page=0, num_leases=0, num_groups=1)
    with pytest.raises(LayoutError, match="int32"):
        OverlayGroup(group.table.long(), group.slots, group.rows)
    with pytest.raises(LayoutError, match="expected table"):
        OverlayGroup(group.table[0], group.slots, group.rows)
    small = KVRows.allocate(layers=1, pages=1, page_size=2, heads=1, dim=1, dtype=torch.int32)
    with pytest.raises(LayoutError, match="same page size"):
        OverlayGroup(group.table, group.slots, (group.rows[0], small))
