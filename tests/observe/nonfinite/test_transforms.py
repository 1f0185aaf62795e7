"""Calls inside transforms of `torch.func`, and traces of `torch.jit`, are left as they are."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap

import traindiff
from tests.observe.nonfinite.trainings import WIDTH

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch uses it for jvp itself


def _per_sample_gradients(model: nn.Module, x: Tensor) -> Any:
    def loss(parameters: dict[str, Tensor], one: Tensor) -> Tensor:
        return functional_call(model, parameters, (one,)).sum()

    return vmap(grad(loss), (None, 0))(dict(model.named_parameters()), x)["0.weight"]


_TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "vmap": lambda model, x: vmap(model)(x),
    "per-sample gradients": _per_sample_gradients,
    "jacrev": lambda model, x: jacrev(model)(x),
    "hessian": lambda model, x: hessian(lambda one: model(one).sum())(x),
    "jvp": lambda model, x: jvp(model, (x,), (x,))[1],
}


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 1))


@pytest.mark.parametrize("name", _TRANSFORMS)
def test_a_transform_computes_what_it_would_without_a_watch_and_the_training_is_watched_on(name: str) -> None:
    model, x = _net(), torch.randn(3, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = _TRANSFORMS[name](model, x)
    with traindiff.watch(model, optimizer, output=None, file=io.StringIO(), on_detect="warn") as watch:
        assert torch.equal(_TRANSFORMS[name](model, x), expected)
        with pytest.warns(traindiff.TraindiffWarning, match="The loss is"):
            (model(x).sum() / 0).backward()
    assert len(watch.origins) == 1


@pytest.mark.parametrize("how", ["watch", "record"])
def test_a_model_is_traced_as_it_is(how: str, tmp_path: Path) -> None:
    model, x = _net(), torch.randn(3, WIDTH)
    expected = _operators(model, x)
    with traindiff.watch(model, output=None) if how == "watch" else traindiff.record(tmp_path / "run", model):
        assert _operators(model, x) == expected


def _operators(model: nn.Module, x: Tensor) -> list[str]:
    return [node.kind() for node in torch.jit.trace(model, x).inlined_graph.nodes()]
