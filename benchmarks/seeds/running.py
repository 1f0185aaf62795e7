"""Run the same trainings with an original and with its replacement, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.seeds.environments import ROOT

MOST_SECONDS = 900


def results_of(python: Path, module: str, *arguments: str, folder: Path) -> Any:
    """What a program wrote as JSON into the last line of its output.

    Args:
        python: The interpreter.
        module: The program; it is run as `python -m`.
        arguments: Its arguments.
        folder: Directory in which it runs.

    Raises:
        RuntimeError: It failed.
    """
    environment = {
        **os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    done = subprocess.run(
        [str(python), "-m", module, *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=MOST_SECONDS, check=False,
    )  # fmt: skip
    if done.returncode or not done.stdout.strip():
        raise RuntimeError(f"{module} {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def difference(original: Sequence[Any], replacement: Sequence[Any]) -> str:
    """The first difference of two sequences in words; empty if there is none."""
    for number, (one, other) in enumerate(zip(original, replacement, strict=False), start=1):
        if one != other:
            return f"entry {number} is {one!r} in the original and {other!r} here"
    if len(original) != len(replacement):
        return f"the original has {len(original)} entries, and the replacement {len(replacement)}"
    return ""
