"""An assistant model as drafter, with a transactional cache of its own.

Its rows are treated as the target's are: verified tokens are written to its durable store, drafts are
staged, one forward per draft position, and when the next call shows what the target made of them one
commit moves those that were right. A rejected row never reaches the assistant's store either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from nwor.cache import RowWindow, TransactionalCache
from nwor.engine.drafters.base import Drafter, EngineSizes, Proposal
from nwor.engine.request import Request
from nwor.engine.runner import Runner
from nwor.engine.sampling import argmax, draw, probabilities
from nwor.engine.sinks import Stage, WriteThrough, slots_of
from nwor.engine.step import Earlier, Segment
from nwor.engine.store import DurableStore
from nwor.errors import InputError
from nwor.metrics import Metrics, Written
from nwor.window_rows import WindowRows

_CHUNK = 512


@dataclass(slots=True, eq=False)
class _Track:
    """What the assistant knows of a request."""

    page: int
    durable: int = 0
    drafts: list[int] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)


class AssistantDrafter(Drafter):
    """Drafts with a smaller model of the same vocabulary.

    Attributes:
        metrics: of the assistant's own windows.

    Args:
        model: a causal model of a supported kind, not the target itself.

    Raises:
        UnsupportedModelError: a model that cannot be run exactly.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.metrics = Metrics()
        self._runner = Runner(model)
        self._tracks: dict[Request, _Track] = {}
        self._free: list[int] = []
        self._window: RowWindow | None = None
        self._drafting: list[Request] = []

    def bind(self, sizes: EngineSizes) -> None:
        """Allocate the assistant's store.

        Raises:
            InputError: the assistant's vocabulary or context is not the target's.
        """
        if self._runner.vocab_size != sizes.vocab_size:
            raise InputError(
                f"the assistant has {self._runner.vocab_size} token ids, the target "
                f"{sizes.vocab_size}: drafts would mean other tokens"
            )
        context = getattr(
            self._runner.model.config.get_text_config(), "max_position_embeddings", None
        )
        if context is not None and sizes.max_length > context:
            raise InputError(
                f"sequences of {sizes.max_length} tokens do not fit the assistant's {context}"
            )
        self._store = self._runner.new_store(
            pages=sizes.max_batch, max_length=sizes.max_length, spare=sizes.max_draft
        )
        self._cache = TransactionalCache(
            {name: group.rows for name, group in self._store.groups.items()},
            max_rows=sizes.max_batch * max(sizes.max_draft, 1),
            metrics=self.metrics,
        )
        self._free = list(range(sizes.max_batch))
        self._tracks = {}

    @property
    def store(self) -> DurableStore:
        """The assistant's durable rows."""
        return self._store

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> Proposal:
        """Draft one position at a time, for all requests together."""
        self._settle(requests)
        tracks = [self._track(request) for request in requests]
        logits = self._catch_up(requests, tracks)
        chains = [
            (request, track, limit)
            for request, track, limit in zip(requests, tracks, limits, strict=True)
            if limit
        ]
        wanted = [i for i, limit in enumerate(limits) if limit]
        if chains:
            self._choose(logits[wanted], [(r, t) for r, t, _ in chains])
            self._extend(chains)
        sampled = any(not r.sampling.greedy for r in requests)
        probs = [_stacked(t.probs, logits) for t in tracks] if sampled else ()
        return Proposal([list(t.drafts) for t in tracks], probs)

    def _settle(self, requests: Sequence[Request]) -> None:
        """Commit what the target accepted since the last call; forget requests that have ended."""
        running = set(requests)
        if self._window is not None:
            accepted, dropped = [], []
            for index, request in enumerate(self._drafting):
                track = self._tracks[request]
                kept = _agreeing(track, request) if request in running else 0
                accepted.append(kept)
                track.durable += kept
                if request not in running:
                    dropped.append(index)
            window, self._window = self._window, None
            with window:
                window.commit(accepted, dropped=dropped)
        for request in [r for r in self._tracks if r not in running]:
            self._free.append(self._tracks.pop(request).page)

    def _track(self, request: Request) -> _Track:
        track = self._tracks.get(request)
        if track is None:
            track = self._tracks[request] = _Track(self._free.pop(0))
        track.drafts, track.probs = [], []
        return track

    def _catch_up(self, requests: Sequence[Request], tracks: Sequence[_Track]) -> Tensor:
        """Write the verified tokens the assistant has not seen; return the last one's logits."""
        while True:
            missing = [len(r.tokens) - t.durable for r, t in zip(requests, tracks, strict=True)]
            last = max(missing) <= _CHUNK
            lengths = missing if last else [min(n - 1, _CHUNK) for n in missing]
            logits = self._verified(requests, tracks, lengths)
            if last:
                return logits

    def _verified(
        self, requests: Sequence[Request], tracks: Sequence[_Track], lengths: Sequence[int]
    ) -> Tensor:
        tokens: list[int] = []
        segments: list[Segment] = []
        for request, track, length in zip(requests, tracks, lengths, strict=True):
            if length:
                tokens += request.tokens[track.durable : track.durable + length].tolist()
                segments.append(Segment(track.page, track.durable, length))
        ends = torch.tensor([s.length for s in segments]).cumsum(0) - 1
        sink = WriteThrough(self._store, segments, Written())
        logits = self._runner.forward(self._store, tokens, segments, sink, ends.tolist())
        for track, length in zip(tracks, lengths, strict=True):
            track.durable += length
        return logits

    def _extend(self, chains: Sequence[tuple[Request, _Track, int]]) -> None:
        """Draft positions 2, 3, …: each forward stages the row of the draft before."""
        longer = [chain for chain in chains if chain[2] > 1]
        if not longer:
            return
        # Rows of the window in the order they will be staged: position by position.
        order = [
            (index, depth)
            for depth in range(1, max(limit for _, _, limit in longer))
            for index, (_, _, limit) in enumerate(longer)
            if limit > depth
        ]
        rows = WindowRows(
            num_drafts=tuple(limit - 1 for _, _, limit in longer),
            request=torch.tensor([index for index, _ in order]),
            depth=torch.tensor([depth for _, depth in order]),
            num_bonus=0,
        )
        places = [
            Segment(longer[i][1].page, longer[i][1].durable + depth - 1, 1) for i, depth in order
        ]
        self._drafting = [request for request, _, _ in longer]
        self._window = self._cache.begin(rows, slots_of(self._store, places))
        try:
            self._stage_chain(longer, order)
        except BaseException:
            self._window.abort()
            self._window = None
            raise

    def _stage_chain(
        self, longer: Sequence[tuple[Request, _Track, int]], order: Sequence[tuple[int, int]]
    ) -> None:
        assert self._window is not None  # noqa: S101 - opened by the caller
        row_of = {place: row for row, place in enumerate(order)}
        for depth in range(1, max(limit for _, _, limit in longer)):
            going = [i for i, (_, _, limit) in enumerate(longer) if limit > depth]
            members = [(longer[i][0], longer[i][1]) for i in going]
            staged = [row_of[i, before] for i in going for before in range(1, depth)]
            earlier = Earlier(self._window, torch.tensor(staged), depth - 1) if staged else None
            segments = [
                Segment(track.page, track.durable + depth - 1, 1, staged=depth - 1)
                for _, track in members
            ]
            logits = self._runner.forward(
                self._store,
                [track.drafts[-1] for _, track in members],
                segments,
                Stage(self._window),
                earlier=earlier,
            )
            self._choose(logits, members)

    def _choose(self, logits: Tensor, members: Sequence[tuple[Request, _Track]]) -> None:
        """Add one draft to each chain: the most likely token, or a draw."""
        best = argmax(logits).tolist() if all(r.sampling.greedy for r, _ in members) else None
        for row, (request, track) in enumerate(members):
            if best is not None:
                track.drafts.append(best[row])
                continue
            chances = probabilities(logits[row : row + 1], request.sampling)[0]
            track.drafts.append(draw(chances, request.generator))
            track.probs.append(chances)

    def close(self) -> None:
        """Drop what is staged and give the assistant its attention back."""
        if self._window is not None:
            self._window.abort()
            self._window = None
        self._tracks.clear()
        self._runner.close()


def _agreeing(track: _Track, request: Request) -> int:
    """Count the staged drafts that the target has emitted."""
    said = request.tokens[track.durable :]
    kept = 0
    while kept < min(len(track.drafts) - 1, len(said)) and track.drafts[kept] == said[kept]:
        kept += 1
    return kept


def _stacked(probs: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.stack(list(probs)) if probs else like.new_empty((0, like.shape[-1]))
