"""Tiny models are faster on one thread, and two OpenMP threads stall each other on a busy machine."""

from collections.abc import Iterator

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from engine import models


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, so that characters span tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: models.VOCAB - 1]
    vocab = {"<pad>": 0} | {letter: i + 1 for i, letter in enumerate(alphabet)}
    inner = Tokenizer(BPE(vocab, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>")
