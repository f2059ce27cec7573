"""Hooks on what runs once per engine: cache configuration, runner, scheduler, stat loggers.

They are all the plugin installs on its own. Whether an engine gets hot-path hooks is decided here,
per engine, once its configuration is known.

    engine core   get_kv_cache_configs                 decide, attach a Reservation for the workers
                  generate_scheduler_kv_cache_config   lower num_blocks by the staging pages
                  Scheduler.__init__                   pass counters on      (instance)
    worker        GPUModelRunner.initialize_kv_cache   build the overlay     (instance; V1 and V2)
    front end     StatLoggerManager.__init__           metrics and log line  (instance)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from nwor.audit import AuditLevel
from nwor.errors import InputError
from nwor.manager import Mode
from nwor.vllm import seams
from nwor.vllm.reservation import RESERVATION_ATTRIBUTE, Reservation, replace_blocks, reserve
from nwor.vllm.settings import Settings, read_settings

logger = logging.getLogger("vllm.nwor")


class EngineRefusedError(InputError):
    """``NWOR_STRICT=1`` and the engine cannot be served."""


def reservation_of(cache: Any) -> Reservation | None:  # noqa: ANN401 - KVCacheConfig
    """Return what the engine core decided, None for an engine without speculation."""
    return getattr(cache, RESERVATION_ATTRIBUTE, None)


def hook_core() -> None:
    """Keep staging pages back from the scheduler.

    Settings are read again for every engine: a process may make several.
    """

    def make_configs(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_kv_cache_configs(
            vllm_config: Any,  # noqa: ANN401
            kv_cache_specs: Any,  # noqa: ANN401
            available_memory: Any,  # noqa: ANN401
            *args: Any,  # noqa: ANN401 - newer releases take more
            **kwargs: Any,  # noqa: ANN401
        ) -> Any:  # noqa: ANN401
            configs = original(vllm_config, kv_cache_specs, available_memory, *args, **kwargs)
            settings = read_settings()
            if vllm_config.speculative_config is not None and settings.mode is not Mode.OFF:
                _attach(settings, vllm_config, configs)
            return configs

        return get_kv_cache_configs

    def make_scheduler(original: Callable[..., Any]) -> Callable[..., Any]:
        def generate_scheduler_kv_cache_config(
            kv_cache_configs: Any,  # noqa: ANN401
            *args: Any,  # noqa: ANN401
            **kwargs: Any,  # noqa: ANN401
        ) -> Any:  # noqa: ANN401
            config = original(kv_cache_configs, *args, **kwargs)
            reservation = reservation_of(kv_cache_configs[0])
            if reservation is None:
                return config
            config = replace_blocks(config, config.num_blocks - reservation.num_pages)
            setattr(config, RESERVATION_ATTRIBUTE, reservation)
            return config

        return generate_scheduler_kv_cache_config

    seams.wrap_symbol(seams.CACHE_CONFIGS, make_configs)
    seams.wrap_symbol(seams.SCHEDULER_CONFIG, make_scheduler)


def _attach(settings: Settings, config: Any, caches: Sequence[Any]) -> None:  # noqa: ANN401
    reservation = reserve(settings, config, caches[0], seams.resolve(seams.MAX_CONCURRENCY))
    if reservation.refusals and settings.strict:
        reasons = "; ".join(map(str, reservation.refusals))
        raise EngineRefusedError(f"NWOR_STRICT=1 and nwor cannot serve this engine: {reasons}")
    for cache in caches:
        setattr(cache, RESERVATION_ATTRIBUTE, reservation)
    _banner(reservation, caches[0])
    if not reservation.refusals and config.device_config.device_type == "cuda":
        logger.warning(
            "nwor: EXPERIMENTAL: nobody has run nwor under vLLM on a GPU yet; compare its output with "
            "NWOR_MODE=off before you rely on it"
        )


def _banner(reservation: Reservation, cache: Any) -> None:  # noqa: ANN401
    if reservation.refusals:
        reasons = "; ".join(map(str, reservation.refusals))
        logger.warning("nwor: speculation runs without nwor on this engine: %s", reasons)
    elif reservation.settings.mode is Mode.IMMEDIATE:
        logger.info("nwor: counting windows, vLLM writes through (NWOR_MODE=immediate)")
    else:
        logger.info(
            "nwor: drafted rows are staged on %d of %d KV cache blocks (%d requests, %d groups) and "
            "only accepted ones reach the others; NWOR_MODE=off switches this off",
            reservation.num_pages,
            cache.num_blocks,
            reservation.num_leases,
            len(cache.kv_cache_groups),
        )


def hook_scheduler() -> None:
    """Let schedulers of staging engines pass the worker's counters on."""

    def make(original: Callable[..., None]) -> Callable[..., None]:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401, N807
            original(self, *args, **kwargs)
            reservation = reservation_of(self.kv_cache_config)
            if reservation is not None:
                from nwor.vllm.stats import hook_update  # noqa: PLC0415 - staging engines only

                hook_update(self, reservation)

        return __init__

    seams.wrap_symbol(seams.SCHEDULER_INIT, make)


