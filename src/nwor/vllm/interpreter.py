"""vLLM's V2 runner on a CPU: under Triton's interpreter, which vLLM does not look for.

vLLM uses Triton if one of Triton's backends says that it is active. Triton has none for CPUs, and its
interpreter needs none: a stand-in that only says so is enough. It holds for this process, so the
engine has to run in it.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import torch

from nwor.errors import InputError

CHOICE = "VLLM_USE_V2_MODEL_RUNNER"
"""vLLM's own variable; unset, vLLM takes the V1 runner on CPUs."""


class _Driver:
    """All that vLLM asks of a driver."""

    @staticmethod
    def is_active() -> bool:
        """Return True."""
        return True


def offer_interpreter() -> None:
    """Let vLLM find Triton's interpreter; to be called before vLLM is imported.

    Raises:
        InputError: Triton is not installed.
    """
    try:
        from triton.backends import backends  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise InputError(
            "vLLM's V2 runner needs Triton: pip install 'nwor[triton]', or unset " + CHOICE
        ) from error
    backends.setdefault("cpu", SimpleNamespace(driver=_Driver, compiler=None))


def prepare_v2() -> bool:
    """Make ready for the V2 runner if the environment asks for it; tell whether it does.

    To be called before vLLM is imported.

    Raises:
        InputError: there is nothing here that Triton's kernels could run on.
    """
    if os.environ.get(CHOICE) != "1":
        return False
    if not torch.cuda.is_available():
        if os.environ.get("TRITON_INTERPRET") != "1":
            raise InputError(
                f"{CHOICE}=1, but there is no GPU: on CPUs the V2 runner runs under Triton's "
                f"interpreter only. Set TRITON_INTERPRET=1, or unset {CHOICE}"
            )
        offer_interpreter()
    return True
