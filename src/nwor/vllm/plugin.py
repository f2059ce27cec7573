"""The entry point vLLM calls in every process: gates first, then hooks on what runs once.

installed? -> NWOR_MODE=off? -> version checked? -> start-up hooks, when their module is imported
                                                        |
                    speculation configured? supported? -+-> staging pages, hot-path hooks
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

from nwor.manager import Mode
from nwor.vllm.imports import when_imported
from nwor.vllm.seams import CHECKED_VERSIONS, SeamError
from nwor.vllm.settings import Settings, read_settings, unknown_variables

logger = logging.getLogger("vllm.nwor")  # below vLLM's logger: same handler, same format

_registered = False


class VersionError(SeamError):
    """A vLLM release whose symbols nobody has checked."""


def register() -> None:
    """Install the start-up hooks; safe to call any number of times.

    Raises:
        ModeError: `NWOR_MODE` is not a mode.
        InputError: another setting has a value that is not allowed.
        SeamError: only with ``NWOR_STRICT=1``: unknown vLLM version, missing symbol.
    """
    global _registered  # noqa: PLW0603 - once per process
    settings = read_settings()
    if settings.mode is Mode.OFF or _registered:
        return
    _registered = True
    for name in unknown_variables():
        logger.warning("nwor: %s is not a setting of nwor and is ignored", name)
    version = vllm_version()
    if not version_checked(version):
        refuse(
            settings,
            VersionError(
                f"vLLM {version} has not been checked with this nwor "
                f"(checked: {', '.join(CHECKED_VERSIONS)}); `nwor doctor` shows what differs"
            ),
        )
        return
    _install(settings)


def vllm_version() -> str:
    """Version of the vLLM that called us."""
    return str(getattr(sys.modules.get("vllm"), "__version__", "unknown"))


def version_checked(version: str) -> bool:
    """Tell whether a version (without its local part, ``+cpu``) was checked."""
    return version.partition("+")[0] in CHECKED_VERSIONS


def refuse(settings: Settings, error: Exception) -> None:
    """Leave vLLM alone, loudly.

    Raises:
        Exception: `error` itself, with ``NWOR_STRICT=1``.
    """
    if settings.strict:
        raise error
    logger.error("nwor: not active, vLLM runs unchanged: %s", error)


def _install(settings: Settings) -> None:
    def guarded(hook: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                hook()
            except SeamError as error:
                refuse(settings, error)

        return run

    from nwor.vllm import startup  # noqa: PLC0415 - after the gates

    for module, hook in startup.HOOKS:
        when_imported(module, guarded(hook))
