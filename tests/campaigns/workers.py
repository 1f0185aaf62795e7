"""Processes that judge mutants: each is forked from one in which everything is imported, and may die of a mutant."""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import select
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Any

from tests.campaigns.drafts import Tree
from tests.campaigns.judging import HANG_SECONDS, MOST_MEMORY, OF_TORCH, Failure, Judge, peak_bytes
from tests.campaigns.mutating import Mutant, Seed, mutant
from tests.campaigns.places import Places
from tests.campaigns.readers import READERS, Case
from traindiff.errors import TraindiffError

_LEASE = {False: 4000, True: 100}
"""Mutants that a process judges before another takes its place, by whether it forks for each."""

_OF_READERS = 160 << 20
"""What a process has that has imported all readers, and nothing else."""

_GRACE_SECONDS = 5.0
"""A reader that no alarm interrupts is killed so much later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is run.

    Attributes:
        seed: Of the campaign; with a number it makes a mutant.
        seeds: What mutants are made of.
        commands: Run commands in processes of their own instead of calling readers.
        hang_seconds: How long a reader may take.
    """

    seed: int
    seeds: Sequence[Seed]
    commands: bool = False
    hang_seconds: float = HANG_SECONDS

    def case(self, number: int) -> tuple[Mutant, str, Random]:
        """A mutant, the name of its reader, and what the reader's choices are made with."""
        rng = Random(f"{self.seed}:{number}")
        kinds = sorted({one.kind for one in self.seeds})
        weights = [_WEIGHTS[kind] for kind in kinds]
        kind = rng.choices(kinds, weights)[0]
        made = mutant(rng.choice([one for one in self.seeds if one.kind == kind]), rng)
        table = self.readers()[kind]
        reader = rng.choices(list(table), [weight for weight, _ in table.values()])[0]
        return made, reader, rng

    @property
    def needs_torch(self) -> bool:
        """Whether seeds are what watches save."""
        return any(seed.kind == "saved" for seed in self.seeds)

    @property
    def forks(self) -> bool:
        """Whether each reader has a process of its own, as commands and replays have."""
        return self.commands or self.needs_torch

    def readers(self) -> Any:
        """Readers by kind and name."""
        if self.commands:
            from tests.campaigns.commands import COMMANDS

            return COMMANDS
        return READERS


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A mutant of the corpus.

    Attributes:
        name: Of its file.
        kind: Of input.
        seed: Name of what it was made of.
        reader: Name of the reader that failed.
        failed: How it did.
        tree: What is on disk.
    """

    name: str
    kind: str
    seed: str
    reader: str
    failed: str
    tree: Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay(Plan):
    """A plan that gives kept trees, by number, instead of mutants.

    Attributes:
        kept: The trees.
    """

    kept: tuple[Kept, ...]

    def case(self, number: int) -> tuple[Mutant, str, Random]:
        """A kept tree as a mutant, the name of its reader, and what the reader's choices are made with."""
        one = self.kept[number]
        seed = Seed(name=one.seed, kind=one.kind, files={})
        return Mutant(seed=seed, mutator="corpus", tree=dict(one.tree)), one.reader, Random(number)


_WEIGHTS = {"recording": 80, "msprobe": 8, "onnxruntime": 5, "configuration": 2, "saved": 1}
"""How often there is a mutant of a kind, among those whose seeds there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What became of one mutant.

    Attributes:
        number: Of it.
        seed: Name of what it was made of.
        mutator: How it was made.
        reader: Which reader it was given.
        outcome: `read`, `refused` or `failed`.
        seconds: How long the reader took.
        peak_bytes: Most memory that the process had while it judged.
        failure: Why it failed.
    """

    number: int
    seed: str
    mutator: str
    reader: str
    outcome: str
    seconds: float
    peak_bytes: int
    failure: Failure | None = None


