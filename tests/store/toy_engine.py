"""A paged engine in plain Python: block tables, slot mappings, a writer and a reader.

It is the oracle of the overlay tests. What a row holds follows from (request, position, token), so
the rows an attention kernel should see, and the rows the durable store should hold, are known
without asking the code under test.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from nwor.layout import KVRows
from nwor.store.overlay import Overlay
from nwor.store.paged import OverlayGroup, VerifyBatch

CANARY = 0x5A5A
MAX_TOKENS = 128


@dataclass
class Request:
    name: str
    tokens: list[int]  # accepted tokens with durable rows
    pages: list[list[int]] = field(default_factory=list)  # per group


class ToyEngine:
    """Groups of layers over shared or separate storage, with one page pool like vLLM's."""

    def __init__(
        self,
        page_sizes: list[int],
        *,
        num_leases: int = 4,
        durable_pages: int = 64,
        max_requests: int = 8,
        mover: str = "torch",
        loops: str = "python",
        layers: int = 2,
        share: bool = True,
    ) -> None:
        self.page_sizes = page_sizes
        groups = len(page_sizes)
        staging = 2 * groups * num_leases
        self.first_staging = durable_pages
        self.free = list(range(1, durable_pages))
        self.requests: dict[str, Request] = {}
        self.batch: list[str] = []  # batch order
        shared: dict[int, KVRows] = {}
        self.rows: list[KVRows] = []
        for size in page_sizes:
            rows = shared.get(size) if share else None
            if rows is None:
                rows = KVRows.allocate(
                    layers=layers,
                    pages=durable_pages + staging,
                    page_size=size,
                    heads=2,
                    dim=4,
                    dtype=torch.int32,
                )
                rows.key.fill_(CANARY)
                rows.value.fill_(-CANARY)
                shared[size] = rows
            self.rows.append(rows)
        columns = [MAX_TOKENS // size + 1 for size in page_sizes]
        self.tables = [torch.zeros(max_requests, n, dtype=torch.int32) for n in columns]
        self.slots = [torch.full((256,), -1, dtype=torch.int64) for _ in page_sizes]
        self.expected = {id(rows): (rows.key.clone(), rows.value.clone()) for rows in self.rows}
        self.overlay = Overlay(
            [
                OverlayGroup(table, slots, (rows,))
                for table, slots, rows in zip(self.tables, self.slots, self.rows, strict=True)
            ],
            first_page=durable_pages,
            num_leases=num_leases,
            mover=mover,
            loops=loops,
        )

    # -- the engine's own bookkeeping ------------------------------------------------------------

    def add(self, name: str, tokens: list[int]) -> None:
        """Prefill a request: its rows go straight to durable pages."""
        request = Request(name, list(tokens), [[] for _ in self.page_sizes])
        self.requests[name] = request
        self.batch.append(name)
        self.reserve(request, len(tokens))
        for position, token in enumerate(tokens):
            for group in range(len(self.page_sizes)):
                slot = self.slot(request, group, position)
                self.write(group, slot, name, position, token)
                self.expect(group, slot, name, position, token)

    def reserve(self, request: Request, length: int) -> None:
        for group, size in enumerate(self.page_sizes):
            while len(request.pages[group]) * size < length:
                request.pages[group].append(self.free.pop(0))

    def finish(self, name: str) -> None:
        request = self.requests.pop(name)
        self.batch.remove(name)
        for pages in request.pages:
            self.free.extend(pages)  # first in, first out: reused late, as by a real pool
        self.overlay.release(name)

    def slot(self, request: Request, group: int, position: int) -> int:
        size = self.page_sizes[group]
        return request.pages[group][position // size] * size + position % size

    def value(self, group: int, layer: int, name: str, position: int, token: int) -> int:
        seed = sum(ord(c) << (8 * i) for i, c in enumerate(name[:2]))
        return (seed * 7919 + position * 1009 + token * 31 + layer * 7 + group) % (2**30)

    def write(self, group: int, slot: int, name: str, position: int, token: int) -> None:
        """The stock writer: one row into whatever slot the mapping says; -1 is skipped."""
        if slot < 0:
            return
        rows, size = self.rows[group], self.page_sizes[group]
        for layer in range(rows.num_layers):
            value = self.value(group, layer, name, position, token)
            rows.key[layer, slot // size, slot % size] = value
            rows.value[layer, slot // size, slot % size] = -value

    def expect(self, group: int, slot: int, name: str, position: int, token: int) -> None:
        key, value = self.expected[id(self.rows[group])]
        size = self.page_sizes[group]
        for layer in range(key.shape[0]):
            number = self.value(group, layer, name, position, token)
            key[layer, slot // size, slot % size] = number
            value[layer, slot // size, slot % size] = -number

    # -- one verify step -------------------------------------------------------------------------

    def prepare(self, drafts: dict[str, list[int]], extra: int = 0) -> list[tuple[str, int, int]]:
        """Fill tables and slot mappings as an engine does; return (request, position, token) rows.

        A request in `drafts` brings its bonus token and its drafts; `extra` more accepted tokens
        come before them, as when a prefill chunk ends in the same step.
        """
        step: list[tuple[str, int, int]] = []
        self.query: dict[str, tuple[int, int]] = {}
        for name in self.batch:
            if name not in drafts:
                continue
            request = self.requests[name]
            start = len(request.tokens)
            tokens = [11 + i for i in range(extra)] + [7, *drafts[name]]
            self.reserve(request, start + len(tokens))
            self.query[name] = (len(step), len(tokens))
            step += [(name, start + i, token) for i, token in enumerate(tokens)]
        for group, (table, slots) in enumerate(zip(self.tables, self.slots, strict=True)):
            table.zero_()
            slots.fill_(-1)
            for row, name in enumerate(self.batch):
                pages = self.requests[name].pages[group]
                table[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
            for token, (name, position, _) in enumerate(step):
                slots[token] = self.slot(self.requests[name], group, position)
        return step

    def verify_batch(self, drafts: dict[str, list[int]]) -> VerifyBatch:
        names = [name for name in self.batch if drafts.get(name)]

        def ints(values: list[int]) -> np.ndarray:
            return np.array(values, np.int64)

        return VerifyBatch(
            names,
            table_rows=ints([self.batch.index(name) for name in names]),
            first_rows=ints([self.query[name][0] for name in names]),
            computed=ints([len(self.requests[name].tokens) for name in names]),
            query_lens=ints([self.query[name][1] for name in names]),
            num_drafts=ints([len(drafts[name]) for name in names]),
        )

    def forward(self, step: list[tuple[str, int, int]], *, fail_after: int | None = None) -> None:
        """Write all rows where the slot mappings say, then read them as attention would."""
        for group in range(len(self.page_sizes)):
            if fail_after is not None and group >= fail_after:
                raise RuntimeError("forward failed")
            for token, (name, position, drafted) in enumerate(step):
                self.write(group, int(self.slots[group][token]), name, position, drafted)
        for group in range(len(self.page_sizes)):
            self.check_attention(group, step)

    def check_attention(self, group: int, step: list[tuple[str, int, int]]) -> None:
        size, rows = self.page_sizes[group], self.rows[group]
        for name, (first, length) in self.query.items():
            request = self.requests[name]
            tokens = request.tokens + [token for _, _, token in step[first : first + length]]
            table = self.tables[group][self.batch.index(name)]
            for layer in range(rows.num_layers):
                seen = [
                    int(rows.key[layer, table[p // size], p % size, 0, 0])
                    for p in range(len(tokens))
                ]
                want = [self.value(group, layer, name, p, t) for p, t in enumerate(tokens)]
                assert seen == want, f"group {group} layer {layer} request {name}"

    def accept(self, drafts: dict[str, list[int]], accepted: dict[str, int], step: list) -> None:
        """Advance the watermarks and say what the durable store must hold now."""
        for name, (first, length) in self.query.items():
            request = self.requests[name]
            kept = length - len(drafts[name]) + accepted.get(name, 0)
            for _, position, token in step[first : first + kept]:
                for group in range(len(self.page_sizes)):
                    self.expect(group, self.slot(request, group, position), name, position, token)
                request.tokens.append(token)

    def written_through(self, name: str, step: list[tuple[str, int, int]]) -> None:
        """A request that was refused writes all its rows durable, rejected ones too."""
        first, length = self.query[name]
        for _, position, token in step[first : first + length]:
            for group in range(len(self.page_sizes)):
                slot = self.slot(self.requests[name], group, position)
                self.expect(group, slot, name, position, token)

    # -- audits ----------------------------------------------------------------------------------

    def audit(self) -> None:
        """Durable pages hold exactly what was accepted, bit for bit; nothing else was touched."""
        for rows in self.rows:
            key, value = self.expected[id(rows)]
            end = self.first_staging
            assert torch.equal(rows.key[:, :end], key[:, :end])
            assert torch.equal(rows.value[:, :end], value[:, :end])
        self.overlay.pages.check_integrity()

    def snapshot(self) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in (*self.tables, *self.slots)]


def step(
    engine: ToyEngine, drafts: dict[str, list[int]], accepted: dict[str, int], extra: int = 0
) -> None:
    """One verify step, audited: tables restored, durable store exact."""
    rows = engine.prepare(drafts, extra)
    before = engine.snapshot()
    window = engine.overlay.begin(engine.verify_batch(drafts))
    engine.forward(rows)
    for name in (n for n in engine.query if drafts[n] and n not in window.requests):
        engine.written_through(name, rows)
    window.commit([accepted[name] for name in window.requests])
    for now, then in zip(engine.snapshot(), before, strict=True):
        assert torch.equal(now, then)
    engine.accept(drafts, accepted, rows)
    engine.audit()
