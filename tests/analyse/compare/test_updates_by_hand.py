"""Parameters that no optimizer holds: the training updates them itself, or averages others into them."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import traindiff
from traindiff.analyse.compare.verdict import Comparison
from traindiff.observe.torch.hooks.model_state import ModelStateTap


class Averaged(nn.Module):
    """A model with a slow copy of itself whose output is the target, and a layer that the loop updates."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.target = deepcopy(self.online).requires_grad_(False)
        self.scale = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.target(x + 0.1)
        error: Tensor = (self.scale(self.online(x)) - target).square().mean()
        return error


def recorded(
    path: Path,
    *,
    rates: dict[int, float] | None = None,
    momenta: dict[int, float] | None = None,
    micro_batches: int = 1,
    new_memory: bool = False,
    every: int = 1,
) -> Path:
    """Six steps; by step: a learning rate of the layer, and a momentum of the average, that differ from the usual."""
    torch.manual_seed(0)
    model = Averaged()
    optimizer = torch.optim.Adam(model.online.parameters(), lr=1e-2)
    with traindiff.record(path, model, optimizer, every=every):
        for step in range(6):
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
            model.zero_grad()
            for part in x.chunk(micro_batches):
                (model(part) / micro_batches).backward()
            optimizer.step()
            rate, momentum = (rates or {}).get(step, 0.1), (momenta or {}).get(step, 0.9)
            with torch.no_grad():
                for one in model.scale.parameters() if rate else ():
                    assert one.grad is not None
                    one.sub_(rate * one.grad)
                for slow, fast in zip(model.target.parameters(), model.online.parameters(), strict=True):
                    if new_memory:
                        slow.data = slow.data * momentum + fast.data * (1 - momentum)
                    elif momentum < 1:
                        slow.mul_(momentum).add_(fast, alpha=1 - momentum)
    return path


def compared(where: Path, **candidate: object) -> Comparison:
    return traindiff.compare(recorded(where / "b"), recorded(where / "c", **candidate))  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [{"new_memory": True}, {"micro_batches": 4}])
def test_the_same_update_in_other_operations_is_no_finding(change: dict[str, object], tmp_path: Path) -> None:
    found = compared(tmp_path, **change)

    assert (found.verdict, found.findings) == ("equivalent", ())


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"rates": {2: 0.2}}, "scale.weight"),
        ({"rates": {2: 0.11}}, "scale.weight"),
        ({"rates": {2: 0.0}}, "scale.weight"),
        ({"momenta": {2: 0.95}}, "target.0.weight"),
        ({"momenta": {2: 1.0}}, "target.0.weight"),
        ({"momenta": dict.fromkeys(range(2, 6), 0.1)}, "target.0.weight"),
    ],
)
def test_another_update_is_named_before_the_step_that_finds_it(
    change: dict[str, dict[int, float]], path: str, micro_batches: int, tmp_path: Path
) -> None:
    found = compared(tmp_path, **change, micro_batches=micro_batches)

    first = found.first_divergence
    assert found.verdict == "diverged"
    assert first is not None
    assert (first.step, first.phase, first.stage, first.path, first.kind) == (3, "param", "before", path, "edited")
    assert f"{path}, which no optimizer holds, changed between step 2 and step 3" in first.message
    of_one_run = 0.0 in change.get("rates", {}).values() or 1.0 in change.get("momenta", {}).values()
    assert ("In the candidate, it did not." in first.message) is of_one_run


def test_what_is_computed_with_another_average_follows_from_it(tmp_path: Path) -> None:
    found = compared(tmp_path, momenta={2: 0.5})

    words = {one.path: one.word for one in found.differences if one.phase == "forward"}
    assert [words[path] for path in ("target.0", "target", "online", "")] == ["follows"] * 4
    assert words["scale"] in ("follows", "within")


def test_a_run_that_sees_all_changes_is_not_held_against_one_that_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    baseline = recorded(tmp_path / "b")
    monkeypatch.setattr(ModelStateTap, "_may_look", False)  # as under an engine that exchanges parameters
    candidate = recorded(tmp_path / "c", micro_batches=4)

    assert traindiff.compare(baseline, candidate).findings == ()


def test_steps_that_were_not_recorded_are_not_taken_for_one(tmp_path: Path) -> None:
    baseline = recorded(tmp_path / "b", every=2)
    candidate = recorded(tmp_path / "c", every=2, micro_batches=4)

    assert traindiff.compare(baseline, candidate).findings == ()


def test_nothing_is_said_of_one_run_alone(tmp_path: Path) -> None:
    checked = traindiff.check(recorded(tmp_path / "b"))

    assert (checked.verdict, checked.findings) == ("healthy", ())
