"""Checks of calls that look alike: the same numbers as any other check, and none where a call looks otherwise."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import traindiff
from tests.observe.hooks.broken_products import Breaks, one_element
from tests.observe.hooks.test_layer_products import OBSERVED, Net, found
from traindiff.core.kernels.registry import LINEAR_CHECKS, installed
from traindiff.observe.torch.witness.layer_products import check_gradient, check_output, factor_of
from traindiff.observe.torch.witness.prepared_products import prepared

pytestmark = pytest.mark.skipif(not installed(LINEAR_CHECKS), reason="needs the CPU kernels")

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def call(
    *, rows: tuple[int, ...] = (3, 5), inputs: int = 33, outputs: int = 70, bias: bool = True, seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:  # fmt: skip
    """Input, weight, bias and output of a call."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    x, weight, added = drawn(*rows, inputs), drawn(outputs, inputs), drawn(outputs) if bias else None
    return x, weight, added, functional.linear(x, weight, added)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [((3, 5), 33, 70), ((1,), 1, 1), ((600,), 300, 17), ((2, 3, 4), 16, 16)], ids=str
)
def test_they_give_the_numbers_of_any_check(
    dtype: torch.dtype, bias: bool, rows: tuple[int, ...], inputs: int, outputs: int
) -> None:
    about = {"rows": rows, "inputs": inputs, "outputs": outputs, "bias": bias, "dtype": dtype}
    known = prepared(*call(**about, seed=1))
    assert known is not None
    for wrong in (0.0, 3.0):
        x, weight, added, output = call(**about)
        output.view(-1)[-1] += wrong
        gradient, factor = output.reshape(-1, outputs), factor_of(weight, dtype)
        of_input = gradient @ weight
        of_input.view(-1)[-1] += wrong

        checked = known.output(x, weight, added, output)
        assert checked is not None
        forward, by_output = checked
        backward = known.of_input(by_output, gradient, of_input)

        assert backward is not None
        assert torch.allclose(forward, check_output(factor, x, added, output), rtol=1e-9)
        assert torch.allclose(backward, check_gradient(factor, gradient, of_input, rows), rtol=1e-9)
        again = check_gradient(known.factor(by_output), gradient, of_input, rows)
        assert torch.allclose(again, backward, rtol=1e-9)


def test_calls_that_look_otherwise_are_left_to_others() -> None:
    known = prepared(*call())
    assert known is not None
    x, weight, bias, output = call()
    freed = weight.clone()
    freed.untyped_storage().resize_(0)
    _, by_output = known.output(x, weight, bias, output) or (None, None)
    assert by_output is not None

    assert known.output(*call(rows=(15,))) is None
    assert known.output(*call(dtype=torch.bfloat16)) is None
    assert known.output(*call(bias=False)) is None
    assert known.output(x.transpose(0, 1), weight, bias, output) is None
    assert known.output(x, freed, bias, output) is None
    assert known.of_input(by_output, output, x) is None
    assert known.of_input(by_output, output.reshape(15, 70).double(), x.reshape(15, 33)) is None
    assert known.of_input(by_output, torch.ones(15, 70).T.contiguous().T, x.reshape(15, 33)) is None


def test_nothing_is_prepared_for_tensors_of_several_dtypes() -> None:
    x, weight, bias, output = call()

    assert prepared(x, weight, bias, output.double()) is None
    assert prepared(x.double(), weight, bias, output) is None
    assert prepared(x.transpose(0, 1), weight, bias, output) is None


@pytest.mark.parametrize("backward", [False, True])
def test_a_wrong_product_is_found_in_steps_whose_calls_are_known(tmp_path: Path, backward: bool) -> None:
    torch.manual_seed(0)
    model: nn.Module = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with traindiff.record(tmp_path, model, optimizer, observe=OBSERVED, strict=True):
        for step in range(6):
            given = torch.randn(6, 5, 4)
            breaks = Breaks("aten.mm" if backward else "aten.addmm", one_element(3), {2} if step == 4 else set())
            with nullcontext() if backward else breaks:
                loss = model(given).square().mean()
            with breaks if backward else nullcontext():
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    assert {finding.step for finding in found(tmp_path)} == {4}
