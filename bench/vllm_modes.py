"""stage and immediate against off on vLLM: tokens per second, and what a window costs.

    python bench/vllm_modes.py --model PATH [--pairs 5] [--json OUT]

One engine in this process serves all modes: hooks are put in and taken out between runs, so model,
memory and cache are the same. Modes take turns and the order rotates; every mode's prefix cache
starts empty. When all times are taken the engine is audited, bytes included, on the same prompts in
mode ``stage``. No time is reported unless tokens are equal in all runs and the audit has seen drafts
rejected and found nothing.

vLLM's n-gram drafter drafts from what was said before, so prompts are texts that repeat themselves
to different degrees.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("NWOR_STAGING_PAGES", "96")

from vllm import LLM, SamplingParams

from common import SEEDS, write_json
from nwor.audit import AuditLevel
from nwor.manager import Mode
from nwor.vllm.audit import attach, audit_of

MODES = (Mode.OFF, Mode.IMMEDIATE, Mode.STAGE)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", required=True, help="path of Gemma 3 270M (or another model)")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=5, help="runs of each mode")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--context", type=int, default=0, help="extra tokens before each prompt")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def engine(args: argparse.Namespace) -> LLM:
    return LLM(
        args.model,
        dtype=args.dtype,
        max_model_len=args.context + 512,
        max_num_seqs=max(args.requests),
        num_gpu_blocks_override=96 + 6 * max(args.requests) * (args.context // 128 + 4),
        enforce_eager=args.eager,
        disable_log_stats=False,
        seed=0,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": args.k,
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 4,
        },
    )


def runner_of(llm: LLM) -> Any:  # noqa: ANN401 - vLLM's GPUModelRunner
    client: Any = llm.llm_engine.engine_core
    return client.engine_core.model_executor.driver_worker.worker.model_runner


def prompts_of(llm: LLM, number: int, context: int) -> list[Any]:
    tokenizer = llm.get_tokenizer()
    filler = tokenizer.encode("The quick brown fox jumps over the lazy dog. " * (context // 8))
    return [
        {
            "prompt_token_ids": [
                tokenizer.bos_token_id,
                *filler[:context],
                *tokenizer.encode(SEEDS[i % len(SEEDS)], add_special_tokens=False),
            ]
        }
        for i in range(number)
    ]


def measure(llm: LLM, prompts: list[Any], args: argparse.Namespace, mode: Mode) -> dict[str, Any]:
    """One run of all prompts in one mode; decode steps only."""
    windows = runner_of(llm).nwor
    windows.set_mode(mode)
    llm.reset_prefix_cache()
    before = windows.metrics.snapshot()
    spent = windows.begin_seconds, windows.commit_seconds
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        llm.llm_engine.add_request(str(index), prompt, params)
    tokens: dict[str, list[int]] = {}
    steps, produced, started = 0, 0, 0.0
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            done: Any = output
            if done.finished:
                tokens[done.request_id] = list(done.outputs[0].token_ids)
        if steps == 0:
            started = time.perf_counter()  # the prompts have been prefilled
        steps += 1
    seconds = time.perf_counter() - started
    produced = sum(map(len, tokens.values())) - len(prompts)
    after = windows.metrics.snapshot()
    added = {name: after[name] - before[name] for name in after if name != "fallbacks"}
    return {
        "mode": mode.value,
        "tokens": tokens,
        "steps": steps - 1,
        "seconds": seconds,
        "tokens_per_second": produced / seconds,
        "begin_ms": 1e3 * (windows.begin_seconds - spent[0]) / max(added["windows"], 1),
        "commit_ms": 1e3 * (windows.commit_seconds - spent[1]) / max(added["windows"], 1),
        "share": (windows.begin_seconds + windows.commit_seconds - sum(spent)) / seconds,
        "counted": added,
    }


def compare(llm: LLM, number: int, args: argparse.Namespace) -> dict[str, Any]:
    """Run all modes in turn; refuse to report if tokens differ."""
    prompts = prompts_of(llm, number, args.context)
    for mode in MODES:
        measure(llm, prompts, args, mode)  # warm-up
    runs: dict[str, list[dict[str, Any]]] = {mode.value: [] for mode in MODES}
    reference = None
    for turn in range(args.pairs):
        for shift in range(len(MODES)):
            run = measure(llm, prompts, args, MODES[(turn + shift) % len(MODES)])
            tokens = run.pop("tokens")
            reference = reference or tokens
            if tokens != reference:
                sys.exit(f"tokens differ in mode {run['mode']}: no time is reported")
            runs[run["mode"]].append(run)
            print(
                f"{number} requests, turn {turn}, {run['mode']}: "
                f"{run['tokens_per_second']:.1f} tok/s, {run['share']:.2%} in nwor",
                file=sys.stderr,
                flush=True,
            )
    staged = runs["stage"]
    counted = staged[0]["counted"]

    def ratios(mode: str) -> list[float]:
        pairs = zip(runs[mode], runs["off"], strict=True)
        return [a["tokens_per_second"] / b["tokens_per_second"] for a, b in pairs]

    def median(name: str, mode: str = "stage") -> float:
        return float(statistics.median(run[name] for run in runs[mode]))

    return {
        "requests": number,
        "acceptance": counted["committed"] / max(counted["staged"], 1),
        "tokens_per_second": {mode: median("tokens_per_second", mode) for mode in runs},
        "step_ms": 1e3 * statistics.median(run["seconds"] / run["steps"] for run in runs["off"]),
        "stage_ratio": statistics.median(ratios("stage")),
        "stage_ratio_spread": [min(ratios("stage")), max(ratios("stage"))],
        "immediate_ratio": statistics.median(ratios("immediate")),
        "begin_ms": median("begin_ms"),
        "commit_ms": median("commit_ms"),
        "share": median("share"),
        "rows_written": counted["rows_written"],
        "rows_avoided": counted["rows_avoided"],
        "tokens": reference,
        "runs": runs,
    }


def audited(llm: LLM, result: dict[str, Any], args: argparse.Namespace) -> dict[str, int]:
    """Run the same prompts once more under the audit; exit unless it held and saw rejections."""
    audit: Any = audit_of(runner_of(llm))
    llm.llm_engine.step()  # tells the worker that all requests of the last run have finished
    llm.reset_prefix_cache()
    audit.watch(AuditLevel.BYTES)
    run = measure(llm, prompts_of(llm, result["requests"], args.context), args, Mode.STAGE)
    found = audit.findings
    if run["tokens"] != result["tokens"]:
        sys.exit("tokens differ in the audited run: no time is reported")
    if found.counts:
        sys.exit(f"the audit objects, no time is reported: {found.first}")
    if not found.rejected:
        sys.exit("no draft was rejected in the audited run, it proves nothing: no time is reported")
    return {name: getattr(found, name) for name in ("steps", "rows_checked", "drafts", "rejected")}


def table(results: list[dict[str, Any]]) -> None:
    print(
        "requests  accept  step ms   off tok/s  stage/off (spread)        immediate/off  "
        "begin ms  commit ms  share"
    )
    for r in results:
        low, high = r["stage_ratio_spread"]
        print(
            f"{r['requests']:8d}  {r['acceptance']:6.0%}  {r['step_ms']:7.1f}  "
            f"{r['tokens_per_second']['off']:10.1f}  {r['stage_ratio']:.4f} ({low:.4f}-{high:.4f})  "
            f"{r['immediate_ratio']:13.4f}  {r['begin_ms']:8.3f}  {r['commit_ms']:9.3f}  "
            f"{r['share']:6.2%}"
        )
    seen = {name: sum(r["audit"][name] for r in results) for name in results[0]["audit"]}
    print(
        f"tokens equal in all runs; audited, bytes included: {seen['rejected']} of {seen['drafts']} "
        f"drafts rejected, {seen['rows_checked']} rows checked in {seen['steps']} steps, none wrong"
    )


def main() -> None:
    args = arguments()
    llm = engine(args)
    config = llm.llm_engine.model_config
    results = [compare(llm, number, args) for number in args.requests]
    runner = runner_of(llm)
    runner.nwor.set_mode(Mode.STAGE)
    attach(runner, AuditLevel.BYTES, runner.nwor.overlay.pages.first_page)
    for result in results:
        result["audit"] = audited(llm, result, args)
        del result["tokens"]
    table(results)
    model = {
        "layers": config.hf_text_config.num_hidden_layers,
        "kv_heads": config.hf_text_config.num_key_value_heads,
        "head_dim": config.get_head_size(),
        "dtype": args.dtype,
        "block_size": llm.llm_engine.vllm_config.cache_config.block_size,
    }
    write_json(args.json, {"model": model, "results": results})


if __name__ == "__main__":
    main()
