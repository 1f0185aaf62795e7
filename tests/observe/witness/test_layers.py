"""Gradients of every kind of layer follow from its inputs and the gradients of its outputs; wrong ones do not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.observe.witness.residuals import RIGHT, ratios, reasons, record
from traindiff.core.witness import PROBES, elements, signs

Make = Callable[[], tuple[nn.Module, Any]]


class _Bags(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(20, 6, **options)

    def forward(self, batch: tuple[Tensor, ...]) -> Tensor:
        return self.bag(*batch)


class _NamedBags(_Bags):
    """The weights of samples are given by name, and before the offsets."""

    def forward(self, batch: Any) -> Any:
        tokens, offsets, weights = batch
        return self.bag(per_sample_weights=weights, offsets=offsets, input=tokens)


class _Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **options)

    def forward(self, batch: tuple[Tensor, ...]) -> Tensor:
        found: Tensor = self.attention(*batch, need_weights=False)[0]
        return found


def _tokens(*shape: int) -> Tensor:
    return torch.randint(20, shape)


LAYERS: dict[str, Make] = {
    "linear": lambda: (nn.Linear(6, 5), torch.randn(8, 6)),
    "linear with more axes": lambda: (nn.Linear(6, 5), torch.randn(2, 3, 4, 6)),
    "linear of a vector": lambda: (nn.Linear(6, 5), torch.randn(6)),
    "conv1d": lambda: (nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), torch.randn(3, 4, 11)),
    "conv2d": lambda: (nn.Conv2d(4, 6, (3, 2), dilation=2, padding="same"), torch.randn(3, 4, 8, 7)),
    "conv2d, circular": lambda: (nn.Conv2d(4, 6, 3, padding=(1, 2), padding_mode="circular"), torch.randn(3, 4, 8, 7)),
    "conv2d, channels last": lambda: (
        nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last),
        torch.randn(3, 4, 8, 7).to(memory_format=torch.channels_last),
    ),
    "conv2d, depthwise, no batch": lambda: (nn.Conv2d(4, 8, 3, groups=4), torch.randn(4, 8, 7)),
    "conv3d": lambda: (nn.Conv3d(2, 3, 2, padding="valid"), torch.randn(2, 2, 4, 5, 6)),
    "transposed conv1d": lambda: (
        nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1, padding=1), torch.randn(3, 4, 7),
    ),
    "transposed conv2d": lambda: (nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2, dilation=2), torch.randn(3, 4, 5, 7)),
    "transposed conv3d": lambda: (nn.ConvTranspose3d(2, 3, 2, stride=3), torch.randn(2, 2, 3, 4, 3)),
    "embedding": lambda: (nn.Embedding(20, 6), _tokens(4, 9)),
    "embedding with padding": lambda: (nn.Embedding(20, 6, padding_idx=3), _tokens(4, 30)),
    "embedding by frequency": lambda: (nn.Embedding(20, 6, scale_grad_by_freq=True), _tokens(4, 30)),
    "sparse embedding": lambda: (nn.Embedding(20, 6, sparse=True), _tokens(4, 9)),
    "embedding with a largest norm": lambda: (nn.Embedding(20, 6, max_norm=0.5), _tokens(4, 9)),
    "bags of rows": lambda: (_Bags(mode="sum"), (_tokens(4, 9),)),
    "bags with offsets": lambda: (_Bags(mode="mean", padding_idx=2), (_tokens(30), torch.tensor([0, 4, 4, 19]))),
    "bags with the last offset": lambda: (
        _Bags(mode="sum", include_last_offset=True), (_tokens(30), torch.tensor([0, 4, 19, 30])),
    ),
    "weighted bags": lambda: (_Bags(mode="sum"), (_tokens(4, 9), None, torch.randn(4, 9))),
    "weighted bags, by name": lambda: (_NamedBags(mode="sum"), (_tokens(4, 9), None, torch.randn(4, 9))),
    "weighted bags with offsets, by name": lambda: (
        _NamedBags(mode="sum"), (_tokens(30), torch.tensor([0, 4, 4, 19]), torch.randn(30)),
    ),
    "largest of bags": lambda: (_Bags(mode="max"), (_tokens(4, 9),)),
    "largest of bags with offsets": lambda: (
        _Bags(mode="max", padding_idx=2), (_tokens(30), torch.tensor([0, 4, 4, 19])),
    ),
    "sparse bags": lambda: (_Bags(mode="sum", sparse=True), (_tokens(4, 9),)),
    "layer norm": lambda: (nn.LayerNorm((3, 6)), torch.randn(8, 5, 3, 6)),
    "rms norm": lambda: (nn.RMSNorm(6), torch.randn(8, 5, 6)),
    "group norm": lambda: (nn.GroupNorm(2, 6), torch.randn(8, 6, 5)),
    "batch norm": lambda: (nn.BatchNorm2d(6), torch.randn(8, 6, 5, 4)),
    "batch norm of rows": lambda: (nn.BatchNorm1d(6), torch.randn(8, 6)),
    "batch norm in evaluation": lambda: (nn.BatchNorm1d(6).eval(), torch.randn(8, 6)),
    "batch norm without statistics": lambda: (nn.BatchNorm1d(6, track_running_stats=False), torch.randn(8, 6)),
    "instance norm": lambda: (nn.InstanceNorm1d(6, affine=True), torch.randn(8, 6, 5)),
    "instance norm, no batch": lambda: (nn.InstanceNorm2d(6, affine=True), torch.randn(6, 5, 4)),
    "self attention": lambda: (_Attention(), (torch.randn(3, 5, 8),) * 3),
    "cross attention": lambda: (_Attention(), (torch.randn(3, 5, 8), *(torch.randn(3, 7, 8),) * 2)),
    "attention with other widths": lambda: (
        _Attention(kdim=6, vdim=4), (torch.randn(3, 5, 8), torch.randn(3, 7, 6), torch.randn(3, 7, 4)),
    ),
    "attention without biases": lambda: (_Attention(bias=False), (torch.randn(3, 5, 8),) * 3),
}  # fmt: skip


def _loss(model: nn.Module, batch: Any) -> Tensor:
    found: Tensor = model(batch).float().pow(2).sin().mean()
    return found


@pytest.mark.parametrize("kind", LAYERS)
def test_right_gradients_are_within_rounding_and_all_are_witnessed(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    model, batch = LAYERS[kind]()
    path = record(tmp_path / "run", model, [batch] * 4, _loss, per_step=2)

    found = ratios(path)
    assert found.keys() == {name for name, _ in model.named_parameters()}
    assert max(found.values()) < RIGHT
    assert reasons(path) == {}


@pytest.mark.parametrize("kind", LAYERS)
def test_a_gradient_that_is_wrong_by_a_hundredth_stands_out(tmp_path: Path, kind: str) -> None:
    def change(model: nn.Module, _: int) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad = 1.01 * parameter.grad

    torch.manual_seed(0)
    model, batch = LAYERS[kind]()
    path = record(tmp_path / "run", model, [batch], _loss, change=change)

    assert min(ratios(path).values()) > 100.0


@pytest.mark.parametrize("kind", [kind for kind in LAYERS if "sparse" not in kind])
def test_right_gradients_in_bfloat16(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    model, batch = LAYERS[kind]()
    model.bfloat16()
    many = batch if isinstance(batch, tuple) else (batch,)
    short = tuple(one.bfloat16() if one is not None and one.is_floating_point() else one for one in many)
    path = record(tmp_path / "run", model, [short if isinstance(batch, tuple) else short[0]] * 2, _loss)

    found = ratios(path)
    assert found.keys() == {name for name, _ in model.named_parameters()}
    assert max(found.values()) < RIGHT


@pytest.mark.parametrize("kind", ["linear", "conv2d", "layer norm", "self attention", "batch norm", "embedding"])
def test_right_gradients_under_autocast_and_in_float64(tmp_path: Path, kind: str) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return _loss(model, batch)

    torch.manual_seed(0)
    model, batch = LAYERS[kind]()
    assert max(ratios(record(tmp_path / "short", model, [batch] * 2, loss)).values()) < RIGHT

    model.double()
    many = batch if isinstance(batch, tuple) else (batch,)
    long = tuple(one.double() if one.is_floating_point() else one for one in many)
    path = record(tmp_path / "long", model, [long if isinstance(batch, tuple) else long[0]] * 2, _loss)
    assert max(ratios(path).values()) < RIGHT


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_are_witnessed(tmp_path: Path, *, reentrant: bool) -> None:
    inner = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 6), nn.BatchNorm1d(6))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner, self.last = nn.Linear(6, 6), inner, nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(checkpoint(self.inner, self.first(x), use_reentrant=reentrant))

    torch.manual_seed(0)
    model = Model()
    path = record(tmp_path / "run", model, [torch.randn(16, 6)] * 2, _loss)

    found = ratios(path)
    assert found.keys() == {name for name, _ in model.named_parameters()}
    assert max(found.values()) < RIGHT


def test_signs_of_a_part_are_those_of_the_whole() -> None:
    whole = signs("rows layer", 0, 1000)

    assert whole.shape == (1000, PROBES)
    assert (signs("rows layer", 137, 500) == whole[137:637]).all()
    assert (signs("columns layer", 0, 1000) != whole).any()
    assert (signs("rows other", 0, 1000) != whole).any()
    assert abs(whole.astype(float).mean(0)).max() < 0.1  # 3 standard deviations
    products = whole.astype(float).T @ whole / 1000
    assert abs(products - torch.eye(PROBES).numpy()).max() < 0.1


def test_the_summary_of_a_vector_holds_its_elements() -> None:
    from traindiff.core.kernels import summarize
    from traindiff.core.shards import Shard
    from traindiff.core.witness import SIZE

    vector = torch.tensor([3.0, -1e-9, 0.0, 2.5e8, 1.0, -4.0, 7.0, 1e-300], dtype=torch.float64)

    assert elements(summarize(vector, Shard.whole((SIZE,)))).tolist() == vector.tolist()
    vector[3] = float("nan")
    assert not (elements(summarize(vector, Shard.whole((SIZE,)))) == 0.0).any()
