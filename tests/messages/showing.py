"""What `report`, `view`, `export` and `explain` say of what they cannot use."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.made_up import record
from tests.messages.command_line import command
from tests.messages.provoking import Chapter

chapter = Chapter("traindiff report, view and export", [])
situation = chapter.situation


def on_run(here: Path, *arguments: str) -> str:
    """What a command says, where there is a recording `run`."""
    record(here / "run")
    return command(*arguments)


@situation("a report of one recording, with settings for two")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    return on_run(here, "report", "run", "--noise", "other", "--rename", "a=b")


@situation("a report that cannot be written")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    return on_run(here, "report", "run", "--output", "nowhere/report.html")


@situation("a report that is written")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    return on_run(here, "report", "run")


@situation("pictures without matplotlib")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        patched.delitem(sys.modules, name)
    patched.setitem(sys.modules, "matplotlib", None)
    return on_run(here, "report", "run", "--png", "pictures")


@situation("pictures where a file is")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    for name in ("matplotlib", "matplotlib.figure"):
        patched.setitem(sys.modules, name, ModuleType(name))
    return on_run(here, "report", "run", "--png", "run/run.json")


@situation("a result that holds too little for a report")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    import traindiff
    from traindiff.present.page import page_of

    page_of(traindiff.check(record(here / "run")))


@situation("a directory to view that is not there")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    return on_run(here, "view", "rums")


@situation("a directory to view that is a file")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    return on_run(here, "view", "run/run.json")


@situation("a port that is in use")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    from traindiff.present.viewer import Viewer

    record(here / "run")
    viewer = Viewer(here)
    try:
        said = command("view", ".", "--port", str(viewer.port))
    finally:
        viewer._server.server_close()
    return said.replace(str(viewer.port), "8421")


@situation("a tool to export to that there is not")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    return on_run(here, "export", "tensorbaord", "run")


@situation("a tool to export to that is not installed")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    from traindiff.present.data import exports

    patched.setattr(exports, "find_spec", lambda name: None)
    return on_run(here, "export", "wandb", "run")


@situation("a phase to export that there is not, and steps that are none")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    from traindiff.present.data import exports

    patched.setattr(exports, "find_spec", lambda name: name)
    phase = on_run(here, "export", "wandb", "run", "--phase", "gradient")
    return f"{phase}\n{command('export', 'wandb', 'run', '--steps', 'first')}"


@situation("a term that is not explained")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    return command("explain", "noise flor")
