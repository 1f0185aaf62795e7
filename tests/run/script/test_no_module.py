"""`traindiff run` follows a training whose tensors are of no module."""

from __future__ import annotations

from pathlib import Path

import pytest

import traindiff
from tests.run.script.running_scripts import recorded_warm
from traindiff.storage import open_recording

TENSORS = """
import sys, torch
torch.manual_seed(0)
weight, scale = torch.randn(8, 3, requires_grad=True), torch.ones(3, requires_grad=True)
inputs = torch.randn(16, 8)
optimizers = {
    "one": lambda: [torch.optim.Adam([weight, scale], lr=float(sys.argv[1]))],
    "two": lambda: [torch.optim.SGD([weight], lr=0.1), torch.optim.Adam([scale], lr=float(sys.argv[1]))],
    "closure": lambda: [torch.optim.LBFGS([weight, scale], lr=float(sys.argv[1]), max_iter=3)],
}[sys.argv[2]]()

def loss():
    for optimizer in optimizers:
        optimizer.zero_grad()
    found = ((inputs @ weight).tanh() * scale - inputs[:, :3]).square().mean()
    found.backward()
    return found

for _ in range(4):
    if sys.argv[2] == "closure":
        optimizers[0].step(loss)
    else:
        loss()
        for optimizer in optimizers:
            optimizer.step()
"""

NOT_SEEN = (
    "Not followed: activations and their gradients, because the optimizer's tensors are of no torch.nn.Module. The "
    "recording begins with the gradients of the first step."
)


def run(tmp_path: Path, name: str, *arguments: str) -> list[str]:
    (tmp_path / "script.py").write_text(TENSORS)
    ended = recorded_warm("script.py", *arguments, output=name, cwd=tmp_path)
    assert ended.code == 0, ended.errors
    return ended.said


@pytest.mark.parametrize(
    ("kind", "steps", "held"),
    [
        ("one", "4 steps of Adam", ["optimizer.groups[0].params[0]", "optimizer.groups[0].params[1]"]),
        (
            "two",
            "4 steps of SGD (optimizer), 4 steps of Adam (optimizer[1])",
            ["optimizer.groups[0].params[0]", "optimizer[1].groups[0].params[0]"],
        ),
        ("closure", "4 steps of LBFGS", ["optimizer.groups[0].params[0]", "optimizer.groups[0].params[1]"]),
    ],
)
def test_tensors_of_no_module_are_recorded_and_compared(tmp_path: Path, kind: str, steps: str, held: list[str]) -> None:
    assert run(tmp_path, "baseline", "0.1", kind) == [f"Recorded in baseline: {steps}.", NOT_SEEN]
    run(tmp_path, "again", "0.1", kind)
    run(tmp_path, "candidate", "0.2", kind)

    assert [*open_recording(str(tmp_path / "baseline")).rank_content(0)["parameters"]] == held
    assert traindiff.check(tmp_path / "baseline").verdict == "healthy"
    assert traindiff.compare(tmp_path / "baseline", tmp_path / "again").verdict == "identical"
    first = traindiff.compare(tmp_path / "baseline", tmp_path / "candidate").first_divergence
    assert first is not None
    assert first.message.startswith("lr is 0.1 in the baseline and 0.2 in the candidate")


def test_check_says_what_it_has_not_seen(tmp_path: Path) -> None:
    run(tmp_path, "run", "0.1", "one")

    assert NOT_SEEN.removeprefix("Not followed: ") in str(traindiff.check(tmp_path / "run"))


MODEL = """
model = torch.nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
"""


def test_a_model_that_is_trained_afterwards_is_recorded_instead(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TENSORS + MODEL)
    ended = recorded_warm("script.py", "0.1", "one", output="run", cwd=tmp_path)

    assert ended.code == 0, ended.errors
    assert ended.said == [
        "Recorded in run: 3 steps of SGD.",
        "Models: Linear, 2 parameters.",
        "Not followed: Adam with 2 parameters, 4 steps: they belong to none of the recorded models.",
    ]
    assert {*open_recording(str(tmp_path / "run")).rank_content(0)["parameters"]} == {"weight", "bias"}
    assert traindiff.check(tmp_path / "run").verdict == "healthy"
