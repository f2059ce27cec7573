"""Every protection switched off, one at a time: the audit must object, and name what and where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness import Engine, greedy, prompts

from nwor.audit import Findings, Kind
from nwor.manager import Mode
from nwor.store import overlay_effects
from nwor.store.overlay_effects import OverlayEffects
from nwor.store.overlay_window import OverlayWindow
from nwor.store.staging import StagingPages
from nwor.vllm.audit import RunnerAudit, audit_of

Get = Callable[..., Engine]
Patch = pytest.MonkeyPatch
TEXTS = prompts(20, 31, 33, 60)


def skip_the_undo(patch: Patch, llm: Engine) -> None:
    def close(self: OverlayWindow) -> None:
        self.is_open = False

    patch.setattr(OverlayWindow, "close", close)


def commit_before_sampling(patch: Patch, llm: Engine) -> None:
    """As soon as the forward is through, and everything."""
    forward = llm.runner._model_forward

    def commit(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        window = llm.runner.nwor._window
        if window is not None:
            llm.runner.nwor._window = None
            window.commit(window.batch.num_drafts)
        return output

    patch.setattr(llm.runner, "_model_forward", commit)


def with_counts(patch: Patch, change: Callable[[Any, Any], Any]) -> None:
    commit = OverlayWindow.commit

    def changed(self: OverlayWindow, accepted: Any) -> None:
        drafts = self.batch.num_drafts
        commit(self, np.clip(change(np.asarray(accepted), drafts), 0, drafts))

    patch.setattr(OverlayWindow, "commit", changed)


def keep_one_rejected_row(patch: Patch, llm: Engine) -> None:
    with_counts(patch, lambda accepted, drafts: accepted + 1)


def keep_every_row(patch: Patch, llm: Engine) -> None:
    with_counts(patch, lambda accepted, drafts: drafts)


def lose_one_accepted_row(patch: Patch, llm: Engine) -> None:
    with_counts(patch, lambda accepted, drafts: accepted - 1)


def counts_by_batch_row_after_a_reorder(patch: Patch, llm: Engine) -> None:
    with_counts(patch, lambda accepted, drafts: np.roll(accepted, 1))


def moving_home(
    patch: Patch, change: Callable[[Any, Any], tuple[Any, Any]], *, fill: bool = False
) -> None:
    """Change what moves home (or, with `fill`, what is filled in)."""
    move = OverlayEffects.move

    def changed(self: OverlayEffects, storage: Any, source: Any, target: Any) -> None:
        staged = self.pages.first_page * self.groups[0].page_size
        if len(target) and (target[0] >= staged) is np.bool_(fill):
            source, target = change(source, target)
        move(self, storage, source, target)

    patch.setattr(OverlayEffects, "move", changed)


def drop_the_last_row_of_a_commit(patch: Patch, llm: Engine) -> None:
    moving_home(patch, lambda source, target: (source[:-1], target[:-1]))


def shift_the_source_by_one(patch: Patch, llm: Engine) -> None:
    moving_home(patch, lambda source, target: (source - 1, target))


def shift_the_target_by_one(patch: Patch, llm: Engine) -> None:
    moving_home(patch, lambda source, target: (source, target + 1))


def swap_two_rows(patch: Patch, llm: Engine) -> None:
    moving_home(patch, lambda source, target: (source[::-1].copy(), target))


def fill_in_one_row_too_few(patch: Patch, llm: Engine) -> None:
    moving_home(patch, lambda source, target: (source[:-1], target[:-1]), fill=True)


def fill_in_nothing(patch: Patch, llm: Engine) -> None:
    patch.setattr(overlay_effects, "plan_fill", lambda *args: None)


def leak_staging_pages(patch: Patch, llm: Engine) -> None:
    patch.setattr(StagingPages, "release", lambda self, request: None)


def lease_the_same_pages_twice(patch: Patch, llm: Engine) -> None:
    lease = StagingPages.lease
    patch.setattr(StagingPages, "lease", lambda self, requests: [0] * len(lease(self, requests)))


def leave_the_slot_mapping_alone(patch: Patch, llm: Engine) -> None:
    point = OverlayEffects.point

    def tables_only(self: OverlayEffects, plan: Any, pages: Any, slots: Any) -> None:
        point(self, plan, pages, plan.durable)

    patch.setattr(OverlayEffects, "point", tables_only)


def leave_the_block_table_alone(patch: Patch, llm: Engine) -> None:
    point = OverlayEffects.point

    def slots_only(self: OverlayEffects, plan: Any, pages: Any, slots: Any) -> None:
        point(self, plan, plan.durable_pages, slots)

    patch.setattr(OverlayEffects, "point", slots_only)


def forget_one_layer(patch: Patch, llm: Engine) -> None:
    """Only bytes can tell: metadata is the same for all layers."""
    storage = llm.overlay.effects.storages[0]
    rows = llm.overlay.groups[0].rows[0]
    move = storage.move

    def all_but_the_last(source: Any, target: Any) -> None:
        size = rows.page_size
        kept = rows.key[-1, target // size, target % size].clone()
        move(source, target)
        rows.key[-1, target // size, target % size] = kept

    object.__setattr__(storage, "move", all_but_the_last)
    patch.setattr(llm, "mended", lambda: object.__setattr__(storage, "move", move), raising=False)


READS = {Kind.UNWRITTEN_READ, Kind.FOREIGN_READ, Kind.REJECTED_READ, Kind.STALE_READ}
"""One of them, according to what the staging page held before."""

MUTANTS: dict[Callable[[Patch, Engine], None], set[Kind]] = {
    skip_the_undo: {Kind.NOT_RESTORED},
    commit_before_sampling: {Kind.EARLY_COMMIT, Kind.REJECTED_IN_DURABLE},
    keep_one_rejected_row: {Kind.REJECTED_IN_DURABLE},
    keep_every_row: {Kind.REJECTED_IN_DURABLE},
    lose_one_accepted_row: {Kind.ROW_LOST},
    counts_by_batch_row_after_a_reorder: {Kind.ROW_LOST, Kind.REJECTED_IN_DURABLE},
    drop_the_last_row_of_a_commit: {Kind.ROW_LOST},
    shift_the_source_by_one: {Kind.ROW_LOST},
    shift_the_target_by_one: {Kind.ROW_LOST, Kind.FOREIGN_WRITE},
    swap_two_rows: {Kind.ROW_LOST},
    fill_in_one_row_too_few: READS,
    fill_in_nothing: READS,
    leak_staging_pages: {Kind.LEAK},
    lease_the_same_pages_twice: {Kind.DOUBLE_WRITE},
    leave_the_slot_mapping_alone: {Kind.DISAGREE, Kind.REJECTED_IN_DURABLE},
    leave_the_block_table_alone: {Kind.DISAGREE},
    forget_one_layer: {Kind.BYTES_LOST},
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_caught(engine: Get, monkeypatch: Patch, mutant: Callable[[Patch, Engine], None]) -> None:
    monkeypatch.setenv("NWOR_AUDIT", "bytes")
    llm = engine(k=8)
    llm.learn(TEXTS, greedy(48))
    llm.drain()
    audit = audit_of(llm.runner)
    assert audit is not None
    with monkeypatch.context() as patch:
        mutant(patch, llm)
        found = run(llm, audit)
        getattr(llm, "mended", lambda: None)()
    wanted = MUTANTS[mutant]
    seen = wanted & set(found.counts)
    assert seen if wanted is READS else seen == wanted, f"found only {found.counts}"
    for kind in seen:
        first = found.first[kind]
        assert first.step > 1, first
        assert first.slot >= 0 or first.request, f"no place: {first}"
    pages = llm.overlay.pages
    for request in list(pages.requests):  # what the mutant leaked
        llm.overlay.release(request)
    pages.held.fill(-1)
    pages.durable.fill(-1)
    pages.filled.fill(0)
    healthy = run(llm, audit)
    assert not healthy.counts, f"the engine has not recovered: {healthy.first}"


def run(llm: Engine, audit: RunnerAudit) -> Findings:
    assert llm.llm.reset_prefix_cache()
    llm.runner.nwor.set_mode(Mode.STAGE)
    audit.reset()
    for i, text in enumerate(TEXTS):
        llm.llm.llm_engine.add_request(str(i), {"prompt_token_ids": text}, greedy(30))
    while llm.llm.llm_engine.has_unfinished_requests():
        llm.llm.llm_engine.step()
    llm.drain()
    return audit.findings
