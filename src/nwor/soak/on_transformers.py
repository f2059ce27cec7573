"""Traffic on the embedded engine, and what is looked at between its steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import closing

import torch

from nwor.audit import AuditLevel
from nwor.audit.workloads import Job
from nwor.engine.audit_run import JobEngine
from nwor.engine.drafters import Drafter, Proposal
from nwor.engine.options import Options
from nwor.engine.request import Request
from nwor.soak.ledger import Check, Ledger
from nwor.soak.sizes import MAX_BATCH, MAX_LENGTH, MODEL, K, traffic_of
from nwor.soak.tiny import tiny_model
from nwor.soak.traffic import Traffic, Wave


class TrafficDrafter(Drafter):
    """Drafts what the traffic says.

    Attributes:
        traffic: the traffic.
        wave: the wave that runs.
    """

    traffic: Traffic
    wave: Wave

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> Proposal:
        """See `Drafter.propose`."""
        visits, wave = self.wave.visits, self.wave.number
        return Proposal(
            [
                self.traffic.draft(wave, visits[request.index], len(request.tokens), limit)
                for request, limit in zip(requests, limits, strict=True)
            ]
        )


class WatchedEngine(JobEngine):
    """An audited engine whose books are looked at between steps."""

    ledger: Ledger
    running: Sequence[Request] = ()
    requests: Sequence[Request] = ()

    def _requests(self, prompts: Sequence[Sequence[int]], options: Options) -> list[Request]:
        made = super()._requests(prompts, options)
        self.requests = made
        return made

    def _admit(self, waiting: deque[Request]) -> list[Request]:
        if self.ledger.step():
            self.check()
        return super()._admit(waiting)

    def _retire(self, active: Sequence[Request]) -> list[Request]:
        running = super()._retire(active)
        self.running = running
        return running

    def check(self) -> None:
        """Look at everything that can be wrong between two steps."""
        ledger = self.ledger
        owned = [-1 if request.page is None else request.page for request in self.running]
        ledger.partition(Check.PAGES, self._free, owned, range(self._pages))
        ledger.require(Check.WINDOW, self.cache.window, None, "window")
        for request in self.running:
            held = self.books.shadow.held(str(request.index))
            rows = -1 if held is None else held.shape[1]
            ledger.require(
                Check.WATERMARK,
                (request.durable, rows),
                (len(request.tokens) - 1,) * 2,
                f"request {request.index}, watermark and rows in the audit's map",
            )
        ledger.audit(self.findings)
        ledger.reconcile(self.metrics, self.findings)

    def check_idle(self, wave: Wave) -> None:
        """Look at what must be back when nobody runs."""
        ledger = self.ledger
        running = [request.index for request in self.running]
        ledger.require(Check.RETURNED, running, [], "running requests")
        names = (str(visit.index) for visit in wave.visits)
        known = [name for name in names if self.books.shadow.held(name) is not None]
        ledger.require(Check.RETURNED, known, [], "requests in the audit's map")
        self.check()
        ledger.totals.checks += 1


class TransformersSoak:
    """The embedded engine, staged and audited, on a tiny Gemma 3 with sliding windows.

    Attributes:
        settings: sizes, for the record.
        impossible: what this engine never does.
    """

    impossible = {  # noqa: RUF012 - read only
        "preempted": "a request has its page from its first step to its last: nothing to preempt"
    }

    def __init__(self) -> None:
        # Tiny layers are faster on one, and results do not depend on cores.
        torch.set_num_threads(1)
        self._model = tiny_model(MODEL)
        self._drafter = TrafficDrafter()
        self._engine: WatchedEngine | None = None
        self.settings = {
            "model": MODEL,
            "max_batch": MAX_BATCH,
            "max_length": MAX_LENGTH,
            "max_draft": K,
            "audit": AuditLevel.METADATA.value,
        }

    def traffic(self, seed: int) -> Traffic:
        """Let the model write texts and return traffic made of them."""
        return traffic_of(self._model, seed)

    def run(self, wave: Wave, traffic: Traffic, ledger: Ledger) -> None:
        """Run a wave."""
        engine = self._started()
        engine.ledger = ledger
        self._drafter.traffic, self._drafter.wave = traffic, wave
        jobs = [Job("", v.tokens, arrive=v.arrive, abort=v.abort) for v in wave.visits]
        engine.stops = [None] * len(jobs)
        answers: dict[int, list[int]] = {visit.index: [] for visit in wave.visits}
        told: set[int] = set()  # requests whose last tokens came with a reason to end
        left = False
        with closing(engine.start(jobs, [visit.prompt for visit in wave.visits], K)) as pieces:
            for piece in pieces:
                answers[piece.request.index] += piece.tokens
                if piece.request.finish is not None:
                    told.add(piece.request.index)
                left = bool(ledger.violations) or 0 < wave.leave < ledger.step_of_wave
                if left:
                    break
        nowhere: list[str] = []
        for request, visit in zip(engine.requests, wave.visits, strict=True):
            if request.finish is None:
                nowhere.append(str(visit.index))
                continue
            # An engine that ends a request unasked owes the whole answer, whatever reason it gives.
            asked = left or 0 < visit.abort <= ledger.step_of_wave
            aborted = asked and visit.index not in told
            ledger.answered(visit, answers[visit.index], aborted=aborted)
        if not ledger.violations:
            ledger.all_ended(nowhere)
            engine.check_idle(wave)

    def _started(self) -> WatchedEngine:
        """Start the engine when it is first needed: the model writes texts before it belongs to it."""
        if self._engine is None:
            self._engine = WatchedEngine(
                self._model,
                level=AuditLevel.METADATA,
                drafter=self._drafter,
                max_batch=MAX_BATCH,
                max_length=MAX_LENGTH,
                max_draft=K,
            )
        return self._engine

    def close(self) -> None:
        """Give the model its attention back."""
        if self._engine is not None:
            self._engine.close()
