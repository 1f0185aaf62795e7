"""What was saved is run again: operator by operator, in its own dtypes, in float32 and in float64."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import traindiff
from tests.observe.nonfinite.trainings import WIDTH, Steep, train
from traindiff.cli.commands import app
from traindiff.observe.torch.nonfinite.capturing import capture
from traindiff.observe.torch.nonfinite.cause import CauseReport, find_cause
from traindiff.observe.torch.nonfinite.operations import NotWritableError
from traindiff.observe.torch.nonfinite.rerunning import rerun


def saved(model: nn.Module, *args: Any, directory: Path, backward: bool = False, **settings: Any) -> Path:
    """Watch one call that goes wrong; gives where it was saved."""
    with traindiff.watch(model, output=directory, file=io.StringIO(), **settings):
        if backward:
            output = model(*args)
            with pytest.raises(traindiff.NonFiniteError):
                output.sum().backward()
        else:
            with pytest.raises(traindiff.NonFiniteError):
                model(*args)
    (found,) = directory.iterdir()
    return found


class Mlp(nn.Module):
    """Its second product overflows float16."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 16)
        self.norm = nn.LayerNorm(16)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor, factor: float = 300.0) -> Tensor:
        hidden = self.drop(self.norm(self.up(x)))
        return torch.nn.functional.relu(hidden * factor, inplace=True) * factor


def test_an_overflow_of_float16_is_told_from_one_of_the_mathematics(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Mlp()).half()
    found = find_cause(saved(model, torch.randn(4, WIDTH).half(), directory=tmp_path))

    assert (found.path, found.module, found.cause, found.exit_code) == ("1", "Mlp", "dtype", 0)
    first = found.native.first_non_finite
    assert first is not None
    assert first.name == "aten.mul.Tensor"
    assert "The overflow is float16's: operator" in found.message
    assert "above float16's 65504, and what comes out is finite." in found.message


def test_the_division_by_zero_is_the_mathematics(tmp_path: Path) -> None:
    class Ratio(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 0).exp().log() / (x * 0)

    found = find_cause(saved(nn.Sequential(nn.Linear(WIDTH, 4), Ratio()), torch.randn(2, WIDTH), directory=tmp_path))

    assert (found.cause, found.exit_code) == ("mathematics", 1)
    assert "aten.div.Tensor makes NaN or infinity of finite numbers, in float64 there too" in found.message


def test_an_overflow_of_float32_is_seen_against_float64(tmp_path: Path) -> None:
    class Power(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x.abs() + 90.0).exp()

    found = find_cause(saved(nn.Sequential(Power()), torch.ones(2, WIDTH), directory=tmp_path))

    assert found.cause == "dtype"
    assert "The overflow is float32's" in found.message
    assert "in float64 the largest is 3.32e+39, above float32's 3.40282e+38" in found.message


def test_masks_of_dropout_are_those_of_the_call(tmp_path: Path) -> None:
    """One element in ten thousand overflows, if it is not dropped."""

    class Spike(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(x)

    value = torch.full((64,), 4e4, dtype=torch.float16)
    for seed in range(4):
        torch.manual_seed(seed)
        where = tmp_path / str(seed)
        found = find_cause(saved(nn.Sequential(Spike()), value, directory=where))
        again = found.native.first_non_finite
        assert again is not None
        dropped = again.contents.num_inf
        torch.manual_seed(seed)
        assert dropped == int((nn.Dropout(0.5)(value) > 0).sum())


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "cauchy": lambda x: torch.empty_like(x).cauchy_(),
    "geometric": lambda x: torch.empty_like(x).geometric_(0.01),
    "log_normal": lambda x: torch.empty_like(x).log_normal_(),
    "multinomial": lambda x: x[torch.multinomial(torch.ones(64), 8)],
    "normal": torch.randn_like,
}


