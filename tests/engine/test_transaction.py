"""I1 to I4 and I6 on the engine: what the durable store holds, and what closes a window."""

from collections.abc import Iterator, Sequence

import pytest
import torch

from engine import models
from engine.helpers import Oracle, run
from engine.test_identity import KINDS, NEW, answers
from nwor.engine import Engine, FinishReason, Options
from nwor.engine.drafters import Proposal
from nwor.engine.request import Request
from nwor.engine.runner import Runner
from nwor.engine.store import DurableStore
from nwor.errors import NoWindowError, StateError


class Spy:
    """Looks at the durable store after every step."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def written(self, page: int, group: str) -> list[int]:
        """Slots of a page that hold something, the same in all layers, for K and V."""
        rows = self.engine.store.groups[group].rows
        holds = [~view[:, page].isnan().all(-1).all(-1) for view in (rows.key, rows.value)]
        assert torch.equal(holds[0], holds[1])
        assert (holds[0] == holds[0][0]).all()
        return holds[0][0].nonzero().flatten().tolist()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("right", [0, 1, 9])
def test_only_accepted_rows_are_ever_written(name: str, right: int) -> None:
    """After every step, each page holds the rows of its request up to the watermark, no other."""
    expected = answers(name)
    prompts = [list(p) for p in expected][:4]
    with Engine(
        models.tiny(name), drafter=Oracle(expected, right=right), max_batch=4, max_length=200,
        max_draft=5, poison=True,
    ) as engine:  # fmt: skip
        spy = Spy(engine)
        for piece in engine.run(prompts, Options(max_new_tokens=NEW, num_draft_tokens=5)):
            request = piece.request
            if request.page is None:
                continue
            for group_name, group in engine.store.groups.items():
                held = spy.written(request.page, group_name)
                assert held == list(range(min(request.durable, group.capacity)))
            emitted = request.prompt_length + len(request.emitted)
            assert request.durable in (emitted - 1, emitted)
        assert (
            engine.metrics.rows_written == engine.metrics.rows_staged - engine.metrics.rows_avoided
        )


@pytest.mark.parametrize("name", KINDS)
def test_write_through_does_write_rejected_rows(name: str) -> None:
    """The control group: the same look at the store finds what `stage` never lets in."""
    expected = answers(name)
    first = next(p for p in expected if len(p) == 3)
    with Engine(
        models.tiny(name), drafter=Oracle(expected, right=0), mode="immediate", max_batch=1,
        max_length=200, max_draft=5, poison=True,
    ) as engine:  # fmt: skip
        spy, beyond = Spy(engine), 0
        for piece in engine.run([list(first)], Options(max_new_tokens=NEW, num_draft_tokens=5)):
            if piece.request.page is not None:
                for group in engine.store.groups:
                    beyond += len(spy.written(0, group)) > piece.request.durable
        assert beyond


@pytest.mark.parametrize("name", KINDS)
def test_durable_bytes_are_those_of_plain_decoding(name: str) -> None:
    """I2: same rows as without speculation, up to the forward's own rounding by batch shape."""
    expected = answers(name)
    prompts = [list(p) for p in expected][:4]
    stores: list[DurableStore] = []
    for drafts in (0, 4):
        _, engine = run(
            models.tiny(name), prompts, Options(max_new_tokens=NEW, num_draft_tokens=drafts),
            drafter=Oracle(expected, right=2), max_draft=4,
        )  # fmt: skip
        stores.append(engine.store)
    for group, other in zip(stores[0].groups.values(), stores[1].groups.values(), strict=True):
        for mine, theirs in (
            (group.rows.key, other.rows.key),
            (group.rows.value, other.rows.value),
        ):
            both = ~(mine.isnan() | theirs.isnan())
            assert both.any()
            torch.testing.assert_close(mine[both], theirs[both], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", KINDS)
def test_staged_and_written_through_rows_are_equal_bit_for_bit(name: str) -> None:
    """I2: in equal batches the commit moves exactly the bytes that write-through writes."""
    expected = answers(name)
    prompts = [list(p) for p in expected][:4]
    stores = []
    for mode in ("immediate", "stage"):
        _, engine = run(
            models.tiny(name), prompts, Options(max_new_tokens=NEW, num_draft_tokens=4),
            drafter=Oracle(expected), mode=mode,
        )  # fmt: skip
        stores.append(engine.store)
    for group, other in zip(stores[0].groups.values(), stores[1].groups.values(), strict=True):
        for mine, theirs in (
            (group.rows.key, other.rows.key),
            (group.rows.value, other.rows.value),
        ):
            both = ~theirs.isnan()
            assert torch.equal(mine[both], theirs[both])


def test_written_through_windows_count_their_drafts_and_save_nothing() -> None:
    expected = answers("llama")
    prompts = [list(p) for p in expected][:3]
    totals = {}
    for mode in ("immediate", "stage"):
        _, engine = run(
            models.tiny("llama"), prompts, Options(max_new_tokens=NEW, num_draft_tokens=4),
            drafter=Oracle(expected), mode=mode,
        )  # fmt: skip
        totals[mode] = engine.metrics
    immediate, stage = totals["immediate"], totals["stage"]
    assert immediate.windows == immediate.empty_windows == stage.windows
    assert immediate.flushed == stage.staged > 0
    assert immediate.rows_written == stage.rows_staged
    assert immediate.staged == immediate.rows_avoided == 0


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_leaving_early_releases_everything(steps: int) -> None:
    expected = answers("gemma3")
    with Engine(models.tiny("gemma3"), max_batch=2, max_length=200) as engine:
        pieces: Iterator[object] = engine.run(
            [list(p) for p in expected], Options(num_draft_tokens=4, max_new_tokens=NEW)
        )
        for _ in range(steps):
            next(pieces)
        pieces.close()  # type: ignore[attr-defined]
        assert engine.free_pages == 2
        assert engine.cache.window is None
        list(engine.run([[3, 4, 5]], Options(max_new_tokens=3)))


def test_one_batch_at_a_time() -> None:
    with Engine(models.tiny("llama"), max_batch=1, max_length=50) as engine:
        first = engine.run([[3, 4]], Options(max_new_tokens=4))
        next(first)
        second = engine.run([[3, 4]], Options(max_new_tokens=4))
        with pytest.raises(StateError, match="running"):
            next(second)
        list(first)


def test_the_model_gets_its_attention_back() -> None:
    model = models.tiny("llama")
    ids = torch.tensor([[3, 4, 5]])
    before = model(ids).logits
    with Engine(model, max_batch=1, max_length=50):
        with pytest.raises(NoWindowError, match="close the engine"):
            model(ids)
        with pytest.raises(StateError, match="another nwor engine"):
            Runner(model)
    assert model.config._attn_implementation == "eager"
    assert torch.equal(model(ids).logits, before)


@pytest.mark.parametrize("stop_at", range(1, NEW))
def test_stop_token_anywhere_in_an_accepted_run(stop_at: int) -> None:
    """Emitted tokens, durable rows and counters agree wherever the stop falls."""
    expected = answers("llama")
    ids = [list(p) for p in expected][2]
    full = expected[tuple(ids)]
    stop = full[stop_at]
    if stop in full[:stop_at]:
        pytest.skip("the token comes earlier too")
    with Engine(
        models.tiny("llama"),
        drafter=Oracle(expected),
        max_batch=1,
        max_length=100,
        max_draft=5,
        poison=True,
    ) as engine:
        options = Options(max_new_tokens=NEW, num_draft_tokens=5, stop_token_ids=frozenset([stop]))
        pieces = list(engine.run([ids], options))
        request = pieces[-1].request
        assert request.emitted == full[: stop_at + 1]
        assert request.finish is (
            FinishReason.STOP if len(request.emitted) < NEW else request.finish
        )
        assert engine.metrics.committed == sum(request.drafted)
        group = next(iter(engine.store.groups.values()))
        held = (~group.rows.key[0, 0].isnan().any(-1).any(-1)).sum()
        assert held == request.durable <= len(ids) + len(request.emitted)


def test_max_new_tokens_cuts_the_last_window() -> None:
    expected = answers("llama")
    prompts: Sequence[list[int]] = [list(p) for p in expected]
    for count in range(1, NEW + 1):
        out, engine = run(
            models.tiny("llama"), prompts, Options(max_new_tokens=count, num_draft_tokens=8),
            drafter=Oracle(expected, extra=3),
        )  # fmt: skip
        assert out == [answer[:count] for answer in expected.values()]
        assert engine.metrics.committed == sum(engine.stats.accepted)


def test_no_draft_is_asked_for_beyond_the_end_of_a_request() -> None:
    """The last token of a request is the target's own: one less than remain may be drafted."""

    class Asked(Oracle):
        def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> Proposal:
            asked.append(([r.remaining for r in requests], list(limits)))
            return super().propose(requests, limits)

    asked: list[tuple[list[int], list[int]]] = []
    expected = answers("llama")
    run(
        models.tiny("llama"), [list(p) for p in expected],
        Options(max_new_tokens=NEW, num_draft_tokens=8), drafter=Asked(expected, extra=3),
    )  # fmt: skip
    assert all(limits == [min(8, n - 1) for n in remaining] for remaining, limits in asked)
    assert any(n <= 8 for remaining, _ in asked for n in remaining), "no request came to its end"
