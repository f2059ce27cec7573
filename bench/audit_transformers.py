"""What the audit costs on the embedded engine: off, metadata and bytes, in turns.

    python bench/audit_transformers.py --model PATH [--requests 8] [--pairs 5] [--json OUT]

Tokens must be equal at all levels and the audit must have found nothing, or no time is reported. Each
run has an engine of its own on one loaded model; decode steps are timed, prompts are not.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from audit_common import Timer, show
from common import SEEDS, write_json
from nwor.audit import AuditLevel
from nwor.engine import Engine, Loaded, Options, PromptLookup, load
from nwor.engine.audited import AuditedEngine


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", required=True, help="path of Gemma 3 270M (or another model)")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=5, help="runs of each level")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def audited(model: Any, level: AuditLevel, timer: Timer, options: dict[str, Any]) -> AuditedEngine:  # noqa: ANN401
    """Make an engine under audit whose hooks are timed."""
    engine = AuditedEngine(model, level=level, **options)
    timer.watch(engine.books, "forward", "written", "moved", "end")
    timer.watch(engine.books.shadow, "sampled", "freed")
    if engine.books.bytes is not None:
        timer.watch(engine.books.bytes, "expect")
    return engine


def measure(
    loaded: Loaded, prompts: list[list[int]], args: argparse.Namespace, level: AuditLevel
) -> dict[str, Any]:
    """One run of all prompts at one level; decode steps only."""
    timer = Timer()
    options = {
        "drafter": PromptLookup(),
        "max_batch": len(prompts),
        "max_length": max(map(len, prompts)) + args.tokens,
        "max_draft": args.k,
    }
    off = level is AuditLevel.OFF
    engine = (
        Engine(loaded.model, **options) if off else audited(loaded.model, level, timer, options)
    )
    tokens: list[list[int]] = [[] for _ in prompts]
    with engine:
        running = engine.run(prompts, Options(max_new_tokens=args.tokens, num_draft_tokens=args.k))
        for _ in prompts:  # each prompt's first token ends its prefill
            first = next(running)
            tokens[first.request.index] += first.tokens
        if any(len(each) != 1 for each in tokens):
            sys.exit(
                "a window ran before the last prompt was in: decode steps cannot be told apart"
            )
        started, timer.seconds = time.perf_counter(), 0.0
        for run in running:
            tokens[run.request.index] += run.tokens
        seconds = time.perf_counter() - started
    found = engine.findings if isinstance(engine, AuditedEngine) else None
    if found is not None and found.counts:
        sys.exit(f"the audit objects, no time is reported: {found.first}")
    steps = engine.stats.steps
    return {
        "level": level.value,
        "tokens": tokens,
        "steps": steps,
        "tokens_per_second": (sum(map(len, tokens)) - len(prompts)) / seconds,
        "step_ms": 1e3 * seconds / steps,
        "share": timer.seconds / seconds,
        "audit_ms": 1e3 * timer.seconds / steps,
        "rows_checked": 0 if found is None else found.rows_checked,
        "rejected": sum(engine.stats.drafted) - sum(engine.stats.accepted),
    }


def main() -> None:
    args = arguments()
    loaded = load(args.model, args.dtype)
    if loaded.tokenizer is None:
        sys.exit(f"{args.model} has no tokenizer")
    prompts = [loaded.tokenizer.encode(SEEDS[i % len(SEEDS)]) for i in range(args.requests)]
    levels = list(AuditLevel)
    runs: dict[str, list[dict[str, Any]]] = {level.value: [] for level in levels}
    reference = measure(loaded, prompts, args, AuditLevel.OFF)["tokens"]
    for turn in range(args.pairs):
        for shift in range(len(levels)):
            run = measure(loaded, prompts, args, levels[(turn + shift) % len(levels)])
            if run.pop("tokens") != reference:
                sys.exit(f"tokens differ at level {run['level']}: no time is reported")
            runs[run["level"]].append(run)
    show(runs)
    write_json(
        args.json, {"requests": args.requests, "k": args.k, "dtype": args.dtype, "runs": runs}
    )


if __name__ == "__main__":
    main()
