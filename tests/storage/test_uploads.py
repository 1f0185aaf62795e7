"""Uploads of a training's steps: what waits is bounded, what fails is tried again, and what is lost is said."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from tests.storage.failing_store import FailingStore, failing, s3_in_memory
from tests.storage.samples import RUN, step
from traindiff.errors import ConfigError
from traindiff.storage import RecordingWriter, open_recording
from traindiff.storage.stores import StoreError
from traindiff.storage.uploads import Piece, UploadError, Uploads

EXPIRED = StoreError("s3://bucket", what="the credentials are not accepted", fix="Renew them.", lasts=True)
SLOW_DOWN = StoreError("s3://bucket", what="the store reports an error (SlowDown)", fix="Try again.", lasts=False)


def piece(number: int, size: int = 10) -> Piece:
    return Piece(content=bytes(size), seal=b"seal", step=number, optimizer="optimizer")


class Store:
    """Takes pieces, unless it is told to fail."""

    def __init__(self) -> None:
        self.taken: list[list[int | None]] = []
        self.tries = 0
        self.fails: Callable[[int], Exception | None] = lambda _try: None
        self.open = threading.Event()
        self.open.set()

    def upload(self, pieces: list[Piece]) -> None:
        assert self.open.wait(20)
        self.tries += 1
        if (error := self.fails(self.tries)) is not None:
            raise error
        self.taken.append([one.step for one in pieces])

    @property
    def steps(self) -> list[int | None]:
        return [number for group in self.taken for number in group]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("traindiff.storage.uploads._FIRST_WAIT_SECONDS", 0.001)


def test_pieces_are_uploaded_in_their_order_and_those_that_wait_share_an_upload() -> None:
    store = Store()
    uploads = Uploads(store.upload, pause_seconds=0)
    store.open.clear()
    for number in range(5):
        uploads.put(piece(number))
    store.open.set()
    uploads.flush()

    assert store.steps == [0, 1, 2, 3, 4]
    assert len(store.taken) <= 2


def test_no_more_waits_than_the_limit() -> None:
    store = Store()
    uploads = Uploads(store.upload, most_bytes=100, pause_seconds=0)
    store.open.clear()
    put: list[int] = []

    def put_all() -> None:
        for number in range(10):
            uploads.put(piece(number, size=26))  # 30 with its seal
            put.append(number)

    thread = threading.Thread(target=put_all)
    thread.start()
    thread.join(0.3)
    assert put == [0, 1, 2]
    store.open.set()
    thread.join(20)
    uploads.flush()
    assert store.steps == list(range(10))


def test_a_piece_beyond_the_limit_is_uploaded_alone() -> None:
    store = Store()
    uploads = Uploads(store.upload, most_bytes=10, pause_seconds=0)
    for number in range(3):
        uploads.put(piece(number, size=1000))
    uploads.flush()
    assert store.taken == [[0], [1], [2]]


@pytest.mark.usefixtures("quick")
def test_a_store_that_fails_for_a_while_loses_nothing() -> None:
    store = Store()
    uploads = Uploads(store.upload, pause_seconds=0)
    store.fails = lambda tries: SLOW_DOWN if tries % 5 else None
    for number in range(20):
        uploads.put(piece(number))
    uploads.flush()
    assert store.steps == list(range(20))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("error", "limits"), [(SLOW_DOWN, (0.05, 20)), (EXPIRED, (20, 0.05))])
def test_a_store_that_goes_on_failing_is_an_error_that_names_the_first_step(
    error: StoreError, limits: tuple[float, float]
) -> None:
    store = Store()
    uploads = Uploads(store.upload, pause_seconds=0, retry_seconds=limits[0], lasting_seconds=limits[1])
    uploads.put(piece(0))
    uploads.flush()
    store.fails = lambda _: error
    for number in (1, 2):
        uploads.put(piece(number))
    with pytest.raises(UploadError) as caught:
        uploads.flush()

    assert (caught.value.step, caught.value.optimizer, caught.value.fix) == (1, "optimizer", error.fix)
    assert store.tries > 2, "it was tried again"
    store.fails = lambda _: None
    with pytest.raises(UploadError):  # nothing follows a gap
        uploads.put(piece(3))
    assert store.steps == [0]


def test_an_error_that_lasts_is_not_tried_again_before_anything_was_uploaded() -> None:
    store = Store()
    store.fails = lambda _: EXPIRED
    uploads = Uploads(store.upload)
    uploads.put(piece(0))
    with pytest.raises(UploadError):
        uploads.flush()
    assert store.tries == 1


def test_whoever_waits_for_room_is_told_when_the_store_fails() -> None:
    store = Store()
    uploads = Uploads(store.upload, most_bytes=10, retry_seconds=0, pause_seconds=0)
    store.open.clear()
    store.fails = lambda _: SLOW_DOWN
    uploads.put(piece(0))
    threading.Timer(0.05, store.open.set).start()
    with pytest.raises(UploadError):
        uploads.put(piece(1))


# --- the same through a recording -------------------------------------------------------------------------------------


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> FailingStore:
    defaults = Uploads.__init__.__kwdefaults__
    for name in ("pause_seconds", "retry_seconds", "lasting_seconds"):
        monkeypatch.setitem(defaults, name, 0.0)
    return s3_in_memory(monkeypatch)


def test_a_recording_says_which_step_is_the_first_that_is_missing(store: FailingStore) -> None:
    writer = RecordingWriter("s3://bucket/run", run=RUN)
    writer.write_step(*step(0))
    writer._files.uploads.flush()

    def full(method: str, path: str) -> None:
        if method == "pipe_file" and path.endswith(".segment"):
            raise PermissionError("the quota of the bucket is used up")

    store.refuse = full
    writer.write_step(*step(1))
    with pytest.raises(UploadError):
        writer._files.uploads.flush()
    with pytest.raises(OSError, match=r"step 1 could not be written: access is denied \(the quota"):
        writer.write_step(*step(2))
    writer.close()

    recording = open_recording("s3://bucket/run")
    assert [one.step for one in recording.steps(0)] == [0]
    status = recording.status(0)
    assert status.ending == "truncated"
    assert status.message == (
        "rank 0: step 1 could not be written: access is denied (the quota of the bucket is used up); all steps before "
        "it are used."
    )


@pytest.mark.parametrize("before_closing", [False, True])
def test_a_failure_that_shows_at_the_end_is_said_by_closing_and_by_the_recording(
    store: FailingStore, before_closing: bool
) -> None:
    writer = RecordingWriter("s3://bucket/run", run=RUN)
    store.refuse = lambda method, path: (
        failing(ConnectionResetError("reset"))(method, path) if path.endswith(".segment") else None
    )
    writer.write_step(*step(0))
    for thread in threading.enumerate() if before_closing else ():
        if thread.name == "traindiff uploads":
            thread.join(20)
    with pytest.raises(OSError, match=r"step 0 could not be written: the store does not answer \(reset\)"):
        writer.close()
    writer.close()

    store.refuse = lambda _method, _path: None
    assert "step 0 could not be written" in open_recording("s3://bucket/run").status(0).message


def test_a_store_that_refuses_everything_leaves_a_recording_that_is_not_called_whole(store: FailingStore) -> None:
    writer = RecordingWriter("s3://bucket/run", run=RUN)
    store.refuse = failing(PermissionError("The provided token has expired."))
    writer.write_step(*step(0))
    with pytest.raises(OSError, match="credentials are not accepted"):
        writer.close()

    store.refuse = lambda _method, _path: None
    status = open_recording("s3://bucket/run").status(0)
    assert (status.ending, status.message) == (
        "unclosed",
        "rank 0: the recording was not closed (the run was killed, could not write, or still runs).",
    )


def test_a_missing_bucket_is_never_made(store: FailingStore) -> None:
    with pytest.raises(ConfigError, match="there is no bucket 'buckte'"):
        RecordingWriter("s3://buckte/run", run=RUN)
    assert not store.exists("/buckte")


def test_a_recording_that_cannot_begin_leaves_nothing(store: FailingStore) -> None:
    def full(method: str, path: str) -> None:
        if method == "pipe_file" and path.endswith(".segment"):
            raise PermissionError("Forbidden")

    store.refuse = full
    with pytest.raises(ConfigError, match="access is denied"):
        RecordingWriter("s3://bucket/run", run=RUN)
    assert store.find("/bucket") == []
