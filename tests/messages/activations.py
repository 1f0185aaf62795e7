"""What the subscribers of activations, merging, import and the table of a step say of what they cannot use."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

import traindiff
from tests.made_up import record
from tests.messages.command_line import command
from tests.messages.provoking import Chapter
from traindiff.analyse.merge import history
from traindiff.compat.onnxruntime import GlobalSubscriberManager, StatisticsSubscriber
from traindiff.compat.onnxruntime.importing import import_statistics
from traindiff.compat.onnxruntime.merge_activation_summary import merge

chapter = Chapter("Activations: subscribers, import, the table of a step", [])
situation = chapter.situation

WRITTEN = Path(__file__).parents[1] / "compat" / "onnxruntime" / "written_by_1_19"


@situation("a directory that holds the statistics of another run")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    shutil.copytree(WRITTEN, here / "pt_out")
    StatisticsSubscriber("pt_out")


@situation("a directory that holds other things, to be replaced")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    shutil.copytree(WRITTEN, here / "pt_out")
    (here / "pt_out" / "notes.txt").write_text("")
    StatisticsSubscriber("pt_out", override_output_dir=True)


@situation("a file where a directory of statistics should be")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    (here / "pt_out").write_text("")
    StatisticsSubscriber("pt_out")


@situation("steps of activations that end before they begin")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    StatisticsSubscriber("pt_out", start_step=20, end_step=10)


@situation("a subscription of what is no module")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    nothing: Any = None
    GlobalSubscriberManager.subscribe(nothing, [StatisticsSubscriber("pt_out")])


@situation("a subscription of nobody")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    GlobalSubscriberManager.subscribe(nn.Identity(), [])


@situation("a subscriber of ONNX Runtime itself")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    foreign: Any = SimpleNamespace()
    GlobalSubscriberManager.subscribe(nn.Identity(), [foreign])


@situation("a subscriber that is asked for and not there")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    GlobalSubscriberManager.get_subscriber(StatisticsSubscriber)


@situation("a directory for statistics that is there, and empty")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    (here / "pt_out").mkdir()
    StatisticsSubscriber("pt_out")


@situation("a subclass of a subscriber, written for ONNX Runtime")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    class Mine(StatisticsSubscriber):
        def module_post_forward_impl(self, *_: Any) -> None:
            pass

        def pre_forward_tensor_apply_impl(self, *_: Any) -> None:
            pass


@situation("statistics whose directory is removed when they are written")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    import torch

    model = nn.Linear(2, 2)
    GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber("pt_out")])
    model(torch.ones(1, 2))
    shutil.rmtree("pt_out")
    GlobalSubscriberManager.unsubscribe()


@situation("statistics that cannot be written while the training runs")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    import torch

    model = nn.Linear(2, 2)
    GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber("pt_out")])
    (here / "pt_out" / "step_0").write_text("in the way")
    model(torch.ones(1, 2))
    GlobalSubscriberManager.unsubscribe()


@situation("gradients of statistics that come after many further steps")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    import torch

    model = nn.Linear(2, 2)
    GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber("pt_out")])
    sum(model(torch.ones(1, 2)).sum() for _ in range(18)).backward()
    GlobalSubscriberManager.unsubscribe()


@situation("directories to merge of several ranks")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    shutil.copytree(WRITTEN, here / "pt_out" / "rank_0")
    merge("pt_out", "pt_out", "out")


@situation("a directory to import whose order leads out of it")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    shutil.copytree(WRITTEN, here / "pt_out")
    (here / "pt_out" / "step_1" / "order.txt").write_text("../../secret\n")
    import_statistics("pt_out", "run")


@situation("a directory to import whose order is far too long")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    shutil.copytree(WRITTEN, here / "pt_out")
    (here / "pt_out" / "step_1" / "order.txt").write_bytes(bytes(5_000_000))
    import_statistics("pt_out", "run")


@situation("a directory to import whose file counts more elements than there are")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    shutil.copytree(WRITTEN, here / "pt_out")
    file = here / "pt_out" / "step_1" / "ReLU_2_0th_output_forward"
    file.write_text(file.read_text().replace("nan: 0", f"nan: {10**30}"))
    import_statistics("pt_out", "run")


@situation("a directory to import whose file counts other elements than its tensor has")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    shutil.copytree(WRITTEN, here / "pt_out")
    file = here / "pt_out" / "step_1" / "ReLU_2_0th_output_forward"
    file.write_text(file.read_text().replace("zero: ", "zero: 1"))
    import_statistics("pt_out", "run")


@situation("directories to merge of which one has no statistics")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    (here / "ort_out").mkdir()
    shutil.copytree(WRITTEN, here / "pt_out")
    merge("pt_out", "ort_out", "out")


@situation("a directory of merged statistics that is there")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    (here / "out" / "merge_pt").mkdir(parents=True)
    merge(str(WRITTEN), str(WRITTEN), "out")


@situation("a directory to import that no subscriber has written")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    (here / "pt_out").mkdir()
    import_statistics("pt_out", "run")


@situation("a directory to import whose file is cut off")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    shutil.copytree(WRITTEN, here / "pt_out")
    file = here / "pt_out" / "step_1" / "ReLU_2_0th_output_forward"
    file.write_text(file.read_text()[:200])
    import_statistics("pt_out", "run")


@situation("a directory to import of which a file is missing")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    shutil.copytree(WRITTEN, here / "pt_out")
    (here / "pt_out" / "step_1" / "ReLU_2_0th_output_forward").unlink()
    import_statistics("pt_out", "run")


@situation("a directory to import whose files nothing names")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    shutil.copytree(WRITTEN, here / "pt_out")
    (here / "pt_out" / "step_1" / "order.txt").unlink()
    import_statistics("pt_out", "run")


@situation("a directory to import whose file has words for numbers")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    shutil.copytree(WRITTEN, here / "pt_out")
    file = here / "pt_out" / "step_1" / "ReLU_2_0th_output_forward"
    file.write_text(file.read_text().replace("min: 0.0", "min: none"))
    import_statistics("pt_out", "run")


@situation("the table of a step, of more steps than are kept one by one")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    patched.setattr(history, "MAX_COLUMNS", 2)
    runs = [str(record(here / name)) for name in ("baseline", "candidate")]
    return command("compare", *runs, "--table", "1")


@situation("the table of a step that was not compared")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    runs = [str(record(here / name)) for name in ("baseline", "candidate")]
    return command("compare", *runs, "--table", "9")


@situation("the table of what is no step")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    runs = [str(record(here / name)) for name in ("baseline", "candidate")]
    return command("compare", *runs, "--table", "last")


@situation("a table in a format that has none")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    runs = [str(record(here / name)) for name in ("baseline", "candidate")]
    return command("compare", *runs, "--table", "first", "--json")


@situation("the names under which ONNX Runtime has the first and the last step")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    settings: Any = {"start_step": 10, "end_step": 20}
    traindiff.record("run", nn.Linear(2, 2), **settings)


@situation("a torch before the first that can be recorded with")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    patched.setattr(sys.modules["torch"], "__version__", "1.13.1")
    patched.delitem(vars(traindiff), "record", raising=False)
    _ = traindiff.record
