"""The detector of transformers, under its names: the same arguments, and the same output byte for byte."""

from __future__ import annotations

import inspect
import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import traindiff
from traindiff.compat import transformers as replacement
from traindiff.compat.transformers import (
    DebugOption,
    DebugUnderflowOverflow,
    UnderflowOverflowCallback,
    detect_overflow,
    get_abs_min_max,
)


class Several(nn.Module):
    def forward(self, x: Tensor, flag: int) -> Any:
        return x, (x * 2, None), "text", None, torch.tensor(3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 2)
        self.several = Several()
        self.last = nn.Linear(2, 1)
        self.factor = 1.0
        with torch.no_grad():
            self.table.weight.copy_(torch.tensor([[1.0, -2.0], [0.5, 4.0], [0.25, 8.0]]))
            self.last.weight.fill_(-0.5)
            self.last.bias.fill_(0.125)

    def forward(self, tokens: Tensor) -> Any:
        hidden = self.several(self.table(tokens), 1)[0]
        return self.last(hidden * self.factor), None


TOKENS = torch.tensor([0, 2])

FRAMES = """                  table Embedding
2.50e-01 8.00e+00 weight
0.00e+00 2.00e+00 input[0]
2.50e-01 8.00e+00 output
                  several Several
2.50e-01 8.00e+00 input[0]
     not a tensor input[1]
2.50e-01 8.00e+00 output[0]
5.00e-01 1.60e+01 output[1][0]
             None output[1][1]
     not a tensor output[2]
             None output[3]
3.00e+00 3.00e+00 output[4]
"""

LAST = """                  last Linear
5.00e-01 5.00e-01 weight
1.25e-01 1.25e-01 bias
2.50e-01 8.00e+00 input[0]
6.25e-01 4.00e+00 output
                   Net
0.00e+00 2.00e+00 input[0]
6.25e-01 4.00e+00 output[0]
             None output[1]
"""

BROKEN = """                  last Linear
5.00e-01 5.00e-01 weight
1.25e-01 1.25e-01 bias
     inf      inf input[0]
     nan      nan output
"""


def start(number: int) -> str:
    return f"\n\n                  *** Starting batch number={number} ***\nabs min  abs max  metadata\n"


def test_the_last_frames_are_printed_and_a_value_error_is_raised(capsys: pytest.CaptureFixture[str]) -> None:
    model = Net()
    DebugUnderflowOverflow(model)
    model(TOKENS)
    model.factor = math.inf
    with pytest.raises(ValueError, match="DebugUnderflowOverflow: inf/nan detected, aborting as there is no point"):
        model(TOKENS)

    assert capsys.readouterr().out == (
        "input[0] has infs\noutput has nans\noutput has infs\n"
        "\nDetected inf/nan during batch_number=1\nLast 7 forward frames:\nabs min  abs max  metadata\n"
        + start(0) + FRAMES + LAST + start(1) + FRAMES + BROKEN + "\n\n\n"
    )  # fmt: skip


def test_only_so_many_frames_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    model = Net()
    DebugUnderflowOverflow(model, max_frames_to_save=2)
    model.factor = math.inf
    with pytest.raises(ValueError, match="inf/nan"):
        model(TOKENS)

    several = "                  several Several\n" + FRAMES.split("several Several\n")[1]
    assert capsys.readouterr().out == (
        "input[0] has infs\noutput has nans\noutput has infs\n"
        "\nDetected inf/nan during batch_number=0\nLast 2 forward frames:\nabs min  abs max  metadata\n"
        + several + BROKEN + "\n\n\n"
    )  # fmt: skip


