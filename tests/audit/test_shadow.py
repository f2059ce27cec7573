"""The map's boundary: what contradicts itself is refused, and nothing is counted for it."""

import numpy as np
import pytest

from nwor.audit import Batch, Kind, ShadowMap, Violation
from nwor.errors import InputError, StateError


def shadow(**changes: object) -> ShadowMap:
    sizes = {"num_pages": 8, "page_size": 4, "max_requests": 2, "max_length": 9}
    return ShadowMap(**(sizes | changes))


def batch(**changes: object) -> Batch:
    """Request a writes positions 0, 1, 2 of page 3; the last is a draft."""
    parts = {
        "requests": ["a"],
        "computed": np.array([0]),
        "scheduled": np.array([3]),
        "drafts": np.array([1]),
        "tables": [np.array([[3, 0, 0]])],
        "slots": [np.array([12, 13, 14])],
    }
    return Batch(**(parts | changes))


@pytest.mark.parametrize("size", ["num_pages", "page_size", "max_requests", "max_length"])
def test_sizes(size: str) -> None:
    with pytest.raises(InputError, match=size):
        shadow(**{size: 0})


def test_windows_are_needed() -> None:
    with pytest.raises(InputError, match="windows"):
        shadow(windows=())


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"computed": np.array([0, 1])}, "computed has shape"),
        ({"scheduled": np.array([3.0, 1.0])}, "scheduled has shape"),
        ({"drafts": np.array([3])}, "scheduled > drafts"),
        ({"computed": np.array([-1])}, "computed >= 0"),
        ({"computed": np.array([7])}, "max_length is 9"),
        ({"tables": []}, "tables for 0"),
        ({"tables": [np.array([3, 0, 0])]}, "needs"),
        ({"tables": [np.zeros((1, 0), int)]}, "needs"),
        ({"slots": [np.array([12, 13])]}, "3 rows"),
        ({"slots": [np.zeros(3)] * 2}, "slots for 2"),
    ],
)
def test_a_batch_that_contradicts_itself(changes: dict[str, object], word: str) -> None:
    books = shadow()
    with pytest.raises(InputError, match=word):
        books.forward(batch(**changes))
    assert books.findings.steps == 0
    books.forward(batch())
    books.end_step([2])
    assert not books.findings.counts or set(books.findings.counts) == {Kind.REJECTED_IN_DURABLE}


def test_a_request_named_twice() -> None:
    twice = {
        "requests": ["a", "a"],
        "computed": np.zeros(2, int),
        "scheduled": np.ones(2, int),
        "drafts": np.zeros(2, int),
        "tables": [np.zeros((2, 3), int)],
    }
    with pytest.raises(InputError, match="twice"):
        shadow().forward(batch(**twice))


def test_more_requests_than_there_is_room_for() -> None:
    books = shadow()
    for name in ("a", "b"):
        books.forward(batch(requests=[name], drafts=np.array([0])))
        books.end_step([3])
    with pytest.raises(InputError, match="max_requests is 2: say `freed`"):
        books.forward(batch(requests=["c"]))
    books.freed(["a"])
    books.forward(batch(requests=["c"]))


def test_counts_and_order() -> None:
    books = shadow()
    with pytest.raises(StateError, match="without a forward"):
        books.end_step([1])
    books.forward(batch())
    for kept in ([4], [-1], [1, 1]):
        with pytest.raises(InputError, match="kept is"):
            books.end_step(kept)
    books.end_step([3])
    with pytest.raises(StateError):
        books.end_step([3])
    assert not books.findings.counts


@pytest.mark.parametrize(("source", "target"), [([1], [2, 3]), ([-1], [2]), ([1], [32])])
def test_moves_to_nowhere(source: list[int], target: list[int]) -> None:
    with pytest.raises(InputError):
        shadow().moved(np.array(source), np.array(target))


def test_a_step_whose_forward_raised_is_forgotten() -> None:
    books = shadow()
    books.forward(batch())
    books.freed([])
    assert books.step is None
    books.forward(batch())
    books.end_step([3])
    assert not books.findings.counts


def test_the_first_of_each_kind_is_told_with_its_place() -> None:
    told: list[Violation] = []
    books = shadow(told=told.append)
    for _ in range(2):
        books.forward(batch())
        books.end_step([2])
        books.freed(["a"])
    assert list(map(str, told)) == [
        "I1 rejected_row_in_durable_page: step 1, request a, group 0, position 2, slot 14"
    ]
    assert books.findings.counts == {Kind.REJECTED_IN_DURABLE: 2}
    assert books.findings.rejected == 2


def test_what_counts_as_read_and_as_ended() -> None:
    """A prompt's first rows are checked where they are written; nothing is read before them."""
    books = shadow()
    books.forward(batch(drafts=np.array([0])))
    books.end_step([3])
    assert books.findings.rows_checked == 6  # before and after the forward
    assert books.findings.reads == 0
    books.freed(["a", "a stranger"])
    assert books.findings.ended == 0, "it had no draft"
    books.forward(batch(drafts=np.array([0])))
    books.end_step([3])
    window = {"computed": np.array([3]), "scheduled": np.array([2])}
    places = {"tables": [np.array([[3, 4, 0]])], "slots": [np.array([15, 16])]}
    books.forward(batch(**window, **places))
    books.end_step([2])
    assert books.findings.reads == 3
    assert books.findings.accepted == 1
    books.freed(["a"])
    assert books.findings.ended == 1
    assert not books.findings.counts


def test_who_comes_and_goes_while_others_are_there() -> None:
    books = shadow()
    for name, page in (("a", 3), ("b", 4)):
        places = {"tables": [np.array([[page, 0, 0]])], "slots": [page * 4 + np.arange(3)]}
        books.forward(batch(requests=[name], drafts=np.array([0]), **places))
        books.end_step([3])
    assert (books.findings.joined, books.findings.left) == (1, 0)
    books.freed(["a"])
    assert books.findings.left == 1
    books.freed(["b"])
    assert books.findings.left == 1, "nobody was left behind"


@pytest.mark.parametrize(
    ("computed", "rows", "drafts", "crossed"),
    [(1, 3, 2, 0), (1, 4, 3, 1), (3, 2, 1, 1), (4, 4, 3, 0), (2, 4, 0, 0)],
)
def test_windows_across_the_edge_of_a_page(
    computed: int, rows: int, drafts: int, crossed: int
) -> None:
    """Pages of four rows; rows of a prompt are no window."""
    books = shadow()
    table, positions = np.array([[3, 4, 0]]), np.arange(8)
    for first, count, guessed in ((0, computed, 0), (computed, rows, drafts)):
        changes = {"scheduled": np.array([count]), "drafts": np.array([guessed])}
        slots = 12 + positions[first : first + count]
        books.forward(batch(computed=np.array([first]), tables=[table], slots=[slots], **changes))
        books.end_step([count])
    assert not books.findings.counts
    assert books.findings.crossed == crossed


def test_leases_of_requests_that_are_gone() -> None:
    books = shadow()
    books.forward(batch())
    books.end_step([3])
    books.check_leases(["a"])
    assert not books.findings.counts
    books.freed(["a"])
    books.check_leases(["a"])
    assert books.findings.counts == {Kind.LEAK: 1}
