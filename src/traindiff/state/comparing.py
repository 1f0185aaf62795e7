"""Compare two checkpoints: `weights`."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from traindiff.core.maps.accepted import accepted_of
from traindiff.core.maps.shipped import map_of
from traindiff.core.untrusted.demands import quoted
from traindiff.errors import CheckpointError
from traindiff.state.accepted import with_accepted
from traindiff.state.adapters import merged_adapters
from traindiff.state.comparison import Relation, WeightsComparison
from traindiff.state.dtypes import shorter
from traindiff.state.equal_bits import Equality, can_be_equal, equalities
from traindiff.state.held_parts import cut_to_held
from traindiff.state.layer_order import moved_sentences
from traindiff.state.maps import mapped
from traindiff.state.matching import Matching
from traindiff.state.measured import Measured, measure, same_bits
from traindiff.state.pairing import under_plain_names
from traindiff.state.seals import check_seals
from traindiff.state.sources.opening import open_checkpoint
from traindiff.state.stored import Checkpoint, Role, StoredTensor

ROLES: Sequence[Role] = ("parameter", "optimizer", "other")

Progress = Callable[[int, int], None]
"""Is told how many bytes of how many have been read."""


def weights(
    baseline: Any,
    candidate: Any,
    *,
    base: Any = None,
    map: str | os.PathLike[str] | None = None,  # noqa: A002  as the option of the command
    accept: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> WeightsComparison:
    """Whether two checkpoints hold the same model, and if not, which tensors differ and how.

    Files are read as data: no code in them runs. Memory holds a few slabs of 4 MiB, whatever the size of the model.

    Args:
        baseline: Path or fsspec URL of a file or directory of saved weights (safetensors, torch.save, a Hugging Face
            directory, torch.distributed.checkpoint, DeepSpeed, Megatron) or of a recording, a model, or a state dict.
        candidate: What is compared with it, likewise.
        base: A third set, e.g. the model before fine-tuning: tensors of the candidate that are still its are named.
        map: File that says which tensors of the two are which, and in which layout, or the name of a map that
            traindiff has (traindiff explain maps).
        accept: File of intended differences, which are listed and not judged (traindiff explain maps).
        progress: Is called with the number of bytes that have been read, and of all.

    Returns:
        The comparison, with `verdict` and `relations`.

    Raises:
        CheckpointError: A source cannot be read, or the two have nothing in common. The message names file and key.
        ConfigError: A URL cannot be reached, or `map` or `accept` cannot be used.
        RecordingError: A recording is damaged.
    """
    entries = map_of(map, elements=True)
    accepted = accepted_of(accept)
    sides = (open_checkpoint(baseline), open_checkpoint(candidate))
    third = None if base is None else open_checkpoint(base)
    notes = [*sides[0].notes, *sides[1].notes]
    if entries:
        first, second, unused = mapped(entries, sides[0].tensors, sides[1].tensors)
        sides = (replace(sides[0], tensors=first), replace(sides[1], tensors=second))
        notes += unused
    relations: list[Relation] = []
    counter = _Counter(progress, sides)
    for role in ROLES:
        first, second = _of_role(sides[0], role), _of_role(sides[1], role)
        if not first or not second:
            notes += _one_sided(role, first, second)
            continue
        if role == "parameter" and not any(one.held for one in (*first.values(), *second.values())):
            of_base = {} if third is None else _of_role(third, role)
            scales = sides[0].adapter_scale, sides[1].adapter_scale
            first, second, found = merged_adapters(first, second, of_base, scales)
            relations += found
            if not first or not second:
                continue
        named = under_plain_names(first, second)
        notes += [named[2]] if named[2] else []
        baseline_named = {named[0][name]: tensor for name, tensor in first.items()}
        candidate_named = {named[1][name]: tensor for name, tensor in second.items()}
        baseline_named, candidate_named, found, told = cut_to_held(baseline_named, candidate_named)
        relations += found
        notes += told
        equal = _equal(baseline_named, candidate_named, counter)
        measured = _measured(baseline_named, candidate_named, equal, counter)
        relations += Matching(role, *measured, equal, counter).relations()
    if not any(one.baseline and one.candidate for one in relations):
        raise CheckpointError(_nothing_in_common(*sides))
    unlike = [one for one in relations if one.word in ("differs", "only")]
    for side, held in zip(sides, ([one.baseline for one in unlike], [one.candidate for one in unlike]), strict=True):
        own = {tensor.name: tensor for tensor in side.tensors.values()}  # a map has other keys
        check_seals(own, list(dict.fromkeys(chain.from_iterable(held))))
    if third is not None:
        relations = _still_of_base(relations, sides[1], third)
        if not any(_in_base(one, third) for one in relations):
            notes.append(f"Warning: {third.path} (--base) has no tensor of a name that the two have.")
    sentences = (*moved_sentences(relations), *_base_sentences(relations, third))
    relations = with_accepted(relations, accepted)
    return WeightsComparison(
        baseline=sides[0].path,
        candidate=sides[1].path,
        kinds=(sides[0].kind, sides[1].kind),
        relations=tuple(relations),
        sentences=sentences,
        notes=(*notes, *accepted.unused()),
        num_bytes=counter.done,
    )


class _Counter:
    """Adds up what has been read."""

    def __init__(self, progress: Progress | None, sides: Sequence[Checkpoint]) -> None:
        self._progress = progress
        self._total = sum(one.num_bytes for side in sides for one in side.tensors.values() if one.is_readable)
        self.done = 0

    def __call__(self, count: int, more: int = 0) -> None:
        self.done += count
        self._total += more
        if self._progress is not None:
            self._progress(min(self.done, self._total), self._total)


def _of_role(side: Checkpoint, role: Role) -> dict[str, StoredTensor]:
    return {name: tensor for name, tensor in side.tensors.items() if tensor.role == role}


def _one_sided(role: Role, baseline: Mapping[str, Any], candidate: Mapping[str, Any]) -> list[str]:
    count = len(baseline) + len(candidate)
    if not count or role == "parameter":
        return []
    what = "of the optimizer's state" if role == "optimizer" else "beside the model"
    return [f"Only the {'baseline' if baseline else 'candidate'} has tensors {what} ({count}); they are not compared."]


def _equal(
    baseline: Mapping[str, StoredTensor], candidate: Mapping[str, StoredTensor], counter: _Counter
) -> dict[str, Equality]:
    """The tensors that have the same bits as the other side's of the same name."""
    both = [name for name in baseline if name in candidate and can_be_equal(baseline[name], candidate[name])]
    found = equalities([(baseline[name], candidate[name]) for name in both], counter)
    return {name: one for name, one in zip(both, found, strict=True) if one != "unequal"}


