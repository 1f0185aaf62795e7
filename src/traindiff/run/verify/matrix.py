"""`traindiff verify --matrix`: verify every combination of a grid once."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from traindiff._version import __version__
from traindiff.analyse.compare.investigation import IMPOSSIBLE, REFUSED, Matrix, MatrixRow
from traindiff.analyse.compare.verification import Verification
from traindiff.analyse.findings import where_text
from traindiff.core.untrusted.demands import ANYTHING, MOST_JSON_BYTES, TEXT, demanded, parse, shaped
from traindiff.core.untrusted.folder import Folder
from traindiff.errors import ConfigError, CorruptRecordingError, Problem, type_of
from traindiff.run.config.obstacles import obstacles
from traindiff.run.config.options import SETUP_OPTIONS, setups
from traindiff.run.config.setup import PLAIN
from traindiff.run.processes.present_ranks import PresentRanks, launched_ranks
from traindiff.run.verify.recipe import recipe_name, source_file
from traindiff.run.verify.request import VerifyRequest
from traindiff.run.verify.trusted import Trusted, names_of_runs, record_trusted, trusted_of
from traindiff.run.verify.verify import JSON, verified, write_whole

_TABLES = ("grid", "settings", "exclude")


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """One combination of a grid.

    Attributes:
        varied: The values that the grid gives it, by setting.
        options: The setup; the command line decides what neither grid nor settings mention.
    """

    varied: Mapping[str, Any]
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The settings that vary: `engine=ddp, dtype=float32`."""
        return ", ".join(f"{name}={value}" for name, value in self.varied.items())


def read_grid(path: Path, base: Mapping[str, Any]) -> list[Combination]:
    """The combinations of a grid: all products of its values, without the excluded ones.

    Args:
        path: TOML, or JSON with the same tables: `grid` (a list of values by setting), optionally `settings` (a value
            by setting, for all combinations) and `exclude` (a list of tables; a combination with all values of one of
            them is left out).
        base: Options for everything that the file does not mention.

    Raises:
        ConfigError: The file does not exist, cannot be read, or has wrong content; lists all problems.
    """
    content = _content(path)
    problems = [
        Problem.unknown_name(where=name, kind="a table of a grid", found=name, known=_TABLES)
        for name in content
        if name not in _TABLES
    ]
    grid, settings, exclude = content.get("grid", {}), content.get("settings", {}), content.get("exclude", [])
    if not isinstance(grid, Mapping) or not grid:
        fix = 'Write [grid] and below it e.g. engine = ["ddp", "fsdp2"].'
        problems.append(Problem(where="[grid]", what="has nothing to vary.", fix=fix))
        grid = {}
    if not isinstance(exclude, list) or not all(isinstance(one, Mapping) and one for one in exclude):
        fix = 'Write [[exclude]] and below it e.g. engine = "ddp".'
        problems.append(Problem(where="exclude", what="is no list of tables.", fix=fix))
        exclude = []
    for where, table in (("[grid]", grid), ("[settings]", settings), *(("[[exclude]]", one) for one in exclude)):
        problems += [
            Problem.unknown_name(where=f"{where} {name}", kind="a setting of a setup", found=name, known=SETUP_OPTIONS)
            for name in table
            if name not in SETUP_OPTIONS
        ]
    problems += [
        Problem(where=f"[grid] {name}", what=f"is {type_of(values)}, not a list of values.", fix=f"Write [{values!r}].")
        for name, values in grid.items()
        if not isinstance(values, list) or not values
    ]
    problems += [
        Problem(where=f"[settings] {name}", what="is in [grid] too.", fix=f"Remove {name} from one of the two.")
        for name in settings
        if name in grid
    ]
    if problems:
        raise ConfigError(str(path), problems)
    combinations = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    return [
        Combination(varied=varied, options={**base, **_without_prefixes({**settings, **varied})})
        for varied in combinations
        if not any(_has_all(one, varied) for one in exclude)
    ]


