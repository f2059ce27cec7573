"""nwor: no write on reject. A transactional KV cache for speculative decoding.

The core. It depends on torch and numpy alone; engines, plugins and kernels import it, never the other
way round.
"""

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

__version__ = "0.1.0"

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
    "plan_commit",
    "plan_paths",
]
