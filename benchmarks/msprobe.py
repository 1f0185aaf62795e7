"""What monitoring gradients costs, against msprobe's gradient monitor.

    python benchmarks/msprobe.py --msprobe VENV/bin/python

VENV is an environment of its own with mindstudio-probe 8.3.3 and torch (it needs an older NumPy than traindiff is
tested with), and traindiff on its path; without it, traindiff alone is measured. Observed and plain steps take turns in
one process, on one thread, in CPU time, which counts the thread that writes. Prints a table.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from time import process_time
from typing import Any

import torch
from gpt import Training

import traindiff
from traindiff.run.doctor.timing import interleaved

BOUNDS = [-1, 0, 1]
NATIVE: dict[str, dict[str, Any]] = {
    "L1": {"observe": "grad", "detail": "signs"},
    "L2": {"observe": "grad", "detail": "signs", "bounds": BOUNDS},
}


def configuration(directory: Path, level: str) -> str:
    """A configuration file of the monitor, which msprobe and traindiff both read."""
    path = directory / "config.json"
    content = {
        "task": "grad_probe", "dump_path": str(directory / "dump"), "rank": [], "step": [],
        "grad_probe": {"grad_level": level, "param_list": [], "bounds": BOUNDS},
    }  # fmt: skip
    path.write_text(json.dumps(content))
    return str(path)


def native(training: Training, directory: Path, level: str) -> AbstractContextManager[Any]:
    """`traindiff.record`."""
    return traindiff.record(directory / "dump", training.model, training.optimizer, strict=True, **NATIVE[level])


def compatible(training: Training, directory: Path, level: str) -> AbstractContextManager[Any]:
    """`traindiff.compat.msprobe`, which also writes msprobe's files."""
    from traindiff.compat.msprobe import PrecisionDebugger

    debugger = PrecisionDebugger(configuration(directory, level))
    debugger.monitor(training.model)
    undo = ExitStack()
    undo.callback(debugger.stop)
    return undo


def measured(
    attach: Callable[[Training, Path, str], AbstractContextManager[Any]], level: str, *, rounds: int, layers: int
) -> dict[str, float]:
    """Ratio and bytes on disk per step."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        plain, watched = Training(layers=layers), Training(layers=layers)
        with attach(watched, directory, level):
            steps = 2
            for _ in range(steps):
                plain.step()
                watched.step()
            ratio = interleaved(plain.step, watched.step, rounds=rounds, clock=process_time)
        return about(ratio, directory, num_steps(directory))


def of_msprobe(level: str, *, rounds: int, layers: int) -> dict[str, float]:
    """The same of msprobe. Its hook is on all optimizers of the process, so it is taken off for the plain steps."""
    sys.path.remove(str(Path(__file__).parent))  # where this file has the name of the package
    from msprobe.pytorch import PrecisionDebugger
    from torch.optim import optimizer

    torch.set_num_threads(1)
    hooks = optimizer._global_optimizer_pre_hooks
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        plain, watched = Training(layers=layers), Training(layers=layers)
        debugger = PrecisionDebugger(config_path=configuration(directory, level))
        debugger.monitor(watched.model)
        own = dict(hooks)

        def without() -> None:
            hooks.clear()
            plain.step()

        def with_hook() -> None:
            hooks.update(own)
            watched.step()

        for _ in range(2):
            without()
            with_hook()
        ratio = interleaved(without, with_hook, rounds=rounds, clock=process_time)
        hooks.clear()
        return about(ratio, directory, num_steps(directory))


def num_steps(directory: Path) -> int:
    """Steps that have left files."""
    found = [path for path in (directory / "dump").glob("rank*0/*") if path.name.startswith("grad_summary_")]
    return len(found) or len(list((directory / "dump" / "rank-00000" / "tensors").iterdir()))


def about(ratio: Any, directory: Path, steps: int) -> dict[str, float]:
    """What is printed."""
    files = sum(path.stat().st_size for path in (directory / "dump").rglob("*") if path.is_file())
    return {
        "median": ratio.median, "low": ratio.low, "high": ratio.high, "seconds": ratio.baseline_seconds,
        "bytes": files / steps,
    }  # fmt: skip


def in_other_python(python: str, level: str, *, rounds: int, layers: int) -> dict[str, float]:
    """`of_msprobe` where msprobe is installed."""
    command = [python, __file__, "--only-msprobe", level, "--rounds", str(rounds), "--layers", str(layers)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, float] = json.loads(printed.splitlines()[-1])
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--msprobe", help="Python of an environment with mindstudio-probe")
    parser.add_argument("--only-msprobe", metavar="LEVEL", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=12)
    options = parser.parse_args()
    how = {"rounds": options.rounds, "layers": options.layers}
    if options.only_msprobe:
        print(json.dumps(of_msprobe(options.only_msprobe, **how)))
        return
    if options.msprobe and not shutil.which(options.msprobe):
        sys.exit(f"{options.msprobe} is no Python")
    print("| what | step time / plain | quartiles | plain step | MB per step |")
    print("| --- | --- | --- | --- | --- |")
    for level in ("L1", "L2"):
        rows = {
            f"{level}: `traindiff.record({', '.join(f'{k}={v!r}' for k, v in NATIVE[level].items())})`": measured(
                native, level, **how
            ),
            f"{level}: `traindiff.compat.msprobe`, with msprobe's files": measured(compatible, level, **how),
        }
        if options.msprobe:
            rows[f"{level}: mindstudio-probe"] = in_other_python(options.msprobe, level, **how)
        for name, row in rows.items():
            print(
                f"| {name} | **{row['median']:.3f}** | {row['low']:.3f} - {row['high']:.3f} | {row['seconds']:.2f} s "
                f"| {row['bytes'] / 1e6:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
