"""Is a vLLM release that is not installed as the ledger says? Reads the sources in its wheel.

    python -m nwor.vllm.check_wheel [--wheel vllm-0.33.0-….whl | --version 0.33.0] [--json OUT]

Without a wheel, the newest one on pip's index is read in place (`remote_wheel`). A function may take
more than the ledger names, and the table says what; it may *require* more only where our wrapper
passes it on (`Seam.strict`). Nothing of the wheel is imported or executed. A
symbol that passes is *there with these parameters*, not known to behave; `CHECKED_VERSIONS` lists
the releases that nwor's tests ran on. Exit code 0: all as the ledger says, 1: some are not,
2: there is nothing to check (no such release, no network, no wheel), or OUT cannot be written.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from nwor.errors import InputError
from nwor.output_file import check_writable, save
from nwor.vllm.remote_wheel import find_published, open_published
from nwor.vllm.seams import LEDGER, Seam, SeamError, check_parameters

Symbol = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ImportFrom


class WheelSource:
    """Modules of a wheel, as syntax trees.

    Args:
        wheel: the wheel, a path or an open file.
        name: what messages call it.

    Raises:
        InputError: it is no wheel.
    """

    def __init__(self, wheel: Path | BinaryIO, name: str | None = None) -> None:
        if not zipfile.is_zipfile(wheel):
            raise InputError(f"{name or wheel} is not a wheel: pass the .whl of a vLLM release")
        self._archive = zipfile.ZipFile(wheel)
        self._names = frozenset(self._archive.namelist())
        self._parsed: dict[str, ast.Module] = {}

    def module(self, name: str) -> ast.Module:
        """Parse a module.

        Raises:
            SeamError: the wheel has no such module.
        """
        if name in self._parsed:
            return self._parsed[name]
        stem = name.replace(".", "/")
        for path in (f"{stem}.py", f"{stem}/__init__.py"):
            if path in self._names:
                self._parsed[name] = ast.parse(self._archive.read(path), path)
                return self._parsed[name]
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
    parameters = parameters_of(source, seam)
    check_parameters(
        seam, list(parameters), [name for name, needed in parameters.items() if needed]
    )


def parameters_of(source: WheelSource, seam: Seam) -> dict[str, bool]:
    """Return the parameters of a seam's function, without ``self``: name -> is it required?

    Raises:
        SeamError: there is no such function.
    """
    found = _find(source, seam.module, seam.name.split("."))
    if not isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
        raise SeamError(f"{seam.path} is not a function")
    taken = found.args
    positional = [*taken.posonlyargs, *taken.args]
    needed = {a.arg: i < len(positional) - len(taken.defaults) for i, a in enumerate(positional)}
    for argument, default in zip(taken.kwonlyargs, taken.kw_defaults, strict=True):
        needed[argument.arg] = default is None
    needed.pop("self", None)
    return needed


def more(source: WheelSource, seam: Seam) -> str:
    """Name what a function takes beyond the ledger: a wrapper of ours must pass it on."""
    rest = list(parameters_of(source, seam).items())[len(seam.parameters) :]
    named = [f"{name} (required, passed on)" if needed else name for name, needed in rest]
    return f", also takes {', '.join(named)}" if named else ""


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


def _read_published(version: str | None, seams: Iterable[Seam]) -> WheelSource:
    """Find a wheel on pip's index and read the modules of the seams, saying how far it is."""
    sys.stderr.write("asking pip for its vLLM wheel\n")
    published = find_published(version)
    sys.stderr.write(f"reading the sources in {published.name}\n")
    file, remote = open_published(published)
    source = WheelSource(file, published.name)
    modules = sorted({seam.module for seam in seams})
    for number, module in enumerate(modules, 1):
        sys.stderr.write(f"  {number}/{len(modules)} {module}\n")
        with suppress(SeamError):  # the table will say that it is missing
            source.module(module)
    if remote is not None:
        sys.stderr.write(
            f"{remote.bytes_read / 2**20:.1f} of {remote.size / 2**20:.0f} MiB"
            f" in {remote.requests} requests\n"
        )
    return source


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="check_wheel", description=__doc__.split("\n")[0])
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--wheel", type=Path, help="a vLLM wheel on this disk")
    which.add_argument("--version", help="a release on pip's index; the newest one if not given")
    parser.add_argument("--json", type=Path, help="write the result here too")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table of the whole ledger, V1's and V2's."""
    options = _parser().parse_args(arguments)
    try:
        if options.json is not None:
            check_writable(options.json, "--json")
        source = (
            WheelSource(options.wheel)
            if options.wheel is not None
            else _read_published(options.version, LEDGER)
        )
        wrong = check_wheel(source, LEDGER)
        _report(source, LEDGER, wrong)
        if options.json is not None:
            result = {
                "vllm": source.version(),
                "seams": {seam.path: wrong.get(seam.path) for seam in LEDGER},
            }
            save(options.json, "--json", json.dumps(result, indent=2) + "\n")
    except InputError as error:
        sys.stderr.write(f"check_wheel: {error}\n")
        return 2
    return int(bool(wrong))


def _report(source: WheelSource, seams: Sequence[Seam], wrong: dict[str, str]) -> None:
    for seam in seams:
        verdict = "differs" if seam.path in wrong else "same"
        sys.stdout.write(
            f"{verdict:8}{seam.path}{'' if seam.path in wrong else more(source, seam)}\n"
        )
    for message in wrong.values():
        sys.stdout.write(f"  {message}\n")
    sys.stdout.write(f"vLLM {source.version()}: {len(seams) - len(wrong)} of {len(seams)} same\n")


if __name__ == "__main__":
    sys.exit(main())
