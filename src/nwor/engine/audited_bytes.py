"""The byte level of an audited embedded engine: what is in the store, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from nwor.audit import Kind, ShadowMap
from nwor.audit.final import bits, compare
from nwor.audit.names import Ints
from nwor.engine.request import Request
from nwor.engine.runner import Runner
from nwor.engine.sinks import WriteThrough
from nwor.engine.step import Segment
from nwor.engine.store import DurableStore, Group
from nwor.metrics import Written


class EngineBytes:
    """Snapshots of the stores of all groups, and the rows that were sent to them in this step.

    Costs a second copy of the stores, and a comparison of all rows in every step.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self._sent: list[tuple[Group, int, Tensor, Tensor, Tensor]] = []
        self._before = {group.name: _snapshot(group) for group in groups}

    def expect(self, group: Group, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Remember rows ``[n, heads, dim]`` that go to slots ``[n]`` of one layer."""
        self._sent.append((group, layer, slots.clone(), bits(key.clone()), bits(value.clone())))

    def check(self, shadow: ShadowMap, kept: Ints, base: Mapping[str, int]) -> None:
        """See that kept rows came home as they were sent, in all layers, and nothing else changed.

        Args:
            shadow: takes the findings.
            kept: slots of accepted rows, as the map counts them.
            base: the first slot of each group, as the map counts them.
        """
        for number, group in enumerate(self._groups):
            after = _snapshot(group)
            changed = torch.zeros(group.rows.num_slots, dtype=torch.bool)
            for then, now in zip(self._before[group.name], after, strict=True):
                changed |= (then != now).flatten(3).any(-1).any(0).flatten().cpu()
            self._before[group.name] = after
            mine = kept - base[group.name]
            changed[torch.from_numpy(mine[(mine >= 0) & (mine < len(changed))])] = False
            if changed.any():
                slot = int(torch.nonzero(changed)[0, 0])
                place = {"group": number, "slot": slot + base[group.name]}
                shadow.report(Kind.BYTES_FOREIGN, int(changed.sum()), **place)
            self._check_sent(shadow, number, group, base[group.name])
        self._sent.clear()

    def _check_sent(self, shadow: ShadowMap, number: int, group: Group, base: int) -> None:
        rows = group.rows
        layers = set()
        for owner, layer, slots, *sent in self._sent:
            if owner is not group:
                continue
            layers.add(layer)
            wrong = torch.zeros(len(slots), dtype=torch.bool)
            for view, row in zip((rows.key, rows.value), sent, strict=True):
                home = bits(view[layer].flatten(0, 1)[slots])
                wrong |= (home != row).flatten(1).any(-1).cpu()
            if wrong.any():
                slot = int(slots[int(torch.nonzero(wrong)[0, 0])])
                place = {"group": number, "layer": layer, "slot": slot + base}
                shadow.report(Kind.BYTES_LOST, int(wrong.sum()), **place)
        missing = set(range(rows.num_layers)) - layers
        if missing:
            shadow.report(Kind.BYTES_LOST, len(missing), group=number, layer=min(missing))


def _snapshot(group: Group) -> tuple[Tensor, Tensor]:
    return bits(group.rows.key).clone(), bits(group.rows.value).clone()


@dataclass(slots=True)
class _Kept:
    """The rows of an ended request.

    Attributes:
        name: the request.
        prompt: tokens of its prompt.
        tokens: tokens of all its durable rows.
        rows: by group, K and V ``[layers, positions, heads, dim]`` of the last positions.
    """

    name: str
    prompt: int
    tokens: list[int]
    rows: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


class FinalRows:
    """Durable rows of ended requests, compared with those of a run without speculation.

    That run is given the same tokens, one at a time after the prompt, so that answers that differ by
    arithmetic cannot hide rows. See `nwor.audit.final` for what may differ.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self._ended: list[_Kept] = []

    def keep(self, request: Request) -> None:
        """Copy the rows that the request's next token would see; its page is still its own."""
        assert request.page is not None, "its page is still its own"  # noqa: S101
        if not request.durable:
            return
        tokens: list[int] = request.tokens[: request.durable].tolist()
        kept = _Kept(str(request.index), min(request.prompt_length, len(tokens)), tokens)
        for group in self._groups:
            kept.rows[group.name] = _last_rows(group, request.page, len(tokens))
        self._ended.append(kept)

    def check(self, runner: Runner, shadow: ShadowMap, chunk: int) -> None:
        """Run the same tokens without speculation and compare; forgets the rows.

        Args:
            runner: the audited engine's, between runs.
            shadow: takes the findings.
            chunk: most prompt tokens per forward.
        """
        ended, self._ended = self._ended, []
        if not ended:
            return
        longest = max(len(kept.tokens) for kept in ended)
        store = runner.new_store(pages=len(ended), max_length=longest, spare=0)
        for page, kept in enumerate(ended):
            for start in range(0, kept.prompt, chunk):
                _run(runner, store, [(page, kept)], start, min(chunk, kept.prompt - start))
        for step in range(max(len(kept.tokens) - kept.prompt for kept in ended)):
            rows = [(p, k) for p, k in enumerate(ended) if k.prompt + step < len(k.tokens)]
            _run(runner, store, rows, step, None)
        for page, kept in enumerate(ended):
            for number, group in enumerate(store.groups.values()):
                wanted = _last_rows(group, page, len(kept.tokens))
                length = len(kept.tokens)
                positions = np.arange(length - wanted[0].shape[1], length)
                found = kept.rows[group.name]
                compare(shadow.findings, kept.name, number, positions, kept.prompt, found, wanted)


def _run(
    runner: Runner,
    store: DurableStore,
    rows: Sequence[tuple[int, _Kept]],
    at: int,
    length: int | None,
) -> None:
    """Run `length` tokens of a prompt from `at` on, or (None) the `at`-th token after each prompt."""
    starts = [at if length else kept.prompt + at for _, kept in rows]
    segments = [
        Segment(page, start, length or 1) for (page, _), start in zip(rows, starts, strict=True)
    ]
    tokens = [
        t for (_, k), s in zip(rows, starts, strict=True) for t in k.tokens[s : s + (length or 1)]
    ]
    runner.forward(store, tokens, segments, WriteThrough(store, segments, Written()), [0])


def _last_rows(group: Group, page: int, length: int) -> tuple[Tensor, Tensor]:
    """Copy the rows inside the window of the next token, ``[layers, positions, heads, dim]``."""
    seen = length if group.window is None else min(length, group.window)
    at = torch.arange(length - seen, length, device=group.rows.device) % group.capacity
    return group.rows.key[:, page, at].clone(), group.rows.value[:, page, at].clone()
