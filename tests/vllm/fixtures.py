"""What all tests on real vLLM engines start from, those of the V1 and those of the V2 runner."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process: tests look into the engine
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "nwor",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",  # tiny models; two spinning threads on two busy cores take seconds a step
}


def use_vllm(**settings: str) -> None:
    """Set the environment; to be called before vLLM is imported anywhere."""
    os.environ.update({**SETTINGS, **settings})


def allow_warnings(items: list[pytest.Item], folder: Path) -> None:
    """vLLM and its dependencies warn a lot; nwor's own tests keep warnings as errors."""
    for item in items:
        if folder in Path(item.path).parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"))


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


_ENGINE: dict[str, Any] = {}


def close_kept() -> None:
    """Close the engine that `one_at_a_time` keeps, if there is one."""
    for old in _ENGINE.values():
        old.close()
    _ENGINE.clear()


def one_at_a_time(kind: Callable[..., Any], models: Callable[[str], str]) -> Callable[..., Any]:
    """Return a function that makes engines and keeps one while tests ask for the same one."""

    def get(model: str = "llama", **options: object) -> Any:
        settings = {k: v for k, v in os.environ.items() if k.startswith("NWOR_") or k in SETTINGS}
        key = repr((model, sorted(options.items()), settings))
        if key not in _ENGINE:
            close_kept()
            _ENGINE[key] = kind(models(model), **options)
        return _ENGINE[key]

    return get
