"""Row movers by name (`nwor.store.moves` says what one is).

A mover is never replaced by another one behind the caller's back.
"""

from __future__ import annotations

from nwor.errors import InputError
from nwor.store.moves import Binder
from nwor.store.torch_rows import bind_torch

MOVERS = ("torch", "numba", "triton")


def get_mover(name: str) -> Binder:
    """Return the mover called `name`: ``torch``, ``numba`` (CPU) or ``triton`` (GPU), extras of nwor.

    Raises:
        InputError: no such mover, or its package is not installed.
    """
    if name == "torch":
        return bind_torch
    if name == "numba":
        try:
            from nwor.store.jit import bind_numba  # noqa: PLC0415 - an optional dependency
        except ImportError as error:
            raise InputError("mover 'numba' needs numba: pip install 'nwor[numba]'") from error
        return bind_numba
    if name == "triton":
        try:
            from nwor.store.triton_rows import bind_triton  # noqa: PLC0415 - an optional dependency
        except ImportError as error:
            raise InputError("mover 'triton' needs triton: pip install 'nwor[triton]'") from error
        return bind_triton
    raise InputError(f"unknown mover {name!r}; known movers: {', '.join(MOVERS)}")
