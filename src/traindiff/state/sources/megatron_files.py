"""Megatron's files of each rank, `mp_rank_XX[_YYY][_ZZZ]/model_optim_rng.pt`: cut by tensor, pipeline and expert rank.

The files declare themselves how many ranks there are, and whether layers are gated (`args`). Layers and experts are
numbered on each rank from 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

from traindiff.core.untrusted.demands import quoted
from traindiff.core.untrusted.folder import Folder
from traindiff.state.sources.pickles import Record
from traindiff.state.sources.tensor_ranks import by_name, over_ranks
from traindiff.state.sources.torch_files import TorchFile, archive_of, named_tensors
from traindiff.state.stored import StoredTensor, unreadable

_DIRECTORY = re.compile(r"mp_rank_(\d{2,6})(?:_(\d{3,6}))?(?:_(\d{3,6}))?", re.ASCII)
_FILES = ("model_optim_rng.pt", "model_rng.pt")
_LATEST = "latest_checkpointed_iteration.txt"
_MOST_LATEST_BYTES = 1 << 10
_CHUNK = re.compile(r"model\d{0,4}", re.ASCII)

_LAYER = re.compile(r"((?:.*\.)?layers\.)(\d{1,9})(\..+)", re.ASCII)
_EXPERT = re.compile(
    r"((?:.*\.)?(?:local_experts\.|experts\.linear_fc[12]\.(?:weight|bias)))(\d{1,9})((?:\..+)?)", re.ASCII
)

Tensors = dict[str, StoredTensor]


def latest_of(folder: Folder) -> Folder | None:
    """The directory of the iteration that Megatron's file names; None without such a file.

    Raises:
        CheckpointError: It names a directory that is not there.
    """
    if not folder.exists(_LATEST):
        return None
    text = folder.read(_LATEST, limit=_MOST_LATEST_BYTES).decode(errors="replace").strip()
    name = f"iter_{int(text):07d}" if text.isascii() and text.isdigit() and len(text) < 16 else text
    if not name or not folder.exists(name):
        raise unreadable(folder.path(_LATEST), f"it names the iteration {quoted(text)}, whose directory is not there")
    return folder.within(name)


def is_of_ranks(folder: Folder) -> bool:
    """True if a directory holds the directories of Megatron's ranks."""
    return any(_DIRECTORY.fullmatch(name) for name in folder.names())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Declared:
    """How many ranks there are along each axis, and whether the first linear layers are gate and up in one."""

    tensor: int
    pipeline: int
    expert: int
    is_gated: bool


def of_directory(folder: Folder) -> tuple[Tensors, list[str]]:
    """The parameters of the whole model, by the names that they have on a single rank, and notes.

    Raises:
        CheckpointError: A file is missing or damaged, or the ranks do not fit together.
    """
    archives, declared = _archives(folder)
    notes = [
        "Of Megatron's files, only the model is compared: what the optimizer keeps, in them or in distrib_optim.pt, "
        "has numbers or lies in flat buffers, without the parameters' names."
    ]
    chunks = {place: list(_chunks(archive)) for place, archive in archives.items()}
    found: Tensors = {}
    passed: dict[str, int] = {}
    for chunk in range(max(map(len, chunks.values()))):
        for stage in range(declared.pipeline):
            held: dict[int, list[tuple[str, Tensors]]] = {}
            for (tensor, pipeline, expert), content in chunks.items():
                if pipeline == stage and chunk < len(content):
                    held.setdefault(expert, []).append((archives[tensor, pipeline, expert].where, content[chunk]))
            whole = _of_stage(held, declared, notes)
            layers: dict[str, int] = {}
            for name, one in whole.items():
                own, prefix, number = _renumbered(_LAYER, name, passed)
                if prefix:
                    layers[prefix] = max(layers.get(prefix, 0), number + 1)
                found.setdefault(own, replace(one, name=own))
            passed = {prefix: passed.get(prefix, 0) + layers.get(prefix, 0) for prefix in passed | layers}
    return found, notes


def _renumbered(pattern: re.Pattern[str], name: str, passed: Mapping[str, int]) -> tuple[str, str, int]:
    """A name with its number after those that have passed, the name before the number, and the number; or itself."""
    match = pattern.fullmatch(name)
    if match is None:
        return name, "", 0
    number = int(match[2])
    return f"{match[1]}{number + passed.get(match[1], 0)}{match[3]}", match[1], number


Place3 = tuple[int, int, int]
"""Tensor, pipeline and expert rank."""


