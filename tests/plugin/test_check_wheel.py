"""The ledger checked against the sources of a wheel that is not installed."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from nwor.errors import InputError
from nwor.vllm.check_wheel import WheelSource, check_wheel, main, more
from nwor.vllm.seams import SEAMS, V2_SEAMS, Seam

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
    assert set(result["seams"]) == {seam.path for seam in (*SEAMS, *V2_SEAMS)}
    assert all(result["seams"].values())
    assert "0 of" in capsys.readouterr().out


def test_what_a_function_takes_beyond_the_ledger_is_named(source: WheelSource) -> None:
    assert more(source, Seam("vllm.a", "C.f", ("x",), "test")) == " (also takes y, z)"
    assert more(source, Seam("vllm.a", "renamed", ("p",), "test")) == ""


def test_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.whl"
    path.write_text("no archive")
    with pytest.raises(InputError, match="not a wheel"):
        WheelSource(path)
