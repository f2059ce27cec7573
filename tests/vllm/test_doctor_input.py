"""`nwor doctor` on bad input: one line that names value and remedy, and the exit code for bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from doctor_configs import LLAMA, write_config

from nwor.cli import BAD_INPUT, doctor, main

ZORG = LLAMA | {"model_type": "zorg", "architectures": ["ZorgLM"]}


def folder(root: Path) -> str:
    return write_config(root / "model", LLAMA)


def text(root: Path, content: str) -> str:
    path = write_config(root / "model", LLAMA)
    (root / "model" / "config.json").write_text(content)
    return path


def a_file(root: Path) -> str:
    return folder(root) + "/config.json"


def empty(root: Path) -> str:
    (root / "model").mkdir()
    return str(root / "model")


@pytest.mark.parametrize(
    ("model", "options", "named", "remedy"),
    [
        (lambda _: "./nope", [], "--model './nope'", "no such folder"),
        (a_file, [], "config.json' is a file", "give the folder"),
        (empty, [], "has no config.json", "give the folder"),
        (lambda root: text(root, "{bad"), [], "config.json", "download the model again"),
        (lambda root: text(root, "[1]"), [], "no object", "download the model again"),
        (lambda root: text(root, json.dumps(ZORG)), [], "`zorg`", "that this vLLM knows"),
        (lambda _: "nobody/nothing", [], "'nobody/nothing'", "go online"),
        (folder, ["--speculative-config", "{bad"], "'{bad' is not JSON", '{"method": "ngram"'),
        (folder, ["--speculative-config", "[1]"], "'[1]' is no object", '{"method": "ngram"'),
        (
            folder,
            ["--speculative-config", '{"method": "zorg", "num_speculative_tokens": 4}'],
            "zorg",
            '{"method": "ngram"',
        ),
        (folder, ["--dtype", "float7"], "--dtype 'float7'", "'float16'"),
        (folder, ["--kv-cache-dtype", "int3"], "--kv-cache-dtype 'int3'", "'fp8'"),
        (folder, ["--block-size", "-1"], "--block-size -1", "give 1 or more"),
        (folder, ["--max-num-seqs", "0"], "--max-num-seqs 0", "give 1 or more"),
        (folder, ["--tensor-parallel-size", "3"], "--tensor-parallel-size 3", "divisible"),
    ],
)
def test_one_line_names_value_and_remedy(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    model: Callable[[Path], str],
    options: list[str],
    named: str,
    remedy: str,
) -> None:
    arguments = ["doctor", "--model", model(tmp_path), *options]
    assert main(arguments) == BAD_INPUT
    out, err = capsys.readouterr()
    (line,) = [line for line in err.splitlines() if line.startswith("nwor: ")]
    assert not out
    assert named in line
    assert remedy in line
    assert main([*arguments, "--json"]) == BAD_INPUT
    found = json.loads(capsys.readouterr().out)
    assert found["exit_code"] == BAD_INPUT == doctor.BAD_INPUT
    assert line == f"nwor: {found['error']}"
    assert found["checks"], "what could be looked at is there"
