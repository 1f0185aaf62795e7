"""What keeps a setup from running on this machine is said before anything is started, all of it at once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from traindiff.run.config import obstacles
from traindiff.run.config import obstacles as build_tools
from traindiff.run.config.obstacles import obstacles as obstacles_of
from traindiff.run.config.setup import Setup


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Has no GPU, a compiler, DeepSpeed, and nothing built."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(obstacles, "find_spec", lambda name: object())
    monkeypatch.setattr(build_tools, "missing_tools", list)
    monkeypatch.setattr(build_tools, "compiler_runs", lambda: False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return tmp_path


def said(**settings: Any) -> list[str]:
    return [f"{problem.where} {problem.what}" for problem in obstacles_of(Setup(**settings))]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dtype": "float16", "optimizer": "engine", "compile": True},
        {"engine": "ddp"},
        {"engine": "ddp", "nproc": 4, "dtype": "bfloat16", "gradient_accumulation_steps": 4},
        {"engine": "fsdp2", "nproc": 2, "dtype": "float16", "gradient_clipping": 1.0},
        {"engine": "pp", "nproc": 4},
        {"engine": "deepspeed", "nproc": 2, "zero_stage": 3, "offload_device": "cpu"},
        {"engine": "deepspeed", "optimizer": "engine"},
    ],
)
def test_what_can_be_run_has_no_obstacles(settings: dict[str, Any]) -> None:
    assert said(**settings) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": "fsdp3"}, 'engine=fsdp3 "fsdp3" is not a choice of engine.'),
        ({"dtype": "half"}, 'dtype=half "half" is not a choice of dtype.'),
        ({"nproc": 0}, "nproc=0 must be a whole number, at least 1."),
        ({"engine": "deepspeed", "zero_stage": 4}, "zero_stage=4 is no stage of ZeRO."),
        ({"gradient_clipping": -1.0}, "gradient_clipping=-1 is below 0."),
        ({"nproc": 2}, "engine=plain, nproc=2 is PyTorch on one process, with nothing for further ranks."),
        ({"engine": "tp"}, "engine=tp, nproc=1 divides the model among at least 2 ranks."),
        (
            {"engine": "pp", "nproc": 2, "gradient_accumulation_steps": 2},
            "engine=pp, gradient_accumulation_steps=2 would accumulate twice",
        ),
        ({"engine": "pp", "nproc": 2, "dtype": "float16"}, "engine=pp, dtype=float16, loss_scale=None needs"),
        ({"engine": "fsdp2", "nproc": 2, "precision": "master"}, "engine=fsdp2, precision=master is a way to"),
        ({"zero_stage": 1}, "engine=plain, zero_stage=1 is something that only DeepSpeed does."),
        ({"engine": "fsdp2", "offload_device": "cpu"}, "engine=fsdp2, offload_device=cpu is something that only"),
        (
            {"engine": "deepspeed", "zero_stage": 2, "offload_device": "nvme"},
            "zero_stage=2, offload_device=nvme is accepted and ignored by DeepSpeed",
        ),
        (
            {"engine": "deepspeed", "offload_device": "cpu"},
            "zero_stage=0, offload_device=cpu is accepted and ignored by DeepSpeed",
        ),
        ({"engine": "deepspeed", "dtype": "float16"}, "engine=deepspeed, dtype=float16 is refused by"),
        ({"engine": "deepspeed", "loss_scale": 8.0}, "engine=deepspeed, dtype=float32, loss_scale=8 is ignored"),
        ({"engine": "deepspeed", "deepcompile": True}, "deepcompile=True runs on GPUs only"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_said(settings: dict[str, Any], message: str) -> None:
    assert [found for found in said(**settings) if found.startswith(message)]


def test_everything_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(obstacles, "find_spec", lambda name: None)
    monkeypatch.setattr(build_tools, "has_header", lambda name: False)
    monkeypatch.setattr(build_tools, "has_cuda_header", lambda: False)
    monkeypatch.setattr(build_tools, "missing_tools", lambda: ["c++", "ninja"])

    found = said(
        engine="deepspeed", zero_stage=3, offload_device="nvme", dtype="float16", deepcompile=True, optimizer="engine"
    )

    assert [one.partition(" ")[0] for one in found] == [
        "engine=deepspeed,", "engine=deepspeed", "deepcompile=True", "deepcompile=True", "offload_device=nvme",
        "DeepSpeed's", "DeepSpeed's",
    ]  # fmt: skip
    assert [one for one in found if one.startswith("DeepSpeed's cpu_adam") and one.endswith("not found: c++, ninja.")]


def test_an_extension_that_is_built_needs_no_compiler(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_tools, "missing_tools", lambda: ["c++"])
    assert said(engine="deepspeed", optimizer="engine")

    (machine / "fused_adam").mkdir()
    (machine / "fused_adam" / "fused_adam.so").touch()

    assert said(engine="deepspeed", optimizer="engine") == []


def lock(machine: Path, *, age_seconds: float) -> Path:
    path = machine / "fused_adam" / "lock"
    path.parent.mkdir()
    path.touch()
    then = time.time() - age_seconds
    os.utime(path, (then, then))
    return path


def test_a_lock_that_a_killed_build_left_is_named_with_its_age_and_what_removes_it(machine: Path) -> None:
    path = lock(machine, age_seconds=3 * 3600 + 60)

    (problem,) = obstacles_of(Setup(engine="deepspeed", optimizer="engine"))

    assert problem.where == "DeepSpeed's fused_adam"
    assert problem.what.startswith(f"has been locked for 3 hours by {path}, and no compiler is running")
    assert problem.fix == f"Remove {path} and run again."


def test_a_lock_of_a_build_that_has_just_begun_or_runs_is_left_alone(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = lock(machine, age_seconds=5)
    assert said(engine="deepspeed", optimizer="engine") == []

    os.utime(path, (0, 0))
    monkeypatch.setattr(build_tools, "compiler_runs", lambda: True)

    assert said(engine="deepspeed", optimizer="engine") == []


def test_a_lock_that_a_process_has_open_is_left_alone_however_old_it_is(machine: Path) -> None:
    path = lock(machine, age_seconds=3600)

    with path.open():
        assert said(engine="deepspeed", optimizer="engine") == []

    assert said(engine="deepspeed", optimizer="engine") != []


def test_a_lock_of_an_extension_that_is_not_needed_is_left_alone(machine: Path) -> None:
    lock(machine, age_seconds=3600)

    assert said(engine="deepspeed", zero_stage=1) == []


@pytest.mark.parametrize(
    ("seconds", "age"), [(45, "45 seconds"), (61, "1 minute"), (7200, "2 hours"), (90000, "1 day")]
)
def test_the_age_of_a_lock_is_told_in_its_largest_unit(seconds: float, age: str) -> None:
    assert build_tools.StaleLock(path=Path("lock"), age_seconds=seconds).age == age


@pytest.mark.parametrize(
    ("command", "runs"), [("cc1plus", True), ("g++-12", True), ("ninja", True), ("python3", False)]
)
def test_a_compiler_is_seen_among_the_processes(
    command: str, runs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    (tmp_path / "17").mkdir()
    (tmp_path / "17" / "comm").write_text(f"{command}\n")

    assert build_tools.compiler_runs(tmp_path) is runs


def test_headers_are_looked_for_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not build_tools.has_header("libaio-made-up.h")
    (tmp_path / "libaio-made-up.h").touch()

    monkeypatch.setenv("CFLAGS", f"-O2 -I{tmp_path}")

    assert build_tools.has_header("libaio-made-up.h")


def test_finding_obstacles_does_not_import_deepspeed() -> None:
    code = (
        "import sys; from traindiff.run.config.obstacles import obstacles; "
        "from traindiff.run.config.setup import Setup; "
        "obstacles(Setup(engine='deepspeed', zero_stage=3, optimizer='engine')); sys.exit('deepspeed' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0
