"""nwor: no write on reject. A transactional KV cache for speculative decoding.

The core. It depends on torch and numpy alone; engines, plugins and kernels import it, never the other
way round.
"""

from typing import TYPE_CHECKING, Any

from nwor.acceptance import Acceptance, accept_matching, accepted_from_sampled
from nwor.cache import RowWindow, TransactionalCache
from nwor.errors import (
    CommitError,
    InputError,
    NworError,
    ShouldFallback,
    StageError,
    StateError,
)
from nwor.layout import KVRows, Layout
from nwor.manager import DeferredWriteManager, Mode
from nwor.metrics import FallbackReason, Metrics
from nwor.plan import CommitPlan, plan_commit, plan_paths
from nwor.scales import ScaleAxis
from nwor.window import CommitReport, Window, WindowState
from nwor.window_rows import WindowRows
from nwor.writers import Hold

if TYPE_CHECKING:
    from nwor.engine import generate as generate  # type: ignore[no-redef]
    from nwor.engine import stream as stream

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever the engine exports
    """Import the embedded engine's entry points when they are first asked for."""
    if name not in {"generate", "stream"}:
        raise AttributeError(f"module 'nwor' has no attribute {name!r}")
    try:
        from nwor import engine  # noqa: PLC0415 - the core must not need transformers
    except ImportError as error:
        raise ImportError(f"nwor.{name} needs the engine: pip install 'nwor[engine]'") from error
    return getattr(engine, name)


__all__ = [
    "Acceptance",
    "CommitError",
    "CommitPlan",
    "CommitReport",
    "DeferredWriteManager",
    "FallbackReason",
    "Hold",
    "InputError",
    "KVRows",
    "Layout",
    "Metrics",
    "Mode",
    "NworError",
    "RowWindow",
    "ScaleAxis",
    "ShouldFallback",
    "StageError",
    "StateError",
    "TransactionalCache",
    "Window",
    "WindowRows",
    "WindowState",
    "__version__",
    "accept_matching",
    "accepted_from_sampled",
    "generate",
    "plan_commit",
    "plan_paths",
    "stream",
]
