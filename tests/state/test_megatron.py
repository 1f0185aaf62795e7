"""Megatron's files of each rank, cut here as Megatron cuts, are the whole model."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

import traindiff
from tests.state.models import GROUPS, LAYERS, State, hugging_face, megatron
from traindiff.errors import CheckpointError
from traindiff.state.sources.opening import open_checkpoint
from traindiff.state.sources.stacked_layers import apart
from traindiff.state.stored import StoredTensor

ROWS = ("word_embeddings.", "output_layer.", "linear_qkv.w", "linear_qkv.b", "linear_fc1.w")
COLUMNS = ("linear_proj.w", "linear_fc2.w")
EXPERTS = 4


def whole_model(*, experts: bool = False) -> State:
    """Of Megatron core, on one rank."""
    state = megatron(hugging_face())
    for layer in range(LAYERS):
        here = f"decoder.layers.{layer}"
        state[f"{here}.self_attention.linear_qkv.bias"] = torch.arange(128.0)
        if experts:
            gate, down = state.pop(f"{here}.mlp.linear_fc1.weight"), state.pop(f"{here}.mlp.linear_fc2.weight")
            state[f"{here}.mlp.router.weight"] = torch.randn(EXPERTS, 64)
            for expert in range(EXPERTS):
                there = f"{here}.mlp.experts.local_experts.{expert}"
                state[f"{there}.linear_fc1.weight"] = gate + expert
                state[f"{there}.linear_fc2.weight"] = down + expert
    return state


def part(name: str, value: Tensor, rank: int, ranks: int, *, gated: bool) -> Tensor:
    """What a tensor rank has of a tensor."""
    if gated and "linear_fc1.w" in name:
        return torch.cat([half.chunk(ranks)[rank] for half in value.chunk(2)])
    if any(one in name for one in ROWS) and "layer_norm" not in name:
        return value.chunk(ranks)[rank].clone()
    return value.chunk(ranks, 1)[rank].clone() if any(one in name for one in COLUMNS) else value


def of_layers(state: Mapping[str, Tensor], first: int, end: int, *, is_first: bool, is_last: bool) -> State:
    """The layers of a stage, numbered from 0, and what is before and behind all layers."""
    found = {}
    for name, value in state.items():
        if ".layers." not in name:
            if is_first if name.startswith("embedding") else is_last:
                found[name] = value
            continue
        layer = int(name.split(".")[2])
        if first <= layer < end:
            found[name.replace(f".{layer}.", f".{layer - first}.", 1)] = value
    return found


def of_experts(state: Mapping[str, Tensor], rank: int, ranks: int) -> State:
    """The experts of an expert rank, numbered from 0, and everything else."""
    found, each = {}, EXPERTS // ranks
    for name, value in state.items():
        if ".local_experts." not in name:
            found[name] = value
            continue
        before, _, behind = name.partition(".local_experts.")
        expert, _, rest = behind.partition(".")
        if int(expert) // each == rank:
            found[f"{before}.local_experts.{int(expert) % each}.{rest}"] = value
    return found


def save(
    directory: Path, state: Mapping[str, Tensor], *, tensor: int = 1, pipeline: int = 1, expert: int = 1,
    chunks: int = 1, gated: bool = True,
    change: Callable[[str, dict[str, Any]], object] = lambda _, __: None,
) -> None:  # fmt: skip
    """Write the files of all ranks. `change` is given the name of a rank's directory, and what will be in its file."""
    parts = pipeline * chunks
    ends = [LAYERS * number // parts for number in range(parts + 1)]
    args = Namespace(
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline, expert_model_parallel_size=expert,
        swiglu=gated, params_dtype=torch.float32,
    )  # fmt: skip
    for t in range(tensor):
        for p in range(pipeline):
            for e in range(expert):
                content: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, "optimizer": {"step": 3}}
                for chunk in range(chunks):
                    number = chunk * pipeline + p
                    own = of_layers(
                        state, ends[number], ends[number + 1], is_first=number == 0, is_last=number == parts - 1
                    )
                    model = {name: part(name, value, t, tensor, gated=gated) for name, value in own.items()}
                    content[f"model{chunk}" if chunks > 1 else "model"] = of_experts(model, e, expert)
                name = f"mp_rank_{t:02}" + f"_{p:03}" * (pipeline > 1) + f"_{e:03}" * (expert > 1)
                change(name, content)
                (directory / name).mkdir(parents=True)
                torch.save(content, directory / name / "model_optim_rng.pt")


