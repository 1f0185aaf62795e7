"""A rank that is given no processor is waited for; one that does nothing is not."""

from __future__ import annotations

import os

import pytest
from torch import distributed

import traindiff
from traindiff.run.lockstep.ranks import Ranks
from traindiff.run.processes.life import Pulse, machine

pytestmark = pytest.mark.skipif(not machine(), reason="this system has no /proc")


class Late:
    """A collective for which the other rank comes after some looks at its pulse."""

    def __init__(self, found: Pulse | None) -> None:
        self.found = found
        self.looks = 0

    def pulse_of(self, pid: int) -> Pulse | None:
        assert pid == os.getpid()
        self.looks += 1
        return self.found

    def is_completed(self) -> bool:
        return self.looks > 4

    def wait(self) -> None:
        pass


def wait_for(late: Late, *, where: str | None = None) -> None:
    """Wait as rank 0 of two; the time in which the other shows no life may be nothing at all."""
    ranks = Ranks(0.0, pulse_of=late.pulse_of)
    ranks.size = 2
    ranks._store = distributed.HashStore()
    ranks._store.set("place-1", f"{os.getpid()} {machine() if where is None else where}")
    ranks._wait(late)


def test_a_rank_that_is_given_no_processor_is_waited_for() -> None:
    late = Late(Pulse(cpu_seconds=1.0, wants_cpu=True))

    wait_for(late)

    assert late.looks > 4


@pytest.mark.parametrize("found", [None, Pulse(cpu_seconds=1.0)])
def test_a_rank_that_does_nothing_or_has_ended_is_given_up(found: Pulse | None) -> None:
    with pytest.raises(traindiff.LockstepError, match=r"Rank 0 has waited \d+ seconds for"):
        wait_for(Late(found))


def test_the_life_of_a_rank_on_another_machine_is_not_guessed() -> None:
    late = Late(Pulse(cpu_seconds=1.0, wants_cpu=True))
    with pytest.raises(traindiff.LockstepError):
        wait_for(late, where="another machine")

    assert late.looks == 0
