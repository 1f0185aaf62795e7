"""The campaign: many mutants, every reader, and a table of what became of them.

    python -m tests.campaigns.mutants --in-process 1000000 --seed 1
    python -m tests.campaigns.mutants --commands 20000 --seed 1
    python -m tests.campaigns.mutants --in-process 1 --first 4711 --seed 1     # one of them again
    python -m tests.campaigns.mutants --corpus                                 # those that once failed

Exits with 1 if a reader crashed, hung, took too much memory, or opened what is not the mutant's.
"""

from __future__ import annotations

import argparse
import os
import pickle
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from resource import RUSAGE_CHILDREN, getrusage

from tests.campaigns import corpus, mutating
from tests.campaigns.corpus import Kept
from tests.campaigns.judging import HANG_SECONDS, MOST_MEMORY
from tests.campaigns.mutating import Seed
from tests.campaigns.workers import Judged, Plan, Replay, judged

_OUTCOMES = ("read", "refused", "failed")
_SAVED_SHARE = 100
"""One of so many mutants is of what a watch saves, which needs torch."""

_MANY = 50_000


@dataclass(slots=True)
class Tally:
    """What became of mutants, counted.

    Attributes:
        by_reader: Numbers by reader and outcome.
        by_mutator: Numbers by mutator and outcome.
        seconds: In readers, by reader.
        longest: The reader that took longest.
        peak_bytes: Most memory of a process.
        failures: The first one of each place.
        times: How often there was one at a place.
    """

    by_reader: Counter[tuple[str, str]] = field(default_factory=Counter)
    by_mutator: Counter[tuple[str, str]] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    longest: Judged | None = None
    peak_bytes: int = 0
    failures: dict[tuple[str, str], Judged] = field(default_factory=dict)
    times: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, found: Judged) -> bool:
        """Count one; True for the first failure of its place."""
        self.by_reader[found.reader, found.outcome] += 1
        for name in found.mutator.split("+"):
            self.by_mutator[name, found.outcome] += 1
        self.seconds[found.reader] += found.seconds
        if self.longest is None or found.seconds > self.longest.seconds:
            self.longest = found
        self.peak_bytes = max(self.peak_bytes, found.peak_bytes)
        if found.failure is None:
            return False
        place = (found.failure.kind, found.failure.place)
        self.times[place] += 1
        return self.failures.setdefault(place, found) is found

    @property
    def count(self) -> int:
        """How many there were."""
        return sum(self.by_reader.values())

    def lines(self, seconds: float) -> Iterator[str]:
        """The table."""
        for title, table in (("reader", self.by_reader), ("mutator", self.by_mutator)):
            yield f"{title:26}" + "".join(f"{name:>12}" for name in ("mutants", *_OUTCOMES))
            for name in sorted({name for name, _ in table}):
                numbers = [table[name, outcome] for outcome in _OUTCOMES]
                yield f"{name:26}" + "".join(f"{number:12,}" for number in (sum(numbers), *numbers))
            yield ""
        assert self.longest is not None
        used = getrusage(RUSAGE_CHILDREN)
        cpu = used.ru_utime + used.ru_stime
        yield f"{self.count:,} mutants in {seconds:,.0f} s: {self.count / seconds:,.0f} per second"
        yield f"{cpu:,.0f} s of CPU: {self.count / max(cpu, 0.01):,.0f} per second of a core"
        which = f"{self.longest.reader}, number {self.longest.number}"
        yield f"longest: {self.longest.seconds:.2f} s ({which}; limit {HANG_SECONDS:g} s)"
        yield f"most memory: {self.peak_bytes / 2**20:,.0f} MB (limit {MOST_MEMORY >> 20} MB)"
        kinds = Counter(dict.fromkeys(("crash", "signal", "hang", "memory", "outside"), 0))
        for (kind, _), times in self.times.items():
            kinds[kind] += times
        yield "failures: " + ", ".join(f"{kind} {times:,}" for kind, times in kinds.items())


