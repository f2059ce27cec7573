"""`fail_at` does what it says; and the core survives it at every movement, half done or not."""

import itertools
from dataclasses import dataclass

import pytest
import torch

from nwor import FallbackReason, KVRows, Layout, TransactionalCache, WindowRows, reference
from nwor.errors import InputError
from nwor.testing import (
    Doing,
    InjectedFaultError,
    Snapshot,
    everything,
    fail_at,
    first_rows,
    make_store,
    movers,
    random_rows,
)


class Counter:
    """Something to call."""

    def __init__(self) -> None:
        self.total = 0

    def add(self, number: int) -> int:
        self.total += number
        return self.total


@dataclass(frozen=True, slots=True)
class Frozen:
    add: object


def test_the_nth_call_fails_and_the_others_do_not() -> None:
    counter = Counter()
    with fail_at((counter, "add"), call=2) as fault:
        assert counter.add(1) == 1
        with pytest.raises(InjectedFaultError):
            counter.add(10)
        assert counter.add(1) == 2
    assert (fault.calls, fault.raised) == (3, 1)
    assert "add" not in vars(counter)
    assert counter.add(1) == 3


def test_every_call_some_calls_and_no_call() -> None:
    counter = Counter()
    for call, raised in ((None, 4), ({1, 4}, 2), (range(2, 4), 2), (9, 0), ((), 0)):
        with fail_at((counter, "add"), call=call, error=OSError("no")) as fault:
            for _ in range(4):
                try:
                    counter.add(0)
                except OSError:
                    continue
        assert fault.raised == raised


@pytest.mark.parametrize(("doing", "total"), [(None, 0), (everything, 5)])
def test_what_a_failing_call_still_does(doing: Doing | None, total: int) -> None:
    counter = Counter()
    with fail_at((counter, "add"), error=KeyboardInterrupt, doing=doing):
        with pytest.raises(KeyboardInterrupt):
            counter.add(5)
        assert counter.total == total


def test_places_of_all_kinds_share_one_count_and_are_put_back() -> None:
    counter = Counter()
    frozen = Frozen(counter.add)
    plain, method = frozen.add, Counter.add
    move_rows = reference.move_rows

    def all_of_them() -> None:
        with fail_at((frozen, "add"), (Counter, "add"), (reference, "move_rows"), call=3):
            frozen.add(1)
            Counter().add(1)
            reference.move_rows(None, None, None, None)

    with pytest.raises(InjectedFaultError):
        all_of_them()
    assert frozen.add is plain
    assert Counter.add is method
    assert reference.move_rows is move_rows


def test_bad_places() -> None:
    with pytest.raises(InputError, match="call=0"), fail_at((Counter(), "add"), call=0):
        pass
    with pytest.raises(InputError, match="needs a place"), fail_at():
        pass
    with pytest.raises(AttributeError, match="subtract"), fail_at((Counter(), "subtract")):
        pass


# -- the core, at every call -----------------------------------------------------------------------

WINDOWS = (([2, 1], [1, 0]), ([3], [3]), ([0, 2, 1], [0, 0, 1]))


def life(groups: dict[str, KVRows], cache: TransactionalCache) -> dict[str, Snapshot]:
    """Run some windows; return what the stores must hold in the end, worked out by plain indexing."""
    expected = {name: Snapshot.of(store) for name, store in groups.items()}
    for index, (drafts, accepted) in enumerate(WINDOWS):
        rows = WindowRows.step(drafts)
        slots = torch.randperm(16, generator=torch.Generator().manual_seed(index))[: rows.num_rows]
        kept = reference.kept_rows(drafts, accepted, bonus=True)
        with cache.begin(rows, slots) as window:
            for name, store in groups.items():
                for layer in range(store.num_layers):
                    key, value = (
                        random_rows(rows.num_rows, 2, 8, store.key.dtype, seed + layer + 9 * index)
                        for seed in (0, 100)
                    )
                    window.stage(name, layer, key, value)
                    for row in kept:
                        expected[name].put(layer, int(slots[row]), key[row], value[row])
            try:
                window.commit(accepted)
            except KeyboardInterrupt:  # goes on with the next window, as a server would
                assert not window.is_open
    return expected


@pytest.mark.parametrize("doing", [None, first_rows(), first_rows(1), everything])
@pytest.mark.parametrize("error", [RuntimeError("device fault"), MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("call", range(1, 2 * len(WINDOWS) + 1))
def test_a_mover_may_fail_at_any_call(
    call: int, error: BaseException | type[BaseException], doing: Doing | None
) -> None:
    """Every movement of a life of three windows: the stores end as if nothing had happened."""
    groups = {
        "full": make_store(Layout.NHD, layers=3),
        "sliding": make_store(Layout.HND, dtype=torch.bfloat16, page_size=8),
    }
    cache = TransactionalCache(groups, max_rows=8, poison=True)
    with fail_at(*movers(cache), call=call, error=error, doing=doing) as fault:
        expected = life(groups, cache)
    assert fault.raised == 1
    assert all(expected[name].equals(store) for name, store in groups.items())
    assert cache.window is None
    totals = cache.metrics
    assert totals.fallbacks == {FallbackReason.MOVER_FAULT: 1}
    assert (totals.windows, totals.staged, totals.committed) == (3, 9, 5)
    assert totals.rows_written == 5 * sum(a + 1 for _, accepted in WINDOWS for a in accepted)


def test_a_life_without_faults_is_the_same() -> None:
    """The control: what the test above compares with does happen."""
    groups = {"full": make_store(Layout.NHD, layers=3)}
    cache = TransactionalCache(groups, max_rows=8)
    before = Snapshot.of(groups["full"])
    with fail_at(*movers(cache), call=()) as fault:
        assert life(groups, cache)["full"].equals(groups["full"])
    assert fault.calls == len(list(itertools.chain(WINDOWS)))
    assert not before.equals(groups["full"])
