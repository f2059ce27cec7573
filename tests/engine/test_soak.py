"""A short soak of the embedded engine is clean, and one of a broken engine is not."""

from __future__ import annotations

import json
import re
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import nwor.engine.verify
from nwor.cache import RowWindow
from nwor.engine.core import Engine
from nwor.engine.request import FinishReason, Request
from nwor.engine.sampling import Verdict
from nwor.engine.stopping import Cut
from nwor.metrics import Metrics
from nwor.soak.cli import main
from nwor.soak.ledger import Ledger
from nwor.soak.on_transformers import TransformersSoak
from nwor.soak.tiny import FIRST, greedy_texts, tiny_model

Patch = pytest.MonkeyPatch
COMMAND = ["--engine", "transformers", "--seed", "5", "--check-every", "2"]


def test_a_sound_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "soak.json"
    assert main([*COMMAND, "--seconds", "5", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    totals = found["totals"]
    assert found["violations"] == []
    assert found["not_tested"] == []
    assert set(found["not_applicable"]) == {"preempted"}
    assert "preempted" not in totals
    assert min(totals.values()) > 0
    assert totals["drafted"] == totals["accepted"] + totals["rejected"]
    assert totals["requests"] == totals["finished"] + totals["aborted"]
    assert totals["tokens"] > totals["requests"]
    assert totals["checks"] > totals["steps"] // 2
    assert found["seed"] == 5
    assert "violations                       0" in capsys.readouterr().out
    assert str(tmp_path) not in out.read_text()


def test_a_wave_that_is_left_in_the_midst_of_a_step() -> None:
    """Some requests have ended in that step, but nobody has taken their last tokens."""
    soak = TransformersSoak()
    traffic = soak.traffic(seed=0)
    wave = traffic.wave(10)
    assert wave.leave > 0
    ledger = Ledger(check_every=1)
    ledger.begin(wave)
    soak.run(wave, traffic, ledger)
    soak.close()
    ends = {r.index: r.finish for r in soak._started().requests}
    assert FinishReason.INTERRUPTED in ends.values()
    assert ledger.totals.finished < sum(end is FinishReason.LENGTH for end in ends.values())
    assert ledger.totals.requests == ledger.totals.finished + ledger.totals.aborted
    assert not ledger.violations


def test_texts_are_worth_comparing() -> None:
    """A model that repeats itself would say the right token whatever its cache holds."""
    texts = greedy_texts(tiny_model("gemma3-untied"), 8, start=6, length=100, seed=0)
    distinct = [len(set(text[6:])) for text in texts]
    assert min(distinct) > 4
    assert sum(distinct) / len(distinct) > 12
    assert len({tuple(text[-20:]) for text in texts}) > 6
    assert all(min(text[1:6]) >= FIRST for text in texts)


# -- engines with one thing wrong ----------------------------------------------------------------


def one_row_too_many(patch: Patch) -> None:
    commit = RowWindow.commit

    def wrong(self: RowWindow, accepted: list[int], **options: int) -> None:
        drafts = self.rows.num_drafts
        commit(self, [min(a + 1, d) for a, d in zip(accepted, drafts, strict=True)], **options)

    patch.setattr(RowWindow, "commit", wrong)


def a_page_lost(patch: Patch) -> None:
    retire = Engine._retire

    def wrong(self: Engine, active: Sequence[Request]) -> list[Request]:
        before = len(self._free)
        running = retire(self, active)
        if len(self._free) > before and len(self._free) > 1:
            self._free.pop()
        return running

    patch.setattr(Engine, "_retire", wrong)


def a_page_freed_twice(patch: Patch) -> None:
    retire = Engine._retire

    def wrong(self: Engine, active: Sequence[Request]) -> list[Request]:
        before = len(self._free)
        running = retire(self, active)
        if len(self._free) > before:
            self._free.append(self._free[-1])
        return running

    patch.setattr(Engine, "_retire", wrong)


def a_window_left_open(patch: Patch) -> None:
    patch.setattr(RowWindow, "commit", lambda self, accepted, **options: None)
    patch.setattr(RowWindow, "__exit__", lambda self, *error: None)


def a_watermark_too_low(patch: Patch) -> None:
    window = Engine._window

    def wrong(self: Engine, active: Sequence[Request], *rest: Any) -> Any:
        yield from window(self, active, *rest)
        if len(active) > 3:
            active[0].durable -= 1

    patch.setattr(Engine, "_window", wrong)


def a_draft_not_counted(patch: Patch) -> None:
    count = Metrics.count_commit
    patch.setattr(
        Metrics,
        "count_commit",
        lambda self, *, drafts, **rest: count(self, drafts=max(drafts - 1, 0), **rest),
    )


def every_draft_accepted(patch: Patch) -> None:
    patch.setattr(
        nwor.engine.verify,
        "verify_greedy",
        lambda chosen, drafts: Verdict(len(drafts), chosen[len(drafts)]),
    )


def a_commit_that_raises(patch: Patch) -> None:
    commit, calls = RowWindow.commit, [0]

    def wrong(self: RowWindow, accepted: list[int], **options: int) -> None:
        calls[0] += 1
        if calls[0] == 9:
            raise ZeroDivisionError("nine")
        commit(self, accepted, **options)

    patch.setattr(RowWindow, "commit", wrong)


def requests_stopped_early(patch: Patch) -> None:
    emit = Engine._emit

    def wrong(self: Engine, request: Request, run: list[int], drafts: int, cut: Cut) -> Any:
        made = emit(self, request, run, drafts, cut)
        if request.index % 5 == 4 and len(request.emitted) >= 4:
            request.finish = FinishReason.STOP
        return made

    patch.setattr(Engine, "_emit", wrong)


def requests_interrupted_early(patch: Patch) -> None:
    emit = Engine._emit

    def wrong(self: Engine, request: Request, run: list[int], drafts: int, cut: Cut) -> Any:
        made = emit(self, request, run, drafts, cut)
        if request.index % 5 == 4 and len(request.emitted) >= 4:
            request.finish = FinishReason.INTERRUPTED
        return made

    patch.setattr(Engine, "_emit", wrong)


def a_waiting_request_dropped(patch: Patch) -> None:
    admit = Engine._admit

    def wrong(self: Engine, waiting: deque[Request]) -> list[Request]:
        if len(waiting) > 3:
            waiting.popleft()
        return admit(self, waiting)

    patch.setattr(Engine, "_admit", wrong)


def pages_kept_when_left(patch: Patch) -> None:
    """Leaving in the midst of a wave gives nothing back."""
    retire = Engine._retire

    def wrong(self: Engine, active: Sequence[Request]) -> list[Request]:
        leaving = isinstance(sys.exception(), GeneratorExit)
        return list(active) if leaving else retire(self, active)

    patch.setattr(Engine, "_retire", wrong)


def ends_that_nobody_is_told_of(patch: Patch) -> None:
    """The page is given back, but `_retire` never hears of it, nor does the audit."""
    emit = Engine._emit

    def wrong(self: Engine, request: Request, run: list[int], drafts: int, cut: Cut) -> Any:
        made = emit(self, request, run, drafts, cut)
        if request.finish is not None and request.page is not None:
            self._free.append(request.page)
            request.page = None
        return made

    patch.setattr(Engine, "_emit", wrong)


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (one_row_too_many, "I1 rejected_row_in_durable_page: wave 0, step "),
        (a_page_lost, "I6 pages_are_free_or_owned_by_one: wave 0, step "),
        (a_page_freed_twice, "I6 pages_are_free_or_owned_by_one: wave 0, step "),
        (a_window_left_open, "I6 no_window_open_between_steps: wave 0, step "),
        (a_watermark_too_low, "I1 durable_rows_are_the_accepted_tokens: wave 0, step "),
        (a_draft_not_counted, "I1 counters_reconcile: wave 0, step "),
        (every_draft_accepted, "I5 tokens_are_those_without_speculation: wave 0, step "),
        (requests_stopped_early, "I5 tokens_are_those_without_speculation: wave 0, step "),
        (requests_interrupted_early, "I5 tokens_are_those_without_speculation: wave 0, step "),
        (a_waiting_request_dropped, "I6 everything_is_returned: wave 0, .* that never ended: "),
        (pages_kept_when_left, "I6 everything_is_returned: wave .* running requests: "),
        (ends_that_nobody_is_told_of, "I6 everything_is_returned: wave 0, .* the audit's map: "),
        (a_commit_that_raises, "I6 the_engine_runs: wave 0, step "),
    ],
)
def test_a_broken_engine(
    break_it: Callable[[Patch], None],
    says: str,
    monkeypatch: Patch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    break_it(monkeypatch)
    assert main([*COMMAND, "--check-every", "1", "--seconds", "60"]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert re.search(f"first: {says}", text), text
    assert "python -m nwor.soak --engine transformers --seed 5 " in text


def test_the_same_seed_finds_the_same_place(
    monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    a_page_lost(monkeypatch)
    first, second = (
        (main([*COMMAND]), capsys.readouterr().out.partition("first:")[2]) for _ in range(2)
    )
    assert first == second
    assert first[1]


def test_a_closed_soak_gives_the_model_back() -> None:
    engine = TransformersSoak()
    before = engine._model.config._attn_implementation
    engine._started()
    engine.close()
    assert engine._model.config._attn_implementation == before
