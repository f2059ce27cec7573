"""Parts of bench/gpu_check.py that measure: one per process.

python bench/gpu_parts.py {host,windows,commit,graph,vllm} --out OUT [--model PATH] [--dry-run]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common import summary
from nwor.layout import KVRows
from nwor.store.device_overlay import DeviceBatch, DeviceGroup, DeviceOverlay


@dataclass(frozen=True)
class Sizes:
    """What a step looks like: an 8B model's cache, or almost nothing for a dry run."""

    device: str = "cuda"
    layers: int = 32
    heads: int = 8
    dim: int = 128
    page_size: int = 16
    requests: int = 64
    k: int = 4
    rounds: int = 50
    columns: int = 24  # pages of a request


TINY = Sizes("cpu", layers=2, heads=1, dim=8, page_size=8, requests=2, k=2, rounds=2)


class Step:
    """An engine's tensors for a step in which every request verifies, and an overlay over them."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes, n = sizes, sizes.requests
        pages = sizes.columns * n
        self.rows = KVRows.allocate(
            layers=sizes.layers,
            pages=pages + 2 * n + 1,
            page_size=sizes.page_size,
            heads=sizes.heads,
            dim=sizes.dim,
            dtype=torch.bfloat16,
            device=sizes.device,
        )
        numbers = torch.arange(1, pages + 1, dtype=torch.int32, device=sizes.device)
        self.table = numbers.view(n, sizes.columns).clone()
        rows = sizes.k + 1
        self.slots = torch.full((n * rows,), -1, dtype=torch.int64, device=sizes.device)
        self.starts = torch.arange(n + 1, dtype=torch.int32, device=sizes.device) * rows
        self.positions = torch.zeros(n * rows, dtype=torch.int64, device=sizes.device)
        self.rejected = torch.full((n,), sizes.k // 2, dtype=torch.int32, device=sizes.device)
        self.overlay = DeviceOverlay(
            [DeviceGroup(self.table, self.slots, (self.rows,))],
            first_page=pages + 1,
            num_leases=n,
            max_requests=n,
            max_tokens=n * rows,
            max_drafts=sizes.k,
        )
        everyone, each = np.arange(n), np.ones(n, np.int64)
        self.batch = DeviceBatch(
            list(range(n)), everyone, each * rows, each * sizes.k, self.starts, self.positions
        )
        self.computed = sizes.page_size + 3
        self.next(0)

    def next(self, kept: int) -> None:
        """Prepare a step, after one in which every request kept so many rows."""
        self.computed += kept
        if self.computed + self.sizes.k >= self.sizes.columns * self.sizes.page_size:
            self.computed = self.sizes.page_size + 3  # staging pages are filled in again
        computed = self.computed
        rows = self.sizes.k + 1
        place = computed + torch.arange(rows, device=self.positions.device)
        self.positions.copy_(place.repeat(self.sizes.requests))
        page = self.table.long()[:, place // self.sizes.page_size]
        self.slots.copy_((page * self.sizes.page_size + place % self.sizes.page_size).flatten())

    def window(self) -> None:
        """One window, without waiting for it."""
        self.overlay.begin(self.batch).commit(self.rejected)

    def wait(self) -> None:
        """Wait for the device."""
        if self.sizes.device == "cuda":
            torch.cuda.synchronize()


def windows(sizes: Sizes) -> dict[str, object]:
    """Launches, allocations and host time of a window."""
    step = Step(sizes)
    started = time.perf_counter()
    step.overlay.rehearse()
    step.wait()
    found: dict[str, object] = {"compile_s": time.perf_counter() - started}
    started = time.perf_counter()
    step.window()  # milliseconds, or the rehearsal has not compiled all there is
    found["first_window_ms"] = (time.perf_counter() - started) * 1e3
    step.next(1 + sizes.k - sizes.k // 2)
    kept = 1 + sizes.k - sizes.k // 2
    for _ in range(3):
        step.window()
        step.next(kept)
    step.wait()
    if sizes.device == "cuda":
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        step.window()
        found["allocations"] = torch.cuda.memory_stats()["allocation.all.allocated"] - before
        step.next(kept)
        found["kernels"] = _kernels(step.window)
        step.next(kept)
    step.overlay.collect(wait=True)
    filled = step.overlay.rows_filled
    begin, commit, both = [], [], []
    for _ in range(sizes.rounds):
        step.wait()
        a = time.perf_counter()
        window = step.overlay.begin(step.batch)
        b = time.perf_counter()
        window.commit(step.rejected)
        c = time.perf_counter()
        step.wait()
        begin.append(b - a)
        commit.append(c - b)
        both.append(time.perf_counter() - a)
        step.next(kept)
    step.overlay.collect(wait=True)
    found |= {
        "requests": sizes.requests,
        "rows_filled_in_steady_state": step.overlay.rows_filled - filled,
        "host_begin_us": summary(begin),
        "host_commit_us": summary(commit),
        "until_done_us": summary(both),
        "faults": {fault.value: n for fault, n in step.overlay.faults.items()},
        "metrics": step.overlay.metrics.snapshot(),
    }
    return found


class NoKernel:
    """Stands where a kernel does; a launch is a call that does nothing."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Return what takes the kernel's arguments."""
        return lambda *_args, **_constants: None


