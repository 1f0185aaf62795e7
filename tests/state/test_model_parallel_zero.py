"""DeepSpeed checkpoints of several model-parallel ranks are the whole model."""

from __future__ import annotations

import re
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import traindiff
from tests.state.models import LAYERS, State, hugging_face
from tests.state.test_megatron import part, whole_model
from tests.state.test_zero import pieces, write
from traindiff.errors import CheckpointError
from traindiff.state.sources.opening import open_checkpoint

STAGES = {"without ZeRO": 0, "stage 1": 1, "stage 3": 3}


def moments(state: Mapping[str, Tensor]) -> State:
    torch.manual_seed(1)
    return {name: torch.randn_like(value) for name, value in state.items()}


def save(
    here: Path,
    own: list[tuple[State, State]],
    *,
    stage: int,
    ranks: int = 2,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Write what each model-parallel rank has: its parameters, and their moments."""
    for number, (state, kept) in enumerate(own):
        shapes = [OrderedDict((name, value.shape) for name, value in state.items())]
        model = {"module": dict(state), "param_shapes": shapes if stage else None, "buffer_names": [], **(more or {})}
        for rank in range(ranks):
            file = f"mp_rank_{number:02d}_model_states.pt"
            torch.save(model, here / (f"zero_pp_rank_{rank}_{file}" if stage == 3 else file))
            if not stage:
                continue

            def flat(values: State, rank: int = rank) -> Tensor:
                if stage == 3:
                    return torch.cat([pieces(value, ranks)[rank] for value in values.values()])
                whole = torch.cat([value.reshape(-1) for value in values.values()])
                return torch.cat([whole, torch.zeros(-len(whole) % (2 * ranks))]).chunk(ranks)[rank].clone()

            content = {
                "zero_stage": stage, "partition_count": ranks,
                "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups": [flat(state)],
                "optimizer_state_dict" if stage == 3 else "base_optimizer_state": {
                    "state": {0: {"exp_avg": flat(kept)}}
                },
            }  # fmt: skip
            name = f"zero_pp_rank_{rank}_mp_rank_{number:02d}_optim_states.pt"
            write({"optimizer_state_dict": content}, here / name)


def expected(state: State, kept: State, stage: int) -> dict[str, Tensor]:
    named = {f"optimizer.state.{name}.exp_avg": value for name, value in kept.items()} if stage else {}
    return {**state, **named}


def assert_is(here: Path, wanted: Mapping[str, Tensor]) -> None:
    found = open_checkpoint(here)
    assert found.tensors.keys() == wanted.keys()
    for name, value in wanted.items():
        one = found.tensors[name]
        bits = b"".join(one.slab(*slab).tobytes() for slab in one.slabs)
        assert (one.shape, bits) == (tuple(value.shape), value.contiguous().numpy().tobytes()), name


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
@pytest.mark.parametrize("gated", [False, True])
def test_tensor_ranks_are_merged(tmp_path: Path, stage: int, *, gated: bool) -> None:
    state = whole_model()
    kept = moments(state)
    own = [
        tuple({name: part(name, value, rank, 2, gated=gated) for name, value in one.items()} for one in (state, kept))
        for rank in range(2)
    ]
    for one in own[1:]:  # copies
        one[1].update({name: own[0][1][name] for name in one[1] if own[0][0][name].shape == state[name].shape})
    save(tmp_path, own, stage=stage, more={"args": Namespace(swiglu=gated), "mp_world_size": 2})  # type: ignore[arg-type]

    assert_is(tmp_path, expected(state, kept, stage))
    assert traindiff.weights(state, tmp_path).verdict == "identical"


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("tensor", [1, 2])
def test_stages_of_a_pipeline_are_merged(tmp_path: Path, stage: int, tensor: int) -> None:
    whole = whole_model()
    state = {name: value for name, value in whole.items() if "output_layer" not in name}
    kept = moments(state)
    own = []
    for number in range(2):
        layers = range(number, LAYERS, 2)
        for rank in range(tensor):

            def of_rank(one: State, layers: range = layers, rank: int = rank) -> State:
                return {
                    name: part(name, value, rank, tensor, gated=False)
                    for name, value in one.items()
                    if not (match := re.search(r"layers\.(\d+)", name)) or int(match[1]) in layers
                }

            own.append((of_rank(state), of_rank(kept)))
    save(tmp_path, own, stage=stage)

    assert_is(tmp_path, expected(state, kept, stage))


def test_the_files_of_the_layers_of_a_pipeline_are_the_model(tmp_path: Path) -> None:
    state = {name.replace("decoder.layers.", ""): value for name, value in whole_model().items() if ".layers." in name}
    for rank in range(2):
        torch.save({"module": None, "mp_world_size": 2}, tmp_path / f"mp_rank_{rank:02d}_model_states.pt")
        for layer in range(LAYERS):
            own = {
                name.partition(".")[2]: part(name, value, rank, 2, gated=False)
                for name, value in state.items()
                if name.startswith(f"{layer}.")
            }
            torch.save(own, tmp_path / f"layer_{layer:02d}-model_{rank:02d}-model_states.pt")

    assert_is(tmp_path, state)


def test_cuts_that_the_files_declare_are_followed(tmp_path: Path) -> None:
    state = {
        "model.a.weight": torch.randn(8, 6), "model.b.weight": torch.randn(6, 8), "model.2.c.weight": torch.randn(5),
        "model.both.weight": torch.randn(8, 3),
    }  # fmt: skip
    info = {
        "parameter_with_row_parallelism_patterns": [r"^model\.b\.weight$"],
        "tp_replicated_parameter_patterns": [r"model.\d+.c.weight"],
        "parameter_with_2_sub_params_cat_dim_0": ["model.both.weight"],
    }
    own = []
    for rank in range(2):
        both = torch.cat([half.chunk(2)[rank] for half in state["model.both.weight"].chunk(2)])
        made = {
            **state, "model.a.weight": state["model.a.weight"].chunk(2)[rank],
            "model.b.weight": state["model.b.weight"].chunk(2, 1)[rank], "model.both.weight": both,
        }  # fmt: skip
        own.append((made, made))
    save(tmp_path, own, stage=1, more={"universal_checkpoint_info": info})

    assert traindiff.weights(state, tmp_path).verdict == "identical"
    info["autotp_unsupported_parameter_patterns"] = ["model.a.weight"]
    save(tmp_path, own, stage=1, more={"universal_checkpoint_info": info})
    with pytest.raises(CheckpointError, match=r'"model.a.weight" is cut in a way of its own'):
        open_checkpoint(tmp_path)


def test_names_of_hugging_face_are_cut_as_automatic_tensor_parallelism_cuts_them(tmp_path: Path) -> None:
    state = hugging_face()
    rows, columns = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
    own = []
    for rank in range(2):
        made = {
            name: value.chunk(2)[rank] if any(one in name for one in rows)
            else value.chunk(2, 1)[rank] if any(one in name for one in columns) else value
            for name, value in state.items()
        }  # fmt: skip
        own.append((made, made))
    save(tmp_path, own, stage=1)

    assert traindiff.weights(state, tmp_path).verdict == "identical"


def unknown_cut(here: Path) -> None:
    own = [({"mine.weight": torch.randn(4, 3)},) * 2 for _ in range(2)]
    save(here, own, stage=1)


def a_rank_is_missing(here: Path) -> None:
    own = [({"q_proj.weight": torch.randn(4, 3)},) * 2 for _ in range(2)]
    save(here, own, stage=1, more={"mp_world_size": 3})


def an_optimizer_is_missing(here: Path) -> None:
    own = [({"q_proj.weight": torch.randn(4, 3)},) * 2 for _ in range(2)]
    save(here, own, stage=1)
    for rank in range(2):
        (here / f"zero_pp_rank_{rank}_mp_rank_01_optim_states.pt").unlink()


def a_parameter_is_missing(here: Path) -> None:
    both = {"q_proj.weight": torch.randn(4, 3), "k_proj.weight": torch.randn(4, 3)}
    save(here, [(both, both), (both, both), ({"q_proj.weight": torch.randn(4, 3)},) * 2], stage=1)


def shapes_that_do_not_fit(here: Path) -> None:
    own = [({"q_proj.weight": torch.randn(4, columns)},) * 2 for columns in (3, 5)]
    save(here, own, stage=1)


DAMAGES: Mapping[Callable[[Path], None], str] = {
    unknown_cut: r'mp_rank_01_model_states.pt cannot be read: "mine.weight" is not that of .*how it is cut is not',
    a_rank_is_missing: r"has no file \*mp_rank_02_model_states.pt",
    an_optimizer_is_missing: r"has no file \*mp_rank_01_optim_states.pt",
    a_parameter_is_missing: r'3 of its model-parallel ranks have "q_proj.weight", and 2 have "k_proj',
    shapes_that_do_not_fit: r'the parts of "q_proj.weight" on the tensor ranks do not fit together',
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__.replace("_", " "))
def test_ranks_that_do_not_fit_together_are_refused_with_file_and_key(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    damage(tmp_path)

    with pytest.raises(CheckpointError, match=DAMAGES[damage]):
        open_checkpoint(tmp_path)
