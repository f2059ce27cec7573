"""The audit on the V2 runner: stock is convicted, nwor acquitted, a broken nwor convicted."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from harness import greedy, prompts
from harness_v2 import EngineV2

from nwor.audit import Findings, Kind
from nwor.manager import Mode
from nwor.store.device_batch import DeviceBatch
from nwor.vllm.audit import audit_of

Get = Callable[..., EngineV2]
TEXTS = prompts(20, 31, 33, 60)


@pytest.fixture(autouse=True)
def nwors_audit_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness's own audit wraps the same methods, on the class."""
    monkeypatch.setenv("NWOR_AUDIT", "bytes")
    monkeypatch.setattr(EngineV2, "audit", lambda *_: SimpleNamespace(close=lambda: None))


def audited(llm: EngineV2, mode: Mode, texts: Any = TEXTS, **options: Any) -> Findings:
    """Findings of one run, on an audit that starts anew."""
    llm.drain()
    audit = audit_of(llm.runner)
    assert audit is not None

    audit.reset()
    params = [greedy(n) for n in (16, 8, 12, 10)][: len(texts)]
    llm.run(texts, params, mode, **{"arrive": {1: 2, 3: 3}, **options})
    llm.drain()
    return audit.findings


@pytest.mark.parametrize("asynchronous", [False, True])
def test_nothing_on_nwor_and_rejected_rows_on_stock(engine: Get, asynchronous: bool) -> None:
    llm = engine(k=4, asynchronous=asynchronous)
    found = audited(llm, Mode.STAGE)
    assert not found.counts, found.first
    assert found.rejected > 20
    assert found.rows_checked > 100
    stock = audited(llm, Mode.OFF)
    assert set(stock.counts) == {Kind.REJECTED_IN_DURABLE, Kind.BYTES_FOREIGN}
    assert stock.counts[Kind.REJECTED_IN_DURABLE] == stock.rejected > 20


def test_a_newcomer_that_reads_durable_pages_is_convicted(
    engine: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engine(k=4)
    first = prompts(24)[0]
    text = first + llm.run([first], greedy(24), Mode.OFF).tokens["0"]
    texts = [first, text[:40]]
    for step in range(5, 8):
        assert not audited(llm, Mode.STAGE, texts, arrive={1: step}).counts
    monkeypatch.setattr(DeviceBatch, "newcomer_rows", np.empty(0, np.int64))
    found = [audited(llm, Mode.STAGE, texts, arrive={1: step}).counts for step in range(5, 8)]
    assert any(found)
    assert "I4" in {kind.invariant for counts in found for kind in counts}
