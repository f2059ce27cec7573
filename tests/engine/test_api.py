"""`generate`, `stream` and the command line, with a tokenizer of single characters."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from engine import models
from nwor.cli import main
from nwor.cli.generate import read_prompts
from nwor.engine import AssistantDrafter, Drafter, FinishReason, Proposal, Request, generate, stream
from nwor.engine.text import TextStream
from nwor.errors import InputError


@pytest.fixture(scope="module")
def directory(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    models.tiny("llama").save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_generate_from_a_directory(directory: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    result = generate(str(directory), ["hello hello", "abc"], max_new_tokens=20)
    for output in result.outputs:
        ids = tokenizer(output.prompt).input_ids
        assert output.token_ids == models.stock_greedy(models.tiny("llama"), ids, 20)
        assert output.text == tokenizer.decode(output.token_ids)
        assert output.prompt_tokens == len(ids)
        assert output.finish_reason is FinishReason.LENGTH
        assert len(output.drafted) == 20
    assert result.metrics.windows > 0
    assert result.tokens_per_second > 0


def test_streamed_text_is_the_text(tokenizer: PreTrainedTokenizerFast) -> None:
    model = models.tiny("llama")
    with stream(model, ["hello", "abcabc"], tokenizer=tokenizer, max_new_tokens=25) as running:
        pieces: dict[int, str] = {0: "", 1: ""}
        tokens: dict[int, list[int]] = {0: [], 1: []}
        for chunk in running:
            pieces[chunk.index] += chunk.text
            tokens[chunk.index] += chunk.token_ids
            assert chunk.text.startswith(chunk.drafted_text)
        outputs = running.result.outputs
    assert list(pieces.values()) == [o.text for o in outputs]
    assert list(tokens.values()) == [o.token_ids for o in outputs]


@pytest.mark.parametrize("start", [1, 4, 7])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_stop_strings(tokenizer: PreTrainedTokenizerFast, start: int, length: int) -> None:
    model = models.tiny("llama")
    full = generate(model, ["hello"], tokenizer=tokenizer, max_new_tokens=20).outputs[0].text
    stop = full[start : start + length]
    if "\ufffd" in stop:
        pytest.skip("not text")
    with stream(model, ["hello"], tokenizer=tokenizer, max_new_tokens=20, stop=[stop]) as running:
        text = "".join(chunk.text for chunk in running)
        output = running.result.outputs[0]
    assert output.text == text == full[: full.index(stop)]
    assert output.finish_reason is FinishReason.STOP
    assert stop in tokenizer.decode(output.token_ids)
    assert stop not in tokenizer.decode(output.token_ids[:-1])


def test_pieces_of_characters_and_stops_are_held_back(tokenizer: PreTrainedTokenizerFast) -> None:
    class Bytes:
        def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
            return bytes(token_ids).decode(errors="replace")

    text = TextStream(Bytes(), ["END"])
    said = [text.push([byte]) for byte in "aé E, EN! END x".encode()]
    assert "".join(said) == "aé E, EN! "
    assert said[1] == ""  # half of é
    other = TextStream(Bytes(), ["END"])
    assert other.push(list(b"x EN")) + other.push([], final=True) == "x EN"


def test_drafters_of_users(tokenizer: PreTrainedTokenizerFast) -> None:
    class Echo(Drafter):
        def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> Proposal:
            return Proposal([r.tokens[-k:].tolist() for r, k in zip(requests, limits, strict=True)])

    model = models.tiny("llama")
    plain = generate(model, [[3, 4, 5]], drafter="none", max_new_tokens=10)
    mine = generate(model, [[3, 4, 5]], drafter=Echo(), max_new_tokens=10)
    assert mine.outputs[0].token_ids == plain.outputs[0].token_ids
    assistant = AssistantDrafter(models.build(models.CONFIGS["llama"]))
    fast = generate(model, [[3, 4, 5]], drafter=assistant, max_new_tokens=10)
    assert fast.outputs[0].token_ids == plain.outputs[0].token_ids
    assert fast.stats.acceptance_length > plain.stats.acceptance_length == 1


def test_json(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main([
        "generate", "--model", str(directory), "--prompt", "hello", "--prompt", "abc", "--json",
        "--max-new-tokens", "12", "--num-draft-tokens", "3",
    ])  # fmt: skip
    said = json.loads(capsys.readouterr().out)
    assert code == 0
    assert [o["prompt"] for o in said["outputs"]] == ["hello", "abc"]
    assert {"text", "token_ids", "finish_reason", "drafted"} <= said["outputs"][0].keys()
    needed = {
        "windows", "staged", "committed", "rejected", "rows_written", "rows_avoided",
        "bytes_written", "bytes_avoided", "fallbacks",
    }  # fmt: skip
    assert needed <= said["metrics"].keys()
    assert said["metrics"]["staged"] == said["metrics"]["committed"] + said["metrics"]["rejected"]
    assert said["tokens_per_second"] > 0
    assert said["versions"]["nwor"]


def test_plain_output(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(
        ["generate", "--model", str(directory), "--prompt", "hello", "--max-new-tokens", "5"]
    )
    said = capsys.readouterr()
    assert code == 0
    assert said.out.startswith("hello")
    assert "tokens/s" in said.err


def test_drafter_on_the_command_line(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["generate", "--model", str(directory), "--prompt", "hello", "--max-new-tokens", "9"]
    for drafter in ("none", "prompt-lookup", f"model:{directory}"):
        assert main([*base, "--drafter", drafter]) == 0
    outs = capsys.readouterr().out.split("hello")
    assert outs[1] == outs[2] == outs[3]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--prompt", ""], "prompt 0 is empty"),
        ([], "no prompts"),
        (["--prompt", "a", "--num-draft-tokens", "-1"], "num_draft_tokens"),
        (["--prompt", "a", "--num-draft-tokens", "65"], "num_draft_tokens"),
        (["--prompt", "a", "--mode", "sideways"], "sideways"),
        (["--prompt", "a", "--drafter", "oracle"], "oracle"),
        (["--prompt", "a", "--drafter", "model:/nowhere"], "nowhere"),
        (["--prompt", "a" * 600], "context"),
        (["--prompt", "a", "--temperature", "-1"], "temperature"),
        (["--prompt", "a", "--dtype", "float8"], "float8"),
        (["--prompts", "/nowhere.jsonl"], "nowhere"),
        (["--model", "/nowhere", "--prompt", "a"], "nowhere"),
    ],
)
def test_bad_input(
    directory: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    assert main(["generate", "--model", str(directory), *arguments]) == 2
    said = capsys.readouterr()
    assert reason in said.err
    assert said.out == ""


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ("3", "expected a string"),
        ('{"text": "x"}', "expected"),
        ('""', "expected"),
    ],
)
def test_malformed_jsonl_names_the_line(tmp_path: Path, line: str, reason: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'"fine"\n\n{{"prompt": "too"}}\n{line}\n')
    with pytest.raises(InputError, match=f"line 4: .*{reason}"):
        read_prompts(file)
    file.write_text('"fine"\n\n{"prompt": "too"}\n')
    assert read_prompts(file) == ["fine", "too"]


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_ctrl_c_shows_what_there_is(directory: Path, form: list[str]) -> None:
    # A shell's background jobs start with SIGINT ignored, and would hand that on.
    script = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import sys, time, nwor.engine.core as core; from nwor.cli import main\n"
        "step = core.Engine._window\n"
        "def slow(self, *a):\n"
        "    print('step', file=sys.stderr, flush=True); time.sleep(0.05); return step(self, *a)\n"
        "core.Engine._window = slow; sys.exit(main(sys.argv[1:]))\n"
    )
    child = subprocess.Popen(
        [
            sys.executable, "-c", script, "generate", "--model", str(directory), "--prompt", "hello",
            "--max-new-tokens", "400", "--drafter", "none", *form,
        ],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=dict(os.environ, OMP_NUM_THREADS="1"),
    )  # fmt: skip
    assert child.stderr is not None
    while "step" not in child.stderr.readline():
        assert child.poll() is None
    time.sleep(0.5)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "interrupted" in err
    if form:
        output = json.loads(out)["outputs"][0]
        assert output["finish_reason"] == "interrupted"
        assert 0 < len(output["token_ids"]) < 400
    else:
        assert out.startswith("hello")


def test_help_is_quick_and_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["generate", "--help"])
    assert "examples:" in capsys.readouterr().out
