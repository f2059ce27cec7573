"""Conformance cases B: from sampled ids to masks and counts, on any device without a sync."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nwor import WindowRows, accept_matching, accepted_from_sampled, plan_commit, plan_paths
from nwor.acceptance import tree_path
from nwor.errors import AcceptanceError, RowCountError
from nwor.reference import accepted_prefix, masked_slots
from nwor.testing import ForbidSync

CASES = [
    # drafts, draft ids, sampled, mask, counts
    pytest.param([2, 1], [10, 11, 20], [[10, 99, 0], [20, 0, 0]], "TF T", [1, 1], id="B1"),
    pytest.param([4], [1, 2, 3, 4], [[1, 2, 0, 4]], "TTFF", [2], id="B2-match-after-mismatch"),
    pytest.param([4], [10, 20, 30, 40], [[10, 20]], "TTFF", [2], id="B3-too-few-columns"),
    pytest.param([3], [1, 2, 3], [[]], "FFF", [0], id="B4-no-columns"),
    pytest.param([2], [10, 20], [10, 20], "TT", [2], id="B5-one-dim"),
    pytest.param([2, 2], [1, 2, 3, 4], [[1, 2, 9], [3, 4, 9]], "TT TT", [2, 2], id="B6"),
    pytest.param([2, 1], [1, 2, 3], [[9, 2, 0], [3, 0, 0]], "FF T", [0, 1], id="B7"),
    pytest.param(
        [2, 0, 2], [1, 2, 3, 4], [[1, 2, 9], [9, 9, 9], [3, 9, 9]], "TT TF", [2, 0, 1], id="B8"
    ),
    pytest.param([0, 0], [], [[5], [6]], "", [0, 0], id="no-drafts"),
]


@pytest.mark.parametrize(("drafts", "ids", "sampled", "mask", "counts"), CASES)
def test_matching(drafts, ids, sampled, mask, counts) -> None:
    table = torch.tensor(sampled, dtype=torch.int32)
    draft_ids = torch.tensor(ids, dtype=torch.int32)
    with ForbidSync():  # B11
        accepted = accept_matching(drafts, draft_ids, table)
    assert accepted.mask.tolist() == [flag == "T" for flag in mask if flag in "TF"]
    assert accepted.counts.tolist() == counts
    assert accepted.mask.dtype == torch.bool


@pytest.mark.parametrize(
    ("drafts", "sampled", "counts"),
    [
        pytest.param([2, 2], [[7, 8, -1], [9, -1, -1]], [1, 0], id="B9"),
        pytest.param([0, 2], [[-1, -1, -1], [5, 6, 7]], [0, 2], id="B10-discarded-request"),
        pytest.param([3, 1], [[-1] * 4, [3, 4, -1, -1]], [0, 1], id="B10-discarded-with-drafts"),
        pytest.param([1], [[7, 8, 9]], [1], id="never-more-than-drafted"),
        pytest.param([2], [[7, -1, 9]], [0], id="nothing-after-a-rejection"),
    ],
)
def test_vllm_form(drafts, sampled, counts) -> None:
    table = torch.tensor(sampled, dtype=torch.int32)
    with ForbidSync():
        accepted = accepted_from_sampled(drafts, table)
    assert accepted.tolist() == counts


@given(st.data())
def test_both_forms_equal_a_plain_loop(data: st.DataObject) -> None:
    drafts = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=8))
    columns = data.draw(st.integers(0, 8))
    token = st.integers(0, 2)  # few tokens, so that matches are common
    ids = [data.draw(token) for _ in range(sum(drafts))]
    sampled = [[data.draw(token) for _ in range(columns)] for _ in drafts]
    per_request = [ids[sum(drafts[:i]) : sum(drafts[: i + 1])] for i in range(len(drafts))]
    expected = [accepted_prefix(d, s) for d, s in zip(per_request, sampled, strict=True)]
    table = torch.tensor(sampled, dtype=torch.int64).view(len(drafts), columns)
    accepted = accept_matching(drafts, torch.tensor(ids, dtype=torch.int64), table)
    assert accepted.counts.tolist() == expected
    mask = [j < a for k, a in zip(drafts, expected, strict=True) for j in range(k)]
    assert accepted.mask.tolist() == mask

    width = max(drafts) + 1
    emitted = torch.full((len(drafts), width), -1)
    for row, a in enumerate(expected):
        emitted[row, : a + 1] = 7
    assert accepted_from_sampled(drafts, emitted).tolist() == expected


@pytest.mark.parametrize(
    ("drafts", "ids", "sampled", "error"),
    [
        ([2], [1], [[1, 2]], "draft_ids has shape"),
        ([2, 1], [1, 2, 3], [[1, 2]], "one row for each of 2 requests"),
        ([1, 1], [1, 2], [1, 2], "one row for each of 2 requests"),
        ([1], [1], [[1.0]], "must hold token ids"),
    ],
)
def test_contradictions_are_refused(drafts, ids, sampled, error) -> None:
    with pytest.raises(AcceptanceError, match=error):
        accept_matching(drafts, torch.tensor(ids), torch.tensor(sampled))


class TestPlan:
    def test_no_sync_and_no_request_boundary_error(self) -> None:
        rows = WindowRows.step([2, 0, 3], query_lens=[3, 4, 4], num_rows=13)
        slots = torch.arange(100, 113, dtype=torch.int32)
        with ForbidSync():
            masked = plan_commit(rows, torch.tensor([1, 0, 3])).masked(slots)
        kept = [0, 1, 3, 4, 5, 6, 7, 8, 9, 10]
        assert masked.tolist() == masked_slots(slots.tolist(), kept)
        assert masked.dtype == torch.int32

    def test_moves_leave_padding_out(self) -> None:
        plan = plan_commit(WindowRows.drafts([2, 2]), torch.tensor([2, 1]))
        slots = torch.tensor([5, -1, 7, 8])
        moves = plan.moves(slots)
        assert moves.rows.tolist() == [0, 2]
        assert moves.slots.tolist() == [5, 7]
        assert plan.moves(slots) is moves


PARENTS = [-1, 0, 0, 1, 1, 2]


class TestTrees:
    def test_accepted_path_goes_to_consecutive_slots(self) -> None:
        rows = WindowRows.tree([PARENTS])
        plan = plan_paths(rows, [[0, 2, 5]])
        slots = torch.arange(40, 46)
        moves = plan.moves(slots)
        assert dict(zip(moves.rows.tolist(), moves.slots.tolist(), strict=True)) == {
            0: 40,
            2: 41,
            5: 42,
        }
        assert plan.masked(slots).tolist() == [40, -1, 41, -1, -1, 42]

    def test_several_trees(self) -> None:
        rows = WindowRows.tree([PARENTS, [-1], PARENTS])
        plan = plan_paths(rows, [[0], [], [0, 1, 4]])
        moves = plan.moves(torch.arange(13))
        assert moves.rows.tolist() == [0, 7, 8, 11]
        assert moves.slots.tolist() == [0, 7, 8, 9]

    @pytest.mark.parametrize(
        "path", [[2, 5], [0, 5], [0, 2, 4], [0, 2, 2], [0, 6], [0, -1], [5, 2, 0]]
    )
    def test_anything_but_a_root_path_is_refused(self, path) -> None:
        with pytest.raises(AcceptanceError, match="not a path from a root"):
            plan_paths(WindowRows.tree([PARENTS]), [path])

    def test_wrong_number_of_paths_or_kind_of_window(self) -> None:
        with pytest.raises(AcceptanceError, match="2 paths for 1 requests"):
            plan_paths(WindowRows.tree([PARENTS]), [[0], [0]])
        with pytest.raises(AcceptanceError, match="window of chains"):
            plan_paths(WindowRows.drafts([2]), [[0]])

    def test_children_before_parents_are_refused(self) -> None:
        with pytest.raises(AcceptanceError, match="node 0 has parent 1"):
            WindowRows.tree([[1, -1]])

    def test_path_to_a_leaf(self) -> None:
        assert tree_path(PARENTS, 5) == (0, 2, 5)
        assert tree_path(PARENTS, -1) == ()
        with pytest.raises(AcceptanceError):
            tree_path(PARENTS, 6)


class TestWindowRows:
    @pytest.mark.parametrize(
        ("arguments", "error"),
        [
            (([2], [2]), "request 0 has 2 rows, its 2 drafts and bonus take 3"),
            (([2, 1], [3]), "2 requests, but 1 query_lens"),
            (([2], [3], 2), "num_rows is 2"),
            (([],), "is empty"),
            (([-1],), "must not be negative"),
            ((["a"],), "must be integers"),
        ],
    )
    def test_bad_steps(self, arguments, error) -> None:
        with pytest.raises(RowCountError, match=error):
            WindowRows.step(*arguments)

    @pytest.mark.parametrize(
        ("at", "error"),
        [([0, 2], "belong to another request"), ([0, 9], "exceed 10 rows"), ([0], "1 bonus_rows")],
    )
    def test_bad_places(self, at, error) -> None:
        with pytest.raises(RowCountError, match=error):
            WindowRows.located([2, 1], at, num_rows=10)

    def test_prefill_chunk_before_the_bonus_row(self) -> None:
        """Dropping a request drops its prefill rows with it; strangers' rows stay."""
        rows = WindowRows.step([2, 1], query_lens=[5, 2], num_rows=8)
        keep = plan_commit(rows, torch.tensor([0, 1])).keep
        assert keep.tolist() == [True, True, True, False, False, True, True, False]
        assert rows.num_bonus == 2
