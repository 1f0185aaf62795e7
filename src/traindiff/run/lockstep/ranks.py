"""The ranks of a lockstep, in their own process group: they exchange data, and none waits forever."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from traindiff.core.torch_compat.training import default_store
from traindiff.errors import LockstepError
from traindiff.run.processes.life import Clock, Pulse, machine, pulse

LOOK_SECONDS = 0.5
"""How often a waiting rank checks if another has failed."""

GRACE_SECONDS = 5.0
"""How long a failed rank waits until the others know, and how long they look for its reason."""

_FAILED = "failed"


class Ranks:
    """Exchanges numbers and bytes among ranks, on the CPU.

    A rank that fails writes its reason into the store of the default process group, and ranks that wait in a collective
    of this group look there, so all end with the same reason. A rank that hangs in an engine's own collective is out of
    reach.

    Args:
        timeout_seconds: How long a rank waits for others of which none shows life, as `Clock.quiet` counts it. The life
            of ranks on this machine is seen; ranks of other machines count as quiet.
        pulse_of: Takes the pulse of a process on this machine.
    """

    def __init__(self, timeout_seconds: float, *, pulse_of: Callable[[int], Pulse | None] = pulse) -> None:
        several = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
        self.rank = distributed.get_rank() if several else 0
        self.size = distributed.get_world_size() if several else 1
        self._timeout = timeout_seconds
        self._pulse_of = pulse_of
        self._meetings = 0
        self._group: Any = None
        self._store: Any = None
        if several:
            # `_wait` is less patient, and names the missing rank.
            group_timeout = timedelta(days=1, seconds=2.0 * timeout_seconds)
            self._group = distributed.new_group(backend="gloo", timeout=group_timeout)
            self._store = distributed.distributed_c10d.PrefixStore(
                f"traindiff-lockstep-{self._group.group_name}", default_store()
            )
            self._store.set(f"place-{self.rank}", f"{os.getpid()} {machine()}")

    def meet(self, numbers: Sequence[float]) -> list[list[float]]:
        """The numbers of each rank, by rank; all ranks bring the same number of them."""
        if self._group is None:
            return [list(numbers)]
        self._meetings += 1
        self._store.set(f"meeting-{self.rank}", str(self._meetings))
        mine = torch.tensor(numbers, dtype=torch.float64)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        self._wait(distributed.all_gather(found, mine, group=self._group, async_op=True))
        return [one.tolist() for one in found]

    def everyone(self, message: bytes) -> list[bytes]:
        """The messages of all ranks, on all of them."""
        found = self.gather(message, on_all=True)
        assert found is not None
        return found

    def gather(self, message: bytes, *, on_all: bool = False) -> list[bytes] | None:
        """The messages of all ranks on rank 0, and `on_all` ranks if wanted; None elsewhere."""
        if self._group is None:
            return [message]
        sizes = [int(size) for (size,) in self.meet([len(message)])]
        mine = torch.zeros(max(1, *sizes), dtype=torch.uint8)
        mine[: len(message)] = _as_tensor(message)
        found = [torch.empty_like(mine) for _ in sizes] if on_all or self.rank == 0 else None
        if on_all:
            self._wait(distributed.all_gather(found, mine, group=self._group, async_op=True))
        else:
            self._wait(distributed.gather(mine, found, dst=0, group=self._group, async_op=True))
        if found is None:
            return None
        return [one[:size].numpy().tobytes() for one, size in zip(found, sizes, strict=True)]

    def share(self, message: bytes | None) -> bytes:
        """The message of rank 0, on all ranks."""
        if self._group is None:
            assert message is not None
            return message
        size = torch.tensor([len(message or b"")])
        self._wait(distributed.broadcast(size, src=0, group=self._group, async_op=True))
        content = torch.zeros(int(size), dtype=torch.uint8)
        if self.rank == 0 and message:
            content[:] = _as_tensor(message)
        if len(content):
            self._wait(distributed.broadcast(content, src=0, group=self._group, async_op=True))
        return content.numpy().tobytes()

    def fail(self, message: str) -> None:
        """Tell the other ranks that this one cannot continue, and wait a little until they know."""
        if self._store is None:
            return
        self._store.set(f"seen-{self.rank}", "1")  # this rank no longer waits
        if self._failure() is not None:
            return
        self._store.set(_FAILED, json.dumps({"rank": self.rank, "message": message}))
        others = [f"seen-{rank}" for rank in range(self.size) if rank != self.rank]
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline and not self._store.check(others):
            time.sleep(0.02)

    def raise_failure(self, *, patience_seconds: float = 0.0) -> None:
        """Raise the reason of a rank that failed, if there is one.

        Args:
            patience_seconds: How long to look for it: a connection may be lost before the reason is there.

        Raises:
            LockstepError: Another rank cannot continue.
        """
        deadline = time.monotonic() + patience_seconds
        while self._store is not None:
            failure = self._failure()
            if failure is not None and failure["rank"] != self.rank:
                self._store.set(f"seen-{self.rank}", "1")
                raise LockstepError(f"Rank {failure['rank']} cannot go on: {failure['message']}")
            if time.monotonic() >= deadline:
                return
            time.sleep(0.05)

    def _failure(self) -> dict[str, Any] | None:
        try:
            if not self._store.check([_FAILED]):
                return None
            found: dict[str, Any] = json.loads(self._store.get(_FAILED))
        except (RuntimeError, ValueError):  # the rank that serves the store has ended
            return None
        return found

    def _wait(self, work: Any) -> None:
        began = now = time.monotonic()
        look, pause = now + LOOK_SECONDS, 2e-5
        clocks = {rank: Clock() for rank in range(self.size) if rank != self.rank}
        while not work.is_completed():
            time.sleep(pause)
            pause = min(2.0 * pause, 2e-3)
            now = time.monotonic()
            if now > look:
                look = now + LOOK_SECONDS
                self.raise_failure()
                for rank, clock in clocks.items():
                    clock.look(now, self._pulse_of_rank(rank))
                if now > began + self._timeout and all(clock.quiet > self._timeout for clock in clocks.values()):
                    raise LockstepError(self._late(now - began))
        try:
            work.wait()
        except RuntimeError as error:
            self.raise_failure(patience_seconds=GRACE_SECONDS)
            message = "The connection to another rank was lost, and it gave no reason: it ended, or was ended."
            raise LockstepError(message) from error

    def _pulse_of_rank(self, rank: int) -> Pulse | None:
        """The pulse of another rank; None if it is on another machine."""
        key = f"place-{rank}"
        try:
            pid, _, where = self._store.get(key).decode().partition(" ") if self._store.check([key]) else ("", "", "")
        except RuntimeError:  # the rank that serves the store has ended
            return None
        return self._pulse_of(int(pid)) if where and where == machine() else None

    def _late(self, seconds: float) -> str:
        here = {rank: self._meetings_of(rank) for rank in range(self.size)}
        late = [rank for rank, meetings in here.items() if meetings < self._meetings]
        who = ", ".join(map(str, late)) or "unknown"
        return (
            f"Rank {self.rank} has waited {seconds:.0f} seconds for {'rank' if len(late) == 1 else 'ranks'} {who}: "
            "still in a step, hanging in a collective of an engine, or ended. Give timeout_seconds=... if a step may "
            "take longer."
        )

    def _meetings_of(self, rank: int) -> int:
        key = f"meeting-{rank}"
        try:
            return int(self._store.get(key)) if self._store.check([key]) else 0
        except (RuntimeError, ValueError):
            return 0


def _as_tensor(message: bytes) -> Tensor:
    if not message:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)
