"""The watchers of ranks that exist already, and what they know of each other."""

from __future__ import annotations

from torch.distributed import HashStore

from traindiff.run.processes.beats import SILENT_SECONDS, Beats


class Watchers:
    """The beats of three ranks, and the time, which the test tells."""

    def __init__(self) -> None:
        self.seconds = 0.0
        store = HashStore()
        self.of = [Beats(store, "job-1", rank=rank, world_size=3, now=lambda: self.seconds) for rank in range(3)]
        self.store = store

    def all_quiet(self, *quiet: bool) -> list[bool]:
        """What each of the first ranks hears, after all of them have told."""
        for _ in range(2):
            self.seconds += 2.0
            heard = [beats.all_quiet(quiet_here=here) for beats, here in zip(self.of, quiet, strict=False)]
        return heard


def test_ranks_hang_only_if_all_are_quiet() -> None:
    watchers = Watchers()

    assert watchers.all_quiet(True, True, False) == [False, False, False]
    assert watchers.all_quiet(True, True, True) == [True, True, True]


def test_a_rank_that_shows_life_again_is_waited_for_again() -> None:
    watchers = Watchers()
    watchers.all_quiet(True, True, True)

    assert watchers.all_quiet(True, False, True) == [False, False, False]


def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    watchers = Watchers()
    watchers.all_quiet(True, True, False)
    watchers.store.set(watchers.of[2].end_key(2), "")

    assert watchers.all_quiet(True, True) == [True, True]


def test_each_end_of_another_rank_is_told_once() -> None:
    watchers = Watchers()
    told = [watchers.of[0].more_ended()]

    for rank in (2, 1):
        watchers.store.set(watchers.of[rank].end_key(rank), "")
        told += [watchers.of[0].more_ended(), watchers.of[0].more_ended()]

    assert told == [False, True, False, True, False]


def test_a_rank_whose_watcher_tells_nothing_any_more_is_silent_and_one_that_is_slow_never_is() -> None:
    watchers = Watchers()
    watchers.all_quiet(True, False, False)

    while watchers.seconds < 10 * SILENT_SECONDS:
        watchers.all_quiet(False, False)
        silent = watchers.of[0].silent()

    assert silent == [2]


def test_the_failure_of_a_rank_is_known_to_all() -> None:
    watchers = Watchers()
    assert not watchers.of[0].failed()

    watchers.of[2].fail()

    assert watchers.of[0].failed()
