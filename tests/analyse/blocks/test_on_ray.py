"""The same by tasks of Ray, on a cluster of this machine: `make test-scale` installs Ray."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.analyse.blocks.test_blocks import dies, dies_at_first, said
from tests.analyse.compact.made_up_ranks import record_ranks
from tests.analyse.compact.test_compacting import CHANGES
from traindiff.analyse.blocks.on_ray import RayTasks
from traindiff.analyse.check import check
from traindiff.analyse.compact.compacting import compact
from traindiff.analyse.compare import compare
from traindiff.errors import ConfigError, CorruptRecordingError, WorkerError

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A cluster of two CPUs, whose workers import these tests."""
    ray = pytest.importorskip("ray", reason="Ray is not installed (make test-scale)")
    paths = os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
    ray.init(
        address="local", num_cpus=2, include_dashboard=False, log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
    )  # fmt: skip
    yield
    ray.shutdown()


@pytest.mark.usefixtures("cluster")
def test_the_same_is_said(tmp_path: Path) -> None:
    baseline = record_ranks(tmp_path / "baseline", steps=9)
    candidate = record_ranks(tmp_path / "candidate", CHANGES["a shard"], steps=9)

    assert said(compare(baseline, candidate, workers="ray")) == said(compare(baseline, candidate))
    assert said(check(candidate, workers="ray")) == said(check(candidate))
    made = compact(candidate, tmp_path / "ray", whole_every=4, workers="ray")
    assert made.whole == compact(candidate, tmp_path / "here", whole_every=4).whole
    assert said(check(tmp_path / "ray"))[1]["findings"] == said(check(tmp_path / "here"))[1]["findings"]


@pytest.mark.usefixtures("cluster")
def test_damage_is_told_with_the_same_words(tmp_path: Path) -> None:
    path = record_ranks(tmp_path / "run", steps=5)
    stream = path / "rank-00001" / "observations.arrows"
    content = bytearray(stream.read_bytes())
    content[-4000] ^= 1
    stream.write_bytes(content)
    told = []
    for workers in (None, "ray"):
        with pytest.raises(CorruptRecordingError) as error:
            check(path, workers=workers)
        told.append(str(error.value))
    assert told[0] == told[1]


@pytest.mark.usefixtures("cluster")
def test_a_task_whose_worker_is_killed_is_run_again(tmp_path: Path) -> None:
    with RayTasks() as tasks:
        calls = ((number, str(tmp_path)) for number in range(6))
        assert list(tasks.ordered(dies_at_first, calls, task_bytes=1 << 20)) == list(range(6))
    assert (tmp_path / "died").exists()


@pytest.mark.usefixtures("cluster")
def test_workers_that_die_again_and_again_are_told() -> None:
    with RayTasks() as tasks, pytest.raises(WorkerError, match="A task of Ray failed 4 times"):
        list(tasks.ordered(dies, [(1,)], task_bytes=1 << 20))


def test_without_ray_it_is_said_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'traindiff\[ray\]'"):
        check(record_ranks(tmp_path / "run"), workers="ray")


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_a_cluster_that_does_not_answer_is_told_at_once(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]  # which nothing listens on when it is closed
    monkeypatch.setenv("RAY_ADDRESS", f"{scheme}127.0.0.1:{port}")
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))

    with pytest.raises(ConfigError, match=r"reaches no cluster .*refused"):
        check(record_ranks(tmp_path / "run", steps=1), workers="ray")
