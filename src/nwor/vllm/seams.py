"""The ledger: every vLLM symbol nwor relies on, why, and the versions it was checked against.

Nothing else in nwor names a vLLM internal that is wrapped. `check_seams` resolves each symbol and
compares its parameters; a renamed or reshaped one is refused before anything is wrapped. Hot-path
symbols are wrapped on *instances* of engines that stage, so every other engine runs stock code.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

from nwor.errors import NworError

CHECKED_VERSIONS = ("0.32.0",)
"""vLLM releases whose symbols were read and whose engine runs nwor's test suite."""

MARK = "__nwor_wrapped__"

VARIADIC = frozenset({inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD})


class SeamError(NworError):
    """A vLLM symbol is missing or has other parameters than the ledger says."""


@dataclass(frozen=True, slots=True)
class Seam:
    """One symbol.

    Attributes:
        module: where it lives.
        name: function, or ``Class.method``.
        parameters: names it must take, in this order, without ``self``; it may take more.
        why: what nwor needs it for.
        hot: it runs in every step, so it is wrapped on staging engines only, on the instance.
        strict: nothing of ours passes on further arguments, so a release in which the symbol
            *requires* more is refused. All wrappers we have pass on what they do not know.
    """

    module: str
    name: str
    parameters: tuple[str, ...]
    why: str
    hot: bool = False
    strict: bool = False

    @property
    def path(self) -> str:
        """Dotted path."""
        return f"{self.module}.{self.name}"


CORE = "vllm.v1.engine.core"
SCHEDULER = "vllm.v1.core.sched.scheduler"
CACHE_UTILS = "vllm.v1.core.kv_cache_utils"
RUNNER = "vllm.v1.worker.gpu_model_runner"
LOGGERS = "vllm.v1.metrics.loggers"

CACHE_CONFIGS = Seam(
    CORE,
    "get_kv_cache_configs",
    ("vllm_config", "kv_cache_specs", "available_memory"),
    "decide how many staging pages to keep back and tell the workers with their cache configuration",
)
SCHEDULER_CONFIG = Seam(
    CORE,
    "generate_scheduler_kv_cache_config",
    ("kv_cache_configs",),
    "hide the staging pages from the scheduler: it sees a smaller num_blocks",
)
MAX_CONCURRENCY = Seam(
    CACHE_UTILS,
    "get_max_concurrency_for_kv_cache_config",
    ("vllm_config", "kv_cache_config"),
    "called: does a request of maximum length still fit beside the staging pages?",
    strict=True,
)
SCHEDULER_INIT = Seam(
    SCHEDULER, "Scheduler.__init__", ("vllm_config", "kv_cache_config"), "find staging schedulers"
)
UPDATE = Seam(
    SCHEDULER,
    "Scheduler.update_from_output",
    ("scheduler_output", "model_runner_output"),
    "pass the worker's counters on to the front end with the scheduler's statistics",
    hot=True,
)
RUNNER_CACHE = Seam(
    RUNNER,
    "GPUModelRunner.initialize_kv_cache",
    ("kv_cache_config", "is_profiling"),
    "build the overlay once the cache tensors exist",
)
PREPARE = Seam(
    RUNNER,
    "GPUModelRunner._prepare_inputs",
    ("scheduler_output", "num_scheduled_tokens"),
    "begin windows: block tables and slot mappings are filled, attention metadata is not built yet",
    hot=True,
)
SAMPLE = Seam(
    RUNNER,
    "GPUModelRunner._sample",
    ("logits", "spec_decode_metadata"),
    "commit windows: acceptance is known, the drafter has not run yet",
    hot=True,
)
EXECUTE = Seam(
    RUNNER,
    "GPUModelRunner.execute_model",
    ("scheduler_output", "intermediate_tensors"),
    "release finished and preempted requests; undo if the forward raises",
    hot=True,
)
SAMPLE_TOKENS = Seam(
    RUNNER,
    "GPUModelRunner.sample_tokens",
    ("grammar_output",),
    "undo if sampling raises; attach the counters to the output",
    hot=True,
)
UPDATE_STATES = Seam(
    RUNNER,
    "GPUModelRunner._update_states",
    ("scheduler_output",),
    "audit: which requests are gone, before their pages are given away",
    hot=True,
)
BUILD_METADATA = Seam(
    RUNNER,
    "GPUModelRunner._build_attention_metadata",
    ("num_tokens", "num_reqs"),
    "audit: block tables and slot mappings as the kernels will see them",
    hot=True,
)
AFTER_EXECUTE = Seam(
    RUNNER,
    "GPUModelRunner._update_states_after_model_execute",
    ("output_token_ids", "scheduler_output"),
    "audit: what was sampled, once nwor has committed",
    hot=True,
)
LOGGERS_INIT = Seam(
    LOGGERS, "StatLoggerManager.__init__", ("vllm_config", "engine_idxs"), "register nwor's metrics"
)
RECORD = Seam(
    LOGGERS,
    "StatLoggerManager.record",
    ("scheduler_stats", "iteration_stats", "mm_cache_stats", "engine_idx"),
    "take the counters out of the statistics and add them to the metrics",
    hot=True,
)
LOG = Seam(LOGGERS, "StatLoggerManager.log", (), "print nwor's line after vLLM's", hot=True)

