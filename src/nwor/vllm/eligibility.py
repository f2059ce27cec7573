"""Can this engine be served by the overlay, and if not: why, and what to change.

Questions are asked of vLLM's configuration before anything is allocated. What is not on a list here
has not been proven and is refused: the engine then runs exactly as it would without nwor.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

PROVEN_DRAFTERS = ("ngram", "draft_model", "custom_class")
"""V1: they propose after the restore, with tables of their own or none."""

PROVEN_DRAFTERS_V2 = ("draft_model", "eagle", "eagle3")
"""V2: a draft model works out its slots from the source tables and reads the restored input tables;
EAGLE and EAGLE-3 reuse the target's metadata and slot mappings, views of what is restored."""

PROVEN_SPECS = ("FullAttentionSpec", "SlidingWindowSpec")
"""Cache kinds with one K and V row per token and a slot mapping."""

PROMPT_CONNECTORS = ("ExampleConnector",)
"""KV connectors that copy, during the forward, the prompt of a request in its first step, by block id.

Such a request has no drafts: nothing of its own is staged. But with prefix caching it may begin on a
page that another request fills in that very step, with a row that is still staged: the copy would
lack it. Served without prefix caching, where no prompt holds another request's page.
"""


class EngineRefusal(StrEnum):
    """Why an engine is left alone; also the label on ``nwor:fallbacks_total``."""

    RUNNER = "runner_v2"
    """A V2 runner with a part that nwor does not know."""
    ADAPTIVE = "adaptive_verification"
    SHARDED_SAMPLING = "batch_sharded_sampling"
    PLATFORM = "platform"
    DRAFTER = "drafter"
    PIPELINE = "pipeline_parallel"
    CONTEXT_PARALLEL = "context_parallel"
    ASYNC_SCHEDULING = "async_scheduling"
    MICROBATCHING = "microbatching"
    ENCODER_DECODER = "encoder_decoder"
    KV_SHARING = "kv_sharing_fast_prefill"
    CONNECTOR = "kv_connector"
    GROUP = "unsupported_group"
    PAGE_TOO_SMALL = "page_smaller_than_window"
    NO_ROOM = "no_room_for_staging"
    SEAM = "vllm_symbol"
    LAYOUT = "layout"
    """Found by the worker: rows are not where the backend's layout says."""
    BACKEND = "attention_backend"
    """Found by the worker: a backend whose block layout nwor does not know."""