def _measured(
    baseline: Mapping[str, StoredTensor],
    candidate: Mapping[str, StoredTensor],
    equal: Collection[str],
    counter: _Counter,
) -> tuple[dict[str, Measured], dict[str, Measured]]:
    """Both sides with summaries, by the names by which they are paired.

    Tensors that are equal get none, unless another one has their shape and no equal: it may hold what they hold.
    """
    open_shapes = {one.shape for side in (baseline, candidate) for name, one in side.items() if name not in equal}
    found = []
    for own, other in ((baseline, candidate), (candidate, baseline)):
        alone = sorted({tensor.dtype for name, tensor in other.items() if name not in own})
        wanted = []
        for name, tensor in own.items():
            if name in equal and tensor.shape not in open_shapes:
                continue
            same = other.get(name)
            dtypes = [same.dtype] if same is not None and same.shape == tensor.shape else [*alone]
            if same is not None and same.dtype not in dtypes:
                dtypes.append(same.dtype)
            wanted.append((name, [dtype for dtype in shorter(tensor.dtype) if dtype in dtypes]))
        again = (name for name, _ in wanted if name in other and can_be_equal(own[name], other[name]))
        counter(0, sum(own[name].num_bytes for name in again))
        made = measure([(own[name], dtypes) for name, dtypes in wanted], counter)
        by_name = {name: one for (name, _), one in zip(wanted, made, strict=True)}
        found.append({name: by_name.get(name) or Measured(tensor=one, summaries={}) for name, one in own.items()})
    return found[0], found[1]


def _nothing_in_common(baseline: Checkpoint, candidate: Checkpoint) -> str:
    shown = [
        f"{side.path} ({side.kind}) has {', '.join(quoted(name) for name in list(side.tensors)[:3])}"
        f"{f' and {len(side.tensors) - 3} more' if len(side.tensors) > 3 else ''}"
        for side in (baseline, candidate)
    ]
    return (
        f"the two have no tensor in common, neither by name nor by contents: {shown[0]}; {shown[1]}. Give two "
        "checkpoints of one model, or say with a map which tensor is which (traindiff explain weights.md)."
    )


def _still_of_base(relations: Sequence[Relation], candidate: Checkpoint, base: Checkpoint) -> list[Relation]:
    """The relations, of which those say so where the candidate's tensor is that of the base."""
    by_name = {tensor.name: tensor for tensor in candidate.tensors.values()}  # a map has other keys
    asked = [
        (number, by_name[one.candidate[0]], base.tensors[name])
        for number, one in enumerate(relations)
        if one.word == "differs"
        and one.kind != "not-merged"
        and one.candidate
        and (name := _in_base(one, base)) is not None
    ]
    found = list(relations)
    own = measure([(tensor, shorter(tensor.dtype)) for _, tensor, _ in asked])
    others = measure([(tensor, shorter(tensor.dtype)) for _, _, tensor in asked])
    for (number, _, _), first, second in zip(asked, others, own, strict=True):
        if same_bits(first, second):
            one = found[number]
            found[number] = Relation(
                word="differs", kind="base", role=one.role, baseline=one.baseline, candidate=one.candidate,
                message="is still the base's", evidence=one.evidence,
            )  # fmt: skip
    return found


def _in_base(relation: Relation, base: Checkpoint) -> str | None:
    names = (*relation.candidate, *relation.baseline)
    return next((name for name in names if name in base.tensors), None)


def _base_sentences(relations: Sequence[Relation], base: Checkpoint | None) -> list[str]:
    count = sum(one.kind == "base" for one in relations)
    if base is None or not count:
        return []
    others = sum(one.word == "differs" for one in relations) - count
    rest = f" {others} more differ from the baseline, and are not the base's." if others else ""
    what = "This tensor is" if count == 1 else f"These {count} tensors are"
    return [f"{what} still those of {base.path}: what the baseline has there was never applied.{rest}"]
