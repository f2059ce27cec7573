"""What a commit costs: one movement for all layers against the ways it is done elsewhere.

    python bench/commit.py                     the whole grid (about two minutes)
    python bench/commit.py --quick             requests 8, k = 4
    python bench/commit.py --json out.json     also as JSON

Every mode's store is compared with a plain loop, bit for bit, before anything is timed.
"""

from __future__ import annotations

import argparse
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from common import (
    add_common_arguments,
    environment,
    interleaved,
    print_table,
    summary,
    timed,
    write_json,
)
from nwor import (
    DeferredWriteManager,
    KVRows,
    TransactionalCache,
    WindowRows,
    plan_commit,
    reference,
)
from nwor.store.movers import get_mover

LAYERS, HEADS, DIM, PAGE, PAGES = 32, 8, 128, 16, 256
DTYPE = torch.bfloat16
WINDOWS = 8  # windows with rows and slots of their own, so that caches are as warm as in life
SHAPE = f"{LAYERS} layers, {HEADS} kv heads, dim {DIM}, bf16, pages of {PAGE}"


@dataclass
class Case:
    """Windows of one kind: who drafted how much, what was accepted, where rows go."""

    requests: int
    drafts: int
    acceptance: float
    accepted: list[list[int]]
    slots: list[Tensor]

    @property
    def kept(self) -> float:
        """Kept rows per window, on average."""
        return sum(self.requests + sum(a) for a in self.accepted) / len(self.accepted)

    @property
    def mebibytes(self) -> float:
        """Accepted bytes per window over all layers."""
        return self.kept * LAYERS * 2 * HEADS * DIM * DTYPE.itemsize / 2**20


