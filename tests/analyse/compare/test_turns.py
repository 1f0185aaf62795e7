"""Trainings with several optimizers, of which one run leaves out a step."""

from __future__ import annotations

import copy
from collections.abc import Collection
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam

import traindiff
from traindiff.analyse.compare import Comparison


class Heads(nn.Module):
    """Two heads on one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.trunk(x))
        loss: Tensor = self.a(h).square().mean() + self.b(h).square().mean()
        return loss


def train(
    path: Path,
    *,
    shared: bool = True,
    second: Collection[int] = (0, 2, 4, 6),
    second_first: bool = False,
    micro_batches: int = 1,
    steps: int = 8,
    every: int = 1,
) -> Path:
    """Steps of both optimizers; the second steps in the iterations `second`."""
    torch.manual_seed(0)
    model = Heads()
    trunk = [*model.trunk.parameters()]
    a = Adam([*trunk, *model.a.parameters()], lr=1e-2)
    b = Adam([*(trunk if shared else ()), *model.b.parameters()], lr=1e-2)
    with traindiff.record(path, model, [a, b], every=every):
        for step in range(steps):
            model.zero_grad()
            for part in torch.randn(16, 8, generator=torch.Generator().manual_seed(step)).chunk(micro_batches):
                (model(part) / micro_batches).backward()
            for one in (b, a) if second_first else (a, b):
                if one is a or step in second:
                    one.step()
    return path


@pytest.mark.parametrize("shared", [True, False])
def test_the_steps_of_a_second_optimizer_are_no_edits(shared: bool, tmp_path: Path) -> None:
    baseline = train(tmp_path / "b", shared=shared)
    checked = traindiff.check(baseline)

    assert (checked.verdict, checked.findings, checked.warnings) == ("healthy", (), ())
    found = traindiff.compare(baseline, train(tmp_path / "c", shared=shared, micro_batches=4))
    assert (found.verdict, found.findings) == ("equivalent", ())


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    ("second", "step", "counts", "did"),
    [
        ((0, 2, 6), 5, (3, 2), "leaves out a step"),
        ((0, 1, 2, 4, 6), 2, (1, 2), "takes a further step"),
    ],
)
def test_a_step_of_one_optimizer_that_one_run_leaves_out_is_the_first_divergence(
    second: Collection[int], step: int, counts: tuple[int, int], did: str, shared: bool, tmp_path: Path
) -> None:
    found = traindiff.compare(train(tmp_path / "b", shared=shared), train(tmp_path / "c", shared=shared, second=second))

    first = found.first_divergence
    assert found.verdict == "diverged"
    assert first is not None
    assert (first.step, first.kind, first.path) == (step, "turn", "optimizer[1]")
    assert (first.evidence["baseline"], first.evidence["candidate"]) == counts
    assert first.message.endswith(f"the candidate {did}.")
    assert sum(one.kind == "turn" for one in found.findings) == 1


def test_optimizers_of_different_parameters_may_step_in_another_order(tmp_path: Path) -> None:
    everything = range(8)
    baseline = train(tmp_path / "b", shared=False, second=everything)
    candidate = train(tmp_path / "c", shared=False, second=everything, second_first=True)

    assert [one.kind for one in traindiff.compare(baseline, candidate).findings if one.kind == "turn"] == []


def test_runs_that_recorded_other_steps_are_not_held_against_each_other(tmp_path: Path) -> None:
    baseline, candidate = train(tmp_path / "b"), train(tmp_path / "c", every=2)

    assert [one.kind for one in traindiff.compare(baseline, candidate).findings if one.kind == "turn"] == []


@pytest.mark.parametrize("first_step", [0, 3])
def test_optimizers_that_step_at_other_rates_go_on_where_they_were(tmp_path: Path, first_step: int) -> None:
    """Steps 3 to 7 of the first optimizer are continued; the second one has stepped twice before."""

    def parts() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        return model, [
            torch.optim.AdamW(model[0].parameters(), lr=1e-2),
            torch.optim.AdamW(model[2].parameters(), 1e-2),
        ]

    def go(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: range, *, skip: int = -1) -> None:
        for step in steps:
            model(torch.randn(8, 4, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizers[0].step()
            if step % 2 == 0 and step != skip:
                optimizers[1].step()
            for one in optimizers:
                one.zero_grad()

    model, optimizers = parts()
    with traindiff.record(tmp_path / "b", model, optimizers):
        go(model, optimizers, range(3))
        saved = copy.deepcopy((model.state_dict(), [one.state_dict() for one in optimizers]))
        go(model, optimizers, range(3, 8))

    def resumed(name: str, *, skip: int = -1) -> Comparison:
        model, optimizers = parts()
        model.load_state_dict(saved[0])
        for one, state in zip(optimizers, saved[1], strict=True):
            one.load_state_dict(copy.deepcopy(state))
        with traindiff.record(tmp_path / name, model, optimizers, first_step=first_step):
            go(model, optimizers, range(3, 8), skip=skip)
        return traindiff.compare(tmp_path / "b", tmp_path / name)

    right = resumed("right")
    assert right.verdict == "identical", str(right)
    if not first_step:
        assert right.notes[0].startswith("Step 0 of the candidate begins with the parameters of the baseline's step 3")
    first = resumed("wrong", skip=6).first_divergence
    assert first is not None
    assert (first.step, first.kind, first.path) == (7, "turn", "optimizer[1]")
    assert (first.evidence["baseline"], first.evidence["candidate"]) == (4, 3)
