"""Which engines are served, and with how many staging pages."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from nwor.metrics import FallbackReason
from nwor.store.device_counters import DeviceFault
from nwor.store.overlay import OverlayRefusal
from nwor.vllm.eligibility import EngineRefusal, config_refusals, group_refusals
from nwor.vllm.reservation import reserve
from nwor.vllm.settings import Settings


def config(**changes: Any) -> Any:
    """A `VllmConfig` that is served, with changes like ``parallel_config.enable_dbo=True``."""
    base = SimpleNamespace(
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            enable_dbo=False,
            ubatch_size=0,
        ),
        speculative_config=SimpleNamespace(method="ngram", num_speculative_tokens=4),
        device_config=SimpleNamespace(device_type="cpu"),
        scheduler_config=SimpleNamespace(async_scheduling=False, max_num_seqs=8),
        model_config=SimpleNamespace(is_encoder_decoder=False),
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=False, enable_prefix_caching=False),
        kv_transfer_config=None,
        use_v2_model_runner=False,
    )
    for path, value in changes.items():
        *parts, name = path.split("__")
        owner = base
        for part in parts:
            owner = getattr(owner, part)
        setattr(owner, name, value)
    return base


def transfer(name: str, module: str | None = None, *children: dict[str, str]) -> SimpleNamespace:
    """What `--kv-transfer-config` becomes."""
    return SimpleNamespace(
        kv_connector=name,
        kv_connector_module_path=module,
        kv_connector_extra_config={"connectors": list(children)},
    )


@pytest.mark.parametrize(
    ("change", "value", "reason"),
    [
        ("device_config__device_type", "cuda", EngineRefusal.PLATFORM),
        ("speculative_config__method", "eagle", EngineRefusal.DRAFTER),
        ("parallel_config__pipeline_parallel_size", 2, EngineRefusal.PIPELINE),
        ("parallel_config__decode_context_parallel_size", 2, EngineRefusal.CONTEXT_PARALLEL),
        ("parallel_config__prefill_context_parallel_size", 2, EngineRefusal.CONTEXT_PARALLEL),
        ("scheduler_config__async_scheduling", True, EngineRefusal.ASYNC_SCHEDULING),
        ("parallel_config__enable_dbo", True, EngineRefusal.MICROBATCHING),
        ("parallel_config__ubatch_size", 2, EngineRefusal.MICROBATCHING),
        ("model_config__is_encoder_decoder", True, EngineRefusal.ENCODER_DECODER),
        ("cache_config__kv_sharing_fast_prefill", True, EngineRefusal.KV_SHARING),
        ("kv_transfer_config", transfer("NixlConnector"), EngineRefusal.CONNECTOR),
    ],
)
def test_what_is_not_proven_is_refused(change: str, value: Any, reason: EngineRefusal) -> None:
    assert not list(config_refusals(config()))
    (refusal,) = config_refusals(config(**{change: value}))
    assert refusal.reason is reason
    assert refusal.found
    assert refusal.remedy


def config_v2(**changes: Any) -> Any:
    """A `VllmConfig` with the V2 runner that is served under Triton's interpreter."""
    async_v2 = {"scheduler_config__async_scheduling": True, "use_v2_model_runner": True}
    return config(**{**async_v2, "speculative_config__method": "draft_model", **changes})


