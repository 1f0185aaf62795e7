"""msprobe's gradient monitor beside `traindiff.compat.msprobe`, under PyTorch and MindSpore."""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.seeds.msprobe_trainings import REPLACEMENT
from benchmarks.seeds.running import results_of
from benchmarks.seeds.table import Feature, compared, differing

TITLE = "msprobe: gradient monitor"
PACKAGES = (
    "torch==2.13.0", "mindspore==2.10.0", "mindstudio-probe==8.3.3", "numpy==1.26.4", "pyarrow==25.0.1",
    "llvmlite==0.50.0", "rich==15.0.0", "typer==0.29.2",
)  # fmt: skip
"""The last four are for the replacement, which runs in the same environment."""

TRAININGS = "benchmarks.seeds.msprobe_trainings"
ORIGINALS = {"torch": "msprobe.pytorch", "mindspore": "msprobe.mindspore"}

ROUNDED = {"bfloat16": 8e-3, "float16": 2e-3}
"""How far norms may be apart, relatively: msprobe computes them in the gradient's dtype, traindiff in float64."""

ROUNDED_OTHERWISE = 1e-6

OTHER_WAY = 1e-4
"""The same of all numbers whose gradients were computed in two ways: in PyNative mode and in graph mode."""

LIKE = {
    "graph-L0": "ms-L0", "graph-L1": "ms-L1", "graph-L2": "ms-L2", "graph-step": "ms-step", "graph-ranks": "ms-ranks",
    "graph-rank-1-of-2": "ms-rank-1-of-2",
}  # fmt: skip
"""By training in graph mode: the one in PyNative mode with the same gradients, up to rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What one of the two has left.

    Attributes:
        folder: Has a folder with the files of each training.
        said: By training: the error that it ended with, and its warnings.
    """

    folder: Path
    said: dict[str, Any]


def features(original: Path | None) -> list[Feature]:
    """Compare the files of both, and what they said."""
    assert original is not None
    with tempfile.TemporaryDirectory() as name:
        sides = []
        for side in ("original", "replacement"):
            folder = Path(name) / side
            folder.mkdir()
            said: dict[str, Any] = {}
            for framework, own in ORIGINALS.items():
                tool = own if side == "original" else REPLACEMENT
                said |= results_of(original, TRAININGS, framework, tool, folder=folder)
            sides.append(Side(folder=folder, said=said))
        return rows(original, *sides)


def rows(original: Path, theirs: Side, ours: Side) -> list[Feature]:
    """The rows of trainings that have run."""
    return [*_of_torch(theirs, ours), *_of_comparing(original, theirs, ours), *_of_mindspore(theirs, ours)]


def _row(theirs: Side, ours: Side, name: str, *keys: str, note: str = "") -> Feature:
    """A row that says `works` if all files of some trainings are equal, and ours ended without an error."""
    found = [_difference(theirs, ours, key) for key in keys]
    problems = [f"{key}: {one.problem}" for key, one in zip(keys, found, strict=True) if one.problem]
    return compared(name, "; ".join(problems), f"{sum(one.files for one in found)} files{note or ' are equal'}")


