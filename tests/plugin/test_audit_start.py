"""Which engines `nwor audit` watches: those that nwor serves, and whose worker can be watched."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from nwor.errors import InputError
from nwor.vllm.audit_run import served_audit
from nwor.vllm.eligibility import EngineRefusal, Refusal
from nwor.vllm.interpreter import CHOICE, offer_interpreter, prepare_v2

DRAFTER = Refusal(EngineRefusal.DRAFTER, "drafter 'ngram'", "use draft_model")


def parts(*refusals: Refusal, overlay: Any = None, audit: Any = None) -> tuple[Any, Any]:
    """A runner and a scheduler."""
    runner = SimpleNamespace(nwor=SimpleNamespace(overlay=overlay), nwor_audit=audit)
    kept_back = SimpleNamespace(refusals=refusals)
    return runner, SimpleNamespace(kv_cache_config=SimpleNamespace(nwor=kept_back))


def test_a_served_engine_is_watched() -> None:
    audit = object()
    assert served_audit(*parts(overlay=object(), audit=audit)) is audit


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (parts(DRAFTER, overlay=object(), audit=object()), "drafter 'ngram' .use draft_model"),
        (parts(audit=object()), "the log says why"),
        (parts(overlay=object()), "the log says why"),
        ((SimpleNamespace(), SimpleNamespace(kv_cache_config=object())), "the log says why"),
    ],
    ids=["refused by the core", "the worker found no rows", "not watched", "not hooked at all"],
)
def test_other_engines_are_refused(found: tuple[Any, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        served_audit(*found)


@pytest.mark.parametrize(("value", "wanted"), [("1", True), ("0", False), (None, False)])
def test_the_runner_is_the_environments_choice(
    value: str | None, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CHOICE, raising=False)
    if value is not None:
        monkeypatch.setenv(CHOICE, value)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)  # no interpreter is needed
    assert prepare_v2() is wanted


def test_the_v2_runner_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton.backends", None)
    with pytest.raises(InputError, match=r"pip install 'nwor\[triton\]'"):
        offer_interpreter()
