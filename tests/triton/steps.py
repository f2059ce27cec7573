"""Two requests about to verify on a device: the step that most of its tests start from."""

from __future__ import annotations

import numpy as np
import torch
from twins import DEVICE, Spec, Twins, whole_bytes

from nwor.store.device_overlay import DeviceBatch


def engine(*specs: Spec, drafts: dict[str, int] | None = None, **options) -> Twins:
    """Two requests, prepared for a step in which both verify."""
    twins = Twins(specs or (Spec(4), Spec(8)), **options)
    twins.drafts = drafts or {"a": 2, "b": 3}
    twins.add("a", 6)
    twins.add("b", 3)
    twins.prepare({name: k + 1 for name, k in twins.drafts.items()})
    return twins


def batch_of(twins: Twins, **changes) -> DeviceBatch:
    names = list(twins.drafts)
    given = {
        "requests": names,
        "table_rows": np.array([twins.lines[name] for name in names]),
        "query_lens": np.array([twins.counts[name] for name in names]),
        "num_drafts": np.array([twins.drafts[name] for name in names]),
        "query_start_loc": twins.query_start_loc,
        "positions": twins.positions,
    }
    return DeviceBatch(**given | changes)


def rejecting(twins: Twins, *counts: int) -> torch.Tensor:
    numbers = torch.full((twins.tables[0].shape[0],), -7, dtype=torch.int32)
    numbers[: len(counts)] = torch.tensor(counts, dtype=torch.int32)
    return numbers.to(DEVICE)


def everything(twins: Twins) -> list[torch.Tensor]:
    """The device's tables, slot mappings and stores."""
    stores = [whole_bytes(rows) for rows in twins.copies]
    return [tensor.clone() for tensor in (*twins.their_tables, *twins.their_slots, *stores)]


def same(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
