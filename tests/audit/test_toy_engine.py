"""Bugs of engines outside nwor, seen in metadata alone: each is caught, and a sound engine is not."""

import pytest

from audit.toy import ToyEngine, live
from nwor.audit import Kind

BUGS: dict[str, set[Kind]] = {
    "write_drafts_through": {Kind.REJECTED_IN_DURABLE},
    "lose_the_last_row": {Kind.ROW_LOST},
    "counts_by_batch_row_after_a_reorder": {Kind.ROW_LOST, Kind.REJECTED_IN_DURABLE},
    "commit_before_sampling": {Kind.EARLY_COMMIT},
    "tables_not_restored": {Kind.NOT_RESTORED},
    "fill_in_nothing": {Kind.UNWRITTEN_READ, Kind.STALE_READ},
    "stale_block_table_row": {Kind.FOREIGN_READ},
    "optimistic_eviction": {Kind.UNWRITTEN_READ},
    "length_off_by_one": {Kind.STALE_READ},
    "null_page_write": {Kind.NULL_WRITE},
    "negative_slot": {Kind.NULL_WRITE},
    "slot_outside_the_cache": {Kind.OUTSIDE},
    "page_outside_the_cache": {Kind.OUTSIDE},
    "two_rows_in_one_slot": {Kind.DOUBLE_WRITE},
    "early_free": {Kind.SHARED_WRITE},
    "write_into_a_shared_page": {Kind.SHARED_WRITE},
    "publish_a_page_before_it_is_full": {Kind.PUBLISHED},
}


@pytest.mark.parametrize("seed", range(20))
def test_a_sound_engine_is_not_accused(seed: int) -> None:
    found = live(ToyEngine(), seed).audit.findings
    assert not found.counts, list(map(str, found.first.values()))
    assert found.rejected > 20
    assert found.adopted > 0


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.parametrize("seed", range(3))
def test_a_bug_is_caught_and_placed(bug: str, seed: int) -> None:
    found = live(ToyEngine(bug), seed).audit.findings
    assert set(found.counts) >= BUGS[bug], list(map(str, found.first.values()))
    for kind in BUGS[bug]:
        first = found.first[kind]
        assert first.step > 0
        assert first.slot >= 0 or kind is Kind.NULL_WRITE
        assert first.request or kind in {Kind.EARLY_COMMIT, Kind.OUTSIDE}
