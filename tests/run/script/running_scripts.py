"""Run scripts in processes of their own, by Python and by `traindiff run`."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.warm_process import warm

SCRIPTS = Path(__file__).parent / "scripts"
GAN = Path(__file__).parents[3] / "examples" / "gan.py"

NEXT = "Next: "
"""What the line that names further commands begins with."""

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a process ended, and what it printed. What traindiff said is apart from the rest of standard error.

    Attributes:
        said: Its lines, without the last one.
        named_next: The line about what to ask next; empty if there is none.
    """

    code: int
    output: str
    errors: str
    said: list[str]
    named_next: str


def plain(*arguments: str | Path, cwd: Path | None = None) -> Ended:
    """`python ARGUMENTS`."""
    return _run([sys.executable, *map(str, arguments)], cwd)


def recorded(*arguments: str | Path, output: str | Path, cwd: Path | None = None) -> Ended:
    """`python -m traindiff run -o OUTPUT ARGUMENTS`."""
    return _run([sys.executable, "-m", "traindiff", "run", "-o", str(output), *map(str, arguments)], cwd)


def recorded_warm(*arguments: str | Path, output: str | Path, cwd: Path | None = None) -> Ended:
    """`recorded`, in a process that has imported torch before."""
    return _ended(warm("-m", "traindiff", "run", "-o", output, *arguments, cwd=cwd, env=ENVIRONMENT))


def on_two_ranks(*arguments: str | Path) -> Ended:
    """`torchrun --nproc-per-node 2 ARGUMENTS`."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return _run([*launcher, *map(str, arguments)], None)


def _run(command: list[str], cwd: Path | None) -> Ended:
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, cwd=cwd, env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return _ended(result)


def _ended(result: subprocess.CompletedProcess[str]) -> Ended:
    lines = result.stderr.splitlines(keepends=True)
    said = [line.removeprefix("traindiff: ").rstrip() for line in lines if line.startswith("traindiff: ")]
    errors = "".join(line for line in lines if not line.startswith("traindiff: "))
    named_next = said.pop() if said and said[-1].startswith(NEXT) else ""
    return Ended(code=result.returncode, output=result.stdout, errors=errors, said=said, named_next=named_next)