@pytest.mark.parametrize(
    ("change", "value", "reason"),
    [
        ("device_config__device_type", "cuda", EngineRefusal.PLATFORM),
        ("device_config__device_type", "xpu", EngineRefusal.PLATFORM),
        ("speculative_config__method", "ngram", EngineRefusal.DRAFTER),
        ("speculative_config__method", "dflash", EngineRefusal.DRAFTER),
        ("speculative_config__method", "mtp", EngineRefusal.DRAFTER),
        ("speculative_config__enable_adaptive_verification", True, EngineRefusal.ADAPTIVE),
        ("parallel_config__enable_batch_sharded_sampling", True, EngineRefusal.SHARDED_SAMPLING),
        ("parallel_config__enable_elastic_ep", True, EngineRefusal.RUNNER),
        ("attention_config", SimpleNamespace(hisparse_config=object()), EngineRefusal.RUNNER),
        ("parallel_config__pipeline_parallel_size", 2, EngineRefusal.PIPELINE),
        ("parallel_config__enable_dbo", True, EngineRefusal.MICROBATCHING),
        ("kv_transfer_config", transfer("ExampleConnector"), EngineRefusal.CONNECTOR),
    ],
)
def test_what_is_not_proven_on_v2_is_refused(
    monkeypatch: pytest.MonkeyPatch, change: str, value: Any, reason: EngineRefusal
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not list(config_refusals(config_v2()))
    (refusal,) = config_refusals(config_v2(**{change: value}))
    assert refusal.reason is reason
    assert refusal.found
    assert refusal.remedy


def test_v2_on_a_cpu_is_served_under_the_interpreter_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    (refusal,) = config_refusals(config_v2())
    assert refusal.reason is EngineRefusal.PLATFORM


def test_v2_on_a_gpu_is_served_on_request_only() -> None:
    gpu = config_v2(device_config__device_type="cuda")
    (refusal,) = config_refusals(gpu)
    assert "NWOR_EXPERIMENTAL=cuda" in refusal.remedy
    assert not list(config_refusals(gpu, experimental=("cuda",)))
    v1 = config(device_config__device_type="cuda")
    assert [r.reason for r in config_refusals(v1, experimental=("cuda",))] == [
        EngineRefusal.PLATFORM
    ]


def test_connectors_are_trusted_by_declaration_only() -> None:
    def found(connector: SimpleNamespace, *trusted: str) -> list[str]:
        return [
            r.found.split("'")[1]
            for r in config_refusals(config(kv_transfer_config=connector), trusted)
        ]

    example, other = {"kv_connector": "ExampleConnector"}, {"kv_connector": "Other"}
    assert not found(transfer("ExampleConnector"))
    assert found(transfer("ExampleConnector", "mine")) == ["mine.ExampleConnector"]
    assert not found(transfer("ExampleConnector", "mine"), "mine.ExampleConnector")
    assert not found(transfer("MultiConnector", None, example))
    assert found(transfer("MultiConnector", None, example, other)) == ["Other"]
    assert not found(transfer("MultiConnector", None, example, other), "Other")


@pytest.mark.parametrize("name", ["ExampleConnector", "MultiConnector"])
def test_prompt_copies_during_the_forward_need_pages_of_their_own(name: str) -> None:
    """With prefix caching a prompt's page may be filled in that very step, by a staged row."""
    connector = transfer(name, None, {"kv_connector": "ExampleConnector"})
    assert not list(config_refusals(config(kv_transfer_config=connector)))
    shared = config(kv_transfer_config=connector, cache_config__enable_prefix_caching=True)
    (refusal,) = config_refusals(shared)
    assert refusal.reason is EngineRefusal.CONNECTOR
    assert "--no-enable-prefix-caching" in refusal.remedy
    assert not list(config_refusals(shared, ("ExampleConnector",))), "the user vouches for it"


@dataclasses.dataclass
class FullAttentionSpec:
    block_size: int = 32
    attention_chunk_size: int | None = None


@dataclasses.dataclass
class MambaSpec:
    block_size: int = 32


@dataclasses.dataclass
class CacheConfig:
    num_blocks: int
    kv_cache_groups: list[Any]


def group(spec: Any) -> Any:
    return SimpleNamespace(kv_cache_spec=spec, layer_names=["layers.0"])


def test_groups_that_are_refused() -> None:
    groups = [
        group(FullAttentionSpec()),
        group(MambaSpec()),
        group(FullAttentionSpec(block_size=4)),
        group(FullAttentionSpec(attention_chunk_size=64)),
    ]
    reasons = [refusal.reason for refusal in group_refusals(groups, 4)]
    assert reasons == [EngineRefusal.GROUP, EngineRefusal.PAGE_TOO_SMALL, EngineRefusal.GROUP]


@pytest.mark.parametrize(
    ("blocks", "pages", "needed", "leases"),
    [
        (1000, None, 10, 8),  # all of max_num_seqs
        (64, None, 10, 2),  # one page in eight
        (1000, 9, 10, 2),  # as told
        (64, 100, 40, 6),  # a request of maximum length must still fit
        (12, None, 10, 0),  # no room at all
        (1000, 3, 10, 0),  # fewer than one request takes
    ],
)
def test_the_reservation_is_bounded(
    monkeypatch: pytest.MonkeyPatch, blocks: int, pages: int | None, needed: int, leases: int
) -> None:
    monkeypatch.setattr("nwor.vllm.reservation.check_seams", lambda _: {})
    cache = CacheConfig(blocks, [group(FullAttentionSpec()), group(FullAttentionSpec())])
    settings = Settings(staging_pages=pages)
    found = reserve(settings, config(), cache, lambda _, left: left.num_blocks / needed)
    assert (found.num_leases, found.num_pages) == (leases, 4 * leases)
    assert [r.reason for r in found.refusals] == ([] if leases else [EngineRefusal.NO_ROOM])
    assert cache.num_blocks == blocks


def test_one_label_means_one_reason() -> None:
    """Four enums are exported under one metric; a shared value would mix their counts."""
    kinds = (FallbackReason, OverlayRefusal, DeviceFault, EngineRefusal)
    values = [str(reason) for kind in kinds for reason in kind]
    assert len(values) == len(set(values))
    assert all(value == value.lower() and value.isidentifier() for value in values)
