"""End trainings by signals at random moments: `python -m tests.campaigns.signals --count 100`.

Exits with 1 where a goal is missed. Each training is ended by a KeyboardInterrupt (SIGINT), by a SystemExit (SIGTERM
with a handler, as launchers install one), or by SIGTERM itself. Outside it must look as it does without a recording:
the same exception out of the same function of the training, or the same signal. After an exception no hook is left, on
the model, its parameters, the optimizer and torch's global tables, and the recording is closed. After a signal it has
every finished step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.campaigns.forks import ended, forked, import_as, small_model  # first: it sets up the process

import torch  # isort: skip
from torch import nn

import traindiff

WAYS = ("KeyboardInterrupt", "SystemExit of a handler", "SIGTERM")
MOST_SECONDS = 120.0
CAUGHT = 5


@dataclass(slots=True)
class Row:
    """What was found of one way to be ended."""

    signals: int = 0
    finished: int = 0
    inside: int = 0
    lost: int = 0
    other_ends: int = 0
    hooks: int = 0
    unclosed: int = 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="signals, of each kind in turn")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    rows = {way: Row() for way in WAYS}
    began = time.monotonic()
    print(f"seed {arguments.seed}, {arguments.count} signals", flush=True)
    with tempfile.TemporaryDirectory(prefix="traindiff-signals-") as here:
        import_as(partial(_warm, Path(here, "warm")), Path(here))
        for number in range(arguments.count):
            way = WAYS[number % len(WAYS)]
            _end(Path(here, f"run-{number}"), way, rows[way], chance)
            if number % 20 == 19:
                print(f"  {number + 1} signals, {time.monotonic() - began:.0f} s", flush=True)
    print(
        f"{'':26}{'signals':>9}{'steps':>7}{'in traindiff':>14}{'lost':>6}{'other ends':>12}{'hooks left':>12}"
        f"{'not closed':>12}"
    )
    for way, row in rows.items():
        print(
            f"{way:26}{row.signals:9}{row.finished:7}{row.inside:14}{row.lost:6}{row.other_ends:12}{row.hooks:12}"
            f"{row.unclosed:12}"
        )
    print(f"{time.monotonic() - began:.0f} s")
    return int(any(row.lost or row.other_ends or row.hooks or row.unclosed for row in rows.values()))


def _warm(run: Path) -> None:
    model, optimizer = small_model()
    with traindiff.record(run, model, optimizer):
        _steps(model, optimizer, os.open(os.devnull, os.O_WRONLY), 2)
    list(traindiff.open_recording(str(run)).steps(0))


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, report: int, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        os.write(report, f"{step}\n".encode())


def _train(run: Path, way: str, report: int, found: Path) -> int:
    """Train until ended; writes what the exception was and which hooks are left."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background job ignores
    if way == WAYS[1]:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    model, optimizer = small_model()
    before = _hooks(model, optimizer)
    message: dict[str, Any] = {}
    try:
        with traindiff.record(run, model, optimizer) if run.name != "none" else nullcontext():
            _steps(model, optimizer, report, 1_000_000)
    except BaseException as error:  # noqa: BLE001  it is what is looked at
        frames = traceback.extract_tb(error.__traceback__)
        message = {
            "type": type(error).__name__,
            "text": str(error),
            "functions": [frame.name for frame in frames if frame.filename == __file__][:2],
            "inside": any("/traindiff/" in frame.filename for frame in frames),
            "frames": [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames],
        }
    message["hooks"] = [
        f"{name}: {before.get(name, 0)} -> {n}"
        for name, n in _hooks(model, optimizer).items()
        if n != before.get(name, 0)
    ]
    found.write_text(json.dumps(message))
    return CAUGHT


def _hooks(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """How many hooks there are, by where."""
    return dict(_hook_tables(model, optimizer))


def _hook_tables(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, int]]:
    holders: list[tuple[str, Any]] = [
        ("torch.nn.modules.module", nn.modules.module), ("torch.optim.optimizer", sys.modules["torch.optim.optimizer"]),
        ("optimizer", optimizer), *model.named_modules(), *model.named_parameters(),
    ]  # fmt: skip
    for where, holder in holders:
        for name, table in vars(holder).items():
            if "hooks" in name and hasattr(table, "__len__"):
                yield f"{where} {name}", len(table)
        if isinstance(holder, (nn.Module, torch.optim.Optimizer)):
            yield f"{where} patched", sum(callable(one) for one in vars(holder).values())
        if isinstance(holder, torch.Tensor):
            yield f"{where} backward hooks", len(holder._backward_hooks or ())
            yield f"{where} post-accumulate hooks", len(getattr(holder, "_post_accumulate_grad_hooks", None) or ())
    yield (
        "torch functions",
        sum(
            getattr(one, "__module__", "") is not None and str(getattr(one, "__module__", "")).startswith("traindiff")
            for holder in (torch.Tensor, torch.autograd, torch.nn.utils, torch.optim.Optimizer, nn.Module)
            for one in vars(holder).values()
        ),
    )


def _end(run: Path, way: str, row: Row, chance: random.Random) -> None:
    """Train, end it at a random moment after the first finished step, and look at what is left."""
    log, found = run.with_suffix(".log"), run.with_suffix(".json")
    pipe, report = os.pipe()
    pid = forked(partial(_train, run, way, report, found), output=log)
    os.close(report)
    said = b""
    until = time.monotonic() + MOST_SECONDS
    while b"\n" not in said:
        if time.monotonic() > until:
            raise RuntimeError(f"no step of {run} has ended after {MOST_SECONDS:g} s: {log.read_text()[-500:]}")
        if select.select([pipe], [], [], 0.1)[0]:
            said += os.read(pipe, 65536)
    time.sleep(chance.random() * 0.3)
    os.kill(pid, signal.SIGINT if way == WAYS[0] else signal.SIGTERM)
    while more := os.read(pipe, 65536):
        said += more
    os.close(pipe)
    status = ended(pid)
    row.signals += 1
    finished = len(said.decode().split("\n")) - 1
    row.finished += finished
    if way == WAYS[2]:
        row.other_ends += status != -signal.SIGTERM
    else:
        message = json.loads(found.read_text()) if found.exists() else {}
        expected = ("KeyboardInterrupt", "") if way == WAYS[0] else ("SystemExit", "143")
        is_other = (
            (message.get("type"), message.get("text")) != expected
            or message["functions"][0] != "_train"
            or status != CAUGHT
        )
        row.other_ends += is_other
        row.inside += message.get("inside", False)
        row.hooks += bool(message.get("hooks"))
        if is_other or message.get("hooks"):
            print(f"{way}: {status} {json.dumps(message, indent=1)} {log.read_text()[-3000:]}", flush=True)
    verdict = run.with_suffix(".verdict")
    assert ended(forked(partial(_look, run, finished, verdict), output=log)) == 0, log.read_text()
    lost, ending = verdict.read_text().split()
    row.lost += int(lost)
    if way != WAYS[2] and ending not in ("closed", "aborted"):
        row.unclosed += 1
        print(f"{way}: {ending} {found.read_text()} {log.read_text()[-3000:]}", flush=True)
    for rest in run.parent.glob(f"{run.name}*"):
        shutil.rmtree(rest) if rest.is_dir() else rest.unlink()


def _look(run: Path, finished: int, verdict: Path) -> None:
    """Writes how many finished steps the recording lacks, and how it ends."""
    recording = traindiff.open_recording(str(run))
    steps = {part.step for part in recording.steps(0)}
    verdict.write_text(f"{len(set(range(finished)) - steps)} {recording.status(0).ending}")


if __name__ == "__main__":
    sys.exit(main())
