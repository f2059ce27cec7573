"""What an audit can find: kinds of violations, the invariant each breaks, and where."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What can be wrong, with the invariant it breaks."""

    REJECTED_IN_DURABLE = "rejected_row_in_durable_page"
    FOREIGN_WRITE = "row_moved_to_a_slot_nobody_accepted"
    EARLY_COMMIT = "commit_before_sampling"
    ROW_LOST = "accepted_row_missing"
    OVERWRITTEN = "accepted_row_overwritten"
    SHARED_WRITE = "write_to_a_page_of_another_request"
    DOUBLE_WRITE = "slot_written_twice_in_a_step"
    NULL_WRITE = "write_to_null_page_or_negative_slot"
    OUTSIDE = "page_or_slot_outside_the_cache"
    UNWRITTEN_READ = "attention_reads_a_row_never_written"
    FOREIGN_READ = "attention_reads_a_row_of_another_request"
    REJECTED_READ = "attention_reads_a_rejected_row"
    STALE_READ = "attention_reads_a_stale_row"
    DISAGREE = "block_table_and_slot_mapping_disagree"
    NOT_RESTORED = "table_names_a_staging_page_after_the_step"
    PUBLISHED = "shared_prefix_holds_rows_nobody_accepted"
    LEAK = "staging_page_of_a_gone_request"
    BYTES_FOREIGN = "bytes_of_a_slot_nobody_wrote_changed"
    BYTES_LOST = "bytes_of_an_accepted_row_differ_from_its_staged_row"
    FINAL_DIFFERS = "durable_row_differs_from_a_run_without_speculation"

    @property
    def invariant(self) -> str:
        """The invariant, ``I1`` to ``I6``."""
        return _INVARIANTS[self]


_INVARIANTS = {
    Kind.REJECTED_IN_DURABLE: "I1",
    Kind.FOREIGN_WRITE: "I1",
    Kind.EARLY_COMMIT: "I1",
    Kind.ROW_LOST: "I1",
    Kind.OVERWRITTEN: "I2",
    Kind.SHARED_WRITE: "I2",
    Kind.DOUBLE_WRITE: "I1",
    Kind.NULL_WRITE: "I1",
    Kind.OUTSIDE: "I4",
    Kind.UNWRITTEN_READ: "I4",
    Kind.FOREIGN_READ: "I4",
    Kind.REJECTED_READ: "I4",
    Kind.STALE_READ: "I4",
    Kind.DISAGREE: "I4",
    Kind.NOT_RESTORED: "I6",
    Kind.PUBLISHED: "I3",
    Kind.LEAK: "I6",
    Kind.BYTES_FOREIGN: "I1",
    Kind.BYTES_LOST: "I2",
    Kind.FINAL_DIFFERS: "I2",
}


@dataclass(frozen=True, slots=True)
class Violation:
    """One offence, and where.

    Attributes:
        kind: what is wrong.
        step: engine step, from 1.
        request: the request it concerns; empty if it is not about one.
        group: cache group, -1 if it is not about one.
        layer: layer within the group, where bytes were compared; else -1.
        position: token position in the request, -1 if unknown.
        slot: slot in the cache, -1 if it is not about one.
    """

    kind: Kind
    step: int
    request: str = ""
    group: int = -1
    layer: int = -1
    position: int = -1
    slot: int = -1

    def __str__(self) -> str:
        place = f"step {self.step}"
        for name in ("request", "group", "layer", "position", "slot"):
            value = getattr(self, name)
            place += f", {name} {value}" if value not in {"", -1} else ""
        return f"{self.kind.invariant} {self.kind.value}: {place}"


class Findings:
    """Violations: all counted, the first of each kind kept.

    Attributes:
        counts: by kind.
        first: the first of each kind.
        rows_checked: names that were compared, in all checks.
        reads: those of rows that attention reads, written before the step.
        steps: steps seen.
        tokens: tokens sampled.
        drafts: drafts verified.
        rejected: rejected drafts seen; without any, a clean result proves nothing.
        adopted: rows of cached prefixes taken over by other requests.
        ended: requests that gave their pages up after drafts of theirs were verified.
        joined: requests that came while others had pages.
        left: requests that gave theirs up while others kept them.
        crossed: windows with rows in two pages.
        cut: tokens that a step accepted or sampled behind a stop token.
        aborted: requests aborted after a window of theirs, while others went on.
        preempted: times that a request gave its pages up and had to wait for others.
        final_rows: rows of ended requests compared with a run without speculation.
        final_answers: how many of them are rows of answers, not of prompts.
        final_equal: how many of them were equal bit for bit, in all layers.
        final_error: largest norm of a difference, in norms of the row.
        final_abs: largest difference of an element.
        final_limit: the error that was allowed.
    """

    def __init__(self) -> None:
        self.counts: Counter[Kind] = Counter()
        self.first: dict[Kind, Violation] = {}
        self.rows_checked = 0
        self.reads = 0
        self.steps = 0
        self.tokens = 0
        self.drafts = 0
        self.rejected = 0
        self.adopted = 0
        self.ended = 0
        self.joined = 0
        self.left = 0
        self.crossed = 0
        self.cut = 0
        self.aborted = 0
        self.preempted = 0
        self.final_rows = 0
        self.final_answers = 0
        self.final_equal = 0
        self.final_error = 0.0
        self.final_abs = 0.0
        self.final_limit = 0.0

    @property
    def accepted(self) -> int:
        """Drafts that were kept."""
        return self.drafts - self.rejected

    def add(self, violation: Violation, count: int = 1) -> bool:
        """Count; say whether it is the first of its kind."""
        self.counts[violation.kind] += count
        return self.first.setdefault(violation.kind, violation) is violation