def _of_torch(theirs: Side, ours: Side) -> Iterator[Feature]:
    def row(name: str, *keys: str, note: str = "") -> Feature:
        return _row(theirs, ours, name, *keys, note=note)

    equal = " are equal, but for norms, which are computed in float64 here: they differ by less than 1e-6"
    yield differing(
        "grad_level L0", _difference(theirs, ours, "L0", without=("MD5",)).problem,
        "there are no directions; names, headers and all columns but MD5 are equal. The original's MD5 is CRC32",
    )  # fmt: skip
    yield row("grad_level L1: tables and directions", "L1", "Adam", note=equal)
    yield row("grad_level L2: shares of intervals and of zeros", "L2", note=equal)
    yield row("gradients in float64", "float64", note=equal)
    short = " are equal, but for norms: the original rounds them to the dtype of the gradients"
    yield row("gradients in bfloat16 and float16", "bfloat16", "float16", note=short)
    yield row("bounds: whole numbers and fractions, up to the ends of int64", "bounds", note=equal)
    yield row("param_list", "param_list", note=equal)
    yield row("step: numbers and ranges", "step", note=equal)
    yield row("step as an argument of PrecisionDebugger", "step-argument", note=equal)
    yield row("a step is a call of an optimizer, not an iteration", "optimizer-calls", note=equal)
    yield row("rank: [], on 2 ranks (gloo, DistributedDataParallel)", "ranks", note=equal)
    yield row("rank: one rank of 2, and a range", "rank-1-of-2", "ranks-0-1", note=equal)
    warned = "has no effect" in " ".join(ours.said["one-process"]["warnings"])
    single = _difference(theirs, ours, "one-process")
    yield compared(
        "rank in a single process", single.problem or ("" if warned else "nothing is warned of"),
        f"it has no effect in both: {single.files} files are equal. Here a warning says so",
    )  # fmt: skip
    yield row("defaults of the entries that may be left out", "defaults", note=equal)
    yield row("the configuration file of all tasks", "all-tasks", note=equal)
    yield row("PrecisionDebugger.monitor(model), on the class", "on-the-class", note=equal)
    yield row("stop() may be left out under PyTorch", "no-stop", note=equal)
    yield row("start(), stop() and step() around each step, as for other tasks", "around-steps", note=equal)
    yield row("main_grad before grad, also of an optimizer of copies (Megatron)", "main_grad", "main_grad-of-copies",
              note=equal)  # fmt: skip
    told = " ".join(ours.said["no-gradient"]["warnings"])
    empty = _difference(theirs, ours, "no-gradient")
    yield compared(
        "parameters without gradients", empty.problem or ("" if "no gradient was seen" in told else f"it said: {told}"),
        f"{empty.files} tables without rows are equal; here stop() also says that no gradient was seen",
    )  # fmt: skip
    silent = not theirs.said["traced"]["error"]
    refused = "was made by torch.jit" in ours.said["traced"]["error"]
    yield differing(
        "the model must not be made by torch.jit.trace",
        "" if silent and refused else f"{theirs.said['traced']} and {ours.said['traced']}",
        "the original says nothing, whatever it then sees; here it is refused, with the reason",
    )  # fmt: skip


def _of_comparing(python: Path, theirs: Side, ours: Side) -> Iterator[Feature]:
    """Both comparators on the files of both monitors."""
    tools = {"original": "msprobe", "replacement": REPLACEMENT}
    files = {"original": theirs, "replacement": ours}

    def ran(tool: str, of: str, first: str, second: str, output: Path) -> str:
        dumps = [str(files[of].folder / key / "dump") for key in (first, second)]
        found = results_of(python, TRAININGS, "compare", tools[tool], *dumps, str(output), folder=ours.folder)
        return str(found["error"])

    outputs = {(tool, of): ours.folder / f"compared-by-{tool}-of-{of}" for tool in tools for of in files}
    errors = [
        error for (tool, of), output in outputs.items() if (error := ran(tool, of, "L2", "other-batches", output))
    ]
    tables = [(output / "rank0" / "similarities.csv") for output in outputs.values()]
    same = not errors and len({table.read_bytes() for table in tables}) == 1
    yield compared(
        "GradComparator.compare_distributed: similarities.csv",
        "; ".join(errors) or ("" if same else "the four tables differ"),
        "both comparators, on the files of both monitors: four tables, equal byte for byte",
    )  # fmt: skip
    if errors:
        return
    pictures = [{path.name for path in output.rglob("*.png")} for output in outputs.values()]
    yield compared(
        "similarities_picture", "" if pictures[0] and pictures[0] <= pictures[-1] else f"{pictures[0]}, {pictures[-1]}",
        f"{len(pictures[0])} pictures of the same names, here with the rule in them; and a heat map of all parameters",
    )  # fmt: skip
    expected = _broken(tables[0])
    by_us = tables[-1].with_name("broken_rule.csv").read_text(encoding="utf-8-sig").splitlines()[1:]
    found = sorted((step, name) for step, name, *_ in csv.reader(by_us))
    yield compared(
        "the rule: below 0.97 in the first step, or a drop of more than 0.03",
        "" if expected and found == expected else f"{found} and not {expected}",
        f"the original leaves it to the reader of its table. {len(found)} rows of broken_rule.csv are what it gives",
    )  # fmt: skip
    refusals = [ran(name, name, "L0", "L0", ours.folder / "none") for name in tools]
    yield compared(
        "two dumps of L0 have no directions",
        "" if all(refusals) and "nothing to compare" in refusals[1] else str(refusals),
        "both end with an error; here it names the directories, and the level to monitor with",
    )  # fmt: skip


