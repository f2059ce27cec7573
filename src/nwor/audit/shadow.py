"""The shadow map: what metadata says every slot holds, and whether it should be there.

    freed(requests)       requests that are gone: their pages are nobody's
    forward(batch)        what kernels will read and write, as they will see it
    sampled()             acceptance is known
    end_step(kept)        what should be durable now, and whether it is
    moved(source, target) rows are copied; wherever it happens

It is told what the engine does and keeps its own books; it takes no engine's word for what is right.
K and V are never read: it costs the same for every model and works on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from nwor.audit.findings import Findings, Kind, Violation
from nwor.audit.names import OWNER, POSITION, STEP, Ints, RowNames
from nwor.audit.reads import Reads
from nwor.audit.records import EVERYTHING, Records
from nwor.audit.reporter import Reporter
from nwor.audit.step import Batch, IntArray, Step, checked
from nwor.audit.writes import Writes
from nwor.errors import InputError, StateError


class _Phase(Enum):
    BETWEEN = auto()
    FORWARD = auto()
    SAMPLED = auto()


@dataclass(frozen=True, slots=True)
class Durable:
    """What a step changed in durable pages, for a comparison of bytes.

    Attributes:
        slots: ``[groups, rows]``, durable slot of each row, accepted or not.
        kept: those of accepted rows, of all groups.
        moved: source and target slots of the rows that went home.
    """

    slots: Ints
    kept: Ints
    moved: list[tuple[Ints, Ints]]


class ShadowMap:
    """Watches the slots of one paged KV cache.

    All cache groups share one page space. Page 0 is the null page: nobody's. Engines that use it for
    rows, or whose groups have pages of their own, shift their ids.

    Args:
        num_pages: pages, the null page and staging pages included.
        page_size: rows of a page.
        windows: for each cache group the positions that attention looks back, itself included; None
            for all of them.
        max_requests: requests that have pages at a time.
        max_length: most rows of a request.
        first_staging: first page that is not durable; None: all are.
        told: called with the first violation of each kind.

    Attributes:
        step: the step that is going on, None between steps.

    Raises:
        InputError: a size out of range.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        windows: Sequence[int | None] = (None,),
        max_requests: int,
        max_length: int,
        first_staging: int | None = None,
        told: Callable[[Violation], None] = lambda _: None,
    ) -> None:
        sizes = {
            "num_pages": num_pages - 1,  # the null page holds nothing
            "page_size": page_size,
            "windows": len(windows),
            "max_requests": max_requests,
            "max_length": max_length,
        }
        for name, size in sizes.items():
            if size < 1:
                raise InputError(f"{name} is too small for a cache")
        self.page_size, self.num_groups, self.max_length = page_size, len(windows), max_length
        self.first_staging = num_pages if first_staging is None else first_staging
        self.names = RowNames(num_pages, page_size)
        windows_of = np.array([EVERYTHING if w is None else w for w in windows], np.int64)
        self._records = Records(windows_of, max_requests, max_length, page_size)
        self._reporter = Reporter(told)
        self._reads = Reads(self.names, self._records, self._reporter)
        self._writes = Writes(self.names, self._records, self._reporter, self.first_staging)
        self._phase = _Phase.BETWEEN
        self.step: Step | None = None
        self._batch: Batch | None = None
        self._moved: list[tuple[Ints, Ints]] = []

    @property
    def findings(self) -> Findings:
        """What was found and how much was looked at, since the last `reset`."""
        return self._reporter.findings

    def reset(self) -> None:
        """Forget all requests and start new findings. No request may be running."""
        self.freed(self._records.requests)
        self._reporter.reset()

    def held(self, request: str) -> Ints | None:
        """Return the slots of a request's accepted rows, ``[groups, rows]``; None if it is unknown.

        0 stands for rows whose page a sliding window has left.
        """
        return self._records.slots(request)

    def speculated(self) -> list[str]:
        """Return the requests that have had drafts verified, of those that have pages."""
        return [name for name in self._records.requests if self._records.has_speculated(name)]

    # -- one step --------------------------------------------------------------------------------

    def freed(self, requests: Iterable[str]) -> None:
        """Requests are finished, aborted or preempted; they give up their pages.

        To be said before the pages are given to others. A step that has not ended, because the
        forward raised, is forgotten. Unknown requests are ignored.
        """
        self._forget_step()
        before = len(self._records)
        for request in requests:
            self.findings.ended += self._records.has_speculated(request)
            index = self._records.drop(request, self.names)
            if index is not None:
                self._reads.forget(index)
        if len(self._records):
            self.findings.left += before - len(self._records)

    def forward(self, batch: Batch) -> None:
        """Check what kernels will read and write; then name what they write.

        Raises:
            InputError: a batch that contradicts itself or the sizes of the map.
        """
        self._forget_step()
        step = checked(batch, self.num_groups, self.page_size, self.max_length)
        self.findings.steps += 1
        if not len(step.requests):
            return
        before = len(self._records)
        step.index = self._records.find(step.requests)
        if before:
            self.findings.joined += len(self._records) - before
        self.step, self._batch, self._phase = step, batch, _Phase.FORWARD
        self._writes.check(step, batch)
        names = np.empty((len(step.position), 3), np.int32)
        names[:, OWNER] = self._records.serial[step.index[step.of_row]]
        names[:, POSITION] = step.position
        names[:, STEP] = self.findings.steps
        self.names.write(step.written, names)
        certain = step.depth < (step.scheduled - step.drafts)[step.of_row]
        self.names.accepted[step.written[:, certain]] = True
        self._reads.adopt(step, batch)
        self._reads.check(step, batch)

    def sampled(self) -> None:
        """Acceptance is known: from here on rows may go home."""
        if self._phase is _Phase.FORWARD:
            self._phase = _Phase.SAMPLED

    def moved(self, source: IntArray, target: IntArray) -> None:
        """Rows are copied from slots to slots, between staging and durable pages.

        Rows that reach durable pages outside of ``sampled() … end_step()`` are violations.

        Raises:
            InputError: not as many sources as targets, or slots that the cache does not have.
        """
        if source.shape != target.shape or source.ndim != 1:
            raise InputError(f"rows move from {source.shape} to {target.shape}: one slot each")
        for slots in (source, target):
            if len(slots) and not 0 <= slots.min() <= slots.max() < len(self.names.rows):
                raise InputError(
                    f"slots {slots.min()} to {slots.max()} move, there are {len(self.names.rows)}"
                )
        origin, goal = source.astype(np.int64), target.astype(np.int64)
        self.names.copy(origin, goal)
        home = goal < self.first_staging * self.page_size
        if not home.any():
            return
        self._moved.append((origin[home], goal[home]))
        if self._phase is not _Phase.SAMPLED:
            self.report(Kind.EARLY_COMMIT, slot=int(goal[home][0]))

    def end_step(
        self,
        kept: IntArray | Sequence[int],
        tables: Sequence[IntArray] | None = None,
        slots: Sequence[IntArray] | None = None,
    ) -> Durable:
        """Compare the durable pages with what was accepted.

        Args:
            kept: ``[requests]``, how many of its rows each request keeps, from the first on: the bonus
                row and the accepted drafts, or all rows of a prompt's chunk.
            tables: the tables now; None: the batch's arrays, as they are now.
            slots: the slot mappings now; None: the batch's arrays, as they are now.

        Raises:
            StateError: no `forward` before it.
            InputError: counts that the step cannot keep.
        """
        step, batch, moved = self.step, self._batch, self._moved
        if step is None or batch is None:
            raise StateError("end_step without a forward")
        kept = np.asarray(kept, np.int64)
        if kept.shape != step.computed.shape or ((kept < 0) | (kept > step.scheduled)).any():
            raise InputError(f"kept is {kept}, the step has {step.scheduled} rows")
        self._forget_step()
        good = step.depth < kept[step.of_row]
        self.findings.drafts += int(step.drafts.sum())
        self.findings.rejected += int((step.scheduled - kept).sum())
        self._records.known[step.index] = step.computed + kept
        windows = step.drafts > 0
        self._records.speculated[step.index] |= windows
        ends = step.computed + step.scheduled - 1
        crossing = step.computed // self.page_size != ends // self.page_size
        self.findings.crossed += int((windows & crossing).sum())
        tables = batch.tables if tables is None else tables
        durable = self._writes.check_durable(
            step, tables, batch.slots if slots is None else slots, good
        )
        self._records.note_pages(step, tables, self.names)
        kept_slots = durable[:, good].ravel()
        for _, target in moved:
            for slot in target[~np.isin(target, kept_slots)]:
                self.report(Kind.FOREIGN_WRITE, slot=int(slot))
        index, position = step.index[step.of_row][good], step.position[good]
        self._records.owner[:, index, position] = self._records.serial[index]
        self._records.written[:, index, position] = self.findings.steps
        return Durable(durable, kept_slots, moved)

    def _forget_step(self) -> None:
        self.step, self._batch, self._phase = None, None, _Phase.BETWEEN
        self._moved = []

    # -- checks ----------------------------------------------------------------------------------

    def check_leases(self, held: Iterable[str]) -> None:
        """Report staging pages that are held for requests that are gone."""
        for request in held:
            if request not in self._records:
                self.report(Kind.LEAK, request=request)

    def report(self, kind: Kind, count: int = 1, **place: int | str) -> None:
        """Count a violation that somebody else has found; its place is that of a `Violation`."""
        self._reporter.report(kind, count, **place)
