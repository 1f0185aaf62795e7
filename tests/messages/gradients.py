"""What the gradient monitor, and import and export, say of what they cannot use."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import traindiff
from tests.made_up import record
from tests.messages.command_line import command
from tests.messages.provoking import Chapter
from traindiff.compat.msprobe import GradComparator, PrecisionDebugger
from traindiff.compat.msprobe.exporting import export_gradients
from traindiff.compat.msprobe.importing import import_gradients
from traindiff.core.shards import Shard
from traindiff.core.summary import RawTensor
from traindiff.present.pictures import check_matplotlib
from traindiff.storage import tensor_files

chapter = Chapter("The gradient monitor, import and export", [])
situation = chapter.situation

WRITTEN = Path(__file__).parents[1] / "compat" / "msprobe" / "written_by_8_3_3"


def configuration(here: Path, **changes: Any) -> Path:
    content = {"task": "grad_probe", "dump_path": "dump", "rank": [], "step": [], "grad_probe": {}, **changes}
    path = here / "config.json"
    path.write_text(json.dumps(content))
    return Path("config.json")


def monitored(here: Path, **changes: Any) -> None:
    """One monitored step."""
    model = nn.Linear(3, 2)
    debugger = PrecisionDebugger(configuration(here, **changes))
    debugger.monitor(model)
    take_step(model)
    debugger.stop()


def take_step(model: nn.Module) -> None:
    """One step of an optimizer."""
    model(torch.ones(2, 3)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@situation("a configuration with everything wrong at once")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    own = {"grad_levle": "L1", "grad_level": "L3", "param_list": "fc", "bounds": [1, 0], "hash": "crc32"}
    monitored(here, task="statistics", dump_pth="dump", dump_path=1, rank="all", step=[-1], overwrite=1, grad_probe=own)


@situation("bounds that are no numbers, or beyond int64")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    monitored(here, grad_probe={"bounds": [0, 2**64]})


@situation("a configuration that is not there")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    PrecisionDebugger("config.json")


@situation("a configuration that is not JSON")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    (here / "config.json").write_text("task: grad_probe")
    PrecisionDebugger("config.json")


@situation("parameters and ranks that there are not")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    monitored(here, grad_probe={"param_list": ["wieght", "tail"]})


@situation("a rank that there is not")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    patched.setenv("WORLD_SIZE", "2")
    monitored(here, rank=[0, "3-5"])


@situation("ranks of a single process")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    monitored(here, rank=[1])


@situation("a monitor without a configuration, and one that is called before it is made")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    patched.setattr(PrecisionDebugger, "_last", None)
    return "\n".join(
        [refused(lambda: PrecisionDebugger()), refused(lambda: PrecisionDebugger.monitor(nn.Linear(3, 2)))]
    )


@situation("a model that was traced")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    traced = torch.jit.trace(nn.Linear(3, 2), torch.ones(1, 3))
    PrecisionDebugger(configuration(here)).monitor(traced)


@situation("an optimizer in place of the model")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    optimizer = torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1)
    PrecisionDebugger(configuration(here)).monitor(optimizer)  # type: ignore[arg-type]


@situation("a second model")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    debugger = PrecisionDebugger(configuration(here))
    model = nn.Linear(3, 2)
    debugger.monitor(model)
    take_step(model)
    try:
        debugger.monitor(nn.Linear(3, 2))
    finally:
        debugger.stop()


@situation("the same model twice")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 2)
    debugger = PrecisionDebugger(configuration(here))
    debugger.monitor(model)
    debugger.monitor(model)
    take_step(model)
    debugger.stop()


@situation("a monitored training that takes no step")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    debugger = PrecisionDebugger(configuration(here))
    debugger.monitor(nn.Linear(3, 2))
    debugger.stop()


@situation("a monitored training whose parameters have no gradients")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 2)
    debugger = PrecisionDebugger(configuration(here))
    debugger.monitor(model)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    debugger.stop()


@situation("files of an earlier run")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    monitored(here)
    monitored(here)


@situation("other files where the monitor would write")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    (here / "dump" / "rank0").mkdir(parents=True)
    (here / "dump" / "rank0" / "thesis.tex").touch()
    monitored(here, overwrite=True)


@situation("a comparison of directories that are not there")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    GradComparator.compare_distributed("first", "second", "out")


@situation("a comparison of runs without directions")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    for name in ("first", "second"):
        monitored(here, dump_path=name, grad_probe={"grad_level": "L0"})
    GradComparator.compare_distributed("first", "second", "out")


@situation("a comparison of runs of which other steps were monitored")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    for step, name in enumerate(("first", "second")):
        model = nn.Linear(3, 2)
        debugger = PrecisionDebugger(configuration(here, dump_path=name, step=[step]))
        debugger.monitor(model)
        take_step(model)
        take_step(model)
        debugger.stop()
    GradComparator.compare_distributed("first", "second", "out")


@situation("a comparison in which one side lacks a parameter, and another has other shapes")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    shutil.copytree(WRITTEN / "first", here / "first")
    shutil.copytree(WRITTEN / "second", here / "second")
    for step in range(3):
        (here / "first" / "rank0" / f"step{step}" / "fc.bias.npy").unlink()
        path = here / "first" / "rank0" / f"step{step}"
        shutil.copyfile(path / "fc.weight.npy", path / "head.weight.npy")
    GradComparator.compare_distributed("first", "second", "out")


@situation("pictures without matplotlib")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    patched.setitem(sys.modules, "matplotlib", None)
    patched.setitem(sys.modules, "matplotlib.figure", None)
    check_matplotlib("drawing pictures", asked_by="pictures")


@situation("an import of what msprobe has not written")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    import_gradients(".", "run")


@situation("an import of a damaged table")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    shutil.copytree(WRITTEN / "first", here / "dump")
    (here / "dump" / "rank0" / "grad_summary_1.csv").write_text("param_name,max,min,norm,shape\nfc.weight\n")
    import_gradients("dump", "run")


@situation("an import of a table with a shape, or a share, that is none; and of a rank that none has")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    found = []
    header = "param_name,=0,max,min,norm,shape"
    rows = ["fc.weight,0.5,1,0,1,[-1]", 'fc.weight,0.5,1,0,1,"[9999999999, 9999999999]"', "fc.weight,7,1,0,1,[2]"]
    for number, row in enumerate(rows):
        dump = here / f"dump{number}" / "rank0"
        dump.mkdir(parents=True)
        (dump / "grad_summary_0.csv").write_text(f"{header}\n{row}\n")
        found.append(refused(lambda number=number: import_gradients(f"dump{number}", "run")))  # type: ignore[misc]
    shutil.copytree(WRITTEN / "first", here / "dump")
    shutil.copytree(here / "dump" / "rank0", here / "dump" / "rank1000000")
    found.append(refused(lambda: import_gradients("dump", "run")))
    return "\n".join(found)


@situation("an import of tables that contradict themselves, and of two directories of one rank")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    found = []
    row = "fc.weight,0,0.5,1,0,1,[2]\n"
    header = 'param_name,"(-inf, 1.0]","(1.0, inf)",max,min,norm,shape\n'
    tables = [
        header.replace("max,min", "max,max,min") + row, header + row + row, header + row.replace("0,1,[2]", "0,-1,[2]"),
        header.replace("(1.0, inf)", '(1.0, 0.5]","(0.5, inf)') + row,
    ]  # fmt: skip
    for number, table in enumerate(tables):
        dump = here / f"dump{number}" / "rank0"
        dump.mkdir(parents=True)
        (dump / "grad_summary_0.csv").write_text(table)
        found.append(refused(lambda number=number: import_gradients(f"dump{number}", "run")))  # type: ignore[misc]
    (here / "dump" / "rank0").mkdir(parents=True)
    (here / "dump" / "rank00").mkdir()
    found.append(refused(lambda: import_gradients("dump", "run")))
    return "\n".join(found)


@situation("an import of damaged directions")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    shutil.copytree(WRITTEN / "first", here / "dump")
    (here / "dump" / "rank0" / "step1" / "fc.bias.npy").write_bytes(b"")
    import_gradients("dump", "run")


def imported_directions(here: Path, content: bytes) -> None:
    shutil.copytree(WRITTEN / "first", here / "dump")
    (here / "dump" / "rank0" / "step1" / "fc.bias.npy").write_bytes(content)
    import_gradients("dump", "run")


@situation("an import of directions with an endless header")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    imported_directions(here, b"\x93NUMPY\x01\x00\xff\xff{}")


@situation("an import of directions that say that they are many")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    header = b"{'descr': '|b1', 'fortran_order': False, 'shape': (10000000000000,)}"
    imported_directions(here, b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)


@situation("an import of directions without a shape")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    header = b"{'descr': '|b1', 'fortran_order': False, 'shape': None}"
    imported_directions(here, b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)


@situation("signs whose bits are damaged")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    zeros = RawTensor(dtype="uint8", shape=(5000,), data=bytes(5000))
    data = bytearray(tensor_files.dump({"positive": zeros, "signless": zeros}, site="fc.weight grad"))
    begin = 8 + int.from_bytes(data[:8], "little")  # behind the header
    data[begin : begin + 8] = bytes(7) + b"\xff"
    tensor_files.load(bytes(data), where="tensors/fc.weight.safetensors", shard=Shard.whole((200, 200)))


@situation("an export where gradients of another run are")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    import_gradients(str(WRITTEN / "first"), "run")
    export_gradients(traindiff.open_recording("run"), "dump")
    export_gradients(traindiff.open_recording("run"), "dump")


@situation("an export of a recording without gradients")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 2)
    with traindiff.record("run", model, observe="param"):
        model(torch.ones(2, 3)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    export_gradients(traindiff.open_recording("run"), "dump")


@situation("runs of which one was imported")
def _(here: Path, patched: pytest.MonkeyPatch) -> object:
    import_gradients(str(WRITTEN / "first"), "first")
    import_gradients(str(WRITTEN / "second"), "second")
    return traindiff.compare("first", "second")


@situation("a configuration that holds no object, or one whose own part is none")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    found = []
    for content in ("[]", '{"task": "grad_probe", "dump_path": "dump", "grad_probe": []}'):
        (here / "config.json").write_text(content)
        found.append(refused(lambda: PrecisionDebugger("config.json")))
    return "\n".join(found)


def refused(call: Callable[[], object]) -> str:
    """The message of the error that a call raises."""
    with pytest.raises(traindiff.TraindiffError) as error:
        call()
    return str(error.value)


@situation("a cell of MindSpore in place of its optimizer")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    cell = type("Dense", (), {"__module__": "mindspore.nn.layer.basic"})()
    PrecisionDebugger(configuration(here)).monitor(cell)


@situation("a training of MindSpore where one of torch is recorded")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    cell = type("Dense", (), {"__module__": "mindspore.nn.layer.basic"})()
    optimizer = type("Momentum", (), {"__module__": "mindspore.nn.optim.momentum"})()
    traindiff.record("run", cell, optimizer)


@situation("a rank that holds shards")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 2)
    debugger = PrecisionDebugger(configuration(here))
    debugger.monitor(model)
    take_step(model)
    assert debugger._files is not None
    debugger._files.partial["weight"] = None
    debugger.stop()


@situation("a file where the monitor would write")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    (here / "dump").touch()
    monitored(here)


@situation("bounds of a recording that are no numbers")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    traindiff.record("run", nn.Linear(3, 2), bounds="-1, 0, 1")  # type: ignore[arg-type]


@situation("an import of directions that are none, or of another shape")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    shutil.copytree(WRITTEN / "first", here / "dump")
    found = []
    for number, array in enumerate((np.zeros(8), np.zeros(3, dtype=bool))):
        np.save(here / "dump" / "rank0" / "step1" / "fc.bias.npy", array)
        found.append(refused(lambda number=number: import_gradients("dump", f"run{number}")))  # type: ignore[misc]
    return "\n".join(found)


@situation("an import of tables with other columns, or without a name")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    shutil.copytree(WRITTEN / "first", here / "dump")
    found = []
    for number, header in enumerate(("param_name,hash,mean,max,min,norm,shape", "name,max,min,norm,shape")):
        (here / "dump" / "rank0" / "grad_summary_0.csv").write_text(f"{header}\n")
        found.append(refused(lambda number=number: import_gradients("dump", f"run{number}")))  # type: ignore[misc]
    return "\n".join(found)


@situation("an export of a recording of which no gradient is whole")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    with traindiff.record("run", nn.Linear(3, 2), observe="grad"):
        pass
    export_gradients(traindiff.open_recording("run"), "dump")


@situation("runs with directions that cannot be compared")
def _(here: Path, patched: pytest.MonkeyPatch) -> object:
    for name, size in (("first", 2), ("second", 4)):
        model = nn.Linear(3, size)
        with traindiff.record(name, model, observe="grad", detail="signs"):
            for _ in range(5):
                model(torch.ones(2, 3)).sum().backward()
                if name == "second":
                    model.bias.grad = None
                torch.optim.SGD(model.parameters(), lr=0.1).step()
    return "\n".join(note for note in traindiff.compare("first", "second").notes if "irections" in note)


@situation("pictures of runs without directions")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    for name in ("first", "second"):
        record(here / name)
    return command("compare", "first", "second", "--pictures", "pictures")


@situation("pictures where nothing can be written")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    for name in ("first", "second"):
        import_gradients(str(WRITTEN / name), name)
    (here / "file").touch()
    return command("compare", "first", "second", "--pictures", "file/pictures")
