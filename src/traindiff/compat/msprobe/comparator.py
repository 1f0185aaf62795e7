"""`GradComparator`: compare the directions of two monitored trainings as msprobe does, and apply its rule."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from traindiff.analyse.findings import more_text
from traindiff.analyse.signs import Agreement, Similarities
from traindiff.compat.msprobe import tables
from traindiff.compat.msprobe.importing import read_directions
from traindiff.compat.msprobe.layout import (
    content,
    direction_file,
    direction_steps_in,
    put,
    rank_directory,
    ranks_in,
    summaries_in,
)
from traindiff.core.site import canonical_paths
from traindiff.errors import ConfigError, Problem, TraindiffWarning, level_of_caller
from traindiff.present.data.as_csv import defused
from traindiff.present.direction_pictures import draw
from traindiff.present.pictures import check_matplotlib

SUMMARY = "summary"
"""Last row of the table: all parameters together."""


class GradComparator:
    """Compares directories that `PrecisionDebugger`, of traindiff or of msprobe, has written."""

    @staticmethod
    def compare(
        path1: str | os.PathLike[str], path2: str | os.PathLike[str], output_dir: str | os.PathLike[str]
    ) -> Similarities:
        """Do for the directories of one rank what `compare_distributed` does for those of all.

        Args:
            path1: `dump_path/rank0`, or that of another rank, of the baseline.
            path2: Of the candidate.
            output_dir: Where to write, without a directory for the rank.

        Returns:
            What was found.

        Raises:
            ConfigError: As `compare_distributed`.
            NotARecordingError: A file cannot be read.
        """
        sides = _checked("compare", path1, path2)
        (found,) = _compared("compare", sides, {Path(output_dir): sides}).values()
        return found

    @staticmethod
    def compare_distributed(
        path1: str | os.PathLike[str], path2: str | os.PathLike[str], output_dir: str | os.PathLike[str]
    ) -> dict[int, Similarities]:
        """Write the similarity of directions of each rank, and say where it breaks the rule.

        Two elements agree where both are positive or neither is, as in msprobe; `traindiff compare` is stricter. Of
        each rank there come `similarities.csv`, `broken_rule.csv` with the steps and parameters that break the rule,
        and `similarities_picture/`. What only one of the two has is named in a warning, and the rest is compared.

        Args:
            path1: `dump_path` of the baseline.
            path2: Of the candidate.
            output_dir: Where to write; is made if it is not there. Files of an earlier comparison are replaced.

        Returns:
            By rank: what was found; `broken` has where the rule is.

        Raises:
            ConfigError: A directory does not exist, the two have no directions in common, or matplotlib is not
                installed.
            NotARecordingError: A file cannot be read.
        """
        sides = _checked("compare_distributed", path1, path2)
        ranks = [rank for rank in ranks_in(sides[0]) if rank in ranks_in(sides[1])]
        outputs = {rank_directory(Path(output_dir), rank): rank for rank in ranks}
        pairs = {output: tuple(rank_directory(side, rank) for side in sides) for output, rank in outputs.items()}
        found = _compared("compare_distributed", sides, pairs)
        return {outputs[output]: one for output, one in found.items()}


def _checked(caller: str, *paths: str | os.PathLike[str]) -> tuple[Path, ...]:
    """The two directories as paths."""
    check_matplotlib("drawing pictures", asked_by="pictures")
    sides = tuple(map(Path, paths))
    problems = [
        Problem(
            where=f"path{number}={side}", what="is no directory.", fix="Give the dump_path of a monitored training."
        )
        for number, side in enumerate(sides, start=1)
        if not side.is_dir()
    ]
    if problems:
        raise _refused(caller, problems)
    return sides


def _compared(caller: str, sides: tuple[Path, ...], pairs: Mapping[Path, tuple[Path, ...]]) -> dict[Path, Similarities]:
    """Compare pairs of directories of a rank, and write what was found into the directory that each pair stands under.

    Raises:
        ConfigError: None of the pairs has directions in common.
    """
    compared = {output: _of_rank(*pair) for output, pair in pairs.items()}
    compared = {output: found for output, found in compared.items() if found[1].parameters}
    if not compared:
        raise _refused(caller, [_nothing_in_common(sides, pairs.values())])
    for output, (names, found) in compared.items():
        _write(output, names, found)
        _warn(output, found, [direction_steps_in(side) for side in pairs[output]])
    return {output: found for output, (_, found) in compared.items()}


def _nothing_in_common(sides: tuple[Path, ...], pairs: Iterable[tuple[Path, ...]]) -> Problem:
    """Why there was nothing to compare."""
    where = f"{sides[0]} and {sides[1]}"
    without = [side for side, own in zip(sides, zip(*pairs, strict=True), strict=False) if not _has_directions(own)]
    if not without:
        what = "have no directions of a rank, step and parameter in common."
        fix = 'Monitor both trainings with "grad_level": "L1" or "L2", and the same ranks and steps.'
        return Problem(where=where, what=what, fix=fix)
    have = "has" if len(without) == 1 else "have"
    where = " and ".join(map(str, without))
    what = f'{have} no directions, so there is nothing to compare: "grad_level": "L0" writes none.'
    return Problem(where=where, what=what, fix='Monitor both trainings with "grad_level": "L1" or "L2".')


def _has_directions(ranks: Iterable[Path]) -> bool:
    return any(any(step.iterdir()) for rank in ranks for step in direction_steps_in(rank).values())


def _of_rank(first: Path, second: Path) -> tuple[Mapping[str, str], Similarities]:
    """What a rank's parameters are called in the first directory, by canonical path, and what was found."""
    steps = [step for step in direction_steps_in(first) if step in direction_steps_in(second)]
    names = [_names(side, steps) for side in (first, second)]
    both = [path for path in names[0] if path in names[1]]
    rows: dict[str, list[Agreement | None]] = {}
    unknown: dict[str, str] = {}
    for path in both:
        for step in steps:
            files = [direction_file(side, step, own[path]) for side, own in zip((first, second), names, strict=True)]
            if not all(file.is_file() for file in files):
                rows.setdefault(path, []).append(None)
                continue
            baseline, candidate = map(read_directions, (first, second), files)
            if baseline.shape != candidate.shape:
                shapes = f"{list(baseline.shape)} in the baseline and {list(candidate.shape)} in the candidate"
                unknown[path] = f"its shape is {shapes}"
                rows.setdefault(path, []).append(None)
                continue
            rows.setdefault(path, []).append(Agreement(same=int((baseline == candidate).sum()), count=baseline.size))
    found = Similarities(
        steps=tuple(steps),
        parameters={path: tuple(row) for path, row in rows.items() if any(one is not None for one in row)},
        only=(tuple(p for p in names[0] if p not in names[1]), tuple(p for p in names[1] if p not in names[0])),
        unknown=unknown,
        zeros_known=False,
    )
    return names[0], found


