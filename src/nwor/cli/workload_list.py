"""What `nwor audit --list-workloads` prints."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

from nwor.audit.workloads import WORKLOADS

ENGINES = {"vllm": ("vllm", "vllm"), "transformers": ("transformers", "engine")}
"""By name: the module it needs, the extra that installs it. The first one installed is the default."""
_WIDTH, _INDENT = 80, 32


class ListWorkloads(argparse.Action):
    """An option that prints the workloads and ends the program, as ``--version`` does."""

    def __init__(self, option_strings: list[str], dest: str, **options: Any) -> None:  # noqa: ANN401
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print and exit."""
        sys.stdout.write(workload_list())
        parser.exit()


def workload_list() -> str:
    """Lay out what each workload exercises, and per engine whether it does so there or why not."""
    lines = [_line("workload", dict.fromkeys(ENGINES), "exercises")]
    for name, workload in WORKLOADS.items():
        runs = {each: "no" if each in workload.absent else "yes" for each in ENGINES}
        lines.append(_line(name, runs, workload.about))
        for engine, text in (*workload.absent.items(), *workload.remarks.items()):
            lines += textwrap.wrap(
                f"{' ' * _INDENT}{engine}: {text}", _WIDTH, subsequent_indent=" " * _INDENT
            )
    lines += ["", *textwrap.wrap(_DRAFTER, _WIDTH)]
    for engine, (module, extra) in ENGINES.items():
        if importlib.util.find_spec(module) is None:
            lines.append(f"{engine} is not installed here: pip install 'nwor[{extra}]'")
    return "\n".join([*lines, ""])


def _line(name: str, engines: Mapping[str, str | None], text: str) -> str:
    """Return one line in columns as wide as the engines' names, which stand for None."""
    columns = "  ".join(f"{value or engine:{len(engine)}s}" for engine, value in engines.items())
    return f"{name:10s}  {columns}  {text}"


_DRAFTER = (
    "All of them run with the drafter that --drafter names: the default, adversary, is right often "
    "enough to be accepted and wrong often enough to be rejected."
)
