"""A recording's observations as a table: for the terminal, CSV, JSON and Parquet."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from traindiff.analyse.merge.rank_steps import rank_steps
from traindiff.analyse.merge.span import Span
from traindiff.core.observation import SAMPLE, Observation
from traindiff.core.site import PHASES, ROOT, matches
from traindiff.core.steps import ALL_STEPS, StepSelection, parse_steps
from traindiff.core.summary import finite_count, largest, mean, norm_of, std
from traindiff.errors import ConfigError, Problem
from traindiff.present.data import json_text
from traindiff.present.data.as_csv import CsvRows
from traindiff.storage import Recording
from traindiff.storage.merged_rows import ENTRY

SCHEMA_NAME = "traindiff-observations"
SCHEMA_VERSION = 1

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """A choice of observations.

    Attributes:
        site: Glob over canonical paths, or over `path slot`.
        phases: Phases; empty for all.
        steps: Steps.
        samples: Whether the single samples of a batch are included.
    """

    site: str = "*"
    phases: tuple[str, ...] = ()
    steps: StepSelection = ALL_STEPS
    samples: bool = False

    def __contains__(self, seen: object) -> bool:
        if not isinstance(seen, Observation) or (seen.stage == SAMPLE and not self.samples):
            return False
        return seen.step in self.steps and self.has(seen.phase, seen.path, seen.slot)

    def has(self, phase: str, path: str, slot: str) -> bool:
        """True if it includes a site, in the steps that it includes."""
        globs = (self.site, self.site.replace("[", "[[]"))  # a range of a glob, or the bracket of a slot
        named = matches(self.site, path) or any(matches(glob, f"{path or ROOT} {slot}") for glob in globs)
        return named and (not self.phases or phase in self.phases)


def parse_filter(
    site: str, phases: tuple[str, ...], steps: str | None, *, samples: bool = False, asked_by: str, consequence: str
) -> Filter:
    """The choice that the options `--site`, `--phase` and `--steps` make.

    Args:
        site: See `Filter`.
        phases: See `Filter`.
        steps: The text of `--steps`; None for all steps.
        samples: See `Filter`.
        asked_by: The command, for messages.
        consequence: What was not done if an option is wrong, for messages.

    Raises:
        ConfigError: There is no such phase, or the text names no steps.
    """
    problems = [
        Problem.unknown_name(where=f"--phase {name}", kind="a phase", found=name, known=PHASES)
        for name in phases
        if name not in PHASES
    ]
    if problems:
        raise ConfigError(asked_by, problems, consequence=consequence)
    selection = parse_steps(steps, where="--steps")
    if not isinstance(selection, StepSelection):
        raise ConfigError(asked_by, [selection], consequence=consequence)
    return Filter(site=site, phases=phases, steps=selection, samples=samples)


def rows(recording: Recording, wanted: Filter) -> Iterator[Row]:
    """The wanted observations, in execution order, rank by rank; one dictionary of plain values each."""
    if recording.is_compact:
        yield from _merged_rows(recording, wanted)
        return
    for rank in recording.ranks:
        for begin, end in wanted.steps.spans:
            for step in recording.steps(rank, begin=begin, end=end):
                for seen, summary in zip(step.observations, step.summaries, strict=True):
                    if seen in wanted:
                        yield _row(rank, seen, summary)


def _merged_rows(recording: Recording, wanted: Filter) -> Iterator[Row]:
    """The wanted rows of a compact recording, step by step: one for a site whose ranks are merged, without a rank."""
    for begin, end in wanted.steps.spans:
        for of_ranks in rank_steps(recording, Span(begin=begin, end=end)):
            for step in of_ranks:
                for seen, summary in zip(step.observations, step.summaries, strict=True):
                    if seen in wanted and (step.places is None or seen.evaluation == ENTRY):
                        yield _row(step.rank if step.places is None else None, seen, summary)


COLUMNS: Mapping[str, pa.DataType] = {
    "step": pa.int64(),
    "evaluation": pa.int32(),
    "micro_step": pa.int32(),
    "rank": pa.int32(),
    "optimizer": pa.utf8(),
    "phase": pa.utf8(),
    "stage": pa.utf8(),
    "site": pa.utf8(),
    "slot": pa.utf8(),
    "call": pa.int32(),
    "order": pa.int64(),
    "dtype": pa.utf8(),
    "shape": pa.utf8(),
    "count": pa.int64(),
    "nan": pa.int64(),
    "inf": pa.int64(),
    "zero": pa.int64(),
    "subnormal": pa.int64(),
    "minimum": pa.float64(),
    "maximum": pa.float64(),
    "smallest": pa.float64(),
    "largest": pa.float64(),
    "mean": pa.float64(),
    "std": pa.float64(),
    "norm": pa.float64(),
    "fingerprint": pa.utf8(),
    "unobserved": pa.utf8(),
}
"""Columns of every output, in order. Numbers of an unobserved site are null."""


def _row(rank: int | None, seen: Observation, summary: Any) -> Row:
    about: Row = {
        "step": seen.step,
        "evaluation": seen.evaluation,
        "micro_step": seen.micro_step,
        "rank": rank,
        "optimizer": seen.optimizer,
        "phase": seen.phase,
        "stage": seen.stage,
        "site": seen.path or ROOT,
        "slot": seen.slot,
        "call": seen.call,
        "order": seen.order,
        "dtype": seen.dtype,
        "shape": "x".join(map(str, seen.shard.shape)) or "scalar",
        "unobserved": seen.unobserved or None,
    }
    if seen.unobserved:
        return {name: about.get(name) for name in COLUMNS}
    some = bool(finite_count(summary))
    numbers: Row = {
        "count": int(summary["count"]),
        "nan": int(summary["nan"]),
        "inf": int(summary["positive_infinity"]) + int(summary["negative_infinity"]),
        "zero": int(summary["zero"]),
        "subnormal": int(summary["subnormal"]),
        "minimum": float(summary["minimum"]) if some else None,
        "maximum": float(summary["maximum"]) if some else None,
        "smallest": value if math.isfinite(value := float(summary["smallest"])) else None,
        "largest": float(largest(summary)) if some else None,
        "fingerprint": f"{int(summary['fingerprint']):016x}",
    }
    if seen.dtype.startswith(("float", "bfloat", "complex")):
        numbers |= {
            "mean": float(mean(summary)) if some else None,
            "std": float(std(summary)) if some else None,
            "norm": norm_of(summary),
        }
    return {name: _json_value((about | numbers).get(name)) for name in COLUMNS}


def _json_value(value: Any) -> Any:
    """A value, or None for a number that JSON lacks, e.g. the norm of numbers whose squares overflow float64."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_csv(found: Iterator[Row], file: IO[str]) -> None:
    """Comma-separated, one header line, empty cells for null."""
    writer = CsvRows(file, tuple(COLUMNS))
    for row in found:
        writer.write(row)


def write_json(found: Iterator[Row], file: IO[str], *, recording: Recording) -> None:
    """One object: `schema`, `steps`, `ranks`, `observations`."""
    observations = list(found)
    content = {
        "schema": {"name": SCHEMA_NAME, "version": SCHEMA_VERSION},
        "recording": recording.path,
        "steps": sorted({row["step"] for row in observations}),
        "ranks": list(recording.ranks),
        "observations": observations,
    }
    file.write(json_text(content) + "\n")


def write_parquet(found: Iterator[Row], file: IO[bytes]) -> None:
    """A Parquet file with the types of `COLUMNS`."""
    pq.write_table(table(found), file)


def table(found: Iterator[Row]) -> pa.Table:
    """An Arrow table with the types of `COLUMNS`."""
    return pa.Table.from_pylist(list(found), schema=pa.schema(list(COLUMNS.items())))
