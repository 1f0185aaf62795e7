"""Launch a function on fresh processes of this machine, one per rank, and report how each rank ended."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from traindiff.run.processes.life import Clock, Pulse, pulse
from traindiff.run.processes.rank_end import WAITS, How, Patience, RankEnd, RanksError
from traindiff.run.processes.rank_process import Launched, Place, place_of, rank_main, read_last_seen

OnStep = Callable[[int, int], None]
"""Called with a rank and the number of a step that the rank has ended."""


def launch(
    function: Launched,
    *args: Any,
    world_size: int,
    grouped: bool = True,
    outputs: Path,
    patience: Patience | None = None,
    threads: int | None = None,
    on_step: OnStep | None = None,
) -> list[RankEnd]:
    """Call `function(here, *args)` in `world_size` fresh processes; no process is left when this returns or raises.

    Args:
        function: Importable by name; takes a `Here` first and returns JSON values.
        *args: For every rank; must be picklable.
        world_size: Number of ranks.
        grouped: Give the ranks an initialized process group, and the environment that torchrun sets.
        outputs: Directory for the ranks' output, `rank-0.txt` and so on.
        patience: How long ranks may be quiet.
        threads: Threads for computing, in each process. Default: those of this process, divided among ranks.
        on_step: Called with rank and number of each step.

    Returns:
        The end of each rank, in order. All of them returned.

    Raises:
        RanksError: A rank raised or died, or all hang. The others were ended too.
    """
    with tempfile.TemporaryDirectory(prefix="traindiff-ranks-") as name:
        directory = Path(name)
        places = [
            place_of(
                rank, world_size, local_rank=rank, store=f"file://{directory / 'store'}" if grouped else None,
                master=("127.0.0.1", free_port()) if grouped else None, outputs=outputs, scratch=directory,
                threads=threads or max(1, torch.get_num_threads() // world_size),
            )
            for rank in range(world_size)
        ]  # fmt: skip
        with RankProcesses(places, function, args, patience=patience or Patience(), on_step=on_step) as processes:
            ends = processes.ends()
    return all_returned(ends)


def all_returned(ends: Sequence[RankEnd]) -> list[RankEnd]:
    """The same ends, in the order of ranks.

    Raises:
        RanksError: A rank did not return.
    """
    if any(end.how != "returned" for end in ends):
        raise RanksError(ends)
    return sorted(ends, key=lambda end: end.rank)


def free_port() -> int:
    """A port of this machine that nobody uses now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


_OUR_OWN = ("_end_with_the_launcher", "traindiff/observe/common/writing.py")
"""Threads with these in their stack only wait, for the launcher or for something to write."""

_INTERRUPTED = "Current thread"

_COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")


def _stacks_in(text: str) -> str:
    """The stacks of a rank's threads without our own threads, the training's thread first."""
    stacks = [one for one in text.strip().split("\n\n") if not any(ours in one for ours in _OUR_OWN)]
    return "\n\n".join(sorted(stacks, key=lambda one: not one.startswith(_INTERRUPTED)))


def _is_in_a_collective(stacks: str) -> bool:
    """True if the interrupted thread, which trains, waits for other ranks."""
    if not stacks.startswith(_INTERRUPTED):
        return False
    innermost = stacks.splitlines()[1:2]
    return any(file in call for call in innermost for file in _COLLECTIVES)


_MAIN = "__main__"


@contextmanager
def _main_hidden_from(needed: Any) -> Iterator[None]:
    """Keep a process that is started inside from importing the main script, unless unpickling `needed` requires it.

    multiprocessing makes each process import the script first. A script without `if __name__ == "__main__":` would then
    run again, and start processes in turn.
    """
    script = sys.modules[_MAIN]
    sys.modules[_MAIN] = ModuleType(_MAIN)
    try:
        try:
            pickle.dumps(needed)
        except (pickle.PicklingError, AttributeError, TypeError):
            sys.modules[_MAIN] = script
        yield
    finally:
        sys.modules[_MAIN] = script


_GRACE_SECONDS = 5.0
"""How long a rank may take to end after its last message, after another rank has failed, or after it was asked to end.
The time that it had counts, see `Clock.had`."""

_STACK_SECONDS = 1.0
"""How long a rank may take to write its stacks, of the time that it had."""

_LOOK_SECONDS = 0.5
"""How often the pulses of ranks are taken."""

_OUTPUT_LINES = 12
"""Number of lines of a rank's output that are shown."""

_IMPORTED = ("torch", "torch.distributed", "torch._dynamo")
"""Modules that the server of the ranks imports. Making an optimizer imports the last one, which takes a second."""


