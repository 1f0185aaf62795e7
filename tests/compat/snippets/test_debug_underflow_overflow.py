"""What the documentation of transformers tells users to write, and what public training scripts write."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.compat.snippets.moving import run


class Model(nn.Module):
    """Two layers; `scale` breaks the second one's input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wi, self.wo = nn.Linear(4, 4), nn.Linear(4, 2)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.wo(self.wi(x) * self.scale)
        return found


def moved(snippet: str, **names: Any) -> dict[str, Any]:
    return run(snippet, was="transformers.debug_utils", now="traindiff.compat.transformers", **names)


@pytest.mark.parametrize("arguments", ["", ", max_frames_to_save=100"])
def test_detection(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = Model()
    moved(
        f"""
        from transformers.debug_utils import DebugUnderflowOverflow

        debug_overflow = DebugUnderflowOverflow(model{arguments})
        """,
        model=model,
    )
    for model.scale in [*[1.0] * 20, math.inf]:
        with pytest.raises(ValueError, match="inf/nan detected") if model.scale == math.inf else capsys.disabled():
            model(torch.ones(1, 4))

    printed = capsys.readouterr().out
    assert "Detected inf/nan during batch_number=20\nLast " in printed
    assert printed.count(" wi Linear") == (21 if arguments else 7)


def test_whole_batches_are_printed_and_the_training_stops(capsys: pytest.CaptureFixture[str]) -> None:
    model = Model()
    moved(
        """
        from transformers.debug_utils import DebugUnderflowOverflow

        debug_overflow = DebugUnderflowOverflow(model, trace_batch_nums=[1, 3], abort_after_batch_num=3)
        """,
        model=model,
    )
    for _ in range(3):
        model(torch.ones(1, 4))
    with pytest.raises(ValueError, match="aborting after 4 batches due to `abort_after_batch_num=3` arg"):
        model(torch.ones(1, 4))

    printed = capsys.readouterr().out
    assert [f"Starting batch number={number} " in printed for number in range(4)] == [False, True, False, True]
    assert printed.count(" wo Linear") == 2


def test_detection_inside_of_a_forward(capsys: pytest.CaptureFixture[str]) -> None:
    found = moved(
        """
        from transformers.debug_utils import detect_overflow


        class LayerFF(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer_norm, self.dense = nn.LayerNorm(4), nn.Linear(4, 4)

            def forward(self, hidden_states):
                forwarded_states = self.layer_norm(hidden_states)
                detect_overflow(forwarded_states, "after layer_norm")
                forwarded_states = self.dense(forwarded_states) / 0
                detect_overflow(forwarded_states, "after dense")
                return hidden_states + forwarded_states
        """,
        nn=nn,
    )
    found["LayerFF"]()(torch.arange(4.0))

    assert capsys.readouterr().out == "after dense has infs\n"


@pytest.mark.parametrize("given", [[], ["underflow_overflow"], ["tpu_metrics_debug"]])
def test_the_choice_of_a_training_script(given: list[str]) -> None:
    model = Model()
    found = moved(
        """
        from transformers.debug_utils import DebugOption, DebugUnderflowOverflow

        training_args.debug = [DebugOption(one) for one in training_args.debug]
        debug_overflow = None
        if DebugOption.UNDERFLOW_OVERFLOW in training_args.debug:
            debug_overflow = DebugUnderflowOverflow(model)
        """,
        model=model,
        training_args=SimpleNamespace(debug=given),
    )

    assert (found["debug_overflow"] is not None) == ("underflow_overflow" in given)
    assert bool(model.wi._forward_hooks) == ("underflow_overflow" in given)


def test_a_detector_that_reports_to_a_file(tmp_path: Any) -> None:
    model = Model()
    model.scale = math.inf
    moved(
        """
        from transformers.debug_utils import DebugUnderflowOverflow


        class ToFile(DebugUnderflowOverflow):
            def dump_saved_frames(self):
                report.write_text("\\n".join(self.frames))
                self.reset_saved_frames()


        debug_overflow = ToFile(model)
        """,
        model=model,
        report=tmp_path / "report.txt",
    )
    with pytest.raises(ValueError, match="inf/nan detected"):
        model(torch.ones(1, 4))

    assert "wo Linear\n" in (tmp_path / "report.txt").read_text()
