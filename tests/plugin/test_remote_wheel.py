"""Wheels read in place from a server with range requests, found through pip's own index handling."""

from __future__ import annotations

import http.server
import random
import re
import threading
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from nwor.errors import InputError
from nwor.vllm.check_wheel import main
from nwor.vllm.remote_wheel import Published, RangeFile, find_published, open_published
from nwor.vllm.seams import LEDGER, Seam

WHEEL = "vllm-{}-cp38-abi3-manylinux_2_28_x86_64.whl"


def sources(seams: tuple[Seam, ...]) -> dict[str, str]:
    """Write modules in which every seam is as the ledger says."""
    texts: dict[str, str] = {}
    for seam in seams:
        *owner, name = seam.name.split(".")
        taken = ", ".join([*(["self"] if owner else []), *seam.parameters])
        path = f"{seam.module.replace('.', '/')}.py"
        text = texts.get(path, "")
        if owner and f"class {owner[0]}:" not in text:
            text += f"class {owner[0]}:\n"
        texts[path] = text + f"{'    ' if owner else ''}def {name}({taken}): ...\n"
    return texts


def fake_vllm(folder: Path, version: str, edit: tuple[str, str] = ("", "")) -> Path:
    """Write a wheel of all seams beside 4 MiB that cannot be compressed."""
    path, info = folder / WHEEL.format(version), f"vllm-{version}.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("vllm/_C.abi3.so", random.Random(0).randbytes(4 << 20))
        for name, text in sources(LEDGER).items():
            archive.writestr(name, text.replace(*edit) if edit[0] else text)
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: cp38-abi3-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@dataclass
class Index:
    """A package index on this machine, and what it does wrong."""

    folder: Path
    url: str = ""
    fault: str = ""
    spans: list[tuple[int, int]] = field(default_factory=list)


class Server(http.server.ThreadingHTTPServer):
    """Serves an `Index`."""

    def __init__(self, index: Index) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.index = index


