"""`traindiff run`: run a script as `python` runs it, and record what it trains.

Torch is imported only when the script imports it: torch then reads the number of threads from the environment, which
the script may have set just before.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from traindiff.core.settings import RecordSettings
from traindiff.errors import ConfigError, Problem
from traindiff.run.script.account import Account
from traindiff.run.script.script import Script


def when_imported(name: str, then: Callable[[], None]) -> None:
    """Call `then` as soon as the module has been imported; at once if it already has."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Finder(name, then))


class _Finder(MetaPathFinder):
    """Finds one module as usual, and notices when it has been executed."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then
        self._is_looking = False

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002  as it is called
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """The module's spec, with a loader that calls back."""
        if fullname != self._name or self._is_looking:
            return None
        self._is_looking = True
        try:
            spec = find_spec(fullname)
        finally:
            self._is_looking = False
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                vars(loader).pop("exec_module", None)  # another tool's hook may have removed it already
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self._then()

            loader.exec_module = exec_module
        return spec


UNUSABLE = 2


def check_room(path: str, *, overwrite: bool) -> None:
    """Check that nothing is in the way of the recording, before anything runs. Remote paths are checked when it begins.

    Raises:
        ConfigError: Something is in the way.
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
    """Run a script to its end. When this process ends, the recording is completed and the account is printed."""
    account = Account(recording=path)
    place = path if "://" in path else str(Path(path).absolute())  # the script may change to another directory
    following: list[Any] = []

    def start() -> None:
        from traindiff.run.script.follower import Follower, RecordRequest

        request = RecordRequest(path=place, settings=settings, overwrite=overwrite)
        follower = Follower(request, account, refuse=_refuse)
        follower.start()
        following.append(follower)

    atexit.register(
        _end, account, following, os.getpid()
    )  # before the script's own handlers, so that it runs after them
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
