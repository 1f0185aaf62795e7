"""Every layer of `torch.nn` is captured, and comes out of a rerun as it is, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.observe.nonfinite.layers import Layer, layers
from traindiff.observe.torch.nonfinite.calls import within
from traindiff.observe.torch.nonfinite.capturing import CapturedCall, capture
from traindiff.observe.torch.nonfinite.operations import NotWritableError
from traindiff.observe.torch.nonfinite.rerunning import rerun

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of defaults that are to change

LAYERS = layers()

NOT_DIFFERENTIATED = {
    "EmbeddingBag": "Autograd not support dtype", "sums of embeddings": "Autograd not support dtype",
    "largest of embeddings": "Autograd not support dtype",
    "SoftMarginLoss": "not differentiable with respect to argument 'target'",
    "masked product": "not differentiable with respect to argument 'attn_mask'",
    "attention in evaluation": "derivative for aten::_native_multi_head_attention is not implemented",
    "encoder layer in evaluation": "derivative for aten::_transformer_encoder_layer_fwd is not implemented",
}  # fmt: skip
"""What the rerun of a backward pass says of layers whose forward operators have none."""


def outputs_of(layer: Layer) -> dict[str, Tensor]:
    output = layer.module(*layer.args, **layer.kwargs)
    return {slot: one.detach() for slot, one in within(output, "output") if isinstance(one, Tensor)}


def largest(tensor: Tensor) -> float:
    return float(tensor.detach().abs().max())


def captured(layer: Layer, **more: Any) -> tuple[CapturedCall, Tensor]:
    state = torch.get_rng_state()
    return capture(layer.module, layer.args, layer.kwargs, random_state=state, **more), state


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_is_captured_and_comes_out_as_it_is(name: str) -> None:
    call, state = captured(LAYERS[name])
    native, longer = rerun(call), rerun(call, torch.float64)
    assert native.failed == longer.failed == ""

    torch.set_rng_state(state)
    expected = {slot: one for slot, one in outputs_of(LAYERS[name]).items() if one.is_floating_point()}
    assert native.results.keys() >= expected.keys()
    for slot, one in expected.items():
        assert native.results[slot].largest == pytest.approx(largest(one), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", LAYERS)
def test_the_backward_pass_of_every_layer_is_run_again(name: str) -> None:
    gradients = {
        slot: torch.ones_like(one) for slot, one in outputs_of(LAYERS[name]).items() if one.is_floating_point()
    }
    call, _ = captured(LAYERS[name], gradients=gradients)
    for dtype in (None, torch.float64):
        run = rerun(call, dtype)
        if name in NOT_DIFFERENTIATED:
            assert NOT_DIFFERENTIATED[name] in run.failed
        else:
            assert run.failed == ""
            assert not call.trained or any(slot.startswith("grad ") for slot in run.results)


def test_a_layer_that_writes_into_out_is_refused_in_words() -> None:
    layer = Layer(module=torch.nn.CrossMapLRN2d(2), args=(torch.rand(2, 4, 8, 8),), kwargs={})

    with pytest.raises(NotWritableError, match=r"aten.pow.Tensor_Scalar_out writes into out=, whose size"):
        captured(layer)


def test_what_is_called_in_inference_mode_is_captured_as_elsewhere() -> None:
    layer = LAYERS["MultiheadAttention"]
    with torch.inference_mode():
        inside, _ = captured(layer)
    outside, _ = captured(layer)
    assert [one.name for one in inside.operations] == [one.name for one in outside.operations]
    assert rerun(inside).failed == ""
