"""What `traindiff run` says at the end: what it saw, and what it could not."""

from __future__ import annotations

from pathlib import Path

import pytest

import traindiff
from tests.run.script.running_scripts import Ended, recorded, recorded_warm
from tests.warm_process import warm
from traindiff.run.script.account import Account, SeenModel, SeenOptimizer
from traindiff.storage import open_recording

MODEL = """
import sys, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train(steps=2, call=model):
    for _ in range(steps):
        call(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""

RECORDED = ["Recorded in run: 2 steps of SGD.", "Models: Sequential, 4 parameters."]


def run(tmp_path: Path, source: str) -> Ended:
    (tmp_path / "script.py").write_text(MODEL + source)
    ended = recorded_warm("script.py", output="run", cwd=tmp_path)
    assert ended.code == 0, ended.errors
    return ended


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "with torch.no_grad():\n    model(torch.ones(3, 4))",
            "no module that holds parameters of SGD was called where gradients are enabled: "
            "models that only evaluate are not recorded.",
        ),
        (
            "import traindiff\nwith traindiff.record('own', model, optimizer):\n    train()",
            "the script records itself, in own.",
        ),
    ],
)
def test_it_says_why_nothing_was_recorded(tmp_path: Path, source: str, reason: str) -> None:
    assert run(tmp_path, source).said == [f"Nothing was recorded: {reason}"]
    assert not (tmp_path / "run").exists()


def test_what_to_ask_of_the_recording_is_named_last(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(MODEL + "train()")
    ended = recorded_warm("script.py", output="my run", cwd=tmp_path)

    assert (
        ended.named_next == "Next: traindiff check 'my run'. With another recording: traindiff compare 'my run' OTHER."
    )
    assert warm("-m", "traindiff", "check", "my run", cwd=tmp_path).returncode == 0
    (tmp_path / "script.py").write_text("")
    assert recorded_warm("script.py", output="none", cwd=tmp_path).named_next == ""


def test_a_script_without_torch_or_optimizers_is_said_to_have_none(tmp_path: Path) -> None:
    for source, reason in (
        ("", "the script did not import torch."),
        (
            "import torch",
            "traindiff finds what trains by its torch.optim.Optimizer, and the script made none. "
            "If it updates parameters by hand, let torch.optim.SGD do that.",
        ),
    ):
        (tmp_path / "script.py").write_text(source)
        assert recorded("script.py", output="run", cwd=tmp_path).said == [f"Nothing was recorded: {reason}"]


def test_what_is_trained_elsewhere_or_not_at_all_is_named(tmp_path: Path) -> None:
    source = """
loose = torch.zeros(3, requires_grad=True)
other = torch.optim.Adam([loose])
teacher = nn.Linear(2, 2)

def child():
    train(1)

