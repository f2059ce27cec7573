"""What both engines run: one model, the texts it writes, and how many requests at a time."""

from __future__ import annotations

from typing import Any

from nwor.soak.tiny import VOCAB, greedy_texts
from nwor.soak.traffic import MAX_TOKENS, Traffic

MODEL = "gemma3-untied"
"""See `nwor.soak.tiny`."""
K = 6
"""Most drafts per request and step."""
MAX_BATCH = 6
_START, _LENGTH, _TEXTS = 6, 176, 24
MAX_LENGTH = _LENGTH + MAX_TOKENS
"""Longest sequence that the engines are made for, in tokens."""


def traffic_of(model: Any, seed: int) -> Traffic:  # noqa: ANN401 - a transformers model
    """Let stock transformers write texts with a model's weights; return traffic made of them."""
    texts = greedy_texts(model, _TEXTS, start=_START, length=_LENGTH, seed=seed)
    return Traffic(seed, texts, start=_START, k=K, vocabulary=len(VOCAB))
