"""DeepSpeed ZeRO checkpoints, written as DeepSpeed writes them, are what `zero_to_fp32` makes of them."""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import traindiff
from traindiff.errors import CheckpointError
from traindiff.state.sources.opening import open_checkpoint

SHAPES = {"first.weight": (7, 5), "first.bias": (7,), "second.weight": (3, 7), "scale": ()}
FROZEN = {"table.weight": (4, 3)}


class ZeroStageEnum(int, Enum):
    """As DeepSpeed has it, whose files name its class."""

    optimizer_states = 1
    gradients = 2
    weights = 3


ZeroStageEnum.__module__ = "deepspeed.runtime.zero.config"


def write(content: Any, file: Path) -> None:
    """Save what may have DeepSpeed's class in it, which need not be installed."""
    there = ModuleType(ZeroStageEnum.__module__)
    there.ZeroStageEnum = ZeroStageEnum  # type: ignore[attr-defined]
    parents = {name: ModuleType(name) for name in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.zero")}
    with patch.dict(sys.modules, {**parents, ZeroStageEnum.__module__: there}):
        torch.save(content, file)


def parameters() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in {**SHAPES, **FROZEN}.items()}


def pieces(value: Tensor, ranks: int) -> list[Tensor]:
    """Equal parts of a tensor, the last one padded."""
    each = math.ceil(value.numel() / ranks)
    padded = torch.cat([value.reshape(-1), torch.zeros(each * ranks - value.numel())])
    return list(padded.split(each))


def save(
    here: Path, *, stage: int, ranks: int, change: Callable[[int, dict[str, Any]], object] = lambda _, __: None
) -> dict[str, Tensor]:
    """Write a checkpoint with two parameter groups; returns its parameters.

    `change` is given the number of each rank, and what its optimizer keeps.
    """
    state = parameters()
    groups = [list(SHAPES)[:2], list(SHAPES)[2:]]
    shapes = [OrderedDict((name, torch.Size(SHAPES[name])) for name in group) for group in groups]
    moments = {name: torch.randn(SHAPES[name]) for name in SHAPES}
    buffers = {"norm.running_mean": torch.randn(3)}
    directory = here / "global_step3"
    directory.mkdir(parents=True)
    (here / "latest").write_text("global_step3")

    def flat(values: dict[str, Tensor], group: list[str], rank: int) -> Tensor:
        if stage == 3:
            return torch.cat([pieces(values[name], ranks)[rank] for name in group])
        whole = torch.cat([values[name].reshape(-1) for name in group])
        align = 2 * ranks
        whole = torch.cat([whole, torch.zeros(-len(whole) % align)])
        return whole.chunk(ranks)[rank].clone()

    for rank in range(ranks):
        states = {number: {"exp_avg": flat(moments, group, rank)} for number, group in enumerate(groups)}
        content: dict[str, Any] = {
            "zero_stage": ZeroStageEnum(stage),
            "partition_count": ranks if stage == 3 else [ranks] * len(groups),
            "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups": [
                flat(state, group, rank) for group in groups
            ],
        }
        if stage == 3:
            content["optimizer_state_dict"] = {"state": states}
        else:
            content["base_optimizer_state"] = {"state": states}
        change(rank, content)
        write(
            {"optimizer_state_dict": content, "ds_version": "0.19.6"},
            directory / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )
        model = {
            "module": buffers, "buffer_names": list(buffers), "param_shapes": shapes, "ds_version": "0.19.6",
            "shared_params": {"head.weight": "second.weight"}, "frozen_param_shapes": FROZEN_SHAPES,
            "frozen_param_fragments": {
                name: pieces(state[name], ranks)[rank] if stage == 3 else state[name] for name in FROZEN
            },
        }  # fmt: skip
        if stage == 3 or rank == 0:
            name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
            torch.save(model, directory / name)
    return {
        **state, **buffers, "head.weight": state["second.weight"],
        **{f"optimizer.state.{name}.exp_avg": value for name, value in moments.items()},
    }  # fmt: skip