if __name__ == "__main__":
    for _ in range(3):
        loose.sum().backward()
        other.step()
    train()
    import multiprocessing
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == 0
"""
    assert run(tmp_path, source).said == [
        *RECORDED,
        "Not followed: Adam with 1 parameter, 3 steps: they belong to none of the recorded models.",
        "Not recorded: Linear, 2 parameters, which no optimizer trains.",
        "Not followed: 1 process that the script started. Start ranks with torchrun ... -m traindiff run ..., "
        "so that each is recorded. In a process that is no rank, call traindiff.record(...).",
    ]


UNSEEN = (
    "Not seen: the forward pass of the first step, in which no module was called in a way that can be observed "
    "(compiled together with other code, called by its forward method, or called before its optimizer was made). The "
    "recording begins with the parameters and gradients of that step."
)


def test_a_first_forward_pass_that_was_not_seen_is_said(tmp_path: Path) -> None:
    ended = run(tmp_path, "train(3, torch.compile(lambda x: model(x).square(), backend='eager'))")

    assert ended.said == ["Recorded in run: 3 steps of SGD.", RECORDED[1], UNSEEN]


def test_a_forward_pass_before_the_optimizer_was_made_is_said_not_to_be_seen(tmp_path: Path) -> None:
    """A library may make the optimizer when it is first used."""
    source = "loss = model(torch.ones(3, 4)).sum()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    steps = "loss.backward()\noptimizer.step()\noptimizer.zero_grad()\ntrain(1)\n"
    late = MODEL.replace("optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n", "")
    (tmp_path / "script.py").write_text(f"{late}{source}{steps}")

    assert UNSEEN in recorded_warm("script.py", output="run", cwd=tmp_path).said


def test_a_model_that_is_never_called_is_recorded_from_its_first_step_on(tmp_path: Path) -> None:
    """Its steps have the numbers of the training, so they can be compared with those of a model that is called."""
    by_hand = (
        "def by_hand(x):\n"
        "    hidden = torch.relu(nn.functional.linear(x, model[0].weight, model[0].bias))\n"
        "    return nn.functional.linear(hidden, model[2].weight, model[2].bias)\n"
        "train(3, by_hand)\n"
    )
    assert run(tmp_path, by_hand).said == ["Recorded in run: 3 steps of SGD.", RECORDED[1], UNSEEN]
    (tmp_path / "run").rename(tmp_path / "by-hand")
    run(tmp_path, "train(3, model)")

    found = traindiff.compare(tmp_path / "run", tmp_path / "by-hand")

    assert (found.verdict, found.findings, found.steps) == ("incomplete", (), (0, 1, 2))
    assert {row.phase for row in found.differences} >= {"grad", "update", "loss"}


def test_parameters_before_the_first_step_are_known_where_no_module_is_called(tmp_path: Path) -> None:
    """A model may be called by its forward method, or layer by layer: what they began with tells runs apart."""
    others = "for one in model.parameters():\n    nn.init.normal_(one)\n"
    for output, begins in (("run", ""), ("other", others)):
        (tmp_path / "script.py").write_text(f"{MODEL}{begins}train(2, model.forward)")
        assert recorded_warm("script.py", output=output, cwd=tmp_path).code == 0

    found = traindiff.compare(tmp_path / "run", tmp_path / "other")

    assert (found.verdict, found.findings[0].kind) == ("misaligned", "initial-parameter")
    updates = [row.num_steps for row in found.differences if row.phase == "update"]
    assert updates == [2] * 4  # the update of the first step has both its ends


@pytest.mark.parametrize(
    "compiles", ["call = torch.compile(model, backend='eager')", "model.compile(backend='eager'); call = model"]
)
def test_a_compiled_model_is_seen_from_its_first_step(tmp_path: Path, compiles: str) -> None:
    ended = run(tmp_path, f"{compiles}\ntrain(2, call)")

    assert ended.said[0] == RECORDED[0]
    assert len(ended.said) == 2


def test_a_script_that_begins_to_record_itself_is_not_recorded_twice(tmp_path: Path) -> None:
    ended = run(tmp_path, "train()\nimport traindiff\nwith traindiff.record('own', model, optimizer):\n    train()")

    assert ended.said == [
        *RECORDED,
        "The script records itself, in own; from there on, this recording ends.",
    ]
    assert (tmp_path / "own" / "run.json").exists()


def test_modules_that_a_container_calls_one_by_one_have_its_paths(tmp_path: Path) -> None:
    source = """
class Task(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 2)])

    def loss(self, x):
        return self.head[0](self.encoder(x)).sum()

task = Task()
optimizer = torch.optim.SGD(task.parameters(), lr=0.1)
for _ in range(2):
    task.loss(torch.ones(3, 4)).backward()
    optimizer.step()
"""
    assert run(tmp_path, source).said[:2] == ["Recorded in run: 2 steps of SGD.", "Models: Task, 4 parameters."]
    seen = {
        (one.phase, one.path, one.slot)
        for one in next(iter(open_recording(str(tmp_path / "run")).steps(0))).observations
    }
    assert {
        ("batch", "encoder", "input[0]"),
        ("forward", "head.0", "input[0]"),
        ("grad", "head.0.bias", "grad"),
    } <= seen
    assert ("batch", "head.0", "input[0]") not in seen


def test_a_step_that_computes_everything_by_itself_is_seen_from_the_first(tmp_path: Path) -> None:
    source = """