def _names(rank: Path, steps: list[int]) -> dict[str, str]:
    """Names of parameters that have directions, by canonical path, in the order of the tables."""
    found: dict[str, None] = {}
    for step, path in summaries_in(rank).items():
        if step in steps:
            rows = tables.load(content(rank, path), where=str(path)).rows
            found.update((row.name, None) for row in rows if direction_file(rank, step, row.name).is_file())
    canonical = canonical_paths(found)
    return {canonical.get(name, name): name for name in found}


def _write(directory: Path, names: Mapping[str, str], found: Similarities) -> None:
    rows = [["step", *map(str, found.steps)]]
    rows += [[defused(names[path]), *(_cell(one) for one in row)] for path, row in found.parameters.items()]
    rows.append([SUMMARY, *(_cell(one) for one in found.summary)])
    put(directory / "similarities.csv", tables.encoded(rows))
    broken = [["step", "param_name", "similarity", "before"]]
    broken += [
        [
            str(one.step), SUMMARY if one.parameter is None else defused(names[one.parameter]), repr(one.similarity),
            "" if one.before is None else repr(one.before),
        ]
        for one in found.broken
    ]  # fmt: skip
    put(directory / "broken_rule.csv", tables.encoded(broken))
    draw(found, directory / "similarities_picture", names)


def _cell(one: Agreement | None) -> str:
    return "" if one is None or one.share is None else repr(one.share)


def _warn(output: Path, found: Similarities, steps: Sequence[Collection[int]]) -> None:
    """Name what could not be compared; `steps` are those of each side."""
    message = [
        f"only path{number} has step {own[0]}{more_text(len(own) - 1, 'step')}"
        for number, each in enumerate(steps, start=1)
        if (own := sorted({*each} - {*found.steps}))
    ]
    message += [
        f"only path{number} has directions of {paths[0]}{more_text(len(paths) - 1, 'parameter')}"
        for number, paths in enumerate(found.only, start=1)
        if paths
    ]
    message += [f"{path} was not compared: {why}" for path, why in found.unknown.items()]
    if message:
        warnings.warn(f"{output.name}: {'; '.join(message)}.", TraindiffWarning, stacklevel=level_of_caller())


def _refused(caller: str, problems: list[Problem]) -> ConfigError:
    return ConfigError(f"GradComparator.{caller}(...)", problems, consequence="nothing was compared")
