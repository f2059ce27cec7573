"""The audit of the embedded engine: sound engines are acquitted, every broken one is convicted."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

import nwor.engine.core
import nwor.engine.step
from engine import conftest, models
from engine.helpers import Oracle
from nwor.audit import AuditLevel, Findings, Kind
from nwor.audit.workloads import Job
from nwor.cache import RowWindow
from nwor.cli import main
from nwor.engine.audit_run import Adversary, JobEngine
from nwor.engine.core import Engine
from nwor.engine.request import Request
from nwor.engine.step import Segment
from nwor.engine.store import DurableStore

tokenizer = conftest.tokenizer
K = 4
JOBS = (
    Job("", tokens=20),
    Job("", tokens=31, arrive=2),
    Job("", tokens=9, arrive=3),
    Job("", tokens=25, abort=9),
    Job("", tokens=24),
)
PROMPTS = [models.prompt(n, seed=n) for n in (5, 13, 30, 7, 21)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def audited(
    level: AuditLevel = AuditLevel.BYTES, mode: str = "stage", name: str = "gemma3"
) -> tuple[Findings, dict[int, list[int]]]:
    """Rings of 12 rows and full pages of 80, three requests at a time, stops inside windows."""
    answers: dict[int, list[int]] = {}
    with JobEngine(
        models.tiny(name),
        level=level,
        drafter=Adversary(),
        mode=mode,
        max_batch=3,
        max_length=80,
        max_draft=K,
    ) as engine:
        engine.stops = [None, None, None, None, 17]
        for run in engine.start(JOBS, PROMPTS, K):
            answers.setdefault(run.request.index, []).extend(run.tokens)
        if engine.final is not None:
            engine.final.check(engine.runner, engine.books.shadow, engine.prefill_chunk)
        return engine.findings, answers


@pytest.mark.parametrize("level", [AuditLevel.METADATA, AuditLevel.BYTES])
@pytest.mark.parametrize("name", ["gemma3", "llama", "gpt2"])
def test_nothing_on_nwor(name: str, level: AuditLevel) -> None:
    found, answers = audited(level, name=name)
    assert not found.counts, found.first
    assert found.rejected > 0
    assert found.rows_checked > 500
    for index in (0, 1, 2):
        want = models.stock_greedy(models.tiny(name), PROMPTS[index], JOBS[index].tokens)
        assert answers[index] == want
    if level is AuditLevel.BYTES:
        assert 0 < found.final_equal <= found.final_rows
        assert found.final_error < found.final_limit == pytest.approx(3.45e-4, rel=0.01)


def test_write_through_leaves_every_rejected_row_behind() -> None:
    found, answers = audited(AuditLevel.METADATA, "immediate")
    assert answers == audited(AuditLevel.METADATA)[1]
    early = {Kind.REJECTED_IN_DURABLE, Kind.EARLY_COMMIT, Kind.FOREIGN_WRITE}
    assert set(found.counts) == early
    assert found.counts[Kind.REJECTED_IN_DURABLE] == 2 * found.rejected  # two groups


@pytest.mark.parametrize("drafter", ["adversary", "prompt-lookup", "model"])
def test_the_command_with_files_and_drafters(
    drafter: str,
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, file, out = tmp_path / "model", tmp_path / "mine.jsonl", tmp_path / "audit.json"
    models.tiny("gemma3").save_pretrained(model)
    tokenizer.save_pretrained(model)
    lines = [
        {"prompt": "abc" * 20, "max_tokens": 20, "stop_at": 12},
        {"prompt": "xyxyxyxyxy", "max_tokens": 60, "abort_after": 6},
        {"prompt": "ababcdcdababcdcd", "max_tokens": 70, "arrive": 3},
    ]
    file.write_text("\n".join(json.dumps(line) for line in lines))
    command = ["audit", "--engine", "transformers", "--model", str(model), "--level", "bytes"]
    name = f"model:{model}" if drafter == "model" else drafter
    options = ["--drafter", name, "--workload", str(file), "--json", str(out)]
    code = main([*command, "--control", *options])
    found = json.loads(out.read_text())
    staged, control = (found["workloads"][0][run] for run in ("staged", "control"))
    assert not staged["violations"]
    assert staged["final_rows"] > 0
    assert staged["tokens"] < 20 + 60 + 70 - 8  # one stops, one is aborted
    left = control["violations"].get(Kind.REJECTED_IN_DURABLE.value, 0)
    assert left == 2 * staged["rejected"]  # two groups
    assert code == 0, capsys.readouterr().out
    if (
        drafter == "model"
    ):  # always right about itself: rejected is only what follows the stop token
        assert staged["rejected"] <= 4


def test_an_unknown_drafter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models.tiny("gemma3").save_pretrained(tmp_path)
    command = ["audit", "--engine", "transformers", "--model", str(tmp_path)]
    assert main([*command, "--drafter", "medusa"]) == 2
    assert "known: adversary, prompt-lookup, model:" in capsys.readouterr().err


def answered(jobs: Sequence[Job], stop: int | None = None) -> tuple[Findings, list[list[int]]]:
    """Findings, and the tokens of each step of the first job, which stops at `stop`.

    All drafts are right.
    """
    model, prompts = models.tiny("llama"), PROMPTS[: len(jobs)]
    answers = {tuple(prompt): models.stock_greedy(model, prompt, 40) for prompt in prompts}
    with JobEngine(
        model,
        level=AuditLevel.METADATA,
        drafter=Oracle(answers),
        max_batch=3,
        max_length=80,
        max_draft=K,
    ) as engine:
        engine.stops = [stop, *[None] * (len(jobs) - 1)]
        runs = list(engine.start(jobs, prompts, K))
        return engine.findings, [run.tokens for run in runs if run.request.index == 0]


def test_a_stop_inside_a_run_is_told_from_one_at_its_end() -> None:
    job = [Job("", tokens=20)]
    found, steps = answered(job)
    assert found.cut == 0
    behind = [(token, len(step) - 1 - at) for step in steps for at, token in enumerate(step)]
    first = dict(reversed(behind))
    assert min(first.values()) == 0 < max(first.values())
    assert {token: answered(job, token)[0].cut for token in first} == first


@pytest.mark.parametrize(
    ("abort", "others", "counted"), [(6, True, 1), (1, True, 0), (6, False, 0)]
)
def test_an_abort_counts_after_a_window_and_while_others_go_on(
    abort: int, others: bool, counted: int
) -> None:
    jobs = [Job("", tokens=40, abort=abort), Job("", tokens=40)]
    assert answered(jobs[: 1 + others])[0].aborted == counted


# -- engines with one thing wrong ----------------------------------------------------------------


def one_row_too_many(patch: pytest.MonkeyPatch) -> None:
    commit = RowWindow.commit

    def wrong(self: RowWindow, accepted: list[int], **options: int) -> None:
        drafts = self.rows.num_drafts
        commit(self, [min(a + 1, d) for a, d in zip(accepted, drafts, strict=True)], **options)

    patch.setattr(RowWindow, "commit", wrong)


def one_row_too_few(patch: pytest.MonkeyPatch) -> None:
    commit = RowWindow.commit
    patch.setattr(
        RowWindow,
        "commit",
        lambda self, accepted, **options: commit(
            self, [max(a - 1, 0) for a in accepted], **options
        ),
    )


def a_slot_too_far(patch: pytest.MonkeyPatch) -> None:
    slots_of = nwor.engine.core.slots_of

    def wrong(store: DurableStore, segments: Sequence[Segment]) -> dict[str, torch.Tensor]:
        slots = slots_of(store, segments)
        sizes = {name: store.groups[name].capacity for name in slots}
        return {n: s - s % sizes[n] + (s + 1) % sizes[n] for n, s in slots.items()}

    patch.setattr(nwor.engine.core, "slots_of", wrong)


def a_layer_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Rows of the group's last layer stay in the arena; metadata cannot know."""
    bind = nwor.cache.get_mover("torch")

    def forgetful(arena: nwor.KVRows, durable: nwor.KVRows) -> object:
        end = arena.num_layers - 1
        cut = [nwor.KVRows(rows.key[:end], rows.value[:end]) for rows in (arena, durable)]
        return bind(*cut) if end else bind(arena, durable)

    patch.setattr(nwor.cache, "get_mover", lambda _: forgetful)