def hook_runner() -> None:
    """Build the overlay when a V1 runner's cache tensors exist."""
    _hook_cache(seams.RUNNER_CACHE, _attach_v1)


def hook_runner_v2() -> None:
    """Build the overlay when a V2 runner's cache tensors exist."""
    _hook_cache(seams.RUNNER_CACHE_V2, _attach_v2)


def _hook_cache(seam: seams.Seam, attach: Callable[[Any, Any, Reservation], None]) -> None:
    def make(original: Callable[..., None]) -> Callable[..., None]:
        def initialize_kv_cache(
            self: Any,  # noqa: ANN401
            kv_cache_config: Any,  # noqa: ANN401
            is_profiling: bool = False,  # noqa: FBT001, FBT002 - vLLM's signature
            *args: Any,  # noqa: ANN401
            **kwargs: Any,  # noqa: ANN401
        ) -> None:
            original(self, kv_cache_config, is_profiling, *args, **kwargs)
            reservation = reservation_of(kv_cache_config)
            if reservation is not None and not is_profiling:
                attach(self, kv_cache_config, reservation)

        return initialize_kv_cache

    seams.wrap_symbol(seam, make)


def _attach_v1(runner: Any, cache: Any, reservation: Reservation) -> None:  # noqa: ANN401
    if not reservation.refusals:
        from nwor.vllm.runner_v1 import attach  # noqa: PLC0415 - staging engines only

        attach(runner, reservation)
    if reservation.settings.audit is not AuditLevel.OFF:
        from nwor.vllm import audit  # noqa: PLC0415 - audited engines only

        first_staging = cache.num_blocks - reservation.num_pages
        audit.attach(runner, reservation.settings.audit, first_staging)


def _attach_v2(runner: Any, cache: Any, reservation: Reservation) -> None:  # noqa: ANN401
    if not reservation.refusals:
        from nwor.vllm.runner_v2 import attach  # noqa: PLC0415 - staging engines only

        attach(runner, reservation)
    if reservation.settings.audit is not AuditLevel.OFF:
        from nwor.vllm import audit_v2  # noqa: PLC0415 - audited engines only

        first_staging = cache.num_blocks - reservation.num_pages
        audit_v2.attach(runner, reservation.settings.audit, first_staging)


def hook_loggers() -> None:
    """Show the counters of engines with speculation on /metrics and in the log."""

    def make(original: Callable[..., None]) -> Callable[..., None]:
        def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401, N807
            original(self, vllm_config, *args, **kwargs)
            mode = read_settings().mode
            if vllm_config.speculative_config is not None and mode is not Mode.OFF:
                from nwor.vllm.frontend import hook_manager  # noqa: PLC0415 - speculation only

                hook_manager(self, vllm_config)

        return __init__

    seams.wrap_symbol(seams.LOGGERS_INIT, make)


HOOKS: tuple[tuple[str, Callable[[], None]], ...] = (
    (seams.CORE, hook_core),
    (seams.SCHEDULER, hook_scheduler),
    (seams.RUNNER, hook_runner),
    (seams.RUNNER_V2, hook_runner_v2),
    (seams.LOGGERS, hook_loggers),
)
"""Module to wait for, and what to do once it is imported."""
