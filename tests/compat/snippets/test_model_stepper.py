"""ModelStepper's documented example, as it is written and as it is started."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from tests.observe.sharding.deepspeed_training import NEEDS_DEEPSPEED, import_deepspeed
from tests.on_ranks import run_on_ranks
from traindiff.run.processes.launch import free_port

pytestmark = NEEDS_DEEPSPEED

CONFIGURATION = [
    "--- Model Stepper Configuration ---", "batches=6", "test_every=1", "status_every=5",
    "track_params=True", "param_tol=1.000000e-04", "track_loss=True", "loss_tol=1.000000e-05",
    "track_grads=True", "grad_tol=1.000000e-04", "",
]  # fmt: skip


def config(stage: int, directory: Path) -> str:
    written = directory / f"stage_{stage}.json"
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0} if stage == 3 else {"stage": stage}
    written.write_text(
        json.dumps(
            {"train_micro_batch_size_per_gpu": 4, "zero_optimization": zero, "zero_allow_untested_optimizer": True}
        )
    )
    return str(written)


def expect_lines(said: list[str], *, fails: bool) -> None:
    """What rank 0 prints, in the documented order."""
    begin = said.index(CONFIGURATION[0])
    assert said[begin : begin + len(CONFIGURATION)] == CONFIGURATION
    told = [line for line in said if line.startswith(("STATUS", "DIVERGED", "TEST"))]
    if fails:
        assert told[0].startswith("DIVERGED PARAMETER rank=0 batch=0 param_idx=0 name=first.weight abs_diff=")
        assert told[1].startswith("DIVERGED PARAMETER rank=1 batch=0 param_idx=0 name=first.weight abs_diff=")
        assert [line.split()[1:4] for line in told if line.startswith("STATUS")] == [["batch=0", "/", "6"]]
    else:
        assert [line.split()[1:4] for line in told[:2]] == [["batch=0", "/", "6"], ["batch=5", "/", "6"]]
    assert [line for line in told if line.startswith("TEST")] == ["TEST FAILED" if fails else "TEST PASSED"]


def stepped(directory: str) -> dict[str, Any]:
    import_deepspeed()
    from tests.compat.snippets.model_stepper import main

    found = {}
    for stage in range(4):
        for fails in (False, True):
            said = io.StringIO()
            with redirect_stdout(said), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                code = main([
                    "--deepspeed", "--deepspeed_config", str(Path(directory) / f"stage_{stage}.json"),
                    *(["--fail"] if fails else []),
                ])  # fmt: skip
            found[f"{stage} {fails}"] = [code, said.getvalue().splitlines()]
    return found


def test_the_example_runs_in_every_stage(tmp_path: Path) -> None:
    for stage in range(4):
        config(stage, tmp_path)
    on_rank_0, on_rank_1 = run_on_ranks(stepped, 2, str(tmp_path), timeout_seconds=240)

    for stage in range(4):
        for fails in (False, True):
            code, said = on_rank_0[f"{stage} {fails}"]
            assert code == fails, said
            expect_lines(said, fails=fails)
            assert on_rank_1[f"{stage} {fails}"][0] == code


@pytest.mark.deepspeed
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    "launcher",
    [
        ["-m", "deepspeed.launcher.runner", "--num_gpus", "2"],
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    ],
    ids=["deepspeed", "torchrun"],
)
def test_the_example_runs_under_its_launcher(launcher: list[str], fails: bool, tmp_path: Path) -> None:
    script = Path(__file__).with_name("model_stepper.py")
    done = subprocess.run(
        [
            sys.executable, *launcher, f"--master_port={free_port()}", str(script),
            "--deepspeed", "--deepspeed_config", config(1, tmp_path),
            *(["--fail"] if fails else []),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip

    assert (done.returncode != 0) is fails, done.stdout + done.stderr
    expect_lines(done.stdout.splitlines(), fails=fails)
