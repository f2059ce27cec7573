"""Workloads that bring out every kind of fault, for any engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nwor.audit.findings import Findings
from nwor.errors import InputError

PAGE = 128
"""Page size of the audited vLLM engine."""
MAX_LENGTH = 1024
"""Longest sequence of an audited engine, in tokens."""
MAX_BATCH = 4
"""Requests that an audited engine runs at a time."""

CODE = (
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\ndef mul(a, b):\n"
)
LIST = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20,"
FACTS = "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is"
ROWS = '{"name": "Ann", "age": 31}\n{"name": "Bob", "age": 42}\n{"name":'


@dataclass(frozen=True, slots=True)
class Job:
    """One request: a text cut or filled to `length` tokens (0: as it is), and how it goes.

    Attributes:
        arrive: step before which it arrives.
        abort: step before which it is aborted, 0 for never.
        stop: stop at the n-th token of its undisturbed answer, 0 for not at all.
        inside: rather stop at the place nearest to it with more tokens of the same step behind it, if
            the undisturbed answer has one.
    """

    text: str
    tokens: int = 32
    length: int = 0
    arrive: int = 0
    abort: int = 0
    stop: int = 0
    inside: bool = False


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that run together, and what they are for.

    Attributes:
        about: what it exercises.
        absent: by engine, why it does not run there.
        remarks: by engine, what is not exercised there although it runs.
        needs: counts of the findings that must not be 0, or else it did not do what it is for; and what
            to say then.
        scarce: pages per cache group that all requests get together, fewer than they need, so that the
            scheduler has to preempt some; 0 for as many as there are.
    """

    jobs: tuple[Job, ...]
    about: str = ""
    absent: Mapping[str, str] = field(default_factory=dict)
    remarks: Mapping[str, str] = field(default_factory=dict)
    needs: Mapping[str, str] = field(default_factory=dict)
    scarce: int = 0

    def not_exercised(self, findings: Findings, engine: str) -> str:
        """Say what did not happen although the workload is for it; empty if it did.

        What an engine's remark says cannot happen there is not asked for.
        """
        if engine in self.remarks:
            return ""
        return "; ".join(text for name, text in self.needs.items() if not getattr(findings, name))


WORKLOADS: dict[str, Workload] = {
    "repetitive": Workload(
        tuple(Job(text) for text in (LIST, FACTS, ROWS, LIST[:30])),
        "text that repeats: many drafts accepted",
        needs={"accepted": "no draft was accepted"},
    ),
    "code": Workload(
        (Job(CODE, 48), Job(CODE * 2, 48)),
        "source code, longer answers",
        needs={"drafts": "nothing was drafted"},
    ),
    "ragged": Workload(
        tuple(
            Job(text, 8 + 9 * i, arrive=3 * i) for i, text in enumerate((CODE, LIST, FACTS, ROWS))
        ),
        "requests that come and go at different steps",
        needs={
            "joined": "no request came while others ran",
            "left": "no request ended while others ran",
        },
    ),
    "long": Workload(
        (Job(FACTS, 24, 900), Job(CODE, 24, 640)),
        "prompts of 640 and 900 tokens",
        needs={"drafts": "nothing was drafted"},
    ),
    "edges": Workload(
        tuple(Job(LIST, 24, PAGE + shift) for shift in (-5, -4, -1, 0)),
        "drafts before, at and across the edge of a page",
        needs={"crossed": "no window crossed the edge of a page"},
    ),
    "stops": Workload(
        (
            Job(LIST, 40, stop=17, inside=True),
            Job(CODE, 11),
            Job(FACTS, 40, stop=9, inside=True),
        ),
        "stops inside a run of accepted drafts",
        needs={"cut": "no stop fell inside a run of accepted drafts"},
    ),
    "aborts": Workload(
        (Job(LIST, 40, abort=6), Job(CODE, 40, abort=9), Job(FACTS, 40)),
        "requests aborted while others go on",
        needs={"aborted": "no request with a window was aborted while others went on"},
    ),
    "prefixes": Workload(
        tuple(Job(FACTS, 24, 2 * PAGE + 9 * i, arrive=2 * i) for i in range(3)),
        "prompts that begin alike, so pages are shared",
        remarks={"transformers": "shares no pages, so I3 does not apply"},
        needs={"adopted": "no rows of a cached prefix were taken over"},
    ),
    "preemption": Workload(
        tuple(Job(text, 40, PAGE - 20) for text in (LIST, CODE, FACTS)),
        "too few pages: requests preempted and resumed",
        absent={
            "transformers": "an admitted request has room for all its rows: nobody is preempted"
        },
        needs={"preempted": "no request was preempted"},
        scarce=4,  # three prompts fit, each in a page; the answers need two
    ),
}
"""By name. Prompts of one text and different lengths share a prefix."""


def prompt_ids(job: Job, tokenizer: Any) -> list[int]:  # noqa: ANN401 - a transformers tokenizer
    """Return a job's prompt: a first token if the model has one, then its text, cut or filled.

    Raises:
        InputError: prompt and answer are longer than an audited engine runs.
    """
    tokens: list[int] = tokenizer.encode(job.text, add_special_tokens=False)
    first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    if job.length:
        tokens = (tokens * (job.length // len(tokens) + 1))[: job.length - len(first)]
    prompt = first + tokens
    if len(prompt) + job.tokens > MAX_LENGTH:
        raise InputError(
            f"prompt {job.text[:20]!r}… has {len(prompt)} tokens and is to get {job.tokens} more: the "
            f"audit's engines run {MAX_LENGTH}"
        )
    return prompt


def stop_tokens(
    jobs: Sequence[Job], answer: Callable[[Sequence[Job]], Mapping[str, Sequence[Sequence[int]]]]
) -> list[int | None]:
    """Find the token that each job is to stop at, None for jobs that do not stop.

    Args:
        jobs: the jobs of a workload.
        answer: runs jobs, returns by the job's number the tokens of each of its steps.
    """
    if not any(job.stop for job in jobs):
        return [None] * len(jobs)
    answers = answer(undisturbed(jobs))
    return [_stop_token(job, answers[str(i)]) if job.stop else None for i, job in enumerate(jobs)]


def _stop_token(job: Job, steps: Sequence[Sequence[int]]) -> int:
    tokens = [token for step in steps for token in step]
    behind = [left for step in steps for left in range(len(step) - 1, -1, -1)]
    fits = [i for i, left in enumerate(behind) if left and tokens.index(tokens[i]) == i]
    near = min(fits, key=lambda i: abs(i - job.stop), default=job.stop)
    return tokens[near if job.inside else job.stop]


def undisturbed(jobs: Sequence[Job]) -> list[Job]:
    """Return the same prompts, none of them stopped, aborted or late."""
    return [Job(job.text, job.tokens, job.length) for job in jobs]