def a_page_given_twice(patch: pytest.MonkeyPatch) -> None:
    """Windows refuse two rows for one slot; without them nobody does."""
    admit = Engine._admit

    def wrong(self: Engine, waiting: object) -> list[Request]:
        admitted = admit(self, waiting)  # type: ignore[arg-type]
        for request in admitted:
            request.page = 0
        return admitted

    patch.setattr(Engine, "_admit", wrong)


def a_page_lost(patch: pytest.MonkeyPatch) -> None:
    retire = Engine._retire

    def wrong(self: Engine, active: Sequence[Request]) -> list[Request]:
        before = len(self._free)
        running = retire(self, active)
        if len(self._free) > before and len(self._free) > 1:
            self._free.pop()
        return running

    patch.setattr(Engine, "_retire", wrong)


def the_newest_durable_row_unseen(patch: pytest.MonkeyPatch) -> None:
    """Attention of windows is blind for one row, which spoils what deeper layers write."""
    reads = nwor.engine.step._durable_reads

    def wrong(block: object, *rest: object) -> list[nwor.engine.step._Read]:
        found = reads(block, *rest)  # type: ignore[arg-type]
        start = block.segments[0].start  # type: ignore[attr-defined]
        if block.width == 1 or start < 12:  # type: ignore[attr-defined] # not the engine's own check
            return found
        return [
            nwor.engine.step._Read(r.first, r.last, r.page, max(r.rows - 1, 1), None) for r in found
        ]

    patch.setattr(nwor.engine.step, "_durable_reads", wrong)


_ROWS = {Kind.REJECTED_IN_DURABLE, Kind.FOREIGN_WRITE}
_READS = {Kind.UNWRITTEN_READ, Kind.FOREIGN_READ, Kind.REJECTED_READ, Kind.STALE_READ}


@pytest.mark.parametrize(
    ("break_it", "kinds"),
    [
        (one_row_too_many, {Kind.REJECTED_IN_DURABLE, Kind.FOREIGN_WRITE}),
        (one_row_too_few, {Kind.ROW_LOST}),
        (a_slot_too_far, {Kind.FOREIGN_WRITE, Kind.ROW_LOST}),
        (a_layer_forgotten, {Kind.BYTES_LOST}),
        (a_page_given_twice, {Kind.FOREIGN_READ}),
        (a_page_lost, {Kind.LEAK}),
        (the_newest_durable_row_unseen, {Kind.FINAL_DIFFERS}),
    ],
)
def test_a_broken_engine(
    break_it: object, kinds: set[Kind], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)  # type: ignore[operator]
    found, _ = audited(mode="immediate" if break_it is a_page_given_twice else "stage")
    assert kinds <= set(found.counts), found.first
    if Kind.FINAL_DIFFERS in kinds or Kind.BYTES_LOST in kinds:  # what metadata cannot see
        assert not {Kind.ROW_LOST, *_READS, *_ROWS} & set(found.counts)
    assert all(violation.step for violation in found.first.values())
