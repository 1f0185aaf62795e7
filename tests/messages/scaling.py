"""What `compact` and `prune` say of what they cannot use, and what is said of runs that are followed."""

from __future__ import annotations

import io
import sys
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from tests.analyse.compact.made_up_ranks import on_rank, record_ranks
from tests.made_up import record
from tests.messages.command_line import command
from tests.messages.provoking import Chapter
from traindiff.analyse.check import check
from traindiff.analyse.compact import compact, compacting, pruning
from traindiff.present.text.recording import print_head
from traindiff.present.webhook import send
from traindiff.storage import Follower, RecordingWriter, manifest, open_recording
from traindiff.storage.merged_rows import ENTRY, PART

chapter = Chapter("traindiff compact, prune and --follow", [])
situation = chapter.situation


@situation("a recording that is compacted")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    record_ranks(here / "run", steps=6)
    patched.setattr("traindiff.analyse.compact.compacting.size_bytes", lambda path: 9_000_000)
    return str(compact("run", "small", whole_every=4))


@situation("a compact recording where something is, and every 0th step whole")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    record(here / "run", recorded={"detail": ["summary", "signs"]})
    return command("compact", "run", "-o", "run", "--whole-every", "0")


@situation("a compact recording on a store")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    record(here / "run")
    return command("compact", "run", "-o", "s3://bucket/run")


@situation("a recording without ranks that is compacted")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    record(here / "run")
    (here / "run" / "rank-00000").rename(here / "run" / "gone")
    return command("compact", "run", "-o", "small")


@situation("a recording on a store that is replaced")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    return command("prune", "s3://bucket/run")


@situation("a compact form with other findings")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    record(here / "run")
    saids = iter([{"findings": []}, {"findings": ["one"]}])
    patched.setattr(pruning, "_said", lambda verdict: next(saids))
    return command("prune", "run")


@situation("a recording that is being written, when it is to be replaced")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    record(here / "run")
    patched.setattr(pruning, "without_writers", lambda path: nullcontext(["rank-00000"]))
    return command("prune", "run")


@situation("a recording that was written to, when it is to be replaced")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    record(here / "run")
    sizes = iter([1, 2])
    patched.setattr(pruning, "size_bytes", lambda path: next(sizes))
    return command("prune", "run")


@situation("a recording that another process is about to replace")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    record(here / "run")
    patched.setattr(pruning, "RecordingLock", lambda path: SimpleNamespace(is_taken=True, release=lambda: None))
    return command("prune", "run")


@situation("a recording whose compact form is not smaller")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    record(here / "run")
    for module in (pruning, compacting):
        patched.setattr(module, "size_bytes", lambda path: 9_000_000)
    return str(pruning.prune("run"))


@situation("a compact recording inside the recording")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    record(here / "run")
    return command("compact", "run", "-o", "run/small")


@situation("a compact recording for which there is no room")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    def full(*_: object) -> None:
        raise OSError(28, "step 0 could not be written: No space left on device")

    record(here / "run")
    patched.setattr(RecordingWriter, "write_step", full)
    return command("compact", "run", "-o", "small")


@situation("a recording in whose place another one is, when it is to be replaced")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    record(here / "run")
    patched.setattr(pruning, "open_recording", lambda path: SimpleNamespace(run={"created": "later"}))
    return command("prune", "run")


def _changed(here: Path, kind: int, **about: object) -> str:
    """What `check` says of a compact recording in which a row is another one."""
    path = record_ranks(here / "run", on_rank(3, "param copy", lambda values: values * 2))
    compact(path, here / "small")
    steps = list(open_recording(str(here / "small")).merged_steps())
    for file in (here / "small" / "merged").iterdir():
        file.unlink()
    writer = RecordingWriter(str(here / "small"), run={}, directory="merged")
    for step in steps:
        rows = list(step.observations)
        place = next(place for place, row in enumerate(rows) if row.evaluation == kind)
        rows[place] = rows[place]._replace(**about)
        writer.write_step(rows, step.summaries)
    writer.close()
    return command("check", "small")


@situation("a compact recording with a row of no site")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    return _changed(here, PART, order=1000)


@situation("a compact recording with a row of no kind")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    return _changed(here, PART, evaluation=9)


@situation("a compact recording with a list that is none")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    return _changed(here, PART, slot="two")


@situation("a compact recording with numbers that are too large")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    return _changed(here, PART, slot="0-99")


@situation("a compact recording that lacks places")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    return _changed(here, ENTRY, term=4000)


@situation("a compact recording with places of other ranks")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    compact(record_ranks(here / "run"), here / "small")
    run = here / "small" / "run.json"
    run.write_bytes(manifest.dump({**manifest.load_run(run.read_bytes(), where=""), "world_size": 3}))
    for rank in (here / "small").glob("rank-*/rank.json"):
        rank.write_bytes(manifest.dump({"rank": int(rank.parent.name[5:])}))
    return command("check", "small")


@situation("a compact recording that was cut off")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    compact(record(here / "run"), here / "small")
    data = here / "small" / "merged" / "observations.arrows"
    data.write_bytes(data.read_bytes()[:-1000])
    return str(check("small"))


