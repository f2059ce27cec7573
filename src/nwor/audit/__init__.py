"""A sanitizer for KV caches: proves or refutes the invariants on any paged engine.

`ShadowMap` is told what an engine does and says what is wrong with it; docs/audit.md has an example.
"""

from nwor.audit.findings import Findings, Kind, Violation
from nwor.audit.level import AuditLevel
from nwor.audit.shadow import Durable, ShadowMap
from nwor.audit.step import Batch

__all__ = ["AuditLevel", "Batch", "Durable", "Findings", "Kind", "ShadowMap", "Violation"]
