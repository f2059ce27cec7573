"""The plugin's gates and passages, without vLLM: settings, hooks on import, ledger, counters."""

from __future__ import annotations

import dataclasses
import importlib
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nwor.errors import InputError, ModeError
from nwor.manager import Mode
from nwor.metrics import FallbackReason
from nwor.store.overlay import OverlayRefusal
from nwor.vllm import plugin, seams, stats
from nwor.vllm.eligibility import EngineRefusal, config_refusals, group_refusals
from nwor.vllm.reservation import reserve
from nwor.vllm.settings import Settings, read_settings, unknown_variables


def run_python(code: str, **environ: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        env={"PATH": "", "PYTHONPATH": ":".join(sys.path), **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- settings --------------------------------------------------------------------------------------


def test_defaults() -> None:
    assert read_settings({}) == Settings(
        Mode.STAGE, strict=False, staging_pages=None, mover="numba"
    )


def test_all_settings() -> None:
    environ = {
        "NWOR_MODE": "immediate",
        "NWOR_STRICT": "1",
        "NWOR_STAGING_PAGES": "12",
        "NWOR_MOVER": "torch",
        "NWOR_EXPERIMENTAL": "cuda",
    }
    expected = Settings(Mode.IMMEDIATE, True, 12, "torch", experimental=("cuda",))
    assert read_settings(environ) == expected
    assert unknown_variables({**environ, "NWOR_MOED": "off"}) == ["NWOR_MOED"]


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("NWOR_MODE", "staged", ModeError),
        ("NWOR_STRICT", "yes", InputError),
        ("NWOR_EXPERIMENTAL", "cuda,rocm", InputError),
        ("NWOR_STAGING_PAGES", "0", InputError),
        ("NWOR_STAGING_PAGES", "many", InputError),
        ("NWOR_MOVER", "memcpy", InputError),
    ],
)
def test_values_that_are_not_allowed(name: str, value: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"{name}='{value}' is not allowed; allowed: "):
        read_settings({name: value})


# -- gates -----------------------------------------------------------------------------------------


def test_registering_imports_no_engine_and_no_compiler() -> None:
    out = run_python(
        """
        import sys
        from nwor.vllm.plugin import register
        register(); register()
        heavy = {"vllm", "numba", "triton", "transformers", "prometheus_client"}
        print(sorted(heavy & set(sys.modules)))
        """
    )
    assert out.strip() == "[]"


@pytest.fixture
def unregistered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A process that has not registered yet; returns what gets hooked."""
    hooked: list[str] = []
    monkeypatch.setattr(plugin, "_registered", False)
    monkeypatch.setattr(plugin, "when_imported", lambda name, action: hooked.append(name))
    for name in ("NWOR_MODE", "NWOR_STRICT"):
        monkeypatch.delenv(name, raising=False)
    return hooked


def test_checked_version_is_hooked_once(
    unregistered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "vllm_version", lambda: "0.32.0+cpu")
    plugin.register()
    plugin.register()
    modules = [seams.CORE, seams.SCHEDULER, seams.RUNNER, seams.RUNNER_V2, seams.LOGGERS]
    assert unregistered == modules


def test_off_hooks_nothing(unregistered: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "vllm_version", lambda: "0.32.0")
    monkeypatch.setenv("NWOR_MODE", "off")
    plugin.register()
    assert not unregistered


def test_unknown_version_runs_stock_and_says_so(
    unregistered: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plugin, "vllm_version", lambda: "0.99.1")
    plugin.register()
    assert not unregistered
    assert "vLLM 0.99.1 has not been checked" in caplog.text


def test_unknown_version_is_an_error_when_strict(
    unregistered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "vllm_version", lambda: "0.99.1")
    monkeypatch.setenv("NWOR_STRICT", "1")
    with pytest.raises(plugin.VersionError, match=r"0\.99\.1"):
        plugin.register()
    assert not unregistered


def test_hooks_run_when_a_module_is_imported(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "late.py").write_text("value = 1\n")
    out = run_python(
        f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        from nwor.vllm.imports import when_imported
        when_imported("pack.late", lambda: print("late", sys.modules["pack.late"].value))
        when_imported("pack.never", lambda: print("never"))
        print("pack" in sys.modules)
        import pack.late
        print(type(pack.late.__loader__).__name__)
        when_imported("pack.late", lambda: print("at once"))
        """
    )
    assert out.split("\n")[:-1] == ["False", "late 1", "SourceFileLoader", "at once"]