def make_case(requests: int, drafts: int, acceptance: float, *, seed: int = 0) -> Case:
    """Draw windows in which each draft is accepted with the given probability."""
    generator = torch.Generator().manual_seed(seed)
    accepted, slots = [], []
    for _ in range(WINDOWS):
        hits = torch.rand(requests, drafts, generator=generator) < acceptance
        accepted.append(hits.to(torch.int64).cumprod(1).sum(1).tolist())
        page = torch.randperm(PAGES // 2, generator=generator)[:requests] * 2 * PAGE
        offset = torch.randint(0, PAGE, (requests,), generator=generator)
        slots.append(((page + offset)[:, None] + torch.arange(drafts + 1)).flatten())
    return Case(requests, drafts, acceptance, accepted, slots)


class Bench:
    """A store, staged rows, and every way to bring the accepted ones home."""

    def __init__(self, case: Case, store: KVRows) -> None:
        self.case = case
        self.store = store
        self.rows = WindowRows.step([case.drafts] * case.requests)
        count = self.rows.num_rows
        self.staged = KVRows.allocate(
            layers=LAYERS, pages=1, page_size=count, heads=HEADS, dim=DIM, dtype=DTYPE
        )
        self.staged.key.copy_(torch.rand(self.staged.key.shape))
        self.staged.value.copy_(torch.rand(self.staged.value.shape))
        self.moves = {name: get_mover(name)(self.staged, store) for name in ("torch", "numba")}
        # As many destinations as the other modes have windows: just as warm, or cold.
        width = int(case.kept * LAYERS * 2 * HEADS * DIM)
        self.flat = torch.rand(width).to(DTYPE), torch.empty(WINDOWS, width, dtype=DTYPE)
        self.turn = 0

    def window(self) -> tuple[Tensor, list[int]]:
        """Slots and accepted counts of the next window."""
        self.turn += 1
        index = self.turn % WINDOWS
        return self.case.slots[index], self.case.accepted[index]

    def all_layers(self, mover: str) -> float:
        """Plan, then one movement."""
        slots, accepted = self.window()

        def work() -> None:
            moves = plan_commit(self.rows, torch.tensor(accepted)).moves(slots)
            self.moves[mover](moves.rows, moves.slots)

        return timed(work)

    def masked_writer(self) -> float:
        """One writer call per layer with the masked slot mapping."""
        slots, accepted = self.window()

        def work() -> None:
            masked = plan_commit(self.rows, torch.tensor(accepted)).masked(slots)
            for layer in range(LAYERS):
                self.write(layer, slice(None), masked)

        return timed(work)

    def per_run(self) -> float:
        """One writer call per layer and accepted run: the public attempt's way."""
        slots, accepted = self.window()
        step = self.case.drafts + 1

        def work() -> None:
            for layer in range(LAYERS):
                for request, count in enumerate(accepted):
                    run = slice(request * step, request * step + count + 1)
                    self.write(layer, run, slots[run])

        return timed(work)

    def write_everything(self) -> float:
        """One writer call per layer with all rows: no speculation-awareness at all."""
        slots, _ = self.window()

        def work() -> None:
            for layer in range(LAYERS):
                self.write(layer, slice(None), slots)

        return timed(work)

    def contiguous_copy(self) -> float:
        """Copy the accepted bytes from one block to another: no commit can be faster."""
        self.turn += 1
        home = self.flat[1][self.turn % WINDOWS]
        return timed(lambda: home.copy_(self.flat[0]))

    def write(self, layer: int, rows: slice, slots: Tensor) -> None:
        """Write as a cache writer in torch does: skip negative slots, scatter K, scatter V."""
        key, value = self.staged.key[layer, 0, rows], self.staged.value[layer, 0, rows]
        used = torch.nonzero(slots >= 0).flatten()
        if used.shape[0] < slots.shape[0]:
            slots, key, value = slots[used], key[used], value[used]
        self.store.key[layer].view(-1, HEADS, DIM).index_copy_(0, slots, key)
        self.store.value[layer].view(-1, HEADS, DIM).index_copy_(0, slots, value)

    def modes(self) -> dict[str, Callable[[], float]]:
        """All ways, by name."""
        return {
            "all layers (torch)": lambda: self.all_layers("torch"),
            "all layers (numba)": lambda: self.all_layers("numba"),
            "masked writer": self.masked_writer,
            "per run": self.per_run,
            "write all": self.write_everything,
            "copy (limit)": self.contiguous_copy,
        }

    def verify(self) -> None:
        """Run every mode on one window and compare the whole store with the plain loop's."""
        step = self.case.drafts + 1
        for name, run in self.modes().items():
            if name == "copy (limit)":
                continue
            index = (self.turn + 1) % WINDOWS
            accepted = self.case.accepted[index]
            if name == "write all":
                accepted = [self.case.drafts] * self.case.requests
            kept = [r * step + j for r, a in enumerate(accepted) for j in range(a + 1)]
            slots = self.case.slots[index]
            for view in (self.store.key, self.store.value):
                view.fill_(-7.0)
            run()
            got = self.store.key.clone(), self.store.value.clone()
            for view in (self.store.key, self.store.value):
                view.fill_(-7.0)
            reference.move_rows(self.staged, self.store, torch.tensor(kept), slots[kept])
            if not (torch.equal(got[0], self.store.key) and torch.equal(got[1], self.store.value)):
                raise SystemExit(
                    f"{name}: the store differs from the plain loop's; nothing is timed"
                )


def run_grid(arguments: argparse.Namespace, store: KVRows) -> list[dict[str, object]]:
    """Time every mode on every case."""
    results = []
    for requests in arguments.requests:
        for drafts in arguments.drafts:
            for acceptance in arguments.acceptance:
                case = make_case(requests, drafts, acceptance)
                bench = Bench(case, store)
                bench.verify()
                rounds = max(15, arguments.rounds // max(1, requests * drafts // 32))
                times = interleaved(bench.modes(), rounds=rounds)
                results.append(
                    {
                        "requests": requests,
                        "k": drafts,
                        "acceptance": acceptance,
                        "kept_rows": case.kept,
                        "mebibytes": case.mebibytes,
                        "rounds": rounds,
                        "microseconds": {name: summary(t) for name, t in times.items()},
                    }
                )
                print(
                    f"  {requests:3d} requests, k = {drafts}, {acceptance:4.0%} done",
                    file=sys.stderr,
                )
    return results


def show_grid(results: list[dict[str, object]]) -> None:
    """Print medians in microseconds, and the two ratios that matter."""
    names = list(results[0]["microseconds"])  # type: ignore[call-overload]
    rows = []
    for result in results:
        medians = {n: s["median"] for n, s in result["microseconds"].items()}  # type: ignore[attr-defined]
        best, limit = medians["all layers (numba)"], medians["copy (limit)"]
        torch_way = medians["all layers (torch)"]
        rows.append(
            (
                f"{result['requests']} x {result['k']} @ {result['acceptance']:.0%}",
                f"{result['mebibytes']:.2f}",
                *(f"{medians[name]:.0f}" for name in names),
                f"{medians['per run'] / torch_way:.1f}x",
                f"{torch_way / limit:.1f}x",
                f"{best / limit:.1f}x",
            )
        )
    header = ("requests x k @ accepted", "MiB", *names, "per run/torch", "torch/copy", "numba/copy")
    print_table(header, rows)


def rejected_rows(store: KVRows, rounds: int) -> dict[str, float]:
    """Commit the same accepted rows out of windows of k = 2 and of k = 8; return k = 8 over k = 2."""
    benches = {}
    for drafts in (2, 8):
        case = make_case(8, drafts, 0.0)
        case.accepted = [[1, 2, 0, 1, 2, 0, 1, 1]] * WINDOWS
        benches[drafts] = Bench(case, store)
        benches[drafts].verify()
    ratios = {}
    for mover in ("torch", "numba"):
        modes = {str(k): (lambda b=b, m=mover: b.all_layers(m)) for k, b in benches.items()}
        times = interleaved(modes, rounds=rounds * 2)
        ratios[mover] = summary(times["8"])["median"] / summary(times["2"])["median"]
    return ratios


def bookkeeping(  # noqa: C901 - the rivals stand side by side
    store: KVRows, rounds: int
) -> dict[str, dict[str, float]]:
    """Begin + 32 x stage + plan, against the same number of single torch ops."""
    rows = WindowRows.step([4] * 8)
    count = rows.num_rows
    keys = [torch.rand(count, HEADS, DIM).to(DTYPE) for _ in range(LAYERS)]
    caches = [
        (k.view(-1, HEADS, DIM), v.view(-1, HEADS, DIM))
        for k, v in zip(store.key, store.value, strict=True)
    ]
    slots = torch.randperm(store.num_slots)[:count]
    accepted = torch.tensor([1, 2, 0, 1, 2, 0, 1, 1])
    names = [f"layer{i}" for i in range(LAYERS)]
    cache = TransactionalCache({"all": store}, max_rows=count)
    manager = DeferredWriteManager(hold="reference")
    sink = torch.empty(2, count, HEADS, DIM, dtype=DTYPE)

    def by_manager() -> None:
        manager.begin_window([4] * 8, rows)
        for layer, name in enumerate(names):
            manager.stage_layer(
                layer_id=name,
                key=keys[layer],
                value=keys[layer],
                key_cache=caches[layer][0],
                value_cache=caches[layer][1],
                slot_mapping=slots,
                kv_cache_dtype="auto",
                k_scale=None,
                v_scale=None,
                writer=_no_writer,
            )
        plan_commit(rows, accepted).moves(slots)

    def by_cache() -> None:
        window = cache.begin(rows, slots)
        for layer in range(LAYERS):
            window.stage("all", layer, keys[layer], keys[layer])
        plan_commit(rows, accepted).moves(slots)

    def writes() -> None:
        for layer in range(LAYERS):
            caches[layer][0].index_copy_(0, slots, keys[layer])

    def copies() -> None:
        for layer in range(LAYERS):
            sink[0].copy_(keys[layer])
            sink[1].copy_(keys[layer])

    def closing(
        work: Callable[[], None], owner: TransactionalCache | DeferredWriteManager
    ) -> float:
        seconds = timed(work)
        if owner.window is not None:
            owner.window.abort()
        return seconds

    times = interleaved(
        {
            "manager, rows held by reference": lambda: closing(by_manager, manager),
            "cache, rows copied to the arena": lambda: closing(by_cache, cache),
            "the arena's 64 copies alone": lambda: timed(copies),
            "one index_copy_ per layer": lambda: timed(writes),
        },
        rounds=rounds * 2,
    )
    return {name: summary(t) for name, t in times.items()}


def _no_writer(*_: object) -> None:
    raise AssertionError("bookkeeping never writes")


def memory_growth(store: KVRows, windows: int) -> dict[str, float]:
    """Resident KiB after 1,000 windows and after all of them."""
    rows = WindowRows.step([4] * 8)
    cache = TransactionalCache({"all": store}, max_rows=rows.num_rows)
    keys = torch.rand(rows.num_rows, HEADS, DIM).to(DTYPE)
    resident = {}
    for index in range(windows + 1):
        if index in (1000, windows):
            resident[index] = _resident_kib()
        generator = torch.Generator().manual_seed(index)
        slots = torch.randperm(store.num_slots, generator=generator)[: rows.num_rows]
        with cache.begin(rows, slots) as window:
            for layer in range(LAYERS):
                window.stage("all", layer, keys, keys)
            window.commit([index % 5] * 8)
    return {
        "windows": windows,
        "resident_kib_after_1000": resident[1000],
        "resident_kib_at_end": resident[windows],
        "growth_kib": resident[windows] - resident[1000],
    }


def _resident_kib() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:  # noqa: PTH123
        pages = int(statm.read().split()[1])
    return pages * resource.getpagesize() // 1024


def main() -> None:
    """Run, print, record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 4, 8], metavar="K")
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.0, 0.3, 0.7, 1.0])
    parser.add_argument(
        "--rounds", type=int, default=60, help="timed rounds (default: %(default)s)"
    )
    parser.add_argument("--windows", type=int, default=10_000, help="windows of the memory test")
    parser.add_argument("--quick", action="store_true", help="8 requests, k = 4, 2,000 windows")
    # One thread: OpenMP barriers on shared cores jump by whole scheduler ticks and hide everything.
    add_common_arguments(parser, threads=1)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.requests, arguments.drafts, arguments.windows = [8], [4], 2000
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    store = KVRows.allocate(
        layers=LAYERS, pages=PAGES, page_size=PAGE, heads=HEADS, dim=DIM, dtype=DTYPE
    )

    print(f"{SHAPE}; {torch.get_num_threads()} threads; microseconds, median")
    grid = run_grid(arguments, store)
    show_grid(grid)

    ratios = rejected_rows(store, arguments.rounds)
    print(
        "\nequal accepted rows, k = 8 over k = 2 (limit 1.15): "
        + ", ".join(f"{n} {r:.2f}" for n, r in ratios.items())
    )

    book = bookkeeping(store, arguments.rounds)
    print("\nbookkeeping: begin + 32 x stage + plan, 8 requests, k = 4")
    print_table(
        ("", "median", "p10", "p90"),
        [(n, *(f"{v:.0f}" for v in s.values())) for n, s in book.items()],
    )

    memory = memory_growth(store, arguments.windows)
    print(
        f"\nmemory: {memory['growth_kib']} KiB more after {arguments.windows} windows than after 1,000"
    )
    write_json(
        arguments.json,
        {
            "shape": SHAPE,
            "grid": grid,
            "rejected_rows": ratios,
            "bookkeeping": book,
            "memory": memory,
        },
    )


if __name__ == "__main__":
    environment()
    main()