def test_traced_batches_are_printed_in_full_and_training_stops_where_it_should(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = Net()
    DebugUnderflowOverflow(model, trace_batch_nums=[1], abort_after_batch_num=1)
    model(TOKENS)
    assert capsys.readouterr().out == ""
    with pytest.raises(traindiff.StoppedError, match="aborting after 2 batches due to `abort_after_batch_num=1` arg"):
        model(TOKENS)

    assert capsys.readouterr().out == start(1) + FRAMES + LAST


def test_tensors_in_dicts_are_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    class Output(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return OrderedDict(logits=x / 0, hidden=(x,))

    model = nn.Sequential(Output())
    DebugUnderflowOverflow(model)
    with pytest.raises(ValueError, match="inf/nan"):
        model(torch.ones(2))
    printed = capsys.readouterr().out
    assert "output.logits has infs" in printed
    assert "1.00e+00 1.00e+00 output.hidden[0]" in printed


def test_the_companions_say_what_they_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert get_abs_min_max(torch.tensor([-3.0, 0.5]), "weight") == "5.00e-01 3.00e+00 weight"
    assert get_abs_min_max(torch.tensor([1.0, -math.inf]), "x") == "1.00e+00      inf x"
    assert get_abs_min_max(torch.zeros(0), "x") == "            empty x"
    assert not detect_overflow(torch.ones(3), "x")
    assert detect_overflow(torch.tensor([math.nan, math.inf]), "x")
    assert capsys.readouterr().out == "x has nans\nx has infs\n"


def test_the_callback_watches_from_the_beginning_of_a_training_to_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    model = Net()
    callback = UnderflowOverflowCallback(trace_batch_nums=[0])
    callback.on_init_end(None, None, None)
    callback.on_train_begin(None, None, None, model=model)
    callback.on_step_end(None, None, None, model=model)
    model(TOKENS)
    assert capsys.readouterr().out == start(0) + FRAMES + LAST
    callback.on_train_end(None, None, None, model=model)
    model.factor = math.inf
    model(TOKENS)
    assert not hasattr(callback, "stop")


CALLED = (
    "analyse_model", "register_forward_hook", "_register_forward_hook", "forward_hook", "create_frame",
    "analyse_variable", "expand_frame", "save_frame", "batch_start_frame", "reset_saved_frames", "trace_frames",
    "dump_saved_frames",
)  # fmt: skip
"""Methods of the original that it calls itself. `batch_end_frame` is the only other one."""


def overridden(kind: type, method: str, calls: list[str]) -> type:
    """A subclass that notes each call of one method."""

    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(method)
        return getattr(super(made, self), method)(*args, **kwargs)

    made = type("Made", (kind,), {method: noting})
    return made


def run_with(kind: Any) -> Any:
    """A traced batch, one that is not, and one with infinity; returns the detector."""
    model = Net()
    detector = kind(model, trace_batch_nums=[0])
    model(TOKENS)
    model(TOKENS)
    model.factor = math.inf
    with pytest.raises(ValueError, match="inf/nan"):
        model(TOKENS)
    return detector


@pytest.mark.parametrize("method", CALLED)
def test_a_method_of_a_subclass_is_called_in_place_of_the_detectors_own(
    method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_with(DebugUnderflowOverflow)
    plain = capsys.readouterr().out
    calls: list[str] = []
    run_with(overridden(DebugUnderflowOverflow, method, calls))

    assert calls
    assert capsys.readouterr().out == plain


def test_a_subclass_may_end_batches_and_choose_its_own_lines(capsys: pytest.CaptureFixture[str]) -> None:
    class Chosen(DebugUnderflowOverflow):
        def create_frame(self, module: nn.Module, *_: Any) -> None:
            self.expand_frame(f"{self.prefix}call {self.total_calls} of {self.module_names[module]!r}")
            if module is self.model:
                self.batch_end_frame()
            self.save_frame("end")

        def analyse_variable(self, var: Any, ctx: str) -> None:
            raise AssertionError

    model = nn.Sequential(nn.Linear(1, 1))
    detector = Chosen(model, trace_batch_nums=[0])
    model(torch.ones(1))

    assert capsys.readouterr().out == (
        f"{start(0)}                 call 1 of '0'\nend\n"
        "                 call 2 of ''\n                  *** Finished batch number=0 ***\n\n\nend\n"
    )
    assert (detector.batch_number, detector.total_calls, detector.frames) == (1, 2, [])
    assert "\n".join(detector.frame) == start(1).removesuffix("\n")


def test_a_function_in_place_of_one_of_the_modules_is_called(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(replacement, "detect_overflow", lambda var, _: bool(var.abs().max() > 7))
    model = Net()
    DebugUnderflowOverflow(model, max_frames_to_save=1)
    with pytest.raises(ValueError, match="inf/nan"):
        model(TOKENS)
    assert "table Embedding" in capsys.readouterr().out

    monkeypatch.setattr(replacement, "detect_overflow", detect_overflow)
    monkeypatch.setattr(replacement, "get_abs_min_max", lambda var, ctx: f"{var.ndim} axes: {ctx}")
    model = Net()
    DebugUnderflowOverflow(model, trace_batch_nums=[0])
    model(TOKENS)
    assert "\n2 axes: weight\n" in capsys.readouterr().out


def test_the_list_of_traced_batches_may_be_filled_later(capsys: pytest.CaptureFixture[str]) -> None:
    batches: list[int] = []
    model = Net()
    DebugUnderflowOverflow(model, trace_batch_nums=batches)
    batches.append(0)
    model(TOKENS)
    assert capsys.readouterr().out == start(0) + FRAMES + LAST


def test_debug_options_are_found_by_their_texts() -> None:
    assert DebugOption("underflow_overflow") in ["underflow_overflow"]
    assert [one.name for one in DebugOption] == ["UNDERFLOW_OVERFLOW", "TPU_METRICS_DEBUG"]
    with pytest.raises(
        ValueError, match=r"x is not a valid DebugOption, please select one of \['underflow_overflow', "
    ):
        DebugOption("x")


@pytest.mark.filterwarnings("default")  # of transformers
def test_every_public_name_of_the_original_is_there_with_its_arguments(tmp_path: Path) -> None:
    original = pytest.importorskip("transformers.debug_utils")
    transformers = pytest.importorskip("transformers")

    defined = {
        name for name, one in vars(original).items()
        if getattr(one, "__module__", "") == original.__name__ and not name.startswith("__")
    }  # fmt: skip
    assert defined == {"DebugUnderflowOverflow", "get_abs_min_max", "detect_overflow", "DebugOption"}
    assert all(hasattr(replacement, name) for name in defined)
    methods = {name for name, one in vars(original.DebugUnderflowOverflow).items() if inspect.isfunction(one)}
    assert methods == {"__init__", "batch_end_frame", *CALLED}
    for owner, ours, names in (
        (original.DebugUnderflowOverflow, DebugUnderflowOverflow, methods),
        (original, replacement, {"get_abs_min_max", "detect_overflow"}),
    ):
        for name in names:
            expected, found = (inspect.signature(getattr(one, name)).parameters for one in (owner, ours))
            assert [(one.name, one.default) for one in found.values()] == [
                (one.name, one.default) for one in expected.values()
            ]
    attributes = set(vars(original.DebugUnderflowOverflow(Net())))
    assert attributes <= set(vars(DebugUnderflowOverflow(Net())))

    theirs = transformers.TrainingArguments(str(tmp_path), debug="underflow_overflow", use_cpu=True, report_to=[]).debug
    assert DebugOption.UNDERFLOW_OVERFLOW in theirs
    assert {*theirs} == {DebugOption.UNDERFLOW_OVERFLOW}
    assert [original.DebugOption(one) for one in DebugOption] == list(original.DebugOption)
    assert [f"{one} {one!r} {str(one)}" for one in DebugOption] == [  # noqa: RUF010
        f"{one} {one!r} {one!s}" for one in original.DebugOption
    ]


@pytest.mark.parametrize("method", CALLED)
def test_methods_of_a_subclass_are_called_as_often_as_by_the_original(
    method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    original = pytest.importorskip("transformers.debug_utils")
    seen = []
    for kind in (original.DebugUnderflowOverflow, DebugUnderflowOverflow):
        calls: list[str] = []
        detector = run_with(overridden(kind, method, calls))
        names = ("frames", "frame", "batch_number", "total_calls", "detected_overflow", "prefix")
        seen.append((len(calls), [getattr(detector, name) for name in names], capsys.readouterr().out))
    assert seen[0] == seen[1]


def test_it_is_the_same_as_the_original_where_that_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    original = pytest.importorskip("transformers.debug_utils")
    said = []
    for kind in (original.DebugUnderflowOverflow, DebugUnderflowOverflow):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for factors in ([1.0] * 4, [1.0, math.inf], [1e30, 1e39], [math.nan]):
                for arguments in (
                    {},
                    {"trace_batch_nums": [0, 2]},
                    {"abort_after_batch_num": 1, "max_frames_to_save": 3},
                ):
                    model = Net().to(dtype)
                    kind(model, **arguments)
                    error = ""
                    try:
                        for model.factor in factors:
                            model(TOKENS)
                    except ValueError as raised:
                        error = str(raised)
                    said.append((capsys.readouterr().out, error))
    assert said[: len(said) // 2] == said[len(said) // 2 :]


@pytest.mark.filterwarnings("default")  # of transformers
@pytest.mark.parametrize("breaks", [False, True])
def test_a_real_trainer_with_the_callback_prints_what_its_debug_option_prints(
    breaks: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=50, n_positions=16)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 50, (16, 6), generator=generator)
    samples = [{"input_ids": row, "labels": row} for row in tokens]

    def printed(**settings: Any) -> str:
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config)
        if breaks:
            model.transformer.h[0].mlp.c_fc.weight.data.fill_(1e38)
        callbacks = settings.pop("callbacks", [])
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=2, per_device_train_batch_size=4, report_to=[], use_cpu=True, disable_tqdm=True,
            save_strategy="no", eval_strategy="steps", eval_steps=1, **settings,
        )  # fmt: skip
        trainer = transformers.Trainer(
            model, arguments, train_dataset=samples, eval_dataset=samples, callbacks=callbacks
        )
        capsys.readouterr()
        if not breaks:
            trainer.train()
            assert not any(module._forward_hooks for module in model.modules()) or not callbacks
            return ""
        with pytest.raises(ValueError, match="inf/nan detected, aborting"):
            trainer.train()
        return capsys.readouterr().out

    found = printed(callbacks=[UnderflowOverflowCallback()])
    assert found == printed(debug="underflow_overflow")
    assert ("Detected inf/nan during batch_number=0" in found) == breaks
