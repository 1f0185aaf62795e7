"""The operators inside chosen modules: what is recorded of them, where they came from, and what is left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

import traindiff
from tests.observe.hooks.models import WIDTH, Checkpointed, mlp
from tests.observe.hooks.reading import rows, unobserved
from traindiff.core.observation import OPERATOR, OPERATOR_STAGES, RECOMPUTED_OPERATOR
from traindiff.errors import ConfigError
from traindiff.storage import open_recording


class Scaled(nn.Module):
    """Its own operators lie before and behind those of a layer that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x.neg()
        x = self.inner(x)
        x.mul_(2.0)
        return traindiff.inspect("seen", x.abs())


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Scaled(), nn.Linear(WIDTH, 2))


def train(path: Path, net: nn.Module, *, steps: int = 2, **settings: Any) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with traindiff.record(path, net, optimizer, **{"strict": True, **settings}):
        for step in range(steps):
            batch = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(step))
            net(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def operators(directory: Path, /, **where: Any) -> list[str]:
    """`PATH SLOT` of all that was observed of operators, in the order of the file."""
    found = (seen for seen, _ in rows(directory, **where) if seen.stage in OPERATOR_STAGES)
    return [f"{seen.path} {seen.slot}" for seen in found]


def described(path: Path, phase: str, operator: str) -> Any:
    return open_recording(str(path)).rank_content(0)["operators"][phase][operator]


def line_of(function: Callable[..., Any], code: str) -> int:
    """Number of the line of a function of this file that reads so."""
    number = function.__code__.co_firstlineno
    lines = Path(__file__).read_text().splitlines()[number - 1 :]
    return number + next(index for index, line in enumerate(lines) if line.strip() == code)


def test_every_operator_of_a_chosen_module_is_recorded_where_it_ran_in_the_order_in_which_it_did(
    tmp_path: Path,
) -> None:
    train(tmp_path / "run", model(), operators="1")

    assert operators(tmp_path / "run", step=0, phase="forward") == [
        "1/aten.neg[0] input[0]", "1/aten.neg[0] output[0]",
        "1.inner/aten.t[0] input[0]", "1.inner/aten.t[0] output[0]",
        "1.inner/aten.addmm[0] input[0]", "1.inner/aten.addmm[0] input[1]", "1.inner/aten.addmm[0] input[2]",
        "1.inner/aten.addmm[0] output[0]",
        "1/aten.mul_[0] input[0]", "1/aten.mul_[0] output[0]",
        "1/aten.abs[0] input[0]", "1/aten.abs[0] output[0]",
    ]  # fmt: skip
    backward = operators(tmp_path / "run", step=0, phase="backward")
    assert [one for one in backward if one.endswith("output[0]")] == [
        "1/aten.sgn[0] output[0]", "1/aten.mul[0] output[0]", "1/aten.mul[1] output[0]",
        *(f"1.inner/aten.{name} output[0]" for name in ("t[0]", "mm[0]", "t[1]", "mm[1]", "t[2]", "sum[0]", "view[0]")),
        "1.inner/aten.t[3] output[0]",
        "1/aten.neg[0] output[0]",
    ]  # fmt: skip
    assert operators(tmp_path / "run", step=1) == operators(tmp_path / "run", step=0)


def test_what_is_written_in_place_is_recorded_before_and_after(tmp_path: Path) -> None:
    train(tmp_path / "run", model(), operators="1", steps=1)

    (before, after) = (summary for _, summary in rows(tmp_path / "run", path="1/aten.mul_[0]"))
    (_, inner), *_ = rows(tmp_path / "run", path="1.inner", slot="output[0]", phase="forward")
    assert before["fingerprint"] == inner["fingerprint"]
    assert np.allclose(after["sketch"], 2 * before["sketch"])


def test_what_several_tensors_are_written_with_at_once_is_recorded(tmp_path: Path) -> None:
    class Foreach(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            parts = [part.clone() for part in x.split(1)]
            torch._foreach_mul_(parts, 3.0)
            return torch.cat(parts)

    train(tmp_path / "run", nn.Sequential(nn.Linear(WIDTH, WIDTH), Foreach()), operators="1", steps=1)

    seen = operators(tmp_path / "run", path="1/aten._foreach_mul_[0]", phase="forward")
    assert seen == [
        *(f"1/aten._foreach_mul_[0] input[0][{number}]" for number in range(5)),
        *(f"1/aten._foreach_mul_[0] output.self[{number}]" for number in range(5)),
    ]


def test_what_is_in_memory_that_nothing_was_written_to_is_unknown(tmp_path: Path) -> None:
    class Filling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            made = torch.empty_like(x)
            made.copy_(x)
            return made * 2

    train(tmp_path / "run", nn.Sequential(nn.Linear(WIDTH, WIDTH), Filling()), operators="1", steps=1)

    assert ("1/aten.empty_like[0]", "output[0]") in [one[:2] for one in unobserved(tmp_path / "run")]
    seen = operators(tmp_path / "run", path="1/aten.copy_[0]")
    assert seen == ["1/aten.copy_[0] input[1]", "1/aten.copy_[0] output[0]"]


def test_an_operator_comes_with_the_line_that_called_it_and_its_settings(tmp_path: Path) -> None:
    train(tmp_path / "run", model(), operators="1", steps=1)

    forward = Scaled.forward
    place = described(tmp_path / "run", "forward", "1/aten.mul_[0]")
    assert place["settings"] == {"other": "2.0"}
    assert place["source"] == {
        "file": str(Path(__file__)).removeprefix(f"{Path.cwd()}/"), "line": line_of(forward, "x.mul_(2.0)"),
        "function": "forward", "code": "x.mul_(2.0)",
    }  # fmt: skip
    addmm = described(tmp_path / "run", "forward", "1.inner/aten.addmm[0]")  # not the line of torch that does it
    assert addmm["source"]["line"] == line_of(forward, "x = self.inner(x)")


def test_more_operators_than_a_reader_takes_are_recorded_without_their_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("traindiff.observe.torch.hooks.operator_mode.MOST_DESCRIBED_BYTES", 1000)
    train(tmp_path / "run", model(), operators="*")

    described_there = open_recording(str(tmp_path / "run")).rank_content(0)["operators"]
    num_described = sum(len(of_phase) for of_phase in described_there.values())
    assert 1 <= num_described <= 4
    assert len(set(operators(tmp_path / "run"))) > num_described


def test_an_operator_of_a_backward_pass_comes_with_the_line_whose_gradient_it_computes(tmp_path: Path) -> None:
    train(tmp_path / "run", model(), operators="1", steps=1)

    found = described(tmp_path / "run", "backward", "1.inner/aten.mm[0]")
    assert (found["of"], found["node"]) == ("1.inner/aten.addmm[0]", "AddmmBackward0")
    assert found["source"]["line"] == line_of(Scaled.forward, "x = self.inner(x)")


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,) = gradients
        return gradient * 3


class UsesFunction(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        doubled: Tensor = Doubling.apply(x)
        return doubled


def test_an_operator_of_a_functions_own_backward_pass_comes_with_its_line(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), UsesFunction())
    train(tmp_path / "run", net, operators="1", steps=1)

    found = described(tmp_path / "run", "backward", "1/aten.mul[0]")
    assert (found["node"], found["settings"]) == ("DoublingBackward", {"other": "3"})
    assert found["source"]["line"] == line_of(Doubling.backward, "return gradient * 3")


def test_calls_of_one_module_are_counted(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(x))

    train(tmp_path / "run", Twice(), operators="layer", steps=1)

    seen = [s for s, _ in rows(tmp_path / "run", path="layer/aten.addmm[0]", slot="output[0]", phase="forward")]
    assert [one.call for one in seen] == [0, 1]
    back = [s for s, _ in rows(tmp_path / "run", path="layer/aten.mm[0]", slot="output[0]", phase="backward")]
    assert [one.call for one in back] == [1, 0]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_checkpointing_runs_again_is_told_apart(use_reentrant: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Checkpointed(use_reentrant=use_reentrant))
    train(tmp_path / "run", net, operators="1.inner", steps=1)

    first = operators(tmp_path / "run", stage=OPERATOR, phase="forward")
    again = operators(tmp_path / "run", stage=RECOMPUTED_OPERATOR, phase="forward")
    assert "1.inner.0/aten.addmm[0] output[0]" in first
    # What is not needed for the backward pass need not be computed again, and what is kept for it is another thing.
    assert {one for one in again if "detach" not in one} <= set(first)
    assert "1.inner.0/aten.addmm[0] output[0]" in again
    backward = operators(tmp_path / "run", phase="backward")
    assert "1.inner.0/aten.mm[0] output[0]" in backward
    assert "1.inner.2/aten.threshold_backward[0] output[0]" in backward


def test_a_training_computes_the_same_bits_while_its_operators_are_recorded(tmp_path: Path) -> None:
    def run(**settings: Any) -> list[Tensor]:
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.5), nn.BatchNorm1d(16), Scaled16(), nn.Linear(16, 2))
        train(tmp_path / f"run-{len(settings)}", net, steps=4, **settings)
        return [*(one.detach().clone() for one in net.state_dict().values()), torch.get_rng_state()]

    class Scaled16(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda y: y.sigmoid() * y, x, use_reentrant=False)  # type: ignore[no-any-return]

    for one, other in zip(run(operators="*"), run(), strict=True):
        assert torch.equal(one, other)


