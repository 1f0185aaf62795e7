"""A function on several ranks: results, errors, and stacks of those that hang."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from torch import distributed

from tests.on_ranks import RanksError, run_on_ranks


def summed(value: float) -> list[float]:
    tensor = torch.tensor([value * (distributed.get_rank() + 1)])
    distributed.all_reduce(tensor)
    return [distributed.get_rank(), float(os.environ["WORLD_SIZE"]), tensor.item()]


def fail_on_one() -> None:
    if distributed.get_rank() == 1:
        raise ValueError("rank one has had enough")
    distributed.barrier()


def hang_on_one() -> None:
    if distributed.get_rank() == 1:
        sleep_here()
    distributed.barrier()


def sleep_here() -> None:
    time.sleep(60)


def die_on_one() -> None:
    if distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    distributed.barrier()


def test_each_rank_returns_its_result() -> None:
    assert run_on_ranks(summed, 3, 2.0) == [[0, 3.0, 12.0], [1, 3.0, 12.0], [2, 3.0, 12.0]]


def test_the_error_of_a_rank_is_shown_although_others_wait_for_it() -> None:
    with pytest.raises(RanksError, match="rank one has had enough") as error:
        run_on_ranks(fail_on_one, 2)

    assert str(error.value).startswith(
        "A function on 2 ranks failed. Rank 1 raised ValueError: rank one has had enough\n"
    )


def test_a_rank_that_hangs_shows_its_stack() -> None:
    with pytest.raises(RanksError, match=r"Rank 1 did not end step 0 in \d+ seconds\b") as error:
        run_on_ranks(hang_on_one, 2, timeout_seconds=3)

    assert "in sleep_here" in str(error.value)
    assert ", waiting for other ranks." in str(error.value)


def test_a_rank_that_is_killed_is_named() -> None:
    with pytest.raises(RanksError, match=r"Rank 1 was ended by signal 9, SIGKILL"):
        run_on_ranks(die_on_one, 2)
