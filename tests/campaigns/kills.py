"""Kill trainings with SIGKILL at random moments: `python -m tests.campaigns.kills --count 100`.

Exits with 1 where a goal is missed. A step is finished when `optimizer.step()` has returned: the training says so
through a pipe, without a buffer. The promise is that a finished step is in the recording, unless that call took a
quarter of a second: then the file system is slow, and up to three steps may wait in memory (docs/cost.md). These are
counted apart. The value that `log` takes after a step comes with the next one, and is no part of the promise.
"""

from __future__ import annotations

import argparse
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import traindiff
from tests.campaigns.forks import TRACEBACK, ended, forked, import_as, read, small_model, train

MOST_SECONDS = 120.0
WAYS = ("one process", "two ranks, both killed", "two ranks, rank 0 killed", "two ranks, rank 1 killed")


@dataclass(slots=True)
class Row:
    """What was found of one way to be killed."""

    kills: int = 0
    finished: int = 0
    lost: int = 0
    late_lost: int = 0
    tracebacks: int = 0
    commands: int = 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="kills, of one process and of two ranks in turn")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    rows = {way: Row() for way in WAYS}
    began = time.monotonic()
    print(f"seed {arguments.seed}, {arguments.count} kills", flush=True)
    with tempfile.TemporaryDirectory(prefix="traindiff-kills-") as here:
        baseline = Path(here, "baseline")
        import_as(partial(_baseline, baseline), Path(here))
        for command in (("compare", str(baseline), str(baseline)), ("show", str(baseline))):
            import_as(partial(read, command), Path(here))
        import_as(partial(_two_ranks, Path(here, "warm")), Path(here))
        for number in range(arguments.count):
            way = WAYS[0] if number % 2 == 0 else WAYS[1 + number // 2 % 3]
            _kill(Path(here, f"run-{number}"), baseline, way, rows[way], chance)
            if number % 20 == 19:
                print(f"  {number + 1} kills, {time.monotonic() - began:.0f} s", flush=True)
    print(f"{'':26}{'kills':>7}{'finished':>10}{'lost':>6}{'late, lost':>12}{'commands':>10}{'tracebacks':>12}")
    for way, row in rows.items():
        print(
            f"{way:26}{row.kills:7}{row.finished:10}{row.lost:6}{row.late_lost:12}{row.commands:10}{row.tracebacks:12}"
        )
    print(f"{time.monotonic() - began:.0f} s")
    return int(any(row.lost or row.tracebacks for row in rows.values()))


def _baseline(path: Path) -> None:
    import torch

    model, optimizer = small_model()
    with traindiff.record(path, model, optimizer):
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()


def _two_ranks(run: Path) -> None:
    train(run, os.open(os.devnull, os.O_WRONLY), ranks=1, distributes=True, steps=2)


def _kill(run: Path, baseline: Path, way: str, row: Row, chance: random.Random) -> None:
    """Train, kill at a random moment after the first finished step of each rank, and read what is left."""
    steps = _killed(run, way, chance)
    row.kills += 1
    row.finished += sum(map(len, steps))
    log, verdict = run.with_suffix(".log"), run.with_suffix(".lost")
    if ended(forked(partial(_count_lost, run, steps, verdict), output=log)):
        row.tracebacks += 1
        print(f"{way}: {log.read_text()[-2000:]}", flush=True)
    else:
        lost, late = map(int, verdict.read_text().split())
        row.lost += lost
        row.late_lost += late
    commands: list[Sequence[str]] = [("compare", str(baseline), str(run)), ("check", str(run)), ("show", str(run))]
    for command in commands:
        row.commands += 1
        status = ended(forked(partial(read, command), output=log))
        if status not in range(4) or "Traceback" in log.read_text():
            row.tracebacks += 1
            print(f"{way}: {command} exited with {status}\n{log.read_text()[-2000:]}", flush=True)
            log.write_text("")
    for rest in run.parent.glob(f"{run.name}*"):
        shutil.rmtree(rest) if rest.is_dir() else rest.unlink()


def _killed(run: Path, way: str, chance: random.Random) -> list[list[str]]:
    """Train and kill; gives the steps that each rank said it had finished."""
    ranks = 1 if way == WAYS[0] else 2
    pipes = [os.pipe() for _ in range(ranks)]
    log = run.with_suffix(".training.log")
    pids = [forked(partial(train, run, pipes[rank][1], rank=rank, ranks=ranks), output=log) for rank in range(ranks)]
    for _, end in pipes:
        os.close(end)
    said = _first_steps([pipe for pipe, _ in pipes], log)
    time.sleep(chance.random() * 0.3)
    doomed = {WAYS[2]: [0], WAYS[3]: [1]}.get(way, list(range(ranks)))
    for rank in doomed:
        os.kill(pids[rank], signal.SIGKILL)
    if len(doomed) < ranks:
        time.sleep(chance.random() * 0.1)  # the other one fails, or waits for ever
        for rank in set(range(ranks)) - set(doomed):
            os.kill(pids[rank], signal.SIGKILL)
    for number, (pipe, _) in enumerate(pipes):
        while more := os.read(pipe, 65536):
            said[number] += more
        os.close(pipe)
    for pid in pids:
        ended(pid)
    return [one.decode().split("\n")[:-1] for one in said]


def _first_steps(pipes: Sequence[int], log: Path) -> list[bytes]:
    """Wait until each rank has finished a step; gives what they have said."""
    said = [b""] * len(pipes)
    until = time.monotonic() + MOST_SECONDS
    while not all(b"\n" in one for one in said):
        if time.monotonic() > until:
            raise RuntimeError(f"no step has ended after {MOST_SECONDS:g} s: {log.read_text()[-500:]}")
        for number, pipe in enumerate(pipes):
            if select.select([pipe], [], [], 0.02)[0]:
                said[number] += os.read(pipe, 65536)
    return said


def _count_lost(run: Path, steps: list[list[str]], verdict: Path) -> int:
    """Writes how many finished steps the recording lacks: first those that were in time, then the others."""
    recording = traindiff.open_recording(str(run))
    lost = late = 0
    for rank, finished in enumerate(steps):
        found = {part.step for part in recording.steps(rank)}
        for text in finished:
            if int(text.rstrip("*")) not in found:
                lost, late = (lost, late + 1) if _was_slow(finished) else (lost + 1, late)
    if lost:
        print(steps, [recording.status(rank) for rank in recording.ranks])
    verdict.write_text(f"{lost} {late}")
    return 0


def _was_slow(finished: list[str]) -> bool:
    """Whether one of the last steps took so long that those behind it may have waited in memory."""
    return any(text.endswith("*") for text in finished[-4:])


assert TRACEBACK not in range(4)

if __name__ == "__main__":
    sys.exit(main())
