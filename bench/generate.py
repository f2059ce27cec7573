"""Generation side by side: stock transformers and the nwor engine, interleaved in one process.

    python bench/generate.py [--dtypes bfloat16 float32] [--contexts 200 4000] [--batches 1 4]

Decode tokens/s exclude the prefill and the first token; prefill is shown apart. Stock assisted
generation takes one prompt at a time, so several prompts are run one after the other and their times
added. Every variant's tokens are compared with stock plain greedy: in float32 they must be equal;
for bfloat16 the first difference of each prompt is shown with its cause (bench/agreement.py).

A whole run takes an hour on two cores. Cases can be run in parts: `--json` replaces the cases it ran
and keeps the others.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from agreement import Difference, differences
from common import environment, write_json
from nwor.demo import weights
from nwor.demo.prompts import ALL
from nwor.engine import Engine, NoDrafter, Options, PromptLookup, load

Ids = list[list[int]]


@dataclass
class Sample:
    """One run of one variant."""

    tokens: list[list[int]]
    prefill_seconds: float
    decode_seconds: float
    decoded: int
    cache_bytes: int
    acceptance_length: float = 1.0


@dataclass
class Row:
    """Median of a variant's runs."""

    dtype: str
    context: int
    prompts: int
    variant: str
    prefill_s: float
    tokens_per_second: float
    spread: float
    acceptance_length: float
    identical: str
    cache_mib: float
    rates: list[float]
    differs: list[Difference]


class _Clock(StoppingCriteria):
    """Notes when each token of a stock run came."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.lengths: list[int] = []

    def __call__(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:  # noqa: ANN401
        self.at.append(time.perf_counter())
        self.lengths.append(input_ids.shape[1])
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def stock(model: PreTrainedModel, ids: Ids, new: int, **options: Any) -> Sample:  # noqa: ANN401
    """Run stock `generate` on left-padded prompts."""
    width = max(map(len, ids))
    padded = torch.tensor([[0] * (width - len(p)) + p for p in ids])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in ids])
    clock = _Clock()
    began = time.perf_counter()
    out = model.generate(  # type: ignore[operator]
        padded,
        attention_mask=mask,
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        return_dict_in_generate=True,
        stopping_criteria=StoppingCriteriaList([clock]),
        **options,
    )
    cache = sum(
        t.nbytes
        for layer in out.past_key_values.layers
        for t in (layer.keys, layer.values)
        if t is not None
    )
    tokens = out.sequences[:, width : width + new].tolist()
    return Sample(
        tokens,
        clock.at[0] - began,
        clock.at[-1] - clock.at[0],
        (clock.lengths[-1] - clock.lengths[0]) * len(ids),
        cache,
        (clock.lengths[-1] - clock.lengths[0]) / max(len(clock.at) - 1, 1),
    )


def stock_each(model: PreTrainedModel, ids: Ids, new: int, **options: Any) -> Sample:  # noqa: ANN401
    """Run prompts one after the other: what stock assisted generation forces one to do."""
    runs = [stock(model, [p], new, **options) for p in ids]
    return Sample(
        [r.tokens[0] for r in runs],
        sum(r.prefill_seconds for r in runs),
        sum(r.decode_seconds for r in runs),
        sum(r.decoded for r in runs),
        max(r.cache_bytes for r in runs),
        statistics.mean(r.acceptance_length for r in runs),
    )


def nwor(model: PreTrainedModel, ids: Ids, new: int, mode: str, drafts: int) -> Sample:
    """Run the engine on all prompts as one batch."""
    drafter = PromptLookup() if drafts else NoDrafter()
    tokens: list[list[int]] = [[] for _ in ids]
    with Engine(
        model,
        drafter=drafter,
        mode=mode,
        max_batch=len(ids),
        max_length=max(map(len, ids)) + new,
        max_draft=max(drafts, 1),
    ) as engine:
        for run in engine.run(ids, Options(max_new_tokens=new, num_draft_tokens=drafts)):
            tokens[run.request.index] += run.tokens
        stats = engine.stats
        staged = engine.cache.staged_bytes() if mode == "stage" else 0
    return Sample(
        tokens,
        stats.prefill_seconds,
        stats.decode_seconds,
        stats.decoded,
        stats.peak_durable_bytes + staged,
        stats.acceptance_length,
    )


def variants(drafts: int, prompts: int) -> dict[str, Callable[[PreTrainedModel, Ids, int], Sample]]:
    """Return what is compared, stock plain first: it is the reference."""
    found: dict[str, Callable[[PreTrainedModel, Ids, int], Sample]] = {
        "stock plain": stock_each,
        "stock lookup": lambda m, i, n: stock_each(m, i, n, prompt_lookup_num_tokens=drafts),
    }
    if prompts > 1:
        found["stock plain, batched"] = stock
    found["nwor none"] = lambda m, i, n: nwor(m, i, n, "stage", 0)
    found["nwor immediate"] = lambda m, i, n: nwor(m, i, n, "immediate", drafts)
    found["nwor stage"] = lambda m, i, n: nwor(m, i, n, "stage", drafts)
    return found


def prompts_of(tokenizer: PreTrainedTokenizerBase, context: int, count: int) -> Ids:
    """Return `count` prompts of about `context` tokens: the demo's, or longer real code."""
    short: Ids = [tokenizer(p.text).input_ids for p in ALL]
    if context <= 256:
        return [short[i % len(short)] for i in range(count)]
    source = "".join(inspect.getsource(module) for module in (argparse, inspect, statistics))
    ids: list[int] = tokenizer(source).input_ids
    step = (len(ids) - context) // max(count, 1)
    return [ids[:1] + ids[1 + i * step : i * step + context] for i in range(count)]


