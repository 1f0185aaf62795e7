"""The pages in docs/symptoms, whose outputs are what their commands print.

`python -m tests.examples.symptom_pages [NAME ...]` writes them anew.

The commands of a page are run in its order, in a directory with the files of examples/symptoms. Of an output, a page
has what is the same on every machine: sizes, and what follows the first finding, are left out as `...`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.warm_process import warm

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "symptoms").glob("*.md"))
FILES = (*sorted((ROOT / "examples" / "symptoms").glob("*.py")), ROOT / "examples" / "fsdp2.py")
BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
_OF_A_MACHINE = re.compile(r" *(?:relative L2 difference |First difference in bits: step |\d+ sites: )")
_CODES = (0, 1, 3)
"""Exit codes of commands that have done their task."""


def updated(page: str) -> str:
    """The page with the outputs that its commands have now."""
    with tempfile.TemporaryDirectory(prefix="symptom-") as name:
        for file in FILES:
            shutil.copy(file, name)
        return BLOCK.sub(lambda block: f"```console\n{_outputs(block[1], Path(name))}```", page)


def _outputs(block: str, directory: Path) -> str:
    commands = [line[2:] for line in block.splitlines() if line.startswith("$ ")]
    lines = [line for command in commands for line in (f"$ {command}", *shown(_run(command, directory)))]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _run(command: str, directory: Path) -> str:
    words = shlex.split(command)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if words[0] == "torchrun":
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", *words[1:]], cwd=directory,
            env=environment, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
    else:
        module = ("-m", "traindiff") if words[0] == "traindiff" else ()
        done = warm(*module, *words[1:], cwd=directory, env=environment)
    assert done.returncode in _CODES, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def shown(output: str) -> Iterator[str]:
    """The lines of an output that are the same on every machine, up to the first finding."""
    left_out = False
    for line in output.splitlines():
        if _OF_A_MACHINE.match(line):
            left_out = True
            continue
        if left_out and line.strip():
            yield "  ..." if line.startswith("  ") else "..."
            left_out = False
        yield line
        if line.startswith("  more: "):
            yield "..."
            return
    if left_out:
        yield "..."


if __name__ == "__main__":
    for path in PAGES:
        if path.stem in sys.argv[1:] or not sys.argv[1:]:
            path.write_text(updated(path.read_text(encoding="utf-8")), encoding="utf-8")
