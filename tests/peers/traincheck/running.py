"""Run a program of the collection in this process or on ranks, and record it."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from pathlib import Path

import traindiff
from tests.on_ranks import RanksError, run_on_ranks
from traindiff.analyse.check import Verdict


def checked(name: str, path: Path, *, faulty: bool) -> Verdict:
    """What `traindiff check` says of a program, by its module's name."""
    program = import_module(f"tests.peers.traincheck.programs.{name}")
    if ranks := getattr(program, "RANKS", 0):
        try:
            run_on_ranks(_train, ranks, name, faulty, str(path), timeout_seconds=60.0)
        except RanksError:
            if not faulty:
                raise
    else:
        _train(name, faulty, str(path))
    return traindiff.check(path)


def _train(name: str, faulty: bool, path: str) -> None:
    program = import_module(f"tests.peers.traincheck.programs.{name}")
    program.train(partial(traindiff.record, path), faulty=faulty)
