"""Record and compare long and large trainings: `python -m tests.campaigns.load`. Exits with 1 where memory grows.

Seconds are of CPU time. Each row trains in one process, which records, and compares the recording with itself in
another. Memory is looked at
in fifths of the work: it is flat if the largest of the last fifth is at most a tenth and 32 MB above that of the first
fifth. The time is linear if the last fifth of a comparison takes at most twice as long as the second.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import traindiff

SLACK_BYTES = 32 << 20
MICRO_STEPS_OF_A_STEP = 10
FIFTHS = 5


def main() -> int:
    """Run the rows that are asked for, print a table, and give the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="parameters,observations,micro-steps,steps")
    parser.add_argument("--parameters", type=int, default=20_000, help="parameters of the model of that row")
    parser.add_argument("--observations", type=int, default=100_000, help="observations in a step of that row")
    parser.add_argument("--micro-steps", type=int, default=1_000_000, help=f"{MICRO_STEPS_OF_A_STEP} make a step")
    parser.add_argument("--steps", type=int, default=100_000, help="steps of the comparison of that row")
    parser.add_argument("--child", nargs=3, metavar=("WHAT", "SIZE", "PATH"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        what, size, path = arguments.child
        print(json.dumps(CHILDREN[what](int(size), Path(path))))
        return 0
    sizes = {name: getattr(arguments, name.replace("-", "_")) for name in ROWS}
    failed = False
    print(f"{'':36}{'size':>10}{'seconds':>9}{'first fifth':>13}{'last fifth':>12}{'on disk':>10}  ", flush=True)
    for name in arguments.rows.split(","):
        with tempfile.TemporaryDirectory(prefix="traindiff-load-") as here:
            path = Path(here, "run")
            for what in (ROWS[name], "compare"):
                found = _in_a_process(what, sizes[name], path)
                failed |= _print(f"{name}: {what}", sizes[name], found, path)
    return int(failed)


def _in_a_process(what: str, size: int, path: Path) -> Mapping[str, Any]:
    command = [sys.executable, "-m", "tests.campaigns.load", "--child", what, str(size), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{what} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _print(name: str, size: int, found: Mapping[str, Any], path: Path) -> bool:
    memory, seconds = found["memory"], found["seconds"]
    first, last = memory[0], memory[-1]
    grows = found["repeats"] and last > first * 1.1 + SLACK_BYTES
    slows = found["repeats"] and name.endswith("compare") and seconds[-1] > 2 * seconds[1]
    wrong = found.get("verdict", "identical") != "identical"
    disk = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    message = [
        found.get("message", ""),
        "GROWS" * grows,
        "SLOWS DOWN" * slows,
        f"verdict {found.get('verdict')}" * wrong,
    ]
    print(
        f"{name:36}{size:10,}{sum(seconds):9.1f}{first / 1e6:10.0f} MB{last / 1e6:9.0f} MB{disk / 1e6:7.0f} MB  "
        f"{'; '.join(filter(None, message))}",
        flush=True,
    )
    return bool(grows or slows or wrong)


class Fifths:
    """Seconds, and the largest memory of this process, in each fifth of a piece of work.

    Args:
        total: Units of work.
    """

    def __init__(self, total: int) -> None:
        self._total = max(total, 1)
        self._done = 0
        self._began = time.process_time()
        self.memory = [0] * FIFTHS
        self.seconds = [0.0] * FIFTHS

    def one(self, *_: object) -> None:
        """A unit is done."""
        fifth = min(self._done * FIFTHS // self._total, FIFTHS - 1)
        self._done += 1
        now = time.process_time()
        self.seconds[fifth] += now - self._began
        self._began = now
        if self._done % max(1, self._total // 200) == 0 or self._total < 200:
            self.memory[fifth] = max(self.memory[fifth], memory_bytes())

    def found(self, **more: Any) -> dict[str, Any]:
        """What was measured; where there are fewer units than fifths, nothing can be said of how they grow."""
        reached = [one for one in self.memory if one]
        repeats = self._total >= 10 * FIFTHS
        return {"memory": reached or [memory_bytes()], "seconds": self.seconds, "repeats": repeats, **more}


def memory_bytes() -> int:
    """Of this process, now."""
    found = re.search(r"VmRSS:\s*(\d+)", Path("/proc/self/status").read_text(encoding="ascii"))
    assert found is not None
    return 1024 * int(found[1])


def _parameters(size: int, path: Path) -> dict[str, Any]:
    import torch
    from torch import nn

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.all = nn.ParameterList([nn.Parameter(torch.randn(8)) for _ in range(size)])

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return torch.stack(list(self.all)).sum(0) * inputs

    model = Many()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()

    plain = _seconds(step)
    fifths = Fifths(3)
    began = time.process_time()
    with traindiff.record(path, model, optimizer):
        attached = time.process_time() - began
        for _ in range(3):
            step()
            fifths.one()
    recorded = sum(fifths.seconds) - attached
    return fifths.found(
        message=f"{recorded / 3 / plain:.1f} x a plain step of {plain:.2f} s; attached in {attached:.1f} s"
    )


def _observations(size: int, path: Path) -> dict[str, Any]:
    import torch
    from torch import nn

    layer = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    calls = size // 2  # each is seen in the forward pass, and in the backward pass
    fifths = Fifths(2)
    with traindiff.record(path, layer, optimizer):
        for _ in range(2):
            inputs = torch.randn(2, 4)
            optimizer.zero_grad()
            torch.stack([layer(inputs) for _ in range(calls)]).square().mean().backward()
            optimizer.step()
            fifths.one()
    return fifths.found()


def _micro_steps(size: int, path: Path) -> dict[str, Any]:
    import torch
    from torch import nn

    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    inputs = torch.randn(2, 4)
    steps = size // MICRO_STEPS_OF_A_STEP
    fifths = Fifths(steps)
    with traindiff.record(path, model, optimizer):
        for _ in range(steps):
            optimizer.zero_grad()
            for _ in range(MICRO_STEPS_OF_A_STEP):
                (model(inputs).square().mean() / MICRO_STEPS_OF_A_STEP).backward()
            optimizer.step()
            fifths.one()
    return fifths.found()


def _steps(size: int, path: Path) -> dict[str, Any]:

    import numpy as np

    from tests.made_up import observed, plain_step
    from traindiff.core.summary import SUMMARY
    from traindiff.storage import RecordingWriter

    settings = {"detail": ["summary"], "steps": None, "every": 1}
    run = {"world_size": 1, "mesh": None, "engine": None, "settings": settings}
    made = []
    for number in range(8):
        items = enumerate(plain_step(number).items())
        rows = [observed(site, seen, step=number, order=order) for order, (site, seen) in items]
        made.append(([seen for seen, _ in rows], np.array([summary for _, summary in rows], dtype=SUMMARY)))
    fifths = Fifths(size)
    writer = RecordingWriter(str(path), run=run)
    for number in range(size):
        observations, summaries = made[number % len(made)]
        writer.write_step([seen._replace(step=number) for seen in observations], summaries)
        fifths.one()
    writer.close()
    return fifths.found()


def _compare(size: int, path: Path) -> dict[str, Any]:
    from traindiff.storage import open_recording

    steps = len({one.step for one in open_recording(str(path)).steps(0)})
    fifths = Fifths(steps)
    found = traindiff.compare(path, path, progress=fifths.one)
    return fifths.found(verdict=found.verdict, message=f"{1e3 * sum(fifths.seconds) / steps:.1f} ms a step")


def _seconds(step: Callable[[], None]) -> float:
    step()
    began = time.process_time()
    for _ in range(3):
        step()
    return (time.process_time() - began) / 3


ROWS = {"parameters": "record parameters", "observations": "record observations",
        "micro-steps": "record micro-steps", "steps": "write steps"}  # fmt: skip
CHILDREN: Mapping[str, Callable[[int, Path], dict[str, Any]]] = {
    "record parameters": _parameters, "record observations": _observations, "record micro-steps": _micro_steps,
    "write steps": _steps, "compare": _compare,
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
