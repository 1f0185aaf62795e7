"""Names, tensors, links and pickles that few sources have are read as they are, or refused with the true reason."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import traindiff
from traindiff.errors import CheckpointError
from traindiff.state.sources.opening import open_checkpoint


def test_two_tensors_that_get_one_name_are_both_compared(tmp_path: Path) -> None:
    first, second, average = torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 4)
    for name, own in (("a", first), ("b", second)):
        torch.save({"ema": {"w": average}, "model": {"ema.w": own, "z": average}}, tmp_path / f"{name}.pt")

    found = open_checkpoint(tmp_path / "a.pt").tensors
    result = traindiff.weights(tmp_path / "a.pt", tmp_path / "b.pt")

    assert {name: one.role for name, one in found.items()} == {"ema.w": "parameter", "ema/w": "other", "z": "parameter"}
    assert [(one.name, one.word, one.role) for one in result.differences] == [("ema.w", "differs", "parameter")]


def test_parameters_that_get_one_name_are_both_compared() -> None:
    shared = torch.randn(3)
    sides = [{"a.b": torch.randn(3), "a": {"b": shared}} for _ in range(2)]

    assert [one.name for one in traindiff.weights(*sides).differences] == ["a.b"]
    assert {one.name for one in traindiff.weights(*sides).relations} == {"a.b", "a/b"}


def test_names_that_no_key_tells_apart_are_refused() -> None:
    with pytest.raises(CheckpointError, match="two of its tensors have the name"):
        traindiff.weights({"a\n": torch.ones(1), "a\\n": torch.ones(1)}, {})


@pytest.mark.filterwarnings("ignore")
def test_two_names_of_a_distributed_checkpoint_with_one_path_are_refused(tmp_path: Path) -> None:
    dcp.save({"first": torch.ones(3), "other": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    metadata.planner_data = {"first": ("model", "w"), "other": ("model", "w")}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))

    with pytest.raises(CheckpointError, match='the path of "other" leads to another tensor, too'):
        open_checkpoint(tmp_path)


def test_a_model_whose_names_begin_as_an_optimizer_is_compared_as_a_model(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"optim_head": torch.nn.Linear(2, 2), "fc": torch.nn.Linear(2, 2)})
    torch.save(model.state_dict(), tmp_path / "model.pt")

    for source in (model, model.state_dict(), str(tmp_path / "model.pt")):
        assert {one.role for one in open_checkpoint(source).tensors.values()} == {"parameter"}
    apart = open_checkpoint({"model": {"w": torch.ones(1)}, "optim_state": {"w": torch.ones(1)}}).tensors
    assert {name: one.role for name, one in apart.items()} == {"w": "parameter", "optim_state.w": "optimizer"}


@pytest.mark.parametrize(
    "name",
    [
        "layer_0_expert_0_mp_rank_01_model_states.pt",
        "expert_0_mp_rank_00_model_states.pt",
        "expp_rank_0_mp_rank_00_optim_states.pt",
        "x_model_states.pt",
    ],
)
def test_files_of_deepspeed_that_are_not_read_are_refused(tmp_path: Path, name: str) -> None:
    torch.save({"module": {"gate.w": torch.ones(3)}, "mp_world_size": 1}, tmp_path / "mp_rank_00_model_states.pt")
    assert set(open_checkpoint(tmp_path).tensors) == {"gate.w"}
    torch.save({"moe.experts.0.w": torch.ones(3)}, tmp_path / name)

    with pytest.raises(
        CheckpointError, match=f"{name} is an?( expert's)? file.* of a kind that traindiff does not read"
    ):
        open_checkpoint(tmp_path)


def test_a_shard_that_is_missing_is_named_without_an_index(tmp_path: Path) -> None:
    for number in (1, 2):
        save_file({f"w{number}": torch.ones(3)}, tmp_path / f"model-0000{number}-of-00003.safetensors")

    with pytest.raises(CheckpointError, match=r'"model-00003-of-00003.* is missing, which belongs to'):
        open_checkpoint(tmp_path)
    save_file({"w3": torch.ones(3)}, tmp_path / "model-00003-of-00003.safetensors")
    assert set(open_checkpoint(tmp_path).tensors) == {"w1", "w2", "w3"}


def test_several_files_of_meta_are_not_read_as_one(tmp_path: Path) -> None:
    for number in range(2):
        torch.save({"layers.0.wq.weight": torch.ones(2, 4)}, tmp_path / f"consolidated.0{number}.pth")

    with pytest.raises(CheckpointError, match="each with a part of most tensors"):
        open_checkpoint(tmp_path)
    (tmp_path / "consolidated.01.pth").unlink()
    assert set(open_checkpoint(tmp_path).tensors) == {"layers.0.wq.weight"}


def _experts(here: Path, counts: list[int]) -> dict[str, torch.Tensor]:
    """What DeepSpeed writes of a model with experts without ZeRO; returns its parameters."""
    gates = {f"layers.{layer}.moe.deepspeed_moe.gate.wg.weight": torch.randn(3) for layer in range(len(counts))}
    moments = {"state": {0: {"exp_avg": torch.randn(3)}}}
    content = {"module": gates, "optimizer": moments, "num_experts": counts, "mp_world_size": 1}
    torch.save(content, here / "mp_rank_00_model_states.pt")
    torch.save({"optimizer": moments}, here / "expp_rank_0_mp_rank_00_optim_states.pt")
    state = dict(gates)
    for layer, count in enumerate(counts):
        for expert in range(count):
            name = f"layers.{layer}.moe.deepspeed_moe.experts.deepspeed_experts.{expert}.w"
            state[name] = torch.randn(4)
            torch.save({name: state[name]}, here / f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt")
    return state


def test_experts_of_deepspeed_are_read_from_their_files(tmp_path: Path) -> None:
    state = _experts(tmp_path, [2, 11])

    result = traindiff.weights(tmp_path, state)

    assert (result.verdict, len(result.relations)) == ("identical", 15)
    assert any("only the model is compared" in note for note in result.notes)


def test_experts_of_deepspeed_that_are_not_complete_are_refused(tmp_path: Path) -> None:
    _experts(tmp_path, [2, 3])
    file = tmp_path / "layer_1_expert_2_mp_rank_00_model_states.pt"

    torch.save({"layers.1.moe.experts.w1.2": torch.ones(3)}, file)
    with pytest.raises(CheckpointError, match=r'its tensor "layers.1.moe.experts.w1.2" is none of expert 2 alone'):
        open_checkpoint(tmp_path)
    file.rename(tmp_path / "layer_1_expert_3_mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="it has no file layer_1_expert_2_mp_rank_00"):
        open_checkpoint(tmp_path)
    torch.save({}, tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    with pytest.raises(CheckpointError, match="an expert's file of a kind that traindiff does not read"):
        open_checkpoint(tmp_path)


def _saved(path: Path, pickled: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/version", "3\n")
    return path


_TUPLE_OF = b"cbuiltins\ntuple\n"

_COPIES = b"h\x01h\x00R" * 20_000 + b"l."

PICKLES = {
    "tuples as a key": (b"}" + b")" + b"\x85" * 1_500_000 + b"K\x01s.", "its pickle is nested too deep"),
    "tuples of lists that lie in the memo twice": (
        b"})" + (b"q\x02]q\x00q\x01h\x02a0" + _TUPLE_OF + b"h\x00\x85R") * 60_000 + b"K\x01s.",
        "its pickle is nested too deep",
    ),
    "lists": (b"]" * 1000 + b"a" * 999 + b".", "its pickle is nested too deep"),
    "a dict that holds itself": (b"}q\x00X\x05\x00\x00\x00modelh\x00s.", "containers nested 64 deep"),
    "a bytearray of a number": (
        b"c__builtin__\nbytearray\n(J\x00\x00\x00\x60tR.", "it has a bytearray of what is no bytes"
    ),
    "tuples of twice the same tuple as a key": (b"})" + b"2\x86" * 60 + b"K\x01s.", "it repeats tuples too often"),
    "a large tuple as a key, again and again": (
        b"(" + b"N" * 100_000 + b"tq\x00}" + b"h\x00Ns" * 20_000 + b".", "it repeats tuples too often"
    ),
    "very many copies of a list": (
        b"(" + b"N" * 100_000 + b"l\x85q\x000(" + b"cbuiltins\nlist\nq\x01" + _COPIES,
        "it copies more values than it has",
    ),
    "very many copies of bytes": (
        b"B\x00\x00\x10\x00" + bytes(1 << 20) + b"\x85q\x000(cbuiltins\nbytearray\nq\x01" + _COPIES,
        "it copies more values than it has",
    ),
    "very many copies of arguments": (
        b"(" + b"N" * 100_000 + b"tq\x000(cenum\nA\nq\x01" + _COPIES,
        "it repeats tuples too often",
    ),
    "very many copies of attributes": (
        b"}(" + b"".join(b"J" + number.to_bytes(4, "little") + b"N" for number in range(100_000))
        + b"uq\x000(" + b"ccollections\nOrderedDict\nq\x01" + b"h\x01)Rh\x00b" * 20_000 + b"l.",
        "holds no tensors",
    ),
    "a storage whose name is a list of twice the same list": (
        b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\n]"
        + b"q\x00(h\x00h\x00l" * 60 + b"X\x03\x00\x00\x00cpuK\x01tQ.",
        "it names a storage in a way that torch.save does not",
    ),
    "a long name of very many values": (
        b"}X\x00\x00\x10\x00" + b"n" * (1 << 20) + b"(" + b"N" * 100_000 + b"ls.",
        "the name of a value in it is too long"
    ),
    "an integer of very many digits": (
        b"}\x8b\x00\x10\x00\x00" + b"\x01" * 4096 + b"Ns.", "an integer that is too long"
    ),
    "very many classes": (
        b"(" + b"".join(b"cenum\nA%d\n" % number for number in range(5000)) + b"l.", "it names more than 4096 classes"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", PICKLES)
def test_a_pickle_that_would_exhaust_the_process_is_refused(tmp_path: Path, kind: str) -> None:
    """In a process of its own, which such a pickle could crash."""
    pickled, reason = PICKLES[kind]
    path = _saved(tmp_path / "model.pt", b"\x80\x02" + pickled)
    code = (
        "import sys; from traindiff.errors import CheckpointError; from traindiff.state.sources.opening import "
        "open_checkpoint\ntry: open_checkpoint(sys.argv[1])\nexcept CheckpointError as error: print(error)"
    )

    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, timeout=120, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    assert reason in done.stdout


def test_one_class_stands_for_all_objects_of_it(tmp_path: Path) -> None:
    path = _saved(tmp_path / "model.pt", b"\x80\x02(" + b"cenum\nA\n" * 50_000 + b"l.")

    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="holds no tensors"):
            open_checkpoint(path)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert most < 20e6


def test_a_bytearray_of_bytes_is_read(tmp_path: Path) -> None:
    state = {"w": torch.ones(3), "extra": bytearray(b"\x00\xff")}
    for protocol in (2, 4, 5):
        torch.save(state, tmp_path / "model.pt", pickle_protocol=protocol)
        assert set(open_checkpoint(tmp_path / "model.pt").tensors) == {"w"}


@pytest.mark.parametrize("old", [False, True])
def test_expanded_tensors_and_complex_views_are_read(tmp_path: Path, *, old: bool) -> None:
    base = torch.randn(2, 3, dtype=torch.complex128)
    state = {"ones": torch.ones(1).expand(4), "rows": torch.randn(1, 3).expand(5, 3), "turned": base.t()}
    state["columns"], state["windows"] = base[:, 1:].clone().t(), torch.arange(6.0).unfold(0, 3, 1)
    torch.save(state, tmp_path / "model.pt", _use_new_zipfile_serialization=not old)

    found = open_checkpoint(tmp_path / "model.pt").tensors

    for name, value in state.items():
        plain = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert b"".join(found[name].slab(*slab).tobytes() for slab in found[name].slabs) == plain, name


@pytest.mark.parametrize("shape", [(1, 1 << 40), (1 << 40,), (1 << 20, 1 << 20)])
def test_expanded_tensors_of_terabytes_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    torch.save({"w": torch.ones(1).expand(shape)}, tmp_path / "model.pt")

    with pytest.raises(CheckpointError, match=r'"w" of shape .* repeats the elements of a storage of 1, and all'):
        open_checkpoint(tmp_path / "model.pt")


def test_many_expanded_tensors_together_are_refused(tmp_path: Path) -> None:
    one = torch.ones(1)
    state: Mapping[str, torch.Tensor] = {f"w{number}": one.expand(1 << 27) for number in range(3)}
    torch.save(state, tmp_path / "model.pt")

    with pytest.raises(CheckpointError, match='"w2" of shape'):
        open_checkpoint(tmp_path / "model.pt")


def test_a_snapshot_in_the_cache_of_hugging_face_is_read(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b/snapshots/r1", tmp_path / "models--a--b/blobs"
    for directory in (snapshot, blobs):
        directory.mkdir(parents=True)
    save_file({"w": torch.ones(3)}, blobs / "abc")
    (blobs / "def").write_text(json.dumps({"weight_map": {"w": "model-1.safetensors"}}))
    (snapshot / "model-1.safetensors").symlink_to("../../blobs/abc")
    (snapshot / "model.safetensors.index.json").symlink_to("../../blobs/def")
    (tmp_path / "link").symlink_to(snapshot)

    for source in (snapshot, tmp_path / "link", *snapshot.iterdir()):
        assert set(open_checkpoint(source).tensors) == {"w"}


def test_a_file_that_the_user_names_may_be_a_link_and_others_may_not(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    save_file({"w": torch.ones(3)}, tmp_path / "weights")
    (inside / "model.safetensors").symlink_to("../weights")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "out.safetensors"}}))
    (inside / "model.safetensors.index.json").symlink_to("../model.safetensors.index.json")
    (inside / "out.safetensors").symlink_to("../weights")

    assert set(open_checkpoint(inside / "model.safetensors").tensors) == {"w"}
    for source in (inside, inside / "model.safetensors.index.json"):
        with pytest.raises(
            CheckpointError, match=r"link that leads outside of .*/inside\. Copy the file there in place"
        ):
            open_checkpoint(source)


def test_blobs_that_are_a_link_themselves_lead_outside(tmp_path: Path) -> None:
    (tmp_path / "got/snapshots/r1").mkdir(parents=True)
    (tmp_path / "secret").mkdir()
    save_file({"w": torch.ones(3)}, tmp_path / "secret/abc")
    (tmp_path / "got/blobs").symlink_to("../secret")
    (tmp_path / "got/snapshots/r1/model.safetensors").symlink_to("../../blobs/abc")

    with pytest.raises(CheckpointError, match="link that leads outside"):
        open_checkpoint(tmp_path / "got/snapshots/r1")


def test_a_pipe_is_named_as_such_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    reading, writing = os.pipe()
    try:
        for path in (tmp_path / "pipe.safetensors", f"/dev/fd/{reading}"):
            with pytest.raises(CheckpointError, match=r"is a pipe, .*\. Write what it gives into a file"):
                open_checkpoint(path)
    finally:
        os.close(reading)
        os.close(writing)


def test_a_recording_without_steps_says_so(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    with traindiff.record(tmp_path / "run", model, torch.optim.SGD(model.parameters(), lr=0.1)):
        pass

    with pytest.raises(CheckpointError, match="is a recording without steps"):
        open_checkpoint(tmp_path / "run")


def test_two_of_very_many_tensors_without_layers_are_found_in_one() -> None:
    state = {f"layer_{number}_w": torch.randn(3) for number in range(400)}
    fused = {f"blk_{number}_v": torch.randn(3) for number in range(400)}
    fused["layer_7_w"] = state["layer_7_w"]
    fused["both"] = torch.cat([state["layer_3_w"], state["layer_300_w"]])

    tracemalloc.start()
    try:
        result = traindiff.weights(state, fused)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    (found,) = [one for one in result.relations if one.kind == "fused"]
    assert (found.baseline, found.candidate) == (("layer_3_w", "layer_300_w"), ("both",))
    assert most < 30e6
