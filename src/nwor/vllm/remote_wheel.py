"""The newest vLLM wheel on pip's index, read in place: a few sources of it, not hundreds of megabytes.

pip says which file it would install (its index, proxy and settings apply) and nothing is installed or
downloaded; the file is then read by HTTP range requests (RFC 9110, section 14), which is enough for
a zip archive since its directory is at the end.
"""

from __future__ import annotations

import http.client
import io
import json
import re
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from nwor.errors import InputError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

GIVE_WHEEL = (
    "download the wheel yourself and pass it with --wheel PATH (make check-vllm WHEEL=PATH)"
)

PLATFORMS = tuple(f"manylinux_2_{minor}_x86_64" for minor in (28, 31, 34, 35))
"""What vLLM's x86 wheels were built for. All are asked for: one alone hides newer releases."""

TIMEOUT = 60.0
BUFFER = 1 << 16

_VERSION = re.compile(r"[0-9][0-9A-Za-z.+!-]*")


@dataclass(frozen=True, slots=True)
class Published:
    """A wheel on an index."""

    version: str
    url: str

    @property
    def name(self) -> str:
        """File name. Messages show it and never the URL, which may hold a password."""
        return urllib.parse.unquote(urllib.parse.urlsplit(self.url).path.rsplit("/", 1)[-1])


def find_published(version: str | None = None) -> Published:
    """Ask pip for a vLLM wheel.

    Args:
        version: a release, the newest one if None.

    Raises:
        InputError: no such release, no network, or no pip.
    """
    if version is not None and not _VERSION.fullmatch(version):
        raise InputError(f"--version {version!r} is no release: write it like 0.33.0")
    wanted = f"vllm=={version}" if version else "vllm"
    options = ["--dry-run", "--no-deps", "--ignore-installed", "--only-binary=:all:", "--report=-"]
    platforms = [f"--platform={platform}" for platform in PLATFORMS]
    command = [sys.executable, "-m", "pip", "install", "--quiet", *options, *platforms, wanted]
    try:
        done = subprocess.run(  # noqa: S603 - no shell, the version was checked
            command, capture_output=True, text=True, check=False, timeout=5 * TIMEOUT
        )
    except subprocess.TimeoutExpired as error:
        raise InputError(f"pip did not answer within {error.timeout:g} s: {GIVE_WHEEL}") from error
    if done.returncode:
        raise InputError(
            f"pip finds no wheel of {wanted} (exit code {done.returncode}): no such release, or the "
            f"index cannot be reached (`pip index versions vllm` says which); or {GIVE_WHEEL}"
        )
    try:
        found = json.loads(done.stdout)["install"][0]
        return Published(found["metadata"]["version"], found["download_info"]["url"])
    except (ValueError, LookupError, TypeError) as error:
        raise InputError(
            f"pip's report cannot be read (pip >= 23 writes it): {GIVE_WHEEL}"
        ) from error


class RangeFile(io.RawIOBase):
    """A file on a server, read by range requests.

    Args:
        published: the wheel; its URL is ``http`` or ``https``.

    Attributes:
        size: bytes of the file.
        requests: requests so far.
        bytes_read: bytes received so far.

    Raises:
        InputError: the server cannot be reached, or does not answer with ranges. Also from `read`.
    """

    def __init__(self, published: Published) -> None:
        super().__init__()
        if urllib.parse.urlsplit(published.url).scheme not in ("http", "https"):
            raise InputError(f"{published.name} is not on an HTTP server: {GIVE_WHEEL}")
        self._published = published
        self._position = 0
        self.requests = 0
        self.bytes_read = 0
        self.size = 1
        self.size = self._fetch(0, 1)[1]

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move; nothing is requested."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        if base + offset < 0:  # as files do: zipfile relies on it for small files
            raise OSError(f"{self._published.name}: position {base + offset} is before the start")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fill the buffer with one request."""
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self.size - self._position))
        if count:
            view[:count] = self._fetch(self._position, count)[0]
            self._position += count
        return count

    def _fetch(self, first: int, count: int) -> tuple[bytes, int]:
        """Return bytes, and the size of the whole file."""
        last, name = first + count - 1, self._published.name
        request = urllib.request.Request(  # noqa: S310 - the scheme was checked
            self._published.url, headers={"Range": f"bytes={first}-{last}"}
        )
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as reply:  # noqa: S310 - as above
                if reply.status != http.client.PARTIAL_CONTENT:  # do not read it: all of the wheel
                    raise InputError(f"the index does not serve parts of {name}: {GIVE_WHEEL}")
                span = reply.headers.get("Content-Range", "")
                data = reply.read(count + 1)
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            reason = getattr(error, "reason", None) or type(error).__name__
            raise InputError(f"{name} cannot be read ({reason}): {GIVE_WHEEL}") from error
        match = re.fullmatch(rf"bytes {first}-{last}/(\d+)", span)
        if match is None or len(data) != count:
            raise InputError(f"the index sent another part of {name} than asked for: {GIVE_WHEEL}")
        self.requests += 1
        self.bytes_read += count
        return data, int(match[1])


def open_published(published: Published) -> tuple[BinaryIO, RangeFile | None]:
    """Open a wheel for reading; the second value counts requests, None for a file on this disk.

    Raises:
        InputError: see `RangeFile`.
    """
    parts = urllib.parse.urlsplit(published.url)
    if parts.scheme == "file":  # pip's --find-links
        return Path(urllib.request.url2pathname(parts.path)).open("rb"), None
    remote = RangeFile(published)
    return cast("BinaryIO", io.BufferedReader(remote, BUFFER)), remote