@situation("a compact pipeline whose stages hold one weight, against a process that ties it")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    compact(record_ranks(here / "run", world_size=2), here / "small")
    for rank, path in ((0, "copy"), (1, "shard")):
        file = here / "small" / f"rank-{rank:05d}" / "rank.json"
        content = manifest.load_rank(file.read_bytes(), where="")
        parameters = {path: content["parameters"][path]}
        file.write_bytes(manifest.dump({**content, "parameters": parameters}))
    record_ranks(here / "one", world_size=1)
    file = here / "one" / "rank-00000" / "rank.json"
    content = manifest.load_rank(file.read_bytes(), where="")
    file.write_bytes(manifest.dump({**content, "tied": {"shard": "copy"}}))
    return command("compare", "one", "small")


@situation("files of msprobe from a compact recording")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    compact(record_ranks(here / "run"), here / "small")
    return command("export", "msprobe", "small", "files")


@situation("a compact recording that is shown")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    compact(record_ranks(here / "run", steps=1), here / "small")
    shown = io.StringIO()
    print_head(Console(file=shown, width=120), open_recording("small"))
    return shown.getvalue()


@situation("a run that is followed, and adds nothing more")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    record(here / "run", recorded={"observe": ["batch", "forward", "backward", "grad", "optimizer"]}, close=False)
    return str(check("run", follow=Follower(0.1)))


@situation("a run that is followed and has not begun")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    return command("check", "run", "--follow", "--patience", "0.1")


@situation("a run that is followed, with other numbers of steps")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    record(here / "run")
    return command("compare", "run", "run", "--follow", "--offset", "2")


@situation("a verdict for an address that is none")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    record(here / "run")
    return command("check", "run", "--webhook", "chat.example.com")


@situation("a verdict that cannot be sent")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    return send("http://127.0.0.1:1/incoming", text="healthy", result={})


@situation("a verdict for a file in a directory that is not there")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    record(here / "run")
    return command("check", "run", "--junit", "nowhere/found.xml")


@situation("numbers of workers that are none")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    record(here / "run")
    return command("check", "run", "--workers", "0")


@situation("workers for a run that is followed")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    record(here / "run")
    return command("check", "run", "--workers", "2", "--follow")


@situation("workers for a recording in the memory of one process")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    return command("check", "memory://run", "--workers", "2")


@situation("workers of Ray, which is not installed")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    record(here / "run")
    patched.setitem(sys.modules, "ray", None)
    return command("check", "run", "--workers", "ray")


@situation("workers of a cluster of Ray that does not answer")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    def init(**_: Any) -> None:
        raise ConnectionError("Ray cluster at 10.0.0.1:6379 is not reachable")

    record(here / "run")
    patched.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False, init=init))
    return command("check", "run", "--workers", "ray")


@situation("workers that die")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    class Dead:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def submit(self, *_: Any) -> None:
            raise BrokenProcessPool

        def shutdown(self, **_: Any) -> None: ...

    record_ranks(here / "run")
    patched.setattr("traindiff.analyse.blocks.pool.ProcessPoolExecutor", Dead)
    return command("check", "run", "--workers", "2")


def _busy(*_: Any, **__: Any) -> None:
    raise OSError(16, "Device or resource busy")


@situation("a compact form that cannot be put in the place of a recording")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    record_ranks(here / "run")
    patched.setattr(pruning, "uuid4", lambda: SimpleNamespace(hex="0123456789ab"))
    rename = Path.rename
    patched.setattr(
        Path, "rename", lambda one, to: _busy() if one.suffix == ".pruned-0123456789ab" else rename(one, to)
    )
    return command("prune", "run")


@situation("a recording that cannot be given its name again either")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    record_ranks(here / "run")
    patched.setattr(pruning, "uuid4", lambda: SimpleNamespace(hex="0123456789ab"))
    rename = Path.rename
    patched.setattr(Path, "rename", lambda one, to: _busy() if to.name == "run" else rename(one, to))
    return command("prune", "run")


@situation("a compact form of which a part was removed")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    record_ranks(here / "run")
    rename = Path.rename

    def put(one: Path, to: Path) -> None:
        if ".pruned-" in one.name and to.name == "run":
            (one / "merged" / "observations.arrows").unlink()
        rename(one, to)

    patched.setattr(Path, "rename", put)
    return command("prune", "run")


@situation("a recording that was replaced, with a file that is in both")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    record_ranks(here / "run")
    (here / "run" / "notes.txt").write_text("mine")
    patched.setattr(pruning, "uuid4", lambda: SimpleNamespace(hex="0123456789ab"))
    rename = Path.rename

    def put(one: Path, to: Path) -> None:
        rename(one, to)
        if one.suffix == ".pruned-0123456789ab":
            (to / "notes.txt").write_text("written meanwhile")

    patched.setattr(Path, "rename", put)
    return command("prune", "run")


@situation("a recording that was replaced, and could not be removed")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    record_ranks(here / "run")
    patched.setattr(pruning, "uuid4", lambda: SimpleNamespace(hex="0123456789ab"))
    remove = pruning.shutil.rmtree
    patched.setattr(
        pruning.shutil, "rmtree", lambda one, **how: _busy() if ".replaced-" in str(one) else remove(one, **how)
    )
    return command("prune", "run")


@situation("a recording that is replaced, and may go on")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    record_ranks(here / "run", close=lambda rank: rank != 1)
    return command("prune", "run", "--follow", "--patience", "0.1")


@situation("alerts that cannot be raised")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    record(here / "run")
    patched.setattr("traindiff.present.alerts.find_spec", lambda package: None)
    asked = ("slack=here", "tensorboard", "otel=here", "otel")
    return "\n".join(command("check", "run", "--alert", alert) for alert in asked)
