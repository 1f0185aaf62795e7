"""Real faults inside a module, located to the operator and the line that calls it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import traindiff
from traindiff.analyse.compare import Comparison
from traindiff.analyse.compare.operator_localization import OperatorLocalization

WIDTH = 16
SOURCE = Path(__file__)


class Gelu(torch.autograd.Function):
    """A GELU whose derivative is written by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wrong: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.wrong = wrong
        return x * torch.sigmoid(1.702 * x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(1.702 * x)
        slope = 1.0 if ctx.wrong else 1.702
        return gradients[0] * (gate + slope * x * gate * (1 - gate)), None  # the wrong derivative


class Block(nn.Module):
    """Attention, a matrix product by hand, and an activation; each may be wrong."""

    def __init__(self, wrong: str) -> None:
        super().__init__()
        self.wrong = wrong
        self.norm = nn.LayerNorm(WIDTH, eps=1e-3 if wrong == "eps" else 1e-5)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.out = nn.Linear(WIDTH, WIDTH)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        if self.wrong == "fused":
            return functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        scale = 0.5 if self.wrong == "scale" else WIDTH**-0.5
        scores = q @ k.transpose(-2, -1)
        if self.wrong != "no scale":
            scores = scores * scale
        return scores.softmax(dim=-1) @ v

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        x = self.mixed(x)
        x = Gelu.apply(x, self.wrong == "backward")
        return self.out(x)

    def mixed(self, x: Tensor) -> Tensor:
        if self.wrong == "transposed":
            return x @ self.mix
        return x @ self.mix.t()


def record(path: Path, wrong: str = "", *, steps: int = 2, **settings: Any) -> Path:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, WIDTH), Block(wrong), nn.Linear(WIDTH, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    with traindiff.record(path, net, optimizer, strict=True, **{"operators": "1", **settings}):
        for step in range(steps):
            batch = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(step))
            net(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


Compared = Callable[..., Comparison]


@pytest.fixture
def compared(tmp_path: Path) -> Compared:
    def run(wrong: str, **settings: Any) -> Comparison:
        record(tmp_path / "baseline", **settings)
        record(tmp_path / "candidate", wrong, **settings)
        return traindiff.compare(tmp_path / "baseline", tmp_path / "candidate")

    return run


def first(comparison: Comparison) -> OperatorLocalization:
    """What was found inside the module of the first divergence, which says so."""
    zoom, divergence = comparison.zooms[0], comparison.first_divergence
    assert divergence is not None
    assert (zoom.step, zoom.phase, zoom.path, zoom.slot) == (
        divergence.step, divergence.phase, divergence.path, divergence.slot,
    )  # fmt: skip
    assert divergence.message.endswith(f"Inside it: {zoom.message}")
    return zoom


def place(code: str) -> str:
    """`FILE:LINE: CODE` of the line of this file that reads so."""
    lines = [line.strip() for line in SOURCE.read_text().splitlines()]
    name = str(SOURCE).removeprefix(f"{Path.cwd()}/")
    return f"{name}:{1 + lines.index(code)}: {code}"


def test_a_wrong_epsilon_is_the_operator_whose_setting_differs(compared: Compared) -> None:
    zoom = first(compared("eps"))

    assert (zoom.path, zoom.cause, zoom.operator) == ("1.norm", "operator", "1.norm/aten.native_layer_norm[0]")
    assert "its inputs have the same bits" in zoom.message
    assert "It is called with eps = 1e-05 in the baseline, 0.001 in the candidate." in zoom.message
    assert zoom.message.endswith(f"Called from {place('x = x + self.attention(self.norm(x))')}")


def test_a_wrong_scale_is_found_where_the_scores_are_multiplied(compared: Compared) -> None:
    zoom = first(compared("scale"))

    assert zoom.path == "1.out"  # the next module whose output is seen; the fault is in the code around it
    assert (zoom.module, zoom.cause, zoom.operator) == ("1", "operator", "1/aten.mul[0]")
    assert zoom.difference == pytest.approx(1.0, rel=0.3)  # twice the baseline's, estimated
    assert "other = 0.25 in the baseline, 0.5 in the candidate" in zoom.message
    assert zoom.message.endswith(f"Called from {place('scores = scores * scale')}")


def test_a_scale_that_is_left_out_is_an_operator_that_only_the_baseline_runs(compared: Compared) -> None:
    zoom = first(compared("no scale"))

    assert (zoom.cause, zoom.operator) == ("other-operators", "1/aten._softmax[0]")
    assert "Before that, the baseline alone runs aten.mul[0]" in zoom.message
    alone = [row for row in zoom.rows if row.candidate is None]
    assert [row.shown.path for row in alone] == ["1/aten.mul[0]"]
    assert alone[0].message == "only in the baseline"
    assert place("scores = scores * scale").startswith(alone[0].shown.source)


def test_a_transposed_product_is_found_at_its_line(compared: Compared) -> None:
    zoom = first(compared("transposed"))

    assert (zoom.cause, zoom.operator.partition("[")[0]) == ("other-operators", "1/aten.mm")
    assert zoom.operator_slot == "input[1]"
    assert "the baseline alone runs aten.t[0]" in zoom.message
    assert f"Called from {place('return x @ self.mix')}" in zoom.message
    assert zoom.message.endswith(f"In the baseline, from {place('return x @ self.mix.t()')}")


def test_a_wrong_backward_pass_is_found_inside_the_function_that_has_it(compared: Compared) -> None:
    comparison = compared("backward")
    zoom = first(comparison)

    assert zoom.phase == "backward"
    assert (zoom.module, zoom.cause, zoom.operator) == ("1", "operator", "1/aten.mul[1]")
    assert "other = 1.702 in the baseline, 1.0 in the candidate" in zoom.message
    line = "return gradients[0] * (gate + slope * x * gate * (1 - gate)), None  # the wrong derivative"
    assert zoom.message.endswith(f"(GeluBackward), called from {place(line)}")


def test_other_operators_that_compute_the_same_are_no_finding(compared: Compared) -> None:
    comparison = compared("fused")

    assert comparison.verdict == "equivalent", str(comparison)
    assert comparison.zooms == ()


def test_a_fused_operator_that_computes_something_else_is_shown_beside_those_it_stands_for(tmp_path: Path) -> None:
    record(tmp_path / "baseline", "scale")
    record(tmp_path / "candidate", "fused")

    zoom = first(traindiff.compare(tmp_path / "baseline", tmp_path / "candidate"))

    assert zoom.path == "1.out"
    assert zoom.cause == "other-operators"
    assert "the baseline alone runs" in zoom.message
    assert "the candidate alone runs" in zoom.message
    assert any("scaled_dot_product" in row.shown.path for row in zoom.rows if row.baseline is None)


def test_two_runs_with_the_same_bits_have_nothing_to_zoom_into(compared: Compared) -> None:
    comparison = compared("")

    assert (comparison.verdict, comparison.zooms) == ("identical", ())
    assert comparison.to_json()["operators"] == []


def test_operators_of_one_run_alone_are_said_to_be_that(tmp_path: Path) -> None:
    record(tmp_path / "baseline")
    record(tmp_path / "candidate", "scale", operators=None)

    comparison = traindiff.compare(tmp_path / "baseline", tmp_path / "candidate")

    assert comparison.verdict == "diverged"
    assert comparison.zooms == ()
    assert "Only the baseline has recorded operators, so none could be compared." in comparison.notes


def test_an_operator_is_found_beside_noise_recordings_that_have_operators_too(tmp_path: Path) -> None:
    record(tmp_path / "baseline")
    record(tmp_path / "candidate", "scale")
    noise = [record(tmp_path / f"ulp-{seed}", replica=f"ulp:{seed}") for seed in (1, 2)]

    comparison = traindiff.compare(tmp_path / "baseline", tmp_path / "candidate", noise=noise)

    zoom = first(comparison)
    assert comparison.calibrated
    assert (zoom.cause, zoom.operator) == ("operator", "1/aten.mul[0]")


def test_one_run_by_itself_is_judged_without_its_operators(tmp_path: Path) -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            mask = torch.full_like(x, float("-inf")).triu(1)
            return (x + mask).softmax(dim=-1)

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, WIDTH), Masked(), nn.Linear(WIDTH, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", net, optimizer, operators="1"):
        for _ in range(2):
            net(torch.randn(WIDTH, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert traindiff.check(tmp_path / "run").verdict == "healthy"


def test_recordings_of_operators_alone_have_nothing_that_could_be_identical(tmp_path: Path) -> None:
    runs = [record(tmp_path / wrong, wrong, observe=["operators"]) for wrong in ("right", "scale")]

    found = traindiff.compare(*runs)

    assert found.verdict == "incomplete"
    assert any(
        note.startswith("Both runs have recorded operators alone, which have no verdict") for note in found.notes
    )