class Worker:
    """A process that judges numbers one after the other, and is started again where it dies.

    Args:
        plan: What is run.
        numbers: Of mutants.
    """

    def __init__(self, plan: Plan, numbers: Iterable[int]) -> None:
        self._plan = plan
        self._numbers = iter(numbers)
        self._work = Path(mkdtemp(prefix="traindiff-mutants-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        Places(self._work).prepare(plan.seeds)
        self._slot = mmap(-1, 16)
        self._log = self._work / "log"
        self._crash = self._work / "crash"
        self._lease: list[int] = []
        self._pid = 0
        self._pidfd = -1

    def start(self) -> bool:
        """Start a process for the next numbers; False where there are none."""
        while len(self._lease) < _LEASE[self._plan.forks] and (number := next(self._numbers, None)) is not None:
            self._lease.append(number)
        if not self._lease:
            return False
        self._log.write_bytes(b"")
        self._slot[:] = struct.pack("<qd", -1, time.monotonic())
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if self._pid == 0:
            code = 70
            try:
                self._judge()
                code = 0
            except BaseException:  # noqa: BLE001  this process must not go on as if it were its parent
                (self._work / "broken").write_text(traceback.format_exc())
            finally:
                os._exit(code)
        self._pidfd = os.pidfd_open(self._pid)
        return True

    def fileno(self) -> int:
        """Becomes readable when the process ends."""
        return self._pidfd

    def kill_if_stuck(self) -> None:
        """Kill the process if its reader has taken too long, and no alarm got through."""
        number, begun = struct.unpack("<qd", self._slot[:])
        if number >= 0 and time.monotonic() - begun > self._plan.hang_seconds + _GRACE_SECONDS:
            os.kill(self._pid, signal.SIGKILL)

    def finish(self) -> Iterator[Judged]:
        """What the process has judged, now that it has ended; also the mutant of which it died."""
        _, status = os.waitpid(self._pid, 0)
        os.close(self._pidfd)
        done = set()
        for line in self._log.read_text(encoding="utf-8").splitlines():
            content = json.loads(line)
            failure = content.pop("failure")
            done.add(content["number"])
            yield Judged(**content, failure=None if failure is None else Failure(**failure))
        number, _ = struct.unpack("<qd", self._slot[:])
        if status and os.waitstatus_to_exitcode(status) >= 0:
            broken = self._work / "broken"
            raise RuntimeError(f"a worker broke: {broken.read_text() if broken.exists() else status}")
        if status and number < 0:
            raise RuntimeError(f"a worker was ended by signal {-os.waitstatus_to_exitcode(status)} between two mutants")
        if status and number >= 0 and number not in done:
            done.add(number)
            yield self._died(number, -os.waitstatus_to_exitcode(status))
        self._lease = [one for one in self._lease if one not in done]

    def stop(self) -> None:
        """End the process, whatever it does."""
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)

    def close(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self._work, ignore_errors=True)

    def _died(self, number: int, signal_number: int) -> Judged:
        made, reader, _ = self._plan.case(number)
        message = self._crash.read_text(encoding="utf-8", errors="replace")[-3000:] if self._crash.exists() else ""
        hung = signal_number == signal.SIGKILL
        name = signal.Signals(signal_number).name
        place = next((line.strip() for line in message.splitlines() if "src/traindiff/" in line), "unknown")
        failure = Failure(
            kind="hang" if hung else "signal", place=f"{name} {place.rpartition('src/traindiff/')[2]}", message=message
        )
        return Judged(
            number=number, seed=made.seed.name, mutator=made.mutator, reader=reader, outcome="failed",
            seconds=self._plan.hang_seconds if hung else 0.0, peak_bytes=0, failure=failure,
        )  # fmt: skip

    def _judge(self) -> None:
        """Judge the numbers of the lease, in this process."""
        _prepare_process(self._crash)
        places = Places(self._work)
        judge = Judge(
            allowed=(f"{places.under}/", f"{places.work / 'clean'}/", f"{places.output}/"), links_in=f"{places.under}/",
            outside=places.outside, hang_seconds=self._plan.hang_seconds,
            most_memory=MOST_MEMORY + OF_TORCH * self._plan.needs_torch + _inherited_bytes(),
        )  # fmt: skip
        run: Callable[[Callable[[], object]], tuple[str, Failure | None, int]]
        self._warm(places)
        if self._plan.forks:
            own = Forked(judge, self._work)
            run = own.run
        else:
            judge.install()
            run = _in_this_process(judge)
        log = os.open(self._log, os.O_WRONLY | os.O_APPEND)
        for number in self._lease:
            made, name, rng = self._plan.case(number)
            places.put(made.tree)
            made.tree.clear()  # it is on disk, and may be large
            case = Case(places, made.seed.name, rng)
            reader = self._plan.readers()[made.seed.kind][name][1]
            begun = time.monotonic()
            self._slot[:] = struct.pack("<qd", number, begun)
            outcome, failure, peak = run(lambda reader=reader, case=case: reader(case))  # type: ignore[misc]
            about = {
                "number": number, "seed": made.seed.name, "mutator": made.mutator, "reader": name, "outcome": outcome,
                "seconds": time.monotonic() - begun, "peak_bytes": peak,
                "failure": None if failure is None else failure.to_json(),
            }  # fmt: skip
            os.write(log, json.dumps(about).encode() + b"\n")
            self._slot[:] = struct.pack("<qd", -1, time.monotonic())
            if failure is not None and not self._plan.forks:
                return  # what it has taken may not be told from what the next one takes

    def _warm(self, places: Places) -> None:
        """Have every reader read what is right, so that everything is imported and what is kept for good is there."""
        said = [os.dup(1), os.dup(2)]
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(self._work / name, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND), descriptor)
        for seed in {one.kind: one for one in self._plan.seeds}.values():
            for name, (_, reader) in self._plan.readers()[seed.kind].items():
                for choice in range(1 if "view" in name else 0 if "rerun" in name else 4):
                    places.put(dict(seed.files))
                    try:
                        reader(Case(places, seed.name, Random(choice)))
                    except TraindiffError:
                        continue
        for descriptor, kept in ((1, said[0]), (2, said[1])):
            os.dup2(kept, descriptor)


