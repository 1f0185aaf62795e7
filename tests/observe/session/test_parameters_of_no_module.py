"""Parameters that an optimizer holds and no module does are observed as those of the model are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer

import traindiff
from tests.observe.hooks.models import mlp
from traindiff.storage import open_recording

BESIDE = "optimizer.groups[1].params[0]"
ALONE = "optimizer[1].groups[0].params[0]"


def train(
    path: Path | None,
    *,
    rate: float = 0.1,
    together: bool = True,
    finds: bool = False,
    first: bool = False,
    fault: Callable[[int, Tensor], None] = lambda step, scale: None,
) -> list[Tensor]:
    """Train a model and the scale of its output.

    Args:
        path: Directory of the recording; None to record nothing.
        rate: Learning rate of the scale.
        together: One optimizer trains both.
        finds: The recording is not given the optimizers.
        first: The optimizer of the scale steps first.
        fault: Called with the number of the step and the scale, before the optimizers step.
    """
    torch.manual_seed(0)
    model, scale = mlp(), torch.full((), 0.5, requires_grad=True)
    optimizers: list[Optimizer] = [Adam([{"params": model.parameters()}, {"params": [scale], "lr": rate}], lr=0.01)]
    if not together:
        optimizers = [Adam(model.parameters(), lr=0.01), Adam([scale], lr=rate)]
    inputs = torch.randn(5, 16, model[0].in_features)
    given = None if finds else optimizers[0] if together else optimizers
    recorded = traindiff.record(path, model, given) if path else nullcontext()
    with recorded:
        for step, batch in enumerate(inputs):
            (model(batch) * scale.exp() - batch.sum(1, keepdim=True)).square().mean().backward()
            fault(step, scale)
            for optimizer in optimizers[:: -1 if first else 1]:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
    return [*model.parameters(), scale]


def phases(path: Path, site: str) -> set[str]:
    (rank,) = open_recording(str(path)).ranks
    return {
        one.phase
        for step in open_recording(str(path)).steps(rank)
        for one in step.observations
        if one.path == site and not one.unobserved
    }


def test_values_gradients_state_and_updates_are_recorded(tmp_path: Path) -> None:
    train(tmp_path / "run")

    assert phases(tmp_path / "run", BESIDE) == {"param", "grad", "optimizer", "update"}
    assert BESIDE in open_recording(str(tmp_path / "run")).rank_content(0)["parameters"]


@pytest.mark.filterwarnings("ignore:.*and none of the model's")
@pytest.mark.parametrize("finds", [False, True])
def test_an_optimizer_of_its_own_is_followed_if_it_was_there_from_the_beginning(tmp_path: Path, finds: bool) -> None:
    train(tmp_path / "run", together=False, finds=finds)

    assert phases(tmp_path / "run", ALONE) == {"param", "grad", "optimizer", "update"}


def test_it_never_counts_the_steps_of_the_model(tmp_path: Path) -> None:
    train(tmp_path / "run", together=False, finds=True, first=True)

    optimizers = open_recording(str(tmp_path / "run")).rank_content(0)["optimizers"]
    assert [one["name"] for one in optimizers] == ["optimizer", "optimizer[1]"]
    assert phases(tmp_path / "run", "2.weight") >= {"param", "grad", "optimizer", "update"}
    assert "grad" in phases(tmp_path / "run", ALONE)


def test_an_optimizer_that_the_loop_makes_is_not_followed(tmp_path: Path) -> None:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model):
        for _ in range(3):
            inputs = torch.randn(4, model[0].in_features)
            worst = torch.zeros_like(inputs, requires_grad=True)
            inner = Adam([worst])
            (-model(inputs + worst).square().mean()).backward()
            inner.step()
            optimizer.zero_grad()
            model(inputs + worst.detach()).square().mean().backward()
            optimizer.step()

    assert [one["name"] for one in open_recording(str(tmp_path / "run")).rank_content(0)["optimizers"]] == ["optimizer"]


@pytest.mark.filterwarnings("ignore:.*and none of the model's")
@pytest.mark.parametrize("together", [True, False])
def test_the_training_computes_the_same_bits(tmp_path: Path, together: bool) -> None:
    recorded = train(tmp_path / "run", together=together)
    plain = train(None, together=together)

    assert all(torch.equal(one, other) for one, other in zip(recorded, plain, strict=True))


@pytest.mark.filterwarnings("ignore:.*and none of the model's")
@pytest.mark.parametrize("together", [True, False])
def test_another_setting_is_named_and_what_follows_is_no_further_finding(tmp_path: Path, together: bool) -> None:
    for name, rate in (("baseline", 0.1), ("again", 0.1), ("candidate", 0.2)):
        train(tmp_path / name, rate=rate, together=together)

    assert traindiff.compare(tmp_path / "baseline", tmp_path / "again").verdict == "identical"
    found = traindiff.compare(tmp_path / "baseline", tmp_path / "candidate")
    (finding,) = found.findings
    assert (finding.step, finding.phase) == (0, "optimizer")
    assert finding.message.startswith("lr is 0.1 in the baseline and 0.2 in the candidate")


def negated(step: int, scale: Tensor) -> None:
    if step == 2 and scale.grad is not None:
        scale.grad.neg_()


def written(step: int, scale: Tensor) -> None:
    if step == 2:
        with torch.no_grad():
            scale += 0.5


@pytest.mark.filterwarnings("ignore:.*and none of the model's")
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(("fault", "phase"), [(negated, "grad"), (written, "update")])
def test_a_fault_of_it_is_located(
    tmp_path: Path, fault: Callable[[int, Tensor], None], phase: str, together: bool
) -> None:
    train(tmp_path / "baseline", together=together)
    train(tmp_path / "candidate", together=together, fault=fault)

    found = traindiff.compare(tmp_path / "baseline", tmp_path / "candidate").first_divergence
    assert found is not None
    assert (found.step, found.phase, found.path) == (2, phase, BESIDE if together else ALONE)