@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_are_those_of_the_call_in_every_dtype(name: str) -> None:
    class Draws(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sum() + DRAWS[name](x).sum()

    call = capture(Draws(), (torch.rand(64),), {})
    (first,), (again,), (longer,) = (rerun(call, dtype).results.values() for dtype in (None, None, torch.float64))
    assert first.largest == again.largest == pytest.approx(longer.largest, rel=1e-4)


def test_a_backward_pass_is_captured_and_run_again(tmp_path: Path) -> None:
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sqrt(x * x)

    model = nn.Sequential(nn.Linear(WIDTH, 4), Root())
    model[0].weight.data.zero_()
    model[0].bias.data.zero_()
    found = find_cause(saved(model, torch.ones(2, WIDTH), directory=tmp_path, backward=True, keep_inputs=True))

    assert found.cause == "mathematics"
    first = found.native.first_non_finite
    assert first is not None
    assert first.backward
    assert [one.contents.is_finite for one in found.native.made if not one.backward] == [True, True]
    assert found.native.results["grad input[0]"].num_nan == 8


def test_what_cannot_be_run_again_is_not_said_to_be(tmp_path: Path) -> None:
    with pytest.raises(traindiff.NonFiniteError) as caught:
        train(loss_of=lambda output: output.mean() * float("nan"), output=tmp_path)
    (saved,) = tmp_path.iterdir()
    assert f"{saved} holds what is known of it; it cannot be run again: no single module made it." in str(caught.value)


def test_without_its_inputs_a_backward_pass_cannot_be_captured_and_that_is_said(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.Dropout(0.1), Steep(), nn.Tanh())
    model[2].factor = math.inf
    where = saved(model, torch.ones(2, WIDTH), directory=tmp_path, backward=True)

    with pytest.raises(traindiff.NotARecordingError, match=r"no longer in memory; watch\(keep_inputs=True\) keeps it"):
        find_cause(where)
    assert (where / "tensors.safetensors").stat().st_size > 100
    assert "Detected inf/nan" in (where / "frames.txt").read_text()


def every_layer() -> dict[str, tuple[nn.Module, tuple[Any, ...]]]:
    torch.manual_seed(0)
    x = torch.randn(3, 6, WIDTH)
    return {
        "linear": (nn.Linear(WIDTH, 4), (x,)),
        "lstm": (nn.LSTM(WIDTH, 5, num_layers=2), (x,)),
        "attention": (nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True), (x, x, x)),
        "encoder": (nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True), (x,)),
        "batch norm": (nn.BatchNorm1d(6), (x,)),
        "group norm": (nn.GroupNorm(2, 6), (x,)),
        "convolution": (nn.Conv1d(6, 4, 3), (x,)),
        "embedding": (nn.Embedding(9, 4), (torch.tensor([1, 5]),)),
        "rms norm": (nn.RMSNorm(WIDTH), (x,)),
        "in place": (nn.ReLU(inplace=True), (x.clone(),)),
        "bilinear": (nn.Bilinear(WIDTH, WIDTH, 3), (x, x)),
    }


@pytest.mark.parametrize("name", every_layer())
def test_layers_are_captured_and_come_out_as_they_are(name: str) -> None:
    module, args = every_layer()[name]
    state = torch.get_rng_state()
    call = capture(module, args, {}, random_state=state)
    assert torch.equal(torch.get_rng_state(), state)
    native, longer = rerun(call), rerun(call, torch.float64)

    torch.set_rng_state(state)
    expected = module(*args)
    expected = expected[0] if isinstance(expected, tuple) else expected
    assert native.failed == longer.failed == ""
    for run in (native, longer):
        largest = next(iter(run.results.values())).largest
        assert largest == pytest.approx(float(expected.detach().abs().max()), rel=1e-5)


@pytest.mark.parametrize("name", [one for one in every_layer() if one != "embedding"])
def test_their_backward_passes_come_out_as_they_are(name: str) -> None:
    module, args = every_layer()[name]
    state = torch.get_rng_state()
    leaves = [one.clone().requires_grad_() for one in args]
    given = [one * 1 for one in leaves] if name == "in place" else leaves
    output = module(*given)
    output = output[0] if isinstance(output, tuple) else output
    gradient = torch.randn_like(output)
    output.backward(gradient)
    slot = "output[0]" if name in ("lstm", "attention") else "output"

    call = capture(module, args, {}, gradients={slot: gradient}, random_state=state)
    for dtype in (None, torch.float64):
        run = rerun(call, dtype)
        assert run.failed == ""
        expected = max(float(one.grad.abs().max()) for one in module.parameters()) if list(module.parameters()) else 0.0
        found = [one.largest for key, one in run.results.items() if not key.startswith("grad input")]
        assert max(found, default=0.0) == pytest.approx(expected, rel=1e-4)


