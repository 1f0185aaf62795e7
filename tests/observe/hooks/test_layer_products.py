"""With the witness, products of linear layers are checked in every step: wrong ones are named with step and row."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

import traindiff
from tests.observe.hooks.broken_products import Breaks, one_element
from tests.observe.hooks.reading import rows
from traindiff.analyse.findings import Finding
from traindiff.core.observation import WITNESSED_PRODUCT
from traindiff.core.witness import CHECKED, elements

OBSERVED = ("loss", "grad", "witness")


class Block(nn.Module):
    """Attention and a layer, on samples of some positions."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.down(functional.gelu(self.up(x)))


class Net(nn.Module):
    """Two blocks between two layers."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 3)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)


def tied(model: Net) -> Net:
    model.blocks[1].up.weight = model.blocks[0].up.weight
    return model


def normalized(model: Net) -> Net:
    parametrizations.spectral_norm(model.blocks[0].up)
    prune.l1_unstructured(model.blocks[1].up, "weight", 0.5)
    return model


class WritesThroughData(torch.optim.Optimizer):
    """An optimizer as they were written before torch 0.4: no counter of writes sees its updates."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad.data, alpha=-group["lr"])


def train(
    path: Path, model: nn.Module | None = None, *, micro_batches: int = 1, breaks: Breaks | None = None,
    autocast: bool = False, dtype: torch.dtype = torch.float32, optimizer: Any = None, broken_step: int = 1,
    observe: tuple[str, ...] = OBSERVED,
) -> Path:  # fmt: skip
    """Three steps; a mode breaks products in one of them."""
    torch.manual_seed(0)
    model = (Net() if model is None else model).to(dtype)
    stepping = (optimizer or (lambda given: torch.optim.AdamW(given, lr=0.01)))(model.parameters())
    with traindiff.record(path, model, stepping, observe=observe, strict=True):
        for step in range(3):
            with breaks if breaks is not None and step == broken_step else nullcontext():
                for _ in range(micro_batches):
                    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                        loss = model(torch.randn(6, 5, 4, dtype=dtype)).square().mean() / micro_batches
                    loss.backward()
            stepping.step()
            stepping.zero_grad()
    return path


def found(path: Path, **settings: Any) -> list[Finding]:
    verdict = traindiff.check(path, rules="product-wrong,product-inaccurate,wrong-gradient", **settings)
    return [*verdict.findings, *verdict.warnings]


def checked(path: Path, **where: Any) -> list[tuple[str, str, dict[str, float]]]:
    """Path, phase and numbers of each check."""
    return [
        (seen.path, seen.phase, dict(zip(CHECKED, elements(summary).tolist(), strict=True)))
        for seen, summary in rows(path, **where)
        if seen.stage == WITNESSED_PRODUCT
    ]


LEGAL: dict[str, dict[str, Any]] = {
    "plain": {},
    "micro-batches": {"micro_batches": 3},
    "autocast": {"autocast": True},
    "bfloat16": {"dtype": torch.bfloat16},
    "float64": {"dtype": torch.float64},
    "an optimizer that no counter sees": {"optimizer": WritesThroughData, "micro_batches": 2},
    "products, too": {"observe": (*OBSERVED, "products")},
}


@pytest.mark.parametrize("name", LEGAL)
def test_a_legal_training_has_no_finding(name: str, tmp_path: Path) -> None:
    path = train(tmp_path / "run", **LEGAL[name])

    assert found(path) == []
    checks = checked(path, step=1)
    linear, micro_batches = 2 + 2 * 2, LEGAL[name].get("micro_batches", 1)
    assert len([one for one in checks if one[1] == "forward" and "attention" not in one[0]]) == linear * micro_batches
    assert len([one for one in checks if one[1] == "backward" and "attention" not in one[0]]) == (
        (linear - 1) * micro_batches  # nobody asks for the gradient of the batch
    )
    assert all(0.0 < numbers["residual"] < 3.0 for _, _, numbers in checks)


@pytest.mark.parametrize("change", [tied, normalized, lambda _: Net(checkpointed=True)], ids=["tied", "other", "kept"])
def test_weights_that_are_shared_computed_or_used_twice_are_no_finding(
    change: Callable[[Net], Net], tmp_path: Path
) -> None:
    path = train(tmp_path / "run", change(Net()), micro_batches=2)

    assert found(path) == []
    assert ("head", "forward") in {one[:2] for one in checked(path)}


def test_weights_that_change_through_data_between_calls_and_before_the_backward_pass_are_no_finding(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer, observe=OBSERVED, strict=True):
        for _ in range(3):
            model(torch.randn(5, 4))
            for parameter in model.parameters():
                parameter.data.mul_(1.5)
            loss = model(torch.randn(5, 4)).square().mean()
            for parameter in model.parameters():
                parameter.data.clamp_(-0.2, 0.2)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    assert len(checked(tmp_path / "run", step=1)) == 2 * 2 + 1
    verdict = traindiff.check(tmp_path / "run", rules="product-wrong,product-inaccurate")
    assert (verdict.findings, verdict.warnings) == ((), ())


def test_a_spectral_norm_iterates_as_often_as_without_a_recording(tmp_path: Path) -> None:
    models = []
    for recorded in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with traindiff.record(tmp_path / "run", model, optimizer, observe=OBSERVED) if recorded else nullcontext():
            for step in range(3):
                model(torch.randn(5, 4, generator=torch.Generator().manual_seed(step))).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        models.append(model)

    first, second = (model.state_dict() for model in models)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("operator", "call", "shape_row", "phase", "path", "slot", "says"),
    [
        ("aten.addmm", 0, 13, "forward", "embed", "output[0]",
         "The output of embed is not the product of its input and weight in row (2, 3), where it is"),
        ("aten.addmm", 2, 29, "forward", "blocks.0.up", "output[0]",
         "The output of blocks.0.up is not the product of its input and weight in row (5, 4), where it is"),
        ("aten.mm", 4, 7, "backward", "head", "input[0]",
         "The gradient of the input of head is not the product of the gradient of its output and its weight in row "
         "(1, 2), where it is"),
    ],
)  # fmt: skip
def test_a_wrong_product_is_named_with_its_sample_and_position(
    operator: str, call: int, shape_row: int, phase: str, path: str, slot: str, says: str, tmp_path: Path
) -> None:
    breaks = Breaks(operator, one_element(shape_row), {call})

    findings = found(train(tmp_path / "run", breaks=breaks))

    assert [(one.kind, one.step, one.micro_step, one.phase, one.path, one.slot) for one in findings] == [
        ("product-wrong", 1, 0, phase, path, slot)
    ]
    assert findings[0].message.startswith(says)
    assert findings[0].message.endswith("Most of its 30 rows are right.")


def test_the_micro_step_is_named(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    breaks = Breaks("aten.addmm", one_element(3), {2 * 2 + 1})  # of the third micro-batch

    (finding,) = found(train(tmp_path / "run", model, breaks=breaks, micro_batches=4))

    assert (finding.step, finding.micro_step, finding.path) == (1, 2, "1")


def test_an_operator_and_its_layer_are_one_finding(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    breaks = Breaks("aten.addmm", one_element(3), {1})

    findings = found(train(tmp_path / "run", model, breaks=breaks, observe=(*OBSERVED, "products")))

    assert [(one.kind, one.path) for one in findings] == [("product-wrong", "1/aten.addmm[0]")]
