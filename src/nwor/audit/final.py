"""Rows that a request ends with, compared with those of a run without speculation.

Batches of the two runs differ in shape, so rows may differ by rounding: allowed is ``sqrt(eps)`` of a
row's norm, eps that of the dtype. Another token's row differs by about its norm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nwor.audit.findings import Findings, Kind, Violation
from nwor.audit.names import Ints

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(rows: Tensor) -> Tensor:
    """View elements as integers: NaN equals itself there."""
    return rows.view(_INTEGERS[rows.element_size()])


def compare(
    findings: Findings,
    request: str,
    group: int,
    positions: Ints,
    prompt: int,
    found: Sequence[Tensor],
    wanted: Sequence[Tensor],
) -> None:
    """Compare rows; findings take the counts, the largest error, and a violation.

    Args:
        findings: of the run that speculated.
        request: whose rows they are.
        group: cache group of the rows.
        positions: ``[n]``, position of each row.
        prompt: tokens of the request's prompt; rows from there on are those that windows can spoil.
        found: K and V ``[layers, n, heads, dim]`` of the run that speculated.
        wanted: those of the run that did not.
    """
    if not len(positions):
        return
    limit = math.sqrt(torch.finfo(found[0].dtype).eps)
    equal = torch.ones(found[0].shape[:2], dtype=torch.bool)
    wrong = torch.zeros(found[0].shape[:2], dtype=torch.bool)
    for mine, reference in zip(found, wanted, strict=True):
        equal &= (bits(mine) == bits(reference)).flatten(2).all(-1).cpu()
        difference = (mine.double() - reference.double()).flatten(2)
        norm = difference.norm(dim=-1)
        error = torch.where(norm == 0, 0.0, norm / reference.double().flatten(2).norm(dim=-1))
        wrong |= ~(error <= limit).cpu()  # NaN is wrong; a row of zeros (padding) equals itself
        findings.final_error = max(findings.final_error, float(error.max()))
        findings.final_abs = max(findings.final_abs, float(difference.abs().max()))
    findings.final_limit = max(findings.final_limit, limit)
    findings.final_rows += len(positions)
    findings.final_answers += int((positions >= prompt).sum())
    findings.final_equal += int(equal.all(0).sum())
    if wrong.any():
        layer, at = torch.nonzero(wrong)[0].tolist()
        place = {"group": group, "layer": layer, "position": int(positions[at])}
        violation = Violation(Kind.FINAL_DIFFERS, findings.steps, request, **place)
        findings.add(violation, int(wrong.any(0).sum()))
