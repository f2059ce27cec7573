"""`nwor doctor --model`: cache groups, room and row layouts of engines that are not there."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from doctor_configs import CHUNKED, GEMMA, HYBRID, LLAMA, MLA, RECURRENT, write_config
from fixtures import close_kept
from vllm.engine.arg_utils import EngineArgs

from nwor.cli import doctor, doctor_model, main
from nwor.layout import KVRows
from nwor.vllm.eligibility import EngineRefusal, kind_refusals
from nwor.vllm.rehearsal import RehearsalError, rehearse

GROUP = f"model: {EngineRefusal.GROUP}"
NO_ROOM = f"model: {EngineRefusal.NO_ROOM}"
BLOCK = 2 * 2 * 2 * 128 * 32 * 4
"""Bytes of a KV cache block of `LLAMA`: layers, K and V, heads, rows, dim, float32."""


@pytest.fixture(autouse=True, scope="module")
def no_engine() -> None:
    """The doctor's process has no engine, whose ranks would do for dense models only."""
    close_kept()


@pytest.fixture(autouse=True)
def clean_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of the caller's reaches the report."""
    for variable in doctor.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)


@pytest.fixture
def examine(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Return a function that asks about a model's configuration; gives exit code and checks."""

    def asked(config: dict[str, Any], *argv: str) -> tuple[int, dict[str, Any]]:
        model = write_config(tmp_path / "model", config)
        code = main(["doctor", "--json", "--model", model, "--dtype", "float32", *argv])
        found = json.loads(capsys.readouterr().out)
        assert found["exit_code"] == code
        return code, {check["name"]: check for check in found["checks"]}

    return asked


def bad(checks: dict[str, Any]) -> list[str]:
    return [name for name, check in checks.items() if check["good"] is False]


def layouts(checks: dict[str, Any]) -> list[str]:
    return [name for name in checks if name.startswith("row layout,")]


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (MLA, "MLAAttentionSpec"),
        (RECURRENT, "MambaSpec"),
        (HYBRID, "MambaSpec"),
        (CHUNKED, "ChunkedLocalAttentionSpec"),
    ],
    ids=["mla", "recurrent", "hybrid", "chunked"],
)
@pytest.mark.parametrize("built", [True, False])
def test_kinds_of_cache_that_are_refused(
    examine: Callable[..., tuple[int, dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, Any],
    kind: str,
    built: bool,
) -> None:
    """By the reason of the run, whether or not the model can be built without its weights."""
    if not built:
        monkeypatch.setattr(doctor_model, "rehearse", refuses_to_be_built)
    code, checks = examine(config)
    assert (code, bad(checks)) == (doctor.REFUSED, [GROUP])
    assert (kind in checks[GROUP]["found"]) is built
    assert "FullAttentionSpec" in checks[GROUP]["remedy"]
    assert not checks["staging pages"]["checked"]
    assert ("cache groups" in checks) is not built


def refuses_to_be_built(_: object) -> None:
    raise RehearsalError("NotImplementedError: no meta kernel")


@pytest.mark.parametrize("config", [LLAMA, GEMMA], ids=["llama", "gemma3"])
def test_what_is_not_checked_is_said_so(
    examine: Callable[..., tuple[int, dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, Any],
) -> None:
    code, checks = examine(config)
    assert (code, bad(checks)) == (doctor.OK, [])
    assert [n for n, check in checks.items() if not check["checked"]] == ["staging pages"]
    assert "no_room_for_staging" in checks["staging pages"]["found"]
    monkeypatch.setattr(doctor_model, "rehearse", refuses_to_be_built)
    code, checks = examine(config)
    assert (code, bad(checks)) == (doctor.OK, [])
    missing = {n: check["found"] for n, check in checks.items() if not check["checked"]}
    assert list(missing) == ["cache groups", "staging pages", "row layout"]
    assert "no meta kernel" in missing["cache groups"]
    assert all(found.startswith("not checked: ") for found in missing.values())


def test_the_kind_of_a_draft_model_counts(
    examine: Callable[..., tuple[int, dict[str, Any]]], tmp_path: Path
) -> None:
    draft = write_config(tmp_path / "draft", MLA)
    speculative = {"method": "draft_model", "model": draft, "num_speculative_tokens": 4}
    code, checks = examine(LLAMA, "--speculative-config", json.dumps(speculative))
    assert code == doctor.REFUSED
    assert GROUP in bad(checks)
    config = EngineArgs(
        model=str(tmp_path / "model"), dtype="float32", speculative_config=speculative
    ).create_engine_config()
    (refusal,) = kind_refusals(config)
    assert refusal.reason is EngineRefusal.GROUP
    assert "draft model" in refusal.found


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_a_rehearsal_finds_the_groups_of_the_engine(
    engine: Callable[..., Any], models: Callable[[str], str], model: str
) -> None:
    """Beside the engine itself, weights and all."""
    real = engine(model).scheduler.kv_cache_config.kv_cache_groups
    config = EngineArgs(
        model=models(model),
        dtype="float32",
        block_size=32,
        max_model_len=256,
        speculative_config={"method": "ngram", "num_speculative_tokens": 4},
    ).create_engine_config()
    found = rehearse(config).groups
    assert [(g.layer_names, g.kv_cache_spec) for g in found] == [
        (g.layer_names, g.kv_cache_spec) for g in real
    ]


@pytest.mark.parametrize(
    ("blocks", "requests", "good", "said"),
    [
        (64, 4, True, "8 of 64 KV cache blocks, 4 requests"),
        (64, 32, None, "8 of 64 KV cache blocks, 4 requests"),
    ],
)
def test_more_requests_than_staging_pages(
    examine: Callable[..., tuple[int, dict[str, Any]]],
    blocks: int,
    requests: int,
    good: bool | None,
    said: str,
) -> None:
    """One page in eight is kept back, and a request takes two."""
    memory = ("--kv-cache-memory-bytes", str(blocks * BLOCK))
    code, checks = examine(LLAMA, *memory, "--max-num-seqs", str(requests))
    room = checks["staging pages"]
    assert (code, room["good"], room["checked"]) == (doctor.OK, good, True)
    assert room["found"].startswith(said)
    if good is None:
        assert "written through" in room["found"]
        assert "--max-num-seqs to 4" in room["remedy"]


def test_no_room(examine: Callable[..., tuple[int, dict[str, Any]]]) -> None:
    """1,024 tokens are 8 pages, and vLLM keeps one to itself: of 9, none can be kept back."""
    code, checks = examine(LLAMA, "--kv-cache-memory-bytes", str(9 * BLOCK))
    assert (code, bad(checks)) == (doctor.REFUSED, [NO_ROOM])
    code, checks = examine(LLAMA, "--kv-cache-memory-bytes", str(4 * BLOCK))
    assert (code, bad(checks)) == (doctor.REFUSED, ["KV cache"])
    assert "would not start" in checks["KV cache"]["found"]


@pytest.mark.parametrize("config", [LLAMA, GEMMA], ids=["llama", "gemma3"])
def test_rows_that_are_not_where_the_view_says(
    examine: Callable[..., tuple[int, dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, Any],
) -> None:
    """K is taken for V: the probe of each shape must object."""
    code, checks = examine(config)
    assert code == doctor.OK
    assert layouts(checks)
    assert all(checks[name]["good"] for name in layouts(checks))

    def swapped(*args: Any) -> KVRows:
        rows = KVRows.of(*args)
        return replace(rows, key=rows.value, value=rows.key)

    monkeypatch.setattr("nwor.vllm.probe.KVRows", SimpleNamespace(of=swapped))
    code, checks = examine(config)
    assert (code, bad(checks)) == (doctor.REFUSED, layouts(checks))
    for name in layouts(checks):
        assert "not where the view says" in checks[name]["found"]
        assert checks[name]["remedy"]