@pytest.mark.parametrize("ranks", [
    {}, {"tensor": 2}, {"tensor": 2, "gated": False}, {"pipeline": 3}, {"tensor": 2, "pipeline": 2},
    {"tensor": 2, "pipeline": 1, "expert": 2}, {"tensor": 2, "pipeline": 3, "expert": 4}, {"expert": 2},
], ids=str)  # fmt: skip
def test_the_files_of_all_ranks_are_the_whole_model(tmp_path: Path, ranks: dict[str, int]) -> None:
    state = whole_model(experts="expert" in ranks)
    save(tmp_path / "iter_0000100", state, **ranks)  # type: ignore[arg-type]
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100\n")

    for path in (tmp_path, tmp_path / "iter_0000100"):
        assert open_checkpoint(path).kind == "Megatron"
        found = traindiff.weights(state, path)
        assert found.verdict == "identical", str(found)
        assert len(found.relations) == len(state)


def test_an_interleaved_pipeline_has_its_layers_in_the_order_of_the_model(tmp_path: Path) -> None:
    state = whole_model()
    for layer in range(LAYERS, 6):
        state |= {
            name.replace(".0.", f".{layer}."): value + layer
            for name, value in whole_model().items()
            if name.startswith("decoder.layers.0.")
        }
    layers = {name: value for name, value in state.items() if ".layers." in name}
    orders = {0: ((0, 1), (3, 4)), 1: ((1, 3), (4, 6))}
    for rank, chunks in orders.items():
        content = {
            f"model{number}": of_layers(layers, *chunk, is_first=False, is_last=False)
            for number, chunk in enumerate(chunks)
        }
        (tmp_path / f"mp_rank_00_{rank:03}").mkdir()
        torch.save(content, tmp_path / f"mp_rank_00_{rank:03}" / "model_optim_rng.pt")

    assert traindiff.weights(layers, tmp_path).verdict == "identical"


def test_such_files_are_the_hugging_face_model_by_a_map(tmp_path: Path) -> None:
    save(tmp_path, megatron(hugging_face()), tensor=2, pipeline=3)

    found = traindiff.weights(hugging_face(), tmp_path, map=f"llama:hf-megatron,heads=4,kv_heads={GROUPS}")

    assert found.verdict == "identical", str(found)


def test_a_norm_that_drifted_apart_on_the_tensor_ranks_is_warned_of(tmp_path: Path) -> None:
    def change(name: str, content: dict[str, Any]) -> None:
        if name == "mp_rank_01":
            content["model"]["decoder.final_layernorm.weight"] = torch.full((64,), 1.5)

    save(tmp_path, whole_model(), tensor=2, change=change)

    found = traindiff.weights(whole_model(), tmp_path)

    assert found.verdict == "identical"
    assert any("decoder.final_layernorm.weight is another one in" in note for note in found.notes)


def a_layer_of_an_unknown_name(name: str, content: dict[str, Any]) -> None:
    content["model"]["decoder.special.weight"] = torch.full((3,), float(name[-1]))


def a_rank_that_lacks_a_parameter(name: str, content: dict[str, Any]) -> None:
    if name == "mp_rank_01":
        del content["model"]["output_layer.weight"]


def more_ranks_than_files(_: str, content: dict[str, Any]) -> None:
    content["args"].tensor_model_parallel_size = 3


def no_model(_: str, content: dict[str, Any]) -> None:
    del content["model"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (a_layer_of_an_unknown_name, r'mp_rank_01.*"decoder\.special\.weight".*how it is cut is not known'),
        (a_rank_that_lacks_a_parameter, r'mp_rank_01.*lacks "output_layer\.weight"'),
        (more_ranks_than_files, "3 tensor, 1 pipeline.*tensor rank 2, pipeline rank 0, expert rank 0 is missing"),
        (no_model, 'has no "model"'),
    ],
)
def test_ranks_that_do_not_fit_together_are_refused_with_file_and_key(
    tmp_path: Path, change: Callable[[str, dict[str, Any]], object], words: str
) -> None:
    save(tmp_path, whole_model(), tensor=2, change=change)

    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(tmp_path)


def test_a_missing_file_and_a_missing_iteration_are_named(tmp_path: Path) -> None:
    save(tmp_path / "iter_0000007", whole_model(), tensor=2)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("8")
    with pytest.raises(CheckpointError, match='names the iteration "8"'):
        open_checkpoint(tmp_path)
    (tmp_path / "iter_0000007" / "mp_rank_01" / "model_optim_rng.pt").unlink()
    with pytest.raises(CheckpointError, match=r"mp_rank_01.*has no file model_optim_rng\.pt"):
        open_checkpoint(tmp_path / "iter_0000007")


