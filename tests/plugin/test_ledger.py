"""The ledger of vLLM symbols: checked before anything is wrapped, wrapped once, unwrapped whole."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from nwor.vllm import seams

MODULE = """
def start(config, size, extra=None):
    return config, size

class Runner:
    limit = 3
    def step(self, batch):
        return batch
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "enginelike.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "enginelike", raising=False)
    return importlib.import_module("enginelike")


@pytest.mark.parametrize(
    ("name", "parameters", "problem"),
    [
        ("begin", (), "does not exist"),
        ("Runner.stop", (), "does not exist"),
        ("start", ("size", "config"), "expected ['size', 'config'] first"),
        ("Runner.limit", (), "is not callable"),
    ],
)
def test_symbols_that_are_not_as_the_ledger_says(
    module: Any, name: str, parameters: tuple[str, ...], problem: str
) -> None:
    seam = seams.Seam("enginelike", name, parameters, "a test")
    assert problem in seams.check_seams([seam])[seam.path]
    with pytest.raises(seams.SeamError):
        seams.wrap_symbol(seam, lambda original: original)


def test_a_symbol_is_wrapped_once(module: Any) -> None:
    seam = seams.Seam("enginelike", "start", ("config", "size"), "a test", strict=True)

    def make(original: Any) -> Any:
        return lambda config, size: original(config, size + 1)

    seams.wrap_symbol(seam, make)
    seams.wrap_symbol(seam, make)
    assert module.start("c", 1) == ("c", 2)
    assert seams.check_seams([seam]) == {}


def test_a_method_is_wrapped_on_the_instance_alone(module: Any) -> None:
    seam = seams.Seam("enginelike", "Runner.step", ("batch",), "a test", hot=True, strict=True)
    one, other = module.Runner(), module.Runner()
    seams.wrap_method(one, seam, lambda original: lambda batch: original(batch) * 2)
    assert (one.step(2), other.step(2)) == (4, 2)
    with pytest.raises(seams.SeamError, match="wrapped already"):
        seams.wrap_method(one, seam, lambda original: original)
    seams.unwrap_method(one, seam)
    assert one.step(2) == 2
    assert "step" not in vars(one)