SEAMS = (
    CACHE_CONFIGS,
    SCHEDULER_CONFIG,
    MAX_CONCURRENCY,
    SCHEDULER_INIT,
    UPDATE,
    RUNNER_CACHE,
    PREPARE,
    SAMPLE,
    EXECUTE,
    SAMPLE_TOKENS,
    UPDATE_STATES,
    BUILD_METADATA,
    AFTER_EXECUTE,
    LOGGERS_INIT,
    RECORD,
    LOG,
)

CPU_ATTENTION_ISA = Seam(
    "vllm.v1.attention.backends.cpu_attn",
    "_get_attn_isa",
    ("dtype", "block_size", "head_size", "kv_cache_dtype"),
    "called: which stock writer a layout probe without an engine must use",
    strict=True,
)
"""Not in `SEAMS`: it exists for CPUs only, and only `nwor doctor` needs it."""

DRAFTS = Seam(
    SCHEDULER,
    "Scheduler.update_draft_token_ids",
    ("draft_token_ids",),
    "audit: a run in which nothing is speculated, whatever the drafter; `nwor audit` alone",
    hot=True,
)
"""Not in `SEAMS`: an engine is served without it."""

RUNNER_V2 = "vllm.v1.worker.gpu.model_runner"

RUNNER_CACHE_V2 = Seam(
    RUNNER_V2,
    "GPUModelRunner.initialize_kv_cache",
    ("kv_cache_config", "is_profiling"),
    "build the overlay once the cache tensors and block tables exist",
)
EXECUTE_V2 = Seam(
    RUNNER_V2,
    "GPUModelRunner.execute_model",
    ("scheduler_output", "intermediate_tensors"),
    "release finished, preempted and re-added requests; undo if the forward raises",
    hot=True,
)
PREPARE_V2 = Seam(
    RUNNER_V2,
    "GPUModelRunner.prepare_attn",
    ("input_batch",),
    "begin windows: tables and slot mappings are gathered, metadata is not built; real batches only",
    hot=True,
)
SAMPLE_V2 = Seam(
    RUNNER_V2,
    "GPUModelRunner.sample",
    ("hidden_states", "input_batch", "grammar_output"),
    "commit windows: acceptance is on the device, the drafter has not run yet",
    hot=True,
)
SAMPLE_TOKENS_V2 = Seam(
    RUNNER_V2,
    "GPUModelRunner.sample_tokens",
    ("grammar_output",),
    "undo if sampling raises; attach the counters to the output",
    hot=True,
)
AFTER_COMMIT_V2 = Seam(
    RUNNER_V2,
    "GPUModelRunner.postprocess_sampled",
    ("idx_mapping", "sampled_tokens", "num_sampled", "num_rejected"),
    "it moves the watermark and must come after the commit; audit: what was kept",
    hot=True,
)
FINISH_V2 = Seam(
    RUNNER_V2,
    "GPUModelRunner.finish_requests",
    ("scheduler_output",),
    "audit: which requests are gone, before their pages are given away; real steps only",
    hot=True,
)
METADATA_V2 = Seam(
    "vllm.v1.worker.gpu.model_states.default",
    "DefaultModelState.prepare_attn",
    ("input_batch",),
    "audit: block tables and slot mappings as the kernels will see them",
    hot=True,
)

