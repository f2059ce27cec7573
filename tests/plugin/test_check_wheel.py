"""The ledger checked against the sources of a wheel that is not installed."""

from __future__ import annotations

import json
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from nwor.errors import InputError
from nwor.manager import Mode
from nwor.vllm.check_wheel import WheelSource, check_wheel, main, more
from nwor.vllm.runner_v1 import WindowsV1
from nwor.vllm.seams import (
    EXECUTE,
    LEDGER,
    PREPARE,
    SAMPLE,
    Seam,
    check_seams,
    wrap_method,
)

SOURCES = {
    "vllm/a.py": "from vllm.b import original as renamed\nclass C:\n"
    "    def f(self, x, y=1, *, z=2): ...\n    g = 3\n",
    "vllm/b/__init__.py": "def original(p): ...\n",
    "vllm-9.9.9.dist-info/METADATA": "",
}


def wheel(path: Path, sources: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in sources.items():
            archive.writestr(name, text)
    return path


@pytest.fixture
def source(tmp_path: Path) -> WheelSource:
    return WheelSource(wheel(tmp_path / "vllm.whl", SOURCES))


@pytest.mark.parametrize(
    ("module", "name", "parameters", "message"),
    [
        ("vllm.a", "C.f", ("x", "y"), None),
        ("vllm.a", "C.f", ("x", "y", "z"), None),
        ("vllm.a", "renamed", ("p",), None),
        ("vllm.a", "C.f", ("y", "x"), "takes"),
        ("vllm.a", "renamed", ("q",), "takes"),
        ("vllm.a", "C.h", (), "no 'h'"),
        ("vllm.a", "C.g", (), "no 'g'"),
        ("vllm.a", "C", (), "not a function"),
        ("vllm.c", "f", (), "vllm.c does not exist"),
    ],
)
def test_symbols_are_found_by_parsing(
    source: WheelSource, module: str, name: str, parameters: tuple[str, ...], message: str | None
) -> None:
    seam = Seam(module, name, parameters, "test")
    wrong = check_wheel(source, [seam])
    if message is None:
        assert wrong == {}
    else:
        assert message in wrong[seam.path]


def test_a_wheel_without_the_symbols_fails_and_says_which(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = wheel(tmp_path / "vllm.whl", SOURCES), tmp_path / "out.json"
    assert main(["--wheel", str(path), "--json", str(out)]) == 1
    result = json.loads(out.read_text())
    assert result["vllm"] == "9.9.9"
    assert set(result["seams"]) == {seam.path for seam in LEDGER}
    assert all(result["seams"].values())
    assert "0 of" in capsys.readouterr().out


def test_what_a_function_takes_beyond_the_ledger_is_named(source: WheelSource) -> None:
    assert more(source, Seam("vllm.a", "C.f", ("x",), "test")) == ", also takes y, z"
    assert more(source, Seam("vllm.a", "C.f", (), "test")).startswith(
        ", also takes x (required, passed on), y"
    )
    assert more(source, Seam("vllm.a", "renamed", ("p",), "test")) == ""


@pytest.mark.parametrize(
    ("signature", "refused"),
    [
        ("a, b", "['b']"),
        ("a, *, b", "['b']"),
        ("a, b=1, *, c=2, **kwargs", None),
        ("a, *args, b", "['b']"),
        ("a, /, *args, **kwargs", None),
    ],
)
def test_parsing_and_importing_judge_required_parameters_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signature: str, refused: str | None
) -> None:
    text = f"def f({signature}): ...\n"
    (tmp_path / "nwor_fake_seam.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    source = WheelSource(wheel(tmp_path / "x.whl", {"nwor_fake_seam.py": text}))
    strict = Seam("nwor_fake_seam", "f", ("a",), "test", strict=True)
    lax = Seam("nwor_fake_seam", "f", ("a",), "test")
    try:
        assert check_wheel(source, [lax]) == check_seams([lax]) == {}
        wrong = check_wheel(source, [strict])
        assert wrong == check_seams([strict])
    finally:
        sys.modules.pop("nwor_fake_seam", None)
    assert (refused in wrong[strict.path]) if refused else wrong == {}


class Taker:
    """An engine's object whose methods remember what they were given."""

    def f(self, *args: object, **kwargs: object) -> tuple[object, ...]:
        return (*args, kwargs)


def test_a_wrapper_that_drops_arguments_cannot_be_installed() -> None:
    lax, strict = Seam("m", "C.f", (), "test"), Seam("m", "C.f", (), "test", strict=True)
    taker = Taker()

    def make(original: Callable[..., object]) -> Callable[..., object]:
        return lambda: (original(), "wrapped")

    with pytest.raises(AssertionError, match="drops arguments"):
        wrap_method(taker, lax, make)
    assert taker.f(1, b=2) == (1, {"b": 2})
    wrap_method(taker, strict, make)
    assert taker.f() == (({},), "wrapped")


def test_the_hot_wrappers_pass_on_what_they_do_not_know() -> None:
    seen: dict[str, tuple[object, ...]] = {}

    class Runner:
        def __getattr__(self, name: str) -> object:
            def method(*args: object, **kwargs: object) -> SimpleNamespace:
                seen[name] = (*args, kwargs)
                return SimpleNamespace()

            return method

    runner = Runner()
    windows = WindowsV1(
        runner, SimpleNamespace(settings=SimpleNamespace(strict=False)), overlay=None
    )
    windows.set_mode(Mode.IMMEDIATE)
    output = SimpleNamespace(scheduled_spec_decode_tokens={}, total_num_scheduled_tokens=1)
    for seam in (EXECUTE, PREPARE, SAMPLE):
        name = seam.name.rsplit(".", 1)[1]
        vars(runner)[name](output, "second", "third", new="fourth")
        assert seen[name] == (output, "second", "third", {"new": "fourth"})


def test_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.whl"
    path.write_text("no archive")
    with pytest.raises(InputError, match="not a wheel"):
        WheelSource(path)
