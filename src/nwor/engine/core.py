"""The engine: requests enter, are prefilled, draft and verify window by window, and leave.

    waiting ──prefill (written straight to durable)──▶ running ──┐
       ▲                                                 │ ▲     │ finished: page released
       └──────────── a page is free ◀────────────────────┘ └─────┘
                                                   draft → forward → verify → cut → commit

The cut comes before the commit: what a stop token or a length limit takes away is not accepted, so
that emitted tokens, durable rows and counters say the same.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from torch import Tensor
from transformers import PreTrainedModel

from nwor.cache import TransactionalCache
from nwor.engine.checks import check_prompt, checked_proposal, checked_sizes
from nwor.engine.drafters import Drafter, EngineSizes, NoDrafter, Proposal
from nwor.engine.options import Options
from nwor.engine.request import FinishReason, Request
from nwor.engine.runner import Runner
from nwor.engine.sampling import Verdict
from nwor.engine.sinks import Stage, WriteThrough, slots_of
from nwor.engine.stats import EngineStats
from nwor.engine.step import Segment, Sink
from nwor.engine.stopping import Cut, Decoder, Stopper
from nwor.engine.verify import accepted_drafts, first_tokens, kept_drafts, verify
from nwor.errors import InputError, StateError
from nwor.manager import Mode
from nwor.metrics import Metrics, Written
from nwor.window_rows import WindowRows


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Tokens that one step emitted for one request.

    Attributes:
        request: the request, with these tokens already appended.
        tokens: the tokens.
        drafts: how many of them, from the first on, were accepted drafts.
    """

    request: Request
    tokens: list[int]
    drafts: int


