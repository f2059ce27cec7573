"""What a V2 worker looks at before anything is staged; without vLLM, on runners made of plain parts."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nwor.audit import AuditLevel
from nwor.layout import Layout
from nwor.metrics import Metrics
from nwor.store.admission import OverlayRefusal
from nwor.store.device_counters import DeviceFault
from nwor.vllm import audit, audit_v2
from nwor.vllm.eligibility import EngineRefusal
from nwor.vllm.geometry import GeometryError, device_groups, probe_groups
from nwor.vllm.runner_v2 import UNKNOWN_PARTS, WindowsV2, build_overlay

BLOCKS, SIZE, HEADS, DIM = 6, 4, 2, 8


def layer(write: Callable[..., None], shares: str | None = None) -> SimpleNamespace:
    """An attention layer with a cache whose blocks lie as FlashAttention has them."""
    cache = torch.zeros(BLOCKS, SIZE, HEADS, 2 * DIM).transpose(1, 2)
    update = SimpleNamespace(do_kv_cache_update=write)
    return SimpleNamespace(kv_cache=cache, impl=update, kv_sharing_target_layer_name=shares)


def fused(_: Any, key: Any, value: Any, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Write rows as `FLASH_ATTN` of vLLM 0.32.0 does: K, then V, negative slots skipped."""
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            cache[slot // SIZE, :, slot % SIZE] = torch.cat((key[row], value[row]), -1)


def halves(_: Any, key: Any, value: Any, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Write V before K."""
    fused(_, value, key, cache, slots)


def runner(write: Callable[..., None] = fused, backend: str = "FLASH_ATTN") -> Any:
    """A runner with a target layer, one that shares its K and V, and a drafter's."""
    context = {
        "layers.0": layer(write),
        "layers.1": layer(write, shares="layers.0"),
        "draft.0": layer(write),
    }
    attention = SimpleNamespace(
        backend=SimpleNamespace(get_name=lambda: backend), kernel_block_size=None
    )
    spec = SimpleNamespace(block_size=SIZE)
    return SimpleNamespace(
        **dict.fromkeys(UNKNOWN_PARTS),
        model_state=SimpleNamespace(num_new_sampled_tokens_per_step=1),
        compilation_config=SimpleNamespace(static_forward_context=context),
        kv_cache_config=SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(layer_names=list(context), kv_cache_spec=spec)],
            num_blocks=BLOCKS,
        ),
        attn_groups=[[attention]],
        speculator=SimpleNamespace(draft_attn_layer_names={"draft.0"}),
        block_tables=SimpleNamespace(
            input_block_tables=[torch.zeros(3, 5, dtype=torch.int32)],
            slot_mappings=torch.zeros(1, 16, dtype=torch.int64),
        ),
        model_config=SimpleNamespace(dtype=torch.float32),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )


RESERVATION: Any = SimpleNamespace(num_pages=2, num_leases=1)


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "TRITON_ATTN"])
def test_the_targets_own_layers_are_found_and_probed(backend: str) -> None:
    made = runner(backend=backend)
    (group,) = device_groups(made)
    assert list(group.layers) == ["layers.0"]
    assert group.layout is Layout.FUSED
    assert group.overlay.table is made.block_tables.input_block_tables[0]
    assert group.overlay.slots.data_ptr() == made.block_tables.slot_mappings.data_ptr()
    probe_groups(made, [group], BLOCKS - 1)
    assert not group.layers["layers.0"].kv_cache.any()


def test_rows_that_are_elsewhere_are_noticed() -> None:
    """Before an overlay is laid over them."""
    with pytest.raises(GeometryError, match="not where the view says") as found:
        build_overlay(runner(halves), RESERVATION)
    assert found.value.refusal.reason is EngineRefusal.LAYOUT


@pytest.mark.parametrize("backend", ["FLASHINFER", "FLASHMLA", "FLEX_ATTENTION"])
def test_backends_that_may_copy_tables_are_refused(backend: str) -> None:
    with pytest.raises(GeometryError, match=backend) as found:
        device_groups(runner(backend=backend))
    assert found.value.refusal.reason is EngineRefusal.BACKEND


def test_kernels_with_blocks_of_their_own_are_refused() -> None:
    made = runner()
    made.attn_groups[0][0].kernel_block_size = 2
    with pytest.raises(GeometryError, match="copied per step"):
        device_groups(made)


@pytest.mark.parametrize("part", UNKNOWN_PARTS)
def test_runners_with_parts_of_their_own_are_refused(part: str) -> None:
    made = runner()
    setattr(made, part, object())
    with pytest.raises(GeometryError, match=part) as found:
        build_overlay(made, RESERVATION)
    assert found.value.refusal.reason is EngineRefusal.RUNNER


def test_several_sampled_tokens_per_step_are_refused() -> None:
    made = runner()
    made.model_state.num_new_sampled_tokens_per_step = 4
    with pytest.raises(GeometryError, match="several tokens"):
        build_overlay(made, RESERVATION)


@pytest.mark.parametrize("attach", [audit.attach, audit_v2.attach])
def test_an_audit_on_a_gpu_is_refused_aloud(
    attach: Callable[[Any, AuditLevel, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(audit.logger, "error", lambda text, *args: said.append(text % args))
    made = SimpleNamespace(device=torch.device("cuda"))
    attach(made, AuditLevel.METADATA, 4)
    assert "not audited" in said[0]
    assert "cuda" in said[0]
    assert audit.audit_of(made) is None


def test_what_host_and_device_could_not_stage_is_reported() -> None:
    overlay: Any = SimpleNamespace(
        metrics=Metrics(),
        pages=SimpleNamespace(pages_in_use=0, num_pages=2),
        refused={OverlayRefusal.OUT_OF_STAGING_PAGES: 2},
        faults={DeviceFault.NOT_DURABLE: 3},
        collect=lambda: None,
    )
    windows = WindowsV2(None, SimpleNamespace(settings=SimpleNamespace(strict=False)), overlay)  # type: ignore[arg-type]
    sample = windows._take_sample()
    assert sample is not None
    assert sample["fallbacks"] == {"out_of_staging_pages": 2, "not_durable": 3}
