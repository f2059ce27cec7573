"""Scales of quantised rows: which axis they run along, and the part that belongs to kept rows."""

from __future__ import annotations

from enum import StrEnum

from torch import Tensor

from nwor.errors import ScaleError


class ScaleAxis(StrEnum):
    """What the first dim of a scale counts."""

    TENSOR = "tensor"
    """Nothing per row or head: one scale for the layer. Passed unchanged."""
    HEAD = "head"
    """KV heads. Passed unchanged."""
    TOKEN = "token"  # noqa: S105 - not a password
    """Rows. Cut to the rows that are written; a sentinel behind the last row is dropped."""


def resolve_axis(
    name: str, scale: Tensor | None, axis: ScaleAxis | str | None, rows: int, heads: int
) -> ScaleAxis:
    """Return the axis of a scale, refusing what it cannot be.

    Left unstated, the axis follows from the length only where one answer fits: a 1-D scale of
    `rows` or ``rows + 1`` entries is per token, unless it could be per head as well.

    Raises:
        ScaleError: unknown axis, too few entries for `rows`, or ambiguous without an axis.
    """
    axis = None if axis is None else _parse(axis)
    if scale is None:
        return ScaleAxis.TENSOR
    if axis is not None:
        if axis is ScaleAxis.TOKEN and (not scale.ndim or scale.shape[0] < rows):
            raise ScaleError(
                f"{name} of shape {tuple(scale.shape)} is not per token of {rows} rows"
            )
        return axis
    if scale.numel() == 1:
        return ScaleAxis.TENSOR
    per_token = scale.shape[0] in (rows, rows + 1)
    if scale.ndim == 1 and not per_token:
        return ScaleAxis.TENSOR
    if scale.ndim == 1 and scale.shape[0] != heads:
        return ScaleAxis.TOKEN
    raise ScaleError(
        f"{name} of shape {tuple(scale.shape)} may be per token ({rows} rows) or per head "
        f"({heads} heads): pass scale_axis='token', 'head' or 'tensor'"
    )


def cut_scale(scale: Tensor | None, axis: ScaleAxis, rows: Tensor) -> Tensor | None:
    """Return the scale of the given rows ``[n]``; only per-token scales are cut."""
    if scale is None or axis is not ScaleAxis.TOKEN:
        return scale
    return scale.index_select(0, rows)


def _parse(axis: ScaleAxis | str) -> ScaleAxis:
    try:
        return ScaleAxis(axis)
    except ValueError:
        known = ", ".join(a.value for a in ScaleAxis)
        raise ScaleError(f"unknown scale axis {axis!r}; known axes: {known}") from None
