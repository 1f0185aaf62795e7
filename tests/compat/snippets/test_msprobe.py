"""What msprobe's guide of the gradient monitor shows, called as it is shown there, with only the import changed."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.compat.msprobe.monitoring import small, table, tables, train
from traindiff.errors import ConfigError, TraindiffWarning

CONFIGURATION = """
{
    "task": "grad_probe",
    "dump_path": "./dump_path",
    "rank": [],
    "step": [],
    "grad_probe": {
        "grad_level": "L1",
        "param_list": [],
        "bounds": [-1, 0, 1]
    }
}
"""

OF_ALL_TASKS: dict[str, Any] = {
    "task": "grad_probe", "dump_path": "./dump_path", "rank": [], "step": [], "level": "L1",
    "enable_dataloader": False, "async_dump": False,
    "tensor": {"scope": [], "list": [], "data_mode": ["all"], "file_format": "npy"},
    "statistics": {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"},
    "overflow_check": {"overflow_nums": 1, "check_mode": "all"},
    "run_ut": {"white_list": [], "black_list": [], "error_data_path": "./"},
    "grad_probe": {"grad_level": "L2", "param_list": [], "bounds": [-1, 0, 1]},
    "free_benchmark": {"scope": [], "list": [], "fuzz_device": "npu", "pert_mode": "improve_precision"},
}  # fmt: skip
"""The entries of the file that msprobe comes with."""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(CONFIGURATION)
    return tmp_path


def test_gradients_are_exported() -> None:
    model = small()
    from traindiff.compat.msprobe import PrecisionDebugger

    debugger = PrecisionDebugger("config.json")
    debugger.monitor(model)
    train(model)
    debugger.stop()

    assert [list(rows) for rows in tables(Path("dump_path"))] == [["fc.weight", "fc.bias", "head.weight"]] * 3
    assert {path.name for path in Path("dump_path/rank0/step2").iterdir()} == {
        "fc.weight.npy", "fc.bias.npy", "head.weight.npy",
    }  # fmt: skip


def test_the_interfaces_are_called_on_the_class_as_their_section_documents_them() -> None:
    from traindiff.compat.msprobe import PrecisionDebugger

    model = small()
    PrecisionDebugger("config.json")
    PrecisionDebugger.monitor(model)
    train(model)
    PrecisionDebugger.stop()

    assert len(tables(Path("dump_path"))) == 3


def test_directions_are_compared() -> None:
    pytest.importorskip("matplotlib")
    from traindiff.compat.msprobe import PrecisionDebugger

    for name in ("npu", "gpu"):
        model = small()
        debugger = PrecisionDebugger("config.json", dump_path=name)
        debugger.monitor(model)
        train(model)
        debugger.stop()
    names: dict[str, Any] = {}
    exec("from traindiff.compat.msprobe import *", names)  # the guide imports everything
    names["GradComparator"].compare_distributed("npu", "gpu", "output")

    rows = Path("output/rank0/similarities.csv").read_text(encoding="utf-8-sig").splitlines()
    assert rows[0] == "step,0,1,2"
    assert rows[-1] == "summary,1.0,1.0,1.0"
    assert Path("output/rank0/similarities_picture/summary_similarities.png").is_file()


def test_the_bounds_of_the_example_give_the_counts_of_the_example() -> None:
    """Bounds [-10, 0, 10], elements 9.3, 5.4, -1.0 and -12.3: 1, 1, 2 and 0 elements in the four intervals."""
    from traindiff.compat.msprobe import PrecisionDebugger

    content = json.loads(CONFIGURATION)
    content["grad_probe"] |= {"grad_level": "L2", "bounds": [-10, 0, 10]}
    Path("config.json").write_text(json.dumps(content))
    model = nn.Linear(4, 1, bias=False)
    debugger = PrecisionDebugger("config.json")
    debugger.monitor(model)
    model.weight.grad = torch.tensor([[9.3, 5.4, -1.0, -12.3]])
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    debugger.stop()

    row = table(Path("dump_path/rank0/grad_summary_0.csv"))["weight"]
    assert [float(row[name]) * 4 for name in ("(-inf, -10]", "(-10, 0]", "(0, 10]", "(10, inf)")] == [1, 1, 2, 0]


def test_the_file_of_all_tasks_is_read() -> None:
    from traindiff.compat.msprobe import PrecisionDebugger

    Path("config.json").write_text(json.dumps(OF_ALL_TASKS))
    model = small()
    debugger = PrecisionDebugger(config_path="config.json")
    debugger.monitor(model)
    train(model)
    debugger.stop()

    assert "(-inf, -1]" in tables(Path("dump_path"))[0]["fc.bias"]


def test_a_script_of_other_tasks_monitors_every_step() -> None:
    """It stands `start`, `stop` and `step` around each step; in msprobe they concern other tasks alone."""
    from traindiff.compat.msprobe import PrecisionDebugger

    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    debugger = PrecisionDebugger("config.json", "grad_probe", "dump_path", None, model, [0, "2-3"])
    debugger.monitor(model)
    for _ in range(5):
        debugger.start(model)
        train(model, steps=1, optimizer=optimizer)
        debugger.stop()
        debugger.step()
    debugger.stop()

    assert {path.name for path in Path("dump_path/rank0").glob("*.csv")} == {
        f"grad_summary_{step}.csv" for step in (0, 2, 3)
    }


def test_a_traced_model_is_refused_as_the_guide_says() -> None:
    from traindiff.compat.msprobe import PrecisionDebugger

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = torch.jit.trace(small(), torch.ones(1, 6))
    with pytest.raises(ConfigError, match=r"was made by torch\.jit"):
        PrecisionDebugger("config.json").monitor(traced)


def test_what_is_called_too_early_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from traindiff.compat.msprobe import PrecisionDebugger

    monkeypatch.setattr(PrecisionDebugger, "_last", None)
    with pytest.raises(ConfigError, match="was not made yet"):
        PrecisionDebugger.monitor(small())
    with pytest.raises(ConfigError, match="is missing"):
        PrecisionDebugger()


def test_a_debugger_that_monitors_is_not_ended_by_one_that_is_made_later() -> None:
    from traindiff.compat.msprobe import PrecisionDebugger

    model = small()
    first = PrecisionDebugger("config.json")
    first.monitor(model)
    PrecisionDebugger("config.json", dump_path="other")
    PrecisionDebugger.stop()
    train(model)
    first.stop()
    second = PrecisionDebugger("config.json", dump_path="third")
    second.monitor(model)
    with pytest.warns(TraindiffWarning, match="no gradient was seen"):
        second.stop()
    assert len(tables(Path("dump_path"))) == 3
