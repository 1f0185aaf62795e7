"""Experts of DeepSpeed's MoE layers, each in a file of its own: `layer_L_expert_E_mp_rank_00_model_states.pt`.

`DeepSpeedEngine._save_moe_checkpoint` writes them. L counts the MoE layers of the model, and E the experts of a layer
over all expert ranks; names in the files have E, too. With ZeRO, the partitions of experts are those of other ranks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from traindiff.core.untrusted.demands import quoted
from traindiff.core.untrusted.folder import Folder
from traindiff.state.sources.torch_files import archive_of, named_tensors
from traindiff.state.stored import StoredTensor, unreadable

EXPERT = re.compile(r"layer_(\d{1,6})_expert_(\d{1,6})_mp_rank_00_model_states\.pt", re.ASCII)
"""Names of the files of experts."""

OPTIMIZER = re.compile(r"expp_rank_\d{1,6}_mp_rank_00_optim_states\.pt", re.ASCII)
"""Names of the files with what the optimizer keeps, by expert rank."""

NOT_NAMED = (
    "Of a checkpoint with files of experts, only the model is compared: what the optimizer keeps has no names there."
)

Tensors = dict[str, StoredTensor]


def with_experts(folder: Folder, content: Mapping[Any, Any], tensors: Tensors) -> Tensors:
    """The parameters and buffers of a model, with those of its experts.

    Args:
        folder: The directory.
        content: What the file of the other parameters holds.
        tensors: Its tensors.

    Raises:
        CheckpointError: The file of an expert is missing, damaged, or holds other parameters.
    """
    names = {(int(match[1]), int(match[2])): match[0] for match in map(EXPERT.fullmatch, folder.names()) if match}
    _check_complete(folder, content.get("num_experts"), names)
    found = {name: one for name, one in tensors.items() if one.role != "optimizer"}
    for (_, expert), name in sorted(names.items()):
        archive = archive_of(folder, name)
        own = named_tensors({"module": archive.value}, archive.where, archive.tensor)
        for key, one in own.items():
            if f".deepspeed_moe.experts.deepspeed_experts.{expert}." not in key or key in found:
                raise unreadable(archive.where, f"its tensor {quoted(key)} is none of expert {expert} alone")
            found[key] = one
    return found


def _check_complete(folder: Folder, counts: Any, names: Mapping[tuple[int, int], str]) -> None:
    if not isinstance(counts, list) or not all(type(one) is int and 0 < one <= len(names) for one in counts):
        raise unreadable(folder.root, f"it does not say how many experts there are, or has files of {len(names)} only")
    for layer, count in enumerate(counts):
        for expert in range(count):
            if (layer, expert) not in names:
                raise unreadable(
                    folder.root, f"it has no file layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt"
                )
    if sum(counts) != len(names):
        raise unreadable(folder.root, f"it has {sum(counts)} experts, and files of {len(names)}")