class Engine:
    """Speculative decoding of a batch on a transactional KV cache.

    The model's attention belongs to the engine until it is closed.

    Args:
        model: a causal transformers model of a supported kind.
        drafter: guesses tokens; None never drafts.
        mode: ``off``, ``immediate`` or ``stage``, see `Mode`.
        max_batch: requests that run at a time.
        max_length: longest sequence, prompt included; None: 2048, or the model's context if shorter.
        max_draft: most drafts per request and window.
        prefill_chunk: most prompt tokens per forward.
        mover: row mover of the commit, see `nwor.store.movers`.
        poison: fill the store and every closed window's arena with NaN (for tests).

    Raises:
        UnsupportedModelError: a model that cannot be run exactly.
        InputError: a value out of range.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        drafter: Drafter | None = None,
        mode: str = "stage",
        max_batch: int = 8,
        max_length: int | None = None,
        max_draft: int = 4,
        prefill_chunk: int = 512,
        mover: str = "torch",
        poison: bool = False,
    ) -> None:
        self.mode = Mode.parse(mode)
        length = checked_sizes(model, max_batch, max_length, max_draft, prefill_chunk)
        self.max_length, self.max_draft = length, max_draft
        self.drafter = drafter if drafter is not None else NoDrafter()
        self.stats, self.metrics = EngineStats(), Metrics()
        self._prefill_chunk = prefill_chunk
        self._free = list(range(max_batch))
        self._running = False
        self.runner = Runner(model)
        try:
            self.store = self.runner.new_store(pages=max_batch, max_length=length, spare=max_draft)
            self.cache = TransactionalCache(
                {name: group.rows for name, group in self.store.groups.items()},
                max_rows=max_batch * (max_draft + 1),
                mover=mover,
                metrics=self.metrics,
                poison=poison,
            )
            self.drafter.bind(EngineSizes(max_batch, length, max_draft, self.runner.vocab_size))
        except BaseException:
            self.runner.close()
            raise
        if poison:
            self.store.poison()

    @property
    def free_pages(self) -> int:
        """Pages that no request holds."""
        return len(self._free)

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        options: Options,
        decoder: Decoder | None = None,
    ) -> Iterator[TokenRun]:
        """Generate for all prompts; yields what each step emits, as it is emitted.

        Leaving the iterator early releases everything.

        Args:
            prompts: token ids.
            options: what to generate.
            decoder: turns ids into text; needed for stop strings.

        Raises:
            InputError: an empty or too long prompt, an id out of range, too many draft tokens.
            StateError: the engine is already running.
        """
        requests = self._requests(prompts, options)
        if options.stop_strings and decoder is None:
            raise InputError("stop strings need a tokenizer")
        return self._run(requests, options, Stopper(options, decoder))

    def _run(
        self, requests: Sequence[Request], options: Options, stopper: Stopper
    ) -> Generator[TokenRun, None, None]:
        if self._running:
            raise StateError("the engine is running already: one batch at a time")
        self._running = True
        waiting, active = deque(requests), list[Request]()
        try:
            while waiting or active:
                admitted = self._admit(waiting)
                if admitted:
                    active = sorted((*active, *admitted), key=lambda r: r.page or 0)
                    yield from self._prefill(admitted, stopper)
                active = self._retire(active)
                if active:
                    yield from self._window(active, options, stopper)
                active = self._retire(active)
        finally:
            for request in active:
                request.finish = request.finish or FinishReason.INTERRUPTED
            for request in waiting:
                request.finish = FinishReason.INTERRUPTED
            self._retire(active)
            self._running = False

    def _requests(self, prompts: Sequence[Sequence[int]], options: Options) -> list[Request]:
        if not prompts:
            raise InputError("no prompts")
        if options.num_draft_tokens > self.max_draft:
            raise InputError(
                f"num_draft_tokens is {options.num_draft_tokens}, the engine was made for "
                f"{self.max_draft}"
            )
        for index, prompt in enumerate(prompts):
            check_prompt(
                index,
                prompt,
                max_new_tokens=options.max_new_tokens,
                max_length=self.max_length,
                vocab_size=self.runner.vocab_size,
            )
        return [
            Request(i, p, max_new_tokens=options.max_new_tokens, sampling=options.sampling)
            for i, p in enumerate(prompts)
        ]

    def _admit(self, waiting: deque[Request]) -> list[Request]:
        admitted: list[Request] = []
        self._free.sort()
        while waiting and self._free:
            request = waiting.popleft()
            request.page = self._free.pop(0)
            admitted.append(request)
        return admitted

    def _retire(self, active: Sequence[Request]) -> list[Request]:
        for request in active:
            if request.finish is not None and request.page is not None:
                self._free.append(request.page)
                request.page = None
        return [request for request in active if request.finish is None]

    def _prefill(self, requests: Sequence[Request], stopper: Stopper) -> Iterator[TokenRun]:
        pending = deque(requests)
        while pending:
            began = time.perf_counter()
            segments, owners = self._chunk(pending)
            tokens = [
                token
                for r, s in zip(owners, segments, strict=True)
                for token in r.tokens[s.start : s.start + s.length].tolist()
            ]
            ends = _ends(segments)
            done = [
                i for i, r in enumerate(owners) if r.durable + segments[i].length == r.prompt_length
            ]
            sink = WriteThrough(self.store, segments, self.stats.prefill)
            # A forward without any wanted logits still has to return some: the last row's.
            keep = [ends[i] for i in done] or [ends[-1]]
            logits = self._forward(owners, tokens, segments, sink, keep)
            for request, segment in zip(owners, segments, strict=True):
                request.durable += segment.length
            first = first_tokens(logits, [owners[i] for i in done]) if done else []
            runs = [
                self._emit(owners[i], [token], 0, stopper.cut(owners[i], [token]))
                for i, token in zip(done, first, strict=True)
            ]
            self.stats.prefill_seconds += time.perf_counter() - began
            yield from runs

    def _chunk(self, pending: deque[Request]) -> tuple[list[Segment], list[Request]]:
        """Take the next prompt tokens, of as many requests as fit; drop those that are through."""
        segments: list[Segment] = []
        owners: list[Request] = []
        room = self._prefill_chunk
        while pending and room:
            request = pending[0]
            length = min(room, request.prompt_length - request.durable)
            segments.append(Segment(_page(request), request.durable, length))
            owners.append(request)
            room -= length
            if request.durable + length == request.prompt_length:
                pending.popleft()
        return segments, owners

    def _window(
        self, active: Sequence[Request], options: Options, stopper: Stopper
    ) -> Iterator[TokenRun]:
        began = time.perf_counter()
        proposal = self._propose(active, options)
        drafts = proposal.tokens
        self.stats.draft_seconds += time.perf_counter() - began
        segments = [
            Segment(_page(r), r.durable, len(d) + 1) for r, d in zip(active, drafts, strict=True)
        ]
        tokens = [t for r, d in zip(active, drafts, strict=True) for t in (int(r.tokens[-1]), *d)]

        def step(sink: Sink) -> tuple[list[Verdict], list[Cut]]:
            logits = self._forward(active, tokens, segments, sink)
            verdicts = verify(logits, active, proposal)
            cuts = [
                stopper.cut(r, [*d[: v.accepted], v.token])
                for r, d, v in zip(active, drafts, verdicts, strict=True)
            ]
            return verdicts, cuts

        verdicts, cuts = self._transact(segments, step)
        runs: list[TokenRun] = []
        for request, draft, verdict, cut in zip(active, drafts, verdicts, cuts, strict=True):
            request.durable += kept_drafts(verdict, cut) + 1
            run = [*draft[: verdict.accepted], verdict.token][: cut.length]
            runs.append(self._emit(request, run, min(verdict.accepted, cut.length), cut))
        kept = [kept_drafts(v, c) for v, c in zip(verdicts, cuts, strict=True)]
        self.stats.count_step([len(d) for d in drafts], kept, sum(c.length for c in cuts))
        self.stats.peak_durable_bytes = max(
            self.stats.peak_durable_bytes, self.store.durable_bytes([r.durable for r in active])
        )
        self.stats.decode_seconds += time.perf_counter() - began
        yield from runs

    def _propose(self, active: Sequence[Request], options: Options) -> Proposal:
        """Ask the drafter, check what it says, and cut what is too long."""
        limits = [min(options.num_draft_tokens, r.remaining - 1) for r in active]
        if not any(limits):
            return Proposal([[] for _ in active])
        proposal = self.drafter.propose(active, limits)
        return checked_proposal(
            type(self.drafter).__name__,
            proposal,
            active,
            limits=limits,
            vocab_size=self.runner.vocab_size,
        )

    def _forward(
        self,
        requests: Sequence[Request],  # noqa: ARG002 - an audit wants to know whose rows they are
        tokens: Sequence[int],
        segments: Sequence[Segment],
        sink: Sink,
        keep: Sequence[int] | None = None,
    ) -> Tensor:
        """Run the rows of a step; windows want all logits, prompts those that they `keep`."""
        return self.runner.forward(self.store, tokens, segments, sink, keep)

    def _transact(
        self,
        segments: Sequence[Segment],
        step: Callable[[Sink], tuple[list[Verdict], list[Cut]]],
    ) -> tuple[list[Verdict], list[Cut]]:
        """Run a verify step and make exactly the accepted rows durable."""
        if self.mode is Mode.STAGE:
            rows = WindowRows.step([s.length - 1 for s in segments])
            with self.cache.begin(rows, slots_of(self.store, segments)) as window:
                verdicts, cuts = step(Stage(window))
                kept, truncated = accepted_drafts(verdicts, cuts)
                window.commit(kept, truncated=truncated)
            return verdicts, cuts
        wrote = Written()
        try:
            return step(WriteThrough(self.store, segments, wrote))
        finally:  # what a failed step wrote stays written
            if self.mode is Mode.IMMEDIATE:
                drafts = sum(s.length - 1 for s in segments)
                self.metrics.count_written_through(drafts, wrote)

    def _emit(self, request: Request, run: list[int], drafts: int, cut: Cut) -> TokenRun:
        request.append(run, drafts)
        request.finish = cut.reason
        return TokenRun(request, run, drafts)

    def close(self) -> None:
        """Give the model its attention back."""
        self.drafter.close()
        self.runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _page(request: Request) -> int:
    assert request.page is not None, "a running request has a page"  # noqa: S101
    return request.page


def _ends(segments: Sequence[Segment]) -> list[int]:
    """Return the last row of each segment."""
    ends: list[int] = []
    row = -1
    for segment in segments:
        row += segment.length
        ends.append(row)
    return ends
