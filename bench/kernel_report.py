"""Compile all kernels for GPUs that are not here, and say what they take on each.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from common import print_table, write_json
from nwor.store.triton_kernel import move_rows_kernel
from nwor.store.triton_rows import FIELDS, MAX_BLOCK
from nwor.store.triton_window import ENTRIES
from nwor.store.triton_window_kernels import begin_kernel, close_kernel, fill_kernel

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


@dataclass(frozen=True)
class Variant:
    """One kernel as it is launched: constants, and warps per program."""

    name: str
    kernel: Any
    constants: dict[str, Any]
    num_warps: int
    note: str

    def signature(self) -> dict[str, str]:
        """Types of the parameters: pointers, except plain integers and constants."""
        types = {}
        for name in self.kernel.arg_names:
            if name in self.constants:
                types[name] = "constexpr"
            else:
                types[name] = POINTERS.get(name, "i32" if name in INTEGERS else "*i64")
        return types


POINTERS = {"window": "*i32", "query_start_loc": "*i32", "under": "*i32", "num_rejected": "*i32"}
INTEGERS = {
    *("src_group_step", "dst_group_step", "requests", "newcomers", "first_page", "end_page"),
    *("chunks", "row_step", "num_tokens"),
}
BLOCKS = ((64, 1), (256, 4), (MAX_BLOCK, 4))
"""Words per step, by row size, and warps: as `TritonMove` chooses them."""
GROUPS = ((1, 8), (8, 8), (8, 32))
"""Cache groups, and rows of a window per step."""


def variants() -> list[Variant]:
    """Every kernel, in the sizes that matter."""
    found = [
        Variant(
            "move_rows", move_rows_kernel, {"FIELDS": FIELDS, "BLOCK": block}, warps, f"{block}"
        )
        for block, warps in BLOCKS
    ]
    for block, warps in BLOCKS:
        constants = {"GROUPS": 1, "FIELDS": FIELDS, "BLOCK": block, "ENTRIES": ENTRIES}
        found.append(Variant("fill", fill_kernel, constants, warps, f"{block}"))
    for groups, rows in GROUPS:
        shape = {"GROUPS": groups, "GROUP_BLOCK": groups, "BLOCK": rows}
        note = f"{groups} groups, {rows} rows"
        found.append(Variant("begin", begin_kernel, shape, 1, note))
        for commit in (True, False):
            constants = {**shape, "COMMIT": commit, "ENTRIES": ENTRIES}
            name = "close, commit" if commit else "close, abort"
            found.append(Variant(name, close_kernel, constants, 1, note))
    return found


def compile_for(target: GPUTarget, variant: Variant) -> Any:  # noqa: ANN401 - triton is untyped
    source = ASTSource(variant.kernel, variant.signature(), variant.constants)
    return triton.compile(source, target=target, options={"num_warps": variant.num_warps})


def figures(name: str, variant: Variant) -> dict[str, object]:
    kernel = compile_for(TARGETS[name], variant)
    used = _amd(kernel) if name.startswith("gfx") else _nvidia(kernel)
    return {
        "kernel": variant.name,
        "size": variant.note,
        "target": name,
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
    kernels = [figures(name, variant) for variant in variants() for name in TARGETS]
    header = ["kernel", "size", "target", "num_warps", "registers", "spills", "shared_bytes"]
    print_table(header, [[kernel[column] for column in header] for kernel in kernels])
    write_json(args.json, {"kernels": kernels})


if __name__ == "__main__":
    main()
