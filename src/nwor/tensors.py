"""What nwor needs to know about tensors it is handed."""

from __future__ import annotations

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from nwor.errors import NoStorageError


def require_storage(name: str, tensor: Tensor) -> None:
    """Refuse tensors without memory behind them (fake, meta, freed storage).

    Raises:
        NoStorageError: there is nothing to stage or to write; the caller writes through.
    """
    if type(tensor) is Tensor and tensor.data_ptr():
        return  # by far the most common case, and this is called for every layer
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        raise NoStorageError(
            f"{name} is a {type(tensor).__name__} without storage: cannot stage it"
        )
    if tensor.numel() and not tensor.data_ptr():
        raise NoStorageError(f"{name} has no storage behind it: cannot stage it")


def version(tensor: Tensor) -> int:
    """Return the counter that in-place writes by eager ops raise; -1 for inference tensors."""
    return -1 if tensor.is_inference() else tensor._version  # noqa: SLF001 - no public name for it
