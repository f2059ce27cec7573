"""The example of docs/audit.md runs as printed and prints what it says."""

import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs/audit.md"


def test_the_broken_engine_is_convicted() -> None:
    found = re.search(
        r"```python\n(.*?)```\n\nprints\n\n((?:    [^\n]*\n)+)", DOCS.read_text(), re.DOTALL
    )
    assert found
    code, said = found.groups()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [line.strip() for line in said.splitlines()]
