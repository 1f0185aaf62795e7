"""Steps in which an optimizer evaluates the loss several times, by a closure or at parameters that were moved."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Optimizer

import traindiff
from tests.analyse.merge.test_step_table import only, part
from tests.made_up import Site
from traindiff.analyse.align.two_runs import AlignedStep
from traindiff.analyse.compare.evaluations import without_gradients
from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.distance import Pair

STEPS = 3

Faulty = Callable[[int, int], bool]
"""Whether the model is wrong in a step and an evaluation."""


class Slip(nn.Module):
    """Returns its input, 1 % too large while `wrong` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong = False

    def forward(self, x: Tensor) -> Tensor:
        return x * 1.01 if self.wrong else x


class Twice(SGD):
    """Moves along the gradient, has the closure called there, and steps from where it was (sharpness-aware).

    Writes parameters by `.data`, which no version counter of torch's tells.
    """

    def step(self, closure: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
        loss = closure()
        parameters = [one for group in self.param_groups for one in group["params"]]
        moves = [0.05 * one.grad.sign() for one in parameters]
        for one, move in zip(parameters, moves, strict=True):
            one.data.add_(move)
        closure()
        for one, move in zip(parameters, moves, strict=True):
            one.data.sub_(move)
        super().step()
        return loss


class Several(SGD):
    """Calls the closure so many times, with a small step after each."""

    times = 3

    def step(self, closure: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
        for _ in range(self.times):
            loss = closure()
            super().step()
        return loss


def train(
    path: Path,
    make: Callable[[nn.Module], Optimizer],
    *,
    wrong: Faulty = lambda step, evaluation: False,
    micro_batches: int = 1,
    zeroes: Callable[[int, int], bool] = lambda step, evaluation: True,
    observe: str | None = None,
) -> None:
    """Train with a closure, and record it."""
    torch.manual_seed(0)
    slip = Slip()
    model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), slip, nn.Linear(16, 1))
    optimizer = make(model)
    with traindiff.record(path, model, optimizer, strict=True, observe=observe):
        for step in range(STEPS):
            points = torch.randn(32, 6, generator=torch.Generator().manual_seed(step))
            evaluations = iter(range(100))

            def closure(points: Tensor = points, step: int = step, evaluations: object = evaluations) -> Tensor:
                number = next(evaluations)  # type: ignore[call-overload]
                slip.wrong = wrong(step, number)
                if zeroes(step, number):
                    optimizer.zero_grad()
                total = torch.zeros(())
                for part in points.chunk(micro_batches):
                    loss = (model(part) - part.sin().sum(1, keepdim=True)).square().mean() / micro_batches
                    loss.backward()
                    total = total + loss.detach()
                return total

            optimizer.step(closure)


def lbfgs(model: nn.Module) -> Optimizer:
    """LBFGS with a fixed number of evaluations."""
    return LBFGS(model.parameters(), lr=0.1, max_iter=4)


def wolfe(model: nn.Module) -> Optimizer:
    """LBFGS with a line search."""
    return LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")


def twice(model: nn.Module) -> Optimizer:
    """Two evaluations."""
    return Twice(model.parameters(), lr=0.1)


MAKERS = {"lbfgs": lbfgs, "wolfe": wolfe, "twice": twice}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("evaluation", [0, 1])
def test_the_first_divergence_names_the_evaluation(name: str, evaluation: int, tmp_path: Path) -> None:
    train(tmp_path / "baseline", MAKERS[name])
    train(tmp_path / "candidate", MAKERS[name], wrong=lambda step, number: (step, number) == (1, evaluation))

    first = traindiff.compare(tmp_path / "baseline", tmp_path / "candidate").first_divergence

    assert first is not None
    assert (first.step, first.evaluation, first.phase, first.path) == (1, evaluation, "forward", "3")
    assert first.kind == "scale"


@pytest.mark.parametrize("name", MAKERS)
def test_micro_batches_of_an_evaluation_merge(name: str, tmp_path: Path) -> None:
    train(tmp_path / "baseline", MAKERS[name])
    train(tmp_path / "candidate", MAKERS[name], micro_batches=4)

    found = traindiff.compare(tmp_path / "baseline", tmp_path / "candidate")

    assert found.findings == ()
    assert found.verdict == "equivalent"


def test_gradients_that_an_evaluation_adds_to_those_of_the_one_before_are_named(tmp_path: Path) -> None:
    train(tmp_path / "baseline", lbfgs)
    train(tmp_path / "candidate", lbfgs, zeroes=lambda step, number: (step, number) != (0, 2))

    first = traindiff.compare(tmp_path / "baseline", tmp_path / "candidate").first_divergence

    assert first is not None
    assert (first.step, first.evaluation, first.kind) == (0, 2, "accumulated")
    assert "of this evaluation and of the evaluation before" in first.message


@pytest.mark.parametrize("name", MAKERS)
def test_check_takes_evaluations_for_no_contributions(name: str, tmp_path: Path) -> None:
    train(tmp_path / "run", MAKERS[name], micro_batches=2)

    found = traindiff.check(tmp_path / "run")

    assert (found.verdict, found.warnings) == ("healthy", ())


