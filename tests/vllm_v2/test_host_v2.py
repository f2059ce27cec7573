"""What nwor's part of a V2 step does on the host: launches, two copies, and not one value is read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from guards import COPY, READING, HostWaits, HostWork, host_work
from harness import greedy, prompts
from harness_v2 import EngineV2

from nwor.manager import Mode
from nwor.vllm.runner_v2 import WindowsV2

Get = Callable[..., EngineV2]
Seen = dict[str, list[HostWork]]
PARTS = ("step_begins", "begin", "commit", "collect")
TEXTS = prompts(20, 31, 33)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """What each part of a step did, call by call; a read or a wait in one is an error."""
    found: Seen = defaultdict(list)

    def watch(name: str) -> None:
        method = getattr(WindowsV2, name)

        def call(*args: Any) -> Any:
            with host_work() as work:
                result = method(*args)
            found[name].append(work)
            return result

        monkeypatch.setattr(WindowsV2, name, call)

    for name in PARTS:
        watch(name)
    return found


def names(work: HostWork) -> list[str]:
    return [name for name, _ in work.launches]


def test_no_step_waits_or_allocates(engine: Get, seen: Seen) -> None:
    """Ops are all that could allocate; begin and collect have one each, which copies in place."""
    llm = engine(k=4)
    shared = prompts(65)[0]
    texts = [shared + tail[1:] for tail in prompts(8, 3, 20, seed=1)]
    _, staged = llm.both(texts, greedy(10), arrive={1: 3, 2: 4})
    assert len(seen["begin"]) == len(seen["commit"]) > 5
    assert len(seen["step_begins"]) > staged.steps, "not every step was watched"
    for work in seen["step_begins"]:
        assert (work.launches, work.ops) == ([], [])
    for work in seen["begin"]:
        assert (names(work), work.ops) == (["begin_kernel", "fill_kernel"], [COPY])
    for work in seen["commit"]:
        assert (names(work), work.ops) == (["close_kernel", "move_rows_kernel"], [])
    for work in seen["collect"]:
        assert (work.launches, work.ops) == ([], [COPY])


@pytest.mark.parametrize("part", ["begin", "commit"])
@pytest.mark.parametrize("read", READING)
def test_the_guard_notices(
    engine: Get,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    read: str,
    part: str,
) -> None:
    """The test above can fail: a read or a wait in begin or commit ends the step."""
    llm = engine(k=4)
    original = getattr(WindowsV2, part)

    def careless(self: WindowsV2, *args: Any) -> None:
        original(self, *args)
        READING[read](llm.overlay.state.saved[0, 0])

    monkeypatch.setattr(WindowsV2, part, careless)
    request.getfixturevalue("seen")  # watches the careless one
    with pytest.raises(HostWaits):
        llm.run(TEXTS, greedy(8), Mode.STAGE)
    llm.give_up()
    llm.check_all_returned()