class Task(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = model

task = Task()

def closure():
    optimizer.zero_grad()
    loss = task.net(torch.ones(3, 4)).square().sum()
    loss.backward()
    return loss

for _ in range(3):
    optimizer.step(closure)
"""
    ended = run(tmp_path, source)

    assert ended.said == ["Recorded in run: 3 steps of SGD.", "Models: Task, 4 parameters."]
    steps = list(open_recording(str(tmp_path / "run")).steps(0))
    assert [step.step for step in steps] == [0, 1, 2]
    for step in steps:
        seen = {(one.phase, one.path, one.slot, one.micro_step) for one in step.observations}
        assert {
            ("batch", "net", "input[0]", 0), ("loss", "loss", "backward", 0), ("grad", "net.0.weight", "grad", 0),
            ("optimizer", "optimizer.groups[0]", "lr", 0),
        } <= seen  # fmt: skip


def test_settings_that_do_not_fit_the_model_end_the_script_when_that_is_known(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(MODEL + "train()")
    ended = recorded_warm("--select", "encoder.*", "script.py", output="run", cwd=tmp_path)

    assert ended.code == 2
    assert "matches none of the model's 8 modules and parameters." in ended.errors
    assert "Traceback" not in ended.errors


def test_a_directory_that_is_taken_is_refused_before_anything_runs(tmp_path: Path) -> None:
    run(tmp_path, "train()")
    ended = recorded_warm("script.py", output="run", cwd=tmp_path)

    assert ended.code == 2
    assert "already holds a recording." in ended.errors
    assert ended.output == ""
    assert recorded_warm("--overwrite", "script.py", output="run", cwd=tmp_path).said == RECORDED


def test_modules_of_torchscript_are_said_not_to_be_seen(tmp_path: Path) -> None:
    source = """
import warnings
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    model = nn.Sequential(nn.Linear(4, 8), torch.jit.script(nn.Linear(8, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train(2, model)
"""
    said = run(tmp_path, source).said
    assert said[:2] == RECORDED
    assert "Not seen: the outputs of 1 module of Sequential: TorchScript's cannot be observed." in said


def test_a_model_of_torchscript_trains_on_and_is_said_not_to_be_recorded(tmp_path: Path) -> None:
    source = """
import warnings
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    model = torch.jit.script(model)
train(2, model)
print("trained")
"""
    ended = run(tmp_path, source)
    assert (ended.code, ended.output.splitlines()[-1]) == (0, "trained")
    assert ended.said == [
        "Nothing was recorded: the script trains a RecursiveScriptModule, which torch.jit.script has made, and in "
        "which nothing can be observed. Train the module that torch.jit.script was given."
    ]


def test_a_training_that_goes_on_with_a_new_optimizer_is_one(tmp_path: Path) -> None:
    source = "train()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.01)\ntrain(3)"

    assert run(tmp_path, source).said == ["Recorded in run: 5 steps of SGD.", *RECORDED[1:]]
    seen = [one for step in open_recording(str(tmp_path / "run")).steps(0) for one in step.observations]
    assert {(one.step, one.micro_step) for one in seen if one.phase == "loss"} == {(step, 0) for step in range(5)}


def test_a_further_optimizer_after_one_that_is_given_closures_is_followed(tmp_path: Path) -> None:
    source = """
def closure():
    optimizer.zero_grad()
    loss = model(torch.ones(3, 4)).sum()
    loss.backward()
    return loss

for lr in (0.1, 0.01):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(2):
        optimizer.step(closure)
"""
    assert run(tmp_path, source).said == ["Recorded in run: 4 steps of SGD.", *RECORDED[1:]]
    seen = [one for step in open_recording(str(tmp_path / "run")).steps(0) for one in step.observations]
    assert {(one.step, one.micro_step) for one in seen if one.phase == "loss"} == {(step, 0) for step in range(4)}


def test_variables_named_as_what_modules_have_themselves_name_no_model(tmp_path: Path) -> None:
    source = """
eval, half = model[0], model[2]
del model
for _ in range(2):
    half(eval(torch.ones(3, 4))).sum().backward()
    optimizer.step()
"""
    models = "Models: Linear: Linear, 2 parameters; Linear_1: Linear, 2 parameters."
    (tmp_path / "script.py").write_text(MODEL.replace("call=model", "call=None") + source)

    assert recorded_warm("script.py", output="run", cwd=tmp_path).said == [RECORDED[0], models]


def test_a_rank_that_was_not_asked_for_says_so(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(MODEL + "train()")

    ended = recorded_warm("--ranks", "1", "script.py", output="run", cwd=tmp_path)

    assert ended.said == ["Rank 0 was not recorded: --ranks does not name it."]


def test_a_script_that_starts_itself_again_is_said_to(tmp_path: Path) -> None:
    source = """
import subprocess
if "child" not in sys.argv:
    subprocess.run([sys.executable, *sys.argv, "child"], check=True)
    subprocess.run(["true"], check=True)
    train()
"""
    assert run(tmp_path, source).said == [
        *RECORDED,
        "Not followed: 1 process that the script started. Start ranks with torchrun ... -m traindiff run ..., "
        "so that each is recorded. In a process that is no rank, call traindiff.record(...).",
    ]


TWO = """
def trains(width):
    later = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 1))
    steps = torch.optim.Adam(later.parameters())
    for _ in range(3):
        later(torch.ones(3, 4)).sum().backward()
        steps.step()
        steps.zero_grad()

train()
trains(8)
"""


def test_a_model_that_is_trained_after_the_first_is_named_in_the_account_and_in_verdicts(tmp_path: Path) -> None:
    ended = run(tmp_path, TWO)

    sentence = "Adam with 4 parameters, 3 steps, of a model that came later (Sequential)."
    assert ended.said[:2] == RECORDED
    assert ended.said[2].startswith(f"Not followed: {sentence}")
    path = tmp_path / "run"
    assert any(note.startswith(f"Not recorded, so not checked: {sentence}") for note in traindiff.check(path).notes)
    notes = traindiff.compare(path, path).notes
    assert sum(note.startswith("Not recorded in the candidate, so not compared: Adam") for note in notes) == 1


def test_a_model_on_the_meta_device_is_not_named(tmp_path: Path) -> None:
    source = "with torch.device('meta'):\n    shapes = nn.Linear(4, 8)\ntrain()"

    assert run(tmp_path, source).said == RECORDED


def test_batch_axes_are_given_by_module(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(MODEL + "train()")
    options = ("--batch-axis", "0.*=1", "--batch-axis", "2=none", "--batch-axis", "0")

    ended = recorded_warm(*options, "script.py", output="run", cwd=tmp_path)

    assert ended.code == 0, ended.errors
    settings = open_recording(str(tmp_path / "run")).run["settings"]
    assert settings["batch_axis"] == {"0.*": 1, "2": None, "*": 0}


def test_optimizers_that_are_not_followed_are_named_up_to_a_number() -> None:
    others = [SeenOptimizer(kind="SGD", num_parameters=number, num_steps=3) for number in (2, 2, *range(2, 10))]
    account = Account(
        recording="run", models=[SeenModel(name="", kind="Linear", num_tensors=2)], optimizers=others
    )  # fmt: skip

    lines = [line for line in account.lines() if line.startswith("Not followed")]
    assert len(lines) == 6
    assert lines[0].startswith("Not followed: 3 times SGD with 2 parameters, 3 steps: they belong to none of")
    assert lines[1].startswith("Not followed: SGD with 3 parameters, 3 steps: they belong to none of")
    assert lines[-1] == "Not followed: 3 more optimizers, 9 steps, of none of the recorded models."
