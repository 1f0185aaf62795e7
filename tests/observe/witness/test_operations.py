"""Gradients of parameters that no layer of a known kind uses follow from the operations that use them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import traindiff
from tests.observe.witness.residuals import OBSERVED, RIGHT, contributed, ratios, reasons, record

WIDTH = 16


class RMSNorm(nn.Module):
    """As many models write it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        return self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x)


class LayerNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(WIDTH) + 0.5), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class One(nn.Module):
    """Has one parameter, and a function of it and the input."""

    def __init__(self, shape: tuple[int, ...], function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape) / 3)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.inner = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x[..., 0] * 10).long().abs() % 20
        return F.linear(self.inner(self.tokens(tokens) + x), self.tokens.weight)


class _Recurrent(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.inner = kind(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)[0]
        return found


def _chosen(x: Tensor, w: Tensor) -> Tensor:
    """Each sample by its own matrix, one after the other, as many mixtures of experts do; the last ones twice."""
    return torch.stack([F.linear(x[number], w[number - 2]) for number in range(len(x))])


def _grouped(x: Tensor, w: Tensor) -> Tensor:
    rows = x.flatten(0, 1)
    ends = torch.tensor([7, 7, len(rows)], dtype=torch.int32)  # one group has no rows
    dtype = torch.float32 if x.dtype == torch.float64 else x.dtype  # of which there is no such product
    found: Tensor = F.grouped_mm(rows.to(dtype), w.to(dtype), offs=ends)
    return found


W = WIDTH
OPERATIONS: dict[str, Callable[[], nn.Module]] = {
    "positions": lambda: One((9, W), lambda x, w: x + w),
    "positions of a longer sequence": lambda: One((1, 30, W), lambda x, w: x + w[:, : x.shape[1]]),
    "positions that are taken away": lambda: One((9, W), lambda x, w: torch.sub(x, w, alpha=0.5)),
    "positions in place": lambda: One((9, W), lambda x, w: (2.0 * x).add_(w)),
    "layer scale": lambda: One((W,), lambda x, w: x + w * x.tanh()),
    "scale of channels": lambda: One((9, 1), lambda x, w: x.mul(w)),
    "one number": lambda: One((), lambda x, w: x.tanh() * w),
    "rms norm": RMSNorm,
    "layer norm": LayerNorm,
    "functional rms norm": lambda: One((W,), lambda x, w: F.rms_norm(x, (W,), w)),
    "linear": lambda: One((5, W), F.linear),
    "linear of more axes": lambda: One((5, W), lambda x, w: F.linear(x[None].transpose(0, 1), w)),
    "product": lambda: One((W, 5), torch.matmul),
    "product from the left": lambda: One((5, 9), lambda x, w: w @ x[0]),
    "product of a matrix": lambda: One((W, 5), lambda x, w: x[0] @ w),
    "product with a column": lambda: One((W,), lambda x, w: x[0] @ w[:, None]),
    "sum of a product": lambda: One((W, 5), lambda x, w: torch.addmm(x[0, :, :5], x[0], w, alpha=0.5)),
    "einsum": lambda: One((5, W), lambda x, w: torch.einsum("bti,oi->bto", x, w)),
    "einsum over heads": lambda: One((W, 2, 4), lambda x, w: torch.einsum("btd,dhk->bthk", x, w)),
    "einsum over heads in front": lambda: One((2, W, 4), lambda x, w: torch.einsum("btd,hdk->bthk", x, w)),
    "einsum over heads, back": lambda: One((4, W // 4, 5), lambda x, w: torch.einsum(
        "btnh,nhd->btd", x.unflatten(-1, (4, -1)), w
    )),
    "einsum over heads, transposed": lambda: One((5, W // 4, 4), lambda x, w: torch.einsum(
        "btnh,dhn->btd", x.unflatten(-1, (4, -1)), w
    )),
    "stack": lambda: One((9, W, 5), lambda x, w: torch.bmm(x.transpose(0, 1), w)),
    "stack of transposed matrices": lambda: One((9, 5, W), lambda x, w: x.transpose(0, 1) @ w.mT),
    "stack from the left": lambda: One((9, 5, W), lambda x, w: w @ x.permute(1, 2, 0)),
    "stack in einsum": lambda: One((9, W, 5), lambda x, w: torch.einsum("bed,edh->beh", x, w)),
    "stack in einsum, batches": lambda: One((3, 5, W), lambda x, w: torch.einsum(
        "beci,eoi->beco", x.unflatten(1, (3, 3)), w
    )),
    "stack and a sum": lambda: One((9, W, W), lambda x, w: torch.baddbmm(
        x.transpose(0, 1), x.transpose(0, 1), w, alpha=0.5
    )),
    "chosen of a stack": lambda: One((4, 5, W), _chosen),
    "groups of rows": lambda: One((3, W, 16), _grouped),
    "table": lambda: One((20, W), lambda x, w: F.embedding((x[..., 0] * 10).long().abs() % 20, w, padding_idx=3) + x),
    "bias of a product": lambda: One((5,), lambda x, w: F.linear(x[0], torch.ones(5, W, dtype=x.dtype), w)),
    "tied functional head": Tied,
    "class token": lambda: One((1, 1, W), lambda x, w: torch.cat([w.expand(len(x), -1, -1), x], 1)),
    "gru": lambda: _Recurrent(nn.GRU),
    "rnn": lambda: _Recurrent(nn.RNN),
}  # fmt: skip

TAKEN: dict[str, Callable[[], nn.Module]] = {
    "experts": lambda: One((4, W, 5), lambda x, w: torch.bmm(x, w[: len(x)])),
    "exponential": lambda: One((W,), lambda x, w: x * w.exp()),
    "some of several positions": lambda: One((9, W), lambda x, w: x + w[torch.arange(x.shape[1])]),
    "lstm": lambda: _Recurrent(nn.LSTM),
}  # fmt: skip


def _model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(W, W), {**OPERATIONS, **TAKEN}[kind]())


