"""The checks of matrix products inside a training: what is recorded of them, and what is not checked."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

import traindiff
from tests.observe.hooks.broken_products import Breaks
from tests.observe.hooks.models import WIDTH, Checkpointed
from tests.observe.hooks.reading import rows, unobserved
from traindiff.analyse.products import ProductRow
from traindiff.core.observation import PRODUCT, PRODUCT_STAGES, RECOMPUTED_PRODUCT
from traindiff.storage import open_recording


class Computes(nn.Module):
    """A module whose forward pass is a function."""

    def __init__(self, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def net(body: Callable[[Tensor], Tensor] = torch.tanh) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Computes(body), nn.Linear(WIDTH, 2))


def train(path: Path | None, model: nn.Module, *, steps: int = 2, **settings: Any) -> list[Tensor]:
    """Parameters after a training."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> None:
        for step in range(steps):
            batch = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(step))
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    if path is None:
        run()
    else:
        with traindiff.record(path, model, optimizer, **{"observe": "products", "strict": True, **settings}):
            run()
    return [one.detach().clone() for one in model.parameters()]


def products(directory: Path, /, **where: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Path, and shape of the rows, of each product that was checked."""
    found = (seen for seen, _ in rows(directory, **where) if seen.stage in PRODUCT_STAGES and not seen.unobserved)
    return [(seen.path, seen.shard.shape) for seen in found if seen.slot.endswith(".residual")]


def table(path: Path) -> list[ProductRow]:
    found = traindiff.check(path).products
    assert found is not None
    return list(found)


def test_every_product_is_checked_forward_and_backward(tmp_path: Path) -> None:
    train(tmp_path / "run", net())

    assert products(tmp_path / "run", step=0, phase="forward") == [("0/aten.addmm[0]", (5,)), ("2/aten.addmm[0]", (5,))]
    assert products(tmp_path / "run", step=1, phase="backward") == [
        ("2/aten.mm[0]", (5,)), ("2/aten.mm[1]", (2,)), ("0/aten.mm[0]", (WIDTH,)),
    ]  # fmt: skip


def test_each_product_has_its_error_its_worst_row_and_its_format(tmp_path: Path) -> None:
    train(tmp_path / "run", net(), steps=1)

    found = [(seen.slot, float(summary["sum"])) for seen, summary in rows(tmp_path / "run", path="2/aten.addmm[0]")]
    slots = dict(found)
    assert list(slots) == [f"output[0].{name}" for name in ("residual", "error", "allowed", "row", "median")]
    assert 0.0 < slots["output[0].error"] < slots["output[0].allowed"] < 1e-5
    assert slots["output[0].row"] in range(5)
    assert {seen.dtype for seen, _ in rows(tmp_path / "run", path="2/aten.addmm[0]")} == {"float64"}
    described = open_recording(str(tmp_path / "run")).rank_content(0)["products"]
    assert described["forward"]["2/aten.addmm[0]"]["products"] == {
        "output[0]": {"format": "float32 x float32 -> float32", "terms": WIDTH}
    }
    assert described["backward"]["2/aten.mm[1]"]["of"] == "2/aten.addmm[0]"
    assert described["forward"]["2/aten.addmm[0]"]["source"]["code"] == "model(batch).square().mean().backward()"


def test_calls_in_other_dtypes_and_sizes_have_rows_of_their_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dtypes = (torch.float32, torch.bfloat16, torch.float32, torch.float16, torch.bfloat16)
    with traindiff.record(tmp_path / "run", model, optimizer, observe="products", strict=True):
        for dtype in dtypes:
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                both = model(torch.ones(5, WIDTH)).float() + model(torch.ones(4, WIDTH, dtype=dtype))[:1].float()
            both.square().mean().backward()
            optimizer.step()

    found = {row.format: row.num_products for row in table(tmp_path / "run") if row.operator == "aten.addmm"}
    assert found == {
        "float32 x float32 -> float32": 4, "bfloat16 x bfloat16 -> bfloat16": 4, "float16 x float16 -> float16": 2,
    }  # fmt: skip
    backward = [row for row in table(tmp_path / "run") if row.phase == "backward"]
    assert {(row.format, row.terms) for row in backward} == {
        (f"{name} x {name} -> {name}", 5) for name in ("float32", "bfloat16", "float16")
    }


def test_only_selected_modules_and_steps_are_looked_into(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer, observe="products", select="2*", steps="1", strict=True):
        for _ in range(3):
            model(torch.ones(5, WIDTH)).square().mean().backward()
            optimizer.step()

    found = rows(tmp_path / "run")
    assert {seen.step for seen, _ in found if seen.stage == PRODUCT} == {1}
    assert {seen.path.partition("/")[0] for seen, _ in found if seen.stage == PRODUCT} == {"2"}


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_products_that_checkpointing_computes_again_are_checked_again(use_reentrant: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Checkpointed(use_reentrant=use_reentrant)
    expected = train(None, model)
    torch.manual_seed(0)
    actual = train(tmp_path / "run", Checkpointed(use_reentrant=use_reentrant))

    assert all(map(torch.equal, actual, expected))
    again = products(tmp_path / "run", step=0, stage=RECOMPUTED_PRODUCT, phase="forward")
    assert again
    assert {*again} <= {*products(tmp_path / "run", step=0, stage=PRODUCT, phase="forward")}


def test_functional_products_inside_a_module_are_checked(tmp_path: Path) -> None:
    def body(x: Tensor) -> Tensor:
        scores = torch.einsum("id,jd->ij", x, x).softmax(-1)
        return torch.nn.functional.conv1d(scores @ x, x.new_ones(5, 5, 3) * x.mean(), padding=1)

    train(tmp_path / "run", net(body), steps=1)

    forward = {path for path, _ in products(tmp_path / "run", phase="forward")}
    assert {"1/aten.bmm[0]", "1/aten.mm[0]", "1/aten.convolution[0]"} <= forward
    backward = [path for path, _ in products(tmp_path / "run", phase="backward") if path.startswith("1/")]
    assert backward[:2] == ["1/aten.convolution_backward[0]"] * 2  # of the images and of the weight


def test_products_inside_a_kernel_are_said_to_be_unchecked(tmp_path: Path) -> None:
    def body(x: Tensor) -> Tensor:
        heads = x.reshape(1, 1, *x.shape)
        return scaled_dot_product_attention(heads, heads, heads)[0, 0]

    train(tmp_path / "run", net(body), steps=1)

    name = "aten._scaled_dot_product_flash_attention_for_cpu"
    why = "not checked: its products are inside the kernel, which does not return the attention weights"
    assert unobserved(tmp_path / "run") == [
        (f"1/{name}[0]", "residual", why), (f"1/{name}_backward[0]", "residual", why)
    ]  # fmt: skip
    assert (
        f"Not checked: {name} (1 call): {why.removeprefix('not checked: ')}." in traindiff.check(tmp_path / "run").notes
    )


@pytest.mark.parametrize("precision", ["autocast", "bfloat16"])
def test_the_format_is_that_of_the_product_itself(precision: str, tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if precision == "bfloat16":
        model.bfloat16()
    with traindiff.record(tmp_path / "run", model, optimizer, observe="products", strict=True):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            loss = model(torch.ones(5, WIDTH, dtype=next(model.parameters()).dtype)).square().mean()
            loss.backward()  # inside of the region, too
        optimizer.step()

    assert {row.format for row in table(tmp_path / "run")} == {"bfloat16 x bfloat16 -> bfloat16"}
    assert all(0.0 <= row.ratio < 1.0 for row in table(tmp_path / "run"))


class Emulated(Tensor):
    """A tensor of FP8 numbers with a scale, which computes in float32 with what they stand for, as emulations do."""

    numbers: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor) -> Emulated:
        made: Emulated = Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=torch.float32)  # type: ignore[attr-defined]
        return made

    def __init__(self, numbers: Tensor, scale: Tensor) -> None:
        self.numbers, self.scale = numbers, scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [one.numbers.float() * one.scale if isinstance(one, Emulated) else one for one in args]
        return func(*plain, **(kwargs or {}))


class QuantizedProduct(torch.autograd.Function):
    """A product of tensors that are rounded to FP8."""

    @staticmethod
    def quantized(x: Tensor) -> Emulated:
        scale = x.abs().amax() / 448.0
        return Emulated((x / scale).to(torch.float8_e4m3fn), scale)

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.mm(QuantizedProduct.quantized(x), QuantizedProduct.quantized(weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        quantized = QuantizedProduct.quantized
        return torch.mm(quantized(gradient), quantized(weight.T)), torch.mm(quantized(x.T), quantized(gradient))


def fp8(x: Tensor) -> Tensor:
    return QuantizedProduct.apply(x, torch.eye(WIDTH) + 0.1 * x.detach().mean())  # type: ignore[no-any-return, no-untyped-call]


def test_a_subclass_shows_the_products_that_it_computes_itself(tmp_path: Path) -> None:
    expected = train(None, net(fp8))
    actual = train(tmp_path / "run", net(fp8))

    assert all(map(torch.equal, actual, expected))
    found = [path for path, _ in products(tmp_path / "run", step=0) if path.startswith("1/")]
    assert found == ["1/aten.mm[0]", "1/aten.mm[0]", "1/aten.mm[1]"]
    (forward, backward) = (
        row for row in table(tmp_path / "run") if row.line.endswith("return func(*plain, **(kwargs or {}))")
    )
    assert (forward.phase, forward.num_products, backward.phase, backward.num_products) == ("forward", 2, "backward", 4)


def test_a_mode_of_the_training_sees_what_it_would_have_seen(tmp_path: Path) -> None:
    """A mode sees products of subclasses, so these are not taken apart where there is one."""

    def counted(path: Path | None) -> tuple[list[Tensor], dict[str, Any]]:
        with FlopCounterMode(display=False) as counter:
            parameters = train(path, net(fp8))
        return parameters, {str(name): count for name, count in counter.get_flop_counts()["Global"].items()}

    expected, flops = counted(None)
    actual, recorded_flops = counted(tmp_path / "run")

    assert all(map(torch.equal, actual, expected))
    assert recorded_flops == flops
    assert products(tmp_path / "run", step=0)


def test_a_compiled_model_is_said_to_be_unchecked(tmp_path: Path) -> None:
    model = net()
    expected = train(None, net())
    actual = train(tmp_path / "run", torch.compile(model, backend="eager"))  # type: ignore[arg-type]

    assert all(map(torch.equal, actual, expected))
    assert products(tmp_path / "run") == []
    assert [reason for _, _, reason in unobserved(tmp_path / "run")] == [
        "not checked: it is compiled, and compiled code runs no operators one by one"
    ]


def either(x: Tensor) -> Tensor:
    found: Tensor = torch.cond(x.sum() > 0, lambda x: x @ torch.ones(WIDTH, WIDTH), lambda x: x * 3, (x,))
    return found


compiled_product = torch.compile(lambda x: x @ x.T @ x, backend="eager", fullgraph=True)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("body", [either, compiled_product])
def test_what_torch_compiles_inside_a_module_runs_as_it_does_otherwise(
    body: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    expected = train(None, net(body))
    actual = train(tmp_path / "run", net(body))

    assert all(map(torch.equal, actual, expected))
    assert ("2/aten.addmm[0]", (5,)) in products(tmp_path / "run", step=0)


def test_evaluations_are_not_checked(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer, observe="products", strict=True):
        with torch.no_grad():
            model(torch.ones(7, WIDTH))
        model(torch.ones(5, WIDTH)).sum().backward()
        optimizer.step()

    assert {shape for _, shape in products(tmp_path / "run", phase="forward")} == {(5,)}


def test_products_and_operators_are_recorded_together(tmp_path: Path) -> None:
    expected = train(None, net())
    actual = train(tmp_path / "run", net(), observe=["products", "operators", "forward"])

    assert all(map(torch.equal, actual, expected))
    stages = {seen.stage for seen, _ in rows(tmp_path / "run")}
    assert {"product", "operator", ""} <= stages
    assert not _get_current_dispatch_mode_stack()


def test_a_comparison_leaves_products_out(tmp_path: Path) -> None:
    train(tmp_path / "base", net(), observe=["products", "forward", "grad"])
    train(tmp_path / "other", net(), observe=["forward", "grad"])

    for pair in (("base", "other"), ("other", "base"), ("base", "base")):
        comparison = traindiff.compare(*(tmp_path / name for name in pair))
        assert comparison.verdict == "identical"
        assert not any("product" in one.stage for one in comparison.differences)


def test_a_comparison_of_products_alone_says_that_nothing_was_compared(tmp_path: Path) -> None:
    train(tmp_path / "run", net())

    comparison = traindiff.compare(tmp_path / "run", tmp_path / "run")

    assert comparison.verdict == "incomplete"
    assert any("alone, which have no verdict" in note for note in comparison.notes)


def test_a_bit_that_flips_between_two_operators_is_found_with_the_operator_that_returned_it(tmp_path: Path) -> None:
    model = net(lambda x: torch.tanh(x) * 2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def flip(*call: Any) -> None:
        bits = call[2].detach().numpy().reshape(-1).view(np.uint32)
        bits[4] ^= np.uint32(1 << 9)

    with traindiff.record(tmp_path / "run", model, optimizer, observe="products", strict=True):
        for step in range(3):
            hook = model[1].register_forward_hook(flip) if step == 1 else None
            model(torch.randn(5, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if hook is not None:
                hook.remove()

    (found,) = traindiff.check(tmp_path / "run", rules="bit-flip,product-wrong").findings
    assert (found.kind, found.step, found.phase, found.path) == ("bit-flip", 1, "forward", "1/aten.mul[0]")
    assert found.message.startswith("Bit 9 of one element of what 1/aten.mul[0] returned changed in memory, before")


def test_one_number_that_comes_out_otherwise_once_is_found_though_rounding_would_hide_it(tmp_path: Path) -> None:
    def change(_: tuple[Any, ...], output: Tensor) -> Tensor:
        output = output.clone()
        output[2, 1] *= 1.0 + 1.5e-6  # 25 roundings of this element, and little beside those of its row
        return output

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer, observe="products", strict=True):
        for step in range(3):
            with Breaks("aten.addmm", change, {0}) if step == 1 else nullcontext():
                model(torch.randn(5, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    (found,) = traindiff.check(tmp_path / "run", rules="bit-flip,product-wrong").findings
    assert (found.kind, found.step, found.path) == ("bit-flip", 1, "0/aten.addmm[0]")
    assert found.message.startswith("One element of what 0/aten.addmm[0] returned is another number than when")
