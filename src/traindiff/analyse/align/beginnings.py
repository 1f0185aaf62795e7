"""What each step of a run begins with: parameters, batch, states of generators, settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from traindiff.analyse.merge.merged_tables import MergedTables
from traindiff.analyse.merge.parameters import parameter_groups
from traindiff.analyse.merge.rank_steps import rank_steps
from traindiff.analyse.merge.renames import Rename
from traindiff.analyse.merge.site import MergedSite, Part, SiteKey, StepTable
from traindiff.analyse.merge.step_table import step_table
from traindiff.core.observation import BEFORE, EDITED, Observation
from traindiff.core.summary import number
from traindiff.storage import Recording, StepObservations

Site = tuple[str, str]

Found = dict[tuple[str, int], dict[str, MergedSite]]
"""Parameters by path, by their optimizer and the number of the step that finds them so."""

_MOST_HELD = 1 << 14
"""Parameters of steps that wait for the first optimizer, which may rest for long: a bound of memory."""

_MOST_WAITING = 16
"""Steps that may wait, however many parameters they have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """What a step begins with.

    Attributes:
        optimizer: Name of the optimizer that counts the step.
        step: Its number.
        parameters: The parameters as the step finds them, by path.
        batch: The inputs of the model, by path and slot.
        random: The states of random generators before the first forward pass, by slot.
        settings: The settings of the optimizers, by path and slot.
        next_steps: The number of the next step of each optimizer, by name.
    """

    optimizer: str
    step: int
    parameters: Mapping[str, MergedSite]
    batch: Mapping[Site, MergedSite]
    random: Mapping[str, MergedSite]
    settings: Mapping[Site, float]
    next_steps: Mapping[str, int]

    def with_found(self, found: Found) -> Beginning:
        """The same with parameters that only other steps have recorded."""
        further = {
            path: entry
            for next_step in self.next_steps.items()
            for path, entry in found.get(next_step, {}).items()
            if not entry.unobserved
        }
        if not further:
            return self
        return replace(self, parameters={**self.parameters, **further})


def beginnings(recording: Recording, rename: Rename = str) -> Iterator[Beginning]:
    """What each step of a recording begins with; memory holds the steps until the first optimizer has stepped.

    The parameters that a round of several optimizers finds are recorded with the first of them, which may be the last
    to step: in a GAN, the discriminator may step before, and many times.

    Args:
        recording: The run.
        rename: Turns its paths into the baseline's.
    """
    held: dict[str, MergedSite] = {}
    latest: dict[str, int] = {}  # step, by optimizer
    waiting: list[Beginning] = []
    begun = recording.run.get("first_step") or 0
    groups = parameter_groups(recording, rename)
    main = next(iter(groups), "")
    holders = {path: name for name, of_one in groups.items() for group in of_one for path in group}
    most = max(_MOST_WAITING, _MOST_HELD // max(1, len(holders)))
    merged = MergedTables(recording.world_size, 0, recording.path)
    for of_ranks in rank_steps(recording):
        optimizer, step, after = of_ranks[0].optimizer, of_ranks[0].step, of_ranks[0].after
        table = _table_of(of_ranks, merged)
        of_ranks.clear()
        next_steps = {name: max(begun, after.get(name, -1) + 1) for name in groups} | {optimizer: step}
        before, edited, stepped = (
            {rename(path): entry.without_parts() for path, entry in values_at(table, stage).items()}
            for stage in (BEFORE, EDITED, "")
        )
        found: Found = {}
        for path, entry in before.items():
            found.setdefault((holders.get(path, main), step), {})[path] = entry
        for path, entry in edited.items():
            holder = holders.get(path, main)
            found.setdefault((holder, next_steps.get(holder, step)), {})[path] = entry
        held.update(
            (path, entry)
            for (holder, begins), entries in found.items()
            if latest.get(holder, -1) < begins
            for path, entry in entries.items()
        )
        found.setdefault((optimizer, step + 1), {}).update(stepped)
        further: list[Beginning] = []
        for one in waiting:
            # Steps of others are recorded only while one of the first optimizer is, so none lies between.
            if optimizer == main and (not after or after.get(one.optimizer, -1) >= one.step):
                yield replace(one, next_steps={**one.next_steps, main: step}).with_found(found)
            else:
                further.append(one.with_found(found))
        beginning = Beginning(
            optimizer=optimizer,
            step=step,
            parameters={path: one for path, one in held.items() if not one.unobserved},
            next_steps=next_steps,
            batch={
                (rename(key.path), key.slot): entry
                for key, entry in table.items()
                if key[:2] == ("batch", "") and key.path != "rng" and not entry.unobserved
            },
            random={
                key.slot: entry
                for key, entry in reversed(table.items())
                if key.path == "rng" and key.stage == BEFORE and not entry.unobserved
            },
            settings={
                (key.path, key.slot): number(entry.summary)
                for key, entry in table.items()
                if key.group and not entry.unobserved
            },
        )
        num_over = max(0, len(further) - most)
        yield from further[:num_over]
        waiting = further[num_over:]
        if optimizer == main:
            yield beginning
        else:
            waiting.append(beginning)
        held.update(stepped)
        latest[optimizer] = step
    yield from waiting


def _table_of(of_ranks: list[StepObservations], merged: MergedTables) -> dict[SiteKey, MergedSite]:
    """What a step begins with, over its ranks."""
    if of_ranks[0].places is not None:
        return merged.table(of_ranks[0])
    parts: list[Part] = [
        (seen, one.rank, summary)
        for one in of_ranks
        for seen, summary in zip(one.observations, one.summaries, strict=True)
        if _is_wanted(seen)
    ]
    return step_table(parts)


def _is_wanted(seen: Observation) -> bool:
    if seen.phase == "batch":
        return seen.stage in ("", BEFORE)
    return seen.phase == "param" or (seen.phase == "optimizer" and ".groups[" in seen.path)


def values_at(table: StepTable, stage: str) -> dict[str, MergedSite]:
    """The parameters that a step has recorded at a stage, by path."""
    return {key.path: entry for key, entry in table.items() if _is_value(key) and key.stage == stage}


def _is_value(key: SiteKey) -> bool:
    return key.phase == "param" and key.slot == "value"


def same_bits(one: MergedSite, other: MergedSite) -> bool:
    """True if two sites hold the same elements in the same places."""
    return (
        (one.dtype, one.shape) == (other.dtype, other.shape)
        and one.exact
        and other.exact
        and all(one.summary[name] == other.summary[name] for name in ("fingerprint", "multiset"))
    )
