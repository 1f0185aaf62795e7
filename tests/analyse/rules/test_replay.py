"""Optimizers that do not do what they say are found, named and explained; those that do are not."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import traindiff
from tests.faults.recipe import recipe
from tests.faulty_step import at_end_of_step
from tests.made_up import Seen, Step, plain_step
from tests.made_up import record as write
from tests.observe.hooks.models import mlp
from tests.observe.hooks.trainings import batches
from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.run_steps import run_steps
from traindiff.analyse.rules import RULES, run_facts
from traindiff.analyse.rules.run_judge import RunJudge
from traindiff.storage import open_recording


def findings(path: Path) -> list[Finding]:
    """What is found in a recording with no other to compare it with."""
    recording = open_recording(str(path))
    run = RunJudge(RULES, run_facts(recording))
    return [one for step in run_steps(recording) for one in run.step(step.table, step=step.step)]


def train(
    path: Path,
    optimizer: Callable[[nn.Module], Optimizer],
    *,
    dtype: torch.dtype = torch.float32,
    after_step: Callable[[nn.Module, Mapping[str, Tensor]], None] | None = None,
) -> list[Finding]:
    """Train, record and judge. `after_step` is given the model and its parameters as the step found them."""
    torch.manual_seed(0)
    model = mlp().to(dtype)
    made = optimizer(model)
    if after_step is not None:
        before: dict[str, Tensor] = {}

        def keep(*_: Any) -> None:
            before.update({path: parameter.detach().clone() for path, parameter in model.named_parameters()})

        made.register_step_pre_hook(keep)
        at_end_of_step(made, torch.no_grad()(lambda *_: after_step(model, before)))
    with traindiff.record(path, model, made, strict=True):
        for batch in batches(3):
            model(batch.to(dtype)).square().mean().backward()
            made.step()
            made.zero_grad()
    return findings(path)


def adam(parameter: Tensor, state: dict[str, Tensor], group: Mapping[str, Any], wrong: str) -> None:
    """Adam or AdamW, written out, with something wrong."""
    beta1, beta2 = group["betas"]
    lr, decay, eps = group["lr"], group["weight_decay"], group["eps"]
    beta2 = 0.95 if wrong == "beta2" else beta2
    lr = lr * 2 if wrong == "lr" else lr
    beta1, beta2 = (beta2, beta1) if wrong == "swapped" else (beta1, beta2)
    gradient = parameter.grad
    assert gradient is not None
    state["step"] += 1
    t = state["step"].item()
    if wrong == "coupled":
        gradient = gradient + decay * parameter
    else:
        parameter.mul_(1 - lr * decay)
    late = state["exp_avg"].clone(), state["exp_avg_sq"].clone()
    state["exp_avg"].lerp_(gradient, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    first, second = late if wrong == "late" else (state["exp_avg"], state["exp_avg_sq"])
    t = t - 1 if wrong == "late" else t
    c1, c2 = (1 - beta1**t, 1 - beta2**t) if wrong != "uncorrected" and t else (1.0, 1.0)
    c2 = 1.0 if wrong == "second" else c2
    divisor = (second / c2 + eps).sqrt() if wrong == "eps" else second.sqrt() / sqrt(c2) + eps
    if wrong == "no root":
        divisor = second / c2 + eps
    elif wrong == "cubic root":
        divisor = second.pow(1 / 3) + eps
    parameter.addcdiv_(first, divisor, value=-lr / c1)


def written_out(wrong: str) -> Callable[..., None]:
    """A function in place of torch's `adam`, which both Adam and AdamW call."""

    def step(params: Any, _grads: Any, first: Any, second: Any, _largest: Any, steps: Any, **options: Any) -> None:
        group = {
            "betas": (options["beta1"], options["beta2"]),
            **{name: options[name] for name in ("lr", "weight_decay", "eps")},
        }
        for parameter, exp_avg, exp_avg_sq, count in zip(params, first, second, steps, strict=True):
            adam(parameter, {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "step": count}, group, wrong)

    return step


