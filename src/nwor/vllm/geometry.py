"""Which tables and rows a runner has: vLLM's cache groups as `OverlayGroup`s.

Layouts are declared per attention backend and then probed; a backend that is not listed is refused.
Layers of the drafter are left out of the rows: a drafter writes its own K/V after the restore, to
durable pages, and moving staged rows over them would destroy it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from torch import Tensor

from nwor.errors import LayoutError
from nwor.layout import KVRows, Layout
from nwor.store.device_batch import DeviceGroup
from nwor.store.paged import OverlayGroup, PagedGroup
from nwor.vllm.eligibility import EngineRefusal, Refusal
from nwor.vllm.probe import fp8_kind, probe_rows

LAYOUTS = {
    "CPU_ATTN": Layout.VLLM_CPU,
    "FLASH_ATTN": Layout.FUSED,
    "TRITON_ATTN": Layout.FUSED,
}
"""Block layout by the name of vLLM's attention backend, from the backend's sources; probed."""

GroupT = TypeVar("GroupT", bound=PagedGroup)


@dataclass(frozen=True, slots=True, eq=False)
class CacheGroup(Generic[GroupT]):
    """A cache group of the target model.

    Attributes:
        index: vLLM's number of the group.
        layout: layout of its layers' blocks.
        layers: vLLM's attention layers by name, those of the target only.
        overlay: its tables and rows.
    """

    index: int
    layout: Layout
    layers: dict[str, Any]
    overlay: GroupT


class GeometryError(LayoutError):
    """A runner whose rows nwor cannot find; carries the `Refusal`."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


def cache_groups(runner: Any) -> list[CacheGroup[OverlayGroup]]:  # noqa: ANN401 - vLLM's GPUModelRunner
    """Find the target's cache groups of a V1 runner whose cache tensors exist.

    Raises:
        GeometryError: a backend or layout that nwor does not know.
    """
    drafter_layers = set(getattr(getattr(runner, "drafter", None), "_draft_attn_layer_names", ()))

    def tables(index: int) -> tuple[Tensor, Tensor]:
        table = runner.input_batch.block_table[index]
        return table.block_table.gpu, table.slot_mapping.gpu

    return _groups(runner, drafter_layers, tables, OverlayGroup)


def device_groups(runner: Any) -> list[CacheGroup[DeviceGroup]]:  # noqa: ANN401 - vLLM's V2 GPUModelRunner
    """Find the target's cache groups of a V2 runner whose cache tensors exist.

    Raises:
        GeometryError: a backend or layout that nwor does not know.
    """
    drafter_layers = set(getattr(runner.speculator, "draft_attn_layer_names", ()))

    def tables(index: int) -> tuple[Tensor, Tensor]:
        blocks = runner.block_tables
        return blocks.input_block_tables[index], blocks.slot_mappings[index]

    return _groups(runner, drafter_layers, tables, DeviceGroup)


def _groups(
    runner: Any,  # noqa: ANN401
    drafter_layers: Collection[str],
    tables: Callable[[int], tuple[Tensor, Tensor]],
    kind: Callable[[Tensor, Tensor, tuple[KVRows, ...]], GroupT],
) -> list[CacheGroup[GroupT]]:
    context = runner.compilation_config.static_forward_context
    groups = []
    for index, group in enumerate(runner.kv_cache_config.kv_cache_groups):
        layers = {
            name: context[name]
            for name in group.layer_names
            if name not in drafter_layers and not _shares(context[name])
        }
        if not layers:
            continue
        layout = _layout(runner, index, group)
        try:
            rows = rows_of(layout, [layer.kv_cache for layer in layers.values()])
            overlay = kind(*tables(index), rows)
        except LayoutError as error:
            raise _refuse(EngineRefusal.LAYOUT, f"group {index}: {error}") from error
        groups.append(CacheGroup(index, layout, layers, overlay))
    return groups


def _shares(layer: Any) -> bool:  # noqa: ANN401 - vLLM's attention layer
    """Tell whether a layer reads another one's K and V and writes none of its own."""
    return getattr(layer, "kv_sharing_target_layer_name", None) is not None


def probe_groups(runner: Any, groups: Sequence[CacheGroup[Any]], page: int) -> None:  # noqa: ANN401
    """Let every layer's own writer write marked rows into `page`, and look for them.

    Raises:
        GeometryError: rows are not where the layout says.
    """
    for group in groups:
        for name, layer in group.layers.items():
            rows = KVRows.of(group.layout, [layer.kv_cache])
            try:
                probe_rows(
                    rows,
                    partial(_write, layer),
                    page,
                    dtype=runner.model_config.dtype,
                    fp8=fp8_kind(runner.cache_config.cache_dtype),
                )
            except LayoutError as error:
                raise GeometryError(
                    Refusal(EngineRefusal.LAYOUT, f"layer {name}: {error}", "report this backend")
                ) from error


def _write(layer: Any, key: Tensor, value: Tensor, slots: Tensor) -> None:  # noqa: ANN401
    layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, slots)


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


def _layout(runner: Any, index: int, group: Any) -> Layout:  # noqa: ANN401
    names = {attention.backend.get_name() for attention in runner.attn_groups[index]}
    known = {LAYOUTS[name] for name in names if name in LAYOUTS}
    if names - LAYOUTS.keys() or len(known) != 1:
        raise _refuse(
            EngineRefusal.BACKEND,
            f"group {index} uses {', '.join(sorted(names))}; known: {', '.join(LAYOUTS)}",
        )
    for attention in runner.attn_groups[index]:
        if attention.kernel_block_size is not None:
            raise _refuse(
                EngineRefusal.BACKEND,
                f"group {index}: kernels use blocks of {attention.kernel_block_size}, the block "
                f"table has blocks of {group.kv_cache_spec.block_size}: it is copied per step",
            )
    return known.pop()


def _refuse(reason: EngineRefusal, found: str) -> GeometryError:
    return GeometryError(Refusal(reason, found, "`nwor doctor` shows the details"))
