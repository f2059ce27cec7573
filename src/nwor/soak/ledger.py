"""What a soak did, what it checked, and what was wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from nwor.audit import Findings
from nwor.metrics import Metrics
from nwor.soak.traffic import Visit, Wave

MAX_STEPS = 5000
"""Steps after which a wave is stuck: no wave needs a third of them."""


class Check(StrEnum):
    """What is looked at, beside what the audit looks at."""

    PAGES = "pages_are_free_or_owned_by_one"
    STAGING = "staging_pages_are_free_or_owned_by_one"
    WINDOW = "no_window_open_between_steps"
    WATERMARK = "durable_rows_are_the_accepted_tokens"
    COUNTERS = "counters_reconcile"
    STAGED = "every_draft_was_staged"
    RETURNED = "everything_is_returned"
    TOKENS = "tokens_are_those_without_speculation"
    RUNS = "the_engine_runs"

    @property
    def invariant(self) -> str:
        """The invariant, ``I1`` to ``I6``."""
        return _INVARIANTS[self]


_INVARIANTS = {
    Check.PAGES: "I6",
    Check.STAGING: "I6",
    Check.WINDOW: "I6",
    Check.WATERMARK: "I1",
    Check.COUNTERS: "I1",
    Check.STAGED: "I1",
    Check.RETURNED: "I6",
    Check.TOKENS: "I5",
    Check.RUNS: "I6",
}


@dataclass(frozen=True, slots=True)
class Violation:
    """What was wrong first: which check, and where.

    Attributes:
        invariant: ``I1`` to ``I6``.
        name: a `Check`, or a kind of the audit's.
        wave: number of the wave.
        step: engine step of the wave after which it was found.
        detail: the values.
    """

    invariant: str
    name: str
    wave: int
    step: int
    detail: str

    def __str__(self) -> str:
        return f"{self.invariant} {self.name}: wave {self.wave}, step {self.step}, {self.detail}"


@dataclass(slots=True)
class Totals:
    """Counts of a soak; drafts as the engine's metrics have them.

    Attributes:
        compared: tokens compared with those without speculation.
    """

    waves: int = 0
    requests: int = 0
    finished: int = 0
    aborted: int = 0
    preempted: int = 0
    steps: int = 0
    tokens: int = 0
    compared: int = 0
    drafted: int = 0
    accepted: int = 0
    rejected: int = 0
    checks: int = 0


@dataclass(slots=True)
class Ledger:
    """Counts what happens and keeps what is wrong.

    Attributes:
        check_every: steps between two looks at the engine's books.
        tell: called after every step.
        violations: in the order found.
    """

    check_every: int
    tell: Callable[[Ledger], None] = lambda _: None
    totals: Totals = field(default_factory=Totals)
    violations: list[Violation] = field(default_factory=list)
    wave: int = -1
    step_of_wave: int = 0

    def begin(self, wave: Wave) -> None:
        """Begin a wave."""
        self.wave, self.step_of_wave = wave.number, 0
        self.totals.waves += 1
        self.totals.requests += len(wave.visits)

    def step(self) -> bool:
        """Count an engine step; say whether its books are to be looked at.

        Raises:
            RuntimeError: the wave does not end.
        """
        self.totals.steps += 1
        self.step_of_wave += 1
        if self.step_of_wave > MAX_STEPS:
            raise RuntimeError(f"wave {self.wave} has not ended after {MAX_STEPS} steps")
        self.tell(self)
        due = self.totals.steps % self.check_every == 0
        self.totals.checks += due
        return due

    def broken(self, check: Check, detail: str) -> None:
        """Keep a violation."""
        self._keep(check.invariant, check.value, detail)

    def require(self, check: Check, found: object, want: object, what: str) -> None:
        """Keep a violation if `found` is not what is wanted."""
        if found != want:
            self.broken(check, f"{what}: {found}, expected {want}")

    def _keep(self, invariant: str, name: str, detail: str) -> None:
        self.violations.append(Violation(invariant, name, self.wave, self.step_of_wave, detail))

    def all_ended(self, nowhere: Sequence[str]) -> None:
        """Require that all requests so far have ended, once; asked when the engine is idle.

        Args:
            nowhere: requests that neither finished nor were aborted.
        """
        totals = self.totals
        self.require(Check.RETURNED, list(nowhere), [], "requests that never ended")
        ended = totals.finished + totals.aborted
        self.require(Check.RETURNED, ended, totals.requests, "finished and aborted requests")

    # -- what both engines have ------------------------------------------------------------------

    def audit(self, findings: Findings) -> None:
        """Keep what the audit has found, the first of each kind."""
        for kind, first in findings.first.items():
            self._keep(kind.invariant, kind.value, f"audit {first}")

    def reconcile(self, metrics: Metrics, findings: Findings) -> None:
        """Compare the engine's counters with each other and with what the audit has counted."""
        totals = self.totals
        totals.drafted, totals.accepted = metrics.staged, metrics.committed
        totals.rejected = metrics.rejected
        self.require(
            Check.STAGED, (metrics.flushed, metrics.cancelled), (0, 0), "flushed, cancelled"
        )
        counted = metrics.committed + metrics.rejected
        self.require(Check.COUNTERS, metrics.staged, counted, "staged against committed + rejected")
        self.require(Check.COUNTERS, metrics.staged, findings.drafts, "staged against the audit's")
        self.require(
            Check.COUNTERS, metrics.rejected, findings.rejected, "rejected against the audit's"
        )

    def partition(
        self, check: Check, free: Iterable[int], owned: Iterable[int], everything: Iterable[int]
    ) -> None:
        """Require that everything is free once or owned, and nothing both."""
        found = sorted([*free, *owned])
        if found != sorted(everything):
            twice = sorted({page for page in found if found.count(page) > 1})
            lost = sorted(set(everything) - set(found))
            self.broken(check, f"twice: {twice}, neither free nor owned: {lost}")

    def answered(self, visit: Visit, tokens: Sequence[int], *, aborted: bool) -> None:
        """Compare an answer with the one without speculation; an aborted one as far as it goes."""
        totals, want = self.totals, visit.answer
        totals.aborted += aborted
        totals.finished += not aborted
        totals.tokens += len(tokens)
        totals.compared += min(len(tokens), len(want))
        if aborted:
            want = want[: len(tokens)]
        if list(tokens) != want:
            pairs = zip(tokens, want, strict=False)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(want)))
            self.broken(
                Check.TOKENS,
                f"request {visit.index}, token {at} of {len(want)}: {list(tokens)[at : at + 1]}, "
                f"expected {want[at : at + 1]}",
            )
