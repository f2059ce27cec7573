"""Compile the mover kernel for GPUs that are not here, and say what it takes on each.

Registers and spills come from the assembled code object. NVIDIA: cuobjdump, which triton brings along;
spills are bytes of stack and local memory. AMD: metadata of the assembly; spills are registers.
Nothing is run, nothing is timed.

python bench/kernel_report.py [--json OUT]
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from common import print_table, write_json
from nwor.store.triton_kernel import move_rows_kernel
from nwor.store.triton_rows import FIELDS, MAX_BLOCK

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SIGNATURE = {
    "table": "*i64",
    "src_slots": "*i64",
    "dst_slots": "*i64",
    "src_group_step": "i32",
    "dst_group_step": "i32",
    "FIELDS": "constexpr",
    "BLOCK": "constexpr",
}


def compile_for(target: GPUTarget, block: int, warps: int) -> Any:  # noqa: ANN401 - triton is untyped
    source = ASTSource(move_rows_kernel, SIGNATURE, {"FIELDS": FIELDS, "BLOCK": block})
    return triton.compile(source, target=target, options={"num_warps": warps})


def figures(name: str, block: int, warps: int) -> dict[str, object]:
    kernel = compile_for(TARGETS[name], block, warps)
    used = _amd(kernel) if name.startswith("gfx") else _nvidia(kernel)
    return {
        "target": name,
        "block": block,
        "num_warps": kernel.metadata.num_warps,
        "shared_bytes": kernel.metadata.shared,
        **used,
    }


def _nvidia(kernel: Any) -> dict[str, int]:  # noqa: ANN401
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        done = subprocess.run(  # noqa: S603
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        )
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", done.stdout))
    return {"registers": int(found["REG"]), "spills": int(found["STACK"]) + int(found["LOCAL"])}


def _amd(kernel: Any) -> dict[str, int]:  # noqa: ANN401
    found = dict(re.findall(r"\.(\w+_count): +(\d+)", kernel.asm["amdgcn"]))
    return {
        "registers": int(found["vgpr_count"]),
        "scalar_registers": int(found["sgpr_count"]),
        "spills": int(found["vgpr_spill_count"]) + int(found["sgpr_spill_count"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the figures as JSON")
    args = parser.parse_args()
    if hasattr(move_rows_kernel, "rewrite"):
        sys.exit("TRITON_INTERPRET is set: unset it, an interpreted kernel cannot be compiled")
    kernels = [
        figures(name, block, warps)
        for name in TARGETS
        for block, warps in ((64, 1), (256, 4), (MAX_BLOCK, 4))
    ]
    header = ["target", "block", "num_warps", "registers", "spills", "shared_bytes"]
    print_table(header, [[kernel[column] for column in header] for kernel in kernels])
    write_json(args.json, {"kernels": kernels})


if __name__ == "__main__":
    main()
