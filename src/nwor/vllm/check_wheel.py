"""Is a vLLM release that is not installed as the ledger says? Reads the sources in its wheel.

    python -m nwor.vllm.check_wheel --wheel vllm-0.33.0-….whl [--json OUT]

A function may take more than the ledger names; the table says what, and whoever adds a release to
`seams.CHECKED_VERSIONS` reads our wrapper for it. Nothing of the wheel is imported or executed. A
symbol that passes is *there with these parameters*, not known to behave; `CHECKED_VERSIONS` lists
the releases that nwor's tests ran on. Exit code 0: all as the ledger says, 1: some are not.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from nwor.errors import InputError
from nwor.vllm.seams import SEAMS, V2_SEAMS, Seam, SeamError

Symbol = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ImportFrom


class WheelSource:
    """Modules of a wheel, as syntax trees.

    Args:
        path: the wheel.

    Raises:
        InputError: it is no wheel.
    """

    def __init__(self, path: Path) -> None:
        if not zipfile.is_zipfile(path):
            raise InputError(f"{path} is not a wheel: pass the .whl file of a vLLM release")
        self._archive = zipfile.ZipFile(path)
        self._names = frozenset(self._archive.namelist())

    def module(self, name: str) -> ast.Module:
        """Parse a module.

        Raises:
            SeamError: the wheel has no such module.
        """
        stem = name.replace(".", "/")
        for path in (f"{stem}.py", f"{stem}/__init__.py"):
            if path in self._names:
                return ast.parse(self._archive.read(path), path)
        raise SeamError(f"{name} does not exist")

    def version(self) -> str:
        """Return the release, from the name of the wheel's metadata folder."""
        found = [n for n in self._names if n.endswith(".dist-info/METADATA")]
        return found[0].split("/")[0].removesuffix(".dist-info").split("-")[1] if found else "?"


def check_wheel(source: WheelSource, seams: Iterable[Seam]) -> dict[str, str]:
    """Return what is wrong with each seam, by path, as `seams.check_seams` does when installed."""
    wrong = {}
    for seam in seams:
        try:
            _check(source, seam)
        except SeamError as error:
            wrong[seam.path] = str(error)
    return wrong


def _check(source: WheelSource, seam: Seam) -> None:
    names = parameters_of(source, seam)
    if tuple(names[: len(seam.parameters)]) != seam.parameters:
        raise SeamError(f"{seam.path} takes {names}, expected {list(seam.parameters)} first")


def parameters_of(source: WheelSource, seam: Seam) -> list[str]:
    """Return the parameters of a seam's function, without ``self``.

    Raises:
        SeamError: there is no such function.
    """
    found = _find(source, seam.module, seam.name.split("."))
    if not isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
        raise SeamError(f"{seam.path} is not a function")
    arguments = [*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs]
    return [argument.arg for argument in arguments if argument.arg != "self"]


def more(source: WheelSource, seam: Seam) -> str:
    """Name what a function takes beyond the ledger: a wrapper of ours must pass it on."""
    rest = parameters_of(source, seam)[len(seam.parameters) :]
    return f" (also takes {', '.join(rest)})" if rest else ""


def _find(source: WheelSource, module: str, path: Sequence[str]) -> Symbol:
    """Follow a dotted path through a module, its imports and its classes."""
    body: Sequence[ast.stmt] = source.module(module).body
    for depth, name in enumerate(path):
        found = next((s for s in _symbols(body) if name in _bound(s)), None)
        if found is None:
            raise SeamError(f"{module}.{'.'.join(path)} does not exist: no {name!r}")
        if isinstance(found, ast.ImportFrom):
            original = next(a.name for a in found.names if name == (a.asname or a.name))
            if found.module is None or found.level:
                raise SeamError(f"{module} imports {name!r} relatively: cannot be followed")
            return _find(source, found.module, [original, *path[depth + 1 :]])
        if depth == len(path) - 1:
            return found
        body = found.body
    raise SeamError(f"{module}: empty path")


def _symbols(body: Sequence[ast.stmt]) -> Iterator[Symbol]:
    """Yield the definitions and imports of a body, last one first: the last one counts."""
    for statement in reversed(body):
        if isinstance(statement, Symbol):
            yield statement


def _bound(symbol: Symbol) -> set[str]:
    if isinstance(symbol, ast.ImportFrom):
        return {alias.asname or alias.name for alias in symbol.names}
    return {symbol.name}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table of all seams, V1's and V2's."""
    parser = argparse.ArgumentParser(prog="check_wheel", description=__doc__.split("\n")[0])
    parser.add_argument("--wheel", type=Path, required=True, help="a vLLM wheel, not installed")
    parser.add_argument("--json", type=Path, help="write the result here too")
    options = parser.parse_args(arguments)
    source = WheelSource(options.wheel)
    seams = (*SEAMS, *V2_SEAMS)
    wrong = check_wheel(source, seams)
    for seam in seams:
        verdict = "differs" if seam.path in wrong else "same"
        sys.stdout.write(
            f"{verdict:8}{seam.path}{'' if seam.path in wrong else more(source, seam)}\n"
        )
    for message in wrong.values():
        sys.stdout.write(f"  {message}\n")
    sys.stdout.write(f"vLLM {source.version()}: {len(seams) - len(wrong)} of {len(seams)} same\n")
    if options.json:
        result = {
            "vllm": source.version(),
            "seams": {seam.path: wrong.get(seam.path) for seam in seams},
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
