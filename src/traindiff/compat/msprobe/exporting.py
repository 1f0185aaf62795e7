"""From a recording, whole or still being written, to the files of msprobe's gradient monitor."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from traindiff.analyse.merge.rank_steps import rank_steps
from traindiff.analyse.signs import Stored
from traindiff.compat.msprobe import tables
from traindiff.compat.msprobe.gradients import (
    Kept,
    WholeGradient,
    concerns_gradients,
    is_gradient,
    is_whole,
    whole_gradients,
)
from traindiff.compat.msprobe.layout import direction_file, make_room, put, rank_directory, summary_file
from traindiff.compat.msprobe.tables import Columns, Row
from traindiff.core.observation import SKIPPED, Observation
from traindiff.core.summary import Detail, Summaries
from traindiff.errors import ConfigError, Problem
from traindiff.storage import Recording, StepObservations


class StepFiles:
    """Writes the table and the directions of each step of a rank. Each file is written as a whole.

    Each optimizer counts its own steps. If several optimizers have a step of the same number, one table has the
    gradients of all.

    Args:
        directory: Directory of the rank.
        columns: Columns of the tables.
        names: Names of parameters in the files, by canonical path. All other parameters have their path as name.
        directions: Whether directions are written. (The sign of a one-element gradient is always known.)
    """

    def __init__(self, directory: Path, columns: Columns, names: Mapping[str, str], *, directions: bool) -> None:
        self._directory = directory
        self._columns = columns
        self._names = names
        self._directions = directions
        self._written: set[int] = set()

    def write(self, step: int, gradients: Iterable[WholeGradient], *, empty: bool = False) -> int:
        """Write what is there of a step; returns how many gradients that were.

        Args:
            step: Number of the step.
            gradients: Its gradients, or further ones.
            empty: Write a table without rows if there are none.
        """
        rows = [self._row(step, gradient) for gradient in gradients]
        if not rows and not empty:
            return 0
        path = summary_file(self._directory, step)
        earlier: tuple[Row, ...] = ()
        if step in self._written:
            earlier = tables.load(path.read_bytes(), where=str(path)).rows
        put(path, tables.dump(self._columns, [*earlier, *rows]))
        self._written.add(step)
        return len(rows)

    def _row(self, step: int, gradient: WholeGradient) -> Row:
        name = self._names.get(gradient.path, gradient.path)
        if self._directions and gradient.signs is not None:
            content = io.BytesIO()
            np.save(content, gradient.signs.positive.reshape(gradient.shape), allow_pickle=False)
            put(direction_file(self._directory, step, name), content.getvalue())
        return gradient.row(self._columns, name)


class LiveFiles:
    """Writes what one rank holds whole; see `traindiff.observe.common.writing.StepListener`.

    Attributes:
        partial: Parameters of which this rank holds a part only, by canonical path.
        seen: Whether there was a gradient of which this rank holds all elements.
        reason: Why the first gradient that was not observed was not; empty if all were.
    """

    def __init__(self, files: StepFiles, *, rank: int, bounds: tuple[float, ...]) -> None:
        self.partial: dict[str, None] = {}
        self.seen = False
        self.reason = ""
        self._files = files
        self._rank = rank
        self._bounds = bounds

    def write_step(
        self, observations: Sequence[Observation], summaries: Summaries, details: Mapping[int, Detail]
    ) -> None:
        """Write a step, or a further part of it."""
        kept = []
        for row, seen in enumerate(observations):
            if not concerns_gradients(seen):
                continue
            if is_gradient(seen) and not is_whole(seen):
                self.partial[seen.path] = None
                continue
            self.reason = self.reason or seen.unobserved
            self.seen = self.seen or (is_gradient(seen) and not seen.unobserved)
            read = partial(_stored, details.get(row))
            kept.append(Kept(seen=seen, rank=self._rank, summary=summaries[row], read=read))
        if any(is_gradient(one.seen) for one in kept):
            self._files.write(kept[0].seen.step, whole_gradients(kept, self._bounds), empty=True)


def _stored(detail: Detail | None) -> Stored:
    """The data that a recording would keep of an observation, without writing and reading its file."""
    tensors = {} if detail is None else detail.tensors
    return {name: np.frombuffer(one.data, dtype=one.dtype).reshape(one.shape) for name, one in tensors.items()}


def export_gradients(recording: Recording, directory: str, *, overwrite: bool = False) -> int:
    """Write the gradients of a recording as msprobe's gradient monitor does.

    A rank that holds a whole gradient gets it in its directory. Where ranks hold shards, gradients are in the directory
    of the lowest one, but for those that all hold whole. Steps that a loss scaler left out are none.

    Which columns the tables have follows from the recording: interval shares where it was made with `bounds`, MD5 where
    with `detail="md5"` and no signs, and fingerprints where with neither; directions where with `detail="signs"`.

    Args:
        recording: Observed gradients.
        directory: Where to write.
        overwrite: Replace such files that are there.

    Returns:
        How many gradients were written.

    Raises:
        ConfigError: The directory holds something, or the recording no gradients. Nothing was written then.
    """
    if "grad" not in recording.run["settings"].get("observe", ()):
        raise _nothing(recording, what="holds no gradients: its training was not asked for them.")
    if recording.is_compact:
        raise _nothing(recording, what="is compact: its ranks are merged, and msprobe has a table for each.")
    root = Path(directory)
    fix = "Give another directory, or --overwrite to replace them."
    make_room(root, ranks=None, overwrite=overwrite, where=f"directory {directory}", fix=fix)
    settings = recording.run["settings"]
    columns = columns_of(settings)
    bounds = tuple(settings.get("bounds", ()))
    directions = "signs" in settings.get("detail", ())
    files = {
        rank: StepFiles(rank_directory(root, rank), columns, {}, directions=directions) for rank in recording.ranks
    }
    skipped: Counter[str] = Counter()
    written = 0
    for steps in rank_steps(recording):
        optimizer = steps[0].optimizer
        if any(seen.slot == SKIPPED and seen.phase == "optimizer" for seen in steps[0].observations):
            skipped[optimizer] += 1
            continue
        for rank, gradients in _by_rank(recording, steps, bounds):
            written += files[rank].write(steps[0].step - skipped[optimizer], gradients)
    if not written:
        raise _nothing(recording, what="holds no gradient of which all elements were recorded.")
    return written


def columns_of(settings: Mapping[str, Any]) -> Columns:
    """The columns that tables of a recording with these settings have."""
    detail = settings.get("detail", ())
    if bounds := settings.get("bounds"):
        return Columns(bounds=tuple(_as_written(bound) for bound in bounds))
    if "signs" in detail:
        return Columns()
    return Columns(digest="MD5" if "md5" in detail else "fingerprint")


def _as_written(bound: float) -> float:
    """A bound that was rounded to float32, in as few digits as say which float32 it is."""
    short = float(str(np.float32(bound)))
    return short if isinstance(bound, float) and float(np.float32(bound)) == bound else bound


def _by_rank(
    recording: Recording, steps: Sequence[StepObservations], bounds: tuple[float, ...]
) -> Iterator[tuple[int, Iterator[WholeGradient]]]:
    """Whole gradients of each rank.

    Where ranks hold shards, the lowest rank has all gradients but those that every rank holds whole.
    """
    kept = {step.rank: list(_kept(recording, step)) for step in steps}
    whole = {rank: {part.seen.path for part in parts if is_whole(part.seen)} for rank, parts in kept.items()}
    paths = {part.seen.path for parts in kept.values() for part in parts if is_gradient(part.seen)}
    if paths <= set().union(*whole.values()):
        own = whole
    else:
        everywhere = set.intersection(*whole.values())
        own = dict.fromkeys(kept, everywhere)
    for rank, parts in kept.items():
        yield rank, whole_gradients([one for one in parts if _concerns(one.seen, own[rank])], bounds)
    shards = paths.difference(*own.values())
    together = [one for parts in kept.values() for one in parts if _concerns(one.seen, shards)]
    yield min(kept), whole_gradients(together, bounds)


def _concerns(seen: Observation, paths: Collection[str]) -> bool:
    """True if this is the gradient of one of some parameters, or what it was multiplied by."""
    return not is_gradient(seen) or seen.path in paths


def _kept(recording: Recording, step: StepObservations) -> Iterator[Kept]:
    for row, seen in enumerate(step.observations):
        if concerns_gradients(seen):
            read = partial(recording.tensors, step, row)
            yield Kept(seen=seen, rank=step.rank, summary=step.summaries[row], read=read)


def _nothing(recording: Recording, *, what: str) -> ConfigError:
    problem = Problem(
        where=f"recording {recording.path}", what=what,
        fix='Record it with observe="grad" (or leave observe out) and detail="signs".',
    )  # fmt: skip
    return ConfigError("export msprobe", [problem], consequence="no gradient was written")