MISTAKES = {
    "uncorrected": ("AdamW moves 0.weight without bias correction.", 0),
    "eps": ("AdamW moves 0.weight as if eps were inside the square root.", 0),
    "coupled": ("AdamW moves 0.weight as if weight decay were added to the gradient (Adam's L2 penalty, not", 0),
    "lr": ("AdamW moves 0.weight as if the learning rate were 2 x what it is.", 0),
    "beta2": ("AdamW moves 0.weight as if beta2 were 0.95.", 1),
    "late": ("AdamW moves 0.weight from moments that are one step old, without this step's gradient.", 1),
}


@pytest.mark.parametrize("wrong", MISTAKES)
def test_a_mistake_of_adamw_is_named(wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(inspect.unwrap(Adam.step).__globals__, "adam", written_out(wrong))
    message, step = MISTAKES[wrong]

    found = train(tmp_path / "run", lambda model: AdamW(model.parameters(), lr=0.01, weight_decay=0.1))

    found = [one for one in found if one.step == step]
    assert found[0].message.startswith(message), found[0].message
    assert (found[0].phase, found[0].path, found[0].kind) == ("update", "0.weight", "update-rule")
    assert found[0].ratio > 5


def test_adamw_written_out_without_a_mistake_gives_no_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(inspect.unwrap(Adam.step).__globals__, "adam", written_out(""))

    assert train(tmp_path / "run", lambda model: AdamW(model.parameters(), lr=0.01, weight_decay=0.1)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", [{"foreach": False}, {"foreach": True}, {"fused": True}])
@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
def test_correct_optimizers_give_no_finding(kind: Any, how: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    if kind is SGD and how == {"fused": True} and dtype == torch.bfloat16:
        pytest.skip("torch 2.13 on the CPU does not update: below")

    assert train(tmp_path / "run", lambda model: kind(model.parameters(), lr=0.1, **how), dtype=dtype) == []


def test_a_frozen_parameter_never_moves(tmp_path: Path) -> None:
    def put_back(model: nn.Module, before: Mapping[str, Tensor]) -> None:
        model.get_parameter("2.weight").copy_(before["2.weight"])

    found = train(tmp_path / "run", lambda model: SGD(model.parameters(), lr=0.1), after_step=put_back)

    assert {(one.path, one.kind) for one in found} == {("2.weight", "never-updated")}
    assert found[0].message.startswith("SGD never moves 2.weight: its settings ask for an update of norm ")


def test_what_no_known_mistake_explains_is_still_a_finding(tmp_path: Path) -> None:
    def disturb(model: nn.Module, _before: Mapping[str, Tensor]) -> None:
        model.get_parameter("2.weight")[1, 3] += 0.01

    found = train(tmp_path / "run", lambda model: AdamW(model.parameters()), after_step=disturb)

    assert {(one.path, one.kind) for one in found} == {("2.weight", "update-rule")}
    assert "by something else than its settings ask for" in found[0].message


def test_updates_that_a_short_parameter_swallows_are_lost(tmp_path: Path) -> None:
    found = train(tmp_path / "run", lambda model: SGD(model.parameters(), lr=1e-4), dtype=torch.bfloat16)

    assert {one.kind for one in found} == {"lost-update"}
    first = found[0]
    assert "of the elements of 0.weight do not move, although SGD computes an update for them" in first.message
    assert "half the spacing of bfloat16" in first.message
    assert first.evidence["share"] > 0.9
    assert train(tmp_path / "long", lambda model: SGD(model.parameters(), lr=1e-4)) == []


def test_gradients_that_are_mathematically_zero_are_no_lost_updates(tmp_path: Path) -> None:
    path = recipe("conv", "sgd").but(steps=2).run(tmp_path / "run")  # its biases stand before batch normalization

    assert findings(path) == []


class Mine(AdamW):
    """A subclass with a step of its own, which may be meant."""

    wrong = "uncorrected"
    gain = 1.0

    @torch.no_grad()
    def step(self, _closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    moments = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
                    state.update(step=torch.tensor(0.0), **moments)
                p.grad = p.grad.sign() * self.gain if self.gain != 1.0 else p.grad
                adam(p, state, group, self.wrong)


class Cautious(Mine):
    """It is meant to do something else."""

    wrong = ""
    gain = 3.0


OF_A_SUBCLASS = {
    "uncorrected": "without bias correction",
    "second": "without the bias correction of the second moment",
    "swapped": "with beta1 and beta2 exchanged",
}


@pytest.mark.parametrize("wrong", OF_A_SUBCLASS)
def test_a_subclass_of_its_own_that_makes_a_known_mistake_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    monkeypatch.setattr(Mine, "wrong", wrong)

    found = train(tmp_path / "mine", lambda model: Mine(model.parameters(), betas=(0.7, 0.85)))

    start = f"Mine (a subclass of AdamW with a step of its own) moves 0.weight {OF_A_SUBCLASS[wrong]}."
    assert found[0].message.startswith(start)
    assert "Is this meant? Then declare its formula" in found[0].message
    verdict = traindiff.check(tmp_path / "mine", rules="update-rule")
    assert (verdict.verdict, verdict.warnings[0].message) == ("healthy", found[0].message)


OTHER_METHODS = {
    "no root": "moves parameters without the square root in the divisor (3 replayed steps, first 0)",
    "cubic root": "does not move parameters by the formula of that optimizer (3 replayed steps, first 0)",
}


@pytest.mark.parametrize("wrong", OTHER_METHODS)
def test_a_subclass_that_is_another_method_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    monkeypatch.setattr(Mine, "wrong", wrong)

    assert train(tmp_path / "mine", lambda model: Mine(model.parameters(), betas=(0.7, 0.85))) == []

    start = f"Mine (a subclass of AdamW with a step of its own) {OTHER_METHODS[wrong]}. This may be what it is for"
    assert any(note.startswith(start) for note in traindiff.check(tmp_path / "mine", rules="update-rule").notes)


def test_a_class_of_torch_whose_step_was_replaced_may_mean_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("step", "wrong", "gain"):
        monkeypatch.setattr(AdamW, name, getattr(Mine, name), raising=False)

    found = train(tmp_path / "run", lambda model: AdamW(model.parameters(), betas=(0.7, 0.85)))

    assert found[0].message.startswith("AdamW (with a step of its own) moves 0.weight without bias correction.")
    assert traindiff.check(tmp_path / "run", rules="update-rule").verdict == "healthy"


def test_a_subclass_that_leaves_a_parameter_alone_may_mean_it(tmp_path: Path) -> None:
    class Resting(SGD):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            pass

    found = train(tmp_path / "run", lambda model: Resting(model.parameters(), lr=0.1))

    assert {one.kind for one in found} == {"never-updated"}
    assert traindiff.check(tmp_path / "run", rules="update-rule").verdict == "healthy"


@pytest.mark.parametrize(
    ("share", "masked", "verdict"), [(0.0, 4, "unhealthy"), (0.9, 1, "unhealthy"), (0.9, 4, "healthy")]
)
def test_a_mask_of_elements_may_leave_out_whole_parameters(
    tmp_path: Path, share: float, masked: int, verdict: str
) -> None:
    """But a mask of one parameter, such as of rows of an embedding, does not say that others may be left out."""

    class Masked(AdamW):
        @torch.no_grad()
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            parameters = self.param_groups[0]["params"]
            before = [one.clone() for one in parameters]
            super().step(closure)
            generator = torch.Generator().manual_seed(0)
            for number, (one, held) in enumerate(zip(parameters, before, strict=True)):
                largest = 2.0 if number == 1 else share * (number < masked)
                rests = torch.rand(one.shape, generator=generator) < largest
                one.copy_(torch.where(rests, held, one))

    found = train(tmp_path / "run", lambda model: Masked(model.parameters(), lr=0.1))

    assert "0.bias" in {one.path for one in found if one.kind == "never-updated"}
    assert traindiff.check(tmp_path / "run").verdict == verdict


def test_a_mistake_that_only_one_run_makes_tells_them_apart_although_it_may_be_meant(tmp_path: Path) -> None:
    makes = {"right": AdamW, "wrong": Mine}
    for name, kind in makes.items():
        train(tmp_path / name, lambda model, kind=kind: kind(model.parameters()))  # type: ignore[misc]
    comparison = traindiff.compare(tmp_path / "right", tmp_path / "wrong")

    assert comparison.verdict == "diverged"
    assert comparison.first_divergence is not None
    said = "In the candidate, Mine (a subclass of AdamW with a step of its own) moves 0.weight without bias correction."
    assert said in comparison.first_divergence.message


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_hooks_change_after_a_step_is_not_the_optimizers_doing(when: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = mlp()
    optimizer = AdamW(model.parameters(), lr=0.01)

    @torch.no_grad()
    def clip(*_: Any) -> None:
        for one in model.parameters():
            one.clamp_(-0.05, 0.05)

    if when == "before":
        optimizer.register_step_post_hook(clip)
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        if when == "after":
            optimizer.register_step_post_hook(clip)
        for batch in batches(3):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert traindiff.check(tmp_path / "run").verdict == "healthy"


def test_a_subclass_that_changes_its_gradients_is_found_where_a_known_mistake_fits_alone(tmp_path: Path) -> None:
    assert [
        one for one in train(tmp_path / "own", lambda model: Cautious(model.parameters(), lr=0.01)) if one.step
    ] == []


def test_fused_sgd_of_torch_that_leaves_bfloat16_as_it_is(tmp_path: Path) -> None:
    """torch 2.13, on the CPU."""
    parameter = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    SGD([parameter], lr=0.5, fused=True).step()
    if not bool((parameter == 1).all()):
        pytest.skip("this torch updates")

    found = train(tmp_path / "run", lambda model: SGD(model.parameters(), lr=0.1, fused=True), dtype=torch.bfloat16)

    assert {one.kind for one in found} == {"never-updated"}
    assert found[0].message.startswith("SGD never moves 0.weight")


def test_what_is_wrong_in_both_runs_does_not_tell_them_apart(tmp_path: Path) -> None:
    def optimizer(model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=1e-5)

    paths = [recipe("mlp", "sgd", "bfloat16").but(steps=2, optimizer=optimizer).run(tmp_path / n) for n in ("a", "b")]
    comparison = traindiff.compare(*paths)

    assert comparison.verdict == "identical"
    assert any(note.startswith("In both runs: ") for note in comparison.notes)


def test_what_is_wrong_in_one_run_is_said_of_that_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = recipe("mlp").but(steps=2)
    right = training.run(tmp_path / "right")
    monkeypatch.setitem(inspect.unwrap(Adam.step).__globals__, "adam", written_out("uncorrected"))
    wrong = training.run(tmp_path / "wrong")

    for paths, name in (((right, wrong), "candidate"), ((wrong, right), "baseline")):
        comparison = traindiff.compare(*paths)
        first = comparison.first_divergence
        assert comparison.verdict == "diverged"
        assert first is not None
        assert (first.step, first.phase, first.stage, first.path) == (0, "update", "replayed", "fc1.weight")
        assert first.message.startswith(f"In the {name}, AdamW moves fc1.weight without bias correction.")


def test_an_optimizer_that_was_not_replayed_leaves_the_verdict_as_it_is(tmp_path: Path) -> None:
    def edit(_number: int, sites: Step) -> None:
        values = plain_step(0)["forward", "", "fc", "output[0]"].values
        sites["update", "replayed", "optimizer", "Muon"] = Seen(values=values, about={"unobserved": "not replayed"})

    paths = write(tmp_path / "a"), write(tmp_path / "b", edit)
    comparison = traindiff.compare(*paths)
    assert comparison.verdict == "identical"
    assert "candidate: an optimizer is not replayed, so it is judged by the other run only." in comparison.notes
    assert findings(paths[1]) == []
