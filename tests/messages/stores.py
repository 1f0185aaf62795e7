"""Messages about recordings on object stores."""

from __future__ import annotations

import threading
from pathlib import Path

import fsspec
import pytest

import traindiff
from tests.messages.provoking import Chapter
from tests.messages.recording import Small
from tests.storage.failing_store import ClientError, FailingStore, failing, s3_in_memory
from tests.storage.samples import RUN, step
from traindiff.observe.common.writing import BackgroundWriter
from traindiff.state.sources.opening import open_checkpoint
from traindiff.storage import RecordingWriter, open_recording, uploads

chapter = Chapter("Recordings on object stores", [])
situation = chapter.situation

RANK = "/bucket/run/rank-00000"


def store(patched: pytest.MonkeyPatch) -> FailingStore:
    """A store on which a recording of three steps lies, one segment each."""
    made = s3_in_memory(patched)
    writer = RecordingWriter("s3://bucket/run", run=RUN)
    for number in range(3):
        writer.write_step(*step(number))
        writer._files.uploads.flush()
    return made


@situation("a recording is read from a bucket that there is not")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    store(patched)
    open_recording("s3://buckte/run")


@situation("weights are read from a bucket that there is not")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    store(patched)
    open_checkpoint("s3://buckte/model")


@situation("a recording is begun in a bucket that there is not")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    store(patched)
    traindiff.record("s3://buckte/run", Small())


@situation("a recording is read without credentials")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    class NoCredentialsError(ClientError):
        pass

    made = store(patched)
    made.refuse = failing(NoCredentialsError("Unable to locate credentials"))
    open_recording("s3://bucket/run")


@situation("a recording is begun with credentials that have expired")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    made = store(patched)
    made.refuse = failing(PermissionError("The provided token has expired."))
    traindiff.record("s3://bucket/other", Small())


@situation("a recording is read by somebody who may not")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    made = store(patched)
    made.refuse = failing(PermissionError("Forbidden"))
    open_recording("s3://bucket/run")


@situation("a store does not answer")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    made = store(patched)
    made.refuse = failing(ConnectionRefusedError('Could not connect to the endpoint URL: "http://localhost:9/"'))
    open_recording("s3://bucket/run")


@situation("a store reports an error of its own")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    made = store(patched)
    made.refuse = failing(ClientError("InternalError: We encountered an internal error. Please try again."))
    open_recording("s3://bucket/run")


@situation("a store whose package wants settings that are missing")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    def refuse(_path: str) -> None:
        raise ValueError("Must provide either a connection_string or account_name with credentials!!")

    patched.setattr(fsspec.core, "url_to_fs", refuse)
    open_recording("az://container/run")


@situation("the credentials expire while steps are uploaded")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    patched.setitem(uploads.Uploads.__init__.__kwdefaults__, "lasting_seconds", 0.0)
    made = store(patched)
    with traindiff.record("s3://bucket/other", Small()) as run:
        made.refuse = failing(PermissionError("The provided token has expired."))
        run.log("loss", 0.5)


class Stuck:
    """A writer whose store takes nothing until it is let go."""

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        patched.setitem(uploads.Uploads.__init__.__kwdefaults__, "most_bytes", 1)
        made, self.released = store(patched), threading.Event()
        files = RecordingWriter("s3://bucket/other", run=RUN)
        made.refuse = lambda method, _path: self.released.wait(20) and None
        self.writer = BackgroundWriter(files, patience_seconds=0.05, prompt_seconds=0)

    def let_go(self) -> None:
        self.released.set()
        self.writer._patience = 20
        self.writer.close()


@situation("a store takes less than the training makes")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    stuck = Stuck(patched)
    try:
        for number in range(10):
            stuck.writer.write_step(*step(number))
    finally:
        stuck.let_go()


@situation("a store takes nothing when the training ends")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    stuck = Stuck(patched)
    try:
        stuck.writer.write_step(*step(0))
        stuck.writer.close()
    finally:
        stuck.let_go()


@situation("a segment of a recording is missing")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    made = store(patched)
    made.rm(made.glob(f"{RANK}/observations-*")[1])
    open_recording("s3://bucket/run").status(0)


@situation("a segment of a recording is cut short")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    made = store(patched)
    made.pipe_file(made.glob(f"{RANK}/observations-*")[1], b"short")
    open_recording("s3://bucket/run").status(0)


@situation("a segment of a recording is listed, and is not there")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    made = store(patched)
    last = made.glob(f"{RANK}/observations-*")[-1]

    def gone(_method: str, path: str) -> None:
        if path == last:
            raise FileNotFoundError(path)

    made.refuse = gone
    list(open_recording("s3://bucket/run").steps(0))
