"""`python ARGUMENTS` in a fork of a process that has imported torch and traindiff, in place of a cold interpreter.

For tests of what a program does. Where it matters what an interpreter has not imported yet, that OMP_NUM_THREADS is
read, or how a signal ends it, a test starts `sys.executable`.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn

ROOT = Path(__file__).parents[1]


def warm(
    *arguments: str | Path,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 240.0,
) -> subprocess.CompletedProcess[str]:
    """How `python ARGUMENTS` ends, and what it prints.

    ARGUMENTS are `-c CODE ...`, `-m MODULE ...` or `SCRIPT ...`; `-W ACTION` may come first.
    """
    with tempfile.TemporaryDirectory(prefix="traindiff-warm-") as name:
        files = [Path(name) / one for one in ("output", "errors")]
        request = {
            "arguments": [str(one) for one in arguments], "cwd": os.fspath(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env), "files": [str(file) for file in files],
        }  # fmt: skip
        code = _server().run(request, timeout)
        output, errors = (file.read_text(encoding="utf-8") for file in files)
    return subprocess.CompletedProcess([sys.executable, *request["arguments"]], code, output, errors)


class _Server:
    """The process that is forked; it ends with this one."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )  # fmt: skip
        atexit.register(self._close)

    def run(self, request: dict[str, Any], timeout: float) -> int:
        process = self._process
        assert process.stdin
        assert process.stdout
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        pid = int(process.stdout.readline())
        late = threading.Timer(timeout, os.kill, (pid, signal.SIGKILL))
        late.start()
        try:
            return int(process.stdout.readline())
        finally:
            late.cancel()

    def _close(self) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


@cache
def _server() -> _Server:
    return _Server()


def serve() -> None:
    """Fork for each line that is read, until there is none; returns in no fork."""
    requests, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    import tests.warm  # noqa: F401

    gc.freeze()  # a fork then neither walks through nor copies what is here
    while line := requests.readline():
        assert len(os.listdir("/proc/self/task")) == 1, "a thread runs in the parent"  # noqa: PTH208
        if not (pid := os.fork()):
            for one in (requests, replies):
                one.close()
            _become(**json.loads(line))
        print(pid, file=replies, flush=True)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(code, file=replies, flush=True)


def _become(arguments: Sequence[str], cwd: str, env: Mapping[str, str], files: Sequence[str]) -> NoReturn:
    """Run the program, and end as Python ends."""
    for number, file in enumerate(files, start=1):
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    try:
        _run(*arguments)
    except Exception as error:  # noqa: BLE001  Python prints it
        trace = _without_ours(error.__traceback__)
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
        sys.excepthook(type(error), error, trace)
        sys.exit(1)
    sys.exit()


def _run(kind: str, *rest: str) -> None:
    if kind == "-W":
        warnings.simplefilter(rest[0])  # type: ignore[arg-type]
        _run(*rest[1:])
    elif kind == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        _run_as_main(compile(rest[0], "<string>", "exec"))
    elif kind == "-m":
        sys.argv, sys.path[0] = [rest[0], *rest[1:]], str(Path.cwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = [kind, *rest], str(Path(kind).resolve().parent)
        _run_as_main(compile(Path(kind).read_bytes(), kind, "exec"), file=kind)


def _run_as_main(code: Any, file: str | None = None) -> None:
    main = sys.modules["__main__"] = ModuleType("__main__")
    if file is not None:
        main.__file__ = file
    exec(code, vars(main))


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that a cold interpreter would print: nothing of this file and of runpy."""
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    serve()
