"""Every source gives the tensors that were saved, to the bit, and says what is wrong with a file that is not whole."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor

import traindiff
from traindiff.errors import CheckpointError
from traindiff.state import stored
from traindiff.state.sources.opening import open_checkpoint
from traindiff.state.stored import StoredTensor


def some_tensors() -> dict[str, Tensor]:
    """Of many dtypes and shapes."""
    torch.manual_seed(0)
    return {
        "matrix": torch.randn(300, 40), "short": torch.randn(7).bfloat16(), "scalar": torch.tensor(3.0),
        "cube": torch.randn(4, 5, 6).half(), "empty": torch.zeros(0, 3),
        "eight": torch.randn(8, 8).to(torch.float8_e4m3fn),
        "whole": torch.arange(5), "flags": torch.tensor([True, False]), "double": torch.randn(3).double(),
    }  # fmt: skip


def content(tensor: StoredTensor) -> bytes:
    return b"".join(tensor.slab(*slab).tobytes() for slab in tensor.slabs)


def assert_holds(found: Mapping[str, StoredTensor], saved: Mapping[str, Tensor]) -> None:
    for name, value in saved.items():
        tensor, plain = found[name], value.detach().contiguous().reshape(-1)
        assert (tensor.dtype, tensor.shape) == (str(value.dtype).removeprefix("torch."), tuple(value.shape)), name
        assert content(tensor) == plain.view(torch.uint8).numpy().tobytes(), name


@pytest.fixture(params=[64, 1 << 24], ids=["many slabs", "one slab"])
def slab_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "SLAB_BYTES", request.param)


@pytest.mark.usefixtures("slab_bytes")
def test_a_file_of_safetensors(tmp_path: Path) -> None:
    save_file(some_tensors(), tmp_path / "model.safetensors", metadata={"format": "pt"})

    assert_holds(open_checkpoint(tmp_path / "model.safetensors").tensors, some_tensors())
    assert_holds(open_checkpoint(tmp_path).tensors, some_tensors())


@pytest.mark.usefixtures("slab_bytes")
def test_a_file_of_torch_save_with_views_and_strides(tmp_path: Path) -> None:
    base = torch.randn(100)
    state = some_tensors() | {
        "transposed": torch.randn(30, 20).t(), "parameter": torch.nn.Parameter(torch.randn(3)),
        "view": base[10:50].view(8, 5), "column": torch.randn(6, 4)[:, 1:3],
        "complex": torch.randn(3, dtype=torch.complex64),
        "swapped": torch.randn(4, 5, 6).permute(2, 0, 1),
    }  # fmt: skip
    torch.save(state, tmp_path / "model.pt")

    assert_holds(open_checkpoint(tmp_path / "model.pt").tensors, state)


@pytest.mark.parametrize("key", ["model", "state_dict", "module"])
def test_a_model_beside_an_optimizer_keeps_its_names(tmp_path: Path, key: str) -> None:
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    torch.save({key: model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, tmp_path / "last.ckpt")

    found = open_checkpoint(tmp_path / "last.ckpt").tensors

    assert_holds(found, model.state_dict())
    assert {name for name, one in found.items() if one.role == "parameter"} == {"weight", "bias"}
    assert found["optimizer.state[0].exp_avg"].role == "optimizer"


@pytest.mark.parametrize("name", ["optimizer.pt", "optimizer.bin"])
def test_the_optimizer_in_a_file_beside_the_model_is_compared(tmp_path: Path, name: str) -> None:
    moments = torch.arange(3.0)
    for here, factor in (("a", 1.0), ("b", 2.0)):
        (tmp_path / here).mkdir()
        save_file({"weight": torch.ones(3)}, tmp_path / here / "model.safetensors")
        torch.save({"state": {0: {"exp_avg": factor * moments}}, "param_groups": []}, tmp_path / here / name)

    assert traindiff.weights(tmp_path / "a", tmp_path / "a").verdict == "identical"
    found = traindiff.weights(tmp_path / "a", tmp_path / "b")
    assert [(one.name, one.kind, one.role) for one in found.differences] == [
        ("optimizer.state[0].exp_avg", "scaled", "optimizer")
    ]


@pytest.mark.usefixtures("slab_bytes")
@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_files_with_an_index(tmp_path: Path, ending: str) -> None:
    state = some_tensors()
    names = sorted(state)
    name = "model.safetensors.index.json" if ending == "safetensors" else "pytorch_model.bin.index.json"
    weight_map = {}
    for number, part in enumerate((names[:4], names[4:])):
        file = f"part-{number}.{ending}"
        kept = {key: state[key] for key in part}
        save_file(kept, tmp_path / file) if ending == "safetensors" else torch.save(kept, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    (tmp_path / name).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    assert_holds(open_checkpoint(tmp_path).tensors, state)
    assert_holds(open_checkpoint(tmp_path / name).tensors, state)


@pytest.mark.usefixtures("slab_bytes")
@pytest.mark.filterwarnings("ignore")
def test_a_directory_of_torch_distributed_checkpoint(tmp_path: Path) -> None:
    state = some_tensors()
    optimizer = {"state": {"matrix": {"exp_avg": torch.randn(300, 40)}}}
    dcp.save({"model": dict(state), "optimizer": optimizer, "step": 3}, checkpoint_id=tmp_path, no_dist=True)

    found = open_checkpoint(tmp_path).tensors

    assert_holds(found, state | {"optimizer.state.matrix.exp_avg": optimizer["state"]["matrix"]["exp_avg"]})
    assert found["optimizer.state.matrix.exp_avg"].role == "optimizer"


def test_a_model_a_state_dict_and_a_file_of_it_are_the_same(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    torch.save(model.state_dict(), tmp_path / "model.pt")

    for other in (model.state_dict(), str(tmp_path / "model.pt")):
        assert traindiff.weights(model, other).verdict == "identical"


def test_a_recording_is_compared_by_its_summaries(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    with traindiff.record(tmp_path / "run", model, optimizer):
        for _ in range(2):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
    other = {name: value.clone() for name, value in model.state_dict().items()}
    other["weight"][1] *= 1.5

    assert traindiff.weights(tmp_path / "run", model).verdict == "identical"
    assert traindiff.weights(model, tmp_path / "run").verdict == "identical"
    changed = traindiff.weights(tmp_path / "run", other)
    assert [(one.name, one.kind) for one in changed.differences] == [("weight", "other")]
    rounded = traindiff.weights(tmp_path / "run", {name: one.bfloat16() for name, one in model.state_dict().items()})
    assert {one.kind for one in rounded.relations} == {"cast"}


def test_a_recording_has_no_layouts_and_says_so(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"q": torch.nn.Linear(4, 4, bias=False), "k": torch.nn.Linear(4, 4, bias=False)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer):
        (model["q"](torch.ones(2, 4)) + model["k"](torch.ones(2, 4))).sum().backward()
        optimizer.step()
    fused = {"qk.weight": torch.cat([model["q"].weight, model["k"].weight]).detach(), "q.weight": model["q"].weight}

    result = traindiff.weights(tmp_path / "run", fused)

    assert (result.verdict, result.counts()["only"]) == ("incomplete", 2)
    assert "only their summaries are known" in result.notes[0]


class _RunsCode:
    def __reduce__(self) -> Any:
        return os.system, ("exit 1",)


def _sharded(here: Path, change: Callable[[dict[str, str]], None]) -> None:
    save_file({"first": torch.ones(3)}, here / "a.safetensors")
    save_file({"second": torch.ones(3)}, here / "b.safetensors")
    weight_map = {"first": "a.safetensors", "second": "b.safetensors"}
    change(weight_map)
    (here / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _cut(file: Path, count: int) -> None:
    file.write_bytes(file.read_bytes()[:-count])


def nothing_there(here: Path) -> None:
    pass


def an_index_names_no_file(here: Path) -> None:
    _sharded(here, lambda weight_map: weight_map.update(second="c.safetensors"))


def an_index_names_no_key(here: Path) -> None:
    _sharded(here, lambda weight_map: weight_map.update(third="a.safetensors"))


def an_index_leads_outside(here: Path) -> None:
    _sharded(here, lambda weight_map: weight_map.update(third="../a.safetensors"))


def safetensors_cut_off(here: Path) -> None:
    save_file({"weight": torch.ones(30)}, here / "model.safetensors")
    _cut(here / "model.safetensors", 10)


def safetensors_with_another_header(here: Path) -> None:
    save_file({"weight": torch.ones(30)}, here / "model.safetensors")
    data = (here / "model.safetensors").read_bytes()
    (here / "model.safetensors").write_bytes(data.replace(b"[30]", b"[31]"))


def a_pickle_with_code(here: Path) -> None:
    torch.save({"weight": torch.ones(3), "other": _RunsCode()}, here / "model.pt")


def an_archive_cut_off(here: Path) -> None:
    torch.save({"weight": torch.ones(3000)}, here / "model.pt")
    _cut(here / "model.pt", 2000)


def _header(here: Path, header: Mapping[str, Any], data: bytes) -> None:
    text = json.dumps(header).encode()
    (here / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)


def tensors_that_overlap(here: Path) -> None:
    own = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    _header(here, {"first": own, "second": own | {"data_offsets": [4, 12]}}, bytes(12))


def tensors_with_a_gap(here: Path) -> None:
    own = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    _header(here, {"first": own, "second": own | {"data_offsets": [12, 20]}}, bytes(20))


def an_unknown_dtype(here: Path) -> None:
    _header(here, {"first": {"dtype": "I4", "shape": [4], "data_offsets": [0, 2]}}, bytes(2))


def a_sparse_tensor(here: Path) -> None:
    torch.save({"weight": torch.ones(3), "table": torch.eye(3).to_sparse()}, here / "model.pt")


def a_tensor_without_elements(here: Path) -> None:
    torch.save({"weight": torch.ones(3), "table": torch.ones(3, device="meta")}, here / "model.pt")


def _old(here: Path) -> Path:
    torch.save({"weight": torch.ones(30)}, here / "model.pt", _use_new_zipfile_serialization=False)
    return here / "model.pt"


def an_old_file_cut_off(here: Path) -> None:
    _cut(_old(here), 20)


def an_old_file_with_a_pickle_cut_off(here: Path) -> None:
    _cut(_old(here), 250)


def an_old_file_with_code(here: Path) -> None:
    torch.save({"weight": _RunsCode()}, here / "model.pt", _use_new_zipfile_serialization=False)


def another_pickle(here: Path) -> None:
    (here / "model.pt").write_bytes(pickle.dumps({"weight": [1.0, 2.0]}))


def a_pickle_with_another_checksum(here: Path) -> None:
    torch.save({"weight": torch.ones(30)}, here / "model.pt")
    data = (here / "model.pt").read_bytes()
    assert data.count(b"weight") == 1
    (here / "model.pt").write_bytes(data.replace(b"weight", b"waight"))


def a_script(here: Path) -> None:
    torch.jit.trace(torch.nn.Linear(3, 3), torch.ones(1, 3)).save(here / "model.pt")


def two_files_with_one_tensor(here: Path) -> None:
    for name in ("a", "b"):
        save_file({"weight": torch.ones(3)}, here / f"{name}.safetensors")


def _distributed(here: Path) -> None:
    dcp.save({"model": {"weight": torch.ones(30)}}, checkpoint_id=here, no_dist=True)


def a_distributed_file_missing(here: Path) -> None:
    _distributed(here)
    (here / "__0_0.distcp").unlink()


def a_distributed_file_cut_off(here: Path) -> None:
    _distributed(here)
    _cut(here / "__0_0.distcp", 100)


def safetensors_with_more_at_the_end(here: Path) -> None:
    save_file({"weight": torch.ones(30)}, here / "model.safetensors")
    with (here / "model.safetensors").open("ab") as file:
        file.write(b"more")


def a_pointer_of_git_lfs(here: Path) -> None:
    (here / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


DAMAGES: Mapping[Callable[[Path], None], tuple[str, ...]] = {
    nothing_there: ("is no directory of saved weights",),
    an_index_names_no_file: ("model.safetensors.index.json", '"second" is in "c.safetensors", which is not there'),
    an_index_names_no_key: ("a.safetensors", 'lacks "third"'),
    an_index_leads_outside: ("'../a.safetensors', which lies outside",),
    safetensors_cut_off: ("model.safetensors", 'the tensor "weight" ends at byte'),
    safetensors_with_more_at_the_end: ("its tensors end at byte", "libraries refuse to load it"),
    a_pointer_of_git_lfs: ("model.safetensors is a pointer of Git LFS", "git lfs pull"),
    safetensors_with_another_header: ("model.safetensors", '"weight" of shape [31] (F32) has 120 bytes'),
    a_pickle_with_code: ("model.pt", 'would call "posix.system"'),
    an_archive_cut_off: ("model.pt", "is cut off"),
    tensors_that_overlap: ("model.safetensors", 'the tensor "second" begins before "first" ends'),
    tensors_with_a_gap: ("model.safetensors", '4 bytes before the tensor "second" are of none'),
    an_unknown_dtype: ("model.safetensors", '"first" has the dtype "I4", which is not known'),
    a_sparse_tensor: ("model.pt", '"table" is a tensor that is sparse'),
    a_tensor_without_elements: ("model.pt", '"table" is a tensor that was on the meta device'),
    an_old_file_cut_off: ("model.pt", "30 elements of float32, and the file ends before"),
    an_old_file_with_a_pickle_cut_off: ("model.pt", "a pickle in it is damaged or cut off"),
    an_old_file_with_code: ("model.pt", 'would call "posix.system"'),
    another_pickle: ("model.pt", "a pickle that torch.save has not written"),
    a_pickle_with_another_checksum: ('"model/data.pkl" does not have the checksum',),
    a_script: ("model.pt is a TorchScript archive, which is code", "torch.jit.load(...).state_dict()"),
    two_files_with_one_tensor: ("b.safetensors", '"weight" is in "a.safetensors", too'),
    a_distributed_file_missing: ('"model.weight" is in "__0_0.distcp", which is not there',),
    a_distributed_file_cut_off: ("__0_0.distcp", '"model.weight" ends at byte'),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__.replace("_", " "))
def test_damage_is_an_error_that_names_file_and_key(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    damage(tmp_path)

    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)

    for words in DAMAGES[damage]:
        assert words in str(caught.value)


@pytest.mark.parametrize("place", [1, 30_000])
def test_elements_that_do_not_have_their_checksum_are_refused_with_file_and_key(tmp_path: Path, place: int) -> None:
    state = {"model": {"weight": torch.randn(300, 40), "bias": torch.randn(40)}}
    torch.save(state, tmp_path / "a.pt")
    data = bytearray((tmp_path / "a.pt").read_bytes())
    [whole] = [one for one in zipfile.ZipFile(tmp_path / "a.pt").infolist() if one.file_size == 48_000]
    data[data.index(state["model"]["weight"].numpy().tobytes()) + place] ^= 64
    (tmp_path / "b.pt").write_bytes(data)

    for first, second in (("a.pt", "b.pt"), ("b.pt", "a.pt")):
        with pytest.raises(CheckpointError, match=r'b\.pt cannot be read: "weight" does not have the checksum'):
            traindiff.weights(tmp_path / first, tmp_path / second)
    assert traindiff.weights(tmp_path / "b.pt", tmp_path / "b.pt").verdict == "identical"
    assert whole.CRC


def test_a_file_without_checksums_is_compared(tmp_path: Path) -> None:
    state, other = {"weight": torch.randn(300, 40)}, {"weight": torch.randn(300, 40)}
    torch.save(state, tmp_path / "a.pt")
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(other, tmp_path / "b.pt")
    finally:
        torch.serialization.set_crc32_options(True)

    assert traindiff.weights(tmp_path / "a.pt", tmp_path / "b.pt").verdict == "diverged"


def test_packed_numbers_are_compared_as_bytes(tmp_path: Path) -> None:
    for name, data in (("a", b"12"), ("b", b"12"), ("c", b"13")):
        (tmp_path / name).mkdir()
        _header(tmp_path / name, {"first": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}, data)

    assert traindiff.weights(tmp_path / "a", tmp_path / "b").verdict == "identical"
    assert traindiff.weights(tmp_path / "a", tmp_path / "c").verdict == "diverged"


def test_complex_numbers_are_compared_one_by_one() -> None:
    for dtype in (torch.complex64, torch.complex128):
        value = torch.randn(8, 4, dtype=dtype)
        other = value.clone()
        other[3, 2] += 1
        (found,) = traindiff.weights({"weight": value}, {"weight": other}).differences

        assert (found.evidence["unequal"], found.evidence["elements"]) == (1, 32)


@pytest.mark.usefixtures("slab_bytes")
def test_a_file_from_before_torch_1_6(tmp_path: Path) -> None:
    base = torch.randn(6, 20)
    saved = {"rows": base[2:4], "columns": base[:, 3:8], "turned": base.t(), "parameter": torch.nn.Parameter(base)}
    saved |= {name: value for name, value in some_tensors().items() if name != "eight"}
    torch.save({"model": saved, "epoch": 3}, tmp_path / "model.pt", _use_new_zipfile_serialization=False)

    assert_holds(open_checkpoint(tmp_path / "model.pt").tensors, saved)


def test_a_pickle_with_code_runs_nothing(tmp_path: Path) -> None:
    class Writes:
        def __reduce__(self) -> Any:
            return Path.write_text, (tmp_path / "ran", "")

    torch.save(Writes(), tmp_path / "model.pt")

    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path / "model.pt")
    assert not (tmp_path / "ran").exists()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["model.pt", "old.pt", "model.safetensors", ".metadata"])
def test_no_mutated_file_raises_anything_else(tmp_path: Path, name: str) -> None:
    """Bytes of what describes the tensors are changed one by one."""
    state = {"weight": torch.randn(4, 3), "bias": torch.randn(4)}
    if name == "model.pt":
        torch.save(state, tmp_path / name)
    elif name == "old.pt":
        torch.save(state, tmp_path / name, _use_new_zipfile_serialization=False)
    elif name == "model.safetensors":
        save_file(state, tmp_path / name)
    else:
        _distributed(tmp_path)
    whole = (tmp_path / name).read_bytes()
    random = torch.Generator().manual_seed(0)
    refused = 0
    for _ in range(300):
        data = bytearray(whole)
        for place in torch.randint(len(data), (2,), generator=random).tolist():
            data[place] = int(torch.randint(256, (), generator=random))
        (tmp_path / name).write_bytes(data)
        try:
            for tensor in open_checkpoint(tmp_path).tensors.values():
                content(tensor)
        except traindiff.TraindiffError:
            refused += 1
    assert refused > 20


def test_files_beside_the_one_that_was_read_are_named(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(30)}, tmp_path / "model.safetensors")
    torch.save({"weight": torch.zeros(30)}, tmp_path / "pytorch_model.bin")

    result = traindiff.weights({"weight": torch.ones(30)}, tmp_path)

    assert result.verdict == "identical"
    (note,) = result.notes
    assert note.startswith(f'{tmp_path} has "pytorch_model.bin" beside "model.safetensors", which is what was read.')
