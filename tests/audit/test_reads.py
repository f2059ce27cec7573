"""A wrong read is said to be what it is: of a row never written, somebody else's, rejected or stale."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from audit.toy import PAGE, ToyEngine
from nwor.audit import Batch, Kind, ShadowMap

Work = dict[str, tuple[int, int, int]]
ONE: Work = {"a": (1, 0, 0), "b": (1, 0, 0)}


def sound() -> ToyEngine:
    """Two requests of 12 rows; the last window of each, in the third page, had its draft rejected."""
    engine = ToyEngine()
    engine.add("a")
    engine.add("b")
    engine.step({"a": (10, 0, 0), "b": (10, 0, 0)})
    engine.step({"a": (1, 1, 0), "b": (1, 1, 0)})
    engine.step(ONE)
    assert not engine.audit.findings.counts
    return engine


def with_bug(bug: str, work: Work) -> Callable[[ToyEngine], None]:
    def run(engine: ToyEngine) -> None:
        engine.bug = bug
        engine.step(work)

    return run


def page_from_before_a_rewrite(engine: ToyEngine) -> None:
    """The last page's rows are computed again in a fresh page, then the old one is read."""
    request = engine.requests["a"]
    old = [pages[2] for pages in request.pages]
    request.length = 2 * PAGE
    for pages in request.pages:
        pages[2] = engine.free.pop(0)
    engine.step({"a": (3, 0, 0)})
    assert not engine.audit.findings.counts
    for pages, page in zip(request.pages, old, strict=True):
        pages[2] = page
    engine.step({"a": (1, 0, 0)})


def nothing_filled_in(engine: ToyEngine) -> None:
    """A window whose staging page still has its own rows from two pages before."""
    engine.step({"a": (1, 3, 3), "b": (1, 0, 0)})  # 12 to 15, in the fourth page's staging page
    engine.step({"a": (4, 0, 0)})
    engine.step({"a": (2, 0, 0)})  # 20 and 21, in the sixth page
    assert not engine.audit.findings.counts
    engine.bug = "fill_in_nothing"
    engine.step({"a": (1, 1, 1)})


@pytest.mark.parametrize(
    ("go_wrong", "kind", "positions"),
    [
        (with_bug("page_nobody_wrote", ONE), Kind.UNWRITTEN_READ, range(PAGE)),
        (with_bug("stale_block_table_row", ONE), Kind.FOREIGN_READ, range(PAGE)),
        (
            with_bug("staging_page_of_an_earlier_window", {"a": (1, 0, 0)}),
            Kind.REJECTED_READ,
            [11],
        ),
        (with_bug("two_pages_swapped", ONE), Kind.STALE_READ, range(2 * PAGE)),
        (page_from_before_a_rewrite, Kind.STALE_READ, [8, 9, 10] * 2),
        (nothing_filled_in, Kind.STALE_READ, [20, 21] * 2),
    ],
    ids=["unwritten", "foreign", "rejected", "position", "generation", "staging"],
)
def test_exactly_this_kind_and_its_place(
    go_wrong: Callable[[ToyEngine], None], kind: Kind, positions: list[int]
) -> None:
    engine = sound()
    go_wrong(engine)
    found = engine.audit.findings
    assert found.counts == {kind: len(positions)}, list(map(str, found.first.values()))
    first = found.first[kind]
    assert (first.request, first.group, first.position) == ("a", 0, positions[0])
    assert first.slot % PAGE == positions[0] % PAGE
    assert str(first).startswith(f"I4 {kind.value}: step ")


def rows(request: str, computed: int, count: int, page: int) -> Batch:
    """`count` certain rows from `computed` on in one page of four rows."""
    return Batch(
        [request],
        computed=np.array([computed]),
        scheduled=np.array([count]),
        drafts=np.array([0]),
        tables=[np.array([[page]])],
        slots=[page * PAGE + np.arange(computed, computed + count)],
    )


def test_rows_of_a_former_owner_are_nobodys_expectation() -> None:
    """A length off by one finds, in a page it was given, the row of a request that is gone.

    The new request also has the record of the old one in the books.
    """
    books = ShadowMap(num_pages=4, page_size=PAGE, max_requests=1, max_length=PAGE)
    for step in (rows("a", 0, 4, page=2), rows("b", 0, 2, page=2)):
        books.freed(["a"])
        books.forward(step)
        books.end_step(step.scheduled)
    assert not books.findings.counts
    books.forward(rows("b", 3, 1, page=2))  # it has two rows
    assert books.findings.counts == {Kind.FOREIGN_READ: 1}
    assert books.findings.first[Kind.FOREIGN_READ].position == 2


def test_a_preempted_request_is_another_one_when_it_comes_back() -> None:
    """What the books cannot tell: its own rows from before count as another request's."""
    books = ShadowMap(num_pages=4, page_size=PAGE, max_requests=1, max_length=PAGE)
    books.forward(rows("a", 0, 3, page=2))
    books.end_step([3])
    books.freed(["a"])
    books.forward(rows("a", 0, 2, page=3))
    books.end_step([2])
    books.forward(rows("a", 2, 1, page=2))
    assert books.findings.counts == {Kind.FOREIGN_READ: 2}