class Handler(http.server.BaseHTTPRequestHandler):
    """Lists wheels, and serves them whole or in parts."""

    def do_GET(self) -> None:
        assert isinstance(self.server, Server)
        index = self.server.index
        file = index.folder / self.path.rsplit("/", 1)[-1]
        if self.path == "/simple/vllm/":
            links = "".join(f'<a href="/{p.name}">{p.name}</a>' for p in index.folder.iterdir())
            self.answer(200, f"<!DOCTYPE html><html><body>{links}</body></html>".encode())
        elif file.is_file():
            self.part(index, file.read_bytes())
        else:
            self.answer(404, b"")

    def part(self, index: Index, data: bytes) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked is None or index.fault == "whole":
            self.answer(200, data)
            return
        first, last = int(asked[1]), int(asked[2])
        index.spans.append((first, last))
        body = data[first : last + 1]
        if index.fault == "short" and last > first:
            body = body[:-1]
        shift = int(index.fault == "shifted")
        self.answer(206, body, f"bytes {first + shift}-{last + shift}/{len(data)}")

    def answer(self, status: int, body: bytes, span: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        if span:
            self.send_header("Content-Range", span)
        self.end_headers()
        with suppress(BrokenPipeError, ConnectionResetError):  # the reader has seen enough
            self.wfile.write(body)

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """Serve an index that pip is pointed at."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    index = Index(folder)
    server = Server(index)
    index.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("PIP_INDEX_URL", f"{index.url}/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield index
    server.shutdown()
    server.server_close()
    thread.join()


def published(index: Index, path: Path) -> Published:
    return Published("1.0", f"{index.url}/{path.name}")


def test_the_bytes_are_those_of_the_file(index: Index) -> None:
    path = index.folder / "x.whl"
    data = random.Random(1).randbytes(300_000)
    path.write_bytes(data)
    file, remote = open_published(published(index, path))
    assert remote is not None
    assert remote.size == len(data)
    rng = random.Random(2)
    for _ in range(50):
        first, count = rng.randrange(len(data) + 10), rng.randrange(100_000)
        file.seek(first)
        assert file.read(count) == data[first : first + count]
    file.seek(-7, 2)
    assert file.read() == data[-7:]
    assert file.read(1) == b""
    assert remote.requests == len(index.spans)


def test_the_newest_wheel_is_found_and_little_of_it_is_read(
    index: Index, capsys: pytest.CaptureFixture[str]
) -> None:
    for version in ("9.9.9", "9.10.0", "9.2.0"):
        fake_vllm(index.folder, version)
    assert main([]) == 0
    output = capsys.readouterr()
    seams = len(LEDGER)
    assert output.out.endswith(f"vLLM 9.10.0: {seams} of {seams} same\n")
    assert f"reading the sources in {WHEEL.format('9.10.0')}" in output.err
    modules = len({seam.module for seam in LEDGER})
    assert f"{modules}/{modules}" in output.err
    assert 0 < sum(last - first + 1 for first, last in index.spans) < 1 << 20


def test_a_release_can_be_chosen(index: Index) -> None:
    for version in ("9.9.9", "9.10.0"):
        fake_vllm(index.folder, version)
    assert find_published("9.9.9").name == WHEEL.format("9.9.9")


@pytest.mark.parametrize(("strict", "code"), [(False, 0), (True, 1)])
def test_what_is_required_beyond_a_strict_seam_fails(
    index: Index, capsys: pytest.CaptureFixture[str], *, strict: bool, code: int
) -> None:
    edit = (
        ("config(vllm_config, kv_cache_config)", "config(vllm_config, kv_cache_config, extra)")
        if strict
        else ("kv_cache_specs, available_memory)", "kv_cache_specs, available_memory, extra)")
    )
    fake_vllm(index.folder, "9.9.9", edit)
    assert main([]) == code
    wanted = "also requires ['extra']" if strict else "extra (required, passed on)"
    assert wanted in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fault", "message"),
    [("whole", "does not serve parts"), ("short", "another part"), ("shifted", "another part")],
)
def test_servers_that_do_not_serve_ranges_are_refused(
    index: Index, capsys: pytest.CaptureFixture[str], fault: str, message: str
) -> None:
    fake_vllm(index.folder, "9.9.9")
    index.fault = fault
    with pytest.raises(InputError, match=message):
        RangeFile(published(index, index.folder / WHEEL.format("9.9.9"))).read(10)
    if fault == "whole":  # pip itself reads the wheel whole, and cannot with the other faults
        assert main([]) == 2
        assert "--wheel PATH" in capsys.readouterr().err


def test_an_unknown_release_and_a_dead_index_are_told(
    index: Index, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_vllm(index.folder, "9.9.9")
    assert main(["--version", "8.8.8"]) == 2
    assert "no wheel of vllm==8.8.8" in capsys.readouterr().err
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    assert main([]) == 2
    assert "--wheel PATH" in capsys.readouterr().err


def test_messages_do_not_show_the_url(index: Index) -> None:
    secret = f"{index.url}/missing/vllm.whl?token=secret"
    with pytest.raises(InputError, match=r"vllm\.whl cannot be read \(Not Found\)") as caught:
        RangeFile(Published("1.0", secret))
    assert "secret" not in str(caught.value)
    with pytest.raises(InputError, match="cannot be read"):
        RangeFile(Published("1.0", "http://127.0.0.1:9/vllm.whl"))


@pytest.mark.parametrize("version", ["", "--pre", "1.0 torch", "@ file:x", ">=1"])
def test_only_releases_reach_pip(version: str) -> None:
    with pytest.raises(InputError, match="is no release"):
        find_published(version)


def test_a_wheel_on_this_disk_is_opened(tmp_path: Path) -> None:
    path = fake_vllm(tmp_path, "9.9.9")
    file, remote = open_published(Published("9.9.9", path.as_uri()))
    with file:
        assert remote is None
        assert file.read() == path.read_bytes()
    with pytest.raises(InputError, match="not on an HTTP server"):
        open_published(Published("9.9.9", "ftp://host/vllm.whl"))
