"""What an engine is given, checked before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from nwor.engine.drafters import Proposal
from nwor.engine.options import MAX_DRAFT_TOKENS
from nwor.engine.request import Request
from nwor.errors import InputError

_DEFAULT_LENGTH = 2048


def checked_sizes(
    model: PreTrainedModel,
    max_batch: int,
    max_length: int | None,
    max_draft: int,
    prefill_chunk: int,
) -> int:
    """Return the longest sequence, or say which size is out of range."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    length = min(_DEFAULT_LENGTH, context or _DEFAULT_LENGTH) if max_length is None else max_length
    sizes = {"max_batch": max_batch, "max_length": length, "prefill_chunk": prefill_chunk}
    for name, value in sizes.items():
        if value < 1:
            raise InputError(f"{name} must be at least 1, got {value}")
    if not 0 <= max_draft <= MAX_DRAFT_TOKENS:
        raise InputError(f"max_draft must be 0…{MAX_DRAFT_TOKENS}, got {max_draft}")
    if context is not None and length > context:
        raise InputError(
            f"sequences of {length} tokens do not fit the model's context of {context}"
        )
    return length


def check_prompt(
    index: int, prompt: Sequence[int], *, max_new_tokens: int, max_length: int, vocab_size: int
) -> None:
    """Refuse a prompt that cannot be continued.

    Raises:
        InputError: empty, too long, or ids that the model does not know.
    """
    if not len(prompt):
        raise InputError(f"prompt {index} is empty: there is nothing to continue")
    if len(prompt) + max_new_tokens > max_length:
        raise InputError(
            f"prompt {index} has {len(prompt)} tokens and may get {max_new_tokens} more; "
            f"sequences may have {max_length}"
        )
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise InputError(f"prompt {index} has ids outside 0…{vocab_size - 1}")


def checked_proposal(
    name: str,
    proposal: Proposal,
    active: Sequence[Request],
    *,
    limits: Sequence[int],
    vocab_size: int,
) -> Proposal:
    """Cut the drafts of the drafter called `name` to `limits`.

    Raises:
        InputError: drafts for another number of requests, ids that the model does not know, or
            distributions of another shape.
    """
    if len(proposal.tokens) != len(active) or len(proposal.probs) not in (0, len(active)):
        raise InputError(
            f"{name} returned drafts for {len(proposal.tokens)} requests and distributions for "
            f"{len(proposal.probs)}, of {len(active)}"
        )
    tokens = [list(d[:limit]) for d, limit in zip(proposal.tokens, limits, strict=True)]
    for request, draft in zip(active, tokens, strict=True):
        if draft and (min(draft) < 0 or max(draft) >= vocab_size):
            raise InputError(
                f"{name} drafted {draft} for request {request.index}; ids are 0…{vocab_size - 1}"
            )
    for request, draft, probs in zip(active, tokens, proposal.probs, strict=False):
        if draft and (probs.shape[0] < len(draft) or probs.shape[1:] != (vocab_size,)):
            raise InputError(
                f"{name} gave distributions of shape {tuple(probs.shape)} for {len(draft)} drafts of "
                f"request {request.index}; a row of {vocab_size} for each is needed"
            )
    return Proposal(tokens, proposal.probs)
