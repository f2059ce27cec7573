"""Workloads of one's own: a file of prompts, as JSON or as JSON lines."""

from __future__ import annotations

import json
from pathlib import Path

from nwor.audit.workloads import WORKLOADS, Job, Workload
from nwor.errors import InputError

_LEAST = {"max_tokens": 1, "stop_at": 0, "abort_after": 0, "arrive": 0}


def find(name: str) -> Workload:
    """Return the built-in workload called `name`, or read that file.

    A file holds a JSON list of objects, or one object a line: ``prompt`` (text), and if wanted
    ``max_tokens`` (32), ``stop_at`` (stop at the n-th token of the undisturbed answer),
    ``abort_after`` and ``arrive`` (steps).

    Raises:
        InputError: neither a workload nor a file, or a file that does not say what it should.
    """
    if name in WORKLOADS:
        return WORKLOADS[name]
    path = Path(name)
    if not path.is_file():
        raise InputError(
            f"unknown workload {name!r}: neither a file nor one of {', '.join(WORKLOADS)}"
        )
    jobs = tuple(_job(where, value) for where, value in _values(path))
    if not jobs:
        raise InputError(f"{name} holds no prompts")
    return Workload(jobs)


def _values(path: Path) -> list[tuple[str, object]]:
    """Return the objects of a file and where they stand."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    if text.lstrip().startswith("["):
        values = _parsed(str(path), text, 0)
        assert isinstance(values, list)  # noqa: S101 - it starts with a bracket
        return [(f"{path}, prompt {number}", value) for number, value in enumerate(values, 1)]
    return [
        (f"{path}, line {number}", _parsed(str(path), line, number - 1))
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip()
    ]


def _parsed(path: str, text: str, lines_before: int) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = lines_before + error.lineno
        raise InputError(f"{path}, line {line}: not JSON: {error.msg}") from error


def _job(where: str, value: object) -> Job:
    if not isinstance(value, dict):
        raise InputError(f'{where}: give an object such as {{"prompt": "…"}}, not {value!r}')
    unknown = set(value) - {"prompt", *_LEAST}
    if unknown:
        known = ", ".join(("prompt", *_LEAST))
        raise InputError(f"{where}: unknown {sorted(unknown)}; known: {known}")
    prompt = value.get("prompt")
    if not isinstance(prompt, str) or not prompt:
        raise InputError(f"{where}: prompt is {prompt!r}, it must be a text")
    for name, least in _LEAST.items():
        number = value.get(name, 1)
        if type(number) is not int or number < least:
            raise InputError(f"{where}: {name} is {number!r}, it must be a number from {least} on")
    tokens, stop = value.get("max_tokens", 32), value.get("stop_at", 0)
    if stop >= tokens:
        raise InputError(f"{where}: stop_at is {stop}, the answer has {tokens} tokens from 0 on")
    arrive, abort = value.get("arrive", 0), value.get("abort_after", 0)
    return Job(prompt, tokens, arrive=arrive, abort=abort, stop=stop)
