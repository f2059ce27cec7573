"""The plugin's gates, without vLLM: settings, versions, hooks on import."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from nwor.errors import InputError, ModeError
from nwor.manager import Mode
from nwor.vllm import plugin, seams
from nwor.vllm.settings import Settings, read_settings, unknown_variables


def run_python(code: str, **environ: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        env={"PATH": "", "PYTHONPATH": ":".join(sys.path), **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- settings --------------------------------------------------------------------------------------


def test_defaults() -> None:
    assert read_settings({}) == Settings(
        Mode.STAGE, strict=False, staging_pages=None, mover="numba"
    )


def test_all_settings() -> None:
    environ = {
        "NWOR_MODE": "immediate",
        "NWOR_STRICT": "1",
        "NWOR_STAGING_PAGES": "12",
        "NWOR_MOVER": "torch",
        "NWOR_EXPERIMENTAL": "cuda",
    }
    expected = Settings(Mode.IMMEDIATE, True, 12, "torch", experimental=("cuda",))
    assert read_settings(environ) == expected
    assert unknown_variables({**environ, "NWOR_MOED": "off"}) == ["NWOR_MOED"]


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("NWOR_MODE", "staged", ModeError),
        ("NWOR_STRICT", "yes", InputError),
        ("NWOR_EXPERIMENTAL", "cuda,rocm", InputError),
        ("NWOR_STAGING_PAGES", "0", InputError),
        ("NWOR_STAGING_PAGES", "many", InputError),
        ("NWOR_MOVER", "memcpy", InputError),
    ],
)
def test_values_that_are_not_allowed(name: str, value: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"{name}='{value}' is not allowed; allowed: "):
        read_settings({name: value})


# -- gates -----------------------------------------------------------------------------------------


def test_registering_imports_no_engine_and_no_compiler() -> None:
    out = run_python(
        """
        import sys
        from nwor.vllm.plugin import register
        register(); register()
        heavy = {"vllm", "numba", "triton", "transformers", "prometheus_client"}
        print(sorted(heavy & set(sys.modules)))
        """
    )
    assert out.strip() == "[]"


@pytest.fixture
def unregistered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A process that has not registered yet; returns what gets hooked."""
    hooked: list[str] = []
    monkeypatch.setattr(plugin, "_registered", False)
    monkeypatch.setattr(plugin, "when_imported", lambda name, action: hooked.append(name))
    for name in ("NWOR_MODE", "NWOR_STRICT"):
        monkeypatch.delenv(name, raising=False)
    return hooked


def test_checked_version_is_hooked_once(
    unregistered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "vllm_version", lambda: "0.32.0+cpu")
    plugin.register()
    plugin.register()
    modules = [seams.CORE, seams.SCHEDULER, seams.RUNNER, seams.RUNNER_V2, seams.LOGGERS]
    assert unregistered == modules


def test_off_hooks_nothing(unregistered: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "vllm_version", lambda: "0.32.0")
    monkeypatch.setenv("NWOR_MODE", "off")
    plugin.register()
    assert not unregistered


def test_unknown_version_runs_stock_and_says_so(
    unregistered: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plugin, "vllm_version", lambda: "0.99.1")
    plugin.register()
    assert not unregistered
    assert "vLLM 0.99.1 has not been checked" in caplog.text


def test_unknown_version_is_an_error_when_strict(
    unregistered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "vllm_version", lambda: "0.99.1")
    monkeypatch.setenv("NWOR_STRICT", "1")
    with pytest.raises(plugin.VersionError, match=r"0\.99\.1"):
        plugin.register()
    assert not unregistered


def test_hooks_run_when_a_module_is_imported(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "late.py").write_text("value = 1\n")
    out = run_python(
        f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        from nwor.vllm.imports import when_imported
        when_imported("pack.late", lambda: print("late", sys.modules["pack.late"].value))
        when_imported("pack.never", lambda: print("never"))
        print("pack" in sys.modules)
        import pack.late
        print(type(pack.late.__loader__).__name__)
        when_imported("pack.late", lambda: print("at once"))
        """
    )
    assert out.split("\n")[:-1] == ["False", "late 1", "SourceFileLoader", "at once"]
