"""The byte level: durable pages full of a pattern, compared before and after every step.

Metadata says which rows should have changed; only bytes say that all layers did, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nwor.audit.findings import Kind
from nwor.audit.names import Ints
from nwor.audit.shadow import Durable, ShadowMap
from nwor.layout import KVRows

CANARY = 0.5
"""Finite: vLLM's attention multiplies masked rows by zero, and NaN would come through."""
CANARY_BYTE = 0x2A


class ByteAudit:
    """Snapshots of the durable pages of all layers.

    Costs a second copy of the durable pages, and a comparison of all of them in every step.

    Args:
        groups: for each cache group the rows of its layers, in the page ids of the shadow map. Groups
            may share stores.
        first_staging: first page that is not durable.
    """

    def __init__(self, groups: Sequence[Sequence[KVRows]], first_staging: int) -> None:
        self._durable = first_staging
        self._groups = groups
        self._stores: dict[tuple[int, ...], KVRows] = {}
        for group in groups:
            for rows in group:
                self._stores.setdefault(_identity(rows), rows)
        self._before: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        self.fill()

    def fill(self) -> None:
        """Fill all durable pages with the pattern; no request may be running."""
        with torch.inference_mode():
            for rows in self._stores.values():
                for view in (rows.key, rows.value):
                    view[:, : self._durable] = CANARY_BYTE if view.dtype == torch.uint8 else CANARY
        self._before = {name: self._snapshot(rows) for name, rows in self._stores.items()}

    def check(self, shadow: ShadowMap, step: Durable) -> None:
        """Compare with the last step; the map takes the findings."""
        kept = step.kept
        for name, rows in self._stores.items():
            after = self._snapshot(rows)
            changed = torch.zeros(after[0].shape[1:3], dtype=torch.bool)
            for then, now in zip(self._before[name], after, strict=True):
                changed |= (then != now).flatten(3).any(-1).any(0)
            self._before[name] = after
            changed = changed.flatten()
            changed[torch.from_numpy(kept[kept < len(changed)])] = False
            if changed.any():
                slot = int(torch.nonzero(changed)[0, 0])
                shadow.report(Kind.BYTES_FOREIGN, int(changed.sum()), slot=slot)
        for source, target in step.moved:
            for number in range(len(self._groups)):
                mine = np.isin(target, step.slots[number])
                self._compare(shadow, number, source[mine], target[mine])

    def _compare(self, shadow: ShadowMap, number: int, source: Ints, target: Ints) -> None:
        """See that rows came home in every layer as they were staged."""
        layer = 0
        for rows in self._groups[number]:
            size = rows.page_size
            wrong = torch.zeros((rows.num_layers, len(target)), dtype=torch.bool)
            for view in (rows.key, rows.value):
                staged = view[:, source // size, source % size]
                home = view[:, target // size, target % size]
                wrong |= (staged != home).flatten(2).any(-1)
            for at, row in torch.nonzero(wrong).tolist()[:1]:
                place = {"group": number, "layer": layer + at, "slot": int(target[row])}
                shadow.report(Kind.BYTES_LOST, int(wrong.sum()), **place)
            layer += rows.num_layers

    def _snapshot(self, rows: KVRows) -> tuple[Tensor, Tensor]:
        end = self._durable
        return rows.key[:, :end].clone(), rows.value[:, :end].clone()


def _identity(rows: KVRows) -> tuple[int, ...]:
    return rows.key.data_ptr(), rows.value.data_ptr(), *rows.key.shape
