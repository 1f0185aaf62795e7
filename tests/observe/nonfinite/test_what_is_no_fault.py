"""Infinities on purpose are not flagged: masks, gradients that a loss scaler is about to skip, recomputation."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import traindiff
from tests.observe.nonfinite.trainings import WIDTH, Net, found, train


class Scores(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = x @ x.transpose(-1, -2)
        return scores if mask is None else scores + mask


class Attention(nn.Module):
    """Masked attention, the mask made and added in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.given = nn.Linear(WIDTH, WIDTH)
        self.scores = Scores()
        self.softmax = nn.Softmax(-1)
        self.identity = nn.Identity()
        self.register_buffer("causal", torch.full((6, 6), -math.inf).triu(1))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.given(x)
        if self.way == "filled":
            scores = self.scores(x).masked_fill(self.causal.isinf(), -math.inf)
            shares = self.softmax(self.identity(scores))
        elif self.way == "a boolean keyword":
            shares = functional.softmax(self.scores(x, mask=None).masked_fill(~mask, -math.inf), -1)
        elif self.way == "added inside":
            shares = self.softmax(self.scores(x, mask=self.identity(self.causal)))
        else:
            return functional.scaled_dot_product_attention(x[None], x[None], x[None], attn_mask=mask)[0]
        return shares @ x


@pytest.mark.parametrize("way", ["filled", "a boolean keyword", "an additive input"])
def test_masks_are_recognized(way: str) -> None:
    torch.manual_seed(0)
    model = Attention(way)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    causal = torch.ones(6, 6).tril().bool()
    mask = {"filled": None, "a boolean keyword": causal}.get(way, model.causal)
    file = io.StringIO()
    with traindiff.watch(model, optimizer, output=None, file=file):
        for _ in range(2):
            model(torch.randn(6, WIDTH), mask=mask).sum().backward()
            optimizer.step()
    assert file.getvalue() == ""


def test_the_least_number_of_a_dtype_is_a_mask_too() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Identity())
    mask = torch.zeros(4, WIDTH)
    mask[0] = torch.finfo(torch.float32).min
    with traindiff.watch(model, output=None):
        model[1](mask)


def test_masked_scores_that_a_module_returns_are_declared() -> None:
    def run(**settings: Any) -> None:
        model = Attention("added inside")
        with traindiff.watch(model, output=None, file=io.StringIO(), **settings):
            model(torch.randn(6, WIDTH)).sum().backward()

    with pytest.raises(traindiff.NonFiniteError, match="scores output holds infinity"):
        run()
    run(masks=["scores output", "softmax input[0]"])
    run(masks="scores *")


def test_a_declared_mask_may_hold_no_nan() -> None:
    class Bad(Attention):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return self.scores(self.given(x), mask=self.causal * 0)

    message = found(make=lambda: Bad("added inside"), masks=["*"])
    assert "scores input.mask holds NaN" in message


def test_scores_of_which_a_whole_row_is_masked_are_the_origin_of_the_softmaxs_nan() -> None:
    class Whole(Attention):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return self.softmax(self.scores(self.given(x)) + torch.full((6, 6), -math.inf))

    message = found(make=lambda: Whole("filled"))
    assert (
        "softmax input[0] holds infinity, made by the code of (root) (Whole) itself, between scores and softmax"
        in message
    )


def scaled(factors: list[float], **settings: Any) -> tuple[Any, str]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    file = io.StringIO()
    with traindiff.watch(model, optimizer, output=None, file=file, **settings) as watch:
        for factor in factors:
            model.steep.factor = factor
            scaler.scale(model(torch.randn(6, WIDTH)).square().mean()).backward()
            if settings.get("unscales"):
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return watch, file.getvalue()


def test_infinite_gradients_that_a_loss_scaler_skips_are_a_skipped_step_with_its_scale() -> None:
    watch, printed = scaled([1.0, math.inf, 1.0, 1.0, math.inf])

    assert printed == ""
    assert watch.origins == []
    assert watch.skipped_steps == [(1, 1024.0), (4, 512.0)]


def test_gradients_that_stay_infinite_when_the_loss_scale_is_used_up_are_found() -> None:
    with pytest.raises(
        traindiff.NonFiniteError, match=r"batch_number=10\. The gradient that comes back to scale output"
    ):
        scaled([math.inf] * 12)


def test_a_loss_that_is_nan_is_no_business_of_a_loss_scaler() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with traindiff.watch(model, optimizer, output=None, file=io.StringIO()):
        loss = torch.sqrt(model(torch.randn(6, WIDTH)).square().mean() * 0 - 1)
        with pytest.raises(traindiff.NonFiniteError, match="The loss is NaN: every output of a module is finite"):
            scaler.scale(loss).backward()


def test_scaled_gradients_near_the_end_of_their_range_are_no_early_sign() -> None:
    scaled([2.0**113, 1.0])  # warnings are errors


def test_a_scaled_loss_with_gradients_that_nobody_checks_is_found_where_it_was_made() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with traindiff.watch(model, optimizer, output=None, file=io.StringIO()):
        model.steep.factor = math.inf
        scaler.scale(model(torch.randn(6, WIDTH)).square().mean()).backward()
        with pytest.raises(
            traindiff.NonFiniteError, match="comes back to scale output holds infinity: made by the backward"
        ):
            optimizer.step()  # not scaler.step(optimizer)


def test_a_disabled_loss_scaler_excuses_nothing() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    model.last.weight.register_hook(lambda gradient: gradient * math.inf)
    with traindiff.watch(model, optimizer, output=None, file=io.StringIO()):
        scaler.scale(model(torch.randn(6, WIDTH)).square().mean()).backward()
        with pytest.raises(traindiff.NonFiniteError, match=r"The gradient of last\.weight"):
            scaler.step(optimizer)


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.inner, self.last = Net(), nn.Linear(4, 2)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.inner, x.requires_grad_(), use_reentrant=self.use_reentrant)
        return self.last(hidden)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_frames_of_recomputation_are_marked_and_the_origin_is_in_the_first_pass(use_reentrant: bool) -> None:
    watch, printed = train(make=lambda: Checkpointed(use_reentrant), trace=(1,), batch=torch.randn(6, WIDTH))
    assert "inner.first Linear (recomputed)" in printed
    assert "inner.first Linear\n" in printed
    assert watch.origins == []

    def breaks(model: Any, _: Any, step: int) -> None:
        model.inner.scale.factor = math.nan if step == 1 else 1.0

    assert "inner.scale output holds NaN" in found(
        make=lambda: Checkpointed(use_reentrant), breaks=breaks, batch=torch.randn(6, WIDTH)
    )

    def steep(model: Any, _: Any, step: int) -> None:
        model.inner.steep.factor = math.inf if step == 1 else 1.0

    message = found(make=lambda: Checkpointed(use_reentrant), breaks=steep, batch=torch.randn(6, WIDTH))
    assert "comes back to inner.scale output holds" in message
    assert "made by the backward pass of inner.steep (Steep)" in message
