"""`traindiff run`: a script, run as `python` runs it, with a recording of what it trains."""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from traindiff.errors import ConfigError, Problem
from traindiff.running.account import Account
from traindiff.running.imports import when_imported
from traindiff.running.script import Script
from traindiff.settings import RecordSettings

UNUSABLE = 2


def of_this_start(path: str) -> str:
    """The directory of a recording; beside it where torchrun has started the ranks again, which keeps what there is."""
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return path if restarts == "0" else f"{path.rstrip('/')}-restart-{restarts}"


def check_room(path: str, *, overwrite: bool) -> None:
    """See that nothing is in the way of the recording, before anything runs. What is remote is seen when it begins.

    Raises:
        ConfigError: There is something.
    """
    if "://" in path or int(os.environ.get("RANK", "0")) != 0:
        return
    place = Path(path)
    holds_recording = (place / "run.json").exists()
    if holds_recording and overwrite:
        return
    if place.is_file() or (place.is_dir() and any(place.iterdir())):
        what = "already holds a recording." if holds_recording else "is taken by something else than a recording."
        fix = "Give another path" + (", or --overwrite to replace it." if holds_recording else ".")
        problem = Problem(where=f"--output {path}", what=what, fix=fix)
        raise ConfigError("run", [problem], consequence="nothing was run")


def run_recorded(script: Script, *, path: str, settings: RecordSettings, overwrite: bool) -> None:
    """Run a script to its end. The recording is completed, and what was seen is said, when this process ends.

    Args:
        script: What to run.
        path: Directory of the recording.
        settings: What is recorded.
        overwrite: Replace a recording that is already there.
    """
    account = Account(recording=path)
    place = path if "://" in path else str(Path(path).absolute())  # the script may change to another directory
    following: list[Any] = []

    def start() -> None:
        from traindiff.running.follower import Follower, Wanted

        follower = Follower(
            Wanted(path=place, settings=settings, overwrite=overwrite), account, refuse=_refuse
        )  # fmt: skip
        follower.start()
        following.append(follower)

    atexit.register(_end, account, following, os.getpid())  # before the script's own, so that it runs behind them
    when_imported("torch", start)
    try:
        prepared = script.prepared()
    except ConfigError as error:
        atexit.unregister(_end)
        _refuse(error)
    try:
        prepared.run()
    except BaseException as error:
        for follower in following:
            follower.ended_by(error)
        raise


def _end(account: Account, following: list[Any], process: int) -> None:
    if os.getpid() != process:
        return
    for follower in following:
        follower.end()
    if int(os.environ.get("RANK", "0")) == 0:
        for line in account.lines():
            print(f"traindiff: {line}", file=sys.stderr)  # noqa: T201


def _refuse(error: ConfigError) -> NoReturn:
    print(f"traindiff: {error}", file=sys.stderr)  # noqa: T201
    sys.exit(UNUSABLE)
