"""`nwor doctor` beside the real vLLM: what it says, as text and JSON, and its exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from nwor.cli import doctor, main
from nwor.vllm import seams


@pytest.fixture(autouse=True)
def clean_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of the caller's reaches the report."""
    for variable in doctor.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)


def report(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    code = main(["doctor", "--json", *argv])
    found = json.loads(capsys.readouterr().out)
    assert found["exit_code"] == code
    return code, {check["name"]: check for check in found["checks"]}


def bad(checks: dict[str, Any]) -> list[str]:
    return [name for name, check in checks.items() if check["good"] is False]


def test_a_healthy_installation(capsys: pytest.CaptureFixture[str]) -> None:
    code, checks = report(capsys)
    assert (code, bad(checks)) == (doctor.OK, [])
    assert checks["vllm"]["good"]
    for seam in seams.SEAMS:
        assert checks[seam.path.removeprefix("vllm.v1.")]["good"]


def test_text_marks_each_line_and_sums_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == doctor.OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "served, as far as it was checked"
    assert any(line.startswith(" ?  model ") and "not checked" in line for line in lines)
    assert any(line.startswith("ok  vllm ") for line in lines)
    assert not any(line.startswith("NO") for line in lines)


def test_an_unsupported_version(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_vllm", lambda: "0.99.1")
    code, checks = report(capsys)
    assert (code, bad(checks)) == (doctor.REFUSED, ["vllm"])
    assert "0.99.1" in checks["vllm"]["found"]
    assert seams.CHECKED_VERSIONS[0] in checks["vllm"]["remedy"]


def test_no_vllm(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_vllm", lambda: None)
    code, checks = report(capsys)
    assert (code, bad(checks)) == (doctor.MISSING, ["vllm"])
    assert "pip install vllm" in checks["vllm"]["remedy"]


def test_a_renamed_symbol(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    monkeypatch.delattr(GPUModelRunner, "_sample")
    code, checks = report(capsys)
    name = seams.SAMPLE.path.removeprefix("vllm.v1.")
    assert (code, bad(checks)) == (doctor.REFUSED, [name])
    assert "does not exist" in checks[name]["found"]
    assert main(["doctor"]) == doctor.REFUSED
    lines = capsys.readouterr().out.splitlines()
    (at,) = [i for i, line in enumerate(lines) if line.startswith("NO")]
    assert name in lines[at]
    assert "-> use vLLM" in lines[at + 1]
    assert lines[-1] == "vLLM would run without nwor"


@pytest.mark.parametrize(
    ("variable", "value"), [("NWOR_MODE", "off"), ("NWOR_MODE", "staged"), ("NWOR_MOED", "off")]
)
def test_settings_that_stand_in_the_way(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
) -> None:
    monkeypatch.setenv(variable, value)
    code, checks = report(capsys)
    (name,) = bad(checks)
    assert code == doctor.REFUSED
    assert variable in name + checks[name]["found"]
    assert checks[name]["remedy"]


def test_a_model_that_is_served(
    capsys: pytest.CaptureFixture[str], models: Callable[[str], str]
) -> None:
    code, checks = report(capsys, "--model", models("llama"))
    assert (code, bad(checks)) == (doctor.OK, [])


def test_a_configuration_that_is_refused_names_the_remedy(
    capsys: pytest.CaptureFixture[str], models: Callable[[str], str]
) -> None:
    drafter = '{"method": "ngram", "num_speculative_tokens": 40}'
    code, checks = report(
        capsys, "--model", models("llama"), "--block-size", "32", "--speculative-config", drafter
    )
    assert code == doctor.REFUSED
    assert bad(checks) == ["model: page_smaller_than_window"]
    assert "--block-size above 40" in checks["model: page_smaller_than_window"]["remedy"]
