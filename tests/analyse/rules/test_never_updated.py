"""Parameters that should move and never do are found; those that rightly rest are not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import traindiff
from tests.faulty_step import at_end_of_step
from traindiff.analyse.check import Verdict
from traindiff.analyse.findings import Finding

Chosen = Callable[[nn.Module], Iterable[nn.Parameter]]


class Net(nn.Module):
    """Two layers around a batch normalization, whose mean takes any bias before it away."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.second(torch.relu(self.norm(self.first(x))))
        return hidden


WITHOUT_REPLAY = ("param", "grad", "optimizer")


def checked(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: int = 3,
    before_step: Callable[[], None] = lambda: None, **settings: Any,
) -> Verdict:  # fmt: skip
    """Train on batches of noise, and check the run."""
    with traindiff.record(path, model, optimizer, strict=True, **settings):
        for _ in range(steps):
            before_step()
            model.zero_grad()
            model(torch.randn(16, 6)).square().mean().backward()
            optimizer.step()
    return traindiff.check(path)


def train(
    path: Path, *, chosen: Chosen = lambda model: model.parameters(), rates: Iterable[float] = (0.1, 0.1, 0.1),
    prepare: Callable[[nn.Module], None] = lambda model: None, dtype: torch.dtype = torch.float32,
) -> tuple[Finding, ...]:  # fmt: skip
    """Train with these learning rates, and check the run."""
    torch.manual_seed(0)
    model = Net().to(dtype)
    prepare(model)
    optimizer = torch.optim.SGD(chosen(model), lr=1.0)
    data = torch.randn(16, 6, dtype=dtype)
    with traindiff.record(path, model, optimizer, observe=WITHOUT_REPLAY, strict=True):
        for rate in rates:
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()
    return traindiff.check(path).findings


def without(name: str) -> Chosen:
    return lambda model: [one for path, one in model.named_parameters() if path != name]


def test_a_parameter_that_no_optimizer_holds_is_found(tmp_path: Path) -> None:
    (finding,) = train(tmp_path / "run", chosen=without("second.weight"))

    assert (finding.kind, finding.phase, finding.path, finding.step) == ("never-updated", "param", "second.weight", 0)
    assert finding.message == (
        "No recorded optimizer holds second.weight, although it requires a gradient: at least 2 steps leave it as "
        "it was. If that is meant, set requires_grad=False."
    )
    assert finding.evidence == {"num_steps": 2}  # it was last seen before the third


class Forgetful(torch.optim.SGD):
    """Leaves out the weights of the second layer, whatever their gradients."""

    left_out: nn.Parameter

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        held = self.left_out.clone()
        super().step(closure)
        self.left_out.copy_(held)


