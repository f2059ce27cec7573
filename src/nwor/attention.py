"""Attention over durable and staged rows, joined by their log-sum-exp.

A verify step must see rows that are not in the cache yet. Attention over a set of rows can be computed
over disjoint parts and merged exactly: with partial outputs ``o1, o2`` and log-sum-exps ``l1, l2``,

    lse = log(e^l1 + e^l2)        out = o1 * e^(l1 - lse) + o2 * e^(l2 - lse)

(Milakov and Gimelshein 2018; Dao et al. 2022, "FlashAttention"). So the durable part is read where it
lies, the staged part where it lies, and neither is copied next to the other. A learned sink
(gpt-oss) is one more logit without a value: it scales the output by ``sigmoid(lse - sink)``.

Shapes: ``B`` requests, ``H`` query heads, ``Hk`` K/V heads, ``G = H / Hk``, ``n`` query rows, ``D``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_FLASH_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
_FLASH_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, eq=False)
class Visibility:
    """Which rows each query row sees.

    Attributes:
        additive: ``[..., n, rows]`` in the query's dtype, 0 where visible and -inf where not.
        blind: bool ``[..., n]``, query rows that see nothing at all; None if there is none. A flash
            kernel reports 0 for their log-sum-exp, which would be wrong in a merge.
    """

    additive: Tensor
    blind: Tensor | None

    @classmethod
    def of(cls, visible: Tensor, dtype: torch.dtype) -> Visibility:
        """Build from a bool mask ``[..., n, rows]``, True where visible."""
        additive = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
        additive.masked_fill_(~visible, float("-inf"))
        blind = ~visible.any(-1)
        return cls(additive, blind if bool(blind.any()) else None)


@dataclass(frozen=True, slots=True, eq=False)
class Partial:
    """Attention over a part of the rows.

    Attributes:
        out: ``[B, H, n, D]`` in the query's dtype, normalised over the part.
        lse: float32 ``[B, H, n]``, log-sum-exp of the part's scores; -inf where nothing was visible.
    """

    out: Tensor
    lse: Tensor


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    visibility: Visibility | None = None,
    causal: bool = False,
    softcap: float | None = None,
) -> Partial:
    """Attend to one part of the rows.

    Args:
        query: ``[B, H, n, D]``.
        key: ``[B, Hk, rows, D]``, any strides with a contiguous last dim; H a multiple of Hk.
        value: the same for V.
        scale: factor on the scores.
        visibility: None if every query row sees every row.
        causal: query row i sees rows 0…i; needs as many rows as query rows.
        softcap: scores become ``softcap * tanh(score / softcap)`` (Gemma 2).
    """
    if not key.shape[2]:  # the flash kernel divides by the length
        return Partial(
            torch.zeros_like(query),
            query.new_full(query.shape[:3], float("-inf"), dtype=torch.float32),
        )
    additive = visibility.additive if visibility else None
    if query.device.type == "cpu" and softcap is None and query.dtype in _FLASH_DTYPES:
        out, lse = _FLASH_CPU(query, key, value, 0.0, causal, attn_mask=additive, scale=scale)
    else:
        out, lse = _products(query, key, value, scale, additive, causal, softcap)
    if visibility and visibility.blind is not None:
        out = out.masked_fill(visibility.blind.unsqueeze(-1), 0.0)
        lse = lse.masked_fill(visibility.blind, float("-inf"))
    return Partial(out, lse)


def _products(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    additive: Tensor | None,
    causal: bool,  # noqa: FBT001 - mirrors the kernel it stands in for
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Attend by plain matrix products: for score functions the flash kernel does not have."""
    heads, kv_heads, rows = query.shape[1], key.shape[1], query.shape[2]
    folded = fold_heads(query, kv_heads).float()
    scores = torch.matmul(folded, key.transpose(2, 3).float()) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = unfold_heads(scores, heads, rows)
    if additive is not None:
        scores = scores + additive.float()
    if causal:
        above = torch.ones(rows, rows, dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(above, float("-inf"))
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.unsqueeze(-1))
    out = torch.matmul(fold_heads(weights, kv_heads), value.float())
    return unfold_heads(out, heads, rows).to(query.dtype), lse


def merge(durable: Partial | None, staged: Partial, sinks: Tensor | None = None) -> Tensor:
    """Join attention over two disjoint parts; return ``[B, H, n, D]``.

    Args:
        durable: None if there are no durable rows yet.
        staged: must have been visible to each row, which its own row always is.
        sinks: ``[H]``, one learned logit per head that takes its share of the softmax.
    """
    out, lse = staged.out, staged.lse
    if durable is not None:
        weight = torch.sigmoid(staged.lse - durable.lse).unsqueeze(-1)
        out = torch.lerp(durable.out.float(), staged.out.float(), weight)
    if sinks is not None:
        if durable is not None:
            lse = torch.logaddexp(durable.lse, lse)
        out = out.float() * torch.sigmoid(lse - sinks.float().view(1, -1, 1)).unsqueeze(-1)
    return out.to(staged.out.dtype)


def fold_heads(query: Tensor, kv_heads: int) -> Tensor:
    """View ``[B, H, n, D]`` as ``[B, Hk, G * n, D]``: heads that share K and V become query rows.

    A kernel then reads K and V once instead of G times, which is what a short query costs.
    """
    batch, heads, rows, dim = query.shape
    return query.reshape(batch, kv_heads, heads // kv_heads * rows, dim)


def unfold_heads(folded: Tensor, heads: int, rows: int) -> Tensor:
    """Undo `fold_heads`."""
    return folded.reshape(folded.shape[0], heads, rows, folded.shape[-1])
