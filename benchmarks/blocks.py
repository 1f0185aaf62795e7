"""What reading two runs in blocks of steps costs, part by part: `python benchmarks/blocks.py`.

Recordings are simulated as in `merge.py`. Blocks are merged in this process, so that CPU times of the parts can be told
apart; what workers return takes the way through bytes. Needs 2 MB of disk for each rank and step, and removes them.
"""

from __future__ import annotations

import argparse
import pickle
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from machine import machine
from merge import write

from traindiff.analyse.compare import comparing
from traindiff.analyse.merge.packed_steps import Packer, Unpacker


class Here:
    """Runs tasks in this process, and adds up what they take.

    Args:
        seconds: CPU seconds by part, and the bytes that are sent.
    """

    size = 2

    def __init__(self, seconds: Counter[str]) -> None:
        self._seconds = seconds

    def ordered(
        self, function: Callable[..., Any], calls: Iterable[tuple[Any, ...]], *, task_bytes: int
    ) -> Iterator[Any]:
        """See `traindiff.analyse.blocks.tasks.Tasks`."""
        assert task_bytes > 0
        for call in calls:
            begin = time.process_time()
            sent = pickle.dumps(function(*call), protocol=5)
            between = time.process_time()
            result = pickle.loads(sent)
            self._seconds["worker"] += between - begin
            self._seconds["receive"] += time.process_time() - between
            self._seconds["bytes"] += len(sent)
            yield result


def measured(baseline: Path, candidate: Path) -> Counter[str]:
    """CPU seconds of the parts of a comparison in blocks, and of one without."""
    found: Counter[str] = Counter()

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            begin = time.process_time()
            result = function(*given)
            found[name] += time.process_time() - begin
            return result

        return call

    begin = time.process_time()
    comparing.compare(baseline, candidate)
    found["one process"] = time.process_time() - begin
    with (
        mock.patch.object(Packer, "packed", timed("pack", Packer.packed)),
        mock.patch.object(Unpacker, "unpacked", timed("unpack", Unpacker.unpacked)),
        mock.patch.object(comparing, "tasks_of", return_value=nullcontext(Here(found))),
    ):
        begin = time.process_time()
        comparing.compare(baseline, candidate, workers=1)
        found["judge"] = time.process_time() - begin - found["worker"] - found["receive"] - found["unpack"]
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=(16, 64))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--directory", help="where recordings are written for a while; default: the temporary one")
    arguments = parser.parse_args()
    names = ("one process", "worker", "pack", "receive", "unpack", "judge")
    print(f"{machine()}\n\nCPU seconds for a step; `pack` is a part of `worker`.\n")
    print(f"| ranks against 1 | {' | '.join(names)} | sent |\n| --- {'| --- ' * len(names)}| --- |")
    for num_ranks in arguments.ranks:
        with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
            sides = Path(name) / "one", Path(name) / "many"
            for side, number in zip(sides, (1, num_ranks), strict=True):
                write(side, num_ranks=number, num_steps=arguments.steps)
            found = measured(*sides)
        shown = " | ".join(f"{found[one] / arguments.steps:.2f}" for one in names)
        print(f"| {num_ranks} | {shown} | {found['bytes'] / arguments.steps / 1e6:,.0f} MB |", flush=True)


if __name__ == "__main__":
    main()
