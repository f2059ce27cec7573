"""KV connectors of ours, through vLLM's public interface.

`PageConnector` exports a finished request's pages to a file and loads them in another engine; vLLM
keeps the pages until the export is done. `LayerwiseConnector` copies during the forward what the
slot mapping names: the kind that nwor refuses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)


@dataclass
class Transfer:
    request: str
    blocks: list[int]
    file: str
    tokens: list[int] = field(default_factory=list)
    computed: int = 0


@dataclass
class Transfers(KVConnectorMetadata):
    saves: list[Transfer] = field(default_factory=list)
    loads: list[Transfer] = field(default_factory=list)


class PageConnector(KVConnectorBase_V1):
    """Whole pages by block id: saved once a request has finished, loaded before its first step."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.folder = Path(self._kv_transfer_config.get_from_extra_config("folder", ""))
        self.size = vllm_config.cache_config.block_size
        self.pending = Transfers()
        self.done: set[str] = set()
        self.caches: dict[str, torch.Tensor] = {}

    # -- scheduler -------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed: int) -> tuple[int, bool]:
        file = self.find(request.prompt_token_ids)
        if file is None:
            return 0, False
        return (request.num_prompt_tokens - 1) // self.size * self.size - num_computed, False

    def find(self, prompt: list[int]) -> str | None:
        """A file whose tokens begin with all full pages of the prompt."""
        need = prompt[: (len(prompt) - 1) // self.size * self.size]
        for file in sorted(self.folder.glob("*.pt")):
            tokens = torch.load(file)["tokens"]
            if need and tokens[: len(need)] == need:
                return str(file)
        return None

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external: int) -> None:
        if num_external:
            file = self.find(request.prompt_token_ids)
            assert file is not None
            (ids,) = blocks.get_block_ids()
            self.pending.loads.append(
                Transfer(request.request_id, ids[: request.num_prompt_tokens // self.size], file)
            )

    def build_connector_meta(self, scheduler_output: Any) -> Transfers:
        pending, self.pending = self.pending, Transfers()
        return pending

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        computed = request.num_computed_tokens
        name = request.request_id.rsplit("-", 1)[0]
        self.pending.saves.append(
            Transfer(
                request.request_id,
                list(block_ids),
                str(self.folder / f"{name}.pt"),
                list(request.all_token_ids[:computed]),
                computed,
            )
        )
        return True, None

    # -- worker ----------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for load in self._get_connector_metadata().loads:
            pages = torch.load(load.file)["pages"]
            for layer, cache in self.caches.items():
                cache[load.blocks] = pages[layer][: len(load.blocks)]

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are synchronous."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        """Nothing during the forward."""

    def wait_for_save(self) -> None:
        for save in self._get_connector_metadata().saves:
            pages = {layer: cache[save.blocks].clone() for layer, cache in self.caches.items()}
            exported = {"tokens": save.tokens, "computed": save.computed, "pages": pages}
            torch.save(exported, save.file)
            self.done.add(save.request)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        done, self.done = self.done, set()
        return done, set()


class LayerwiseConnector(PageConnector):
    """Copies rows during the forward, from the slots they are being written to."""

    slots: list[torch.Tensor] = []  # noqa: RUF012 - shared with the test in the same process

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        self.slots.append(attn_metadata.slot_mapping.clone())
