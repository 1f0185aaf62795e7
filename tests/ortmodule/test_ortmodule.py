"""A training under ORTModule beside the same one under PyTorch, in an environment of its own: `make test-ortmodule`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

import traindiff
from tests.ortmodule.training import STEPS
from traindiff.compat.onnxruntime.merge_activation_summary import main as merge
from traindiff.storage import open_recording

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("TRAINDIFF_ORTMODULE_PYTHON", ROOT / ".venv-ortmodule" / "bin" / "python-with-torch"))
READY = PYTHON.parents[1] / "ready"

pytestmark = pytest.mark.skipif(
    not READY.exists(),
    reason=f"{READY} is not there: make test-ortmodule makes ORTModule's environment, or says why not",
)


def run(code: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [str(PYTHON), *code], env=environment, capture_output=True, text=True, timeout=600, check=False
    )


def train(directory: Path, *choices: str) -> list[float]:
    result = run(["-m", "tests.ortmodule.training", str(directory), *choices])
    assert result.returncode == 0, result.stderr
    losses: list[float] = json.loads(result.stdout.strip().splitlines()[-1])
    return losses


@pytest.fixture(scope="module")
def pytorch(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """Directory and losses of the training under PyTorch."""
    directory = tmp_path_factory.mktemp("runs") / "pytorch"
    return directory, train(directory, "pytorch")


@pytest.fixture(scope="module")
def ortmodule(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """Directory and losses of the training under ORTModule."""
    directory = tmp_path_factory.mktemp("runs") / "ortmodule"
    return directory, train(directory, "ortmodule")


Run = tuple[Path, list[float]]


def test_ortmodule_and_pytorch_train_alike_and_their_recordings_are_equivalent(pytorch: Run, ortmodule: Run) -> None:
    comparison = traindiff.compare(pytorch[0] / "recording", ortmodule[0] / "recording")

    assert pytorch[1] == pytest.approx(ortmodule[1], rel=1e-5)
    assert comparison.verdict == "equivalent", str(comparison)
    assert comparison.steps == tuple(range(STEPS))
    assert comparison.unaligned == ((), ())


def test_every_activation_inside_the_exported_graph_is_recorded_under_the_models_own_names(ortmodule: Run) -> None:
    for step in open_recording(ortmodule[0] / "recording").steps(0):
        seen = [(one.phase, one.path, one.call) for one in step.observations]
        paths = {path for _, path, _ in seen}
        assert len(seen) == len(set(seen))
        assert paths == {
            "", "blocks.0", "blocks.0.norm", "blocks.0.up", "blocks.0.down", "blocks.1", "blocks.1.norm", "blocks.1.up",
            "blocks.1.down", "head", "hidden",
        }  # fmt: skip
        assert seen.count(("forward", "hidden", 1)) == seen.count(("backward", "hidden", 1)) == 1
        assert [phase for phase, _, _ in seen] == ["forward"] * 12 + ["backward"] * 12


def test_a_fault_in_the_model_under_ortmodule_is_found_where_it_is(pytorch: Run, tmp_path: Path) -> None:
    train(tmp_path / "fault", "ortmodule", "fault")

    first = traindiff.compare(pytorch[0] / "recording", tmp_path / "fault" / "recording").first_divergence

    assert first is not None
    assert (first.step, first.phase, first.path, first.call) == (0, "forward", "hidden", 1)
    assert "1.05" in first.message


def test_a_model_may_be_subscribed_before_it_is_wrapped(ortmodule: Run, tmp_path: Path) -> None:
    assert train(tmp_path / "before", "ortmodule", "before") == ortmodule[1]

    assert traindiff.compare(ortmodule[0] / "recording", tmp_path / "before" / "recording").verdict == "identical"


def test_the_files_of_both_runs_are_merged_step_by_step(pytorch: Run, ortmodule: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["--pt_dir", str(pytorch[0]), "--ort_dir", str(ortmodule[0]), "--output_dir", str(out)]

    assert merge(arguments) == 0
    for step in range(STEPS):
        one, other = (out / side / f"step_{step}_.txt" for side in ("merge_pt", "merge_ort"))
        names = [[line for line in path.read_text().splitlines() if " run shape: " in line] for path in (one, other)]
        assert names[0] == names[1]
        assert len(names[0]) == 24


def test_recording_says_which_torch_it_needs_and_what_works_with_this_one() -> None:
    result = run(["-c", "import traindiff; traindiff.record"])

    assert result.returncode == 1
    assert "needs torch 2.4 or later to observe with; this is torch 1.13" in result.stderr
    assert "traindiff.compat.onnxruntime.StatisticsSubscriber" in result.stderr
