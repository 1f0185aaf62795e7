"""DeepSpeed's directories: one model from the files of all model-parallel ranks, which share it by tensor and pipeline.

`mp_rank_XX_model_states.pt` has the module of a rank, and with ZeRO, partitions of it lie beside it
(`zero_checkpoints.py`). Experts have files of their own (`expert_files.py`). A pipeline has a file for each layer,
`layer_XX-model_YY-model_states.pt`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from traindiff.core.untrusted.demands import quoted
from traindiff.core.untrusted.folder import Folder
from traindiff.errors import CheckpointError
from traindiff.state.sources.expert_files import EXPERT, NOT_NAMED, OPTIMIZER, with_experts
from traindiff.state.sources.tensor_ranks import Cut, Rule, by_name, declared_rule, over_ranks
from traindiff.state.sources.torch_files import archive_of, named_tensors
from traindiff.state.sources.zero_checkpoints import MOST_RANKS, of_partitions
from traindiff.state.stored import StoredTensor, unreadable

_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d{1,9})_mp_rank_(\d{2,5})_optim_states\.pt", re.ASCII)
_MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,9})_)?mp_rank_(\d{2,5})_model_states\.pt", re.ASCII)
_LAYER = re.compile(r"layer_(\d{2,6})-model_(\d{2,5})-model_states\.pt", re.ASCII)
_KNOWN = _OPTIMIZER, _MODEL, _LAYER

_ANY_STATES = "_states.pt"
"""How names end of all files with tensors that DeepSpeed writes."""

_MOST_TAG_BYTES = 1 << 10

_OF_ZERO = "optimizer.state."
_NOT_NAMED = (
    "Of several model-parallel ranks without ZeRO, only the model is compared: "
    "what the optimizer keeps has no names there."
)
_TIED = Cut(dim=None, is_certain=False)
"""A parameter that several stages of a pipeline have is the same in all of them."""

Tensors = dict[str, StoredTensor]


def directory_of(folder: Folder) -> Folder | None:
    """The directory with the files of the ranks: this one, or the one that its file `latest` names. None if neither is.

    Raises:
        CheckpointError: `latest` names a directory without such files.
    """
    if _is_of_ranks(folder):
        return folder
    if not folder.exists("latest"):
        return None
    tag = folder.read("latest", limit=_MOST_TAG_BYTES).decode(errors="replace").strip()
    if not tag or not folder.exists(tag):
        raise unreadable(folder.path("latest"), f"it names the directory {quoted(tag)}, which is not there")
    inner = folder.within(tag)
    return inner if _is_of_ranks(inner) else None


def _is_of_ranks(folder: Folder) -> bool:
    return any(_OPTIMIZER.fullmatch(name) or _MODEL.fullmatch(name) for name in folder.names())


def of_directory(folder: Folder) -> tuple[Tensors, list[str]]:
    """The tensors of a checkpoint, by name: parameters, buffers, and what the optimizer keeps of them; and notes.

    With ZeRO, parameters are those of the optimizer, in float32. Without it, they are as the module has them.

    Raises:
        CheckpointError: A rank's file is missing or damaged, what the ranks hold does not fit together, or there are
            files of states that are not read.
    """
    optimizers, models = _by_rank(folder, _OPTIMIZER), _by_rank(folder, _MODEL)
    has_experts = any(EXPERT.fullmatch(name) for name in folder.names())
    reads_experts = has_experts and not optimizers and [*models] == [0]
    _check_all_known(folder, (*_KNOWN, EXPERT, OPTIMIZER) if reads_experts else _KNOWN)
    if not models:
        raise unreadable(folder.root, "it has no file *_model_states.pt")
    first = archive_of(folder, min(models[min(models)].values()))
    content = first.value if isinstance(first.value, Mapping) else {}
    _check_complete(folder, content, optimizers, models)
    if reads_experts:
        return with_experts(folder, content, _of_rank(folder, {}, models[0])), [NOT_NAMED]
    layers = _layers(folder) if content.get("module") is None and not optimizers else []
    ranks = layers or [
        (folder.path(min(files.values())), _of_rank(folder, optimizers.get(number, {}), files))
        for number, files in models.items()
    ]
    notes: list[str] = []
    rule = declared_rule(content, first.where) or partial(by_name, gated=_is_gated(content))
    return (_merged(folder, ranks, rule, notes) if len(ranks) > 1 else ranks[0][1]), notes


def _check_all_known(folder: Folder, patterns: Sequence[re.Pattern[str]]) -> None:
    """Refuse a directory with states that no other function here reads: a part of the model would not be compared.

    Raises:
        CheckpointError: There is such a file, e.g. of an expert.
    """
    for name in folder.names():
        if name.endswith(_ANY_STATES) and not any(pattern.fullmatch(name) for pattern in patterns):
            what = "an expert's file" if "expert" in name or name.startswith("expp_") else "a file of states"
            raise CheckpointError(
                f"{folder.path(name)} is {what} of a kind that traindiff does not read, so a part of the model would "
                "not be compared. Load the checkpoint with DeepSpeed, save the state dict of each rank's module with "
                "torch.save, and compare these files."
            )


def _check_complete(
    folder: Folder, content: Mapping[Any, Any], optimizers: Mapping[int, object], models: Mapping[int, object]
) -> None:
    said = content.get("mp_world_size")
    count = said if type(said) is int and 0 < said <= MOST_RANKS else 1
    for number in range(max(count, *(one + 1 for one in (*models, *optimizers)))):
        for files, end in ((models, "model_states"), (optimizers, "optim_states")):
            if number not in files and (files is models or optimizers):
                what = f"it is of several model-parallel ranks, and has no file *mp_rank_{number:02d}_{end}.pt"
                raise unreadable(folder.root, what)


def _by_rank(folder: Folder, pattern: re.Pattern[str]) -> dict[int, dict[int, str]]:
    """Files by model-parallel rank, and then by data-parallel rank; both ascending."""
    found: dict[int, dict[int, str]] = {}
    for name in folder.names():
        match = pattern.fullmatch(name)
        if match:
            found.setdefault(int(match[2]), {})[int(match[1] or 0)] = name
    return {number: dict(sorted(files.items())) for number, files in sorted(found.items())}


def _of_rank(folder: Folder, optimizers: Mapping[int, str], models: Mapping[int, str]) -> Tensors:
    """The tensors of one model-parallel rank.

    Raises:
        CheckpointError: A file is missing or damaged, or ZeRO has written it, and its partitions are missing.
    """
    if optimizers:
        return of_partitions(folder, optimizers, models)
    archive = archive_of(folder, min(models.values()))
    if not isinstance(archive.value, Mapping):
        raise unreadable(archive.where, "it holds no dict")
    if archive.value.get("param_shapes"):
        raise unreadable(archive.where, "it is of ZeRO, and the files *_optim_states.pt beside it are missing")
    return named_tensors(archive.value, archive.where, archive.tensor)


def _layers(folder: Folder) -> list[tuple[str, Tensors]]:
    """The layers of a pipeline, by tensor rank: a file of each rank, and its tensors."""
    found: dict[int, tuple[str, Tensors]] = {}
    for name in folder.names():
        match = _LAYER.fullmatch(name)
        if match:
            archive = archive_of(folder, name)
            own = named_tensors({"module": {match[1].lstrip("0") or "0": archive.value}}, archive.where, archive.tensor)
            found.setdefault(int(match[2]), (archive.where, {}))[1].update(own)
    return [found[number] for number in sorted(found)]


def _is_gated(content: Mapping[Any, Any]) -> bool:
    """Whether the first linear layers are gate and up in one, as Megatron's arguments say."""
    args = getattr(content.get("args"), "state", None)
    return bool(args.get("swiglu")) if isinstance(args, dict) else False