@dataclass(slots=True, kw_only=True)
class _Rank:
    place: Place
    process: BaseProcess
    connection: Connection
    began: float
    num_steps: int = 0
    step_began: float = 0.0
    slowest: float | None = None
    clock: Clock = field(default_factory=Clock)
    num_observations: int = 0
    said: dict[str, Any] = field(default_factory=dict)
    said_at: float = 0.0
    end: RankEnd | None = None


class Elsewhere:
    """The ranks that other processes watch; here there are none."""

    def failed(self) -> bool:
        """True if one of them has failed."""
        return False

    def more_ended(self) -> bool:
        """True if further ranks have ended since the last call. Called where all ranks here are quiet."""
        return False

    def all_quiet(self, *, quiet_here: bool) -> bool:
        """True if no rank shows life, neither here nor there. Called all the time, with what is known here."""
        return quiet_here


class RankProcesses:
    """Ranks of this machine, each in its own process. A context manager: no process outlives it.

    Processes are forked by a server that has imported torch, so a rank starts at once and inherits nothing else.

    torch.distributed.elastic does not replace this class. It reports the first failure only and ends the other ranks at
    once, so their own errors and stacks are lost; it hears of no steps, and its workers import torch again.

    Args:
        places: The ranks.
        function: Importable by name; called as `function(here, *args)` in each process.
        args: Must be picklable.
        patience: How long ranks may be quiet.
        on_step: Called after each step.
        pulse_of: Takes the pulse of a process.
        now: Monotonic time in seconds.
    """

    def __init__(
        self,
        places: Sequence[Place],
        function: Launched,
        args: Sequence[Any],
        *,
        patience: Patience,
        on_step: OnStep | None = None,
        pulse_of: Callable[[int], Pulse | None] = pulse,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*_IMPORTED, rank_main.__module__, function.__module__])
        self._patience = patience
        self._on_step = on_step
        self._pulse_of = pulse_of
        self._now = now
        self._looked = now()
        self._ranks: list[_Rank] = []
        for place in places:
            place.output.parent.mkdir(parents=True, exist_ok=True)
            for file in (place.output, place.stack, place.last_seen):
                file.unlink(missing_ok=True)
        try:
            for place in places:
                here, there = context.Pipe()
                process = context.Process(target=rank_main, args=(place, function, args, there), daemon=True)
                with _main_hidden_from((function, args)):
                    process.start()
                there.close()
                began = now()
                self._ranks.append(_Rank(place=place, process=process, connection=here, began=began, step_began=began))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ends(self, elsewhere: Elsewhere | None = None) -> list[RankEnd]:
        """Wait until all ranks have ended, or until one has failed, or all hang, and the others were stopped.

        Args:
            elsewhere: The ranks that other processes watch.
        """
        elsewhere = elsewhere or Elsewhere()
        graces: list[tuple[_Rank, float]] | None = None
        while any(rank.end is None for rank in self._ranks):
            self._listen()
            self._look()
            if self._are_quiet() and elsewhere.more_ended():
                self._begin_to_wait()
            if elsewhere.all_quiet(quiet_here=self._are_quiet()):
                self._stop("hung")
            elif graces is None:
                if any(rank.end is not None and rank.end.how != "returned" for rank in self._ranks) or (
                    elsewhere.failed()
                ):
                    graces = [(rank, rank.clock.had + _GRACE_SECONDS) for rank in self._ranks if rank.end is None]
            elif all(rank.end is not None or rank.clock.had > until for rank, until in graces):
                self._stop("stopped")
        return [rank.end for rank in self._ranks if rank.end is not None]

    def close(self) -> None:
        """End all ranks that still run."""
        for rank in self._ranks:
            _end_process(rank.process)
            rank.connection.close()

    def _listen(self) -> None:
        """Wait a moment for messages of ranks, and note the end of each process that is over."""
        running = [rank for rank in self._ranks if rank.end is None]
        wait([*(rank.connection for rank in running), *(rank.process.sentinel for rank in running)], timeout=0.1)
        for rank in running:
            over = not rank.process.is_alive()  # asked first, so that all its messages have arrived
            while _can_read(rank.connection) and self._hear(rank):
                pass
            if over or (rank.said and rank.clock.waited > _GRACE_SECONDS):
                _end_process(rank.process)
                rank.end = self._end_of(rank)

    def _hear(self, rank: _Rank) -> bool:
        try:
            message = rank.connection.recv()
        except (EOFError, OSError):
            time.sleep(0.01)  # the process is about to end
            return False
        now = self._now()
        rank.clock.progress()
        if "step" in message:
            rank.num_steps = message["step"] + 1
            if rank.num_steps > 1:
                rank.slowest = max(rank.slowest or 0.0, now - rank.step_began)
            elif rank.slowest is None:
                rank.slowest = 0.0
            rank.step_began = now
            if self._on_step is not None:
                self._on_step(rank.place.rank, message["step"])
        else:
            rank.said, rank.said_at = message, min(now, message["at"])
            self._begin_to_wait()
        return True

    def _begin_to_wait(self) -> None:
        """Count the quiet time of all ranks from now on: a rank has ended, and others may have waited for it alone."""
        for rank in self._ranks:
            rank.clock.progress()

    def _look(self) -> None:
        """Take the pulse of the ranks that run, now and then."""
        now = self._now()
        if now < self._looked + _LOOK_SECONDS:
            return
        self._looked = now
        for rank in self._ranks:
            if rank.end is None and rank.process.pid is not None:
                count, _ = read_last_seen(rank.place.last_seen)
                rank.clock.look(now, self._pulse_of(rank.process.pid), progressed=count > rank.num_observations)
                rank.num_observations = count

    def _are_quiet(self) -> bool:
        """True if no rank here shows life within its patience. A rank may wait for another that only is slow."""
        running = [rank for rank in self._ranks if rank.end is None and not rank.said]
        return bool(running) and all(rank.clock.quiet > self._patience.limit(rank.slowest) for rank in running)

    def _stop(self, how: How) -> None:
        """Make the ranks that still run write their stacks, and end them."""
        running = [rank for rank in self._ranks if rank.end is None and not rank.said]
        for rank in running:
            if rank.process.pid is not None and rank.process.is_alive() and hasattr(signal, "SIGUSR1"):
                os.kill(rank.process.pid, signal.SIGUSR1)
        until = {rank.place.rank: rank.clock.had + _STACK_SECONDS for rank in running}
        while any(not _read(one.place.stack) and one.clock.had < until[one.place.rank] for one in running):
            time.sleep(0.02)
            self._look()
        for rank in self._ranks:
            if rank.end is None:
                _end_process(rank.process)
                rank.end = self._end_of(rank, how)

    def _end_of(self, rank: _Rank, how: How | None = None) -> RankEnd:
        said, message, stack, problems = rank.said, "", _stacks_in(_read(rank.place.stack)), ()
        if "raised" in said:
            raised = said["raised"]
            how, message, stack, problems = "raised", f"raised {raised['message']}", raised["stack"], raised["problems"]
        elif "result" in said:
            how, message = "returned", "returned."
        elif how == "hung":
            waits = f", {WAITS}" if _is_in_a_collective(stack) else ""
            computed = f" (computing for {rank.clock.computed:.0f} of them)" if rank.clock.computed >= 0.5 else ""
            waited = f"{self._now() - rank.step_began:.0f} seconds{computed}"
            message = f"did not end step {rank.num_steps} in {waited}{waits}."
        elif how == "stopped":
            message = "was stopped, because another rank had failed."
        else:
            how, message = "died", _death(rank.process.exitcode)
        count, last = read_last_seen(rank.place.last_seen)
        return RankEnd(
            rank=rank.place.rank, how=how, message=message,
            after_seconds=(rank.said_at or self._now()) - rank.began,
            num_steps=rank.num_steps, num_observations=count, last_observation=last,
            stack="" if how == "returned" else stack, output=_last_lines(rank.place.output, said.get("printed_bytes")),
            output_file=os.fspath(rank.place.output), result=said.get("result"), problems=problems,
            explained=said.get("raised", {}).get("explained", False),
        )  # fmt: skip


def _death(exit_code: int | None) -> str:
    """The end of a process that sent no last message."""
    if exit_code is None or exit_code >= 0:
        return f"ended with exit code {exit_code}, without an exception."
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = "no name"
    hint = " (was there enough memory?)" if name == "SIGKILL" else ""
    return f"was ended by signal {-exit_code}, {name}{hint}."


def _end_process(process: BaseProcess) -> None:
    process.join(0 if process.is_alive() else None)
    if process.is_alive():
        process.terminate()
        process.join(_GRACE_SECONDS / 5)
    if process.is_alive():
        process.kill()
        process.join()


def _can_read(connection: Connection) -> bool:
    try:
        return connection.poll(0)
    except (EOFError, OSError):
        return False


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _last_lines(path: Path, num_bytes: int | None) -> str:
    """The last lines of the first `num_bytes` of a file; the traceback follows them."""
    printed = path.read_bytes()[:num_bytes].decode(errors="replace") if path.exists() else ""
    return "\n".join(printed.splitlines()[-_OUTPUT_LINES:])