def test_no_operator_is_recorded_outside_of_the_steps_and_modules_that_were_chosen(tmp_path: Path) -> None:
    train(tmp_path / "run", model(), steps=4, operators=["0", "2"])
    paths = {seen.path.partition("/")[0] for seen, _ in rows(tmp_path / "run") if seen.stage == OPERATOR}
    assert paths == {"0", "2"}

    train(tmp_path / "few", model(), operators="1", steps=4)
    with traindiff.record(tmp_path / "one", net := model(), operators="1", steps=None) as run:
        assert run.step == 0
        with torch.no_grad():
            net(torch.ones(2, WIDTH))
    assert operators(tmp_path / "one") == []  # an evaluation


def test_the_steps_that_are_recorded_are_those_whose_operators_are(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", net, optimizer, operators="1", steps=[2]):
        for _ in range(4):
            net(torch.ones(2, WIDTH)).sum().backward()
            assert not _get_current_dispatch_mode_stack()
            optimizer.step()

    assert {seen.step for seen, _ in rows(tmp_path / "run") if seen.stage == OPERATOR} == {2}


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        if x.shape[0] == 3:
            raise ValueError("three samples")
        if x.shape[0] == 4:
            x.register_hook(_raise)
        return x


def _raise(_: Tensor) -> None:
    raise ValueError("four samples")


@pytest.mark.parametrize("samples", [3, 4])
def test_an_error_of_the_training_leaves_nothing_behind(samples: int, tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Fails())
    with traindiff.record(tmp_path / "run", net, torch.optim.SGD(net.parameters(), lr=0.1), operators="1"):
        with pytest.raises(ValueError, match="samples"):
            net(torch.ones(samples, WIDTH)).sum().backward()
        assert not _get_current_dispatch_mode_stack()
        net(torch.ones(2, WIDTH)).sum().backward()  # goes on as if nothing had been
        assert not _get_current_dispatch_mode_stack()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


def test_a_module_that_is_compiled_or_a_part_of_one_that_is_cannot_be_looked_into(tmp_path: Path) -> None:
    compiled = torch.compile(model(), backend="eager")
    for chosen in ("1", "1.inner", "*"):
        with pytest.raises(ConfigError, match="is in a part of the model that is compiled"):
            traindiff.record(tmp_path / "run", compiled, operators=chosen)  # type: ignore[arg-type]
    beside = nn.Sequential(model(), model())
    beside[0] = torch.compile(beside[0], backend="eager")  # type: ignore[assignment]
    traindiff.record(tmp_path / "run", beside, operators="1.1").close()


def test_a_compiled_function_inside_a_module_is_said_to_be_in_the_way(tmp_path: Path) -> None:
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    class UsesCompiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.doubled = torch.compile(doubled, backend="eager")

        def forward(self, x: Tensor) -> Tensor:
            return self.doubled(x)

    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), UsesCompiled())
    with pytest.warns(traindiff.TraindiffWarning, match="compiled code runs no operators one by one"):
        train(tmp_path / "run", net, operators="1", strict=False)


