"""How closely an engine is watched."""

from __future__ import annotations

from enum import StrEnum


class AuditLevel(StrEnum):
    """How closely an engine is watched."""

    OFF = "off"
    METADATA = "metadata"
    """Names of rows, from slot mappings, tables and copies; K and V are never read."""
    BYTES = "bytes"
    """Durable rows too, all of them, compared in every step."""
