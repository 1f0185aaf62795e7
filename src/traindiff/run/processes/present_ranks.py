"""Ranks that exist already: torchrun or another launcher has started one process for each."""

from __future__ import annotations

import os
import pickle
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import distributed

from traindiff.errors import ConfigError, Problem, TraindiffError
from traindiff.run.processes.beats import Beats
from traindiff.run.processes.launch import OnStep, RankProcesses, all_returned, launch
from traindiff.run.processes.rank_end import Patience, RankEnd
from traindiff.run.processes.rank_process import Launched, place_of

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_POLL_SECONDS = 0.1
_LEAVE_SECONDS = 60.0
"""How long rank 0, which may hold the store, waits until the others have read the result. They look ten times a second,
so only a rank that has died makes it wait."""

Result = TypeVar("Result")


def launched_ranks() -> int | None:
    """Number of ranks that a launcher has started, this process among them; None without a launcher."""
    return None if any(name not in os.environ for name in _NEEDED) else int(os.environ["WORLD_SIZE"])


class PresentRanks:
    """This process, as one of several ranks that a launcher has started.

    Rank 0 leads: it decides what runs. It announces a run on several ranks in the ranks' store. Each rank's process
    then runs its part in a fresh process, watches it, and writes into the store how it ended. So a crash of a rank ends
    none of the launcher's processes, and one run leaves nothing behind for the next.

    Attributes:
        rank: This rank.
        world_size: Number of ranks.
    """

    def __init__(self) -> None:
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
        self._address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        stores: Any = distributed  # its exports are not typed
        store, _, _ = next(stores.rendezvous("env://"))
        started = f"traindiff-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._prefix = f"{started}-{store.add(f'{started}-calls-{self.rank}', 1)}"  # each call has its own keys
        self._store: Any = stores.PrefixStore(self._prefix, store)
        self._number = 0

    @classmethod
    def found(cls) -> Self | None:
        """The ranks of this process; None if it is not one of several ranks."""
        return cls() if (launched_ranks() or 1) > 1 else None

    @property
    def leads(self) -> bool:
        """True on the rank that decides."""
        return self.rank == 0

    def together(self, decide: Callable[[], Result]) -> Result:
        """Call `decide` on rank 0, while the other ranks run what it launches.

        Args:
            decide: Calls `launch` of this object for each run on several ranks. Only rank 0 calls it.

        Returns:
            The result of `decide`, on every rank.

        Raises:
            ConfigError: `decide` raised it; on every rank.
            TraindiffError: On the other ranks, if `decide` raised anything else.
        """
        if not self.leads:
            return self._follow()  # type: ignore[no-any-return]  # the result of rank 0
        try:
            result = decide()
        except BaseException as error:
            told = f"rank 0 raised {type(error).__name__}: {error}"
            self._finish(error if isinstance(error, ConfigError) else TraindiffError(told))
            raise
        self._finish(result)
        return result

    def launch(
        self,
        function: Launched,
        *args: Any,
        world_size: int,
        grouped: bool = True,
        outputs: Path,
        patience: Patience | None = None,
        threads: int | None = None,
        on_step: OnStep | None = None,
    ) -> list[RankEnd]:
        """Like `launch` of `processes.launch`; several ranks run where their processes are. Rank 0 calls it."""
        if world_size == 1:
            return launch(
                function, *args, world_size=1, grouped=grouped, outputs=outputs, patience=patience, threads=threads,
                on_step=on_step,
            )  # fmt: skip
        assert world_size == self.world_size
        self._number += 1
        job = (function, args, str(outputs), patience or Patience(), threads)
        self._store.set(f"job-{self._number}", pickle.dumps(job))
        beats = self._beats(self._number)
        mine = self._run(beats, self._number, job, on_step)
        return all_returned([mine, *self._ends_of_others(beats)])

    def refuse_other_sizes(self, nproc: int, asked_by: str) -> None:
        """Raise `ConfigError` if a setup has neither one rank nor as many as exist."""
        if nproc not in (1, self.world_size):
            problem = Problem(
                where=f"nproc={nproc}",
                what=f"does not fit the {self.world_size} ranks that were started.",
                fix=f"Leave nproc out, or start traindiff without a launcher: it starts {nproc} ranks itself.",
            )
            raise ConfigError(asked_by, [problem])

    def _beats(self, number: int) -> Beats:
        return Beats(self._store, f"job-{number}", rank=self.rank, world_size=self.world_size)

    def _run(self, beats: Beats, number: int, job: Any, on_step: OnStep | None = None) -> RankEnd:
        """Run this rank's part, and write into the store how it ended."""
        function, args, outputs, patience, threads = job
        host, port = self._address
        with tempfile.TemporaryDirectory(prefix="traindiff-rank-") as scratch:
            place = place_of(
                self.rank, self.world_size, local_rank=self._local_rank, master=self._address, outputs=Path(outputs),
                scratch=Path(scratch), store=f"tcp://{host}:{port}/{self._prefix}-group-{number}",
                threads=threads or max(1, torch.get_num_threads() // self.world_size),
            )  # fmt: skip
            with RankProcesses([place], function, args, patience=patience, on_step=on_step) as processes:
                (end,) = processes.ends(beats)
        if end.how != "returned":
            beats.fail()
        self._store.set(beats.end_key(self.rank), pickle.dumps(end))
        return end

    def _ends_of_others(self, beats: Beats) -> list[RankEnd]:
        """The ends of the other ranks, as their watchers report them; a rank whose watcher is silent counts as dead."""
        ends: dict[int, RankEnd] = {}
        while True:
            silent = beats.silent()
            for rank in range(1, self.world_size):
                if rank not in ends and self._store.check([key := beats.end_key(rank)]):
                    ends[rank] = pickle.loads(self._store.get(key))
                elif rank not in ends and rank in silent:
                    ends[rank] = RankEnd(rank=rank, how="died", message="was not heard of again.")
            if len(ends) == self.world_size - 1:
                return list(ends.values())
            time.sleep(_POLL_SECONDS)

    def _follow(self) -> Any:
        """Run what rank 0 announces, until rank 0 has finished."""
        with suppress(KeyboardInterrupt):
            while True:
                try:
                    finished, announced = (self._store.check([key]) for key in ("finished", f"job-{self._number + 1}"))
                    if finished:
                        outcome = pickle.loads(self._store.get("finished"))
                        self._store.set(f"left-{self.rank}", "")
                        if isinstance(outcome, TraindiffError):
                            raise outcome
                        return outcome
                except (RuntimeError, distributed.DistError) as error:
                    raise TraindiffError(f"rank 0 can no longer be reached: {error}") from None
                if announced:
                    self._number += 1
                    job = pickle.loads(self._store.get(f"job-{self._number}"))
                    self._run(self._beats(self._number), self._number, job)
                else:
                    time.sleep(_POLL_SECONDS)
        raise TraindiffError("interrupted")

    def _finish(self, outcome: Any) -> None:
        """Tell the other ranks the result, or the error, and wait until they know."""
        self._store.set("finished", pickle.dumps(outcome))
        deadline = time.monotonic() + _LEAVE_SECONDS
        waiting = {f"left-{rank}" for rank in range(1, self.world_size)}
        while waiting and time.monotonic() < deadline:
            waiting = {key for key in waiting if not self._store.check([key])}
            time.sleep(_POLL_SECONDS / 5)
