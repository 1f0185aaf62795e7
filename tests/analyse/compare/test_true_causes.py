"""Sentences about a first divergence, and about what follows from it, claim no cause that is not there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import traindiff
from traindiff.analyse.compare import Comparison

Build = Callable[[], nn.Module]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5))


def labels_of(step: int) -> Tensor:
    return torch.arange(step, step + 12) % 5


class Training:
    """A classifier that a teacher without gradients helps; each argument is one way to train it wrongly."""

    def __init__(
        self,
        *,
        labels: Callable[[int], Tensor] = labels_of,
        teacher_trains: bool = False,
        teacher_learns: bool = False,
        momentum: float = 0.1,
        adam: bool = False,
        detached: bool = False,
        observe: list[str] | None = None,
    ) -> None:
        self.labels, self.observe, self.detached = labels, observe, detached
        torch.manual_seed(0)
        self.model, self.teacher = net(), nn.Sequential(net(), nn.Dropout(0.2)).train(teacher_trains)
        self.model[1].momentum = momentum
        self.teacher.requires_grad_(teacher_learns)
        parameters = list(self.model.parameters())
        self.optimizer = (
            torch.optim.Adam(parameters, lr=1e-2) if adam else torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)
        )

    def record(self, path: Path) -> str:
        """Record three steps and give the path."""
        torch.manual_seed(1)
        models = {"net": self.model, "teacher": self.teacher}
        with traindiff.record(path, models, {"sgd": self.optimizer}, observe=self.observe):
            for step in range(3):
                x = torch.randn(12, 6, generator=torch.Generator().manual_seed(step))
                logits = self._forward(x)
                with torch.set_grad_enabled(self.teacher[0][0].weight.requires_grad):
                    aim = self.teacher(x).softmax(-1)
                loss = functional.cross_entropy(logits, self.labels(step)) + functional.cross_entropy(logits, aim)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
        return str(path)

    def _forward(self, x: Tensor) -> Tensor:
        if not self.detached:
            return self.model(x)
        handle = self.model[2].register_forward_pre_hook(lambda _, given: (given[0].detach(),))
        try:
            return self.model(x)
        finally:
            handle.remove()


def compared(tmp_path: Path, wrong: Training, right: Training | None = None) -> Comparison:
    return traindiff.compare((right or Training()).record(tmp_path / "a"), wrong.record(tmp_path / "b"))


@pytest.mark.parametrize("observe", [None, ["loss", "grad"]])
def test_what_another_loss_hands_back_is_no_further_finding(observe: list[str] | None, tmp_path: Path) -> None:
    """Nearly the same value, and gradients that have little in common."""

    def exchanged(step: int) -> Tensor:
        return labels_of(step).roll(1) if step == 1 else labels_of(step)

    result = compared(tmp_path, Training(labels=exchanged, observe=observe), Training(observe=observe))

    assert [(one.phase, one.step) for one in result.findings] == [("loss", 1)]


def test_a_teacher_in_training_mode_is_named_where_the_loss_differs(tmp_path: Path) -> None:
    result = compared(tmp_path, Training(teacher_trains=True))

    told = "teacher: it is in evaluation mode in the baseline from step 0 on (eval() was called)"
    assert result.first_divergence is not None
    assert result.first_divergence.phase == "loss"
    assert result.first_divergence.message.startswith(told)
    assert f"Settings differ: {told}." in result.notes


def test_a_pass_that_draws_nothing_does_not_count_among_those_that_draw(tmp_path: Path) -> None:
    """A teacher whose gradients are on is called in sight; in evaluation mode its dropout draws nothing."""
    right, wrong = Training(), Training(teacher_learns=True)
    for one in (right, wrong):
        one.model.append(nn.Dropout(0.1))

    result = compared(tmp_path, wrong, right)

    assert result.verdict == "equivalent"


def test_another_momentum_is_named_at_the_statistics_that_it_changes(tmp_path: Path) -> None:
    first = compared(tmp_path, Training(momentum=0.01)).first_divergence

    assert first is not None
    assert (first.path, first.slot) == ("net.1.running_mean", "buffer")
    assert first.message.startswith("net.1: momentum is 0.1 in the baseline and 0.01 in the candidate. ")


def test_another_optimizer_is_named_where_updates_or_states_differ(tmp_path: Path) -> None:
    first = compared(tmp_path, Training(adam=True)).first_divergence

    assert first is not None
    assert first.message.startswith("sgd: type is SGD in the baseline and Adam in the candidate. ")


def test_what_is_cut_off_is_named_before_gradients(tmp_path: Path) -> None:
    first = compared(tmp_path, Training(detached=True)).first_divergence

    assert first is not None
    assert first.phase == "grad"
    assert first.message.startswith("net.3: what it is given needs no gradient in the candidate ")


@pytest.mark.parametrize("at", [1, 2])
def test_nan_after_nan_is_no_further_finding(at: int, tmp_path: Path) -> None:
    class Broken(Training):
        def _forward(self, x: Tensor) -> Tensor:
            logits = self.model(x)
            wanted = torch.randn(12, 6, generator=torch.Generator().manual_seed(at))
            return logits * float("nan") if torch.equal(x, wanted) else logits

    result = compared(tmp_path, Broken())

    assert [(one.phase, one.step) for one in result.findings] == [("loss", at)]


def test_rows_that_choose_otherwise_after_a_divergence_are_not_laid_on_rounding(tmp_path: Path) -> None:
    """Labels that do not count leave rows of zeros behind several layers, as a router does."""

    def run(path: Path, ignored: int) -> str:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with traindiff.record(path, model, optimizer):
            for step in range(3):
                x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
                labels = torch.arange(16) % 8
                labels[:ignored] = -100
                functional.cross_entropy(model(x), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
        return str(path)

    result = traindiff.compare(run(tmp_path / "a", 3), run(tmp_path / "b", 5))

    assert result.first_divergence is not None
    assert result.first_divergence.phase == "loss"
    assert not [note for note in result.notes if "Rounding turned" in note]


def test_nan_of_one_of_several_optimizers_is_one_finding_of_check(tmp_path: Path) -> None:
    torch.manual_seed(0)
    models = {name: nn.Linear(4, 3) for name in ("critic", "policy", "average")}
    models["average"].requires_grad_(False)
    optimizers = {name: torch.optim.SGD(models[name].parameters(), lr=1e-2) for name in ("critic", "policy")}
    with traindiff.record(tmp_path / "a", models, optimizers):
        for step in range(5):
            for name, optimizer in optimizers.items():
                optimizer.zero_grad()
                loss = models[name](torch.randn(6, 4)).square().mean()
                (loss * float("nan") if (name, step) == ("critic", 2) else loss).backward()
                optimizer.step()
            with torch.no_grad():
                models["average"].weight.lerp_(models["critic"].weight, 0.1)

    verdict = traindiff.check(tmp_path / "a")

    assert [(one.kind, one.phase, one.step) for one in verdict.findings] == [("non-finite", "loss", 2)]