SWITCHES_V2 = (
    (
        "speculative_config",
        "enable_adaptive_verification",
        EngineRefusal.ADAPTIVE,
        "adaptive verification: the host does not know how many drafts a request verifies",
    ),
    (
        "parallel_config",
        "enable_batch_sharded_sampling",
        EngineRefusal.SHARDED_SAMPLING,
        "sampling sharded over requests",
    ),
    (
        "parallel_config",
        "enable_elastic_ep",
        EngineRefusal.RUNNER,
        "elastic expert parallelism: its warm-up redirects writes",
    ),
    (
        "attention_config",
        "hisparse_config",
        EngineRefusal.RUNNER,
        "sparse attention with a cache of its own",
    ),
)
"""V2: section, switch, reason, what is found where the switch is on."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """One reason.

    Attributes:
        reason: the kind.
        found: what was found.
        remedy: what to change to be served.
    """

    reason: EngineRefusal
    found: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.found} ({self.remedy})"


def config_refusals(
    config: Any,  # noqa: ANN401 - vllm.config.VllmConfig
    connectors: Collection[str] = (),
    *,
    experimental: Collection[str] = (),
) -> Iterator[Refusal]:
    """Yield what in a `VllmConfig` with speculation stands in the way.

    Args:
        config: the engine's configuration.
        connectors: KV connectors the user vouches for, on V1 besides `PROMPT_CONNECTORS`
            without prefix caching.
        experimental: what is served although nobody has run it.
    """
    if config.use_v2_model_runner:
        yield from _runner_v2_refusals(config, experimental)
    else:
        yield from _runner_v1_refusals(config)
    yield from _parallel_refusals(config.parallel_config)
    yield from _model_refusals(config)
    yield from _connector_refusals(config, connectors)


def _runner_v1_refusals(config: Any) -> Iterator[Refusal]:  # noqa: ANN401 - VllmConfig
    device = config.device_config.device_type
    if device != "cpu":
        yield Refusal(
            EngineRefusal.PLATFORM,
            f"the V1 runner on device {device}",
            "only the CPU backend has been run; see docs/vllm.md",
        )
    yield from _drafter_refusals(config.speculative_config, PROVEN_DRAFTERS)
    if config.scheduler_config.async_scheduling:
        yield Refusal(
            EngineRefusal.ASYNC_SCHEDULING,
            "async scheduling: the V1 runner's token counts on the host are guesses",
            "pass --no-async-scheduling",
        )


def _runner_v2_refusals(config: Any, experimental: Collection[str]) -> Iterator[Refusal]:  # noqa: ANN401 - VllmConfig
    device, speculative = config.device_config.device_type, config.speculative_config
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        yield Refusal(
            EngineRefusal.PLATFORM,
            "the V2 runner on CPUs, with compiled Triton kernels",
            "set VLLM_USE_V2_MODEL_RUNNER=0; V2 on CPUs is run under Triton's interpreter only",
        )
    elif device == "cuda" and "cuda" not in experimental:
        yield Refusal(
            EngineRefusal.PLATFORM,
            "the V2 runner on a GPU, where nobody has run nwor yet",
            "set NWOR_EXPERIMENTAL=cuda to try it",
        )
    elif device not in {"cpu", "cuda"}:
        yield Refusal(EngineRefusal.PLATFORM, f"the V2 runner on device {device}", "none")
    yield from _drafter_refusals(speculative, PROVEN_DRAFTERS_V2)
    for section, name, reason, found in SWITCHES_V2:
        if getattr(getattr(config, section, None), name, None):
            yield Refusal(reason, found, f"switch {name} off")


def _drafter_refusals(speculative: Any, proven: Sequence[str]) -> Iterator[Refusal]:  # noqa: ANN401 - SpeculativeConfig
    if speculative.method not in proven:
        yield Refusal(
            EngineRefusal.DRAFTER,
            f"drafter {speculative.method!r}",
            f"use one of {', '.join(proven)}",
        )


def _parallel_refusals(parallel: Any) -> Iterator[Refusal]:  # noqa: ANN401 - ParallelConfig
    if parallel.pipeline_parallel_size > 1:
        yield Refusal(
            EngineRefusal.PIPELINE,
            f"pipeline_parallel_size={parallel.pipeline_parallel_size}: earlier ranks learn of "
            "rejections a step later",
            "set --pipeline-parallel-size 1",
        )
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        yield Refusal(
            EngineRefusal.CONTEXT_PARALLEL,
            "context parallelism splits a page over ranks",
            "set both context parallel sizes to 1",
        )
    if getattr(parallel, "enable_dbo", False) or getattr(parallel, "ubatch_size", 0) > 1:
        yield Refusal(
            EngineRefusal.MICROBATCHING,
            "a batch in parts: their tables are copies",
            "drop --enable-dbo and --ubatch-size",
        )


def _model_refusals(config: Any) -> Iterator[Refusal]:  # noqa: ANN401 - VllmConfig
    if config.model_config.is_encoder_decoder:
        yield Refusal(EngineRefusal.ENCODER_DECODER, "an encoder-decoder model", "none")
    if config.cache_config.kv_sharing_fast_prefill:
        yield Refusal(
            EngineRefusal.KV_SHARING, "kv_sharing_fast_prefill", "drop --kv-sharing-fast-prefill"
        )


def _connector_refusals(config: Any, trusted: Collection[str]) -> Iterator[Refusal]:  # noqa: ANN401 - VllmConfig
    for name in _connectors(config.kv_transfer_config):
        if name in trusted:
            continue
        if name not in PROMPT_CONNECTORS or config.use_v2_model_runner:
            yield Refusal(
                EngineRefusal.CONNECTOR,
                f"KV connector {name!r} is not known to read durable pages only: one that copies "
                "during the forward through the slot mapping would export staged rows",
                f"drop --kv-transfer-config, or set NWOR_CONNECTORS={name} if it saves by block id, "
                "in wait_for_save or later",
            )
        elif config.cache_config.enable_prefix_caching:
            yield Refusal(
                EngineRefusal.CONNECTOR,
                f"KV connector {name!r} copies prompts during the forward: with prefix caching, a "
                "prompt's page may still lack a row that another request has staged",
                "pass --no-enable-prefix-caching, or use a connector that saves in wait_for_save",
            )


def _connectors(transfer: Any) -> list[str]:  # noqa: ANN401 - KVTransferConfig or None
    """Name the connectors of a configuration, those inside a MultiConnector one by one.

    One that comes from a module of the user's is named with it: names alone are not unique.
    """
    if transfer is None or transfer.kv_connector is None:
        return []
    if transfer.kv_connector == "MultiConnector":
        children = transfer.kv_connector_extra_config.get("connectors", [])
        return [
            _path(child.get("kv_connector"), child.get("kv_connector_module_path"))
            for child in children
        ]
    return [_path(transfer.kv_connector, transfer.kv_connector_module_path)]


def _path(name: str, module: str | None) -> str:
    return f"{module}.{name}" if module else name


KINDS = (
    ("use_mla", "multi-head latent attention (MLA)"),
    ("is_hybrid", "recurrent layers beside attention"),
    ("is_attention_free", "recurrent layers alone"),
    ("attention_chunk_size", "chunked local attention"),
)
"""What of a model's configuration says that some cache group is not one of `PROVEN_SPECS`."""