# -- ledger ----------------------------------------------------------------------------------------

MODULE = """
def start(config, size, extra=None):
    return config, size

class Runner:
    limit = 3
    def step(self, batch):
        return batch
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "enginelike.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "enginelike", raising=False)
    return importlib.import_module("enginelike")


@pytest.mark.parametrize(
    ("name", "parameters", "problem"),
    [
        ("begin", (), "does not exist"),
        ("Runner.stop", (), "does not exist"),
        ("start", ("size", "config"), "expected ['size', 'config'] first"),
        ("Runner.limit", (), "is not callable"),
    ],
)
def test_symbols_that_are_not_as_the_ledger_says(
    module: Any, name: str, parameters: tuple[str, ...], problem: str
) -> None:
    seam = seams.Seam("enginelike", name, parameters, "a test")
    assert problem in seams.check_seams([seam])[seam.path]
    with pytest.raises(seams.SeamError):
        seams.wrap_symbol(seam, lambda original: original)


def test_a_symbol_is_wrapped_once(module: Any) -> None:
    seam = seams.Seam("enginelike", "start", ("config", "size"), "a test", strict=True)

    def make(original: Any) -> Any:
        return lambda config, size: original(config, size + 1)

    seams.wrap_symbol(seam, make)
    seams.wrap_symbol(seam, make)
    assert module.start("c", 1) == ("c", 2)
    assert seams.check_seams([seam]) == {}


def test_a_method_is_wrapped_on_the_instance_alone(module: Any) -> None:
    seam = seams.Seam("enginelike", "Runner.step", ("batch",), "a test", hot=True, strict=True)
    one, other = module.Runner(), module.Runner()
    seams.wrap_method(one, seam, lambda original: lambda batch: original(batch) * 2)
    assert (one.step(2), other.step(2)) == (4, 2)
    with pytest.raises(seams.SeamError, match="wrapped already"):
        seams.wrap_method(one, seam, lambda original: original)
    seams.unwrap_method(one, seam)
    assert one.step(2) == 2
    assert "step" not in vars(one)


# -- eligibility and reservation --------------------------------------------------------------------


def config(**changes: Any) -> Any:
    """A `VllmConfig` that is served, with changes like ``parallel_config.enable_dbo=True``."""
    base = SimpleNamespace(
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            enable_dbo=False,
            ubatch_size=0,
        ),
        speculative_config=SimpleNamespace(method="ngram", num_speculative_tokens=4),
        device_config=SimpleNamespace(device_type="cpu"),
        scheduler_config=SimpleNamespace(async_scheduling=False, max_num_seqs=8),
        model_config=SimpleNamespace(is_encoder_decoder=False),
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=False),
        kv_transfer_config=None,
        use_v2_model_runner=False,
    )
    for path, value in changes.items():
        *parts, name = path.split("__")
        owner = base
        for part in parts:
            owner = getattr(owner, part)
        setattr(owner, name, value)
    return base


def transfer(name: str, module: str | None = None, *children: dict[str, str]) -> SimpleNamespace:
    """What `--kv-transfer-config` becomes."""
    return SimpleNamespace(
        kv_connector=name,
        kv_connector_module_path=module,
        kv_connector_extra_config={"connectors": list(children)},
    )


@pytest.mark.parametrize(
    ("change", "value", "reason"),
    [
        ("device_config__device_type", "cuda", EngineRefusal.PLATFORM),
        ("speculative_config__method", "eagle", EngineRefusal.DRAFTER),
        ("parallel_config__pipeline_parallel_size", 2, EngineRefusal.PIPELINE),
        ("parallel_config__decode_context_parallel_size", 2, EngineRefusal.CONTEXT_PARALLEL),
        ("parallel_config__prefill_context_parallel_size", 2, EngineRefusal.CONTEXT_PARALLEL),
        ("scheduler_config__async_scheduling", True, EngineRefusal.ASYNC_SCHEDULING),
        ("parallel_config__enable_dbo", True, EngineRefusal.MICROBATCHING),
        ("parallel_config__ubatch_size", 2, EngineRefusal.MICROBATCHING),
        ("model_config__is_encoder_decoder", True, EngineRefusal.ENCODER_DECODER),
        ("cache_config__kv_sharing_fast_prefill", True, EngineRefusal.KV_SHARING),
        ("kv_transfer_config", transfer("NixlConnector"), EngineRefusal.CONNECTOR),
    ],
)
def test_what_is_not_proven_is_refused(change: str, value: Any, reason: EngineRefusal) -> None:
    assert not list(config_refusals(config()))
    (refusal,) = config_refusals(config(**{change: value}))
    assert refusal.reason is reason
    assert refusal.found
    assert refusal.remedy


def config_v2(**changes: Any) -> Any:
    """A `VllmConfig` with the V2 runner that is served under Triton's interpreter."""
    async_v2 = {"scheduler_config__async_scheduling": True, "use_v2_model_runner": True}
    return config(**{**async_v2, "speculative_config__method": "draft_model", **changes})


