"""Files that a command writes at its end: one that cannot be written is refused at its beginning."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nwor.errors import InputError


def check_writable(path: Path, option: str) -> None:
    """Open the file as the end of the work will; what it holds stays, and no new file is left.

    Pipes and devices are taken as they are: opened and closed, one would tell its reader that all is
    said.

    Args:
        path: the file.
        option: the option that names it, for the message.

    Raises:
        InputError: the file cannot be written.
    """
    with _refused(path, option):
        if path.exists() and not (path.is_file() or path.is_dir()):
            return
        is_there = path.exists()
        with path.open("a"):
            pass
        if not is_there:
            path.resolve().unlink()  # of a link that led nowhere, what it now leads to


def save(path: Path, option: str, text: str) -> None:
    """Write a file.

    Raises:
        InputError: it cannot be written, for what has happened since `check_writable`.
    """
    with _refused(path, option):
        path.write_text(text, encoding="utf-8")


@contextmanager
def _refused(path: Path, option: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{option} {path} cannot be written: {error.strerror}. Name a file in a folder that exists "
            "and that you may write to"
        ) from error
