"""Which tables and rows a runner has: vLLM's cache groups as `OverlayGroup`s.

Layouts are declared per attention backend and then probed; a backend that is not listed is refused.
Layers of the drafter are left out of the rows: a drafter writes its own K/V after the restore, to
durable pages, and moving staged rows over them would destroy it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nwor.errors import LayoutError
from nwor.layout import KVRows, Layout
from nwor.store.paged import OverlayGroup
from nwor.vllm.eligibility import EngineRefusal, Refusal

LAYOUTS = {"CPU_ATTN": Layout.VLLM_CPU}
"""Block layout by the name of vLLM's attention backend."""


@dataclass(frozen=True, slots=True, eq=False)
class CacheGroup:
    """A cache group of the target model.

    Attributes:
        index: vLLM's number of the group.
        layers: vLLM's attention layers by name, those of the target only.
        overlay: its tables and rows.
    """

    index: int
    layers: dict[str, Any]
    overlay: OverlayGroup


class GeometryError(LayoutError):
    """A runner whose rows nwor cannot find; carries the `Refusal`."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


def cache_groups(runner: Any) -> list[CacheGroup]:  # noqa: ANN401 - vLLM's GPUModelRunner
    """Find the target's cache groups of a runner whose cache tensors exist.

    Raises:
        GeometryError: a backend or layout that nwor does not know.
    """
    drafter_layers = set(getattr(getattr(runner, "drafter", None), "_draft_attn_layer_names", ()))
    shared = set(runner.shared_kv_cache_layers)
    groups = []
    for index, group in enumerate(runner.kv_cache_config.kv_cache_groups):
        names = [n for n in group.layer_names if n not in drafter_layers and n not in shared]
        if not names:
            continue
        _check_backends(runner, index, group)
        context = runner.compilation_config.static_forward_context
        layers = {name: context[name] for name in names}
        table = runner.input_batch.block_table[index]
        try:
            rows = rows_of(LAYOUTS["CPU_ATTN"], [layer.kv_cache for layer in layers.values()])
            overlay = OverlayGroup(table.block_table.gpu, table.slot_mapping.gpu, rows)
        except LayoutError as error:
            raise _refuse(EngineRefusal.LAYOUT, f"group {index}: {error}") from error
        groups.append(CacheGroup(index, layers, overlay))
    return groups


def rows_of(layout: Layout, caches: Sequence[Tensor]) -> tuple[KVRows, ...]:
    """View the caches as rows: all layers in one view where they are equally spaced.

    Raises:
        LayoutError: the caches do not have this layout.
    """
    singles = [KVRows.of(layout, [cache]) for cache in caches]
    try:
        return (KVRows.of(layout, caches),)
    except LayoutError:  # a drafter's layers lie between: move each layer by itself
        return tuple(singles)


def _check_backends(runner: Any, index: int, group: Any) -> None:  # noqa: ANN401
    for attention in runner.attn_groups[index]:
        name = attention.backend.get_name()
        if name not in LAYOUTS:
            raise _refuse(
                EngineRefusal.BACKEND, f"group {index} uses {name}; known: {', '.join(LAYOUTS)}"
            )
        if attention.kernel_block_size is not None:
            raise _refuse(
                EngineRefusal.BACKEND,
                f"group {index}: kernels use blocks of {attention.kernel_block_size}, the block "
                f"table has blocks of {group.kv_cache_spec.block_size}: it is copied per step",
            )


def _refuse(reason: EngineRefusal, found: str) -> GeometryError:
    return GeometryError(Refusal(reason, found, "`nwor doctor` shows the details"))
