"""Everything about the device overlay that only a GPU can tell, within a time limit.

    bench/gpu_check.sh [--json OUT] [--seconds 480] [--model PATH] [--dry-run]

Parts run one after the other, each in a process of its own with a time limit, the most important first.
A part that cannot run says why; nothing is estimated in its place. The JSON is written after each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import write_json

ROOT = Path(__file__).resolve().parents[1]
PARTS = {
    "tests": 150,
    "host": 30,
    "windows": 60,
    "commit": 60,
    "graph": 40,
    "vllm": 240,
}
"""Name and seconds at most of each part; what one leaves over, the next may use."""


def run_tests(args: argparse.Namespace, limit: float) -> dict[str, object]:
    """Run tests/triton with compiled kernels, or a few of them interpreted."""
    device = "cpu" if args.dry_run else "cuda"
    chosen = ["--ignore=tests/triton/test_gpu_check.py"]  # it runs this script
    chosen += ["-k", "ragged or one_launch or rehearsal"] if args.dry_run else []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.txt"
        command = [sys.executable, "-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider", *chosen]
        code = _run([*command, "tests/triton"], out, limit, {"NWOR_TEST_DEVICE": device})
        lines = out.read_text().splitlines()
    return {
        "device": device,
        "exit_code": code,
        "summary": lines[-1] if lines else "",
        "failed": [line for line in lines if line.startswith(("FAILED", "ERROR"))],
    }


def run_part(name: str, args: argparse.Namespace, limit: float) -> dict[str, object]:
    """Run a part of gpu_parts.py, or the comparison of vLLM's modes."""
    command = [sys.executable, str(ROOT / "bench" / "gpu_parts.py"), name]
    command += ["--dry-run"] if args.dry_run else []
    command += ["--model", args.model] if args.model else []
    environment = {"TRITON_INTERPRET": "1"} if args.dry_run else {}
    with tempfile.TemporaryDirectory() as folder:
        result, out = Path(folder) / "result.json", Path(folder) / "out.txt"
        code = _run([*command, "--out", str(result)], out, limit, environment)
        found: dict[str, object] = json.loads(result.read_text()) if result.exists() else {}
        if code:
            found |= {"exit_code": code, "last_output": out.read_text().splitlines()[-12:]}
    return found


def _run(command: list[str], out: Path, limit: float, environment: dict[str, str]) -> int | str:
    with out.open("w") as file:
        try:
            return subprocess.run(  # noqa: S603 - our own interpreter
                command,
                cwd=ROOT,
                env={**os.environ, **environment},
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=limit,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return f"stopped after {limit:.0f} s"


def gpu() -> dict[str, object] | None:
    """Name and versions of the GPU, None if there is none; asked elsewhere, to hold no memory."""
    program = (
        "import json, torch; p = torch.cuda.get_device_properties(0); "
        "print(json.dumps({'name': p.name, 'capability': [p.major, p.minor], "
        "'cuda': torch.version.cuda, 'memory_gb': p.total_memory / 1e9, "
        "'processors': p.multi_processor_count}))"
    )
    done = subprocess.run(  # noqa: S603 - our own interpreter
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    return json.loads(done.stdout) if done.returncode == 0 else None


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, default=ROOT / "out" / "gpu_check.json", metavar="OUT")
    parser.add_argument("--seconds", type=float, default=480, help="limit of the whole run")
    parser.add_argument("--model", help="model for vLLM; default: Gemma 3 270M of `make demo`")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--dry-run", action="store_true", help="no GPU: tiny sizes, interpreted")
    return parser.parse_args()


def main() -> int:
    args, started = arguments(), time.perf_counter()
    device = gpu()
    if device is None and not args.dry_run:
        sys.exit("no NVIDIA GPU that torch can use: nothing was run (--dry-run tries the script)")
    record: dict[str, object] = {"dry_run": args.dry_run, "gpu": device, "parts": {}}
    parts: dict[str, dict[str, object]] = {}
    spare = 0.0
    for name in args.parts:
        left = args.seconds - (time.perf_counter() - started)
        limit = min(PARTS[name] + spare, left - 5)
        if limit < 10:
            parts[name] = {"not_run": f"{left:.0f} s left"}
            continue
        print(f"==> {name}: at most {limit:.0f} s", flush=True)
        begun = time.perf_counter()
        work = run_tests(args, limit) if name == "tests" else run_part(name, args, limit)
        took = time.perf_counter() - begun
        spare = max(spare + PARTS[name] - took, 0)
        parts[name] = {**work, "seconds": took}
        print(json.dumps(parts[name], indent=1), flush=True)
        write_json(args.json, {**record, "parts": parts})
    wrong = [name for name, part in parts.items() if part.get("exit_code")]
    missing = [name for name, part in parts.items() if "not_run" in part]
    print(f"failed: {wrong or 'none'}; not run: {missing or 'none'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
