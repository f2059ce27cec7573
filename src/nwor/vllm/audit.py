"""Audit of a running V1 engine, staged or stock: every row's name, step by step.

    _update_states                      requests gone: their pages are nobody's
    _prepare_inputs, nwor's begin       (copies are seen as they happen)
    _build_attention_metadata  <------  what will be read and written, as the kernels will see it
    forward, _sample, nwor's commit     (copies are seen as they happen)
    _update_states_after_model_execute  what is durable now, and whether it should be

The hooks sit on other symbols than nwor's own and stay when nwor's go, so the same audit watches an
engine in every mode. Tables, slot mappings and acceptance come from vLLM's buffers, copies from the
overlay as it makes them; of the overlay's own bookkeeping only the leases are read, to find leaks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nwor.errors import LayoutError
from nwor.vllm import seams
from nwor.vllm.audit_bytes import ByteAudit
from nwor.vllm.audit_rows import OWNER, POSITION, STEP, Findings, Ints, Kind, RowNames, Violation
from nwor.vllm.geometry import CacheGroup, cache_groups
from nwor.vllm.settings import AuditLevel

logger = logging.getLogger("vllm.nwor")

ATTRIBUTE = "nwor_audit"
"""Name under which a runner carries its `RunnerAudit`."""

REJECTED = -1
INTEGRITY_STEPS = 64
EVERYTHING = 2**40
"""A window longer than any request."""


@dataclass(slots=True)
class _Step:
    """The numbers of one step: arrays over batch rows, then over scheduled tokens."""

    requests: list[str]
    index: Ints
    computed: Ints
    scheduled: Ints
    drafts: Ints
    first: Ints
    of_row: Ints
    position: Ints
    written: Ints
    sampled: bool = False


class RunnerAudit:
    """Watches one runner.

    Args:
        runner: vLLM's `GPUModelRunner`, its cache tensors allocated.
        groups: the target's cache groups.
        first_staging: first page that is not the scheduler's; the number of pages if there is none.

    Attributes:
        findings: what was found and how much was looked at.

    Raises:
        LayoutError: groups with different page sizes.
    """

    def __init__(
        self,
        runner: Any,  # noqa: ANN401 - vLLM's GPUModelRunner
        groups: list[CacheGroup],
        first_staging: int,
        level: AuditLevel,
    ) -> None:
        sizes = {group.overlay.page_size for group in groups}
        if len(sizes) != 1:
            raise LayoutError(f"the audit needs one page size, this engine has {sorted(sizes)}")
        (self.page_size,) = sizes
        self.findings = Findings()
        self.first_staging = first_staging
        self._runner = runner
        self._groups = groups
        self._tables = [group.overlay.table.numpy() for group in groups]
        self._slots = [group.overlay.slots.numpy() for group in groups]
        self._windows = np.array([_window(runner, group) for group in groups], np.int64)
        self.names = RowNames(runner.kv_cache_config.num_blocks, self.page_size)
        number, length = runner.max_num_reqs, runner.max_model_len + 1
        self._index: dict[str, int] = {}
        self._free = list(range(number))
        self._owner = np.zeros((len(groups), number, length), np.int32)
        self._written = np.zeros((len(groups), number, length), np.int32)
        self._known = np.zeros(number, np.int64)
        columns = self._tables[0].shape[1]
        shape = (len(groups), number, columns)
        self._pages = np.zeros(shape, np.int64)
        self._seen_page = np.full(shape, -1, np.int64)
        self._seen_version = np.full(shape, -1, np.int64)
        self._serials = 0
        self._serial = np.zeros(number, np.int32)
        self._step: _Step | None = None
        self._output: Any = None
        self._moved: list[tuple[Ints, Ints]] = []
        self._reported = Findings()
        self._bytes: ByteAudit | None = None
        self.watch(level)

    # -- hooks -----------------------------------------------------------------------------------

    def install(self) -> None:
        """Put the hooks on the runner, and on nwor's row movers if it has any."""

        def update(original: Callable[..., Any]) -> Callable[..., Any]:
            def _update_states(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
                self.begin(scheduler_output)
                return original(scheduler_output, *args, **kwargs)

            return _update_states

        def build(original: Callable[..., Any]) -> Callable[..., Any]:
            def _build_attention_metadata(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
                if self._output is not None and self._step is None:
                    self.before_forward()
                return original(*args, **kwargs)

            return _build_attention_metadata

        def after(original: Callable[..., Any]) -> Callable[..., Any]:
            def _update_states_after_model_execute(
                output_token_ids: Any,  # noqa: ANN401
                *args: Any,  # noqa: ANN401
                **kwargs: Any,  # noqa: ANN401
            ) -> Any:  # noqa: ANN401
                self.after_sampling(output_token_ids)
                return original(output_token_ids, *args, **kwargs)

            return _update_states_after_model_execute

        seams.wrap_method(self._runner, seams.UPDATE_STATES, update)
        seams.wrap_method(self._runner, seams.BUILD_METADATA, build)
        seams.wrap_method(self._runner, seams.AFTER_EXECUTE, after)
        self._runner.rejection_sampler.register_forward_hook(self._on_sampled)
        overlay = self._overlay()
        if overlay is not None:
            overlay.effects.observers.append(self.on_move)

    def _overlay(self) -> Any:  # noqa: ANN401 - Overlay or None
        return getattr(getattr(self._runner, "nwor", None), "overlay", None)

    def _on_sampled(self, *_: Any) -> None:  # noqa: ANN401 - torch's hook
        if self._step is not None:
            self._step.sampled = True

    def watch(self, level: AuditLevel) -> None:
        """Change the level and start a new report. No request may be running."""
        self.level = level
        self._bytes = None
        if level is AuditLevel.BYTES:
            self._bytes = ByteAudit(self._groups, self.first_staging)
        self.reset()

    def reset(self) -> None:
        """Start a new report; at the byte level, with fresh pages. No request may be running."""
        for request in list(self._index):
            self._drop(request)
        self.findings = Findings()
        self._reported = Findings()
        if self._bytes is not None:
            self._bytes.fill()

    # -- one step --------------------------------------------------------------------------------

    def begin(self, scheduler_output: Any) -> None:  # noqa: ANN401 - SchedulerOutput
        """Forget requests that are gone; remember what is scheduled."""
        self._step, self._moved, self._output = None, [], None
        if self.level is AuditLevel.OFF:
            return
        if scheduler_output.num_scheduled_tokens:
            self._output = scheduler_output
        for gone in (
            scheduler_output.finished_req_ids,
            scheduler_output.preempted_req_ids or (),
            scheduler_output.scheduled_cached_reqs.resumed_req_ids,
        ):
            for request in gone:
                self._drop(request)
        self._check_leaks()

    def before_forward(self) -> None:
        """Check what the kernels will read and write; then name what they write."""
        findings = self.findings
        findings.steps += 1
        step = self._step = self._describe()
        names = np.empty((len(step.position), 3), np.int32)
        index = step.index[step.of_row]
        names[:, OWNER] = self._serial[index]
        names[:, POSITION] = step.position
        names[:, STEP] = findings.steps
        depth = np.arange(len(step.position)) - step.first[step.of_row]
        certain = depth < (step.scheduled - step.drafts)[step.of_row]
        step.written = np.stack([slots[: len(step.position)] for slots in self._slots])
        self._check_writes(step)
        flat = np.maximum(step.written, 0)
        self.names.write(flat, names)
        self.names.accepted[flat[:, certain]] = True
        self._adopt(step)
        self._check_reads(step)

    def on_move(self, source: Ints, target: Ints) -> None:
        """Follow a copy of rows between staging and durable pages."""
        if self.level is AuditLevel.OFF:
            return
        self.names.copy(source, target)
        home = target < self.first_staging * self.page_size
        if not home.any():
            return
        self._moved.append((source[home], target[home]))
        if self._output is not None and (self._step is None or not self._step.sampled):
            self.report(Kind.EARLY_COMMIT, slot=int(target[home][0]))

    def after_sampling(self, sampled: torch.Tensor) -> None:
        """Compare the durable pages with what was accepted."""
        step, self._step, self._output = self._step, None, None
        if step is None:
            return
        tokens = (sampled.numpy()[: len(step.requests)] != REJECTED).sum(1)
        accepted = np.where(step.drafts > 0, np.maximum(tokens - 1, 0), 0)
        kept = step.scheduled - step.drafts + accepted
        discarded = self._runner.discard_request_mask.np[: len(step.requests)]
        kept = np.where(discarded, step.scheduled, kept)
        depth = np.arange(len(step.position)) - step.first[step.of_row]
        good = depth < kept[step.of_row]
        self.findings.drafts += int(step.drafts.sum())
        self.findings.rejected += int((step.scheduled - kept).sum())
        self.findings.tokens += int(tokens.sum())
        self._known[step.index] = step.computed + kept
        wanted = self._check_durable(step, good)
        self._note_pages(step)
        kept_slots = wanted[:, good].ravel()
        self._check_moves(kept_slots)
        index, position = step.index[step.of_row][good], step.position[good]
        self._owner[:, index, position] = self._serial[index]
        self._written[:, index, position] = self.findings.steps
        if self._bytes is not None:
            self._bytes.check(self, wanted, kept_slots, self._moved)

    def _describe(self) -> _Step:
        output, batch = self._output, self._runner.input_batch
        requests = list(batch.req_ids)
        scheduled = np.array([output.num_scheduled_tokens[r] for r in requests], np.int64)
        drafts = output.scheduled_spec_decode_tokens
        computed = batch.num_computed_tokens_cpu[: len(requests)].astype(np.int64)
        first = np.cumsum(scheduled) - scheduled
        of_row = np.repeat(np.arange(len(requests)), scheduled)
        return _Step(
            requests,
            np.array([self._record(request) for request in requests], np.int64),
            computed,
            scheduled,
            np.array([len(drafts.get(request, ())) for request in requests], np.int64),
            first,
            of_row,
            np.arange(len(of_row)) - first[of_row] + computed[of_row],
            np.empty((0, 0), np.int64),
        )

    # -- checks ----------------------------------------------------------------------------------

    def _adopt(self, step: _Step) -> None:
        """Take over the rows of a cached prefix under the names they have, if they are accepted.

        vLLM publishes a page in the step that fills it: some may have been written just now.
        """
        size = self.page_size
        for row in np.flatnonzero(self._known[step.index] == 0):
            until = int(step.computed[row])
            if not until:
                continue
            index, position = step.index[row], np.arange(until)
            for group, table in enumerate(self._tables):
                start = self._first_read(group, until)
                slots = table[row, position // size].astype(np.int64) * size + position % size
                found = self.names.rows[slots[start:]]
                good = self.names.accepted[slots[start:]] & (found[:, POSITION] == position[start:])
                self.report_rows(
                    Kind.PUBLISHED,
                    step.requests[row],
                    group,
                    position[start:],
                    slots[start:],
                    ~good,
                )
                self._owner[group, index, start:until] = found[:, OWNER]
                self._written[group, index, start:until] = found[:, STEP]
            self._known[index] = until
            self.findings.adopted += until

    def _first_read(self, group: int, computed: int) -> int:
        return max(0, computed + 1 - int(self._windows[group]))

    def _check_reads(self, step: _Step) -> None:
        """Look at the pages that changed, or are new to a request, since they were looked at."""
        size = self.page_size
        last = step.computed // size
        columns = int(last.max()) + 1
        number = len(step.index)
        pages = np.stack([table[:number, :columns] for table in self._tables]).astype(np.int64)
        version = self.names.version[pages]
        start = np.maximum(0, step.computed + 1 - self._windows[:, None])
        column = np.arange(columns)
        used = (column >= (start // size)[..., None]) & (column <= last[:, None])
        seen_page, seen_version = (
            seen[:, step.index, :columns] for seen in (self._seen_page, self._seen_version)
        )
        dirty = ((pages != seen_page) | (version != seen_version)) & used
        self._seen_page[:, step.index, :columns] = pages
        self._seen_version[:, step.index, :columns] = version
        groups, rows, cols = np.nonzero(dirty)
        low = np.maximum(cols * size, start[groups, rows])
        counts = np.maximum(np.minimum((cols + 1) * size, step.computed[rows]) - low, 0)
        total = int(counts.sum())
        if not total:
            return
        which = np.repeat(np.arange(len(rows)), counts)
        position = np.arange(total) - (np.cumsum(counts) - counts - low)[which]
        index, group = step.index[rows][which], groups[which]
        slots = (pages[groups, rows, cols] * size)[which] + position % size
        found = self.names.rows[slots]
        wrong = (
            (found[:, OWNER] != self._owner[group, index, position])
            | (found[:, POSITION] != position)
            | (found[:, STEP] != self._written[group, index, position])
        )
        self.findings.rows_checked += total
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            self.report(
                Kind.WRONG_READ,
                int(wrong.sum()),
                request=step.requests[rows[which[at]]],
                group=int(group[at]),
                position=int(position[at]),
                slot=int(slots[at]),
            )

    def _check_writes(self, step: _Step) -> None:
        size, slots, names = self.page_size, step.written, self.names
        column = step.position // size
        named = np.stack([table[step.of_row, column] for table in self._tables]).astype(np.int64)
        self.findings.rows_checked += slots.size
        self.offend(step, Kind.NULL_WRITE, slots, slots < size)
        self.offend(step, Kind.DISAGREE, slots, slots != named * size + step.position % size)
        slots = np.maximum(slots, 0)
        ordered = np.sort(slots, axis=None)
        if (ordered[1:] == ordered[:-1]).any():
            _, inverse, count = np.unique(slots, return_inverse=True, return_counts=True)
            self.offend(step, Kind.DOUBLE_WRITE, slots, count[inverse].reshape(slots.shape) > 1)
        index, page = step.index[step.of_row], slots // size
        durable = slots < self.first_staging * size
        mine = self._pages[:, index, column] == page
        self.offend(step, Kind.SHARED_WRITE, slots, durable & (names.users[page] > mine))
        over = durable & mine & names.accepted[slots] & (step.position < self._known[index])
        self.offend(step, Kind.OVERWRITTEN, slots, over)

    def _check_durable(self, step: _Step, good: NDArray[np.bool_]) -> Ints:
        """Compare the names in the durable pages with acceptance; return the durable slots."""
        size, names = self.page_size, self.names
        column, rows = step.position // size, len(step.position)
        pages = np.stack([table[step.of_row, column] for table in self._tables]).astype(np.int64)
        slots: Ints = pages * size + step.position % size
        mapping = np.stack([slots[:rows] for slots in self._slots])
        staging = (pages >= self.first_staging) | (mapping >= self.first_staging * size)
        self.offend(step, Kind.NOT_RESTORED, slots, staging)
        found = names.rows[slots]
        here = (
            (found[..., OWNER] == self._serial[step.index[step.of_row]])
            & (found[..., POSITION] == step.position)
            & (found[..., STEP] == self.findings.steps)
        )
        self.findings.rows_checked += slots.size
        self.offend(step, Kind.ROW_LOST, slots, good & ~here)
        self.offend(step, Kind.REJECTED_IN_DURABLE, slots, ~good & here & ~staging)
        names.accepted[slots[good & here]] = True
        names.accepted[step.written[:, good]] = True
        return slots

    def _check_moves(self, wanted: Ints) -> None:
        for _, target in self._moved:
            for slot in target[~np.isin(target, wanted)]:
                self.report(Kind.FOREIGN_WRITE, slot=int(slot))

    def _check_leaks(self) -> None:
        overlay = self._overlay()
        if overlay is None:
            return
        for request in overlay.pages.requests:
            if request not in self._index:
                self.report(Kind.LEAK, request=str(request))
        if self.findings.steps % INTEGRITY_STEPS == 0:
            try:
                overlay.pages.check_integrity()
            except AssertionError as error:
                self.report(Kind.LEAK, request=str(error))

    # -- records ---------------------------------------------------------------------------------

    def _record(self, request: str) -> int:
        index = self._index.get(request)
        if index is None:
            index = self._index[request] = self._free.pop()
            self._serials += 1
            self._serial[index] = self._serials
        return index

    def _drop(self, request: str) -> None:
        index = self._index.pop(request, None)
        if index is None:
            return
        np.subtract.at(self.names.users, self._pages[:, index].ravel(), 1)
        self._pages[:, index] = 0
        self._seen_page[:, index] = -1
        self._known[index] = 0
        self._free.append(index)

    def _note_pages(self, step: _Step) -> None:
        """Count who uses which page; those a sliding window has left are the scheduler's again."""
        size, number = self.page_size, len(step.index)
        last = (step.computed + step.scheduled - 1) // size
        columns = int(last.max()) + 1
        pages = np.stack([table[:number, :columns] for table in self._tables]).astype(np.int64)
        start = np.maximum(0, self._known[step.index] + 1 - self._windows[:, None]) // size
        column = np.arange(columns)
        pages[(column > last[:, None]) | (column < start[..., None])] = 0
        old = self._pages[:, step.index, :columns]
        changed = old != pages
        if not changed.any():
            return
        np.subtract.at(self.names.users, old[changed], 1)
        np.add.at(self.names.users, pages[changed], 1)
        self._pages[:, step.index, :columns] = pages
        self.names.users[0] = 0

    # -- reports ---------------------------------------------------------------------------------

    def offend(self, step: _Step, kind: Kind, slots: Ints, wrong: NDArray[np.bool_]) -> None:
        """Report the wrong ones among the step's rows, ``[groups, rows]``."""
        if wrong.any():
            group, row = np.argwhere(wrong)[0]
            self.report(
                kind,
                int(wrong.sum()),
                request=step.requests[step.of_row[row]],
                group=int(group),
                position=int(step.position[row]),
                slot=int(slots[group, row]),
            )

    def report_rows(
        self,
        kind: Kind,
        request: str,
        group: int,
        position: Ints,
        slots: Ints,
        wrong: NDArray[np.bool_],
    ) -> None:
        """Report the wrong ones among rows of one request."""
        if not wrong.any():
            return
        at = int(np.flatnonzero(wrong)[0])
        self.report(
            kind,
            int(wrong.sum()),
            request=request,
            group=group,
            position=int(position[at]),
            slot=int(slots[at]),
        )

    def report(self, kind: Kind, count: int = 1, **place: Any) -> None:  # noqa: ANN401 - Violation's
        """Count a violation; log the first of its kind."""
        violation = Violation(kind, self.findings.steps, **place)
        if self.findings.add(violation, count):
            logger.error("nwor audit: %s (later ones of this kind are only counted)", violation)

    def take_sample(self) -> dict[str, Any] | None:
        """Return what was found since the last call, for /metrics."""
        now, before = self.findings, self._reported
        if now.rows_checked == before.rows_checked:
            return None
        added = now.counts - before.counts
        sample: dict[str, Any] = {"audit_rows_checked": now.rows_checked - before.rows_checked}
        if added:
            sample["audit_violations"] = {f"{k.invariant} {k.value}": n for k, n in added.items()}
        before.rows_checked = now.rows_checked
        before.counts = now.counts.copy()
        return sample


def attach(runner: Any, level: AuditLevel, first_staging: int) -> None:  # noqa: ANN401 - GPUModelRunner
    """Audit a runner, staged or not; called once its cache tensors exist.

    What cannot be audited is said and left alone.
    """
    try:
        audit = RunnerAudit(runner, cache_groups(runner), first_staging, level)
    except LayoutError as error:
        logger.error("nwor audit: this worker is not audited: %s", error)  # noqa: TRY400
        return
    audit.install()
    setattr(runner, ATTRIBUTE, audit)
    logger.info("nwor audit: watching, level %s", level.value)


def _window(runner: Any, group: CacheGroup) -> int:  # noqa: ANN401 - GPUModelRunner
    """Positions that attention of a group looks back, itself included."""
    spec = runner.kv_cache_config.kv_cache_groups[group.index].kv_cache_spec
    return int(getattr(spec, "sliding_window", None) or EVERYTHING)