def test_more_evaluations_of_the_same_bits_are_a_finding(tmp_path: Path) -> None:
    train(tmp_path / "baseline", lambda model: Several(model.parameters(), lr=0.01))
    Several.times = 2
    try:
        train(tmp_path / "candidate", lambda model: Several(model.parameters(), lr=0.01))
    finally:
        Several.times = 3

    found = traindiff.compare(tmp_path / "baseline", tmp_path / "candidate")
    first = found.first_divergence

    assert found.verdict == "diverged"
    assert first is not None
    assert (first.step, first.evaluation, first.kind) == (0, 2, "evaluations")
    assert "evaluates the loss 2 times in this step, the baseline 3 times" in first.message


@pytest.mark.parametrize("observe", ["batch", "grad", "optimizer", "param"])
def test_evaluations_of_which_nothing_is_observed_are_no_difference(observe: str, tmp_path: Path) -> None:
    """Of parameters, the first evaluation records nothing: they are known from the step before."""
    train(tmp_path / "all", lbfgs)
    train(tmp_path / "some", lbfgs, observe=observe)

    for runs in ("all", "some"), ("some", "all"):
        found = traindiff.compare(*(tmp_path / run for run in runs))

        assert (found.verdict, found.findings) == ("incomplete", ())
        assert not [note for note in found.notes if "evaluates the loss" in note]


def test_a_search_that_rounding_may_have_stopped_is_a_note(tmp_path: Path) -> None:
    train(tmp_path / "baseline", lambda model: Several(model.parameters(), lr=0.01))
    Several.times = 2
    try:
        train(tmp_path / "candidate", lambda model: Several(model.parameters(), lr=0.01), micro_batches=2)
    finally:
        Several.times = 3

    found = traindiff.compare(tmp_path / "baseline", tmp_path / "candidate", steps=0)

    assert found.findings == ()
    assert found.verdict == "incomplete"
    assert any(
        "In step 0, the baseline evaluates the loss 3 times, the candidate 2 times" in one for one in found.notes
    )


def move_by_hand(path: Path, *, wrong: Faulty = lambda step, evaluation: False) -> None:
    """A sharpness-aware loop without a closure: two backward passes, with parameters moved in between."""
    torch.manual_seed(0)
    slip = Slip()
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), slip, nn.Linear(16, 1))
    optimizer = SGD(model.parameters(), lr=0.1)
    with traindiff.record(path, model, optimizer, strict=True):
        for step in range(STEPS):
            points = torch.randn(32, 6, generator=torch.Generator().manual_seed(step))
            for evaluation in range(2):
                slip.wrong = wrong(step, evaluation)
                model(points).square().mean().backward()
                if evaluation:
                    continue
                with torch.no_grad():
                    moves = [0.05 * one.grad.sign() for one in model.parameters() if one.grad is not None]
                    for one, move in zip(model.parameters(), moves, strict=True):
                        one.add_(move)
                optimizer.zero_grad()
            with torch.no_grad():
                for one, move in zip(model.parameters(), moves, strict=True):
                    one.sub_(move)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("evaluation", [0, 1])
def test_parameters_that_move_between_two_backward_passes_begin_an_evaluation(evaluation: int, tmp_path: Path) -> None:
    move_by_hand(tmp_path / "baseline")
    move_by_hand(tmp_path / "candidate", wrong=lambda step, number: (step, number) == (1, evaluation))

    first = traindiff.compare(tmp_path / "baseline", tmp_path / "candidate").first_divergence

    assert first is not None
    assert (first.step, first.evaluation, first.phase, first.path) == (1, evaluation, "forward", "2")
    assert traindiff.check(tmp_path / "baseline").verdict == "healthy"


