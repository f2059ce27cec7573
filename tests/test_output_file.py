"""Files for results are refused before the work, by every command that writes one."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from nwor.cli import main
from nwor.errors import InputError
from nwor.output_file import check_writable, save
from nwor.vllm import check_wheel

READ_ONLY = Path("/sys/nwor.json")  # not even root makes files there


@pytest.fixture(params=["no folder", "a folder", "a file as folder", "no permission", "long name"])
def bad(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    (tmp_path / "file").touch()
    if request.param == "no permission" and not READ_ONLY.parent.is_dir():
        pytest.skip("no folder here that refuses root too")
    return {
        "no folder": tmp_path / "missing" / "out.json",
        "a folder": tmp_path,
        "a file as folder": tmp_path / "file" / "out.json",
        "no permission": READ_ONLY,
        "long name": tmp_path / ("n" * 300),
    }[request.param]


def test_audit_refuses_before_the_engine_starts(
    bad: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("nwor.cli.audit._start", lambda *_: pytest.fail("the engine was started"))
    assert main(["audit", "--model", "anything", "--json", str(bad)]) == 2
    said = capsys.readouterr().err
    assert f"--json {bad} cannot be written: " in said
    assert "Name a file in a folder that exists" in said


def test_check_wheel_refuses_before_a_wheel_is_read(
    bad: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check_wheel, "_read_published", lambda *_: pytest.fail("a wheel was read"))
    assert check_wheel.main(["--json", str(bad)]) == 2
    assert f"--json {bad} cannot be written: " in capsys.readouterr().err


def test_the_demo_refuses_before_weights_are_made(
    bad: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'nwor[demo]'")
    demo = importlib.import_module("nwor.demo.__main__")

    monkeypatch.setattr(demo, "_loaded", lambda *_: pytest.fail("weights were made"))
    assert demo.main(["--page", str(bad)]) == 2
    assert "cannot be written" in capsys.readouterr().out


def test_what_happens_after_the_check_is_said_too(bad: Path) -> None:
    with pytest.raises(InputError, match=r"--json .* cannot be written"):
        save(bad, "--json", "text")


def new_file(path: Path) -> None:
    check_writable(path, "--json")
    assert not path.exists()


def file_with_text(path: Path) -> None:
    path.write_text("old")
    check_writable(path, "--json")
    assert path.read_text() == "old"


def link_to_nothing(path: Path) -> None:
    target = path.with_name("target")
    path.symlink_to(target)
    check_writable(path, "--json")
    assert path.is_symlink()
    assert not target.exists()


@pytest.mark.parametrize("there", [new_file, file_with_text, link_to_nothing])
def test_what_can_be_written_is_left_as_it_is(
    there: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "out.json"
    there(path)
    save(path, "--json", "new")
    assert path.read_text() == "new"


def test_a_pipe_is_not_opened_twice(tmp_path: Path) -> None:
    """Its reader would take the first end for the last."""
    path, got = tmp_path / "pipe", []
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: got.append(path.read_text()), daemon=True)
    reader.start()
    check_writable(path, "--json")
    save(path, "--json", "new")
    reader.join(10)
    assert got == ["new"]