def measure(
    model: PreTrainedModel, ids: Ids, args: argparse.Namespace, dtype: str, context: int
) -> list[Row]:
    """Run all variants, interleaved, and return their medians."""
    chosen = {
        name: run
        for name, run in variants(args.drafts, len(ids)).items()
        if not args.only or name in args.only or name == "stock plain"
    }
    samples: dict[str, list[Sample]] = {name: [] for name in chosen}
    for repetition in range(args.warmup + args.reps):
        for name, run in chosen.items():
            sample = run(model, ids, args.new)
            if repetition >= args.warmup:
                samples[name].append(sample)
    reference = samples["stock plain"][0].tokens
    rows: list[Row] = []
    for name, runs in samples.items():
        rates = [r.decoded / r.decode_seconds for r in runs]
        same = sum(all(r.tokens[i] == want for r in runs) for i, want in enumerate(reference))
        rows.append(
            Row(
                dtype,
                context,
                len(ids),
                name,
                statistics.median(r.prefill_seconds for r in runs),
                statistics.median(rates),
                (max(rates) - min(rates)) / statistics.median(rates),
                runs[0].acceptance_length,
                f"{same}/{len(ids)}",
                runs[0].cache_bytes / 2**20,
                rates,
                differences(model, ids, reference, runs[0].tokens),
            )
        )
    return rows


def in_pairs(row: Row, base: Row | None) -> float | None:
    """Return the median of a variant's rate over another's, turn by turn; None without the other."""
    if base is None:
        return None
    return statistics.median(a / b for a, b in zip(row.rates, base.rates, strict=True))


def merged(path: Path, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return what the file holds of other cases, and `rows`: a long benchmark runs in parts."""
    kept = json.loads(path.read_text())["rows"] if path.exists() else []
    mine = {(r.dtype, r.context, r.prompts) for r in rows}
    kept = [r for r in kept if (r["dtype"], r["context"], r["prompts"]) not in mine]
    made = {key: environment()[key] for key in ("argv", "commit", "modified", "load_average")}
    return kept + [asdict(r) | {"made": made} for r in rows]


def show(rows: Sequence[Row]) -> None:
    """Print one case."""
    head = rows[0]
    print(f"\n{head.dtype}, {head.context} tokens of context, {head.prompts} prompt(s)")
    print(
        f"  {'variant':22s}{'prefill s':>10s}{'tokens/s':>10s}{'spread':>8s}"
        f"{'vs lookup':>10s}{'vs imm.':>10s}{'accept':>8s}{'identical':>10s}{'cache MiB':>10s}"
    )
    base = {r.variant: r for r in rows}
    for row in rows:
        ratios = [in_pairs(row, base.get(name)) for name in ("stock lookup", "nwor immediate")]
        lookup, immediate = ("-" if ratio is None else f"{ratio:.2f}x" for ratio in ratios)
        print(
            f"  {row.variant:22s}{row.prefill_s:10.2f}{row.tokens_per_second:10.1f}"
            f"{row.spread:8.0%}{lookup:>10s}{immediate:>10s}{row.acceptance_length:8.2f}"
            f"{row.identical:>10s}{row.cache_mib:10.1f}"
        )
    for row in rows:
        for difference in row.differs:
            print(f"  {row.variant}: {difference}")


def record(model: PreTrainedModel) -> dict[str, Any]:
    """Return what a reader needs to repeat the run."""
    config = model.config.get_text_config()
    names = (
        "model_type", "num_hidden_layers", "hidden_size", "num_attention_heads",
        "num_key_value_heads", "head_dim", "sliding_window", "vocab_size",
    )  # fmt: skip
    return environment() | {"model": {name: getattr(config, name, None) for name in names}}


def main() -> int:
    """Run the benchmark; the exit code is 1 if float32 tokens differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="directory of a model (default: the demo's Gemma 3 270M)")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[200, 4000])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--only", nargs="+", help="variants to run beside stock plain")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    directory = args.model or str(weights.ensure())
    rows: list[Row] = []
    env: dict[str, Any] = {}
    for dtype in args.dtypes:
        loaded = load(directory, dtype)
        assert loaded.tokenizer is not None, "the benchmark's prompts are texts"  # noqa: S101
        env = record(loaded.model)
        for context in args.contexts:
            for batch in args.batches:
                ids = prompts_of(loaded.tokenizer, context, batch)
                rows += (case := measure(loaded.model, ids, args, dtype, context))
                show(case)
    print(f"\n{env}")
    if args.json:
        write_json(args.json, {"rows": merged(args.json, rows), "model": env["model"]})
    wrong = [r for r in rows if r.dtype == "float32" and r.identical != f"{r.prompts}/{r.prompts}"]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
