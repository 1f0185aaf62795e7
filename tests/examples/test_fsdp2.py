"""The example runs as its first lines say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import traindiff

EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp2.py"


def run(*command: str) -> None:
    """Run the example with one thread per rank; its output is shown if it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("example") / "one"
    run(str(EXAMPLE), str(path))
    return path


@pytest.mark.release
@pytest.mark.parametrize("fault", [False, True])
def test_fsdp2_against_one_process(fault: bool, reference: Path, tmp_path: Path) -> None:
    on_two_ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    run(*on_two_ranks, str(EXAMPLE), str(tmp_path / "fsdp2"), *(["--fault"] if fault else []))

    comparison = traindiff.compare(reference, tmp_path / "fsdp2")

    assert comparison.verdict == ("diverged" if fault else "equivalent"), str(comparison)
    if fault:
        assert "2 x the baseline's (= world size 2" in comparison.findings[0].message
