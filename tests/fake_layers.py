"""A layer as the manager's first users have it: caches of slots, distinct rows, a recording writer."""

import torch

from nwor.testing import FailingWriter

SLOTS = 16


class Layer:
    """A layer with caches ``[slots, 1, 2]``, distinct rows, and a recording writer."""

    def __init__(self, name: str, rows: int, *, dtype=torch.float32, seed=0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.name = name
        self.key = torch.rand(rows, 1, 2, generator=generator).to(dtype)
        self.value = torch.rand(rows, 1, 2, generator=generator).to(dtype)
        self.key_cache = torch.full((SLOTS, 1, 2), -7.0).to(dtype)
        self.value_cache = torch.full((SLOTS, 1, 2), -7.0).to(dtype)
        self.writer = FailingWriter()

    def stage(self, manager, slots, rows=slice(None), **overrides) -> bool:
        arguments = {
            "layer_id": self.name,
            "key": self.key[rows],
            "value": self.value[rows],
            "key_cache": self.key_cache,
            "value_cache": self.value_cache,
            "slot_mapping": slots,
            "kv_cache_dtype": "auto",
            "k_scale": None,
            "v_scale": None,
            "writer": self.writer,
        }
        return manager.stage_layer(**(arguments | overrides))

    def written(self) -> set[int]:
        """Slots of the caches that differ from the canary, K and V agreeing."""
        changed = (self.key_cache != -7.0).flatten(1).any(1)
        assert torch.equal(changed, (self.value_cache != -7.0).flatten(1).any(1))
        return set(changed.nonzero().flatten().tolist())

    def holds(self, slots: list[int], rows: list[int]) -> bool:
        """The caches hold exactly these rows at these slots, and the canary elsewhere."""
        key = torch.full_like(self.key_cache, -7.0)
        value = torch.full_like(self.value_cache, -7.0)
        for slot, row in zip(slots, rows, strict=True):
            key[slot], value[slot] = self.key[row], self.value[row]
        return torch.equal(key, self.key_cache) and torch.equal(value, self.value_cache)


def ints(*values: int, dtype=torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)