V1_SEAMS = (
    RUNNER_CACHE,
    PREPARE,
    SAMPLE,
    EXECUTE,
    SAMPLE_TOKENS,
    UPDATE_STATES,
    BUILD_METADATA,
    AFTER_EXECUTE,
)
V2_SEAMS = (
    RUNNER_CACHE_V2,
    EXECUTE_V2,
    PREPARE_V2,
    SAMPLE_V2,
    SAMPLE_TOKENS_V2,
    AFTER_COMMIT_V2,
    FINISH_V2,
    METADATA_V2,
)

LEDGER = (*SEAMS, CPU_ATTENTION_ISA, DRAFTS, *V2_SEAMS)
"""Everything of vLLM that nwor relies on."""


def seams_of(*, v2: bool) -> tuple[Seam, ...]:
    """Return what an engine with the V1 or the V2 runner needs."""
    return (*(seam for seam in SEAMS if seam not in V1_SEAMS), *V2_SEAMS) if v2 else SEAMS


def check_parameters(seam: Seam, names: Sequence[str], required: Iterable[str]) -> None:
    """Compare a function's parameters with the ledger.

    Args:
        seam: the ledger's entry.
        names: all parameters, in order, without ``self``.
        required: those of them without a default value.

    Raises:
        SeamError: they begin otherwise, or the seam is strict and more is required.
    """
    if tuple(names[: len(seam.parameters)]) != seam.parameters:
        raise SeamError(f"{seam.path} takes {list(names)}, expected {list(seam.parameters)} first")
    more = [name for name in required if name not in seam.parameters]
    if seam.strict and more:
        raise SeamError(f"{seam.path} also requires {more}, which nwor does not pass on")


def resolve(seam: Seam) -> Callable[..., Any]:
    """Return the symbol.

    Raises:
        SeamError: it does not exist, or takes other parameters.
    """
    found: Any
    try:
        found = importlib.import_module(seam.module)
        for part in seam.name.split("."):
            found = inspect.getattr_static(found, part)
    except (ImportError, AttributeError) as error:
        raise SeamError(f"{seam.path} does not exist: {error}") from error
    if not callable(found):
        raise SeamError(f"{seam.path} is not callable but {type(found).__name__}")
    parameters = inspect.signature(found).parameters
    names = [name for name in parameters if name != "self"]
    check_parameters(seam, names, [name for name in names if _is_required(parameters[name])])
    symbol: Callable[..., Any] = found
    return symbol


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is inspect.Parameter.empty and parameter.kind not in VARIADIC


def check_seams(seams: Iterable[Seam] = SEAMS) -> dict[str, str]:
    """Return what is wrong with each seam, by path; empty if all are as the ledger says."""
    wrong = {}
    for seam in seams:
        try:
            resolve(seam)
        except SeamError as error:
            wrong[seam.path] = str(error)
    return wrong


def wrap_symbol(seam: Seam, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a start-up symbol by ``make(original)``, once per process.

    Raises:
        SeamError: see `resolve`.
    """
    original = resolve(seam)
    if hasattr(original, MARK):
        return
    wrapped = _wrapped(seam, make, original)
    owner: Any = importlib.import_module(seam.module)
    *path, name = seam.name.split(".")
    for part in path:
        owner = getattr(owner, part)
    setattr(owner, name, wrapped)


def wrap_method(
    instance: Any,  # noqa: ANN401 - vLLM's runner, scheduler or logger manager
    seam: Seam,
    make: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> None:
    """Shadow a hot-path method of one instance; the class stays stock."""
    name = seam.name.rsplit(".", 1)[1]
    original = getattr(instance, name)
    if hasattr(original, MARK):
        raise SeamError(f"{seam.path} of this instance is wrapped already")
    setattr(instance, name, _wrapped(seam, make, original))


def _wrapped(
    seam: Seam,
    make: Callable[[Callable[..., Any]], Callable[..., Any]],
    original: Callable[..., Any],
) -> Callable[..., Any]:
    made = make(original)
    kinds = {parameter.kind for parameter in inspect.signature(made).parameters.values()}
    assert seam.strict or kinds >= VARIADIC, f"{seam.path}: the wrapper drops arguments"  # noqa: S101
    wrapped = wraps(original)(made)
    setattr(wrapped, MARK, original)
    return wrapped


def unwrap_method(instance: Any, seam: Seam) -> None:  # noqa: ANN401 - as above
    """Give the instance its class's method back."""
    vars(instance).pop(seam.name.rsplit(".", 1)[1], None)