def test_a_parameter_that_its_optimizer_leaves_out_is_found(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = Forgetful(model.parameters(), lr=0.1)
    optimizer.left_out = model.second.weight
    verdict = checked(tmp_path / "run", model, optimizer, observe=WITHOUT_REPLAY)

    (finding,) = verdict.findings

    assert finding.message == "second.weight gets gradients that should move it in 3 steps, and never changes."


def test_what_the_optimizer_replay_has_said_is_not_said_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = Forgetful(model.parameters(), lr=0.1)
    optimizer.left_out = model.second.weight
    verdict = checked(tmp_path / "run", model, optimizer)

    (finding,) = verdict.findings

    assert (finding.kind, finding.phase, finding.path) == ("never-updated", "update", "second.weight")


def test_what_is_never_updated_for_other_reasons_is_not_said_to_be_the_same(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = Forgetful(without("first.weight")(model), lr=0.1)
    optimizer.left_out = model.second.weight
    verdict = checked(tmp_path / "run", model, optimizer, steps=5, observe=WITHOUT_REPLAY)

    message = str(verdict)

    assert "No recorded optimizer holds first.weight" in message
    assert "second.weight gets gradients that should move it in 5 steps" in message
    assert "The same holds" not in message


def test_what_never_changed_stands_at_its_step_among_the_findings(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(without("second.weight")(model), lr=0.1)
    steps = iter(range(3))
    at_end_of_step(optimizer, lambda _: next(steps) == 2 and model.first.weight.data.mul_(1.1))
    verdict = checked(tmp_path / "run", model, optimizer)

    first, *rest = verdict.findings

    assert (first.kind, first.step) == ("never-updated", 0)
    assert {(one.kind, one.step) for one in rest} == {("update-rule", 2)}


LEGAL: dict[str, dict[str, object]] = {
    "it trains": {},
    "frozen": {"prepare": lambda model: model.second.weight.requires_grad_(False)},
    "one step": {"chosen": without("second.weight"), "rates": [0.1]},
    "warm-up from nothing": {"rates": [0.0, 0.0, 0.1]},
    "learning rate of nothing": {"rates": [0.0, 0.0, 0.0]},
    "a gradient that is mathematically zero": {"rates": [1e-7, 1e-7, 1e-7]},
    "updates that a short dtype loses": {"rates": [1e-6, 1e-6, 1e-6], "dtype": torch.bfloat16},
}


@pytest.mark.parametrize("name", LEGAL)
def test_a_parameter_that_rightly_rests_is_not_found(name: str, tmp_path: Path) -> None:
    assert train(tmp_path / "run", **LEGAL[name]) == ()  # type: ignore[arg-type]


def test_a_parameter_that_moves_at_last_is_not_found(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = Forgetful(model.parameters(), lr=0.1)
    left_out = iter([model.second.weight, model.second.weight, model.second.weight, model.first.bias])

    def choose() -> None:
        optimizer.left_out = next(left_out)

    verdict = checked(tmp_path / "run", model, optimizer, steps=4, before_step=choose, observe=WITHOUT_REPLAY)

    assert verdict.verdict == "healthy"


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_group_that_rests_at_a_learning_rate_of_0_is_not_found(
    kind: type[torch.optim.Optimizer], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = Net()
    groups = [{"params": list(model.first.parameters()), "lr": 0.0}, {"params": list(model.second.parameters())}]
    optimizer = kind([*groups, {"params": list(model.norm.parameters())}], lr=0.1)  # type: ignore[call-arg]
    verdict = checked(tmp_path / "run", model, optimizer)

    assert verdict.verdict == "healthy"


def test_steps_that_a_fused_optimizer_leaves_out_for_a_loss_scaler_are_not_found(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu")
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(16, 6)).square().mean()).backward()
            model.first.weight.grad[0, 0] = torch.inf
            scaler.step(optimizer)
            scaler.update()

    assert traindiff.check(tmp_path / "run").verdict == "healthy"


def test_large_gradients_of_which_adam_makes_updates_below_rounding_are_not_found(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with traindiff.record(tmp_path / "run", model, optimizer, observe=WITHOUT_REPLAY, strict=True):
        for _ in range(3):
            optimizer.zero_grad()
            (1e3 * model(torch.randn(512, 6, dtype=torch.bfloat16)).square().sum()).backward()
            optimizer.step()

    assert traindiff.check(tmp_path / "run").verdict == "healthy"  # the weight of the LayerNorm is 1, and stays 1


def test_a_head_that_is_trained_alone_leaves_a_note_and_no_finding(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Net(), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    verdict = checked(tmp_path / "run", model, optimizer)

    assert verdict.verdict == "healthy"
    assert verdict.notes == (
        "No recorded optimizer holds 6 parameters that require a gradient, among them 0.first.bias, and they never "
        "change. If that is meant, requires_grad=False saves computing their gradients.",
    )


def test_a_forgotten_parameter_is_found_beside_a_group_that_rests(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    resting = {"params": list(model.first.parameters()), "lr": 0.0}
    optimizer = torch.optim.SGD([resting, {"params": [*model.norm.parameters(), model.second.bias]}], lr=0.1)
    verdict = checked(tmp_path / "run", model, optimizer)

    assert [finding.path for finding in verdict.findings] == ["second.weight"]


def test_an_optimizer_of_another_model_is_found(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(Net().parameters(), lr=0.1)
    with pytest.warns(traindiff.TraindiffWarning, match="none of the model's 6"):
        verdict = checked(tmp_path / "run", model, optimizer)

    assert verdict.verdict == "unhealthy"
    assert {finding.path for finding in verdict.findings} == {path for path, _ in model.named_parameters()}


def test_compare_leaves_it_to_the_other_runs_update(tmp_path: Path) -> None:
    train(tmp_path / "baseline", chosen=without("second.weight"))
    train(tmp_path / "candidate", chosen=without("second.weight"))

    assert traindiff.compare(tmp_path / "baseline", tmp_path / "candidate").verdict == "identical"


class WithAverage(nn.Module):
    """A layer, and the moving average of its weights, which rounds away what is small."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.average, self.forgotten = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.forgotten(self.layer(x))
        return hidden


def test_a_part_of_a_moving_average_that_rests_is_not_found_and_a_forgotten_layer_is(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = WithAverage()
    model.average.load_state_dict(model.layer.state_dict())
    optimizer = torch.optim.SGD(model.layer.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        for _ in range(9):
            model.zero_grad()
            model(torch.randn(16, 6)).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                model.average.weight.lerp_(model.layer.weight, 0.1)  # the bias moves by less than its rounding

    found = traindiff.check(tmp_path / "run").findings
    assert sorted(one.path for one in found) == ["forgotten.bias", "forgotten.weight"]


class Gathers(torch.optim.SGD):
    """Moves nothing in its first steps, or nothing but biases."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, biases: bool) -> None:
        super().__init__(parameters, lr=0.1)
        self._biases = biases

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Take a step."""
        for parameter in self.param_groups[0]["params"] if self._biases else ():
            if parameter.ndim == 1:
                parameter.sub_(parameter.grad, alpha=0.1)


def test_an_optimizer_that_moves_nothing_by_code_of_its_own_is_warned_of(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    verdict = checked(tmp_path / "run", model, Gathers(model.parameters(), biases=False), observe=WITHOUT_REPLAY)

    assert verdict.verdict == "healthy"
    assert {one.path for one in verdict.warnings if one.kind == "never-updated"} == {*dict(model.named_parameters())}
    assert "Gathers moves none of its parameters. Is that meant" in verdict.warnings[0].message


def test_some_parameters_that_it_does_not_move_are_a_finding(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    verdict = checked(tmp_path / "run", model, Gathers(model.parameters(), biases=True), observe=WITHOUT_REPLAY)

    assert {one.path for one in verdict.findings} == {"0.weight", "2.weight"}


def test_an_optimizer_of_torch_that_moves_nothing_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["torch.optim.sgd"], "sgd", lambda *_, **__: None)  # a kernel is not launched
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    verdict = checked(tmp_path / "run", model, torch.optim.SGD(model.parameters(), lr=0.1), observe=WITHOUT_REPLAY)

    assert {one.path for one in verdict.findings} == {*dict(model.named_parameters())}


class Adapts(torch.optim.Optimizer):
    """Finds its own learning rate, beginning with a millionth, as D-Adaptation and Prodigy do."""

    def __init__(self, parameters: Any, *, lr: float = 1.0, found: float = 1e-6, leaves_out: Any = None) -> None:
        super().__init__(parameters, {"lr": lr})
        self.found, self.leaves_out = found, leaves_out

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter is not self.leaves_out:
                    parameter.sub_(parameter.grad.sign(), alpha=group["lr"] * self.found)


def test_a_parameter_that_is_larger_than_an_optimizer_has_moved_any_is_not_judged(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        model.first.weight.fill_(100.0)
    verdict = checked(tmp_path / "run", model, Adapts(model.parameters()))

    assert not verdict.findings


def test_a_parameter_that_such_an_optimizer_leaves_out_is_found(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = Adapts(model.parameters(), leaves_out=model.second.weight)
    (finding,) = checked(tmp_path / "run", model, optimizer).findings

    assert (finding.kind, finding.path) == ("never-updated", "second.weight")
