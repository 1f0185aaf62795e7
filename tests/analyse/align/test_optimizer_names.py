"""Two optimizers that runs step in another order, and that were found when they first stepped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import traindiff
from traindiff.analyse.align.optimizer_names import with_names_of
from traindiff.storage import open_recording


def trained(
    path: Path, order: str, *, rate: float = 3e-3, scaled: float = 1.0, extra: bool = False, after: int = 0
) -> Path:
    """Train for 3 steps, or for as many after the first ones, which are not recorded then."""
    torch.manual_seed(0)
    models = {"a": nn.Sequential(nn.Linear(6, 12), nn.Tanh()), "b": nn.Linear(12, 3)}
    optimizers = {
        "a": torch.optim.SGD(models["a"].parameters(), lr=0.05, momentum=0.9),
        "b": torch.optim.Adam(models["b"].parameters(), lr=rate),
    }

    def steps(numbers: range) -> None:
        for step in numbers:
            data = torch.Generator().manual_seed(step)
            x, y = torch.randn(20, 6, generator=data), torch.randint(3, (20,), generator=data)
            (cross_entropy(models["b"](models["a"](x)), y) * scaled).backward()
            for name in order:
                optimizers[name].step()
            if extra and not step:
                optimizers["b"].step()
            for one in optimizers.values():
                one.zero_grad()

    steps(range(after))
    with traindiff.record(path, models):
        steps(range(after, after + 3))
    return path


@pytest.mark.parametrize("orders", [("ab", "ba"), ("ba", "ab")])
def test_the_order_in_which_optimizers_step_makes_no_difference(orders: tuple[str, str], tmp_path: Path) -> None:
    found = traindiff.compare(*(trained(tmp_path / order, order) for order in orders))

    assert (found.verdict, found.findings, found.unaligned) == ("identical", (), ((), ())), str(found)
    assert not any("Settings differ" in note for note in found.notes)


def test_a_fault_in_one_of_them_is_found_where_it_is(tmp_path: Path) -> None:
    baseline = trained(tmp_path / "baseline", "ab")

    rate = traindiff.compare(baseline, trained(tmp_path / "rate", "ba", rate=6e-3)).first_divergence
    loss = traindiff.compare(baseline, trained(tmp_path / "loss", "ba", scaled=1.5)).first_divergence

    assert rate is not None
    assert (
        rate.message == "lr is 0.003 in the baseline and 0.006 in the candidate, for 2 parameters (b.weight, b.bias)."
    )
    assert loss is not None
    assert (loss.step, loss.phase) == (0, "loss")


def test_names_stay_where_optimizers_do_not_only_change_places(tmp_path: Path) -> None:
    baseline = open_recording(str(trained(tmp_path / "baseline", "ab")))
    for name, path in (
        ("same", trained(tmp_path / "same", "ab")),
        ("one", trained(tmp_path / "one", "a")),
        ("more", trained(tmp_path / "more", "ba", extra=True)),
    ):
        candidate = open_recording(str(path))
        assert with_names_of(baseline, candidate, lambda path: path) is candidate, name


def test_a_run_that_continues_may_step_them_in_another_order(tmp_path: Path) -> None:
    baseline = tmp_path / "whole"
    torch.manual_seed(0)
    trained(baseline, "ab")
    later = trained(tmp_path / "later", "ba", after=1)

    found = traindiff.compare(baseline, later, steps="1-2")

    assert (found.verdict, found.findings) == ("identical", ()), str(found)
    assert found.steps == (1, 2)
    assert any("begins" in note or "continues" in note for note in found.notes), found.notes
