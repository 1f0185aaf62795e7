"""Run a program of the collection: recorded in this process or on ranks, or by itself from the command line.

`python -m tests.peers.traincheck.running NAME [--faulty]` runs a program as it is, and
`traindiff run -o DIR -m tests.peers.traincheck.running NAME --faulty` records it. Programs with ranks need torchrun.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

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


def unrecorded(*_models: Any, **_settings: Any) -> nullcontext[None]:
    """In place of `traindiff.record`, records nothing."""
    return nullcontext()


def main() -> None:
    """Run a program as it is."""
    parser = argparse.ArgumentParser(description="Run one of TrainCheck's silent errors, healthy or faulty.")
    parser.add_argument("name", help="a module of tests/peers/traincheck/programs")
    parser.add_argument("--faulty", action="store_true", help="make the mistake")
    given = parser.parse_args()
    program = import_module(f"tests.peers.traincheck.programs.{given.name}")
    if hasattr(program, "RANKS"):
        torch.distributed.init_process_group("gloo")
    program.train(unrecorded, faulty=given.faulty)


if __name__ == "__main__":
    main()
