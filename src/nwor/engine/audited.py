"""An embedded engine under audit: what it does, told to a shadow map.

    _forward    what attention is handed: durable rows of the page, then the step's own rows
    move, write rows on their way home, by the slots that they really go to
    verify      acceptance is known
    _transact   what is durable now, and whether it should be
    _retire     requests gone: their pages are nobody's

The map's pages are single rows here, since a sliding layer's page is a ring: page 0 is nobody's, then
come the slots of each group's store, then a staging area for each group, for the rows of one step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from nwor.audit import AuditLevel, Batch, Findings, Kind, ShadowMap, Violation
from nwor.audit.names import Ints
from nwor.engine.audited_bytes import EngineBytes, FinalRows
from nwor.engine.core import Engine
from nwor.engine.request import FinishReason, Request
from nwor.engine.sampling import Verdict
from nwor.engine.step import Segment, Sink
from nwor.engine.stopping import Cut
from nwor.engine.store import DurableStore, Group, LayerRows

logger = logging.getLogger("nwor")


@dataclass(frozen=True, slots=True, eq=False)
class _WatchedRows(LayerRows):
    """A layer's durable rows that tell the books what is written through."""

    books: Books

    def write(self, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Write rows, then say so."""
        LayerRows.write(self, slots, key, value)
        self.books.written(self, slots, key, value)


class Books:
    """The shadow map of an embedded engine, in the engine's own terms.

    Args:
        store: the engine's durable store.
        step_rows: most rows of a step.
        max_requests: requests that run at a time.
        max_length: longest sequence.
    """

    def __init__(
        self, store: DurableStore, *, step_rows: int, max_requests: int, max_length: int
    ) -> None:
        self.groups = list(store.groups.values())
        sizes = [group.rows.num_slots for group in self.groups]
        self.base = dict(zip(store.groups, np.cumsum([1, *sizes[:-1]]).tolist(), strict=True))
        first_staging = 1 + sum(sizes)
        self.staging = {
            name: first_staging + at * step_rows for at, name in enumerate(store.groups)
        }
        self.shadow = ShadowMap(
            num_pages=first_staging + len(sizes) * step_rows,
            page_size=1,
            windows=[group.window for group in self.groups],
            max_requests=max_requests,
            max_length=max_length,
            first_staging=first_staging,
            told=_log,
        )
        self.bytes: EngineBytes | None = None
        self._positions = np.arange(max_length)
        self._tables: list[Ints] = []
        self._slots: list[Ints] = []

    def forward(
        self, requests: Sequence[Request], segments: Sequence[Segment], drafts: int
    ) -> None:
        """Tell what attention is handed and what the step's rows are.

        Args:
            requests: whose rows they are.
            segments: the rows.
            drafts: 1 if all rows of a request but its first are drafts, 0 if none is.
        """
        lengths = np.array([s.length for s in segments], np.int64)
        own = np.concatenate([np.arange(s.start, s.start + s.length) for s in segments])
        of_row = np.repeat(np.arange(len(segments)), lengths)
        self._tables = [self._durable(group, segments) for group in self.groups]
        self._slots = [table[of_row, own] for table in self._tables]
        staged = [self.staging[group.name] + np.arange(len(own)) for group in self.groups]
        seen = [table.copy() for table in self._tables]
        for table, rows in zip(seen, staged, strict=True):
            table[of_row, own] = rows
        self.shadow.forward(
            Batch(
                [str(r.index) for r in requests],
                computed=np.array([s.durable for s in segments], np.int64),
                scheduled=lengths,
                drafts=(lengths - 1) * drafts,
                tables=seen,
                slots=staged,
            )
        )

    def _durable(self, group: Group, segments: Sequence[Segment]) -> Ints:
        """Return the durable slot of every position of the requests, ``[requests, positions]``."""
        pages = np.array([s.page for s in segments], np.int64)[:, None]
        slots: Ints = (
            self.base[group.name] + pages * group.capacity + self._positions % group.capacity
        )
        return slots

    def written(self, layer: LayerRows, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """One layer has written rows through."""
        if self.shadow.step is None:
            return
        if self.bytes is not None:
            self.bytes.expect(layer.group, layer.index, slots, key, value)
        if layer.index == 0:  # the layers of a group share their slots
            self._moved(layer.group.name, np.arange(len(slots)), slots)

    def moved(self, name: str, rows: Tensor, slots: Tensor) -> None:
        """A commit has moved staged rows of all layers of a group."""
        self._moved(name, rows.numpy(force=True), slots)

    def _moved(self, name: str, rows: Ints, slots: Tensor) -> None:
        self.shadow.moved(
            self.staging[name] + rows, self.base[name] + slots.numpy(force=True).astype(np.int64)
        )

    def end(self, kept: Sequence[int]) -> None:
        """Tell how many rows each request keeps, the bonus row among them."""
        durable = self.shadow.end_step(kept, self._tables, self._slots)
        if self.bytes is not None:
            self.bytes.check(self.shadow, durable.kept, self.base)


class AuditedEngine(Engine):
    """An engine that is watched; what it generates is the same.

    Prompts are run in chunks no longer than the smallest ring, so that every row of a chunk is stored.

    Args:
        model: as for `Engine`.
        level: ``metadata``, or ``bytes``, which fills stores and arenas with NaN.
        **options: as for `Engine`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        level: AuditLevel,
        **options: Any,  # noqa: ANN401 - those of `Engine`
    ) -> None:
        super().__init__(model, poison=level is AuditLevel.BYTES, **options)
        groups = list(self.store.groups.values())
        self._prefill_chunk = min(self._prefill_chunk, *(group.capacity for group in groups))
        self._pages = self.free_pages
        self.books = Books(
            self.store,
            step_rows=max(self._prefill_chunk, self.cache.max_rows),
            max_requests=self._pages,
            max_length=self.max_length,
        )
        self.final: FinalRows | None = None
        if level is AuditLevel.BYTES:
            self.books.bytes = EngineBytes(groups)
            self.final = FinalRows(groups)
        self._hook()

    @property
    def prefill_chunk(self) -> int:
        """Most prompt tokens per forward."""
        return self._prefill_chunk

    @property
    def findings(self) -> Findings:
        """What was found and how much was looked at."""
        return self.books.shadow.findings

    def _hook(self) -> None:
        """Watch the rows' ways home: commits, and writes of single layers."""
        for index, layer in self.store.layers.items():
            self.store.layers[index] = _WatchedRows(
                layer.group, layer.index, layer.key, layer.value, self.books
            )
        groups = self.cache._groups  # noqa: SLF001 - nobody else needs to get between
        for name, group in list(groups.items()):
            groups[name] = replace(group, move=self._watched(name, group.move, group.arena))

    def _watched(
        self,
        name: str,
        move: Callable[[Tensor, Tensor], None],
        arena: Any,  # noqa: ANN401 - KVRows
    ) -> Callable[[Tensor, Tensor], None]:
        books, group = self.books, self.store.groups[name]

        def watched(rows: Tensor, slots: Tensor) -> None:
            if books.bytes is not None:
                for layer in range(arena.num_layers):
                    key, value = arena.key[layer, 0][rows], arena.value[layer, 0][rows]
                    books.bytes.expect(group, layer, slots, key, value)
            try:
                move(rows, slots)
            finally:  # a mover that fails is finished by another
                books.moved(name, rows, slots)

        return watched

    def _forward(
        self,
        requests: Sequence[Request],
        tokens: Sequence[int],
        segments: Sequence[Segment],
        sink: Sink,
        keep: Sequence[int] | None = None,
    ) -> Tensor:
        prompt = keep is not None
        self.books.forward(requests, segments, drafts=0 if prompt else 1)
        if prompt:
            self.books.shadow.sampled()  # nobody can reject rows of a prompt
        logits = super()._forward(requests, tokens, segments, sink, keep)
        if prompt:
            self.books.end([s.length for s in segments])
        return logits

    def _transact(
        self,
        segments: Sequence[Segment],
        step: Callable[[Sink], tuple[list[Verdict], list[Cut]]],
    ) -> tuple[list[Verdict], list[Cut]]:
        def watched(sink: Sink) -> tuple[list[Verdict], list[Cut]]:
            found = step(sink)
            self.books.shadow.sampled()
            return found

        verdicts, cuts = super()._transact(segments, watched)
        self.books.end([1 + min(v.accepted, c.length) for v, c in zip(verdicts, cuts, strict=True)])
        self.findings.tokens += sum(cut.length for cut in cuts)
        self.findings.cut += sum(
            v.accepted + 1 - c.length
            for v, c in zip(verdicts, cuts, strict=True)
            if c.reason is FinishReason.STOP
        )
        return verdicts, cuts

    def _retire(self, active: Sequence[Request]) -> list[Request]:
        gone = [r for r in active if r.finish is not None and r.page is not None]
        if self.final is not None:
            for request in gone:
                self.final.keep(request)
        self.books.shadow.freed([str(request.index) for request in gone])
        running = super()._retire(active)
        held = [*self._free, *(request.page for request in running)]
        if sorted(held, key=str) != sorted(range(self._pages), key=str):
            self.books.shadow.report(Kind.LEAK, request=f"pages {held} of {self._pages}")
        window = self.cache.window
        if window is not None and window.is_open:
            self.books.shadow.report(Kind.LEAK, request="a window is open between steps")
        return running


def _log(violation: Violation) -> None:
    logger.error("nwor audit: %s (later ones of this kind are only counted)", violation)
