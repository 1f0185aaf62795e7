"""The pytest plugin: golden recordings are made on request, compared ever after, and named where a training parts."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.warm_process import warm

pytest_plugins = ["pytester"]

TRAINING = """
import torch
import traindiff
from torch import nn

EPSILON = {epsilon}
LEARNING_RATE = {learning_rate}

def recipe():
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8, eps=EPSILON), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    def step(batch):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()
    return traindiff.Training(model=model, optimizer=optimizer, batches=torch.randn(8, 5, 4), step=step)

def train(training):
    for batch in training.batches[:3]:
        training.step(batch)
"""

TESTS = """
import pytest
import torch

def test_loop(traindiff_golden):
    from training import recipe, train
    torch.manual_seed(0)
    training = recipe()
    with traindiff_golden.record(training.model, training.optimizer):
        train(training)

class TestRecipe:
    @pytest.mark.parametrize("seed", [0, 1])
    def test_recipe(self, traindiff_golden, seed):
        from training import recipe
        traindiff_golden.recipe(recipe, steps=2, seed=seed, replicas=("ulp:1",))
"""


class Project:
    """A user's project whose tests have golden recordings."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self.pytester = pytester
        self.golden = pytester.path / "golden-recordings" / "test_training"
        pytester.makepyfile(test_training=TESTS)
        pytester.makeini("[pytest]\npythonpath = .")
        self.write()

    def write(self, *, epsilon: float = 1e-5, learning_rate: float = 0.1) -> None:
        source = TRAINING.format(epsilon=epsilon, learning_rate=learning_rate)
        (self.pytester.path / "training.py").write_text(source)

    def run(self, *options: str) -> pytest.RunResult:
        began = time.monotonic()
        ended = warm("-m", "pytest", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", *options, timeout=120)
        lines = (ended.stdout.splitlines(), ended.stderr.splitlines())
        return pytest.RunResult(ended.returncode, *lines, time.monotonic() - began)

    def files(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in self.golden.rglob("*") if path.is_file()}


@pytest.fixture
def project(pytester: pytest.Pytester) -> Project:
    return Project(pytester)


def test_golden_recordings_are_made_on_request_and_agree_ever_after(project: Project) -> None:
    without = project.run("-k", "test_loop")
    without.assert_outcomes(failed=1)
    without.stdout.fnmatch_lines(["*holds no golden recording of this training. Make it: pytest --traindiff-update"])
    assert not project.golden.exists()

    made = project.run("--traindiff-update")
    made.assert_outcomes(passed=3)
    made.stdout.fnmatch_lines(["*golden recordings*", *(3 * ["written: *"])])
    names = sorted(path.name for path in project.golden.iterdir())
    assert names == ["TestRecipe.test_recipe%5b0%5d", "TestRecipe.test_recipe%5b1%5d", "test_loop"]
    noise = project.golden / names[0] / "recipe"
    assert sorted(path.name for path in noise.iterdir()) == ["baseline", "repeated", "ulp-1"]

    project.run().assert_outcomes(passed=3)


def test_a_training_that_parts_fails_and_is_named(project: Project) -> None:
    project.run("--traindiff-update", "-n", "2", "-k", "test_loop or 0").assert_outcomes(passed=2)
    before = project.files()
    project.write(epsilon=1e-2)

    changed = project.run("-k", "test_loop or 0", "--traindiff-reports", "reports")

    changed.assert_outcomes(failed=2, deselected=1)
    changed.stdout.fnmatch_lines(["FAILED *test_loop - AssertionError: diverged: step 0, *"])
    changed.stdout.fnmatch_lines(["*report:    *reports/test_loop-training.html"])
    written = sorted((project.pytester.path / "reports").iterdir())
    assert [path.name for path in written] == ["TestRecipe.test_recipe%5b0%5d-recipe.html", "test_loop-training.html"]
    assert all("1 output[0]" in path.read_text() for path in written)
    changed.stdout.fnmatch_lines(["*First divergence: step 0, micro-step 0, forward, 1 output[[]0[]]*"])
    changed.stdout.fnmatch_lines(["*If the change is meant, keep what the training computes now: *"])
    changed.stdout.no_fnmatch_line("*golden.py*")  # the traceback ends in the user's own test
    assert project.files() == before


def test_an_update_replaces_what_has_changed_and_only_that(project: Project) -> None:
    project.run("--traindiff-update", "-k", "test_loop or 0").assert_outcomes(passed=2, deselected=1)
    before = project.files()

    unchanged = project.run("--traindiff-update", "-k", "test_loop or 0")

    unchanged.stdout.fnmatch_lines(["unchanged: 2"])
    unchanged.stdout.no_fnmatch_line("written: *")
    assert project.files() == before

    project.write(learning_rate=0.2)
    project.run("--traindiff-update", "-k", "test_loop").stdout.fnmatch_lines(["written: *test_loop*"])

    project.run("-k", "test_loop or 0").assert_outcomes(passed=1, failed=1, deselected=1)


def test_a_training_that_raises_leaves_what_is_kept(project: Project) -> None:
    project.run("--traindiff-update", "-k", "test_loop")
    before = project.files()
    with (project.pytester.path / "training.py").open("a") as file:
        file.write("\ndef train(training):\n    raise RuntimeError('out of luck')\n")

    failed = project.run("--traindiff-update", "-k", "test_loop")

    failed.assert_outcomes(failed=1, deselected=2)
    failed.stdout.fnmatch_lines(["*RuntimeError: out of luck"])
    assert project.files() == before


def test_a_name_is_used_once_in_a_test(project: Project) -> None:
    twice = TESTS.split("class")[0] + "    with traindiff_golden.record(training.model):\n        train(training)\n"
    project.pytester.makepyfile(test_training=twice)

    project.run("--traindiff-update").stdout.fnmatch_lines(["*name='training'*", "*is used twice in this test*"])


def test_the_plugin_brings_no_torch_into_tests_that_do_not_use_it(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_nothing():\n    import sys\n    assert 'torch' not in sys.modules\n")

    pytester.runpytest_subprocess().assert_outcomes(passed=1)
