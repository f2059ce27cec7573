"""The core stands on torch and numpy alone, and imports run one way."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import nwor

FORBIDDEN = ("triton", "transformers", "vllm", "numba")
SOURCE = Path(nwor.__file__).parent
# Every module of the core may import those before it, none after.
ORDER = [
    "errors", "tensors", "layout", "slots", "scales", "window_rows", "acceptance", "plan", "metrics",
    "reference", "store", "window", "writers", "layer_memory", "writer_window", "cache", "manager",
]  # fmt: skip


def test_core_runs_without_engines_and_compilers() -> None:
    """In a fresh process in which importing any of them is an error."""
    program = f"""
import sys
for name in {FORBIDDEN!r}:
    sys.modules[name] = None  # `import name` raises ImportError
import torch
from nwor import DeferredWriteManager, KVRows, TransactionalCache, WindowRows
rows = KVRows.allocate(layers=2, pages=2, page_size=4, heads=1, dim=2, dtype=torch.float32)
cache = TransactionalCache({{"all": rows}}, max_rows=4)
with cache.begin(WindowRows.drafts([2]), torch.tensor([3, 4])) as window:
    for layer in range(2):
        window.stage("all", layer, torch.ones(2, 1, 2), torch.ones(2, 1, 2))
    window.commit([1])
print(cache.metrics.rows_written)
import nwor
try:
    nwor.generate
except ImportError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "2",
        "nwor.generate needs the engine: pip install 'nwor[engine]'",
    ]


def test_the_shadow_map_needs_numpy_alone() -> None:
    """In a fresh process in which engines, compilers and even torch cannot be imported."""
    program = f"""
import importlib.util, sys, types
for name in {(*FORBIDDEN, "torch")!r}:
    sys.modules[name] = None
nwor = sys.modules["nwor"] = types.ModuleType("nwor")  # nwor itself imports torch
nwor.__path__ = [{str(SOURCE)!r}]
from nwor.audit import ShadowMap
print(ShadowMap(num_pages=8, page_size=4, max_requests=2, max_length=9).findings.steps)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_the_audit_imports_no_engine() -> None:
    for file in (SOURCE / "audit").glob("*.py"):
        assert core_imports(file) <= {"audit", "errors", "layout"}, file.name


def test_soak_imports_run_upwards() -> None:
    """And what is not about an engine imports none."""
    order = [
        "tiny", "traffic", "sizes", "ledger", "on_transformers", "on_vllm", "run", "report", "cli",
    ]  # fmt: skip
    for index, name in enumerate(order):
        text = (SOURCE / "soak" / f"{name}.py").read_text()
        found = set(re.findall(r"from nwor\.soak\.(\w+) import", text))
        assert found <= set(order[:index]), name
        if name not in ("on_transformers", "on_vllm", "cli"):
            assert core_imports(SOURCE / "soak" / f"{name}.py") <= {"audit", "metrics", "soak"}, (
                name
            )


def core_imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nwor"):
            parts = (node.module or "").split(".")
            names |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
    return names


def test_core_imports_run_downwards() -> None:
    for index, name in enumerate(ORDER):
        path = SOURCE / f"{name}.py"
        files = [path] if path.exists() else sorted((SOURCE / name).glob("movers.py"))
        for file in files:
            later = core_imports(file) - {name} - set(ORDER[:index])
            assert not later, f"{file.name} imports {later}"
