"""One file for all ranks of a node: the same recording, whole after a kill, and safe to read."""

from __future__ import annotations

import os
import signal
import struct
import tempfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import traindiff
from tests.observe.sharding.training import Model, train
from tests.on_ranks import RanksError, run_on_ranks
from traindiff.errors import ConfigError, CorruptRecordingError
from traindiff.storage import node_writer, open_recording
from traindiff.storage.following import Follower
from traindiff.storage.node_files import NodeFiles
from traindiff.storage.written_files import UnbufferedFile


def in_ddp(model: Model) -> nn.Module:
    return DistributedDataParallel(model)


def as_torchrun(ranks_per_node: int) -> None:
    rank = distributed.get_rank()
    os.environ |= {"GROUP_RANK": str(rank // ranks_per_node), "LOCAL_WORLD_SIZE": str(ranks_per_node)}


def record(path: str, ranks_per_node: int, settings: dict[str, Any]) -> None:
    as_torchrun(ranks_per_node)
    train(path, in_ddp, per_node=True, **settings)


def names(path: Path) -> list[str]:
    return sorted(one.name for one in path.iterdir())


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("usual") / "run"
    run_on_ranks(train, 4, str(path), in_ddp)
    return path


@pytest.mark.parametrize(("ranks_per_node", "files"), [
    (4, ["node-00000.frames", "run.json"]), (2, ["node-00000.frames", "node-00001.frames", "run.json"]),
])  # fmt: skip
def test_the_recording_is_the_same(tmp_path: Path, usual: Path, ranks_per_node: int, files: list[str]) -> None:
    run_on_ranks(record, 4, str(tmp_path / "run"), ranks_per_node, {})

    assert names(tmp_path / "run") == files
    recording = open_recording(str(tmp_path / "run"))
    assert recording.ranks == (0, 1, 2, 3)
    assert {recording.status(rank).ending for rank in recording.ranks} == {"closed"}
    compared = traindiff.compare(usual, tmp_path / "run")
    assert compared.verdict == "identical", str(compared)
    assert traindiff.check(tmp_path / "run").to_json()["notes"] == traindiff.check(usual).to_json()["notes"]
    made = traindiff.compact(tmp_path / "run", tmp_path / "small")
    assert made.ranks == 4
    assert traindiff.compare(usual, tmp_path / "small").verdict == "identical"


def test_files_of_tensors_are_there_too(tmp_path: Path) -> None:
    run_on_ranks(record, 2, str(tmp_path / "run"), 2, {"detail": ["summary", "tensors"], "observe": ("grad",)})

    (first, *_) = (one for one in open_recording(str(tmp_path / "run")).steps(1) if one.observations)
    recording = open_recording(str(tmp_path / "run"))
    assert recording.tensors(first, 0)


def killed_in_step(path: str, killed: int) -> None:
    as_torchrun(2)
    seen = [0]

    def before_step(_: nn.Module) -> None:
        seen[0] += 1
        if seen[0] == 3 and distributed.get_rank() == killed:
            os.kill(os.getpid(), signal.SIGKILL)

    train(path, in_ddp, per_node=True, before_step=before_step, steps=5)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_loses_no_step(tmp_path: Path, killed: int) -> None:
    with pytest.raises(RanksError, match=f"Rank {killed}"):
        run_on_ranks(killed_in_step, 2, str(tmp_path / "run"), killed)

    recording = open_recording(str(tmp_path / "run"))
    assert recording.status(killed).ending != "closed"
    assert [one.step for one in recording.steps(killed)][:2] == [0, 1]


def test_an_earlier_recording_is_replaced_only_if_asked_for(tmp_path: Path, usual: Path) -> None:
    path = tmp_path / "run"
    run_on_ranks(train, 4, str(path), in_ddp)
    with pytest.raises(RanksError, match="already holds a recording"):
        run_on_ranks(record, 4, str(path), 2, {})
    run_on_ranks(record, 4, str(path), 2, {"overwrite": True})
    assert names(path) == ["node-00000.frames", "node-00001.frames", "run.json"]
    with pytest.raises(RanksError, match="already"):
        run_on_ranks(record, 4, str(path), 4, {})
    run_on_ranks(record, 4, str(path), 4, {"overwrite": True})
    assert names(path) == ["node-00000.frames", "run.json"]
    assert traindiff.compare(usual, path).verdict == "identical"


def record_again(path: str) -> None:
    """A recording that is moved away, and others in its place, at once."""
    as_torchrun(2)
    train(path, in_ddp, per_node=True)
    distributed.barrier()
    if distributed.get_rank() == 0:
        Path(path).rename(f"{path}-moved")
    distributed.barrier()
    train(path, in_ddp, per_node=True, steps=2)
    distributed.barrier()
    train(path, in_ddp, per_node=True, steps=5, overwrite=True)


def test_recordings_that_follow_at_once_have_files_of_their_own(tmp_path: Path, usual: Path) -> None:
    run_on_ranks(record_again, 2, str(tmp_path / "run"))

    assert traindiff.compare(usual, tmp_path / "run-moved").verdict in ("identical", "equivalent")
    recording = open_recording(str(tmp_path / "run"))
    assert {recording.status(rank).ending for rank in recording.ranks} == {"closed"}
    assert [len([one for one in recording.steps(rank) if one.observations]) for rank in (0, 1)] == [5, 5]


def test_a_recording_that_goes_on_is_not_replaced(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer, per_node=True):
        for per_node in (True, False):
            with pytest.raises(ConfigError, match=r"is being (recorded at the moment|written)"):
                traindiff.record(tmp_path / "run", nn.Linear(2, 2), overwrite=True, per_node=per_node)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    assert open_recording(str(tmp_path / "run")).status(0).ending == "closed"


def test_a_long_path_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with traindiff.record(tmp_path / "run", nn.Linear(2, 2), per_node=True):
        pass

    assert names(tmp_path / "run") == ["node-00000.frames", "run.json"]


def train_over(path: str) -> None:
    train(path, in_ddp, overwrite=True)


def test_directories_of_ranks_replace_files_of_nodes(tmp_path: Path) -> None:
    path = tmp_path / "run"
    run_on_ranks(record, 2, str(path), 2, {})
    run_on_ranks(train_over, 2, str(path))

    assert names(path) == ["rank-00000", "rank-00001", "run.json"]


def test_a_store_is_refused() -> None:
    with pytest.raises(ConfigError, match="is no local directory, and per_node=True is for these"):
        traindiff.record("memory://bucket/run", nn.Linear(2, 2), per_node=True)


def test_a_run_is_followed(tmp_path: Path) -> None:
    run_on_ranks(record, 2, str(tmp_path / "run"), 2, {})
    whole = (tmp_path / "run" / "node-00000.frames").read_bytes()
    written = [len(whole) // 3]
    (tmp_path / "run" / "node-00000.frames").write_bytes(whole[: written[0]])

    def grow(_: float) -> None:
        written[0] = min(len(whole), written[0] + len(whole) // 7)
        (tmp_path / "run" / "node-00000.frames").write_bytes(whole[: written[0]])

    verdict = traindiff.check(tmp_path / "run", follow=Follower(patience_seconds=60, sleep=grow))

    assert (verdict.verdict, verdict.to_json()["steps"]) == (
        "healthy", traindiff.check(tmp_path / "run").to_json()["steps"],
    )  # fmt: skip


def framed(name: bytes, content: bytes = b"", *, magic: bytes = b"TDN1", spoil: int = 0) -> bytes:
    head = struct.pack("<4sHQ", magic, len(name), len(content)) + name
    return head + struct.pack("<I", zlib.crc32(head) ^ spoil) + content


HOSTILE: dict[str, bytes] = {
    "no frame begins there": framed(b"rank-00000/rank.json", magic=b"TDN9"),
    "has another checksum": framed(b"rank-00000/rank.json", spoil=1),
    "rank-00000/../../etc": framed(b"rank-00000/../../etc"),
    "/etc/passwd": framed(b"/etc/passwd"),
    "run.json": framed(b"run.json", b"{}"),
    "rank-00000/a": framed(b"rank-00000/a\x00b"),
    "a frame has the name 'rank-00000/b'": framed(b"rank-00000/b"),
}


@pytest.mark.parametrize("said", HOSTILE)
def test_a_damaged_file_is_refused_with_its_place(tmp_path: Path, said: str) -> None:
    run_on_ranks(record, 1, str(tmp_path / "run"), 1, {})
    file = tmp_path / "run" / "node-00000.frames"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes() + HOSTILE[said] + b"x" * 600)

    with pytest.raises(CorruptRecordingError) as error:
        traindiff.check(tmp_path / "run")

    assert f"at byte {size}" in str(error.value)
    assert said in str(error.value)


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.9])
def test_a_file_that_was_cut_off_has_the_steps_before(tmp_path: Path, kept: float) -> None:
    run_on_ranks(record, 1, str(tmp_path / "run"), 1, {})
    file = tmp_path / "run" / "node-00000.frames"
    whole = len(list(open_recording(str(tmp_path / "run")).steps(0)))
    file.write_bytes(file.read_bytes()[: int(kept * file.stat().st_size)])

    recording = open_recording(str(tmp_path / "run"))
    assert len(list(recording.steps(0))) < whole
    assert recording.status(0).ending != "closed"


def test_a_file_ends_before_it_holds_more_than_readers_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_writer, "MOST_FRAMES", node_writer._ENDINGS + 3)
    path = tmp_path / "node-00000.frames"
    with UnbufferedFile(str(path), "xb") as file:
        server = node_writer._Server(file, str(path))
        for number in range(3):
            server._write(f"rank-00000/observations-{number:015d}-{number:010d}.segment", b"step")
        with pytest.raises(OSError, match=r"holds 3 steps of its ranks.*every="):
            server._write("rank-00000/observations-000000000000003-0000000003.segment", b"step")
        server._write("rank-00000/rank.json", b"{}")
    assert len(NodeFiles(str(tmp_path)).ls(str(tmp_path / "rank-00000"))) == 4