@pytest.mark.parametrize(
    ("change", "value", "reason"),
    [
        ("device_config__device_type", "cuda", EngineRefusal.PLATFORM),
        ("device_config__device_type", "xpu", EngineRefusal.PLATFORM),
        ("speculative_config__method", "ngram", EngineRefusal.DRAFTER),
        ("speculative_config__method", "dflash", EngineRefusal.DRAFTER),
        ("speculative_config__method", "mtp", EngineRefusal.DRAFTER),
        ("speculative_config__enable_adaptive_verification", True, EngineRefusal.ADAPTIVE),
        ("parallel_config__enable_batch_sharded_sampling", True, EngineRefusal.SHARDED_SAMPLING),
        ("parallel_config__enable_elastic_ep", True, EngineRefusal.RUNNER),
        ("attention_config", SimpleNamespace(hisparse_config=object()), EngineRefusal.RUNNER),
        ("parallel_config__pipeline_parallel_size", 2, EngineRefusal.PIPELINE),
        ("parallel_config__enable_dbo", True, EngineRefusal.MICROBATCHING),
        ("kv_transfer_config", transfer("ExampleConnector"), EngineRefusal.CONNECTOR),
    ],
)
def test_what_is_not_proven_on_v2_is_refused(
    monkeypatch: pytest.MonkeyPatch, change: str, value: Any, reason: EngineRefusal
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not list(config_refusals(config_v2()))
    (refusal,) = config_refusals(config_v2(**{change: value}))
    assert refusal.reason is reason
    assert refusal.found
    assert refusal.remedy


def test_v2_on_a_cpu_is_served_under_the_interpreter_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    (refusal,) = config_refusals(config_v2())
    assert refusal.reason is EngineRefusal.PLATFORM


def test_v2_on_a_gpu_is_served_on_request_only() -> None:
    gpu = config_v2(device_config__device_type="cuda")
    (refusal,) = config_refusals(gpu)
    assert "NWOR_EXPERIMENTAL=cuda" in refusal.remedy
    assert not list(config_refusals(gpu, experimental=("cuda",)))
    v1 = config(device_config__device_type="cuda")
    assert [r.reason for r in config_refusals(v1, experimental=("cuda",))] == [
        EngineRefusal.PLATFORM
    ]


def test_connectors_are_trusted_by_declaration_only() -> None:
    def found(connector: SimpleNamespace, *trusted: str) -> list[str]:
        return [
            r.found.split("'")[1]
            for r in config_refusals(config(kv_transfer_config=connector), trusted)
        ]

    example, other = {"kv_connector": "ExampleConnector"}, {"kv_connector": "Other"}
    assert not found(transfer("ExampleConnector"))
    assert found(transfer("ExampleConnector", "mine")) == ["mine.ExampleConnector"]
    assert not found(transfer("ExampleConnector", "mine"), "mine.ExampleConnector")
    assert not found(transfer("MultiConnector", None, example))
    assert found(transfer("MultiConnector", None, example, other)) == ["Other"]
    assert not found(transfer("MultiConnector", None, example, other), "Other")


@dataclasses.dataclass
class FullAttentionSpec:
    block_size: int = 32
    attention_chunk_size: int | None = None


@dataclasses.dataclass
class MambaSpec:
    block_size: int = 32


@dataclasses.dataclass
class CacheConfig:
    num_blocks: int
    kv_cache_groups: list[Any]


def group(spec: Any) -> Any:
    return SimpleNamespace(kv_cache_spec=spec, layer_names=["layers.0"])


def test_groups_that_are_refused() -> None:
    groups = [
        group(FullAttentionSpec()),
        group(MambaSpec()),
        group(FullAttentionSpec(block_size=4)),
        group(FullAttentionSpec(attention_chunk_size=64)),
    ]
    reasons = [refusal.reason for refusal in group_refusals(groups, 4)]
    assert reasons == [EngineRefusal.GROUP, EngineRefusal.PAGE_TOO_SMALL, EngineRefusal.GROUP]


@pytest.mark.parametrize(
    ("blocks", "pages", "needed", "leases"),
    [
        (1000, None, 10, 8),  # all of max_num_seqs
        (64, None, 10, 2),  # one page in eight
        (1000, 9, 10, 2),  # as told
        (64, 100, 40, 6),  # a request of maximum length must still fit
        (12, None, 10, 0),  # no room at all
        (1000, 3, 10, 0),  # fewer than one request takes
    ],
)
def test_the_reservation_is_bounded(
    monkeypatch: pytest.MonkeyPatch, blocks: int, pages: int | None, needed: int, leases: int
) -> None:
    monkeypatch.setattr("nwor.vllm.reservation.check_seams", lambda _: {})
    cache = CacheConfig(blocks, [group(FullAttentionSpec()), group(FullAttentionSpec())])
    settings = Settings(staging_pages=pages)
    found = reserve(settings, config(), cache, lambda _, left: left.num_blocks / needed)
    assert (found.num_leases, found.num_pages) == (leases, 4 * leases)
    assert [r.reason for r in found.refusals] == ([] if leases else [EngineRefusal.NO_ROOM])
    assert cache.num_blocks == blocks


def test_one_label_means_one_reason() -> None:
    """Three enums are exported under one metric; a shared value would mix their counts."""
    values = [str(r) for kind in (FallbackReason, OverlayRefusal, EngineRefusal) for r in kind]
    assert len(values) == len(set(values))
    assert all(value == value.lower() and value.isidentifier() for value in values)


# -- counters on their way --------------------------------------------------------------------------


def test_increments_add_up_to_the_totals() -> None:
    increments = stats.Increments()
    assert increments.since({"windows": 0}, {}, staging_pages=4) is None
    first = increments.since({"windows": 2}, {"aborted": 1}, staging_pages=4)
    assert first == {"windows": 2, "fallbacks": {"aborted": 1}, "staging_pages": 4}
    second = increments.since({"windows": 5}, {"aborted": 1}, staging_pages=6)
    assert second == {"windows": 3, "fallbacks": {}, "staging_pages": 6}
    total: stats.Sample = {}
    for sample in (first, second):
        stats.merge(total, sample)
    assert total == {"windows": 5, "fallbacks": {"aborted": 1}, "staging_pages": 6}


class SchedulerLike:
    """Sends statistics with every second step, like a scheduler that has nothing to tell."""

    def __init__(self) -> None:
        self.steps = 0

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        self.steps += 1
        with_stats = SimpleNamespace(kv_connector_stats={"other": 1})
        return {0: SimpleNamespace(scheduler_stats=with_stats if self.steps % 2 == 0 else None)}


def test_samples_wait_for_statistics_and_leave_no_trace_in_them() -> None:
    scheduler = SchedulerLike()
    stats.hook_update(scheduler, SimpleNamespace(refusals=()))
    outputs = []
    for count in (1, 2, 3):
        output = SimpleNamespace()
        stats.attach_sample(output, {"windows": count, "fallbacks": {}})
        outputs.append(scheduler.update_from_output(None, output))
    assert outputs[0][0].scheduler_stats is None
    carried = outputs[1][0].scheduler_stats
    assert stats.take_sample(carried) == {"windows": 3, "fallbacks": {}}
    assert carried.kv_connector_stats == {"other": 1}
    assert stats.take_sample(carried) is None
    assert stats.take_sample(None) is None


def test_a_refused_engine_reports_its_reasons_once() -> None:
    scheduler = SchedulerLike()
    refusal = SimpleNamespace(reason=EngineRefusal.PLATFORM)
    stats.hook_update(scheduler, SimpleNamespace(refusals=[refusal]))
    seen = []
    for _ in range(4):
        output = scheduler.update_from_output(None, SimpleNamespace())[0]
        seen.append(stats.take_sample(output.scheduler_stats))
    assert seen == [None, {"fallbacks": {"platform": 1}}, None, None]