def _merged(folder: Folder, ranks: Sequence[tuple[str, Tensors]], rule: Rule, notes: list[str]) -> Tensors:
    """One model from what model-parallel ranks hold: its stages by pipeline, and the parts of each by tensor.

    Tensor ranks come one after the other in each stage. A parameter that several stages have is tied.

    Raises:
        CheckpointError: It is not known how a parameter is cut, or its parts do not fit together.
    """
    holders: dict[str, list[int]] = {}
    for number, (_, tensors) in enumerate(ranks):
        for name, one in tensors.items():
            if one.role == "parameter" or name.startswith(_OF_ZERO):
                holders.setdefault(name, []).append(number)
            elif one.role == "optimizer" and _NOT_NAMED not in notes:
                notes.append(_NOT_NAMED)
    count = min(map(len, holders.values()), default=1)
    found: Tensors = {}
    for name, held in holders.items():
        firsts = range(0, len(held), count)
        if len(held) % count or any(held[first] + count - 1 != held[first + count - 1] for first in firsts):
            fewest = min(holders, key=lambda other: len(holders[other]))
            what = f"{len(held)} of its model-parallel ranks have {quoted(name)}, and {count} have {quoted(fewest)}"
            raise unreadable(folder.root, f"{what}: one is missing")
        stages = []
        for first in firsts:
            own = [ranks[number] for number in held[first : first + count]]
            parts, files = [tensors[name] for _, tensors in own], [file for file, _ in own]
            stages.append((over_ranks(name, parts, files, rule(_parameter(name, parts[0])), notes), files[0]))
        found[name] = over_ranks(name, [one for one, _ in stages], [file for _, file in stages], _TIED, notes)
    return found


def _parameter(name: str, tensor: StoredTensor) -> str:
    """The parameter that a tensor of the optimizer's state is of; the name of any other tensor."""
    return name.removeprefix(_OF_ZERO).rpartition(".")[0] if tensor.role == "optimizer" else name
