"""Which cache groups would an engine have: vLLM's own answer, without weights and without a cache.

The model is built on the meta device, where tensors have shapes but no storage; its layers then say
what they would store, and vLLM groups them as its engine core does. For `nwor doctor`: a process that
has no engine. It is quick (a second for a small model) but not certain: a model may need real tensors
to be built, and then there is no answer.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


class RehearsalError(RuntimeError):
    """The model cannot be built without weights, or its layers cannot be grouped."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What the layers of target and draft model would store.

    Attributes:
        specs: vLLM's `KVCacheSpec` of each layer.
        groups: vLLM's `KVCacheGroupSpec`, as the engine core would form them.
    """

    specs: dict[str, Any]
    groups: list[Any]


def rehearse(config: Any) -> Rehearsal:  # noqa: ANN401 - VllmConfig
    """Ask the layers of a model that is not there.

    `config` is not fit for an engine afterwards: layers have registered themselves in it.

    Raises:
        RehearsalError: there is no answer.
    """
    try:
        with _one_process(config):
            _build(config)
            return _grouped(config)
    except Exception as error:  # model code of any kind, fed with tensors that it does not expect
        first = (str(error).strip() or "no message").splitlines()[0]
        raise RehearsalError(f"{type(error).__name__}: {first}") from error


def cache_config(config: Any, specs: dict[str, Any]) -> Any:  # noqa: ANN401 - VllmConfig, KVCacheConfig
    """Return the `KVCacheConfig` that vLLM makes of `kv_cache_memory_bytes`.

    Raises:
        ValueError: the memory does not hold one request of maximum length; vLLM would not start.
    """
    from vllm.v1.core import kv_cache_utils  # noqa: PLC0415 - only where vLLM is

    memory = config.cache_config.kv_cache_memory_bytes
    (cache,) = kv_cache_utils.get_kv_cache_configs(config, [specs], [memory])
    return cache


def _grouped(config: Any) -> Rehearsal:  # noqa: ANN401 - as above
    """Group the layers as vLLM's engine core does, in its order of steps."""
    from vllm.distributed.kv_transfer.kv_connector import utils as connector  # noqa: PLC0415
    from vllm.v1.attention.backends import utils as backends  # noqa: PLC0415
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups  # noqa: PLC0415
    from vllm.v1.core.single_type_kv_cache_manager import (  # noqa: PLC0415
        register_all_kvcache_specs,
    )
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec  # noqa: PLC0415

    register_all_kvcache_specs(config)  # type: ignore[no-untyped-call]
    specs = get_kv_cache_spec(config)
    layouts = backends.get_supported_kv_cache_layouts(connector.get_current_attn_backends(config))
    names = [layout.name for layout in layouts]
    backends.resolve_kv_cache_layout(config, [names], specs.values())
    return Rehearsal(specs, get_kv_cache_groups(config, dict(specs)))


def _build(config: Any) -> None:  # noqa: ANN401 - as above
    """Build target and draft model; their layers register in `config`."""
    from vllm.config.utils import replace  # noqa: PLC0415 - as above
    from vllm.model_executor.model_loader.utils import initialize_model  # noqa: PLC0415
    from vllm.utils.torch_utils import set_default_torch_dtype  # noqa: PLC0415

    speculative = config.speculative_config
    built = [(config, "")]
    if speculative.method == "draft_model":
        draft = replace(
            config,
            quant_config=None,
            parallel_config=speculative.draft_parallel_config,
            model_config=speculative.draft_model_config,
        )
        built.append((draft, "draft_model"))
    for each, prefix in built:
        with set_default_torch_dtype(each.model_config.dtype), torch.device("meta"):
            initialize_model(vllm_config=each, prefix=prefix)


@contextmanager
def _one_process(config: Any) -> Iterator[None]:  # noqa: ANN401 - as above
    """Let models be built: they ask for the ranks around them, here only this process.

    An engine of this process, if there is one, has ranks already; they are left as they are.
    """
    from vllm import distributed  # noqa: PLC0415 - as above
    from vllm.config import set_current_vllm_config  # noqa: PLC0415

    there = distributed.parallel_state.model_parallel_is_initialized()  # type: ignore[no-untyped-call]
    with set_current_vllm_config(config), nullcontext() if there else _ranks(distributed):
        yield


@contextmanager
def _ranks(distributed: Any) -> Iterator[None]:  # noqa: ANN401 - a module
    with tempfile.TemporaryDirectory(prefix="nwor-doctor-") as folder:
        try:
            meet = (Path(folder) / "ranks").as_uri()
            distributed.init_distributed_environment(1, 0, meet, 0, "gloo")
            distributed.initialize_model_parallel(1, 1)
            yield
        finally:
            distributed.destroy_model_parallel()
            distributed.destroy_distributed_environment()