def _inherited_bytes() -> int:
    """Memory that this process has from the one it was forked from, beyond what reading needs: in tests, torch."""
    resident = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return max(0, resident - _OF_READERS)


def _prepare_process(crash: Path) -> None:
    """Make this process the judge's own."""
    gc.freeze()
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout = os.fdopen(1, "w", closefd=False)  # pytest has others
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(crash.open("w", encoding="utf-8"), all_threads=False)


def _in_this_process(judge: Judge) -> Callable[[Callable[[], object]], tuple[str, Failure | None, int]]:
    def run(reader: Callable[[], object]) -> tuple[str, Failure | None, int]:
        outcome, failure = judge.run(reader)
        return outcome, failure, peak_bytes()

    return run


class Forked:
    """Runs each reader in a process of its own, with its own files for what it prints.

    Args:
        judge: Judges in that process.
        work: Where its files are.
    """

    def __init__(self, judge: Judge, work: Path) -> None:
        self._judge = judge
        self._work = work

    def run(self, reader: Callable[[], object]) -> tuple[str, Failure | None, int]:
        """Run a reader."""
        crash = self._work / "crash"
        receive, send = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                faulthandler.enable(crash.open("w", encoding="utf-8"), all_threads=False)
                for descriptor, name in ((1, "stdout"), (2, "stderr")):
                    os.dup2(os.open(self._work / name, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND), descriptor)
                os.chdir(self._work / "output")
                tempfile.tempdir = os.environ["TMPDIR"] = str(self._work / "output")
                self._judge.allowed += (f"{self._work}/stderr/",)
                self._judge.install()
                outcome, failure = self._judge.run(reader)
                os.write(send, json.dumps([outcome, None if failure is None else failure.to_json()]).encode())
            finally:
                os._exit(0)
        os.close(send)
        descriptor = os.pidfd_open(pid)
        if not select.select([descriptor], [], [], self._judge.hang_seconds + _GRACE_SECONDS)[0]:
            os.kill(pid, signal.SIGKILL)
        os.close(descriptor)
        _, status, used = os.wait4(pid, 0)
        peak = used.ru_maxrss << 10
        with os.fdopen(receive, "rb") as file:
            answer = file.read() if not status else b""
        if status:
            number = os.waitstatus_to_exitcode(status)
            message = crash.read_text(encoding="utf-8", errors="replace")[-3000:]
            kind = "hang" if number == -signal.SIGKILL else "signal"
            place = next((line.strip() for line in message.splitlines() if "src/traindiff/" in line), "unknown")
            return (
                "failed",
                Failure(kind=kind, place=f"{number} {place.rpartition('src/traindiff/')[2]}", message=message),
                peak,
            )
        try:
            outcome, failure = json.loads(answer)
        except ValueError:
            return "failed", Failure(kind="crash", place="no answer", message=""), peak
        return outcome, None if failure is None else Failure(**failure), peak


def judged(plan: Plan, numbers: Sequence[int], *, jobs: int) -> Iterator[Judged]:
    """Judge mutants, as many at a time as there are jobs.

    Args:
        plan: What is run.
        numbers: Of mutants.
        jobs: Processes.
    """
    workers = [Worker(plan, numbers[first::jobs]) for first in range(jobs)]
    running = []
    try:
        running = [one for one in workers if one.start()]
        while running:
            ended, _, _ = select.select(running, [], [], 1.0)
            for one in ended:
                yield from one.finish()
                if not one.start():
                    running.remove(one)
            for one in running:
                if one not in ended:
                    one.kill_if_stuck()
    finally:
        for one in workers:
            if one in running:
                one.stop()
            one.close()
