"""What `nwor doctor --model` looks at: the engine that vLLM would make, as far as it can be known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nwor.cli.check import Check, unchecked
from nwor.errors import LayoutError
from nwor.vllm import seams
from nwor.vllm.eligibility import (
    PROVEN_SPECS,
    Refusal,
    config_refusals,
    group_refusals,
    kind_refusals,
)
from nwor.vllm.rehearsal import Rehearsal, RehearsalError, cache_config, rehearse
from nwor.vllm.reservation import Reservation, reserve
from nwor.vllm.settings import Settings

BUILT = ("ngram", "custom_class", "draft_model")
"""Drafters without layers of their own, or whose layers a rehearsal builds."""


def model_checks(config: Any, settings: Settings, model: str) -> Iterator[Check]:  # noqa: ANN401 - VllmConfig
    """Yield whether an engine is served, and what cannot be known before it runs."""
    found: list[Refusal] = list(
        config_refusals(config, settings.connectors, experimental=settings.experimental)
    )
    drafter, layers = config.speculative_config, None
    try:
        layers = rehearse(config)
        found += group_refusals(layers.groups, drafter.num_speculative_tokens)
    except RehearsalError as error:
        found += kind_refusals(config)
        yield unchecked(
            "cache groups",
            f"vLLM cannot build this model without its weights ({error}); known from its "
            "configuration: no MLA, recurrent layers or chunked attention, unless said below",
        )
    for refusal in found:
        yield Check(
            f"model: {refusal.reason}", good=False, found=refusal.found, remedy=refusal.remedy
        )
    if not found:
        kinds = f", {_kinds(layers)}" if layers else ""
        yield Check(f"model {model}", good=True, found=f"its configuration is served{kinds}")
    if drafter.method not in BUILT:
        yield unchecked("the drafter's cache groups", f"{drafter.method} is not built beforehand")
    yield from _staging(config, settings, layers, refused=bool(found))
    yield from _layouts(config, layers)


def _kinds(layers: Rehearsal) -> str:
    kinds = sorted({type(group.kv_cache_spec).__name__ for group in layers.groups})
    return f"cache groups: {len(layers.groups)} ({', '.join(kinds)})"


def _staging(
    config: Any,  # noqa: ANN401 - VllmConfig
    settings: Settings,
    layers: Rehearsal | None,
    *,
    refused: bool,
) -> Iterator[Check]:
    """Yield how many requests can be staged at a time."""
    why = _unknown_room(config, layers, refused=refused)
    if why or layers is None:
        yield unchecked("staging pages", *why)
        return
    try:
        cache = cache_config(config, layers.specs)
    except ValueError as error:
        said = str(error).strip().splitlines()[0]
        remedy = "enlarge the KV cache or lower --max-model-len"
        yield Check("KV cache", good=False, found=f"vLLM would not start: {said}", remedy=remedy)
        return
    found = reserve(settings, config, cache, seams.resolve(seams.MAX_CONCURRENCY))
    if found.refusals:
        for each in found.refusals:
            yield Check(f"model: {each.reason}", good=False, found=each.found, remedy=each.remedy)
        return
    yield _room(found, cache.num_blocks, config.scheduler_config.max_num_seqs)


def _unknown_room(
    config: Any,  # noqa: ANN401 - VllmConfig
    layers: Rehearsal | None,
    *,
    refused: bool,
) -> tuple[str, ...]:
    """Return why the room for staging pages is not known, and what to give; empty if it is."""
    parallel = config.parallel_config
    if refused:
        return ("the engine is refused",)
    if layers is None or config.speculative_config.method not in BUILT:
        return ("not all layers of the engine are known",)
    if parallel.world_size > 1:
        return ("with several ranks, a rank's share of the layers is not known beforehand",)
    if not config.cache_config.kv_cache_memory_bytes:
        why = (
            "vLLM measures the memory for its KV cache when it starts; few blocks mean few requests "
            "that can be staged at a time, or none (no_room_for_staging)"
        )
        return why, "give --kv-cache-memory-bytes to know"
    return ()


def _room(found: Reservation, blocks: int, requests: int) -> Check:
    text = f"{found.num_pages} of {blocks} KV cache blocks, {found.num_leases} requests at a time"
    if found.num_leases == requests:
        return Check("staging pages", good=True, found=text)
    return Check(
        "staging pages",
        good=None,
        found=f"{text}; of max_num_seqs={requests} the others are written through and counted "
        "(nwor:fallbacks_total)",
        remedy=f"lower --max-num-seqs to {found.num_leases}, enlarge the KV cache, or raise "
        "NWOR_STAGING_PAGES",
    )


def _layouts(config: Any, layers: Rehearsal | None) -> Iterator[Check]:  # noqa: ANN401 - VllmConfig
    """Yield, for each shape of rows, whether marked rows are where nwor looks for them."""
    if config.device_config.device_type != "cpu":
        yield unchecked("row layout", "the worker probes it when it starts")
        return
    if layers is None:
        yield unchecked("row layout", "the shapes of the layers' rows are not known")
        return
    specs = (group.kv_cache_spec for group in layers.groups)
    shapes = {
        (spec.num_kv_heads, spec.head_size, spec.block_size)
        for spec in specs
        if type(spec).__name__ in PROVEN_SPECS
    }
    if not shapes:
        yield unchecked("row layout", "no cache group has rows of K and V that nwor knows")
    for heads, dim, page in sorted(shapes):
        yield _layout(config, heads, dim, page)


def _layout(config: Any, heads: int, dim: int, page: int) -> Check:  # noqa: ANN401 - as above
    """Write marked rows through vLLM's own CPU writer and look for them."""
    from nwor.vllm.probe import probe_cpu_layout  # noqa: PLC0415 - needs vLLM

    dtype, cache_dtype = config.model_config.dtype, config.cache_config.cache_dtype
    name = f"row layout, {dtype}, head dim {dim}, pages of {page}"
    try:
        probe_cpu_layout(heads=heads, dim=dim, page_size=page, dtype=dtype, cache_dtype=cache_dtype)
    except LayoutError as error:
        remedy = "none: this CPU's block layout is unknown to nwor"
        return Check(name, good=False, found=str(error), remedy=remedy)
    return Check(name, good=True, found="marked rows found where expected")
