"""What is said of a path that holds no recording, and of a recording that is damaged."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import torch

import traindiff
from tests.messages.provoking import Chapter
from tests.messages.recording import Small
from tests.storage.hostile import (
    batch_of,
    change_columns,
    change_json,
    compressed_buffers,
    encoded,
    messages_of,
    put_message,
    put_messages,
)
from tests.storage.samples import RUN, write
from traindiff.storage import RecordingWriter, manifest
from traindiff.storage.writer import seal

chapter = Chapter("Recordings that cannot be read", [])
situation = chapter.situation


def read_all(path: Path) -> None:
    """Read everything that is there."""
    recording = traindiff.open_recording(str(path))
    for rank in recording.ranks:
        recording.rank_content(rank)
        for found in recording.steps(rank):
            for row in range(len(found.observations)):
                recording.tensors(found, row)


def damaged(here: Path, name: str, damage: Callable[[bytes], bytes]) -> None:
    """Read a recording of which one file is another."""
    write(here / "run")
    file = here / "run" / name
    file.write_bytes(damage(file.read_bytes()))
    read_all(here / "run")


DATA, SEALS = "rank-00000/observations.arrows", "rank-00000/observations.crc"


@situation("a step that is there a second time, behind a later one")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    write(here / "run")
    messages = messages_of(here / "run" / "rank-00000")
    put_messages(here / "run" / "rank-00000", [*messages[:3], messages[1], *messages[3:]])
    read_all(here / "run")


@situation("nothing is there")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    read_all(Path("runs/base"))


@situation("a file is there")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    write(here / "run")
    read_all(Path("run/run.json"))


@situation("what says why a recording ends early is not what was written")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    write(here / "run")
    (here / "run/rank-00000/gap.json").write_bytes(manifest.dump({"reason": None, "step": 3, "optimizer": ""}))
    traindiff.open_recording(str(here / "run")).status(0)


@situation("a directory of something else is there")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    write(here / "run")
    read_all(Path("run/rank-00000"))


@situation("run.json is of something else")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    damaged(here, "run.json", lambda _: b'{"format": "llama", "layers": 32}')


@situation("run.json is of something else, with a checksum")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    damaged(here, "run.json", lambda _: manifest.dump({"format": "llama"}))


@situation("run.json is of a newer version")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    damaged(here, "run.json", lambda data: json.dumps({**json.loads(data), "version": 99}).encode())


@situation("run.json is cut off")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    damaged(here, "run.json", lambda data: data[:40])


@situation("run.json holds a list")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    damaged(here, "run.json", lambda _: b"[1, 2]")


@situation("run.json was edited")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    damaged(here, "run.json", lambda data: data.replace(b"train.py", b"other.py"))


@situation("rank.json is of another run")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    run = {**RUN, "world_size": 2, "mesh": {"engine": "DistributedDataParallel", "data_parallel": 2}}
    for rank, size in ((0, 2), (1, 4)):
        writer = RecordingWriter(str(here / "run"), run=run, rank=rank, world_size=2)
        writer.write_rank({"world_size": size, "mesh": run["mesh"]})
        writer.close()
    read_all(here / "run")


@situation("rank.json is of another rank")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    write(here / "run")
    path = here / "run/rank-00000/rank.json"
    content = manifest.load_rank(path.read_bytes(), where="")
    path.write_bytes(manifest.dump({**content, "rank": 1}))
    read_all(here / "run")


@situation("a bit of the observations flipped")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    damaged(here, DATA, lambda data: data[:-500] + bytes([data[-500] ^ 1]) + data[-499:])


@situation("the observations are missing")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    write(here / "run")
    (here / "run" / DATA).unlink()
    read_all(here / "run")


@situation("the checksums are missing")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    write(here / "run")
    (here / "run" / SEALS).unlink()
    read_all(here / "run")


@situation("run.json lacks what readers need, under a checksum that fits")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    write(here / "run")
    change_json(here / "run" / "run.json", lambda run: run.pop("settings"))
    read_all(here / "run")


@situation("rank.json is nested too deep")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    damaged(here, "rank-00000/rank.json", lambda _: b"[" * 100_000)


@situation("rank.json has an integer of endless digits")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    damaged(here, "rank-00000/rank.json", lambda _: b'{"pid": ' + b"1" * 5000 + b"}")


@situation("an observation is of a phase that does not exist, under a checksum that fits")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    write(here / "run")
    change_columns(here / "run" / "rank-00000", phase=["forwards"] * 3)
    read_all(here / "run")


@situation("an observation names a file outside of the recording")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    write(here / "run")
    change_columns(here / "run" / "rank-00000", tensors=["../../secret", "", ""])
    read_all(here / "run")


@situation("a message says that it becomes far larger")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    write(here / "run")
    messages = messages_of(here / "run" / "rank-00000")
    message = bytearray(encoded(batch_of(messages[1]), compression="lz4"))
    place = next(compressed_buffers(bytes(message)))
    message[place : place + 8] = (1 << 40).to_bytes(8, "little")
    put_message(here / "run" / "rank-00000", 1, bytes(message))
    read_all(here / "run")


@situation("a FIFO is in place of the observations")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    write(here / "run")
    (here / "run" / DATA).unlink()
    os.mkfifo(here / "run" / DATA)
    read_all(here / "run")


@situation("a link leads out of the recording")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    write(here / "run")
    (here / "run" / "rank-00000" / "rank.json").rename(here / "rank.json")
    (here / "run" / "rank-00000" / "rank.json").symlink_to(here / "rank.json")
    read_all(here / "run")


@situation("a message is larger than one may be")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    write(here / "run")
    with (here / "run" / DATA).open("wb") as file:
        file.truncate((1 << 28) + 1)
    (here / "run" / SEALS).write_bytes(b"0 268435457 00000000\n")
    read_all(here / "run")


@situation("the observations have other columns")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    write(here / "run")
    other = pa.schema([("step", pa.int64())]).serialize().to_pybytes()
    (here / "run" / DATA).write_bytes(other)
    (here / "run" / SEALS).write_bytes(seal(0, other))
    read_all(here / "run")


@situation("the checksums are damaged")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    damaged(here, SEALS, lambda data: data.replace(b"\n", b"\nx", 2))


@situation("the checksums end in something else")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    damaged(here, SEALS, lambda data: data + b"# checked")


def with_tensors(here: Path) -> Path:
    """A recording with tensors; one of their files."""
    torch.manual_seed(0)
    model = Small()
    with traindiff.record(here / "run", model, detail="tensors", select="head", observe="forward"):
        model(torch.ones(3, 4)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    return min((here / "run").rglob("*.safetensors"))


@situation("a file with a tensor is missing")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    with_tensors(here).unlink()
    read_all(here / "run")


@situation("a file with a tensor is damaged")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    with_tensors(here).write_bytes(b"no tensor at all")
    read_all(here / "run")
