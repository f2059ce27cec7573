"""What the audit costs on vLLM: off, metadata and bytes, in one engine, in turns.

    python bench/audit.py --model PATH [--requests 8] [--pairs 5] [--json OUT]

`bench/audit_transformers.py` does the same for the embedded engine.

Tokens must be equal at all levels and the audit must have found nothing, or no time is reported.
The share is the time inside the audit's hooks over the time of the decode steps: steadier than a
ratio of two rates on a shared machine.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("NWOR_STAGING_PAGES", "96")
os.environ["NWOR_AUDIT"] = "metadata"

from vllm import SamplingParams

from audit_common import Timer, show
from common import write_json
from nwor.audit import AuditLevel
from nwor.vllm.audit import audit_of
from vllm_modes import engine, prompts_of, runner_of


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", required=True, help="path of Gemma 3 270M (or another model)")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=5, help="runs of each level")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.context = 0
    return args


def measure(
    llm: Any,  # noqa: ANN401 - vllm.LLM
    prompts: list[Any],
    tokens: int,
    level: AuditLevel,
    timer: Timer,
) -> dict[str, Any]:
    """One run of all prompts at one level; decode steps only."""
    audit: Any = audit_of(runner_of(llm))
    llm.llm_engine.step()  # tells the worker that all requests of the last run have finished
    llm.reset_prefix_cache()
    audit.watch(level)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        llm.llm_engine.add_request(str(index), prompt, params)
    given: dict[str, list[int]] = {}
    steps, started = 0, 0.0
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if output.finished:
                given[output.request_id] = list(output.outputs[0].token_ids)
        if steps == 0:
            started, timer.seconds = time.perf_counter(), 0.0
        steps += 1
    seconds = time.perf_counter() - started
    found = audit.findings
    if found.counts:
        sys.exit(f"the audit objects, no time is reported: {found.first}")
    return {
        "level": level.value,
        "tokens": given,
        "steps": steps - 1,
        "tokens_per_second": (sum(map(len, given.values())) - len(prompts)) / seconds,
        "step_ms": 1e3 * seconds / (steps - 1),
        "share": timer.seconds / seconds,
        "audit_ms": 1e3 * timer.seconds / (steps - 1),
        "rows_checked": found.rows_checked,
        "rejected": found.rejected,
    }


def main() -> None:
    args = arguments()
    requests, args.requests = args.requests, [args.requests]
    llm: Any = engine(args)
    prompts = prompts_of(llm, requests, args.context)
    timer = Timer()
    audit = audit_of(runner_of(llm))
    timer.watch(audit, "begin", "before_forward", "on_move", "after_sampling", "take_sample")
    levels = list(AuditLevel)
    runs: dict[str, list[dict[str, Any]]] = {level.value: [] for level in levels}
    reference = measure(llm, prompts, args.tokens, AuditLevel.METADATA, timer)["tokens"]
    for turn in range(args.pairs):
        for shift in range(len(levels)):
            run = measure(llm, prompts, args.tokens, levels[(turn + shift) % len(levels)], timer)
            if run.pop("tokens") != reference:
                sys.exit(f"tokens differ at level {run['level']}: no time is reported")
            runs[run["level"]].append(run)
    show(runs)
    write_json(args.json, {"requests": requests, "k": args.k, "dtype": args.dtype, "runs": runs})


if __name__ == "__main__":
    main()
