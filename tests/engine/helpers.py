"""Running the engine in tests, and drafters that misbehave on purpose."""

from collections.abc import Sequence

from transformers import PreTrainedModel

from nwor.engine.core import Engine
from nwor.engine.drafters import Drafter, Proposal
from nwor.engine.options import Options
from nwor.engine.request import Request


def run(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], options: Options, **engine: object
) -> tuple[list[list[int]], Engine]:
    """Generate with a poisoned engine; return emitted tokens per prompt and the closed engine."""
    longest = max(map(len, prompts)) + options.max_new_tokens
    sizes = {
        "max_batch": len(prompts), "max_length": longest, "poison": True,
        "max_draft": max(options.num_draft_tokens, 1),
    }  # fmt: skip
    out: list[list[int]] = [[] for _ in prompts]
    with Engine(model, **(sizes | engine)) as made:
        for piece in made.run(prompts, options):
            out[piece.request.index] += piece.tokens
    assert made.free_pages == (sizes | engine)["max_batch"]
    assert made.cache.window is None
    return out, made


class Oracle(Drafter):
    """Knows what the target will say, and drafts it: right, wrong, too much, or not at all."""

    def __init__(
        self, answers: dict[tuple[int, ...], list[int]], *, right: int | None = None, vocab: int = 97,
        silent: bool = False, extra: int = 0,
    ) -> None:  # fmt: skip
        self._answers, self._right, self._vocab = answers, right, vocab
        self._silent, self._extra = silent, extra
        self._calls = 0

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> Proposal:
        self._calls += 1
        return Proposal(
            [self._draft(r, k + self._extra) for r, k in zip(requests, limits, strict=True)]
        )

    def _draft(self, request: Request, count: int) -> list[int]:
        if self._silent and (request.index + self._calls) % 2:
            return []
        tokens = request.tokens.tolist()
        full = self._answers[tuple(tokens[: request.prompt_length])]
        draft = full[len(tokens) - request.prompt_length :][:count]
        if self._right is None:
            return draft
        return [
            token if at < self._right else (token + 1) % self._vocab
            for at, token in enumerate(draft)
        ]
