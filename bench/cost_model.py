"""Calculate what a window would cost on a GPU: bytes, launches, programs, and a bound on the time.

Nothing is measured here. All assumptions are options, and are printed; docs/gpu.md discusses them.

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
TENSOR_PARALLEL = (1, 2, 4, 8)
REQUESTS = (1, 8, 32, 128, 256)
ELEMENT_BYTES = 2  # bf16, weights and cache
LAUNCHES = 4  # begin, fill-in, close, move: counted in tests/triton/test_device_host.py


def programs(model: Model, requests: int, args: argparse.Namespace) -> dict[str, int]:
    """Programs of each launch: as `nwor.store.triton_window` makes its grids."""
    lanes = 2 * model.layers
    chunks = min(-(-args.page_size // 16), 8)
    return {
        "begin": requests,
        "fill": requests * chunks * lanes,
        "close": requests,
        "move": requests * (1 + args.k) * lanes,
    }


def cost(model: Model, tp: int, requests: int, args: argparse.Namespace) -> dict[str, object]:
    """Bytes and times of one window on one of `tp` GPUs; times in microseconds."""
    row = 2 * model.layers * model.kv_heads // tp * model.head_dim * ELEMENT_BYTES
    accepted = sum(args.acceptance**i for i in range(1, args.k + 1))
    kept = requests * (1 + accepted)
    per_second = args.bandwidth * 1e12
    # Each byte moved is read once and written once.
    copy = 2 * row / (per_second * args.efficiency) * 1e6
    started = programs(model, requests, args)
    fixed = args.upload + LAUNCHES * args.launch + sum(started.values()) / args.programs
    window = fixed + kept * copy
    fill = (args.page_size - 1) / 2
    read = model.weights * ELEMENT_BYTES / tp + requests * args.context * row
    step = read / per_second * 1e6
    resident = read / 1e9
    return {
        "model": model.name,
        "tp": tp,
        "requests": requests,
        "row_bytes": row,
        "rows_staged": requests * (1 + args.k),
        "rows_moved": kept,
        "moved_mib": kept * row / 2**20,
        "programs": started,
        "fixed_us": fixed,
        "window_us": window,
        "first_window_us": fill * copy,
        "step_floor_us": step,
        "share": window / step,
        "launch_share": LAUNCHES * args.launch / step,
        "layers_in_l2": args.l2 * 2**20 / (read / model.layers),
        "resident_gb": resident,
        "fits": resident < args.memory,
    }


OPTIONS = (
    ("k", 4, int, "drafts per request"),
    ("acceptance", 0.7, float, "chance that a draft is accepted if those before it were"),
    ("page-size", 16, int, "rows per page"),
    ("context", 2048, int, "tokens per request that attention reads"),
    ("bandwidth", 3.35, float, "HBM bandwidth in TB/s; the default is an H100 SXM's data sheet"),
    ("memory", 80.0, float, "memory of a GPU in GB; the default is an H100 SXM's data sheet"),
    ("l2", 50.0, float, "L2 cache in MiB; the default is an H100 SXM's data sheet"),
    ("efficiency", 0.5, float, "share of the bandwidth that scattered copies reach: a guess"),
    ("launch", 5.0, float, "microseconds per kernel launch outside a CUDA graph: a guess"),
    ("upload", 5.0, float, "microseconds of one small copy from pinned memory: a guess"),
    ("programs", 1000.0, float, "programs that a GPU starts and ends per microsecond: a guess"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the figures as JSON")
    for name, default, kind, text in OPTIONS:
        parser.add_argument(f"--{name}", default=default, type=kind, help=f"{text} (%(default)s)")
    args = parser.parse_args()
    rows = [cost(m, tp, n, args) for m in MODELS for tp in TENSOR_PARALLEL for n in REQUESTS]
    header = "model TP requests rows MiB programs fixed_us window_us step_us share_% +first_us fits"
    print_table(
        header.split(),
        [
            [
                *(r["model"], r["tp"], r["requests"]),
                *(f"{r['rows_moved']:.0f}", f"{r['moved_mib']:.2f}"),
                sum(programs(next(m for m in MODELS if m.name == r["model"]), n, args).values()),
                *(f"{r['fixed_us']:.1f}", f"{r['window_us']:.1f}", f"{r['step_floor_us']:.0f}"),
                f"{100 * float(str(r['share'])):.2f}",
                f"{r['first_window_us']:.2f}",
                "yes" if r["fits"] else "no",
            ]
            for r in rows
            for n in [int(str(r["requests"]))]
        ],
    )
    given = {name: value for name, value in vars(args).items() if name != "json"}
    print("assumed:", ", ".join(f"{name} {value}" for name, value in given.items()))
    models = [asdict(model) for model in MODELS]
    write_json(args.json, {"assumptions": given, "models": models, "windows": rows})


if __name__ == "__main__":
    main()