def accumulate(path: Path, *, closure: bool) -> None:
    """Two micro-batches, the last of them in a closure, as Lightning accumulates gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = SGD(model.parameters(), lr=0.1)
    with traindiff.record(path, model, optimizer, strict=True):
        for step in range(STEPS):
            points = torch.randn(32, 6, generator=torch.Generator().manual_seed(step))

            def backward(part: Tensor) -> Tensor:
                loss = model(part).square().mean() / 2
                loss.backward()
                return loss

            backward(points[:16])
            if closure:
                optimizer.step(lambda: backward(points[16:]))  # noqa: B023
            else:
                backward(points[16:])
                optimizer.step()
            optimizer.zero_grad()


def test_a_closure_that_adds_to_gradients_goes_on_with_the_evaluation(tmp_path: Path) -> None:
    accumulate(tmp_path / "baseline", closure=False)
    accumulate(tmp_path / "candidate", closure=True)

    assert traindiff.compare(tmp_path / "baseline", tmp_path / "candidate").verdict == "identical"


def test_replicas_measure_each_evaluation(tmp_path: Path) -> None:
    train(tmp_path / "baseline", lbfgs)
    train(tmp_path / "again", lbfgs, micro_batches=2)
    train(tmp_path / "legal", lbfgs, micro_batches=4)
    train(tmp_path / "candidate", lbfgs, wrong=lambda step, number: (step, number) == (0, 1))
    noise = tmp_path / "again"

    assert traindiff.compare(tmp_path / "baseline", tmp_path / "legal", noise=noise).findings == ()
    first = traindiff.compare(tmp_path / "baseline", tmp_path / "candidate", noise=noise).first_divergence
    assert first is not None
    assert (first.evaluation, first.path) == (1, "3")


def evaluation(
    *sites: Site, number: int | None = None, findings: Iterable[Finding] = (), order: int = 5
) -> AlignedStep:
    """As much of a step as tells which gradients one of its evaluations has."""
    pairs = [
        Pair(baseline=entry, candidate=entry)
        for place, site in enumerate(sites)
        for entry in (only([part(np.ones(3, dtype=np.float32), site=site, order=order + place)]),)
    ]
    blank: Any = None
    return AlignedStep(
        step=2, first=False, baseline=blank, sides=blank, tables=blank, aligned=blank, pairs=pairs,
        findings=list(findings), recorded=blank, evaluation=number,
    )  # fmt: skip


def lacking(phase: str = "grad", kind: str = "missing") -> Finding:
    return Finding(step=2, phase=phase, path="w", slot="grad", order=9, kind=kind, message="It is missing.")


GRADIENT = ("grad", "", "w", "grad")
MOVED = ("update", "", "w", "update")


@pytest.mark.parametrize(
    ("before", "told"),
    [((MOVED,), 2), ((("grad", "micro", "w", "grad"), MOVED), 2), ((GRADIENT, MOVED), 0), ((MOVED, GRADIENT), 0)],
)
def test_missing_gradients_come_before_how_parameters_moved_if_no_evaluation_recorded_any(
    before: tuple[Site, ...], told: int
) -> None:
    own = [lacking(), lacking(kind="extra"), lacking(kind="value"), lacking(phase="forward")]
    given = replace(evaluation(number=1, findings=own), earlier=(evaluation(*before, number=0),))

    found = without_gradients(given)

    assert [(one.kind, one.evaluation) for one in found] == [("missing", 1), ("extra", 1)][:told]
    assert {one.order for one in found} <= {5 + before.index(MOVED)}
    assert len(given.findings) == 4 - told  # none is there twice


def test_of_a_step_with_one_evaluation_nothing_is_moved() -> None:
    given = evaluation(MOVED, findings=[lacking()])

    assert (without_gradients(given), len(given.findings)) == ([], 1)


def fitted(path: Path, seed: int, *, replica: str | None = None, stretched: float = 1.0) -> None:
    """A small network that solves a differential equation, trained by LBFGS with a line search."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1))
    optimizer = LBFGS(model.parameters(), max_iter=20, line_search_fn="strong_wolfe")
    moves: Any = optimizer._add_grad
    if stretched != 1.0:
        optimizer._add_grad = lambda length, direction: moves(length * stretched, direction)  # type: ignore[method-assign]
    places = torch.linspace(-1.0, 1.0, 40)[:, None].requires_grad_()

    def closure() -> float:
        optimizer.zero_grad()
        value = model(places)
        (slope,) = torch.autograd.grad(value.sum(), places, create_graph=True)
        (bend,) = torch.autograd.grad(slope.sum(), places, create_graph=True)
        loss = (bend + torch.sin(3.0 * places)).square().mean() + model(torch.tensor([[-1.0], [1.0]])).square().mean()
        loss.backward()
        return loss.item()

    with traindiff.record(path, model, optimizer, replica=replica):
        for _ in range(3):
            optimizer.step(closure)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_length_of_a_search_is_decided_by_rounding(seed: int, tmp_path: Path) -> None:
    """It follows from differences of losses, of which most cancels: the runs part by up to 1 % along the direction."""
    fitted(tmp_path / "baseline", seed)
    fitted(tmp_path / "replica", seed, replica="ulp:1")

    assert traindiff.compare(tmp_path / "baseline", tmp_path / "replica").findings == ()


def test_a_search_that_moves_further_than_it_says_is_found_by_its_replay(tmp_path: Path) -> None:
    fitted(tmp_path / "baseline", 1)
    fitted(tmp_path / "candidate", 1, stretched=1.05)
    first = traindiff.compare(tmp_path / "baseline", tmp_path / "candidate").first_divergence

    assert first is not None
    assert (first.kind, first.phase) == ("update-rule", "update")


def test_a_search_that_is_not_replayed_is_judged_by_how_far_it_moves(tmp_path: Path) -> None:
    """The replay is not observed."""
    for name, stretched in (("baseline", 1.0), ("candidate", 1.5)):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(
                traindiff, "record", partial(traindiff.record, observe=["loss", "grad", "param", "optimizer"])
            )
            fitted(tmp_path / name, 1, stretched=stretched)
    first = traindiff.compare(tmp_path / "baseline", tmp_path / "candidate").first_divergence

    assert first is not None
    assert first.phase == "update"
