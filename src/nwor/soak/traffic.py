"""Random requests that follow from a seed alone, whatever engine they are sent to.

Traffic comes in waves, between which an engine is idle: then nobody may hold anything. Within a wave
requests arrive all at once, in a steady flow or now and then. The prompt of a request is the beginning
of a text that the model wrote itself, so its right answer is how that text goes on, and drafts can be
right or wrong at will.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

MAX_WAVE = 48
"""Requests of a wave, at most."""
MAX_TOKENS = 48
"""Tokens of an answer, at most."""


@dataclass(frozen=True, slots=True)
class Visit:
    """One request.

    Attributes:
        index: its place in the wave.
        arrive: step of the wave before which it arrives.
        abort: step before which it is aborted, if it still runs then; 0 for never.
        text: what prompt and answer are cut from.
        length: tokens of the prompt.
        tokens: tokens of the answer.
        k: most drafts per step.
        right: chance that a draft is right, if those before it are.
    """

    index: int
    arrive: int
    abort: int
    text: Sequence[int]
    length: int
    tokens: int
    k: int
    right: float

    @property
    def prompt(self) -> list[int]:
        """Ids of the prompt."""
        return list(self.text[: self.length])

    @property
    def answer(self) -> list[int]:
        """What the model says without speculation."""
        return list(self.text[self.length : self.length + self.tokens])


@dataclass(frozen=True, slots=True)
class Wave:
    """Requests between two moments at which the engine is idle.

    Attributes:
        number: from 0.
        visits: in the order of arrival.
        leave: step before which all that still run or wait are aborted; 0 for none.
        fresh: begin without cached prefixes, where the engine has any.
    """

    number: int
    visits: tuple[Visit, ...]
    leave: int
    fresh: bool


class Traffic:
    """All waves of a seed.

    Args:
        seed: same seed and texts, same traffic.
        texts: greedy texts of the model; none shorter than 8 tokens.
        start: least tokens of a prompt: those that the model did not write.
        k: most drafts of any request.
        vocabulary: number of token ids.
    """

    def __init__(
        self, seed: int, texts: Sequence[Sequence[int]], *, start: int, k: int, vocabulary: int
    ) -> None:
        self.seed, self.k = seed, k
        self._texts, self._start, self._vocabulary = texts, start, vocabulary

    def waves(self) -> Iterator[Wave]:
        """Yield waves without end."""
        return map(self.wave, count())

    def wave(self, number: int) -> Wave:
        """Return one wave."""
        rng = self._rng("wave", number)
        pace = rng.choice((0, 1, 1, 3))
        arrive, visits = 0, []
        for index in range(rng.randint(1, MAX_WAVE)):
            arrive += pace * rng.choice((0, 0, 1, 1, 2, 5))
            visits.append(self._visit(rng, index, arrive))
        leave = rng.randint(1, arrive + 12) if rng.random() < 0.15 else 0
        return Wave(number, tuple(visits), leave, fresh=rng.random() < 0.25)

    def _visit(self, rng: random.Random, index: int, arrive: int) -> Visit:
        text = rng.choice(self._texts)
        length = rng.randint(self._start, len(text) - 1)
        return Visit(
            index,
            arrive,
            abort=arrive + rng.randint(1, 16) if rng.random() < 0.25 else 0,
            text=text,
            length=length,
            tokens=rng.randint(1, min(MAX_TOKENS, len(text) - length)),
            k=rng.randint(0, self.k),
            right=rng.choice((0.0, 0.3, 0.7, 0.9, 1.0)),
        )

    def draft(self, wave: int, visit: Visit, position: int, limit: int) -> list[int]:
        """Draft for a request with `position` tokens: some right ones, then wrong ones, or none.

        The same whenever it is asked for the same place, be it after a preemption.
        """
        rng = self._rng("draft", wave, visit.index, position)
        number = min(limit, visit.k)
        if rng.random() < 0.3:
            number = rng.randint(0, number)
        drafts = list(visit.text[position : position + number])
        right = 0
        while right < len(drafts) and rng.random() < visit.right:
            right += 1
        # One more than the right token is another token; what follows it may be anything.
        wrong = [(drafts[right] + 1) % self._vocabulary] if right < len(drafts) else []
        drafts = [*drafts[:right], *wrong]
        return drafts + [rng.randrange(self._vocabulary) for _ in range(number - len(drafts))]

    def _rng(self, *what: object) -> random.Random:
        return random.Random(repr((self.seed, *what)))  # noqa: S311 - repeatable, not secret
