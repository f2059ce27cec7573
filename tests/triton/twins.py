"""The host's overlay and the device's, over equal stores, through the same steps.

The host's overlay with plain loops is the reference; it has an oracle of its own in tests/store. After
every stage of a window both must agree in every table entry, every slot and every byte of the stores,
gaps and staging pages included, and at the end in what is noted and counted.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from nwor import KVRows, Layout
from nwor.store.device_overlay import DeviceBatch, DeviceGroup, DeviceOverlay
from nwor.store.device_state import BEHIND, FILLED, HELD, NOTED
from nwor.store.overlay import Overlay
from nwor.store.paged import OverlayGroup, VerifyBatch
from nwor.store.staging import NOBODY
from nwor.testing import make_store, random_rows

DEVICE = torch.device(os.environ.get("NWOR_TEST_DEVICE", "cpu"))
MAX_TOKENS = 400


@dataclass(frozen=True)
class Spec:
    """One cache group."""

    page_size: int = 4
    layout: Layout = Layout.NHD
    dtype: torch.dtype = torch.float32
    layers: int = 2
    heads: int = 1
    dim: int = 4

    def store(self, pages: int, seed: int) -> KVRows:
        rows = make_store(
            self.layout,
            layers=self.layers,
            pages=pages,
            page_size=self.page_size,
            heads=self.heads,
            dim=self.dim,
            dtype=self.dtype,
        )
        whole = whole_bytes(rows)
        whole.copy_(random_rows(1, 1, whole.numel(), torch.uint8, seed).flatten())
        return rows


@dataclass
class Request:
    computed: int
    pages: list[list[int]] = field(default_factory=list)


def whole_bytes(rows: KVRows) -> torch.Tensor:
    """All bytes of the allocation that holds K and V."""
    assert rows.key.untyped_storage().data_ptr() == rows.value.untyped_storage().data_ptr()
    return torch.empty(0, dtype=torch.uint8, device=rows.device).set_(rows.key.untyped_storage())


def twin(rows: KVRows) -> KVRows:
    """A copy with the same strides, on the device."""
    flat = whole_bytes(rows).to(DEVICE, copy=True)
    views = (
        flat.view(view.dtype).as_strided(view.shape, view.stride(), view.storage_offset())
        for view in (rows.key, rows.value)
    )
    return KVRows(*views)


class Twins:
    """Both overlays, and the engine that runs them.

    Args:
        specs: the cache groups.
        shared: group whose store each group uses; its own if not given.
        leases: staging leases.
        lines: batch rows.
    """

    def __init__(
        self,
        specs: Sequence[Spec],
        *,
        shared: Sequence[int] | None = None,
        leases: int = 3,
        lines: int = 6,
        durable: int = 60,
        max_drafts: int = 3,
        seed: int = 0,
    ) -> None:
        self.specs, groups = specs, len(specs)
        self.first_page = durable
        self.edited_newcomers = False
        self.rng = np.random.default_rng(seed)
        shared = range(groups) if shared is None else shared
        pages = durable + 2 * groups * leases
        own = {at: specs[at].store(pages, seed * 16 + at) for at in set(shared)}
        copies = {at: twin(rows) for at, rows in own.items()}
        self.rows = [own[at] for at in shared]
        self.copies = [copies[at] for at in shared]
        columns = [-(-MAX_TOKENS // spec.page_size) + 1 for spec in specs]
        self.tables = [torch.zeros(lines, n, dtype=torch.int32) for n in columns]
        self.slots = [torch.full((MAX_TOKENS,), -1, dtype=torch.int64) for _ in specs]
        # Like engines': a view of something wider, and rows of one tensor.
        self.their_tables = [
            torch.zeros(lines, n + 3, dtype=torch.int32, device=DEVICE)[:, :n] for n in columns
        ]
        block = torch.full((groups, MAX_TOKENS), -1, dtype=torch.int64, device=DEVICE)
        self.their_slots = list(block)
        self.host = Overlay(
            [
                OverlayGroup(table, slots, (rows,))
                for table, slots, rows in zip(self.tables, self.slots, self.rows, strict=True)
            ],
            first_page=durable,
            num_leases=leases,
        )
        self.device = DeviceOverlay(
            [
                DeviceGroup(table, slots, (rows,))
                for table, slots, rows in zip(
                    self.their_tables, self.their_slots, self.copies, strict=True
                )
            ],
            first_page=durable,
            num_leases=leases,
            max_requests=lines,
            max_tokens=MAX_TOKENS,
            max_drafts=max_drafts,
        )
        self.free = list(range(1, durable))
        self.requests: dict[str, Request] = {}
        self.batch: list[str] = []

    # -- the engine's bookkeeping ----------------------------------------------------------------

    def add(self, name: str, computed: int, pages: Sequence[Sequence[int]] = ()) -> None:
        """A request whose first rows are durable already, whatever their bits."""
        held = [list(of) for of in pages] or [[] for _ in self.specs]
        self.requests[name] = Request(computed, held)
        self.batch.append(name)
        self.reserve(name, computed)

    def join(self, name: str, base: str) -> None:
        """A request on the longest prefix of full pages that `base` has once its bonus row is in."""
        length = self.requests[base].computed + 1
        length -= length % math.lcm(*(spec.page_size for spec in self.specs))
        pages = [
            of[: length // spec.page_size]
            for of, spec in zip(self.requests[base].pages, self.specs, strict=True)
        ]
        self.add(name, length, pages)

    def reserve(self, name: str, length: int) -> None:
        for pages, spec in zip(self.requests[name].pages, self.specs, strict=True):
            while len(pages) * spec.page_size < length:
                pages.append(self.free.pop(0))

    def finish(self, name: str) -> None:
        mine = self.requests.pop(name).pages
        others = {page for r in self.requests.values() for pages in r.pages for page in pages}
        self.free += [page for pages in mine for page in pages if page not in others]
        self.batch.remove(name)
        self.host.release(name)
        self.device.release(name)

    def scramble(self, page: int) -> None:
        """Another request's prefill: new rows on a durable page, the same in both stores."""
        for spec, ours, theirs in zip(self.specs, self.rows, self.copies, strict=True):
            for row in range(spec.page_size):
                for view, copy in ((ours.key, theirs.key), (ours.value, theirs.value)):
                    view[:, page, row] = self.random_row(spec)
                    copy[:, page, row] = view[:, page, row].to(copy.device)

    # -- one step --------------------------------------------------------------------------------

    def prepare(self, lengths: Mapping[str, int]) -> None:
        """Fill in tables and slot mappings; `lengths` are the rows of each request of the batch."""
        names = [name for name in self.batch if lengths.get(name)]
        self.lines = {name: line for line, name in enumerate(names)}
        counts = [lengths[name] for name in names]
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        self.first = dict(zip(names, starts.tolist(), strict=False))
        self.counts = dict(zip(names, counts, strict=True))
        lines = self.tables[0].shape[0]
        padded = np.full(lines + 1, starts[-1], np.int32)
        padded[: len(starts)] = starts
        self.query_start_loc = torch.from_numpy(padded).to(DEVICE)
        positions = np.full(MAX_TOKENS, 77, np.int64)  # padding holds what was there before
        for name in names:
            self.reserve(name, self.requests[name].computed + self.counts[name])
            first, count = self.first[name], self.counts[name]
            positions[first : first + count] = self.requests[name].computed + np.arange(count)
        self.positions = torch.from_numpy(positions).to(DEVICE)
        for group, spec in enumerate(self.specs):
            table, slots = self.tables[group], self.slots[group]
            slots.fill_(-1)
            for name, line in self.lines.items():  # other columns keep what was there before
                pages = self.requests[name].pages[group]
                table[line, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
                for token in range(self.first[name], self.first[name] + self.counts[name]):
                    page, row = divmod(int(positions[token]), spec.page_size)
                    slots[token] = pages[page] * spec.page_size + row
            self.publish(self.their_tables[group], table)
            self.publish(self.their_slots[group], slots)

    def publish(self, theirs: torch.Tensor, ours: torch.Tensor) -> None:
        """What the engine's own kernels write before a window begins."""
        theirs.copy_(ours)

    def begin(self, drafts: Mapping[str, int], newcomers: Sequence[str] = ()) -> None:
        """Open both windows; `drafts` are those of each verifying request."""
        names = [name for name in self.lines if drafts.get(name)]

        def ints(values: Sequence[int]) -> np.ndarray:
            return np.array(values, np.int64)

        lines = ints([self.lines[name] for name in names])
        lengths = ints([self.counts[name] for name in names])
        k = ints([drafts[name] for name in names])
        first = ints([self.first[name] for name in names])
        computed = ints([self.requests[name].computed for name in names])
        new = ints([self.lines[name] for name in newcomers])
        self.window = self.host.begin(VerifyBatch(names, lines, first, computed, lengths, k), new)
        self.their_window = self.device.begin(
            DeviceBatch(names, lines, lengths, k, self.query_start_loc, self.positions, new)
        )
        assert self.their_window.requests == self.window.requests

    def forward(self) -> None:
        """Write random bits wherever the slot mappings say, in both stores."""
        for group, spec in enumerate(self.specs):
            for slot in self.slots[group].tolist():
                if slot >= 0:
                    key, value = (self.random_row(spec) for _ in range(2))
                    page, row = divmod(slot, spec.page_size)
                    for rows in (self.rows[group], self.copies[group]):
                        rows.key[:, page, row] = key.to(rows.device)
                        rows.value[:, page, row] = value.to(rows.device)

    def random_row(self, spec: Spec) -> torch.Tensor:
        """``[layers, heads, dim]``."""
        seed = int(self.rng.integers(2**31))
        return random_rows(spec.layers, spec.heads, spec.dim, spec.dtype, seed)

    def commit(self, rejected: Mapping[str, int]) -> None:
        """Close both windows; advance the watermarks."""
        names, batch = self.window.requests, self.window.batch
        counts = [int(k) - rejected[name] for name, k in zip(names, batch.num_drafts, strict=True)]
        self.window.commit(counts)
        numbers = np.full(self.tables[0].shape[0], 99, np.int32)  # rows of others: garbage
        for name, line in self.lines.items():
            numbers[line] = rejected.get(name, 0)
        self.their_window.commit(torch.from_numpy(numbers).to(DEVICE))

    def advance(self, rejected: Mapping[str, int]) -> None:
        for name, count in self.counts.items():
            self.requests[name].computed += count - rejected.get(name, 0)

    # -- comparison ------------------------------------------------------------------------------

    def compare(self) -> None:
        """Tables, slot mappings and all bytes of all stores are the same in both."""
        for group in range(len(self.specs)):
            ours, theirs = self.tables[group], self.their_tables[group].cpu()
            assert torch.equal(ours, theirs), f"table of group {group}"
            assert torch.equal(self.slots[group], self.their_slots[group].cpu()), f"slots {group}"
            ours, theirs = whole_bytes(self.rows[group]), whole_bytes(self.copies[group]).cpu()
            assert torch.equal(ours, theirs), f"store of group {group}"

    def compare_books(self) -> None:
        """What is noted of leases in use, and all counters."""
        ours, theirs = self.host.pages, self.device.pages
        assert ours.requests == theirs.requests
        held = [lease for lease in range(ours.num_leases) if (ours.held[lease] != NOBODY).any()]
        notes = self.device.state.notes.cpu().numpy()[held]
        # A page that was noted under an older generation counts as standing for nothing.
        current = notes[..., NOTED] == theirs.generation[held][:, None, None]
        assert (np.where(current, notes[..., HELD], NOBODY) == ours.held[held]).all()
        assert (np.where(current, notes[..., BEHIND], NOBODY) == ours.durable[held]).all()
        assert (np.where(current, notes[..., FILLED], 0) == ours.filled[held]).all()
        assert (self.device.state.under == -1).all()
        assert self.host.refused == self.device.refused
        self.device.collect(wait=True)
        assert self.device.metrics.snapshot() == self.host.metrics.snapshot()
        assert not self.device.faults

    def step(
        self,
        drafts: Mapping[str, int],
        rejected: Mapping[str, int],
        *,
        rows: Mapping[str, int] | None = None,
        newcomers: Sequence[str] = (),
        abort: bool = False,
    ) -> None:
        """One step, compared after every stage.

        Args:
            drafts: drafts of each verifying request.
            rejected: how many of them.
            rows: rows of requests that have others than bonus and drafts.
            newcomers: requests that begin in this step, on pages of another one.
            abort: close without a commit.
        """
        self.prepare({name: k + 1 for name, k in drafts.items() if k} | dict(rows or {}))
        before = [tensor.clone() for tensor in (*self.tables, *self.slots)]
        self.begin(drafts, newcomers)
        lines = [self.lines[name] for name in newcomers]
        self.edited_newcomers = any(
            bool((table[lines] >= self.first_page).any()) for table in self.tables
        )
        self.compare()
        self.forward()
        if abort:
            self.window.abort()
            self.their_window.abort()
        else:
            self.commit(rejected)
        self.compare()
        for now, then in zip((*self.tables, *self.slots), before, strict=True):
            assert torch.equal(now, then)
        self.compare_books()
        if not abort:
            self.advance(rejected)
