"""What is printed: the frames, in the format of transformers' detector, with a backward and an optimizer part."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import traindiff
from tests.observe.nonfinite.trainings import WIDTH, Net, train


class Ones(nn.Module):
    """Weights that are easy to tell."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2, bias=False)
        self.linear.weight.data = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        self.act = nn.Tanh()

    def forward(self, x: Tensor, *, scale: float, mask: Tensor | None = None) -> dict[str, Any]:
        return {"logits": self.act(self.linear(x)), "none": None, "scale": scale}


def run(capsys: pytest.CaptureFixture[str], **settings: Any) -> str:
    model = Ones()
    optimizer = torch.optim.SGD(model.parameters(), lr=math.inf, momentum=0.5)
    with traindiff.watch(model, optimizer, output=None, **settings):
        model(torch.tensor([[1.0, -1.0]]), scale=1.0)["logits"].sum().backward()
        optimizer.param_groups[0]["lr"] = math.nan
        with pytest.raises(traindiff.NonFiniteError):
            optimizer.step()
    return capsys.readouterr().err


def test_the_report_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(capsys)
        == """
Detected inf/nan during batch_number=0
Last 3 forward frames:
abs min  abs max  metadata
                  linear Linear
1.00e+00 4.00e+00 weight
1.00e+00 1.00e+00 input[0]
1.00e+00 1.00e+00 output
                  act Tanh
1.00e+00 1.00e+00 input[0]
7.62e-01 7.62e-01 output
                  (root) Ones
1.00e+00 1.00e+00 input[0]
     not a tensor input.scale
7.62e-01 7.62e-01 output.logits
Last 3 backward frames:
abs min  abs max  metadata
                  act Tanh
1.00e+00 1.00e+00 grad output
4.20e-01 4.20e-01 grad input[0]
                  (root) Ones
1.00e+00 1.00e+00 grad output.logits
                  linear Linear
4.20e-01 4.20e-01 grad output
Last 1 gradient frames:
abs min  abs max  metadata
                  linear.weight Parameter
4.20e-01 4.20e-01 grad

The setting lr of optimizer.groups[0] is NaN.
"""
    )


def test_only_the_last_frames_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    printed = run(capsys, frames=1)

    assert "Last 1 forward frames:" in printed
    assert "Tanh\n7.62" not in printed


def test_the_frames_end_with_the_one_in_which_it_happened() -> None:
    def breaks(model: Any, _: Any, step: int) -> None:
        model.scale.factor = math.nan if step == 1 else 1.0

    _, printed = train(breaks=breaks, on_detect=lambda _: None, frames=3)

    frames = printed.split("abs min  abs max  metadata\n")[1].split("\n\n")[0]
    assert [line.strip() for line in frames.splitlines() if line.startswith("   ") and "nan" not in line] == [
        "first Linear",
        "act ReLU",
        "scale Scale",
    ]
    assert frames.splitlines()[-1] == "     nan      nan output"


def test_traced_steps_are_printed_in_full_and_nothing_is_detected_in_them() -> None:
    def breaks(model: Any, _: Any, step: int) -> None:
        model.scale.factor = math.inf if step == 1 else 1.0

    with pytest.raises(traindiff.NonFiniteError, match="batch_number=2"):  # the parameters are NaN by then
        train(breaks=breaks, trace=[1])

    def mild(model: Any, _: Any, step: int) -> None:
        model.scale.factor = 2.0 if step == 1 else 1.0

    _, printed = train(breaks=mild, trace=[0, 2])
    assert printed.count("*** Starting batch number=") == 2
    assert printed.startswith(
        "\n\n                  *** Starting batch number=0 ***\nabs min  abs max  metadata\n"
        "                  first Linear\n"
    )
    first = printed.split("*** Finished batch number=0 ***")[0]
    assert first.count("(root) Net") == 2
    for part in ("first.weight Parameter", "grad output", "exp_avg_sq"):
        assert part in first
    assert "*** Starting batch number=2 ***" in printed
    assert "batch number=1" not in printed


def test_training_stops_after_the_step_that_was_asked_for() -> None:
    seen: list[int] = []

    with pytest.raises(traindiff.StoppedError, match=r"watch\(abort_after=1\): step 1 has ended\."):
        train(breaks=lambda model, optimizer, step: seen.append(step), abort_after=1, steps=9)
    assert seen == [0, 1]


@dataclass
class Returned:
    first: Tensor
    rest: Any


class Anything(nn.Module):
    def forward(self, *values: Any, **named: Any) -> Any:
        return Returned(first=values[0], rest={"named": named, "values": [values, "text"]})


def test_tensors_of_every_kind_are_printed_and_none_of_them_is_a_fault() -> None:
    kinds = {
        "boolean": torch.tensor([True, False]),
        "integer": torch.tensor([-3, 2]),
        "half": torch.ones(2, dtype=torch.float16),
        "short": torch.ones(2).to(torch.float8_e4m3fn),
        "sparse": torch.eye(3).to_sparse(),
        "empty": torch.zeros(0, 3),
        "number": torch.tensor(2.0),
        "complex": torch.tensor([3 + 4j]),
        "strided": torch.arange(12.0).view(3, 4).t()[::2],
        "expanded": torch.ones(3, 1).expand(3, 5),
        "meta": torch.empty(3, device="meta"),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    }
    import io

    file = io.StringIO()
    model = nn.Sequential(Anything())
    with traindiff.watch(model, output=None, trace=(0,), file=file), torch.no_grad():
        model[0](*kinds.values(), **kinds, deep={"a": [(kinds["half"],)]})
    printed = file.getvalue()

    for line in (
        "0.00e+00 1.00e+00 input.boolean",
        "2.00e+00 3.00e+00 input.integer",
        "            empty input.empty",
        "5.00e+00 5.00e+00 input.complex",
        "1.00e+00 1.00e+00 input.short",
        "         not read input.meta",
        "1.00e+00 1.00e+00 input.deep.a[0][0]",
        "1.00e+00 1.00e+00 output.rest.values[0][2]",
        "1.00e+00 1.00e+00 output.rest.named.half",
    ):
        assert line in printed


def test_a_nan_in_a_dataclass_in_a_dict_is_found() -> None:
    class Deep(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"deep": [Returned(first=x, rest=(x / 0, None))]}

    model = nn.Sequential(Deep(), Anything())
    message = r"0 output\.deep\[0\]\.rest\[0\] holds infinity"
    with traindiff.watch(model, output=None), pytest.raises(traindiff.NonFiniteError, match=message):
        model[0](torch.ones(2, WIDTH))


def test_sparse_gradients_are_watched() -> None:
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with traindiff.watch(model, optimizer, output=None):
        for _ in range(2):
            model(torch.tensor([1, 5])).sum().backward()
            optimizer.step()
        model[0].weight.register_hook(lambda gradient: gradient * math.inf)
        model(torch.tensor([1, 5])).sum().backward()
        with pytest.raises(traindiff.NonFiniteError, match=r"The gradient of 0\.weight"):
            optimizer.step()


def test_frames_are_those_of_the_net() -> None:
    _, printed = train(make=Net, trace=(0,), steps=1)
    titles = [line.split()[-1] for line in printed.splitlines() if line.startswith(" " * 18) and "***" not in line]
    assert titles[:6] == ["Linear", "ReLU", "Scale", "Steep", "Linear", "Net"]
