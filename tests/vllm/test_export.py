"""Exported pages hold accepted rows only, and another engine goes on from them (invariant I3)."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from connectors import LayerwiseConnector
from drafters import ScriptedDrafter
from harness import CANARY, Engine, Run, bits, greedy, prompts
from safetensors.torch import load_file
from vllm.config import KVTransferConfig

from nwor.layout import KVRows, Layout
from nwor.manager import Mode
from nwor.vllm.eligibility import EngineRefusal

Get = Callable[..., Engine]
TEXTS = prompts(20, 31, 33, 60)
PAGE = 32


def transfer(name: str, folder: Path, module: str | None = "connectors") -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector=name,
        kv_connector_module_path=module,
        kv_role="kv_both",
        kv_connector_extra_config={"folder": str(folder), "shared_storage_path": str(folder)},
    )


@pytest.fixture
def exporting(engine: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setenv("NWOR_CONNECTORS", "connectors.PageConnector")
    return engine(k=8, kv_transfer_config=transfer("PageConnector", tmp_path))


def export(llm: Engine, folder: Path, mode: Mode) -> tuple[Run, dict[str, dict[str, Any]]]:
    """Run on pages full of canaries; return the run and what was exported, by request."""
    for file in folder.glob("*.pt"):
        file.unlink()
    run = llm.run(TEXTS, greedy(50), mode)
    llm.drain()
    files = {file.stem: torch.load(file) for file in folder.glob("*.pt")}
    assert sorted(files) == [str(i) for i in range(len(TEXTS))]
    llm.drain()
    return run, files


def rows(pages: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V ``[layer, slot, head, dim]`` of exported pages."""
    layers = KVRows.of(Layout.VLLM_CPU, list(torch.stack(list(pages.values()))))
    return layers.key.flatten(1, 2), layers.value.flatten(1, 2)


def foreign(exported: dict[str, dict[str, Any]]) -> int:
    """Rows at or above the watermark that are not canaries.

    A stop inside an accepted run leaves accepted rows past the last token: they are below it.
    """
    found = 0
    for file in exported.values():
        for view in rows(file["pages"])[:1]:
            beyond = view[:, file["computed"] :]
            found += int((beyond != CANARY).flatten(2).any(-1).any(0).sum())
    return found


def test_exports_hold_accepted_rows_only(exporting: Engine, tmp_path: Path) -> None:
    """Stock exports rejected drafts in every request's last page; staged, there is nothing."""
    exporting.learn(TEXTS, greedy(64))
    exporting.drain()
    stock, leaking = export(exporting, tmp_path, Mode.OFF)
    staged, clean = export(exporting, tmp_path, Mode.STAGE)
    assert staged.tokens == stock.tokens
    assert foreign(leaking) > 0, "the check sees nothing on the stock engine"
    assert foreign(clean) == 0
    for name, file in clean.items():
        assert file["tokens"] == leaking[name]["tokens"]
        key, value = rows(file["pages"])
        for position in range(file["computed"]):
            exported = bits(key[:, position]) + bits(value[:, position])
            assert exported == staged.rows[name, position, 0], (name, position)


def test_exports_equal_those_of_a_run_without_speculation(
    exporting: Engine, tmp_path: Path
) -> None:
    exporting.learn(TEXTS, greedy(64))
    exporting.drain()
    _, staged = export(exporting, tmp_path, Mode.STAGE)
    ScriptedDrafter.silent = True
    try:
        _, plain = export(exporting, tmp_path, Mode.OFF)
    finally:
        ScriptedDrafter.silent = False
    for name, file in staged.items():
        length = min(len(file["tokens"]), len(plain[name]["tokens"]))
        assert file["tokens"][:length] == plain[name]["tokens"][:length]
        for mine, theirs in zip(rows(file["pages"]), rows(plain[name]["pages"]), strict=True):
            torch.testing.assert_close(mine[:, :length], theirs[:, :length], rtol=1e-4, atol=1e-5)


