"""From a step's logits to what each request accepts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from nwor.engine.drafters import Proposal
from nwor.engine.request import Request
from nwor.engine.sampling import Verdict, argmax, probabilities, verify_greedy, verify_sampled
from nwor.engine.stopping import Cut


def first_tokens(logits: Tensor, requests: Sequence[Request]) -> list[int]:
    """Choose the token after each prompt, from one row of logits per request."""
    if all(r.sampling.greedy for r in requests):
        chosen: list[int] = argmax(logits).tolist()
        return chosen
    return [v.token for v in verify(logits, requests, Proposal([[] for _ in requests]))]


def verify(logits: Tensor, requests: Sequence[Request], proposal: Proposal) -> list[Verdict]:
    """Verify each request's drafts against its rows of the logits."""
    greedy = all(r.sampling.greedy for r in requests)
    chosen: list[int] = argmax(logits).tolist() if greedy else []
    verdicts: list[Verdict] = []
    row = 0
    for index, (request, drafts) in enumerate(zip(requests, proposal.tokens, strict=True)):
        end = row + len(drafts) + 1
        if greedy:
            verdicts.append(verify_greedy(chosen[row:end], drafts))
        else:
            target = probabilities(logits[row:end], request.sampling)
            proposed = proposal.probs[index] if proposal.probs else None
            verdicts.append(verify_sampled(target, drafts, proposed, request.generator))
        row = end
    return verdicts


def kept_drafts(verdict: Verdict, cut: Cut) -> int:
    """Return the drafts that become durable: accepted and emitted."""
    return min(verdict.accepted, cut.length)


def accepted_drafts(verdicts: Sequence[Verdict], cuts: Sequence[Cut]) -> tuple[list[int], int]:
    """Return each request's drafts that become durable, and how many a stop took away."""
    kept = [kept_drafts(v, c) for v, c in zip(verdicts, cuts, strict=True)]
    return kept, sum(v.accepted for v in verdicts) - sum(kept)
