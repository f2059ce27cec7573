"""From what the sampler said to how many drafts each request keeps.

Everything here is element-wise or a cumulative sum over ``[drafts]``: no loop over requests, no
data-dependent shape, no host sync, on any device. ``accepted = a`` means that drafts 1…a of a request
are kept; the token sampled after them has no row yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nwor.errors import AcceptanceError
from nwor.window_rows import WindowRows

REJECTED = -1
"""What vLLM's rejection sampler puts behind the last token of a request."""


@dataclass(frozen=True, slots=True, eq=False)
class Acceptance:
    """Which drafts were accepted.

    Attributes:
        mask: bool ``[drafts]``, flattened request after request.
        counts: int64 ``[requests]``, accepted drafts of each request.
    """

    mask: Tensor
    counts: Tensor


def accepted_from_sampled(num_drafts: Sequence[int], sampled: Tensor) -> Tensor:
    """Count accepted drafts where -1 marks what comes after the rejection (vLLM's form).

    Args:
        num_drafts: drafts of each request.
        sampled: integer ``[requests, columns]``: accepted drafts, then the recovered or bonus token,
            then -1. A row of -1 alone belongs to a request that sampled nothing this step (a prefill
            chunk): it accepts 0 drafts.

    Returns:
        int64 ``[requests]`` on the device of `sampled`.

    Raises:
        AcceptanceError: `sampled` is not one row per request.
    """
    rows = WindowRows.drafts(num_drafts)
    table = _table(sampled, rows.num_requests)
    limit = _on(torch.tensor(rows.num_drafts), table.device)
    leading = (table != REJECTED).to(torch.int64).cumprod(1).sum(1) - 1
    return torch.minimum(leading.clamp_(min=0), limit)


def accept_matching(num_drafts: Sequence[int], draft_ids: Tensor, sampled: Tensor) -> Acceptance:
    """Accept drafts as long as they equal what the target sampled at their position (greedy).

    Args:
        num_drafts: drafts of each request.
        draft_ids: integer ``[sum(num_drafts)]``, request after request.
        sampled: integer ``[requests, columns]``, or ``[columns]`` for one request. A draft without a
            column is rejected; a match after a mismatch is not accepted.

    Raises:
        AcceptanceError: lengths contradict each other.
    """
    rows = WindowRows.drafts(num_drafts)
    table = _table(sampled, rows.num_requests)
    if draft_ids.shape != (rows.num_rows,):
        raise AcceptanceError(
            f"draft_ids has shape {tuple(draft_ids.shape)}, num_drafts sum to {rows.num_rows}"
        )
    request, depth = _on(rows.request, table.device), _on(rows.depth, table.device)
    columns = table.shape[1]
    if not columns or not rows.num_rows:
        mask = torch.zeros(rows.num_rows, dtype=torch.bool, device=table.device)
        return Acceptance(
            mask, torch.zeros(rows.num_requests, dtype=torch.int64, device=mask.device)
        )
    at = request * columns + (depth - 1).clamp(max=columns - 1)
    matches = (table.flatten()[at] == draft_ids.to(table.device)) & (depth <= columns)
    # Mismatches so far, less those before the request's first draft: kept while none of its own.
    missed = (~matches).to(torch.int64).cumsum(0)
    first = torch.arange(rows.num_rows, device=table.device) - depth + 1
    before = torch.where(first > 0, missed[(first - 1).clamp(min=0)], 0)
    mask = missed == before
    counts = torch.zeros(rows.num_requests, dtype=torch.int64, device=table.device)
    return Acceptance(mask, counts.index_add_(0, request, mask.to(torch.int64)))


def tree_path(parents: Sequence[int], leaf: int) -> tuple[int, ...]:
    """Return the rows from the root to `leaf`.

    Args:
        parents: parent of each node, -1 for a root.
        leaf: last accepted node; -1 for an empty path.

    Raises:
        AcceptanceError: `leaf` is not a node.
    """
    if not -1 <= leaf < len(parents):
        raise AcceptanceError(f"node {leaf} is not in a tree of {len(parents)} nodes")
    path: list[int] = []
    while leaf != -1:
        path.append(leaf)
        leaf = parents[leaf]
    return tuple(reversed(path))


def check_tree_path(parents: Sequence[int], path: Sequence[int]) -> None:
    """Refuse a path that does not start at a root and go from parent to child.

    Raises:
        AcceptanceError: it does not.
    """
    expected = -1
    for node in path:
        if not 0 <= node < len(parents) or parents[node] != expected:
            raise AcceptanceError(
                f"{list(path)} is not a path from a root of the tree {list(parents)}: "
                f"node {node} does not follow {expected}"
            )
        expected = node


def _table(sampled: Tensor, requests: int) -> Tensor:
    table = sampled.unsqueeze(0) if sampled.ndim == 1 else sampled
    if table.ndim != 2 or table.shape[0] != requests:
        raise AcceptanceError(
            f"sampled has shape {tuple(sampled.shape)}, expected one row for each of {requests} "
            "requests"
        )
    if table.is_floating_point() or table.is_complex() or table.dtype == torch.bool:
        raise AcceptanceError(f"sampled must hold token ids, got {sampled.dtype}")
    return table


def _on(host: Tensor, device: torch.device) -> Tensor:
    """Send a small host tensor to the device; the copy is asynchronous."""
    return host if device.type == "cpu" else host.to(device, non_blocking=True)
