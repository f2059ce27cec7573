"""Calculate what a window would cost on a GPU: bytes, launches, programs, and a bound on the time.

Nothing is measured here. All assumptions are options, and are printed.

python bench/cost_model.py [--json OUT]
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path

from common import print_table, write_json


@dataclass(frozen=True)
class Model:
    """What of a model the calculation needs: Llama 3's shapes."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    weights: float  # parameters


MODELS = (Model("8B", 32, 8, 128, 8.03e9), Model("70B", 80, 8, 128, 70.6e9))
TENSOR_PARALLEL = (1, 8)
REQUESTS = (1, 32, 256)
ELEMENT_BYTES = 2  # bf16, weights and cache


def cost(model: Model, tp: int, requests: int, args: argparse.Namespace) -> dict[str, object]:
    """Bytes and times of one window on one of `tp` GPUs; times in microseconds."""
    row = 2 * model.layers * model.kv_heads // tp * model.head_dim * ELEMENT_BYTES
    accepted = sum(args.acceptance**i for i in range(1, args.k + 1))
    kept = requests * (1 + accepted)
    fill = requests * (args.page_size - 1) / 2
    per_second = args.bandwidth * 1e12
    # Each byte moved is read once and written once.
    move = 2 * kept * row / (per_second * args.efficiency) * 1e6
    filled = 2 * fill * row / (per_second * args.efficiency) * 1e6
    cache = requests * args.context * row
    step = (model.weights * ELEMENT_BYTES / tp + cache) / per_second * 1e6
    cost = move + args.launch
    return {
        "model": model.name,
        "tp": tp,
        "requests": requests,
        "row_bytes": row,
        "rows_staged": requests * (1 + args.k),
        "rows_moved": kept,
        "moved_mib": kept * row / 2**20,
        "programs": requests * (1 + args.k) * 2 * model.layers,
        "commit_us": cost,
        "fill_mib": fill * row / 2**20,
        "fill_us": filled + args.launch,
        "step_floor_us": step,
        "commit_share": cost / step,
        "with_fill_share": (cost + filled + args.launch) / step,
        "resident_gb": (model.weights * ELEMENT_BYTES / tp + cache) / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the figures as JSON")
    for name, default, kind, text in (
        ("k", 4, int, "drafts per request"),
        ("acceptance", 0.7, float, "chance that a draft is accepted if those before it were"),
        ("page-size", 16, int, "rows per page"),
        ("context", 2048, int, "tokens per request that attention reads"),
        (
            "bandwidth",
            3.35,
            float,
            "HBM bandwidth in TB/s; the default is an H100 SXM's data sheet",
        ),
        ("efficiency", 0.5, float, "share of the bandwidth that scattered copies reach: a guess"),
        ("launch", 5.0, float, "microseconds per kernel launch outside a CUDA graph: a guess"),
    ):
        parser.add_argument(f"--{name}", default=default, type=kind, help=f"{text} (%(default)s)")
    args = parser.parse_args()
    rows = [cost(m, tp, n, args) for m in MODELS for tp in TENSOR_PARALLEL for n in REQUESTS]
    header = "model TP requests rows MiB programs commit_us step_us commit_% fill_MiB +fill_%"
    print_table(
        header.split(),
        [
            [
                *(r["model"], r["tp"], r["requests"]),
                *(f"{r['rows_moved']:.0f}", f"{r['moved_mib']:.2f}", r["programs"]),
                *(f"{r['commit_us']:.1f}", f"{r['step_floor_us']:.0f}"),
                f"{100 * float(str(r['commit_share'])):.2f}",
                f"{r['fill_mib']:.1f}",
                f"{100 * float(str(r['with_fill_share'])):.2f}",
            ]
            for r in rows
        ],
    )
    given = {name: value for name, value in vars(args).items() if name != "json"}
    print("assumed:", ", ".join(f"{name} {value}" for name, value in given.items()))
    models = [asdict(model) for model in MODELS]
    write_json(args.json, {"assumptions": given, "models": models, "windows": rows})


if __name__ == "__main__":
    main()
