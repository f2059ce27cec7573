"""A paged engine that is nothing but metadata: tables, slot mappings, lengths. No K, no V.

It drives `ShadowMap` as any engine can. Drafts go to private staging pages and accepted rows are
copied home, in the plainest way. `bug` names one thing that it gets wrong.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from nwor.audit import Batch, ShadowMap

PAGE, PAGES, FIRST_STAGING, REQUESTS, LONGEST = 4, 288, 256, 6, 60
WINDOWS = (None, 8)  # two groups: full attention and a sliding window


@dataclass
class Request:
    pages: list[list[int]]
    length: int = 0
    place: int = 0


class ToyEngine:
    def __init__(self, bug: str = "") -> None:
        self.bug = bug
        self.free = list(range(1, FIRST_STAGING))
        self.requests: dict[str, Request] = {}
        self.gone: set[str] = set()
        self.tables = [np.zeros((REQUESTS, LONGEST // PAGE + 2), np.int32) for _ in WINDOWS]
        self.slots = [np.full(256, -1) for _ in WINDOWS]
        self.computed = np.zeros(REQUESTS, np.int64)
        self.audit = ShadowMap(
            num_pages=PAGES,
            page_size=PAGE,
            windows=WINDOWS,
            max_requests=REQUESTS,
            max_length=LONGEST + 1,
            first_staging=FIRST_STAGING,
        )

    # -- requests --------------------------------------------------------------------------------

    def add(self, name: str, *, like: str = "") -> None:
        """Enter a request; `like` shares the full pages of another one's prompt."""
        taken = {r.place for r in self.requests.values()}
        place = next(i for i in range(REQUESTS) if i not in taken)
        request = Request([[] for _ in WINDOWS], place=place)
        if like:
            shared = self.requests[like].length // PAGE
            if self.bug == "publish_a_page_before_it_is_full":
                shared += 1
            request.pages = [pages[:shared] for pages in self.requests[like].pages]
            request.length = shared * PAGE
            if self.bug == "write_into_a_shared_page":
                request.length -= 1
        self.requests[name] = request

    def finish(self, name: str) -> None:
        mine = {page for pages in self.requests.pop(name).pages for page in pages}
        others = {p for r in self.requests.values() for pages in r.pages for p in pages}
        self.free += sorted(mine - others)
        self.gone.add(name)

    def slot(self, name: str, group: int, position: int) -> int:
        return self.requests[name].pages[group][position // PAGE] * PAGE + position % PAGE

    # -- one step --------------------------------------------------------------------------------

    def step(self, work: dict[str, tuple[int, int, int]]) -> None:
        """Run ``{request: (certain rows, drafts, accepted drafts)}``."""
        names = list(work)
        self.allocate(work)
        rows = [
            (name, self.requests[name].length + i, i >= certain)
            for name, (certain, drafts, _) in work.items()
            for i in range(certain + drafts)
        ]
        self.fill(names, rows)
        honest = [
            (table.copy(), slots.copy())
            for table, slots in zip(self.tables, self.slots, strict=True)
        ]
        verifying = [name for name in names if work[name][1]]
        if self.bug != "write_drafts_through":
            self.stage(verifying, names, rows)
        self.spoil(names, rows)
        self.audit.forward(
            Batch(
                names,
                computed=self.computed[: len(names)],
                scheduled=np.array([work[name][0] + work[name][1] for name in names]),
                drafts=np.array([work[name][1] for name in names]),
                tables=self.tables,
                slots=self.slots,
            )
        )
        if self.bug != "commit_before_sampling":
            self.audit.sampled()
        accepted = [work[name][2] for name in names]
        if self.bug == "counts_by_batch_row_after_a_reorder":
            accepted = accepted[1:] + accepted[:1]
        kept = {
            name: self.requests[name].length + work[name][0] + min(count, work[name][1])
            for name, count in zip(names, accepted, strict=True)
        }
        if self.bug != "write_drafts_through":
            self.commit(verifying, rows, kept, honest)
        if self.bug != "tables_not_restored":
            for (table, slots), (was, mapped) in zip(
                zip(self.tables, self.slots, strict=True), honest, strict=True
            ):
                table[:] = was
                slots[:] = mapped
        self.audit.end_step([work[name][0] + work[name][2] for name in names])
        for name in names:
            self.requests[name].length += work[name][0] + work[name][2]

    def allocate(self, work: dict[str, tuple[int, int, int]]) -> None:
        self.audit.freed(self.gone)
        self.gone = set()
        for name, (certain, k, _) in work.items():
            request = self.requests[name]
            for pages in request.pages:
                while len(pages) * PAGE < request.length + certain + k:
                    pages.append(self.free.pop(0))

    def fill(self, names: list[str], rows: list[tuple[str, int, bool]]) -> None:
        for row, name in enumerate(names):
            self.computed[row] = self.requests[name].length
        for group, (table, slots) in enumerate(zip(self.tables, self.slots, strict=True)):
            table[:] = 0
            slots[:] = -1
            for row, name in enumerate(names):
                pages = self.requests[name].pages[group]
                table[row, : len(pages)] = pages
            for at, (name, position, _) in enumerate(rows):
                slots[at] = self.slot(name, group, position)

    def staged(self, name: str, group: int, position: int) -> int:
        side = position // PAGE % 2
        page = FIRST_STAGING + (self.requests[name].place * 2 + group) * 2 + side
        return page * PAGE + position % PAGE

    def stage(
        self, verifying: list[str], names: list[str], rows: list[tuple[str, int, bool]]
    ) -> None:
        """Show staging pages in place of those a window touches."""
        for group, (table, slots) in enumerate(zip(self.tables, self.slots, strict=True)):
            for name in verifying:
                length = self.requests[name].length
                below = range(length - length % PAGE, length)
                if self.bug == "fill_in_nothing":
                    below = range(0)
                self.move([(self.slot(name, group, p), self.staged(name, group, p)) for p in below])
            for at, (name, position, _) in enumerate(rows):
                if name in verifying:
                    slots[at] = self.staged(name, group, position)
                    table[names.index(name), position // PAGE] = int(slots[at]) // PAGE

    def commit(
        self,
        verifying: list[str],
        rows: list[tuple[str, int, bool]],
        kept: dict[str, int],
        honest: list[tuple[np.ndarray, np.ndarray]],
    ) -> None:
        for group, (_, mapped) in enumerate(honest):
            pairs = [
                (self.staged(name, group, position), int(mapped[at]))
                for at, (name, position, _) in enumerate(rows)
                if name in verifying and position < kept[name]
            ]
            if self.bug == "lose_the_last_row":
                pairs = pairs[:-1]
            self.move(pairs)

    def move(self, pairs: list[tuple[int, int]]) -> None:
        if pairs:
            source, target = np.array(pairs, np.int64).T
            self.audit.moved(source, target)

    def spoil(self, names: list[str], rows: list[tuple[str, int, bool]]) -> None:
        """Get wrong what kernels will see, once the engine has something to get wrong."""
        old = [r for r, n in enumerate(names) if self.requests[n].length >= 2 * PAGE]
        if old:
            self.spoil_tables(old, names)
        slots, last = self.slots[0], len(rows) - 1
        match self.bug:
            case "null_page_write":
                slots[last] = 0
            case "negative_slot":
                slots[last] = -1
            case "slot_outside_the_cache":
                slots[last] = PAGES * PAGE + 5
            case "two_rows_in_one_slot" if last:
                slots[last] = slots[last - 1]
            case "early_free" if len(old) > 1:
                pages = self.requests[names[old[1]]].pages[0]
                at = next(i for i, row in enumerate(rows) if row[0] == names[old[0]])
                slots[at] = pages[0] * PAGE

    def spoil_tables(self, old: list[int], names: list[str]) -> None:
        """Get wrong what the first of the batch rows `old`, which have some pages, will read."""
        table, first, name = self.tables[0], old[0], names[old[0]]
        length = self.requests[name].length
        match self.bug:
            case "stale_block_table_row" if len(old) > 1:
                table[first, 0] = table[old[1], 0]
            case "page_nobody_wrote":
                table[first, 0] = FIRST_STAGING - 1
            case "two_pages_swapped":
                table[first, :2] = table[first, 1::-1]
            case "staging_page_of_an_earlier_window":
                table[first, (length - 1) // PAGE] = self.staged(name, 0, length - 1) // PAGE
            case "optimistic_eviction":
                self.tables[1][first, (length - WINDOWS[1] + 1) // PAGE] = 0
            case "length_off_by_one":
                self.computed[first] += 1
            case "page_outside_the_cache":
                table[first, 0] = PAGES + 5


def live(engine: ToyEngine, seed: int, steps: int = 120) -> ToyEngine:
    """Let requests come, share prefixes, verify and go, at random."""
    rng = random.Random(seed)
    serial = 0
    for _ in range(steps):
        fresh: dict[str, tuple[int, int, int]] = {}
        if len(engine.requests) < REQUESTS - 1 and rng.random() < 0.4:
            name, serial = f"r{serial}", serial + 1
            parents = [n for n, r in engine.requests.items() if r.length > PAGE]
            engine.add(name, like=rng.choice(parents) if parents and rng.random() < 0.5 else "")
            fresh[name] = (rng.randint(1, 11), 0, 0)
        work = {}
        for name, request in list(engine.requests.items()):
            if name in fresh:
                continue
            if request.length > LONGEST - 20:
                engine.finish(name)
            else:
                k = rng.randint(0, PAGE - 1)
                work[name] = (1, k, rng.randint(0, k))
        order = list((work | fresh).items())
        rng.shuffle(order)
        if order:
            engine.step(dict(order))
    return engine
