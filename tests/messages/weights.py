"""What `traindiff weights` says of checkpoints, maps and accepted differences that it cannot use."""

from __future__ import annotations

import json
import os
import pickle
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import distributed

import traindiff
from tests.messages.command_line import command
from tests.messages.provoking import Chapter
from traindiff.state.sources.opening import open_checkpoint

chapter = Chapter("Saved weights that cannot be used", [])
situation = chapter.situation

STATE = {"weight": torch.arange(12.0).reshape(3, 4), "bias": torch.arange(3.0)}


def opened(path: Path) -> None:
    """Read everything that is there."""
    for tensor in open_checkpoint(path).tensors.values():
        for slab in tensor.slabs:
            tensor.slab(*slab)


@situation("nothing is there")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    return command("weights", "a", "b")


@situation("a directory of something else")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    (here / "notes.txt").write_text("")
    opened(here)


@situation("an object that is no model")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    traindiff.weights([1, 2], STATE)


def sharded(*offsets: int) -> Any:
    """Two rows of a tensor of four from each offset on, as FSDP1 has them in a sharded state dict."""
    shards = [
        SimpleNamespace(tensor=torch.ones(2, 3), metadata=SimpleNamespace(shard_offsets=[first, 0], shard_sizes=[2, 3]))
        for first in offsets
    ]
    whole = SimpleNamespace(size=torch.Size([4, 3]))
    return {"weight": SimpleNamespace(local_shards=lambda: shards, metadata=lambda: whole)}


@situation("two models that are sharded in two ways")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    traindiff.weights(sharded(0), sharded(2))


@situation("a tensor of which a rank holds two parts")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    traindiff.weights(sharded(0, 2), STATE)