def _archives(folder: Folder) -> tuple[dict[Place3, TorchFile], _Declared]:
    """The files of all ranks, and what the first one declares.

    Raises:
        CheckpointError: A rank's file is missing.
    """
    names = [match for name in folder.names() if (match := _DIRECTORY.fullmatch(name))]
    read = {match[0]: _archive(folder, match[0]) for match in names}
    declared = _declared(next(iter(read.values())).value, names)
    found: dict[Place3, TorchFile] = {}
    for match in names:
        first, second = int(match[2] or 0), int(match[3] or 0)
        alone = match[3] is None and declared.pipeline == 1 and declared.expert > 1
        found[int(match[1]), 0 if alone else first, first if alone else second] = read[match[0]]
    counts = declared.tensor, declared.pipeline, declared.expert
    if len(found) != prod(counts) or any(
        one >= count for place in found for one, count in zip(place, counts, strict=True)
    ):
        missing = next((place for place in product(*map(range, counts)) if place not in found), None)
        which = (
            ""
            if missing is None
            else "; that of tensor rank {}, pipeline rank {}, expert rank {} is missing".format(*missing)
        )
        told = f"{counts[0]} tensor, {counts[1]} pipeline and {counts[2]} expert ranks have saved it"
        raise unreadable(folder.root, f"its files say that {told}, and there are files of {len(found)} ranks{which}")
    return found, declared


def _archive(folder: Folder, name: str) -> TorchFile:
    inner = folder.within(name)
    file = next((one for one in _FILES if inner.exists(one)), None)
    if file is None:
        raise unreadable(inner.root, f"it has no file {_FILES[0]}")
    return archive_of(inner, file)


def _declared(content: Any, names: Sequence[re.Match[str]]) -> _Declared:
    """What a file says in its `args`; without them, as many ranks as there are directories."""
    args = content.get("args") if isinstance(content, Mapping) else None
    said = args.state if isinstance(args, Record) and isinstance(args.state, dict) else {}

    def count(name: str, group: int) -> int:
        value = said.get(name)
        return value if type(value) is int and value > 0 else 1 + max(int(match[group] or 0) for match in names)

    known = bool(said)
    return _Declared(
        tensor=count("tensor_model_parallel_size", 1), pipeline=count("pipeline_model_parallel_size", 2),
        expert=count("expert_model_parallel_size", 3) if known else 1 + max(int(match[3] or 0) for match in names),
        is_gated=bool(said.get("swiglu")),
    )  # fmt: skip


def _chunks(archive: TorchFile) -> Iterator[Tensors]:
    """The parameters of each part of the model that a rank has: one, or several of an interleaved pipeline.

    Raises:
        CheckpointError: It holds no model.
    """
    content = archive.value if isinstance(archive.value, Mapping) else {}
    keys = [key for key in content if isinstance(key, str) and _CHUNK.fullmatch(key)]
    if not keys:
        raise unreadable(archive.where, 'it has no "model"')
    for key in sorted(keys, key=lambda key: int(key.removeprefix("model") or 0)):
        tensors = named_tensors({"model": content[key]}, archive.where, archive.tensor)
        yield {name: one for name, one in tensors.items() if not name.endswith("_extra_state")}


def _of_stage(held: Mapping[int, Sequence[tuple[str, Tensors]]], declared: _Declared, notes: list[str]) -> Tensors:
    """The parameters of a stage of the pipeline, merged over tensor and expert ranks.

    Args:
        held: By expert rank: of each tensor rank, its file and its parameters.
        declared: What the files declare.
        notes: Gets warnings.
    """
    found: Tensors = {}
    passed: dict[str, int] = {}
    for _, ranks in sorted(held.items()):
        experts: dict[str, int] = {}
        for name, one in _over_tensor_ranks(ranks, declared, notes).items():
            own, prefix, number = _renumbered(_EXPERT, name, passed)
            if prefix:
                experts[prefix] = max(experts.get(prefix, 0), number + 1)
            found.setdefault(own, one)
        passed = {prefix: passed.get(prefix, 0) + experts.get(prefix, 0) for prefix in passed | experts}
    return found


def _over_tensor_ranks(ranks: Sequence[tuple[str, Tensors]], declared: _Declared, notes: list[str]) -> Tensors:
    """The parameters of one expert rank, merged over tensor ranks.

    Raises:
        CheckpointError: A tensor rank lacks a parameter, or it is not known how one is cut.
    """
    (first_file, first), *others = ranks
    found: Tensors = {}
    for name, one in first.items():
        parts = [one]
        for file, tensors in others:
            if name not in tensors:
                raise unreadable(file, f"it lacks {quoted(name)}, which {first_file} has")
            parts.append(tensors[name])
        found[name] = over_ranks(
            name, parts, [file for file, _ in ranks], by_name(name, gated=declared.is_gated), notes
        )
    return found
