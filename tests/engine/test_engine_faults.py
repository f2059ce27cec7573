"""A fault anywhere in the engine: nothing of its window is durable, and the next run is as ever."""

from collections.abc import Iterator

import pytest
import torch

from engine import models
from engine.helpers import Oracle
from engine.test_identity import NEW, answers
from nwor.engine import Engine, Options
from nwor.engine import core as engine_core
from nwor.metrics import FallbackReason
from nwor.testing import Doing, Place, bits, everything, fail_at, first_rows, movers

OPTIONS = Options(max_new_tokens=NEW, num_draft_tokens=4)
PLACES = ("forward", "layer", "sampling", "stopper", "drafter", "counting", "staging")


@pytest.fixture(params=["llama", "gemma3"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    drafter = Oracle(answers(request.param), right=1)
    with Engine(
        models.tiny(request.param), drafter=drafter, max_batch=2, max_length=200, poison=True
    ) as made:
        yield made


def place(engine: Engine, name: str) -> Place:
    return {
        "forward": (engine.runner, "forward"),
        "layer": (engine.runner.model.get_decoder().layers[1], "forward"),
        "sampling": (engine_core, "verify"),
        "stopper": (engine_core.Stopper, "cut"),
        "drafter": (engine.drafter, "propose"),
        "counting": (engine_core, "accepted_drafts"),
        "staging": (engine_core.Stage, "put"),
    }[name]


def expected(engine: Engine) -> dict[tuple[int, ...], list[int]]:
    name = engine.runner.model.config.model_type.removesuffix("_text")
    return dict(list(answers(name).items())[:4])


def store(engine: Engine) -> list[torch.Tensor]:
    return [bits(view) for g in engine.store.groups.values() for view in (g.rows.key, g.rows.value)]


def run(engine: Engine) -> tuple[dict[int, list[int]], list[torch.Tensor]]:
    """Run all prompts; the store as it was after the last step that went well comes along."""
    out: dict[int, list[int]] = {}
    last: list[torch.Tensor] = []
    try:
        for piece in engine.run([list(p) for p in expected(engine)], OPTIONS):
            out.setdefault(piece.request.index, []).extend(piece.tokens)
            last = store(engine)
    except (RuntimeError, KeyboardInterrupt) as error:
        out[-1] = [type(error) is KeyboardInterrupt]
    return out, last


def unharmed(engine: Engine) -> None:
    """I6, and a run that gives what it always gives."""
    assert engine.cache.window is None
    assert engine.free_pages == 2
    totals = engine.metrics
    assert totals.staged == totals.committed + totals.rejected + totals.cancelled
    assert list(run(engine)[0].values()) == list(expected(engine).values())


@pytest.mark.parametrize("doing", [None, everything])
@pytest.mark.parametrize("error", [RuntimeError("on purpose"), KeyboardInterrupt()])
@pytest.mark.parametrize("where", PLACES)
def test_a_fault_before_the_commit_writes_nothing_of_its_window(
    engine: Engine, where: str, error: BaseException, doing: Doing | None
) -> None:
    call = {"layer": 4, "forward": 4, "stopper": 7, "staging": 5}.get(where, 2)
    with fail_at(place(engine, where), call=call, error=error, doing=doing) as fault:
        out, before = run(engine)
    assert fault.raised == 1
    assert out[-1] == [isinstance(error, KeyboardInterrupt)]
    assert any(out.values())
    assert all(torch.equal(a, b) for a, b in zip(before, store(engine), strict=True))
    unharmed(engine)


@pytest.mark.parametrize("doing", [None, first_rows(), first_rows(1), everything])
@pytest.mark.parametrize("call", [1, 2, 5])
def test_a_failing_mover_is_not_noticed(engine: Engine, call: int, doing: Doing | None) -> None:
    with fail_at(*movers(engine.cache), call=call, error=MemoryError, doing=doing) as fault:
        assert list(run(engine)[0].values()) == list(expected(engine).values())
    assert fault.raised == 1
    assert engine.metrics.fallbacks == {FallbackReason.MOVER_FAULT: 1}
    unharmed(engine)


@pytest.mark.parametrize("doing", [None, first_rows(), everything])
@pytest.mark.parametrize("call", [1, 2, 5])
def test_an_interrupted_commit_is_finished_first(
    engine: Engine, call: int, doing: Doing | None
) -> None:
    """What has changed in the store is the same set of rows in all layers, for K and for V."""
    with fail_at(*movers(engine.cache), call=call, error=KeyboardInterrupt, doing=doing):
        out, _ = run(engine)
    assert out[-1] == [True]
    written = [
        ~view.isnan().all(-1).all(-1)
        for g in engine.store.groups.values()
        for view in (g.rows.key, g.rows.value)
    ]
    assert all((layer == view[0]).all() for view in written for layer in view)
    assert torch.equal(written[0], written[1])
    assert engine.metrics.cancelled_windows == 0
    unharmed(engine)


def test_neither_mover_works(engine: Engine) -> None:
    places = [*movers(engine.cache), *movers(engine.cache, plain=True)]
    with fail_at(*places, call={1, 2}, doing=first_rows(1)):
        out, _ = run(engine)
    assert out[-1] == [False]
    unharmed(engine)