FROZEN_SHAPES = OrderedDict((name, torch.Size(shape)) for name, shape in FROZEN.items())


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_the_partitions_of_all_ranks_are_merged(tmp_path: Path, stage: int, ranks: int) -> None:
    saved = save(tmp_path, stage=stage, ranks=ranks)

    for path in (tmp_path, tmp_path / "global_step3"):
        found = open_checkpoint(path).tensors
        assert found.keys() == saved.keys()
        for name, value in saved.items():
            assert found[name].shape == value.shape
            got = b"".join(found[name].slab(*slab).tobytes() for slab in found[name].slabs)
            assert got == value.contiguous().numpy().tobytes(), name


@pytest.mark.deepspeed
@pytest.mark.parametrize("stage", [2, 3])
def test_they_are_what_deepspeed_itself_makes_of_them(tmp_path: Path, stage: int) -> None:
    script = pytest.importorskip("deepspeed.utils.zero_to_fp32")
    save(tmp_path, stage=stage, ranks=2)

    result = traindiff.weights(dict(script.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))), tmp_path)
    assert result.verdict == "identical"


def test_checkpoints_of_two_stages_and_rank_counts_are_identical(tmp_path: Path) -> None:
    save(tmp_path / "a", stage=2, ranks=2)
    save(tmp_path / "b", stage=3, ranks=3)

    assert traindiff.weights(tmp_path / "a", tmp_path / "b").verdict == "identical"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("zero_pp_rank_1_mp_rank_00_optim_states.pt", "says that 2 ranks have saved it.*that of rank 1 is missing"),
        ("mp_rank_00_model_states.pt", r"has no file \*_model_states.pt"),
        ("*_optim_states.pt", r"is of ZeRO, and the files \*_optim_states.pt beside it are missing"),
    ],
)
def test_a_missing_file_of_a_rank_is_named(tmp_path: Path, name: str, words: str) -> None:
    save(tmp_path, stage=2, ranks=2)
    for file in (tmp_path / "global_step3").glob(name):
        file.unlink()

    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(tmp_path)


def test_a_partition_that_is_too_short_is_named_with_the_parameter(tmp_path: Path) -> None:
    def shortened(rank: int, content: dict[str, Any]) -> None:
        if rank == 1:
            content["fp32_flat_groups"][1] = torch.zeros(3)

    save(tmp_path, stage=3, ranks=2, change=shortened)

    with pytest.raises(CheckpointError, match=r'rank 1 ends before "second\.weight" does'):
        open_checkpoint(tmp_path)


def test_older_files_have_the_stage_as_a_number(tmp_path: Path) -> None:
    saved = save(tmp_path, stage=2, ranks=2, change=lambda _, content: content.update(zero_stage=2))

    assert open_checkpoint(tmp_path).tensors.keys() == saved.keys()


def test_parameters_that_are_not_trained_are_read_where_only_the_module_has_them(tmp_path: Path) -> None:
    saved = save(tmp_path, stage=1, ranks=2)
    file = tmp_path / "global_step3" / "mp_rank_00_model_states.pt"
    content = torch.load(file)
    content |= {"frozen_param_shapes": None, "frozen_param_fragments": None}
    content["module"] |= {**{name: saved[name].bfloat16() for name in SHAPES}, **{name: saved[name] for name in FROZEN}}
    torch.save(content, file)

    assert traindiff.weights(saved, tmp_path).verdict == "identical"


def test_without_zero_the_module_is_whole(tmp_path: Path) -> None:
    state = parameters()
    optimizer = {"state": {0: {"exp_avg": torch.ones(3)}}}
    (tmp_path / "global_step3").mkdir()
    (tmp_path / "latest").write_text("global_step3")
    torch.save(
        {"module": state, "param_shapes": None, "optimizer": optimizer},
        tmp_path / "global_step3" / "mp_rank_00_model_states.pt",
    )

    found = open_checkpoint(tmp_path)

    assert found.kind == "DeepSpeed"
    assert found.tensors.keys() == {*state, "optimizer.state[0].exp_avg"}
    assert traindiff.weights(state, tmp_path).verdict == "identical"
