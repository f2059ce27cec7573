"""The device overlay does what the host's does, bit for bit, at every stage of a window."""

from __future__ import annotations

import itertools

import pytest
import torch
from twins import Spec, Twins

from nwor import Layout


@pytest.mark.parametrize("page_size", [4, 16])
def test_every_acceptance_at_every_page_edge(page_size: int) -> None:
    for k, rejected in ((1, 0), (3, 0), (3, 1), (3, 3)):
        twins = Twins([Spec(page_size)])
        twins.add("a", page_size - 3)
        for _ in range(6):
            twins.step({"a": k}, {"a": rejected})


def test_ragged() -> None:
    twins = Twins([Spec(4), Spec(8)])
    for name, length in (("a", 3), ("b", 5), ("c", 8)):
        twins.add(name, length)
    for a, c in itertools.product(range(3), range(2)):
        twins.step({"a": 3, "b": 0, "c": 1}, {"a": a, "c": c}, rows={"b": 2})
