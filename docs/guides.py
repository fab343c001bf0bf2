"""Runs the programs of the guides on eight fake devices, and writes what they print under them.

`python docs/guides.py` rewrites the pages; a test, which starts JAX, compares. Not here: pages whose commands run
without JAX (`generate.py`).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["PAGES", "generated"]

FOLDER = Path(__file__).parent / "guides"
PAGES = tuple(sorted(p for p in FOLDER.glob("*.md") if p.name != "index.md"))

_PROGRAM = re.compile(r"```python\n(?P<code>.*?)```\n\n```text\n(?P<said>.*?)```\n", re.DOTALL)


def said(code: str) -> str:
    """What a program prints.

    Raises:
        AssertionError: it failed; with the end of what it said.
    """
    flags = "--xla_force_host_platform_device_count=8"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "TF_CPP_MIN_LOG_LEVEL": "3"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(FOLDER), env.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "program.py"
        program.write_text(code, encoding="utf-8")
        done = subprocess.run([sys.executable, str(program)], env=env, capture_output=True, text=True, check=False)  # noqa: S603
    assert done.returncode == 0, done.stderr[-3000:]
    # The library that carries collectives between processes says when it is connected.
    lines = (line.rstrip() for line in done.stdout.splitlines() if "peer ranks" not in line and "[Gloo]" not in line)
    return "\n".join(lines) + "\n"


def generated(page: Path) -> str:
    """The page as it should be."""
    text = page.read_text(encoding="utf-8")
    match = _PROGRAM.search(text)
    assert match is not None, f"{page.name}: no program with its output"
    return text[: match.start("said")] + said(match["code"]) + text[match.end("said") :]


if __name__ == "__main__":
    for one in PAGES:
        if not sys.argv[1:] or one.stem in sys.argv[1:]:
            one.write_text(generated(one), encoding="utf-8")
