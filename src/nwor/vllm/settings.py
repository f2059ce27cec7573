"""Every setting of the plugin, declared once and read from the environment once per process."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nwor.audit.level import AuditLevel
from nwor.errors import InputError, ModeError
from nwor.manager import Mode
from nwor.store.movers import MOVERS


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user chose.

    Attributes:
        mode: `Mode.STAGE` stages windows, `Mode.IMMEDIATE` counts them and lets vLLM write through
            (the control group), `Mode.OFF` leaves vLLM alone.
        strict: raise where a fallback would be counted, at start-up as well as in a step.
        staging_pages: most staging pages to keep back from the scheduler, None: see
            `nwor.vllm.reservation`.
        mover: row mover; with ``numba`` the bookkeeping is compiled too.
        connectors: KV connectors the user vouches for: they read pages by block id, after sampling.
        audit: how closely the cache is watched while serving.
        experimental: what the user wants served although nobody has run it: ``cuda``.
    """

    mode: Mode = Mode.STAGE
    strict: bool = False
    staging_pages: int | None = None
    mover: str = "numba"
    connectors: tuple[str, ...] = ()
    audit: AuditLevel = AuditLevel.OFF
    experimental: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable: what it sets, what it allows, how it is read."""

    name: str
    field: str
    allowed: str
    default: str
    help: str
    parse: Callable[[str], Any]


def _mode(text: str) -> Mode:
    return Mode(text.lower())


def _flag(text: str) -> bool:
    return {"0": False, "1": True}[text]


def _pages(text: str) -> int | None:
    if text == "auto":
        return None
    pages = int(text)
    if pages < 1:
        raise ValueError(text)
    return pages


def _mover(text: str) -> str:
    if text not in MOVERS:
        raise ValueError(text)
    return text


def _experiments(text: str) -> tuple[str, ...]:
    names = _names(text)
    if unknown := set(names) - {"cuda"}:
        raise ValueError(unknown)
    return names


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


VARIABLES = (
    Variable(
        "NWOR_MODE",
        "mode",
        "stage, immediate, off",
        "stage",
        "stage drafted rows; or only count windows; or leave vLLM alone",
        _mode,
    ),
    Variable(
        "NWOR_STRICT",
        "strict",
        "0, 1",
        "0",
        "raise instead of falling back to write-through",
        _flag,
    ),
    Variable(
        "NWOR_STAGING_PAGES",
        "staging_pages",
        "auto, or a number of at least 1",
        "auto",
        "most staging pages to keep back from the scheduler",
        _pages,
    ),
    Variable("NWOR_MOVER", "mover", ", ".join(MOVERS), "numba", "how rows are moved home", _mover),
    Variable(
        "NWOR_CONNECTORS",
        "connectors",
        "names of KV connectors, separated by commas",
        "",
        "KV connectors to trust: they save by block id, in wait_for_save or later",
        _names,
    ),
    Variable(
        "NWOR_AUDIT",
        "audit",
        "off, metadata, bytes",
        "off",
        "check every step what the cache holds; violations are logged and counted",
        AuditLevel,
    ),
    Variable(
        "NWOR_EXPERIMENTAL",
        "experimental",
        "cuda",
        "",
        "serve what has not been run: the V2 runner on NVIDIA GPUs",
        _experiments,
    ),
)


def read_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the settings.

    Raises:
        ModeError: `NWOR_MODE` is not a mode.
        InputError: another variable has a value that is not allowed.
    """
    environ = os.environ if environ is None else environ
    values = {}
    for variable in VARIABLES:
        text = environ.get(variable.name, variable.default)
        try:
            values[variable.field] = variable.parse(text)
        except (ValueError, KeyError):
            kind = ModeError if variable.name == "NWOR_MODE" else InputError
            message = f"{variable.name}={text!r} is not allowed; allowed: {variable.allowed}"
            raise kind(message) from None
    return Settings(**values)


def unknown_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """Name set NWOR_* variables that mean nothing to the plugin: most likely a typing error."""
    environ = os.environ if environ is None else environ
    known = {variable.name for variable in VARIABLES}
    return sorted(name for name in environ if name.startswith("NWOR_") and name not in known)
