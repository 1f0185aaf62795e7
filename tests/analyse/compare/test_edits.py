"""Parameters that both runs change between steps, each in its own way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import traindiff
from traindiff.analyse.compare.verdict import Comparison

Change = Callable[[Tensor], object]


def recorded(path: Path, changes: dict[int, Change], *, micro_batches: int = 1) -> Path:
    """Five steps of a small model, with a change of a weight before some of them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    weight = model.get_parameter("2.weight")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with traindiff.record(path, model, optimizer):
        for step in range(5):
            if step in changes:
                with torch.no_grad():
                    changes[step](weight)
            x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
            for part in x.chunk(micro_batches):
                (((model(part) - part[:, :4]) ** 2).mean() / micro_batches).backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


def compared(where: Path, baseline: dict[int, Change], candidate: dict[int, Change], **options: int) -> Comparison:
    return traindiff.compare(recorded(where / "b", baseline), recorded(where / "c", candidate, **options))


def added(value: float) -> Change:
    return lambda weight: weight[0, 0].add_(value)


def clamped(limit: float) -> Change:
    return lambda weight: weight.clamp_(-limit, limit)


def reset(weight: Tensor) -> None:
    weight.copy_(torch.linspace(-0.2, 0.2, weight.numel()).view_as(weight))


def rounded_to_a_grid(weight: Tensor) -> None:
    weight.copy_((weight * 16).round() / 16)


def pruned(weight: Tensor) -> None:
    weight[weight.abs() < weight.abs().median()] = 0.0


LEGAL = [added(0.5), clamped(0.1), reset, rounded_to_a_grid, pruned, lambda weight: weight.mul_(3.0)]


@pytest.mark.parametrize("change", LEGAL)
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_the_same_edit_in_both_runs_does_not_tell_them_apart(
    change: Change, micro_batches: int, tmp_path: Path
) -> None:
    edits = dict.fromkeys((2, 3, 4), change)
    found = compared(tmp_path, edits, edits, micro_batches=micro_batches)

    assert (found.verdict, found.findings) == ("identical" if micro_batches == 1 else "equivalent", ())
    assert any(note.startswith("In both runs: 2.weight changed between step 1 and step 2") for note in found.notes)


HALF: dict[int, Change] = {2: added(0.5)}


@pytest.mark.parametrize(
    ("baseline", "candidate", "step", "micro_batches"),
    [
        (HALF, {2: added(0.25)}, 2, 1),
        ({2: clamped(0.1)}, {2: clamped(0.099)}, 2, 1),
        (HALF, {2: reset}, 2, 1),
        ({**HALF, 4: added(0.5)}, {**HALF, 4: added(-0.5)}, 4, 1),
        (HALF, {2: added(0.25)}, 2, 4),
        (HALF, {2: reset}, 2, 4),
        ({**HALF, 4: added(0.5)}, {**HALF, 4: added(-0.5)}, 4, 4),
    ],
)
def test_each_runs_own_edit_is_told_where_they_differ(
    baseline: dict[int, Change], candidate: dict[int, Change], step: int, micro_batches: int, tmp_path: Path
) -> None:
    found = compared(tmp_path, baseline, candidate, micro_batches=micro_batches)

    first = found.first_divergence
    assert found.verdict == "diverged"
    assert first is not None
    assert (first.step, first.phase, first.stage, first.path) == (step, "param", "edited", "2.weight")
    assert f"2.weight changed between step {step - 1} and step {step}, not by the optimizer's step" in first.message
    assert "in the baseline and by" in first.message


def test_an_edit_that_one_run_repeats_later_is_told(tmp_path: Path) -> None:
    first = compared(tmp_path, {2: added(0.5)}, {2: added(0.5), 4: added(0.5)}).first_divergence

    assert first is not None
    assert first.message.startswith("In the candidate, 2.weight changed between step 3 and step 4, not by")


def test_an_edit_between_the_backward_pass_and_the_optimizer_is_asked_for_at_the_update(tmp_path: Path) -> None:
    def trained(path: Path, edited: float) -> Path:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with traindiff.record(path, model, optimizer):
            for step in range(4):
                x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
                model(x).square().mean().backward()
                if step == 2:
                    with torch.no_grad():
                        model.get_parameter("2.weight")[0, :8] += edited
                optimizer.step()
                optimizer.zero_grad()
        return path

    found = traindiff.compare(trained(tmp_path / "b", 0.0), trained(tmp_path / "c", 0.1))

    first, *others = found.findings
    assert (first.step, first.phase, first.path) == (2, "update", "2.weight")
    asked = "does something else change 2.weight between the forward pass and the end of the optimizer's step?"
    assert first.message.endswith(
        f" Its gradient and the optimizer's state agree: does the optimizer compute the step otherwise, or {asked}"
    )
    assert not any("agree: does" in other.message for other in others)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("factor", [1.01, 1.5])
def test_a_change_of_one_run_is_found_where_the_other_one_begins_to_record(
    factor: float, turned: bool, tmp_path: Path
) -> None:
    """The other run shows the parameter only as its first recorded step finds it."""
    torch.manual_seed(0)
    paths = tmp_path / "late", tmp_path / "whole"
    for path, change in zip(paths, (1.0, factor), strict=True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with traindiff.record(path, model, optimizer, steps="4-" if path == paths[0] else None):
            for step in range(7):
                if step == 4:
                    with torch.no_grad():
                        model.get_parameter("2.weight").mul_(change)
                model(torch.randn(8, 8, generator=torch.Generator().manual_seed(step))).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

    first = traindiff.compare(*(paths[::-1] if turned else paths)).first_divergence

    assert first is not None
    assert (first.step, first.kind, first.path) == (4, "edited", "2.weight")