def main(arguments: list[str] | None = None) -> int:
    """Run the campaign; gives the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.mutants", description=__doc__.partition("\n")[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--in-process", type=int, metavar="COUNT", help="mutants for readers that are called")
    which.add_argument("--commands", type=int, metavar="COUNT", help="mutants for commands, each in its own process")
    which.add_argument("--corpus", action="store_true", help="the mutants on which a reader once failed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first mutant")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--keep", action="store_true", help="put mutants on which a reader failed into the corpus")
    parser.add_argument("--only", choices=("saved", "others"), help="only what watches save, or only everything else")
    parser.add_argument("--hang-seconds", type=float, default=HANG_SECONDS, help="how long a reader may take")
    given = parser.parse_args(arguments)
    asked = " ".join(sys.argv[1:] if arguments is None else arguments)
    print(f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {platform.machine()}, {os.cpu_count()} CPUs, {asked}", flush=True)
    tally, begun = Tally(), time.monotonic()
    for plan, part in _asked(given):
        for found in judged(replace(plan, hang_seconds=given.hang_seconds), part, jobs=given.jobs):
            if tally.add(found):
                _report(plan, found, keep=given.keep)
            if tally.count % _MANY == 0:
                print(f"{tally.count:,} mutants, {time.monotonic() - begun:,.0f} s", flush=True)
    if not tally.count:
        print("no mutant")
        return 1
    print("", *tally.lines(time.monotonic() - begun), sep="\n")
    for (kind, place), times in tally.times.most_common():
        print(f"{times:8,} {kind}: {place} (number {tally.failures[kind, place].number})")
    return 1 if tally.failures else 0


def _asked(given: argparse.Namespace) -> Iterator[tuple[Plan, Sequence[int]]]:
    if given.corpus:
        yield from kept_plans(tuple(corpus.everything()))
        return
    commands = given.commands is not None
    numbers = range(given.first, given.first + (given.commands if commands else given.in_process))
    yield from plans(numbers, seed=given.seed, commands=commands, only=given.only)


def kept_plans(everything: tuple[Kept, ...]) -> Iterator[tuple[Plan, Sequence[int]]]:
    """What runs mutants of the corpus again: readers that are called, commands, and both with torch."""
    for with_torch in (False, True):
        for commands in (False, True):
            kept = tuple(
                one for one in everything
                if (one.kind == "saved") == with_torch and one.reader.startswith("traindiff ") == commands
            )  # fmt: skip
            if kept:
                seeds = saved_seeds() if with_torch else mutating.all_seeds()
                yield Replay(seed=1, seeds=seeds, commands=commands, kept=kept), range(len(kept))


def plans(
    numbers: Iterable[int], *, seed: int, commands: bool, only: str | None = None
) -> Iterator[tuple[Plan, list[int]]]:
    """What is run without torch, and then with it.

    Args:
        numbers: Of mutants.
        seed: Of the campaign.
        commands: Run commands instead of calling readers.
        only: `saved` for what watches save, `others` for everything else.
    """
    saved, others = [], []
    for number in numbers:
        (saved if number % _SAVED_SHARE == _SAVED_SHARE - 1 else others).append(number)
    if others and only != "saved":
        yield Plan(seed=seed, seeds=mutating.all_seeds(), commands=commands), others
    if saved and only != "others":
        yield Plan(seed=seed, seeds=saved_seeds(), commands=commands), saved


def saved_seeds() -> list[Seed]:
    """What watches save. It is made in a process of its own: one in which autograd ran must not fork workers.

    Call this only in a process in which autograd has not run, such as this program's.
    """
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(receive)
            with os.fdopen(send, "wb") as file:
                pickle.dump(mutating.saved_seeds(), file)
        finally:
            os._exit(0)
    os.close(send)
    with os.fdopen(receive, "rb") as file:
        found: list[Seed] = pickle.load(file)  # of this program's own process
    os.waitpid(pid, 0)
    import torch

    torch.set_num_threads(1)
    return found


def _report(plan: Plan, found: Judged, *, keep: bool) -> None:
    """Say what failed, and keep it."""
    failure = found.failure
    assert failure is not None
    print(f"\nnumber {found.number}: {found.reader} of {found.seed} ({found.mutator}): {failure.kind}: {failure.place}")
    print("\n".join(f"    {line}" for line in failure.message.splitlines()[-8:]), flush=True)
    if keep:
        made, _, _ = plan.case(found.number)
        path = corpus.keep(found, made.tree, kind=made.seed.kind)
        print(f"    kept: {path.name}" if path else "    not kept: it is too large", flush=True)


if __name__ == "__main__":
    sys.exit(main())
