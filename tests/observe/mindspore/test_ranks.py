"""A training on two ranks is one recording, and compares with that of one process on the whole batch."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import traindiff
from traindiff.storage import Recording

ROOT = Path(__file__).parents[3]
PROGRAM = Path(__file__).with_name("ranks_training.py")


def recorded(path: Path, mode: str, ranks: str) -> Recording:
    """The recording of a training: `alone`, or on two ranks of which `both` or the `second` are recorded."""
    run(path, mode, ranks)
    return traindiff.open_recording(path)


def run(path: Path, mode: str, ranks: str) -> None:
    """Run `ranks_training.py`, on two ranks if not `alone`."""
    beside = str(Path(sys.executable).parent)  # msrun starts the first Python in PATH
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([beside, os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    program = [str(PROGRAM), mode, str(path), ranks]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    logs = path.parent / f"{path.name}-logs"
    launcher = [str(Path(sys.executable).with_name("msrun")), "--worker_num=2", "--local_worker_num=2"]
    launcher += [f"--master_port={port}", f"--log_dir={logs}", "--join=True"]
    command = [sys.executable] if ranks == "alone" else launcher
    ended = subprocess.run(
        [*command, *program], env=environment, cwd=path.parent, capture_output=True, timeout=240, check=False
    )
    told = "".join(log.read_text(errors="replace")[-3000:] for log in logs.glob("worker_*.log"))
    assert ended.returncode == 0, ended.stderr.decode(errors="replace")[-3000:] + told


@pytest.mark.parametrize("mode", ["pynative", "graph"])
def test_two_ranks_compute_what_one_does_on_the_whole_batch(mode: str, tmp_path: Path) -> None:
    alone, both = (recorded(tmp_path / ranks, mode, ranks) for ranks in ("alone", "both"))

    found = traindiff.compare(alone.path, both.path)

    assert (found.verdict, found.findings) == ("equivalent", ())
    assert both.run["mesh"] == {"data_parallel": 2, "engine": "data_parallel"}
    assert list(both.ranks) == [0, 1]
    phases = {"loss", "grad", "optimizer", "update", "param"} | ({"batch", "forward"} if mode == "pynative" else set())
    assert {row.phase for row in found.differences} == phases
    assert found.directions is not None
    assert len(found.directions.parameters) == 6


def test_ranks_are_chosen(tmp_path: Path) -> None:
    assert list(recorded(tmp_path / "run", "pynative", "second").ranks) == [1]


@pytest.mark.parametrize("mode", ["pynative", "graph"])
def test_each_rank_has_its_own_files_of_the_gradient_monitor(mode: str, tmp_path: Path) -> None:
    """Gradients are averaged over ranks, so both have the same; with `"rank": [1]`, only that rank has files."""
    run(tmp_path / "both", mode, "monitored")
    run(tmp_path / "second", mode, "monitored-second")

    files = [
        {path.relative_to(rank): path.read_bytes() for path in rank.rglob("*") if path.is_file()}
        for rank in (tmp_path / "both" / "rank0", tmp_path / "both" / "rank1", tmp_path / "second" / "rank1")
    ]
    assert files[0] == files[1] == files[2]
    assert len(files[0]) == 4 * (1 + 6)
    assert not (tmp_path / "second" / "rank0").exists()
