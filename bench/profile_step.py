"""Where a decode step of the embedded engine spends its time: by kind of work, per step.

    python bench/profile_step.py [--dtype bfloat16] [--prompts 4] [--json OUT]

Profiles the same prompts without drafts and with them, so that what more rows cost shows per kind.
The profiler itself slows small operations down: read shares, not seconds.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path

from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from common import print_table, write_json
from generate import prompts_of
from nwor.demo import weights
from nwor.engine import Engine, NoDrafter, Options, PromptLookup, load

KINDS = {
    "linear layers": ("aten::addmm", "aten::mm", "aten::linear", "mkldnn"),
    "attention": ("attention", "aten::bmm", "aten::baddbmm", "softmax", "logaddexp"),
    "argmax": ("aten::argmax", "aten::max", "aten::eq"),
    "index operations": ("aten::index", "aten::gather"),
}


def kind_of(name: str) -> str:
    """Return the kind of work an operation belongs to."""
    for kind, parts in KINDS.items():
        if any(part in name for part in parts):
            return kind
    return "other operations"


def steps(model: PreTrainedModel, ids: list[list[int]], drafts: int, new: int) -> dict[str, float]:
    """Return milliseconds per step by kind; ``host`` is what no operation accounts for."""
    with Engine(
        model,
        drafter=PromptLookup() if drafts else NoDrafter(),
        max_batch=len(ids),
        max_length=max(map(len, ids)) + new,
        max_draft=max(drafts, 1),
    ) as engine:
        run = engine.run(ids, Options(max_new_tokens=new, num_draft_tokens=drafts))
        for _ in range(len(ids) + 2):  # prompts, and a first step to warm up
            next(run)
        before, count = engine.stats.decode_seconds, engine.stats.steps
        with profile(activities=[ProfilerActivity.CPU]) as found:
            for _ in run:
                pass
        count = engine.stats.steps - count
        wall = engine.stats.decode_seconds - before
    total: defaultdict[str, float] = defaultdict(float)
    for event in found.key_averages():
        total[kind_of(event.key)] += event.self_cpu_time_total / 1e3 / count
    total["host"] = max(wall * 1e3 / count - sum(total.values()), 0.0)
    return {**total, "step": wall * 1e3 / count, "steps": count}


def main() -> int:
    """Profile both ways and print them side by side."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="directory of a model (default: the demo's Gemma 3 270M)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    loaded = load(args.model or str(weights.ensure()), args.dtype)
    assert loaded.tokenizer is not None, "the benchmark's prompts are texts"  # noqa: S101
    ids = prompts_of(loaded.tokenizer, 200, args.prompts)
    ways = {f"k = {k}": steps(loaded.model, ids, k, args.new) for k in (0, args.drafts)}
    kinds = sorted({kind for way in ways.values() for kind in way})
    rows = [[kind, *(f"{way.get(kind, 0.0):.2f}" for way in ways.values())] for kind in kinds]
    print_table([f"ms per step, {args.dtype}, {args.prompts} prompts", *ways], rows)
    write_json(args.json, {"dtype": args.dtype, "prompts": args.prompts, "ms_per_step": ways})
    return 0


if __name__ == "__main__":
    sys.exit(main())
