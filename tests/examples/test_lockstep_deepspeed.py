"""The example of a lockstep runs as its first lines say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.observe.sharding.deepspeed_training import NEEDS_DEEPSPEED

pytestmark = [NEEDS_DEEPSPEED, pytest.mark.release]

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("fail", [False, True])
def test_an_engine_beside_distributed_data_parallel(fail: bool) -> None:
    command = [
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *(str(EXAMPLES / "lockstep_deepspeed.py"), "--deepspeed_config", str(EXAMPLES / "ds_config.json")),
        *("--batches", "3", *(["--fail"] if fail else [])),
    ]
    done = subprocess.run(
        [sys.executable, *command], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip

    assert (done.returncode != 0) is fail, done.stdout + done.stderr
    said = done.stdout.splitlines()
    assert said.count("TEST FAILED" if fail else "TEST PASSED") == 1
    assert ("SETTING DIFFERS name=lr baseline=0.001 candidate=0 parameters=18" in said) is fail
    first = [
        line for line in said if line.startswith("DIVERGED PARAMETER rank=0 batch=0 param_idx=0 name=embed.weight")
    ]
    assert len(first) == fail
