"""Everything that reads other people's files, called as the command line is, each in a process of its own."""

from __future__ import annotations

import http.client
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import quote

from tests.campaigns.mutating import Kind
from tests.campaigns.readers import Case
from traindiff.cli import main
from traindiff.errors import TraindiffError

_RIGHT = (0, 1, 2, 3)
"""Exit codes that docs/json.md has."""


class WrongExitError(Exception):
    """A command ended as none does."""


def _run(*args: str) -> None:
    sys.argv = ["traindiff", *args]
    try:
        main()
    except SystemExit as ending:
        code = 0 if ending.code is None else ending.code
        if code not in _RIGHT:
            raise WrongExitError(f"exit code {code!r}") from None
        said = Path("/proc/self/fd/2").resolve().read_bytes()
        if b"Traceback (most recent call last)" in said:
            raise WrongExitError(said[-2000:].decode(errors="replace")) from None
        if code == 2 and not said.strip():
            raise WrongExitError("exit code 2 without a word") from None
        if code == 2:
            raise TraindiffError(said.decode(errors="replace")) from None


def _show(case: Case) -> None:
    form = case.rng.choice(("table", "csv", "json", "parquet"))
    output = ("--output", str(case.places.output / "shown")) if form == "parquet" else ()
    _run("show", case.mutant, "--samples", "--format", form, *output)


def _format(case: Case) -> tuple[str, ...]:
    form = case.rng.choice(("text", "text", "json", "csv", "markdown", "junit", "html"))
    return ("--html", str(case.places.output / "page.html")) if form == "html" else ("--format", form)


def _check(case: Case) -> None:
    _run("check", case.mutant, *_format(case))


def _pair(case: Case) -> tuple[str, ...]:
    return case.rng.choice(
        (
            (case.clean, case.mutant), (case.mutant, case.clean), (case.mutant, case.mutant),
            (case.clean, case.clean, "--noise", case.mutant),
        )
    )  # fmt: skip


def _compare(case: Case) -> None:
    _run("compare", *_pair(case), *_format(case))


def _report(case: Case) -> None:
    _run("report", *case.rng.choice((_pair(case), (case.mutant,))), "--output", str(case.places.output / "page.html"))


def _export(case: Case) -> None:
    _run("export", "msprobe", case.mutant, str(case.places.output / "exported"))


def _import(tool: str) -> Callable[[Case], None]:
    def read(case: Case) -> None:
        _run("import", tool, case.mutant, str(case.places.output / "recording"))

    return read


def _config(case: Case) -> None:
    _run("check", str(case.places.clean("plain")), "--config", str(case.places.mutant / "limits.toml"))


def _rerun(case: Case) -> None:
    _run("rerun", case.mutant, "--memory", "0.5", "--seconds", "8", *case.rng.choice(((), ("--json",))))


def _view(case: Case) -> None:
    """Serve, be asked for the list and for another page, and be interrupted."""
    problems: list[str] = []
    asking = threading.Thread(target=_ask, args=(case, problems), daemon=True)
    asking.start()
    _run("view", str(case.places.under), "--port", "0")
    if problems:
        raise WrongExitError("; ".join(problems))


def _ask(case: Case, problems: list[str]) -> None:
    try:
        port = _port()
        names = [quote(name, safe="") for name in ("training/baseline", "clean")]
        pages = (f"/run/{names[0]}", f"/compare?baseline={names[1]}&candidate={names[0]}", f"/state?of={names[0]}")
        for page in ("/", case.rng.choice(pages)):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("GET", page)
            answer = connection.getresponse()
            said = answer.read()
            if answer.status == 500:  # 503 says that it took too long
                message = re.search(rb"This could not be read[^<]*", said)
                problems.append(f"{page}: {message[0].decode(errors='replace') if message else answer.status}")
            connection.close()
    except Exception as error:  # noqa: BLE001  told to the other thread
        problems.append(f"{type(error).__name__}: {error}")
    finally:
        os.kill(os.getpid(), signal.SIGINT)


def _port() -> int:
    """Where the server listens, as it says."""
    messages = Path("/proc/self/fd/2").resolve()
    until = time.monotonic() + 60
    while time.monotonic() < until and not (match := re.search(rb"127\.0\.0\.1:(\d+)/", messages.read_bytes())):
        time.sleep(0.002)
    if match is None:
        raise WrongExitError("view has not said where it listens")
    return int(match[1])


Command = Callable[[Case], None]

COMMANDS: Mapping[Kind, Mapping[str, tuple[int, Command]]] = {
    "recording": {
        "traindiff show": (30, _show), "traindiff check": (30, _check), "traindiff compare": (30, _compare),
        "traindiff report": (20, _report), "traindiff view": (3, _view), "traindiff export": (10, _export),
    },
    "msprobe": {"traindiff import msprobe": (1, _import("msprobe"))},
    "onnxruntime": {"traindiff import onnxruntime": (1, _import("onnxruntime"))},
    "configuration": {"traindiff check --config": (1, _config)},
    "saved": {"traindiff rerun": (1, _rerun)},
}  # fmt: skip
"""Weight and command by name, for each kind of input."""
