"""The README's example runs as printed, in a fresh process, and shows what it says."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_example_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "committed=1, rejected=1, rows_written=4" in done.stdout
    assert "[ True,  True, False]" in done.stdout
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