def test_under_autocast_the_casts_are_operators_of_the_call() -> None:
    module = nn.Linear(WIDTH, 4)
    with torch.autocast("cpu", torch.bfloat16):
        call = capture(module, (torch.randn(2, WIDTH),), {})
    assert {one.dtype for one in rerun(call).made} == {torch.bfloat16}
    assert {one.dtype for one in rerun(call, torch.float32).made} == {torch.float32}


def test_what_cannot_be_copied_says_why() -> None:
    class Uncopied(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            raise ValueError("not me")

    with pytest.raises(NotWritableError, match="copying it raised ValueError: not me"):
        capture(Uncopied(2, 2), (torch.ones(2),), {})
    module = nn.Linear(2, 2)
    assert capture(module, (torch.ones(2),), {}).operations
    with pytest.raises(NotWritableError, match="calling it again raised RuntimeError"):
        capture(module, (torch.ones(3),), {})


def run_command(*arguments: str) -> tuple[int, str, str]:
    found = CliRunner().invoke(app, ["rerun", *arguments])
    return found.exit_code, found.stdout, found.stderr


def test_the_command_prints_a_table_and_the_same_as_json(tmp_path: Path) -> None:
    torch.manual_seed(0)
    where = saved(nn.Sequential(Mlp()).half(), torch.randn(4, WIDTH).half(), directory=tmp_path)

    code, printed, _ = run_command(str(where))
    assert code == 0
    lines = printed.splitlines()
    assert lines[0] == "0 Mlp"
    (marked,) = [line for line in lines if line.startswith("> ")]
    assert "mul.Tensor" in marked
    assert lines[-1].startswith("The overflow is float16's")

    code, printed, _ = run_command(str(where), "--json")
    content = json.loads(printed)
    assert code == 0
    assert content["schema"] == {"name": "traindiff-rerun", "version": 1}
    assert content["cause"] == "dtype"
    assert content["first_non_finite"]["operator"] == "aten.mul.Tensor"
    assert {row["native"]["dtype"] for row in content["operators"]} == {"float16", "bool"} - {"bool"}


def test_names_that_somebody_else_has_saved_are_no_codes_for_the_terminal(tmp_path: Path) -> None:
    torch.manual_seed(0)
    directory = saved(nn.Sequential(Mlp()).half(), torch.randn(4, WIDTH).half(), directory=tmp_path)
    file = directory / "module.json"
    content = json.loads(file.read_text())
    content |= {"path": "a\x1b[31m", "module": "\u202eb", "origin": {**content["origin"], "message": "c\r\x00"}}
    file.write_text(json.dumps(content))

    _, printed, _ = run_command(str(directory))
    assert printed.startswith("a\\x1b[31m \\u202eb\n  c\\r\\x00\n")
    assert all(line.isprintable() for line in printed.split("\n"))
    file.write_text(json.dumps({**content, "call": None, "not_captured": "\x1b[2J"}))
    assert "\x1b" not in "".join(map(str, run_command(str(directory))))


def test_what_is_no_saved_call_exits_with_2(tmp_path: Path) -> None:
    code, _, printed = run_command(str(tmp_path))
    assert code == 2
    assert "holds no module.json" in printed.replace("\n", " ")

    where = saved(nn.Sequential(Mlp()).half(), torch.randn(4, WIDTH).half() + 1, directory=tmp_path / "saved")
    text = (where / "module.json").read_text()
    for content, message in (
        ("{", "is damaged"),
        (text.replace('"version": 1', '"version": 2', 1), "has format traindiff-module 2"),
        (text.replace('"operations"', '"operation"', 1), "is damaged"),
    ):
        (where / "module.json").write_text(content)
        code, _, printed = run_command(str(where))
        assert code == 2
        assert message in printed.replace("\n", " ")


def test_a_call_that_comes_out_finite_is_not_reproduced(tmp_path: Path) -> None:
    calls = [0]

    class Once(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            calls[0] += 1
            return x / 0 if calls[0] == 1 else x * 1

    found: CauseReport = find_cause(saved(nn.Sequential(Once()), torch.ones(2), directory=tmp_path))
    assert (found.cause, found.exit_code) == ("not reproduced", 3)
