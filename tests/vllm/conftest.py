"""Tests on the real engine. Run them in a pytest process of their own: vLLM changes process globals.

pytest tests/vllm
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MISSING = "vLLM is not installed (README: installing the vLLM test environment)"

# Before vLLM is imported anywhere. One process, so that tests can look into the engine.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_CI_ENV="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_NO_USAGE_STATS="1",
    VLLM_PLUGINS="nwor",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    OMP_NUM_THREADS="1",  # tiny models; two spinning threads on two busy cores take seconds a step
    PYTHONPATH=os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
)
sys.path.insert(0, str(HERE))

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]

if find_spec("vllm"):
    with warnings.catch_warnings():  # importing vLLM warns; nwor's tests turn warnings into errors
        warnings.simplefilter("ignore")
        import harness  # noqa: F401


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """vLLM and its dependencies warn a lot; nwor's own tests keep warnings as errors."""
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"))


def pytest_report_header() -> str:
    return "" if find_spec("vllm") else f"tests/vllm skipped: {MISSING}"


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Tiny seeded models, written when first asked for."""
    from tiny_models import write_model

    root = tmp_path_factory.mktemp("models")

    def path(name: str) -> str:
        target = root / name
        if not target.exists():
            write_model(name, target)
        return str(target)

    return path


_ENGINE: dict[str, object] = {}


@pytest.fixture
def engine(models: Callable[[str], str]) -> Iterator[Callable[..., object]]:
    """One engine at a time, kept while tests ask for the same one."""
    from harness import Engine

    def get(model: str = "llama", **options: object) -> Engine:
        settings = {k: v for k, v in os.environ.items() if k.startswith("NWOR_")}
        key = repr((model, sorted(options.items()), settings))
        if key not in _ENGINE:
            for old in _ENGINE.values():
                old.close()
            _ENGINE.clear()
            _ENGINE[key] = Engine(models(model), **options)
        return _ENGINE[key]

    return get
