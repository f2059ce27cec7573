"""Staging pages are kept back from the scheduler, never taken from it.

The engine core lowers the scheduler's number of blocks by S; workers allocate all of them and own
the top S. No block pool is touched, and a staging page can never be given to a request. The
reservation travels to the workers inside their cache configuration, so a worker stages exactly if
its scheduler has made room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nwor.store.staging import PAGES_PER_LEASE
from nwor.vllm.eligibility import (
    EngineRefusal,
    Refusal,
    config_refusals,
    group_refusals,
)
from nwor.vllm.seams import check_seams, seams_of
from nwor.vllm.settings import Settings

RESERVATION_ATTRIBUTE = "nwor"
"""Name under which a `KVCacheConfig` carries its `Reservation`."""

SHARE = 8
"""Unless told otherwise, staging takes at most one page in this many."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """What the engine core decided, for the workers and the scheduler of one engine.

    Attributes:
        settings: the settings, so that all processes of an engine agree.
        refusals: why the engine is left alone; empty if it is served.
        num_leases: requests that can be staged at a time.
        num_pages: pages kept back, the highest ones.
    """

    settings: Settings
    refusals: tuple[Refusal, ...] = ()
    num_leases: int = 0
    num_pages: int = 0


def reserve(
    settings: Settings,
    config: Any,  # noqa: ANN401 - vllm.config.VllmConfig
    cache: Any,  # noqa: ANN401 - vllm's KVCacheConfig of one worker
    concurrency: Callable[[Any, Any], float],
) -> Reservation:
    """Decide whether and how an engine with speculation is served.

    Args:
        settings: the user's choices.
        config: the engine's configuration.
        cache: what one worker will allocate; all workers have as many blocks.
        concurrency: vLLM's own count of maximum-length requests that fit a cache configuration.
    """
    refusals = [
        *config_refusals(config, settings.connectors, experimental=settings.experimental),
        *_cache_refusals(config, cache),
        *_seam_refusals(v2=config.use_v2_model_runner),
    ]
    if refusals:
        return Reservation(settings, tuple(refusals))
    per_lease = PAGES_PER_LEASE * len(cache.kv_cache_groups)
    wanted = config.scheduler_config.max_num_seqs
    if settings.staging_pages is None:
        wanted = min(wanted, max(1, cache.num_blocks // SHARE // per_lease))
    else:
        wanted = min(wanted, settings.staging_pages // per_lease)
    for leases in range(wanted, 0, -1):
        left = replace_blocks(cache, cache.num_blocks - leases * per_lease)
        if left.num_blocks > 1 and concurrency(config, left) >= 1:
            return Reservation(settings, (), leases, leases * per_lease)
    return Reservation(settings, (_no_room(settings, cache, per_lease),))


def replace_blocks(cache: Any, num_blocks: int) -> Any:  # noqa: ANN401 - KVCacheConfig
    """Return a shallow copy of a cache configuration with another number of blocks."""
    return replace(cache, num_blocks=num_blocks)


def _cache_refusals(config: Any, cache: Any) -> Sequence[Refusal]:  # noqa: ANN401 - as above
    drafts = config.speculative_config.num_speculative_tokens
    return list(group_refusals(cache.kv_cache_groups, drafts))


def _seam_refusals(*, v2: bool) -> list[Refusal]:
    return [
        Refusal(EngineRefusal.SEAM, problem, "use a checked vLLM version")
        for problem in check_seams(seams_of(v2=v2)).values()
    ]


def _no_room(settings: Settings, cache: Any, per_lease: int) -> Refusal:  # noqa: ANN401 - as above
    if settings.staging_pages is not None and settings.staging_pages < per_lease:
        return Refusal(
            EngineRefusal.NO_ROOM,
            f"NWOR_STAGING_PAGES={settings.staging_pages}, one request takes {per_lease}",
            f"set NWOR_STAGING_PAGES to {per_lease} or more",
        )
    return Refusal(
        EngineRefusal.NO_ROOM,
        f"{cache.num_blocks} KV cache blocks leave no {per_lease} to stage a request beside one of "
        "maximum length",
        "enlarge the KV cache or lower --max-model-len",
    )