@pytest.mark.filterwarnings("ignore")
def test_a_distributed_checkpoint_is_found_by_its_iteration(tmp_path: Path) -> None:
    dcp.save({"weight": torch.ones(3)}, checkpoint_id=tmp_path / "iter_0000012", no_dist=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12")

    assert open_checkpoint(tmp_path).kind == "torch.distributed.checkpoint"


def _stacked(state: State) -> State:
    """As Megatron's distributed checkpoints have it: all layers of the decoder in one tensor."""
    made = {name: value for name, value in state.items() if ".layers." not in name}
    for name in state:
        if ".layers.0." in name:
            layers = [state[name.replace(".0.", f".{number}.")] for number in range(LAYERS)]
            made[name.replace(".0.", ".")] = torch.stack(layers)
    return made


@pytest.mark.filterwarnings("ignore")
def test_stacked_layers_of_a_distributed_checkpoint_are_the_hugging_face_model(tmp_path: Path) -> None:
    state = megatron(hugging_face())
    faulty = {name: value.clone() for name, value in state.items()}
    faulty["decoder.layers.1.self_attention.linear_qkv.weight"][5, 7] += 1.0
    for number, model in enumerate((state, faulty)):
        dcp.save(_stacked(model), checkpoint_id=tmp_path / str(number), no_dist=True)
        (tmp_path / str(number) / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')

    assert traindiff.weights(state, tmp_path / "0").verdict == "identical"
    assert traindiff.weights(hugging_face(), tmp_path / "0").verdict == "equivalent"
    (found,) = traindiff.weights(hugging_face(), tmp_path / "1").differences
    assert found.candidate == ("decoder.layers.1.self_attention.linear_qkv.weight",)
    assert "all in row 5 of" in found.message
    (tmp_path / "0" / "metadata.json").write_text('{"other": 1}')
    assert traindiff.weights(_stacked(state), tmp_path / "0").verdict == "identical"


def test_layers_and_experts_are_taken_apart_whatever_the_boxes_of_their_shards_are(tmp_path: Path) -> None:
    whole = torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5)
    name = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    every = slice(0, 3)
    boxes = [
        (slice(0, 2), every, slice(0, 2)), (slice(0, 1), every, slice(2, 4)), (slice(1, 2), every, slice(2, 4))
    ]  # fmt: skip
    files = []
    for number, box in enumerate(boxes):
        value = whole[box].transpose(2, 3).contiguous().transpose(2, 3) if number == 1 else whole[box].contiguous()
        torch.save(value, tmp_path / f"{number}.pt")
        (stored,) = open_checkpoint(tmp_path / f"{number}.pt").tensors.values()
        offset = (*(one.start for one in box), 0)
        files.append(replace(stored.parts[0], offset=offset, shape=stored.shape))
    stacked = StoredTensor(name=name, dtype="float32", shape=tuple(whole.shape), parts=tuple(files))

    norm = "decoder.final_layernorm.weight"
    found = apart({name: stacked, norm: replace(stacked, name=norm)})

    assert len(found) == 7
    for layer in range(2):
        for expert in range(3):
            one = found[f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc1.weight"]
            assert one.shape == (4, 5)
            assert one.slab(0, 4).view("float32").tolist() == whole[layer, expert].reshape(-1).tolist()
            assert one.slab(1, 3).view("float32").tolist() == whole[layer, expert, 1:3].reshape(-1).tolist()


@pytest.mark.filterwarnings("ignore")
def test_buckets_of_the_optimizer_are_noted_and_its_state_by_name_is_compared(tmp_path: Path) -> None:
    state = megatron(hugging_face())
    for number in (0, 1):
        bucket = "chained_0.optimizer.distributed.dp_group_idx_0.gbuf_idx_0.bucket_idx_0.exp_avg"
        buckets, moment = {bucket: torch.ones(7 + number)}, "chained_1.optimizer.state.exp_avg"
        moments = {f"{moment}.{name}": value + number for name, value in _stacked(state).items()}
        dcp.save({**_stacked(state), **buckets, **moments}, checkpoint_id=tmp_path / str(number), no_dist=True)
        (tmp_path / str(number) / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')

    result = traindiff.weights(tmp_path / "0", tmp_path / "1")

    assert {one.role for one in result.differences} == {"optimizer"}
    assert len(result.differences) == len(state)
    assert "in buckets of many parameters" in result.notes[0]


def test_no_mutated_file_of_a_rank_raises_anything_else(tmp_path: Path) -> None:
    """Bytes of what describes the tensors are changed one by one."""
    state = {"output_layer.weight": torch.randn(4, 6), "decoder.final_layernorm.weight": torch.ones(6)}
    save(tmp_path, state, tensor=2)
    file = tmp_path / "mp_rank_01" / "model_optim_rng.pt"
    whole = file.read_bytes()
    random = torch.Generator().manual_seed(0)
    refused = 0
    for _ in range(200):
        data = bytearray(whole)
        for place in torch.randint(len(data), (2,), generator=random).tolist():
            data[place] = int(torch.randint(256, (), generator=random))
        file.write_bytes(data)
        try:
            for tensor in open_checkpoint(tmp_path).tensors.values():
                for slab in tensor.slabs:
                    tensor.slab(*slab)
        except traindiff.TraindiffError:
            refused += 1
    assert refused > 20