def host(sizes: Sizes) -> dict[str, object]:
    """Host time of begin and commit without the launches: who is staged, the upload, checks."""
    from nwor.store import triton_rows, triton_window  # noqa: PLC0415 - imports triton

    for module, names in (
        (triton_window, ("begin_kernel", "fill_kernel", "close_kernel")),
        (triton_rows, ("move_rows_kernel",)),
    ):
        for name in names:
            setattr(module, name, NoKernel())
    torch.set_num_threads(1)
    found = {}
    for requests in (1, 32, 256):
        step = Step(Sizes(**{**vars_of(sizes), "requests": requests, "layers": 1}))
        times = []
        for turn in range(220):
            started = time.perf_counter()
            step.window()
            seconds = time.perf_counter() - started
            if turn >= 20:
                times.append(seconds)
        found[requests] = summary(times)
    return {"window_us_without_launches": found}


def _kernels(work: Callable[[], object]) -> dict[str, int]:
    """Count kernels and copies on the GPU during one call."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CPU, activity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    return {
        event.key: event.count
        for event in profile.key_averages()
        if "CUDA" in str(event.device_type)
    }


def commit(sizes: Sizes) -> dict[str, object]:
    """GB/s of the whole commit and of its parts, beside a plain device copy of the same bytes."""
    rows = []
    for requests in sorted({1, 8, sizes.requests}):
        step = Step(Sizes(**{**vars_of(sizes), "requests": requests}))
        step.rejected.zero_()
        step.window()
        moved = requests * (sizes.k + 1)
        size = moved * step.rows.row_bytes * sizes.layers
        launches = step.overlay.launches
        source = torch.empty(size, dtype=torch.uint8, device=sizes.device)
        target = torch.empty_like(source)
        nothing: Callable[[], object] = partial(step.next, 0)
        times = {
            "move": _gpu_time(partial(launches.move, moved), nothing, sizes),
            "copy": _gpu_time(partial(target.copy_, source), nothing, sizes),
            "window": _gpu_time(step.window, partial(step.next, sizes.k + 1), sizes),
            "aborted": _gpu_time(partial(_edit, step), nothing, sizes),
        }
        rate = {name: 2 * size / (times[name]["median"] * 1e3) for name in ("move", "copy")}
        rows.append({"requests": requests, "bytes": size, "gb_per_s": rate, "us": times})
    return {"gb_per_s_counts": "bytes read and written", "windows": rows}


def vars_of(sizes: Sizes) -> dict[str, Any]:
    return {name: getattr(sizes, name) for name in sizes.__dataclass_fields__}


def _edit(step: Step) -> None:
    step.overlay.begin(step.batch).abort()


def _gpu_time(
    work: Callable[[], object], prepare: Callable[[], object], sizes: Sizes
) -> dict[str, float]:
    """Microseconds between two events around a call; the host's clock in a dry run.

    What the host takes to launch is in it where the device has to wait for it.
    """
    times = []
    for turn in range(sizes.rounds + 3):
        prepare()
        if sizes.device == "cuda":
            begin, end = (_event() for _ in range(2))
            begin.record()
            work()
            end.record()
            torch.cuda.synchronize()
            seconds = begin.elapsed_time(end) / 1e3
        else:
            started = time.perf_counter()
            work()
            seconds = time.perf_counter() - started
        if turn >= 3:
            times.append(seconds)
    return summary(times)


def _event() -> Any:  # noqa: ANN401 - torch leaves it untyped
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def graph(sizes: Sizes) -> dict[str, object]:
    """Replay a captured writer between begin and commit; durable rows must be the accepted ones."""
    step = Step(sizes)
    data = torch.zeros(len(step.slots), sizes.heads, sizes.dim, dtype=torch.bfloat16)
    data = data.to(sizes.device)

    def write() -> None:
        page, row = step.slots // sizes.page_size, step.slots % sizes.page_size
        step.rows.key[:, page, row] = data
        step.rows.value[:, page, row] = -data

    write()
    replay: Callable[[], object] = write
    if sizes.device == "cuda":
        captured = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(captured):
            write()
        replay = captured.replay
    step.overlay.rehearse()
    step.rows.key.zero_()
    expected = step.rows.key.clone()
    kept = 1 + sizes.k - sizes.k // 2
    for turn in range(sizes.rounds):
        data.fill_(turn + 1)
        home = step.slots.view(sizes.requests, -1)[:, :kept].flatten()
        window = step.overlay.begin(step.batch)
        replay()
        window.commit(step.rejected)
        expected[:, home // sizes.page_size, home % sizes.page_size] = data[0]
        step.next(kept)
    durable = step.overlay.pages.first_page
    expected = expected[:, :durable]
    same = torch.equal(step.rows.key[:, :durable], expected)
    same = same and torch.equal(step.rows.value[:, :durable], -expected)
    return {
        "captured": sizes.device == "cuda",
        "windows": sizes.rounds,
        "durable_rows_are_the_accepted_ones": same,
        "exit_code": 0 if same else 1,
    }


def vllm(sizes: Sizes, model: str | None) -> dict[str, object]:
    """Tokens per second with nwor off and on, in turn, each in a process of its own."""
    try:
        import vllm as engine  # noqa: PLC0415 - may be missing
    except ImportError as error:
        return {"not_run": f"vLLM cannot be imported: {error}"}
    from nwor.demo.weights import MODEL, cache_root  # noqa: PLC0415 - beside vLLM only

    path = Path(model) if model else cache_root() / MODEL
    if sizes.device != "cuda":
        return {"not_run": "a dry run starts no engine", "vllm": engine.__version__}
    if not path.exists():
        return {"not_run": f"no model at {path.name}: give --model", "vllm": engine.__version__}
    runs: dict[str, list[dict[str, Any]]] = {"off": [], "stage": []}
    for mode in ("off", "stage", "off", "stage"):
        environment = {**os.environ, "NWOR_MODE": mode, "NWOR_EXPERIMENTAL": "cuda"}
        done = subprocess.run(  # noqa: S603 - our own interpreter
            [sys.executable, __file__, "engine", "--model", str(path)],
            env={**environment, "VLLM_USE_V2_MODEL_RUNNER": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            tail = (done.stdout + done.stderr).splitlines()[-12:]
            return {"vllm": engine.__version__, "exit_code": 1, "mode": mode, "last_output": tail}
        runs[mode].append(json.loads(done.stdout.splitlines()[-1]))
    staged = [run["windows"] for run in runs["stage"]]
    tokens = [run.pop("tokens") for run in (*runs["off"], *runs["stage"])]
    rate = {mode: max(run["tokens_per_s"] for run in runs[mode]) for mode in runs}
    found: dict[str, object] = {"vllm": engine.__version__, "runs": runs}
    found["same_tokens"] = all(each == tokens[0] for each in tokens)
    if not all(staged):
        return found | {"not_run": "nwor opened no window: `nwor doctor` says why"}
    return found | {"stage_over_off": rate["stage"] / rate["off"]}


def run_engine(model: str) -> None:
    """One engine in one mode; the last line printed is JSON."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams  # noqa: PLC0415 - after the environment is set

    llm = LLM(
        model,
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=16,
        gpu_memory_utilization=0.5,
        disable_log_stats=False,
        seed=0,
        speculative_config={"method": "draft_model", "model": model, "num_speculative_tokens": 4},
    )
    prompts = [f"{n}, {n + 1}, {n + 2}, {n + 3}, {n + 4}, {n + 5}," for n in range(16)]
    params = SamplingParams(temperature=0, max_tokens=128, ignore_eos=True)
    llm.generate(prompts, params, use_tqdm=False)
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    counters = {m.name: getattr(m, "value", 0) for m in llm.get_metrics()}
    windows_ = sum(n for name, n in counters.items() if name.startswith("nwor:windows"))
    total = sum(map(len, tokens))
    result = {"tokens_per_s": total / seconds, "windows": windows_, "tokens": tokens}
    print(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("part", choices=["host", "windows", "commit", "graph", "vllm", "engine"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    sizes = TINY if args.dry_run else Sizes()
    if args.part == "engine":
        run_engine(args.model)
        return
    parts: dict[str, Callable[[], dict[str, object]]] = {
        "host": lambda: host(sizes),
        "windows": lambda: windows(sizes),
        "commit": lambda: commit(sizes),
        "graph": lambda: graph(sizes),
        "vllm": lambda: vllm(sizes, args.model),
    }
    found = parts[args.part]()
    args.out.write_text(json.dumps(found))
    sys.exit(int(bool(found.get("exit_code"))))


if __name__ == "__main__":
    main()