def _of_mindspore(theirs: Side, ours: Side) -> Iterator[Feature]:
    yield differing(
        "MindSpore, PyNative mode: L0", _difference(theirs, ours, "ms-L0", without=("MD5",)).problem,
        "as under PyTorch: all columns but MD5 are equal; the original's MD5 is CRC32",
    )  # fmt: skip
    names = {
        "ms-L1": "L1", "ms-L2": "L2", "ms-float16": "L2 of float16", "ms-step": "step", "ms-param_list": "param_list",
        "ms-ranks": "2 ranks (msrun)", "ms-rank-1-of-2": "one rank of 2",
    }  # fmt: skip
    for key, name in names.items():
        yield _row(theirs, ours, f"MindSpore, PyNative mode: {name}", key, note=" are equal, but for norms, as above")
    ended = theirs.said["graph-L1"]["error"]
    supported = {"graph-L1": "L1", "graph-L2": "L2", "graph-ranks": "2 ranks (msrun)"}
    for key, name in supported.items():
        found = _difference(theirs, ours, key, without=("MD5",))
        why = "" if ended else "the original works in graph mode by now"
        yield differing(
            f"MindSpore, graph mode: {name}", found.problem or why,
            f"the original ends or hangs the training on the CPU. Here {found.files} files are those that it writes in "
            "PyNative mode, up to rounding of the gradients",
        )  # fmt: skip
    for key, name in {"graph-L0": "MD5", "graph-step": "step", "graph-rank-1-of-2": "rank"}.items():
        found = _difference(theirs, ours, key, without=("MD5",))
        yield differing(
            f"MindSpore, graph mode: {name}", found.problem,
            f"documented as not supported by the original; here {found.files} files are those of PyNative mode",
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compared:
    """How many files were compared, and the first difference in words; empty if there is none."""

    files: int
    problem: str


def _difference(theirs: Side, ours: Side, key: str, *, without: Sequence[str] = ()) -> _Compared:
    """Compare the files of a training; columns `without` are not compared."""
    if error := ours.said[key]["error"]:
        return _Compared(files=0, problem=error)
    dumps = (theirs.folder / LIKE.get(key, key) / "dump", ours.folder / key / "dump")
    names = [{path.relative_to(dump) for path in dump.glob("rank*/**/*") if path.is_file()} for dump in dumps]
    if names[0] != names[1] or not names[0]:
        only = [sorted(map(str, one - other))[:3] for one, other in (names, names[::-1])]
        return _Compared(files=0, problem=f"only the original has {only[0]}, only the replacement {only[1]}")
    for name in sorted(names[0]):
        one, other = (dump / name for dump in dumps)
        if name.suffix == ".csv":
            problem = _difference_of_tables(one, other, without=without, key=key)
        else:  # rounding turns the directions of elements near zero around
            same = one.stat().st_size == other.stat().st_size if key in LIKE else one.read_bytes() == other.read_bytes()
            problem = "" if same else "has other directions"
        if problem:
            return _Compared(files=0, problem=f"{name} {problem}")
    return _Compared(files=len(names[0]), problem="")


def _difference_of_tables(one: Path, other: Path, *, without: Sequence[str], key: str) -> str:
    contents = one.read_bytes(), other.read_bytes()
    forms = {(content[:3], content.count(b"\r\n"), content.splitlines()[0]) for content in contents}
    if len(forms) > 1:
        return "has another header, or is encoded in another way"
    tables = [[*csv.DictReader(content.decode("utf-8-sig").splitlines())] for content in contents]
    if key in LIKE:  # operators in a graph call back in any order
        tables = [sorted(table, key=lambda row: row["param_name"]) for table in tables]
    if [row["param_name"] for row in tables[0]] != [row["param_name"] for row in tables[1]]:
        return "has other rows"
    for expected, found in zip(*tables, strict=True):
        for column, value in expected.items():
            share = key in LIKE and (column == "=0" or column.startswith("("))
            if column in without or share or _is_near(value, found[column], _tolerance(key, column)):
                continue
            return f"{expected['param_name']} {column} is {value} in the original and {found[column]} here"
    return ""


def _tolerance(key: str, column: str) -> float:
    if column not in ("max", "min", "norm"):
        return 0.0
    if key in LIKE:
        return OTHER_WAY
    return ROUNDED.get(key.removeprefix("ms-"), ROUNDED_OTHERWISE) if column == "norm" else 0.0


def _is_near(value: str, found: str, tolerance: float) -> bool:
    if value == found:
        return True
    try:
        return abs(float(value) - float(found)) <= tolerance * abs(float(value))
    except ValueError:
        return False


def _broken(table: Path) -> list[tuple[str, str]]:
    """Step and parameter where the rule is broken, from the original's table."""
    found = []
    header, *rest = csv.reader(table.read_text(encoding="utf-8-sig").splitlines())
    for name, *cells in rest:
        before = None
        for step, share in zip(header[1:], map(float, cells), strict=True):
            if share < 0.97 if before is None else before - share > 0.03:
                found.append((step, name))
            before = share
    return sorted(found)