def test_a_pattern_that_matches_nothing_is_refused_with_what_it_may_have_meant(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        traindiff.record(tmp_path / "run", model(), operators=["1.iner", "2"])

    assert str(caught.value) == (
        "1 problem in record(...); nothing was attached to the model.\n\n"
        "  record(operators='1.iner')\n"
        "    matches none of the model's 5 modules.\n"
        "    Did you mean '1.inner'? Modules are called like: 0, 1, 1.inner, ..."
    )


def test_operators_can_be_asked_for_like_any_other_thing_to_observe(tmp_path: Path) -> None:
    train(tmp_path / "run", mlp(), observe=["forward", "operators"], steps=1)

    assert "0/aten.addmm[0] output[0]" in operators(tmp_path / "run")
    settings = open_recording(str(tmp_path / "run")).run["settings"]
    assert (settings["observe"], settings["operators"]) == (["forward", "operators"], ["*"])


@pytest.fixture(autouse=True)
def no_mode_is_left() -> Iterator[None]:
    yield
    assert not _get_current_dispatch_mode_stack()


def test_no_tensor_is_written_out_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes longer than the operator, and waits for its device."""

    def refuse(*_: Any, **__: Any) -> str:
        raise AssertionError("a tensor was written out")

    net = model()
    with monkeypatch.context() as patched:
        patched.setattr(Tensor, "__repr__", refuse)
        patched.setattr(nn.Parameter, "__repr__", refuse)
        train(tmp_path / "run", net, operators="*", strict=True)

    assert operators(tmp_path / "run", phase="forward")
