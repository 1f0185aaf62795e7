"""`traindiff verify` under torchrun: rank 0 leads and speaks, all exit alike, and none hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import traindiff
from traindiff.run.processes.present_ranks import PresentRanks

ROOT = Path(__file__).parents[3]
FEW = ("--engine", "ddp", "--steps", "1", "--replica", "ulp:1", "--no-repeat", "--pin", "never")


def torchrun(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(Path(traindiff.__file__).parents[1])])
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments],
        cwd=directory, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, timeout=240,
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_what_has_several_ranks_is_run_where_they_are_and_said_once(tmp_path: Path) -> None:
    result = torchrun(tmp_path, "-m", "traindiff", "verify", "tests.run.verify.divided:recipe", *FEW)

    assert result.returncode == 0, result.stderr
    assert result.stdout.count("candidate  tests.run.verify.divided:recipe (ddp, nproc=2)") == 1
    assert "\nequivalent" in result.stdout
    assert (tmp_path / "traindiff-verify" / "logs" / "candidate" / "rank-1.txt").exists()


SCRIPT = """
import os
import traindiff
from traindiff.run.config.setup import Setup

for nproc in (2, 3):
    try:
        found = traindiff.verify(
            "tests.run.verify.divided:recipe", "tests.run.verify.divided:raising", "runs",
            setup=Setup(engine="ddp", nproc=nproc), steps=2, replicas=("ulp:1",), repeat=False,
        )
        message = f"{found.verdict}, {found.failed.message}"
    except traindiff.ConfigError as error:
        message = error.problems[0].what
    print(f"[{os.environ['RANK']}: {message}]", flush=True)
"""


def test_a_rank_that_fails_hangs_no_other_and_all_get_the_result_or_the_error(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)

    result = torchrun(tmp_path, "script.py")

    assert result.returncode == 0, result.stderr
    for rank in range(2):
        assert f"[{rank}: incomplete, Rank 1 raised ValueError: two steps are one too many." in result.stdout
        assert f"[{rank}: does not fit the 2 ranks that were started.]" in result.stdout


@pytest.mark.parametrize("count", ["", "1"])
def test_without_a_launcher_or_with_one_rank_there_are_none(count: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": count, "MASTER_ADDR": "x", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)

    assert PresentRanks.found() is None