def _batches(count: int) -> list[Tensor]:
    return [torch.randn(4, 9, W, generator=torch.Generator().manual_seed(number)) for number in range(count)]


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    found: Tensor = model(batch).float().pow(2).sin().mean()
    return found


def _is_written_out(precision: str) -> bool:
    """True if torch computes an LSTM from matrix products here, and not with one kernel."""
    short = precision in ("bfloat16", "autocast")
    return precision == "float64" or (short and not torch.ops.mkldnn._is_mkldnn_bf16_supported())


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("kind", [*OPERATIONS, *TAKEN])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast", "float64"])
def test_right_gradients_are_within_rounding_and_all_are_witnessed(tmp_path: Path, kind: str, precision: str) -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            return _loss(model, batch.to(next(model.parameters()).dtype))

    model = _model(kind)
    if precision in ("bfloat16", "float64"):
        model.to(getattr(torch, precision))
    path = record(tmp_path / "run", model, _batches(6), loss, per_step=2)

    found = ratios(path)
    assert found.keys() == {name for name, _ in model.named_parameters()}
    assert reasons(path) == {}
    assert max(found.values()) < RIGHT
    assert bool(contributed(path)) == (kind in TAKEN and not (kind == "lstm" and _is_written_out(precision)))


class Whole(nn.Module):
    """Uses its parameters in many ways; `_OWN` lists them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.inner, self.norm = nn.Embedding(20, W), nn.Linear(W, W), RMSNorm()
        self.positions, self.first = nn.Parameter(torch.randn(12, W)), nn.Parameter(torch.randn(1, 1, W))
        self.scale, self.mixed = nn.Parameter(torch.rand(W)), nn.Parameter(torch.randn(W, W) / 4)
        self.slope, self.heads = nn.Parameter(torch.rand(W)), nn.Parameter(torch.randn(2, W // 2, W // 2) / 4)

    def block(self, x: Tensor) -> Tensor:
        x = x + torch.einsum("bthd,hde->bthe", x.unflatten(-1, (2, -1)), self.heads).flatten(2)
        return x + self.scale * torch.tanh(self.inner(self.norm(x)) @ self.mixed) * self.slope.exp()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1)
        return F.linear(self.called(x), self.tokens.weight)

    def called(self, x: Tensor) -> Tensor:
        return self.block(x)


_OWN = ("tokens.weight", "norm.weight", "positions", "first", "scale", "mixed", "slope", "heads")
_PARAMETERS = (*_OWN, "inner.weight", "inner.bias")


def _tokens(count: int) -> list[Tensor]:
    return [torch.randint(20, (4, 9), generator=torch.Generator().manual_seed(number)) for number in range(count)]


def _whole() -> Whole:
    torch.manual_seed(0)
    return Whole()


def _autocast(model: nn.Module, batch: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return _loss(model, batch)


class Fault:
    """Changes the gradient of one parameter in step 2, which has two micro-steps."""

    def __init__(self, kind: str, path: str) -> None:
        self.kind, self.path = kind, path
        self.kept = torch.zeros(())

    def __call__(self, model: nn.Module, step: int) -> None:
        gradient = model.get_parameter(self.path).grad
        assert gradient is not None
        before, self.kept = self.kept, gradient.clone()
        if step != 2:
            return
        if self.kind == "doubled":
            gradient.mul_(2.0)
        elif self.kind == "a hundredth":
            gradient.mul_(1.01)
        elif self.kind == "one element":
            flat = gradient.view(-1)
            flat[int(flat.abs().argmax())] *= -1.0
        else:
            gradient.copy_(before)


@pytest.mark.parametrize("path", _PARAMETERS)
@pytest.mark.parametrize(
    ("kind", "cause"),
    [("doubled", "factor"), ("a hundredth", "factor"), ("one element", "unknown"), ("stale", "stale")],
)
def test_a_wrong_gradient_is_found_in_its_step_at_its_parameter(
    tmp_path: Path, kind: str, cause: str, path: str
) -> None:
    run = record(tmp_path / "run", _whole(), _tokens(8), _loss, per_step=2, change=Fault(kind, path))

    (finding,) = traindiff.check(str(run), rules="wrong-gradient").findings
    assert (finding.step, finding.path) == (2, path)
    assert finding.evidence["cause"] == cause
    assert ("what backward passes contributed" in finding.message) == (path == "slope" and cause != "stale")


@pytest.mark.parametrize("path", _PARAMETERS)
@pytest.mark.parametrize("kind", ["doubled", "stale"])
def test_a_wrong_gradient_is_found_under_autocast(tmp_path: Path, kind: str, path: str) -> None:
    run = record(tmp_path / "run", _whole(), _tokens(8), _autocast, per_step=2, change=Fault(kind, path))

    (finding,) = traindiff.check(str(run), rules="wrong-gradient").findings
    assert (finding.step, finding.path) == (2, path)


# The token in front is not mixed with others, so its gradient is the same in each micro-step.
@pytest.mark.parametrize("path", [path for path in _PARAMETERS if path != "first"])
def test_a_micro_step_that_is_lost_is_named(tmp_path: Path, path: str) -> None:
    kept: list[Tensor] = []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        gradient = model.get_parameter(path).grad
        kept.append(torch.zeros(()) if gradient is None else gradient.clone())
        return _loss(model, batch)

    def change(model: nn.Module, step: int) -> None:
        gradient = model.get_parameter(path).grad
        assert gradient is not None
        if step == 2:
            gradient.copy_(kept[-1])  # as it was before micro-step 1

    run = record(tmp_path / "run", _whole(), _tokens(8), loss, per_step=2, change=change)

    (finding,) = traindiff.check(str(run), rules="wrong-gradient").findings
    assert (finding.step, finding.path, finding.micro_step) == (2, path, 1)
    assert finding.message == "The gradient lacks what micro-step 1 of 2 contributed."


class Checkpointed(Whole):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def called(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return found


class Offloaded(Whole):
    def called(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return self.block(x)


@pytest.mark.parametrize(
    ("make", "taken"),
    [
        (lambda: Checkpointed(reentrant=False), {"norm.weight", "scale", "mixed", "heads", "slope"}),
        (lambda: Checkpointed(reentrant=True), {"slope"}),
        (Offloaded, {"norm.weight", "scale", "mixed", "heads", "slope"}),
    ],
    ids=["checkpointing", "reentrant checkpointing", "offloading"],
)
def test_what_hooks_have_taken_is_not_read(tmp_path: Path, make: Callable[[], nn.Module], taken: set[str]) -> None:
    torch.manual_seed(0)
    path = record(tmp_path / "run", make(), _tokens(4), _loss, per_step=2)

    assert ratios(path).keys() == {*_PARAMETERS}
    assert max(ratios(path).values()) < RIGHT
    assert contributed(path) == taken
    assert reasons(path) == {}


def test_of_functions_in_compiled_code_contributions_are_known(tmp_path: Path) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(_whole(), backend="aot_eager")

    def change(model: nn.Module, step: int) -> None:
        gradient = model.get_parameter("_orig_mod.inner.weight").grad
        assert gradient is not None
        if step == 2:
            gradient.mul_(2.0)

    path = record(tmp_path / "run", compiled, _tokens(8), _loss, per_step=2, change=change)

    assert contributed(path) == {*_PARAMETERS} - {"inner.weight", "inner.bias"}
    assert reasons(path) == {}
    assert max(ratio for name, ratio in ratios(path).items() if name != "inner.weight") < RIGHT
    (finding,) = traindiff.check(str(path), rules="wrong-gradient").findings
    assert (finding.step, finding.path) == (2, "inner.weight")
    assert finding.message == "The gradient is 2 x what the inputs and outputs of its layer give."


def test_offloading_that_began_before_the_recording_is_known(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with torch.autograd.graph.save_on_cpu():
        path = record(tmp_path / "run", Whole(), _tokens(2), _loss)

    assert contributed(path) == {"tokens.weight", "norm.weight", "scale", "mixed", "heads", "slope"}
    assert max(ratios(path).values()) < RIGHT


def test_a_graph_that_is_kept_is_witnessed_each_time(tmp_path: Path) -> None:
    model = _whole()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with traindiff.record(tmp_path / "run", model, optimizer, observe=OBSERVED, strict=True):
        for batch in _tokens(3):
            loss = _loss(model, batch)
            loss.backward(retain_graph=True)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    assert ratios(tmp_path / "run").keys() == {*_PARAMETERS}
    assert max(ratios(tmp_path / "run").values()) < RIGHT


def test_a_backward_pass_for_some_leaves_contributes_to_these(tmp_path: Path) -> None:
    model = _whole()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with traindiff.record(tmp_path / "run", model, optimizer, observe=OBSERVED, strict=True):
        for batch in _tokens(3):
            _loss(model, batch).backward(inputs=[model.scale, model.positions, model.slope])
            _loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    assert ratios(tmp_path / "run").keys() == {*_PARAMETERS}
    assert max(ratios(tmp_path / "run").values()) < RIGHT


@pytest.mark.parametrize("make", [Whole, lambda: Checkpointed(reentrant=False), Offloaded])
def test_the_training_is_not_changed(tmp_path: Path, make: Callable[[], nn.Module]) -> None:
    def trained(path: Path | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.Adam(model.parameters())
        recorder = traindiff.record(path, model, optimizer, observe="witness", strict=True) if path else None
        for batch in _tokens(3):
            _loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        if recorder:
            recorder.close()
        return [*model.parameters(), torch.random.get_rng_state()]

    before = torch._C._autograd._push_saved_tensors_default_hooks
    plain, recorded = trained(None), trained(tmp_path / "run")
    assert all(torch.equal(one, other) for one, other in zip(plain, recorded, strict=True))
    assert torch._C._autograd._push_saved_tensors_default_hooks is before