def kind_refusals(config: Any) -> Iterator[Refusal]:  # noqa: ANN401 - VllmConfig
    """Yield what the configuration alone says about cache groups: less than `group_refusals`."""
    speculative, models = config.speculative_config, {"model": config.model_config}
    if speculative.method == "draft_model":
        models["draft model"] = speculative.draft_model_config
    for name, model in models.items():
        for attribute, kind in KINDS:
            if getattr(model, attribute, None):
                yield Refusal(
                    EngineRefusal.GROUP,
                    f"the {name} has {kind}",
                    f"only {', '.join(PROVEN_SPECS)} are staged",
                )
    size, drafts = config.cache_config.block_size, speculative.num_speculative_tokens
    if size <= drafts:
        yield _page_refusal(size, drafts, "")


def group_refusals(
    groups: Sequence[Any],  # vllm's KVCacheGroupSpec
    num_draft_tokens: int,
) -> Iterator[Refusal]:
    """Yield what in the cache groups stands in the way."""
    for index, group in enumerate(groups):
        spec = group.kv_cache_spec
        kind = type(spec).__name__
        if kind not in PROVEN_SPECS or getattr(spec, "attention_chunk_size", None):
            yield Refusal(
                EngineRefusal.GROUP,
                f"cache group {index} ({group.layer_names[0]} …) is a {kind}",
                f"only {', '.join(PROVEN_SPECS)} are staged",
            )
        elif spec.block_size <= num_draft_tokens:
            yield _page_refusal(spec.block_size, num_draft_tokens, f" (group {index})")


def _page_refusal(size: int, drafts: int, where: str) -> Refusal:
    return Refusal(
        EngineRefusal.PAGE_TOO_SMALL,
        f"{drafts} drafts on pages of {size} rows{where}",
        f"use a --block-size above {drafts} or fewer draft tokens",
    )
