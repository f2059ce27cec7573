"""Any order of calls: the manager's state, store and counters follow a model of a few lines."""

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nwor import CommitError, DeferredWriteManager
from nwor.errors import AcceptanceError, RowCountError, StaleWindowError, WindowOpenError
from nwor.reference import kept_rows
from nwor.testing import FailingWriter

LAYERS, SLOTS = 3, 24


class Windows(RuleBasedStateMachine):
    """begin, stage, commit, cancel, finish, faults: in any order."""

    @initialize(hold=st.sampled_from(["copy", "reference"]))
    def start(self, hold: str) -> None:
        self.manager = DeferredWriteManager(hold=hold)
        self.caches = [(torch.zeros(SLOTS, 1, 2), torch.zeros(SLOTS, 1, 2)) for _ in range(LAYERS)]
        self.model = [torch.zeros(SLOTS, 1, 2) for _ in range(LAYERS)]
        self.writers = [FailingWriter() for _ in range(LAYERS)]
        self.drafts: list[int] | None = None
        self.staged: list[list[torch.Tensor]] = []
        self.old: list = []
        self.counter = 0.0
        self.windows = self.rows_written = self.fallbacks = 0

    def fresh_rows(self, count: int) -> torch.Tensor:
        rows = torch.arange(count * 2, dtype=torch.float32).view(count, 1, 2) + self.counter
        self.counter += count * 2 + 1
        return rows

    def close(self) -> None:
        self.windows += 1
        self.drafts = None

    def held(self, layer: int) -> torch.Tensor:
        return torch.cat(self.staged[layer]) if self.staged[layer] else torch.empty(0, 1, 2)

    @precondition(lambda self: self.drafts is None)
    @rule(drafts=st.lists(st.integers(0, 3), min_size=1, max_size=3), seed=st.integers(0, 99))
    def begin(self, drafts: list[int], seed: int) -> None:
        opened = self.manager.begin_window(drafts)
        assert opened == bool(sum(drafts))
        if opened:
            generator = torch.Generator().manual_seed(seed)
            self.drafts = drafts
            self.slots = torch.randperm(SLOTS, generator=generator)[: sum(drafts)]
            self.staged = [[] for _ in range(LAYERS)]
            self.old.append(self.manager.window)

    @precondition(lambda self: self.drafts is not None)
    @rule()
    def begin_again(self) -> None:
        try:
            self.manager.begin_window([1])
        except WindowOpenError:
            return
        raise AssertionError("an open window was cleared silently")

    @precondition(lambda self: self.drafts is not None)
    @rule(layer=st.integers(0, LAYERS - 1), count=st.integers(1, 10))
    def stage(self, layer: int, count: int) -> None:
        start = len(self.held(layer))
        rows = self.fresh_rows(count)
        room = sum(self.drafts) - start
        slots = self.slots[start : start + count] if count <= room else torch.arange(count)
        try:
            self.manager.stage_layer(
                layer_id=str(layer),
                key=rows,
                value=-rows,
                key_cache=self.caches[layer][0],
                value_cache=self.caches[layer][1],
                slot_mapping=slots,
                kv_cache_dtype="auto",
                k_scale=None,
                v_scale=None,
                writer=self.writers[layer],
            )
        except RowCountError:
            assert count > room
        else:
            assert count <= room
            self.staged[layer].append(rows)

    @precondition(lambda self: self.drafts is not None)
    @rule(layer=st.integers(0, LAYERS - 1))
    def stage_the_rest(self, layer: int) -> None:
        room = sum(self.drafts) - len(self.held(layer))
        if room:
            self.stage(layer, room)

    @precondition(lambda self: self.drafts is not None)
    @rule(data=st.data(), fail=st.sampled_from([None, None, 0, 1, 2]), first=st.integers(0, 1))
    def commit(self, data: st.DataObject, fail: int | None, first: int) -> None:
        accepted = [data.draw(st.integers(0, k)) for k in self.drafts]
        kept = kept_rows(self.drafts, accepted, bonus=False)
        used = [layer for layer in range(LAYERS) if self.staged[layer]]
        if fail is not None:
            self.writers[fail].fail, self.writers[fail].rows_first = True, first
        try:
            self.manager.commit(accepted)
        except RowCountError:
            assert any(len(self.held(layer)) != sum(self.drafts) for layer in used)
        except CommitError as error:
            assert error.restored
            assert fail in used
            assert kept
            self.fallbacks += 1
            self.close()
        else:
            assert not (kept and fail in used)
            for layer in used:
                for row in kept:
                    self.model[layer][self.slots[row]] = self.held(layer)[row]
            self.rows_written += len(kept) * len(used)
            self.close()
        if fail is not None:
            self.writers[fail].fail = False

    @precondition(lambda self: self.drafts is not None)
    @rule()
    def commit_nonsense(self) -> None:
        for counts in ([k + 1 for k in self.drafts], [-1] * len(self.drafts), [0] * 9):
            try:
                self.manager.commit(counts)
            except AcceptanceError:
                continue
            raise AssertionError(f"{counts} was taken for {self.drafts}")

    @precondition(lambda self: self.drafts is not None)
    @rule(finish=st.booleans())
    def cancel(self, finish: bool) -> None:
        if finish:
            self.manager.finish_step()
        else:
            self.manager.cancel_and_flush("model")
        for layer in range(LAYERS):
            for row, held in enumerate(self.held(layer)):
                self.model[layer][self.slots[row]] = held
                self.rows_written += 1
        self.fallbacks += 1
        self.close()

    @precondition(lambda self: len(self.old) > 1)
    @rule(data=st.data())
    def commit_an_old_window(self, data: st.DataObject) -> None:
        window = data.draw(st.sampled_from(self.old[:-1]))
        try:
            window.commit([0] * window.rows.num_requests)
        except StaleWindowError:
            return
        raise AssertionError("a late commit was taken")

    @invariant()
    def store_is_the_model(self) -> None:
        for (key, value), expected in zip(self.caches, self.model, strict=True):
            assert torch.equal(key, expected)
            assert torch.equal(value, -expected)

    @invariant()
    def counters_reconcile(self) -> None:
        totals = self.manager.metrics
        assert totals.windows == self.windows
        assert totals.rows_written == self.rows_written
        assert totals.fallbacks.total() == self.fallbacks
        assert totals.staged == totals.committed + totals.rejected + totals.cancelled
        assert self.manager.window_active == (self.drafts is not None)


TestWindows = Windows.TestCase
TestWindows.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