@situation("a sharded model and a recording")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(3, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with traindiff.record(here / "run", model, optimizer):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    traindiff.weights(here / "run", sharded(0))


@situation("a tensor of which a rank holds a term")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    from torch.distributed.tensor import DTensor, Partial

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = distributed.init_device_mesh("cpu", (1,))
        traindiff.weights({"weight": DTensor.from_local(torch.ones(3, 4), mesh, [Partial()])}, STATE)
    finally:
        distributed.destroy_process_group()


@situation("a file without tensors")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    torch.save({"epoch": 3}, here / "last.pt")
    opened(here / "last.pt")


@situation("a recording without parameters")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(2, 2)
    with traindiff.record(here / "run", model, observe="forward"):
        model(torch.ones(1, 2)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    opened(here / "run")


@situation("a recording without steps")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    with traindiff.record(here / "run", torch.nn.Linear(2, 2)):
        pass
    opened(here / "run")


@situation("a pipe in place of saved weights")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    os.mkfifo(here / "model.safetensors")
    opened(here / "model.safetensors")


@situation("a link that leads out of a directory of saved weights")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    (here / "inside").mkdir()
    save_file(STATE, here / "a.safetensors")
    (here / "inside" / "model.safetensors").symlink_to("../a.safetensors")
    opened(here / "inside")


@situation("a checkpoint of DeepSpeed with experts")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    torch.save({"module": STATE}, here / "mp_rank_00_model_states.pt")
    torch.save(STATE, here / "layer_0_expert_0_mp_rank_01_model_states.pt")
    opened(here)


@situation("several files of Meta's Llama")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    for number in range(2):
        torch.save(STATE, here / f"consolidated.0{number}.pth")
    opened(here)


@situation("an expanded tensor of terabytes")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    torch.save({"weight": torch.ones(1).expand(1 << 40)}, here / "model.pt")
    opened(here / "model.pt")


@situation("nothing in common")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    save_file(STATE, here / "a.safetensors")
    save_file({"other": torch.ones(7)}, here / "b.safetensors")
    traindiff.weights(here / "a.safetensors", here / "b.safetensors")


@situation("safetensors with bytes behind their tensors")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    save_file(STATE, here / "a.safetensors")
    with (here / "a.safetensors").open("ab") as file:
        file.write(b"more")
    opened(here / "a.safetensors")


@situation("a pointer of Git LFS")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    (here / "a.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    opened(here / "a.safetensors")


@situation("safetensors that are cut off")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    save_file(STATE, here / "a.safetensors")
    (here / "a.safetensors").write_bytes((here / "a.safetensors").read_bytes()[:-8])
    opened(here)


@situation("safetensors that are cut off while they are read")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    save_file(STATE, here / "a.safetensors")
    found = open_checkpoint(here).tensors["weight"]
    (here / "a.safetensors").write_bytes((here / "a.safetensors").read_bytes()[:-48])
    found.slab(0, 3)


@situation("an index that names a file which is not there")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    save_file(STATE, here / "a.safetensors")
    weight_map = {"weight": "a.safetensors", "head": "b.safetensors"}
    (here / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    opened(here)


@situation("a file that lacks a tensor of the index")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    save_file(STATE, here / "a.safetensors")
    weight_map = {"weight": "a.safetensors", "head": "a.safetensors"}
    (here / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    opened(here)


@situation("a pickle with code")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    class Runs:
        def __reduce__(self) -> Any:
            return os.getcwd, ()

    torch.save({"weight": torch.ones(3), "other": Runs()}, here / "model.pt")
    opened(here / "model.pt")


@situation("a file that is no archive")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    (here / "model.pt").write_bytes(pickle.dumps({"weight": [1.0]}))
    opened(here / "model.pt")


@situation("a file from before torch 1.6 that is cut off")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    torch.save({"bias": STATE["bias"]}, here / "model.pt", _use_new_zipfile_serialization=False)
    (here / "model.pt").write_bytes((here / "model.pt").read_bytes()[:-8])
    opened(here / "model.pt")


@situation("TorchScript")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(torch.nn.Linear(3, 3)).save(here / "model.pt")
    opened(here / "model.pt")


@situation("elements that are damaged")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    state = {"weight": torch.arange(300.0)}
    torch.save(state, here / "a.pt")
    data = (here / "a.pt").read_bytes()
    place = data.index(state["weight"].numpy().tobytes())
    (here / "b.pt").write_bytes(data[:place] + b"1" + data[place + 1 :])
    traindiff.weights(here / "a.pt", here / "b.pt")


@situation("an adapter's configuration that cannot be used")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    save_file(STATE, here / "adapter_model.safetensors")
    (here / "adapter_config.json").write_text('{"lora_alpha": "8"}')
    opened(here)


def of_checkpoint(here: Path, change: Callable[[Any], object]) -> None:
    """Read a directory of torch.distributed.checkpoint whose metadata are changed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": STATE}, checkpoint_id=here / "dcp", no_dist=True)
    content = pickle.loads((here / "dcp" / ".metadata").read_bytes())
    change(content.state_dict_metadata["model.weight"].chunks)
    (here / "dcp" / ".metadata").write_bytes(pickle.dumps(content))
    opened(here / "dcp")


@situation("a shard is missing")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    of_checkpoint(here, lambda chunks: chunks.clear())


@situation("a shard lies outside of its tensor")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    of_checkpoint(here, lambda chunks: setattr(chunks[0], "sizes", torch.Size([3, 5])))


def with_file(option: str, text: str) -> Callable[[Path, pytest.MonkeyPatch], None]:
    """Compare with a map, or with accepted differences."""

    def provoke(here: Path, patched: pytest.MonkeyPatch) -> None:
        Path("file.toml").write_text(text)
        traindiff.weights(STATE, dict(STATE), **{option: "file.toml"})  # type: ignore[arg-type]

    return provoke


ENTRY = '[[tensor]]\nbaseline = ["weight"]\ncandidate = ["weight"]\n'

FILES: Mapping[str, tuple[str, str]] = {
    "accepted differences without entries": ("accept", ""),
    "accepted differences that are not TOML": ("accept", "[accept"),
    "an accepted difference without a reason": ("accept", '[[accept]]\nname = "weight"'),
    "an accepted difference with an unknown key": ("accept", '[[accept]]\nname = "a"\nreason = "b"\nwhy = "c"'),
    "a map without entries": ("map", ""),
    "an entry of a map without a candidate": ("map", '[[tensor]]\nbaseline = ["weight"]'),
    "an entry of a map with an unknown key": ("map", f"{ENTRY}grops = 3"),
    "an entry of a map from many to many": ("map", '[[tensor]]\nbaseline = ["a", "b"]\ncandidate = ["c", "d"]'),
    "an entry of a map with heads of something else": ("map", f"{ENTRY}heads = [1, 2]"),
    "an entry of a map with layers on one side": ("map", '[[tensor]]\nbaseline = ["a.{n}"]\ncandidate = ["b"]'),
    "an entry of a map with groups of nothing": ("map", f"{ENTRY}groups = 2"),
    "an entry of a map with blocks of several tensors": (
        "map",
        '[[tensor]]\nbaseline = ["a", "b"]\ncandidate = ["c"]\nblocks = 3',
    ),
    "an entry of a map with a name twice": ("map", '[[tensor]]\nbaseline = ["a", "a"]\ncandidate = ["b"]'),
    "a module of a map without a candidate": ("map", '[[module]]\nbaseline = "a"'),
    "a module of a map with an unknown key": ("map", '[[module]]\nbaseline = "a"\ncandidate = "b"\nrows = 3'),
    "a module of a map with layers on one side": ("map", '[[module]]\nbaseline = "a.{n}"\ncandidate = "b"'),
    "an entry of a map that does not fit": ("map", f"{ENTRY}heads = [5]"),
}
for title, (option, text) in FILES.items():
    situation(title)(with_file(option, text))


@situation("a map that puts parts of a recording together")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(4, 3)
    with traindiff.record("run", model):
        model(torch.ones(2, 4)).sum().backward()
    Path("file.toml").write_text(f"{ENTRY}transpose = true")
    traindiff.weights("run", STATE, map="file.toml")


@situation("a map that is missing")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    traindiff.weights(STATE, dict(STATE), map="nothing.toml")


@situation("a map with a name that is not known")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    traindiff.weights(STATE, dict(STATE), map="lama:hf-torchtitan")


@situation("a map with a name and without a number of heads")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    traindiff.weights(STATE, dict(STATE), map="llama:hf-torchtitan")


@situation("a map that cannot be written")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    from typer.testing import CliRunner

    from traindiff.cli.commands import app

    save_file(STATE, here / "a.safetensors")
    arguments = ["weights", "a.safetensors", "a.safetensors", "--propose", "nowhere/map.toml"]
    return CliRunner().invoke(app, arguments, catch_exceptions=False).stderr


@situation("a map that cannot be written any more")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    from traindiff.state.maps import write_map

    write_map(traindiff.weights(STATE, dict(STATE)), here / "nowhere" / "map.toml")


@situation("a map in place of what is compared")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    from typer.testing import CliRunner

    from traindiff.cli.commands import app

    save_file(STATE, here / "a.safetensors")
    arguments = ["weights", "a.safetensors", "a.safetensors", "--propose", "a.safetensors"]
    return CliRunner().invoke(app, arguments, catch_exceptions=False).stderr
