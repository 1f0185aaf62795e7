"""Clipping that one run does: what is said of it, and what of the gradients before it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import traindiff
from tests.analyse.merge.test_clips import clips_of, number
from tests.analyse.merge.test_loss_scale import EVERYTHING, train
from tests.made_up import Edit, Seen, Step, record
from traindiff.analyse.compare.clipping import hidden_by_clipping
from traindiff.analyse.merge.recorded_calls import Clip


def test_clipping_by_default_is_the_first_divergence(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", scaled=False)
    clipped = train(tmp_path / "clipped", scaled=False, clip=0.1)

    comparison = traindiff.compare(plain, clipped)

    first = comparison.first_divergence
    assert first is not None
    assert comparison.verdict == "diverged"
    assert (first.step, first.phase, first.stage, first.slot, first.kind) == (
        0, "grad", "clipped", "max_norm", "clipping",
    )  # fmt: skip
    assert first.message.startswith("The candidate clips gradients to a norm of 0.1; the baseline does not clip.")
    assert first.evidence["coefficient"] == pytest.approx(0.1 / first.evidence["norm"], rel=1e-3)
    assert "(= what clipping makes of them)" in comparison.findings[1].message
    assert not any(comparison.unaligned)


def test_before_clipping_gradients_agree_and_after_it_they_do_not(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", scaled=False, observe=EVERYTHING, steps=1)
    clipped = train(tmp_path / "clipped", scaled=False, clip=0.1, observe=EVERYTHING, steps=1)

    comparison = traindiff.compare(plain, clipped)

    assert [finding.kind for finding in comparison.findings[:2]] == ["clipping", "scale"]
    differing = {row.stage for row in comparison.differences if row.phase == "grad" and row.difference > 0.0}
    equal = {row.stage for row in comparison.differences if row.phase == "grad" and row.difference == 0.0}
    assert "reduced" in equal
    assert "reduced" not in differing


@pytest.mark.parametrize("observe", ["param", "backward", "optimizer"])
def test_clipping_that_a_run_does_not_observe_is_no_difference(tmp_path: Path, observe: str) -> None:
    seen = train(tmp_path / "b", scaled=False, clip=0.1)
    paths = [seen, train(tmp_path / "c", scaled=False, clip=0.1, observe=observe)]

    for comparison in (traindiff.compare(*paths), traindiff.compare(*reversed(paths))):
        assert (comparison.verdict, comparison.findings) == ("incomplete", ())
        assert not [note for note in comparison.notes if " clip" in note]


def test_other_limits_are_named(tmp_path: Path) -> None:
    paths = [train(tmp_path / str(limit), scaled=False, clip=limit) for limit in (0.1, 0.05)]

    first = traindiff.compare(*paths).first_divergence

    assert first is not None
    assert first.message == (
        "The baseline clips gradients to a norm of 0.1, the candidate clips gradients to a norm of 0.05."
    )


@pytest.mark.parametrize(("clips_there", "other"), [(False, "the baseline does not clip"), (True, "")])
def test_clipping_on_one_rank_only_is_said_to_be_there_only(clips_there: bool, other: str, tmp_path: Path) -> None:
    def clip(_step: int, sites: Step) -> None:
        for slot, value in (("norm", 0.5), ("max_norm", 0.1)):
            sites["grad", "clipped", "(all parameters)", slot] = Seen(values=np.array(value))

    plain = record(tmp_path / "plain", clip if clips_there else lambda step, sites: None)
    for rank in range(2):
        edit = clip if rank == 0 else lambda step, sites: None
        record(tmp_path / "run", edit, rank=rank, run={"world_size": 2})

    first = traindiff.compare(plain, tmp_path / "run").first_divergence

    assert first is not None
    assert first.kind == "clipping"
    assert "the candidate clips gradients to a norm of 0.1 on rank 0 only" in first.message.lower()
    assert other in first.message


@pytest.mark.parametrize("limit", [1e3, float("inf")])  # inf: to learn the norm
def test_clipping_that_changes_nothing_is_a_note(limit: float, tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", scaled=False)
    clipped = train(tmp_path / "clipped", scaled=False, clip=limit)

    comparison = traindiff.compare(plain, clipped)

    assert comparison.verdict == "identical", str(comparison)
    assert f"Only the candidate clips gradients to a norm of {limit:g}; that changed nothing." in comparison.notes


@pytest.mark.parametrize("limits", [(0.0, 0.25), (0.25, 0.0), (float("inf"), 0.25)])
def test_clipping_to_nothing_or_not_at_all_is_another_limit(limits: tuple[float, float], tmp_path: Path) -> None:
    def clip(to: float) -> Edit:
        def edit(_step: int, sites: Step) -> None:
            for slot, value in (("norm", 0.5), ("max_norm", to)):
                sites["grad", "clipped", "(all parameters)", slot] = Seen(values=np.array(value))
            sites["grad", "", "fc.bias", "grad"].values *= np.float32(1 + to if to < 1.0 else 1)

        return edit

    comparison = traindiff.compare(*(record(tmp_path / str(limit), clip(limit)) for limit in limits))

    assert [finding.message for finding in comparison.findings if finding.kind == "clipping"] == [
        f"The baseline clips gradients to a norm of {limits[0]:g}, the candidate clips gradients to a norm of "
        f"{limits[1]:g}."
    ]


def test_what_differs_before_the_gradients_is_not_said_to_come_from_clipping(tmp_path: Path) -> None:
    def clip(norm: float, *, scaled: bool) -> Edit:
        def edit(_step: int, sites: Step) -> None:
            for slot, value in (("norm", norm), ("max_norm", 0.1)):
                sites["grad", "clipped", "(all parameters)", slot] = Seen(values=np.array(value))
            if scaled:
                sites["forward", "", "fc", "output[0]"].values *= np.float32(0.5)

        return edit

    baseline = record(tmp_path / "baseline", clip(0.5, scaled=False))
    first = traindiff.compare(baseline, record(tmp_path / "candidate", clip(1.0, scaled=True))).first_divergence

    assert first is not None
    assert (first.phase, first.kind) == ("forward", "scale")
    assert first.message == "The candidate's is 0.5 x the baseline's (= 1/2)."


def overflowing(path: Path, *, at: int = -1, value: float = math.inf) -> Path:
    """Four steps with clipping; in one of them the loss is not finite."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with traindiff.record(path, model, optimizer):
        for step in range(4):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
            (model(x).square().mean() * (value if step == at else 1.0)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
    return path


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_run_that_clips_gradients_which_are_not_finite_is_not_said_not_to_clip(value: float, tmp_path: Path) -> None:
    found = traindiff.compare(overflowing(tmp_path / "b"), overflowing(tmp_path / "c", at=2, value=value))

    assert found.verdict == "diverged"
    assert not any("clip" in text for text in (*(one.message for one in found.findings), *found.notes))


def by_hand(gradients: list[Tensor], to: float = 0.01) -> None:
    whole = torch.stack([one.float().norm() for one in gradients]).norm()
    for one in gradients:
        one.mul_((to / (whole + 1e-6)).clamp(max=1.0).to(one.dtype))


def elements_by_hand(gradients: list[Tensor], to: float = 0.003) -> None:
    for one in gradients:
        one.clamp_(-to, to)


def clipping(path: Path, how: str, *, dtype: torch.dtype = torch.float32) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with traindiff.record(path, model, optimizer):
        for step in range(3):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).to(dtype)
            model(x).square().mean().backward()
            gradients = [one.grad for one in model.parameters() if one.grad is not None]
            if how == "norm":
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            elif how == "elements":
                nn.utils.clip_grad_value_(model.parameters(), 0.003)
            elif how == "norm by hand":
                by_hand(gradients)
            elif how == "elements by hand":
                elements_by_hand(gradients)
            elif how == "to another norm by hand":
                by_hand(gradients, 0.02)
            elif how == "to nearly that norm by hand":
                by_hand(gradients, 0.0105)
            optimizer.step()
            optimizer.zero_grad()
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("what", ["norm", "elements"])
def test_clipping_by_hand_is_clipping_too(what: str, dtype: torch.dtype, tmp_path: Path) -> None:
    called, hand = (clipping(tmp_path / how, how, dtype=dtype) for how in (what, f"{what} by hand"))

    for pair, seen, other in (((called, hand), "baseline", "candidate"), ((hand, called), "candidate", "baseline")):
        found = traindiff.compare(*pair)

        assert found.verdict in ("identical", "equivalent"), str(found)
        limit = "gradients to a norm of 0.01" if what == "norm" else "elements of gradients to 0.003"
        assert any(
            note.startswith(f"Only the {seen} is seen to clip {limit}. The gradients that the {other}'s optimizer uses")
            for note in found.notes
        )