def test_a_fresh_engine_goes_on_from_an_export(
    exporting: Engine, engine: Get, tmp_path: Path
) -> None:
    """Prompt and first answer come from pages that were written by accepted windows."""
    whole = exporting.learn(TEXTS, greedy(90)).tokens
    exporting.drain()
    _, exported = export(exporting, tmp_path, Mode.STAGE)
    fresh = engine(k=8, blocks=80, kv_transfer_config=transfer("PageConnector", tmp_path))
    longer = [text + whole[str(i)][:45] for i, text in enumerate(TEXTS)]
    loaded = [(len(text) - 1) // PAGE * PAGE for text in longer]
    assert all(n > len(text) for n, text in zip(loaded, TEXTS, strict=True)), "only prompts load"
    run = fresh.run(longer, greedy(40), Mode.STAGE)
    assert run.tokens == {str(i): whole[str(i)][45:85] for i in range(len(TEXTS))}
    for i, start in enumerate(loaded):
        assert min(p for name, p, _ in run.rows if name == str(i)) == start, "it was recomputed"
    assert exported
    fresh.drain()


def test_layerwise_savers_are_refused(
    engine: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And rightly so: trusted all the same, it is pointed at staging pages."""
    config = transfer("LayerwiseConnector", tmp_path)
    refused = engine(k=8, kv_transfer_config=config)
    reasons = [refusal.reason for refusal in refused.scheduler.kv_cache_config.nwor.refusals]
    assert reasons == [EngineRefusal.CONNECTOR]
    monkeypatch.setenv("NWOR_CONNECTORS", "connectors.LayerwiseConnector")
    trusted = engine(k=8, kv_transfer_config=config)
    trusted.learn(TEXTS, greedy(30))
    trusted.drain()
    LayerwiseConnector.slots.clear()
    trusted.run(TEXTS, greedy(30), Mode.STAGE)
    first = trusted.overlay.pages.first_page * PAGE
    assert any((slots >= first).any() for slots in LayerwiseConnector.slots)
    trusted.drain()


def test_example_connector_is_served(engine: Get, tmp_path: Path) -> None:
    """vLLM's own: prompts leave during the forward, by block id, from requests without drafts."""
    config = transfer("ExampleConnector", tmp_path, None)
    llm = engine(k=8, kv_transfer_config=config, enable_prefix_caching=False)
    llm.learn(TEXTS, greedy(64))  # and exports the prompts
    stock = llm.run(TEXTS, greedy(50), Mode.OFF)
    staged = llm.run(TEXTS, greedy(50), Mode.STAGE)
    assert staged.tokens == stock.tokens
    assert staged.rows == stock.rows
    starts = {name: min(p for n, p, _ in staged.rows if n == name) for name, _, _ in staged.rows}
    assert starts == {"0": 0, "1": 0, "2": 0, "3": PAGE}, "what was exported was not loaded"
    assert staged.foreign == PAGE < stock.foreign, "loaded pages, and nothing else"


def test_example_connector_is_refused_with_prefix_caching(
    engine: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And rightly so: trusted all the same, it exports a page whose last row is still staged."""
    config = transfer("ExampleConnector", tmp_path, None)
    refused = engine(k=4, kv_transfer_config=config)
    reasons = [refusal.reason for refusal in refused.scheduler.kv_cache_config.nwor.refusals]
    assert reasons == [EngineRefusal.CONNECTOR]
    monkeypatch.setenv("NWOR_CONNECTORS", "ExampleConnector")
    trusted = engine(k=4, kv_transfer_config=config)
    for length in range(20, 32):
        (text,) = prompts(length, seed=length)
        whole = text + trusted.learn([text], greedy(80)).tokens["0"]
        trusted.drain()
        stock = exported_by_newcomer(trusted, text, whole, tmp_path, Mode.OFF)
        staged = exported_by_newcomer(trusted, text, whole, tmp_path, Mode.STAGE)
        if stock and staged:
            break
    else:
        pytest.fail("the case did not occur")
    for mine, stocks in zip(rows(staged), rows(stock), strict=True):
        wrong = (mine != stocks).flatten(2).any(-1)
        assert [layer.nonzero().flatten().tolist() for layer in wrong] == [[63]] * len(wrong)


def exported_by_newcomer(
    llm: Engine, text: list[int], whole: list[int], folder: Path, mode: Mode
) -> dict[str, torch.Tensor]:
    """Export a prompt that joins in the step in which another request fills its second page.

    Returns:
        Both pages by layer, as `rows` takes them; empty if that request had no drafts by then.
    """
    for stale in folder.iterdir():
        shutil.rmtree(stale)
    assert llm.llm.reset_prefix_cache()
    llm.runner.nwor.set_mode(mode)
    core, joined = llm.llm.llm_engine, False
    core.add_request("first", {"prompt_token_ids": text}, greedy(80))
    while core.has_unfinished_requests():
        running = [r for r in llm.scheduler.running if r.num_computed_tokens == 63]
        if running and running[0].spec_token_ids and not joined:
            newcomer = {"prompt_token_ids": [*whole[:64], *prompts(9)[0][1:]]}
            core.add_request("second", newcomer, greedy(8))
            joined = True
        core.step()
    llm.drain()
    files = [file for file in folder.glob("*/*.safetensors") if joined]
    exports = {file.stem: load_file(file)["kv_cache"] for file in files}
    return {  # exported as [slots, heads, width]; the cache has heads before rows
        layer: export.unflatten(0, (2, PAGE)).transpose(1, 2).contiguous()
        for layer, export in exports.items()
        if len(export) == 2 * PAGE
    }