def _content(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except FileNotFoundError:
        problem = Problem(where=str(path), what="does not exist.", fix="Give the path of a TOML or JSON file.")
        raise ConfigError("--matrix", [problem]) from None
    except (ValueError, RecursionError) as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        problem = Problem(where=str(path), what=f"is no {kind} ({error}).", fix=f"Correct it, as {kind}.")
        raise ConfigError("--matrix", [problem]) from None
    return content if isinstance(content, Mapping) else {}


def _has_all(excluded: Mapping[str, Any], varied: Mapping[str, Any]) -> bool:
    return all(varied.get(name) == value for name, value in excluded.items())


def _without_prefixes(given: Mapping[str, Any]) -> dict[str, Any]:
    """The same settings with dtypes as `Setup` names them: `float32` for `torch.float32`."""
    return {name: one.removeprefix("torch.") if isinstance(one, str) else one for name, one in given.items()}


_ROW = "combination.json"
_TRUSTED = "trusted.json"
_BASELINES = "baselines"

OnRow = Callable[[MatrixRow], None]
"""Called with each row when it is complete."""


@dataclass(slots=True, kw_only=True)
class _Work:
    request: VerifyRequest
    ranks: PresentRanks | None
    fresh: bool
    measured: dict[str, Trusted] = field(default_factory=dict)


def verify_matrix(
    request: VerifyRequest,
    combinations: Sequence[Combination],
    *,
    fresh: bool = False,
    ranks: PresentRanks | None = None,
    on_row: OnRow | None = None,
) -> Matrix:
    """Verify every combination. Combinations with the same baseline share it and its noise.

    A combination that an earlier call finished in the same directory is not run again, unless a setting, the recipe's
    file or traindiff's version has changed since.

    Args:
        request: The request for each combination; its setups are ignored.
        combinations: The combinations.
        fresh: Run all of them again.
        ranks: Ranks that exist already; this process leads them.
        on_row: Called with each row when it is complete.

    Returns:
        A row for each combination, in order. A combination that cannot run here is a row with the reason.

    Raises:
        ConfigError: A setting that all combinations share cannot be used.
    """
    replace(request, baseline_setup=PLAIN, setup=PLAIN).check(None)
    work = _Work(request=request, ranks=ranks, fresh=fresh)
    rows = []
    for one in combinations:
        rows.append(_row(work, one))
        if on_row is not None:
            on_row(rows[-1])
    return Matrix(recipe=recipe_name(request.recipe), output=str(request.output), rows=tuple(rows))


def _row(work: _Work, one: Combination) -> MatrixRow:
    baseline, setup = setups(one.options, world_size=launched_ranks())
    output = work.request.output / _directory(one.name)
    row = MatrixRow(
        name=one.name, varied=one.varied, verdict=IMPOSSIBLE, message="", seconds=0.0, output=str(output), exit_code=0
    )
    if problems := [*obstacles(setup), *(found for found in obstacles(baseline) if found not in obstacles(setup))]:
        return replace(row, message=" ".join(f"{problem.where} {problem.what}" for problem in problems))
    request = replace(work.request, output=output, baseline_setup=baseline, setup=setup)
    key = _fingerprint(request)
    if not work.fresh and (kept := _read(output / _ROW, key)) is not None and (output / JSON).exists():
        return replace(MatrixRow(**kept), kept=True)
    began = time.perf_counter()
    try:
        verification = _verified(work, request)
    except ConfigError as error:
        message = " ".join(f"{problem.where} {problem.what}" for problem in error.problems)
        return replace(row, verdict=REFUSED, message=message, exit_code=2, seconds=time.perf_counter() - began)
    row = replace(
        row, verdict=verification.verdict, message=_message(verification), exit_code=verification.exit_code,
        seconds=time.perf_counter() - began,
    )  # fmt: skip
    _write(output / _ROW, key, row.to_json())
    return row


def _verified(work: _Work, request: VerifyRequest) -> Verification:
    request.check(work.ranks)
    runs = request.runs(request.output, work.ranks)
    runs.check(["candidate"])
    runs.refuse_unusable(request.candidate, request.setup)
    return verified(runs, request, lambda: _measured(work, request))


def _measured(work: _Work, request: VerifyRequest) -> Trusted:
    """The baseline of a combination and its noise: shared, kept from an earlier call, or recorded now."""
    message = request.baseline_setup.message
    if message in work.measured:
        return work.measured[message]
    directory = work.request.output / _BASELINES / _directory(message)
    runs = request.runs(directory, work.ranks)
    key = _fingerprint(request, of_the_baseline=True)
    kept = None if work.fresh else _read(directory / _TRUSTED, key)
    if kept is not None and all((directory / name / "run.json").exists() for name in kept["recordings"]):
        trusted = trusted_of(runs, request, [str(directory / name) for name in kept["recordings"]])
    else:
        runs.check(names_of_runs(request.replicas, repeat=request.repeat))
        trusted = record_trusted(runs, request)
        recordings = [Path(one).name for one in (trusted.baseline, *trusted.noise)]
        _write(directory / _TRUSTED, key, {"recordings": recordings})
    work.measured[message] = trusted
    return trusted


def _message(verification: Verification) -> str:
    if verification.failed is not None:
        return verification.failed.message.splitlines()[0]
    first = verification.first_divergence
    return f"{where_text(first)}: {first.message}" if first is not None else ""


def _fingerprint(request: VerifyRequest, *, of_the_baseline: bool = False) -> str:
    """A hash of everything that is known to change a result."""
    known: list[Any] = [
        __version__, _source(request.recipe), request.baseline_setup.to_json(), request.steps, list(request.replicas),
        request.seed, request.repeat, repr(sorted(request.record.items())),
    ]  # fmt: skip
    if not of_the_baseline:
        known += [
            _source(request.candidate), request.setup.to_json(), request.pin, repr(request.rename),
            _file_text(request.map), _file_text(request.accept), list(request.ignore), request.rtol, request.atol,
            request.identical, request.compiler_logs, request.zoom,
        ]  # fmt: skip
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


def _source(recipe: Any) -> list[str]:
    """The recipe's name, and a hash of the file that has it."""
    file = source_file(recipe)
    return [recipe_name(recipe), "" if file is None else hashlib.sha256(file.read_bytes()).hexdigest()]


def _file_text(given: str | os.PathLike[str] | None) -> str:
    """The name of a file, and what is in it."""
    if given is None:
        return ""
    file = Path(given)
    return f"{given}\n{file.read_text(encoding='utf-8') if file.is_file() else ''}"


def _directory(name: str) -> str:
    """A directory name that is legible, and different for different names."""
    legible = re.sub(r"[^\w.,=-]+", "_", name.replace(", ", ","))
    if len(legible) < 100 and legible.replace(",", ", ") == name:
        return legible
    return f"{legible[:80]}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"


def _read(path: Path, key: str) -> Any:
    """The content that was written with this key, or None."""
    try:
        data = Folder.of(path.parent).read(path.name, limit=MOST_JSON_BYTES)
        content = demanded(parse(data, where=str(path)), shaped({"key": TEXT, "content": ANYTHING}), where=str(path))
    except (OSError, CorruptRecordingError):
        return None
    return content["content"] if content["key"] == key else None


def _write(path: Path, key: str, content: Any) -> None:
    write_whole(path, json.dumps({"key": key, "content": content}, indent=2) + "\n")