@pytest.mark.parametrize("what", ["norm", "elements"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_that_does_not_clip_is_found(what: str, dtype: torch.dtype, tmp_path: Path) -> None:
    called, plain = (clipping(tmp_path / how, how, dtype=dtype) for how in (what, "not"))

    for pair in ((called, plain), (plain, called)):
        first = traindiff.compare(*pair).first_divergence

        assert first is not None
        assert (first.step, first.kind) == (0, "clipping")


def test_clipping_to_another_limit_by_hand_is_found(tmp_path: Path) -> None:
    called, hand = (clipping(tmp_path / how, how) for how in ("norm", "to another norm by hand"))

    assert traindiff.compare(called, hand).verdict == "diverged"


def test_clipping_by_hand_to_nearly_the_same_norm_is_told_of_all_gradients_together(tmp_path: Path) -> None:
    called, hand = (clipping(tmp_path / how.replace(" ", "-"), how) for how in ("norm", "to nearly that norm by hand"))

    for pair, factor in (((called, hand), "1.05"), ((hand, called), "0.9524")):
        first = traindiff.compare(*pair).first_divergence

        assert first is not None
        assert (first.step, first.phase, first.path) == (0, "grad", "(all parameters)")
        assert first.message == f"All gradients are {factor} x the baseline's."


@pytest.mark.parametrize(("factor", "hidden"), [(0.5, True), (2.0, True), (1.7, False), (1.0, False)])
def test_a_factor_that_clipping_hides_is_found_where_no_correct_run_has_it(factor: float, hidden: bool) -> None:
    """Gradients that are averaged twice have the same bits again once they are clipped."""

    def clipping(norm: float) -> list[Clip]:
        return clips_of(number("norm", norm), number("max_norm", 0.1))

    found = list(hidden_by_clipping(clipping(0.5), clipping(0.5 * factor), step=3, micro_steps=1, ranks=2))

    assert [(one.kind, one.step) for one in found] == [("clipping", 3)] * hidden
    if hidden:
        assert "(= world size 2: " in found[0].message or "one over the world size: " in found[0].message
        assert found[0].message.endswith("Clipping hides that.")


def clipped_under_autocast(path: Path, ratio: float) -> Path:
    """Another gradient of a middle layer makes the norm `ratio` x what it should be, before all are clipped to it."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8, bias=False) for _ in range(4)]
    model = nn.Sequential(*(part for layer in layers for part in (layer, nn.SiLU())), nn.Linear(8, 4, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with traindiff.record(path, model, optimizer):
        for step in range(2):
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
            with torch.autocast("cpu", torch.bfloat16):
                model(x).float().exp().mean().backward()
            gradient = layers[2].weight.grad
            assert gradient is not None
            if step == 1 and ratio > 1.0:
                whole = math.hypot(*(float(one.grad.norm()) for one in model.parameters() if one.grad is not None))
                gradient *= -math.sqrt(1.0 + (ratio**2 - 1.0) * (whole / float(gradient.norm())) ** 2)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
    return path


@pytest.mark.parametrize("ratio", [1.005, 1.0095, 1.015])
def test_a_gradient_that_hardly_moves_the_norm_is_told_from_those_that_clipping_scales(
    ratio: float, tmp_path: Path
) -> None:
    right = clipped_under_autocast(tmp_path / "right", 1.0)
    found = traindiff.compare(right, clipped_under_autocast(tmp_path / "wrong", ratio))

    first = found.first_divergence
    assert first is not None
    assert (found.verdict, first.step, first.phase, first.path) == ("diverged", 1, "grad", "4.weight")
    assert len(found.findings) < 4
