"""Two runs are walked through together, in whatever order they took the steps of their optimizers."""

from __future__ import annotations

import time
from collections.abc import Iterator

from traindiff.analyse.align.side import StepsOnDemand, step_pairs
from traindiff.analyse.merge.run_steps import RunStep


def taken(optimizer: str, count: int) -> list[RunStep]:
    return [RunStep(optimizer=optimizer, step=number, table={}) for number in range(count)]


def test_steps_of_optimizers_in_another_order_are_brought_together() -> None:
    pairs = step_pairs(iter([*taken("a", 3), *taken("b", 2)]), iter([*taken("b", 3), *taken("a", 3)]))

    found = [(own and (own.optimizer, own.step), other and (other.optimizer, other.step)) for own, other in pairs]

    same = [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1)]
    assert found == [*((one, one) for one in same), (None, ("b", 2))]


def test_steps_that_wait_are_not_looked_through_for_each_other_one() -> None:
    count = 20_000
    steps = StepsOnDemand(iter([*taken("b", count), *taken("a", count)]))
    begun = time.monotonic()

    found = [one.step for number in range(count) for one in steps.until("a", number)]

    assert found == list(range(count))
    assert time.monotonic() - begun < 5  # each against all of the other optimizer: 400 million looks
    assert len(list(steps.rest())) == count


def test_no_step_is_read_before_it_is_asked_for() -> None:
    read: list[int] = []

    def noted() -> Iterator[RunStep]:
        for one in taken("a", 100):
            read.append(one.step)
            yield one

    late = [RunStep(optimizer="a", step=number, table={}) for number in (40, 60)]

    for number, (_, other) in enumerate(step_pairs(iter(late), noted())):
        assert other is not None
        assert (other.step, len(read)) == (number, number + 1)
    assert len(read) == 100
