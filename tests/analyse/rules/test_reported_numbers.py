"""What a run reports is held against what was recorded of it, and only what can be known is said."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import traindiff
from tests.analyse.rules.test_replay import findings
from tests.faults.models import Gpt
from tests.faults.recipe import Moment, mean_cross_entropy, recipe
from tests.made_up import Seen, Step, record
from traindiff.analyse.findings import Finding
from traindiff.core.summary import UNIT_ROUNDOFF
from traindiff.core.tap_registry import OBSERVABLE

Report = Callable[[nn.Module], dict[str, float | Tensor]]
"""Called after backward: changes gradients, and gives what is logged after the step."""


def squares(model: nn.Module, leave_out: Callable[[str], bool] = lambda path: False) -> float:
    gradients = ((path, p.grad) for path, p in model.named_parameters() if p.grad is not None)
    return sum(float(gradient.double().square().sum()) for path, gradient in gradients if not leave_out(path))


def train(path: Path, report: Report, *, model: str = "gpt", steps: int = 3, **settings: Any) -> list[Finding]:
    """Train, log what `report` gives, and judge the run by itself."""
    chosen = recipe(model)
    torch.manual_seed(0)
    net = chosen.build()
    optimizer = chosen.optimizer(net)
    data = torch.Generator().manual_seed(7)
    with traindiff.record(path, net, optimizer, strict=True, **settings) as run:
        for _ in range(steps):
            inputs, labels = chosen.batch(data)
            mean_cross_entropy(net(inputs), labels).backward()
            logged = report(net)
            optimizer.step()
            optimizer.zero_grad()
            for name, value in logged.items():
                run.log(name, value)
    return findings(path)


def clipped(max_norm: float) -> Report:
    return lambda model: {"grad_norm": nn.utils.clip_grad_norm_(model.parameters(), max_norm)}


LEGAL: dict[str, Report] = {
    "not clipped": clipped(1e9),
    "before clipping": clipped(0.25),
    "before clipping, to no round number": clipped(0.3339517),
    "after clipping": lambda model: clipped(0.25)(model) and {"train/grad_norm": sqrt(squares(model))},
    "largest element": lambda model: {
        "grad_norm": nn.utils.clip_grad_norm_(model.parameters(), 1e9, norm_type=float("inf"))
    },
    "sum": lambda model: {"grad_norm": nn.utils.clip_grad_norm_(model.parameters(), 1e9, norm_type=1.0)},
    "by value": lambda model: nn.utils.clip_grad_value_(model.parameters(), 1e-3) or {"total_norm": 0.4},
    "smoothed": lambda model: {"gradient_norm": 0.9 + 0.1 * sqrt(squares(model))},
    "coefficient": lambda model: {
        "grad_norm": (norm := float(nn.utils.clip_grad_norm_(model.parameters(), 0.25))),
        "clip_coef": min(1.0, 0.25 / (norm + 1e-6)),
    },
    "scale without use": lambda model: {"loss_scale": 65536.0},
    "something else": lambda model: {"layer_norm_scale": 3.0, "norm": 0.5, "clip": 1.0},
}


@pytest.mark.parametrize("micro", [False, True])
@pytest.mark.parametrize("name", LEGAL)
def test_what_is_legal_gives_no_finding(name: str, micro: bool, tmp_path: Path) -> None:
    settings = {"observe": ["loss", "grad", "grad.micro"]} if micro else {}

    assert train(tmp_path / "run", LEGAL[name], **settings) == []


def leaves_out(condition: Callable[[str], bool]) -> Report:
    return lambda model: {"grad_norm": sqrt(squares(model, condition))}


REPORTED: dict[str, tuple[Report, str]] = {
    "one parameter": (leaves_out(lambda path: path == "wte.weight"), "leaves out wte.weight:"),
    "biases and norms": (
        leaves_out(lambda path: path.endswith("bias") or "ln" in path),
        "leaves out all parameters with one axis (biases, norms):",
    ),
    "one block": (leaves_out(lambda path: path.startswith("h.1.")), "leaves out all of h.1.*:"),
    "one twice": (
        lambda model: {"grad_norm": sqrt(squares(model) + squares(model, lambda path: path != "head.weight"))},
        "counts head.weight twice:",
    ),
    "scaled": (lambda model: {"grad_norm": 1024.0 * sqrt(squares(model))}, "is 1024 x that of the gradients"),
}


@pytest.mark.parametrize("name", REPORTED)
def test_a_norm_that_is_not_that_of_all_gradients_is_found(name: str, tmp_path: Path) -> None:
    report, message = REPORTED[name]

    found = train(tmp_path / "run", report)

    assert {(one.kind, one.path, one.phase) for one in found} == {("reported-norm", "grad_norm", "loss")}
    assert message in found[0].message
    assert found[0].step == 1  # once may be chance


def test_nothing_is_said_of_a_norm_where_not_all_gradients_are_recorded(tmp_path: Path) -> None:
    assert train(tmp_path / "run", REPORTED["one parameter"][0], select="h.*") == []


def coefficient(times: int) -> Report:
    def report(model: nn.Module) -> dict[str, float | Tensor]:
        norm = sqrt(squares(model))
        factor = 0.25 / norm
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad *= factor**times
        return {"grad_norm": norm, "clip_coef": factor}

    return report


@pytest.mark.parametrize(("times", "how"), [(0, "are not clipped"), (2, "are clipped twice")])
def test_a_clip_coefficient_that_the_gradients_do_not_show_is_found(times: int, how: str, tmp_path: Path) -> None:
    found = train(tmp_path / "run", coefficient(times), observe=["loss", "grad", "grad.micro"])

    assert {(one.kind, one.path) for one in found} == {("clip-coefficient", "clip_coef")}
    assert how in found[0].message
    assert train(tmp_path / "right", coefficient(1), observe=["loss", "grad", "grad.micro"]) == []


@pytest.mark.parametrize("off", [0.0, 3.0])
def test_a_reported_norm_that_is_twice_the_recorded_one_does_not_tell_a_run_from_itself(
    off: float, tmp_path: Path
) -> None:
    def edit(_step: int, sites: Step) -> None:
        whole = sum(
            float(np.square(seen.values, dtype="float64").sum()) for site, seen in sites.items() if site[0] == "grad"
        )
        tolerance = 64.0 * UNIT_ROUNDOFF["float32"]
        sites["loss", "", "grad_norm", "logged"] = Seen(values=np.array(sqrt(whole) * 2.0 ** (1.0 + off * tolerance)))

    run = record(tmp_path / "run", edit)
    comparison = traindiff.compare(run, run)

    assert [one.kind for one in findings(run)] == ["reported-norm"] * 2
    assert comparison.verdict == "identical"
    assert any(note.startswith("In both runs: the reported gradient norm") for note in comparison.notes)


def test_gradients_divided_twice_by_the_loss_scale_are_found(tmp_path: Path) -> None:
    def report(model: nn.Module) -> dict[str, float | Tensor]:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= 1024.0**2
        return {"loss_scale": 1024.0}

    found = train(tmp_path / "run", report, observe=["loss", "grad", "grad.micro"])

    assert {(one.kind, one.path) for one in found} == {("loss-scale", "loss_scale")}
    assert "divided by the loss scale 1024 twice" in found[0].message


def lose_head(now: Moment) -> None:
    """As if the head's weight were detached: only tokens of the batch get a gradient."""
    assert isinstance(now.model, Gpt)
    gradient = now.model.wte.weight.grad
    assert gradient is not None
    seen = torch.zeros(len(gradient), dtype=torch.bool)
    seen[now.inputs.flatten()] = True
    gradient[~seen] = 0.0


def test_a_tied_gradient_without_the_head_is_found(tmp_path: Path) -> None:
    tied = recipe("gpt").but(steps=2, build=lambda: Gpt(tied=True))

    assert findings(tied.run(tmp_path / "right")) == []
    found = findings(tied.but(after_backward=lose_head).run(tmp_path / "wrong"))
    assert {(one.kind, one.path, one.phase) for one in found} == {("tied-gradient", "wte.weight", "grad")}
    assert "which is also head.weight, lacks what head contributes" in found[0].message


@pytest.mark.parametrize("model", ["gpt", "conv", "lstm", "mlp"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_correct_trainings_contradict_nothing(model: str, optimizer: str, tmp_path: Path) -> None:
    training = recipe(model, optimizer).but(steps=3, clip=0.5)

    assert findings(training.run(tmp_path / "run", observe=OBSERVABLE)) == []
