"""ONNX Runtime's convergence tools beside `traindiff.compat.onnxruntime`."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.seeds.environments import ROOT
from benchmarks.seeds.onnxruntime_trainings import ORIGINAL, REPLACEMENT, Files, Results, files_of
from benchmarks.seeds.running import difference, results_of
from benchmarks.seeds.table import Feature, compared, differing

TITLE = "ONNX Runtime: StatisticsSubscriber and merge_activation_summary"
PACKAGES = (
    "torch==2.13.0", "onnxruntime-training==1.19.2", "onnx==1.23.2", "numpy==2.4.6", "setuptools==84.2.1",
    "pyarrow==26.0.1", "llvmlite==0.50.0", "fsspec==2026.9.0", "safetensors==0.8.0",
)  # fmt: skip
"""The last four are for the replacement, which runs in the same environment, with the same torch."""

ORTMODULE = ROOT / ".venv-ortmodule"
"""The environment in which ORTModule trains on a CPU; `make test-ortmodule` makes it."""

TRAININGS = "benchmarks.seeds.onnxruntime_trainings"


def features(original: Path | None) -> list[Feature]:
    """Compare the files that both wrote, and the errors that both raised."""
    assert original is not None
    with tempfile.TemporaryDirectory() as directory:
        theirs, ours = (
            results_of(original, TRAININGS, package, folder=Path(directory)) for package in (ORIGINAL, REPLACEMENT)
        )
    rows = [
        _row(name, theirs[key], ours[key], what)
        for key, name, what in (
            ("float32", "`GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(output_dir)])`", "3 steps"),
            ("float64", "float64", "3 steps of a float64 model"),
            ("bfloat16", "bfloat16", "3 steps of a bfloat16 model"),
            ("float16", "float16", "3 steps of a float16 model"),
            ("other dtypes", "activations of whole numbers", "int64, int32, uint8"),
            ("not finite", "NaN and infinities", "activations with NaN, inf, -inf"),
            ("steps", "`start_step`, `end_step` (exclusive)", "steps 1 and 2 of 5"),
            ("structures", "outputs that are tuples, lists, dicts, named tuples, with None and numbers", "2 steps"),
            ("evaluation", "steps without a backward pass", "2 of 4 steps under `no_grad`"),
            ("shared", "modules in several places, frozen parameters, detached outputs", "2 steps"),
            ("inspect_activation", '`inspect_activation("name", tensor)`', "3 tensors of a model in 2 steps"),
            ("_InspectActivation", "`_InspectActivation.apply`, as in ONNX Runtime's tests", "2 tensors in 2 steps"),
            ("buckets", "`bucket_size`", "buckets of 7 elements"),
            ("override", "`override_output_dir=True` where an earlier run is", "3 steps over 5 of an earlier run"),
            ("again", "the manager subscribes to another model", "2 models, one after the other"),
        )
    ]
    rows.append(_row("`run_on_cpu`", theirs["run_on_cpu"], ours["run_on_cpu"], "3 steps", with_std=True))
    rows.append(
        compared(
            "errors: `FileExistsError`, `ValueError`, `RuntimeError`", difference(theirs["errors"], ours["errors"]),
            f"the same {len(theirs['errors'])} mistakes: {', '.join(theirs['errors'])}",
        )
    )  # fmt: skip
    return [*rows, *_merging(original, theirs["float32"]), *_differences(theirs, ours), *_under_ortmodule()]


@dataclass(slots=True, kw_only=True)
class _Agreement:
    """How well files agree: the first problem, and the largest deviations in units of the largest element."""

    problem: str = ""
    num_files: int = 0
    mean: float = 0.0
    std: float = 0.0


def _agreement(theirs: Files, ours: Files, *, mean: float, std: float, ordered: bool = True) -> _Agreement:
    from traindiff.compat.onnxruntime.statistics import load

    found = _Agreement(problem=difference(sorted(theirs), sorted(ours)))
    for path, text in theirs.items():
        if found.problem:
            break
        found.num_files += 1
        if path.endswith("order.txt"):
            orders = [
                [one for one in order if ordered or one.endswith("_forward")]
                for order in (text.split(), ours[path].split())
            ]
            found.problem = f"{path}: {problem}" if (problem := difference(*orders)) else ""
            continue
        one, other = load(text, where=path), load(ours[path], where=path)
        exact = [
            [
                str(getattr(side, name))
                for name in (
                    "name", "direction", "depth", "shape", "dtype", "minimum", "maximum", "num_nan", "num_infinite",
                    "num_negative", "num_positive", "num_zero", "samples",
                )
            ]
            for side in (one, other)
        ]  # fmt: skip
        found.problem = f"{path}: {problem}" if (problem := difference(*exact)) else ""
        size = max(abs(one.minimum), abs(one.maximum)) or 1.0
        if math.isfinite(size):
            found.mean = max(found.mean, abs(one.mean - other.mean) / size)
            if not math.isnan(one.std) or not math.isnan(other.std):
                found.std = max(found.std, abs(one.std - other.std) / size)
        if not found.mean <= mean or not found.std <= std:
            found.problem = found.problem or f"{path}: means {one.mean}, {other.mean}, std {one.std}, {other.std}"
    return found


MEANS = {"bfloat16": 2**-7, "float16": 2**-9}
"""The original adds in the dtype of the tensor: so far its means may be off, in units of the largest element."""

MEAN = 2e-6
"""The same for float32: a few roundings of 6e-8 for each of at most 64 elements."""


def _row(name: str, theirs: Files, ours: Files, what: str, *, with_std: bool = False) -> Feature:
    ordered = not name.startswith("outputs")  # a row of its own says why
    found = _agreement(theirs, ours, mean=MEANS.get(name, MEAN), std=MEAN if with_std else math.inf, ordered=ordered)
    means = f"means within {found.mean:.1g} of the largest element"
    also = f", standard deviations within {found.std:.1g}" if with_std else ""
    return compared(
        name, found.problem or ("" if found.num_files else "the original wrote nothing"),
        f"{what}, {found.num_files} files: names, order{'' if ordered else ' of the forward pass'}, shapes, depths, "
        f"extremes, counts and printed elements are equal, {means}{also}",
    )  # fmt: skip


def _merging(original: Path, files: Files) -> Iterator[Feature]:
    """`merge_activation_summary` of both, given the same directories that the original wrote."""
    with tempfile.TemporaryDirectory() as directory:
        here = Path(directory)
        for name in ("pt_out", "ort_out"):
            for path, text in files.items():
                file = here / name / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
        (here / "ort_out" / "step_1" / next(path for path in files if "forward" in path).split("/")[1]).unlink()
        merged: list[Any] = []
        for package in (ORIGINAL, REPLACEMENT):
            said = [_merge(original, package, here, *extra) for extra in ([], [], ["--overwrite"])]
            merged.append((said, files_of(here / "out")))
            shutil.rmtree(here / "out")
    (theirs, their_files), (ours, our_files) = merged
    codes = [code == 0 for code, _ in theirs], [code == 0 for code, _ in ours]
    missing = ["not exist" in theirs[0][1], "is not there" in ours[0][1]]
    yield compared(
        "`python -m ...merge_activation_summary --pt_dir --ort_dir --output_dir`",
        difference(sorted(their_files.items()), sorted(our_files.items())) or difference(*codes)
        or ("" if all(missing) else f"the missing file was not named: {missing}"),
        f"{len(their_files)} merged files are equal byte for byte; both name the file that is missing, refuse a "
        "directory that exists, and accept `--overwrite`",
    )  # fmt: skip
    yield differing(
        "the end of a refused merge",
        "" if "Traceback" in theirs[1][1] and "Traceback" not in ours[1][1] and ours[1][0] == 2 else str(ours[1]),
        "the original ends with a traceback and code 1, the replacement with one problem and code 2",
    )


def _merge(python: Path, package: str, here: Path, *extra: str) -> tuple[int, str]:
    stub = "import torch; torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None; import runpy, sys; "
    code = f"{stub}sys.argv = ['merge', *sys.argv[1:]]; runpy.run_module('{package}.merge_activation_summary', "
    done = subprocess.run(
        [str(python), "-c", f"{code}run_name='__main__')", "--pt_dir", "pt_out", "--ort_dir", "ort_out",
         "--output_dir", "out", *extra],
        cwd=here, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True, check=False,
        timeout=300,
    )  # fmt: skip
    return done.returncode, done.stderr


def _differences(theirs: Results, ours: Results) -> Iterator[Feature]:
    """Rows of the differences on purpose: each is checked to be what its note says."""
    rows: list[str] = []
    problem = ""
    for dtype, (mean, std) in theirs["exact"].items():
        (their_mean, their_std), (our_mean, our_std) = (side["moments"][dtype] for side in (theirs, ours))
        if abs(our_mean - mean) > 1e-9 * abs(mean) or abs(our_std - std) > 1e-6 * std:
            problem = f"{dtype}: mean {our_mean}, std {our_std}, and right are {mean}, {std}"
        if abs(their_std - std) < 0.01 * std:
            problem = f"{dtype}: the original's standard deviation is right, too: {their_std}"
        rows.append(f"{dtype}: {their_mean:.6g} and {their_std:.6g}, right are {mean:.6g} and {std:.6g}")
    yield differing(
        "means and standard deviations", problem,
        f"the original's of one tensor are wrong ({'; '.join(rows)}); the replacement's are right",
    )  # fmt: skip
    checks: tuple[tuple[str, str, Callable[[Any, Any], bool], str], ...] = (
        ("called twice", "a module that is called twice, a name that is used twice",
         lambda one, other: len(one) == 5 and len(other) == 9 and set(one) <= set(other),
         "the original overwrites the first file; the replacement writes `NAME_call_1_forward`, too"),
        ("used inside", "the gradient of an output from which its module computes another one",
         lambda one, other: (one, other) == (["1.0", "1.0"], ["3.0", "3.0"]),
         "the original writes what comes from outside of the module (1), the replacement the whole gradient (3): to "
         "tell them apart takes a node in the graph, which would change the training's bits"),
        ("several outputs", "`order.txt` of a model with several outputs",
         lambda one, other: one != other and sorted(one) == sorted(other),
         "the same names; in the original, gradients of all outputs come first: its functions stand last in the graph"),
        ("odd outputs", "empty tensors, dataclasses",
         lambda one, other: all("Error" in said for said in one) and not any("Error" in said for said in other),
         "an error of the original ends the training; the replacement writes files as for others"),
        ("removed", "an `output_dir` that is removed during the training",
         lambda one, other: one == [3, 0] and other == [0, 1],
         "the original makes it again, without its first steps; the replacement ends the statistics with one warning"),
        ("foreign", "`override_output_dir=True` where other files are",
         lambda one, other: one == ["removed"] and other == ["FileExistsError", "kept"],
         "the original removes the directory with all that it holds; the replacement refuses, and removes nothing"),
        ("no subscriber", "`inspect_activation` without a subscriber",
         lambda one, other: one == ["RuntimeError"] and other == ["the tensor"],
         "the original raises an error; the replacement returns the tensor, so that the model runs without, too"),
        ("checkpointing", "activation checkpointing",
         lambda one, other: len(one) > len(other) == 2,
         "a recomputation counts as the next step in the original, and as none in the replacement"),
        ("hooks", "hooks after subscribing again", lambda one, other: one > other == 0,
         "the original's stay on the first model; the replacement removes them"),
        ("graph", "the graph of a training under PyTorch",
         lambda one, other: "_IncrementStep" in one and other == "AddmmBackward0",
         "the original puts its functions into it; the replacement sees by hooks, and puts nothing into it"),
        ("printing", "torch's print options", lambda one, other: one != "default" and other == "default",
         "changed by the original for the rest of the program, unchanged by the replacement"),
        ("subclass", "a subclass that overrides `module_post_forward_impl`, or another method that ONNX Runtime calls",
         lambda one, other: one == ["called"] and other == ["ConfigError"],
         "called by the original; the replacement refuses the class when it is made, and names `saw` instead"),
        ("zero", "`ZeROOffloadSubscriber`, `configure_ort_compatible_zero_stage3`",
         lambda one, other: one == ["there", "there"] and other == ["ImportError", "ImportError"],
         "they change how DeepSpeed gathers parameters under ORTModule, and show no numbers: import them from there"),
    )  # fmt: skip
    for key, name, holds, note in checks:
        one, other = theirs[key], ours[key]
        yield differing(name, "" if holds(one, other) else f"original: {one}; replacement: {other}", note)
    per_rank = [_agreement(theirs["ranks"][rank], ours["ranks"][rank], mean=MEAN, std=math.inf) for rank in range(2)]
    problem = next((one.problem for one in per_rank if one.problem), "")
    races = theirs["ranks"][2] < ours["ranks"][2] == 2 and ours["ranks"][3] == [0, 1]
    yield differing(
        "several ranks", problem or ("" if races else f"{theirs['ranks'][2:]} and {ours['ranks'][2:]}"),
        f"two ranks under DistributedDataParallel (gloo): {sum(one.num_files for one in per_rank)} files "
        "are equal, each rank's in `output_dir/rank_R`. In one directory, the original's ranks overwrite each other's "
        "files, so its users name one for each rank; the replacement needs one, and makes one recording of all",
    )  # fmt: skip


def _under_ortmodule() -> Iterator[Feature]:
    """Both inside of the graph that ORTModule exports; no row where ORTModule's own environment is not installed."""
    name = "ORTModule, subscribed before or after wrapping the model"
    python = ORTMODULE / "bin" / "python-with-torch"
    if not (ORTMODULE / "ready").exists():
        print(f"not run: {name}: there is no {ORTMODULE} (make test-ortmodule makes it)", file=sys.stderr)
        return
    with tempfile.TemporaryDirectory() as directory:
        theirs, ours = (
            results_of(python, TRAININGS, package, "ortmodule", folder=Path(directory))
            for package in (ORIGINAL, REPLACEMENT)
        )
    found = [_agreement(theirs[key], ours[key], mean=MEAN, std=math.inf) for key in ("before", "after")]
    problem = next((one.problem for one in found if one.problem), "")
    problem = problem or difference(theirs["used inside"], ours["used inside"])
    if not all(one.num_files for one in found):
        problem = "the original wrote nothing"
    yield compared(
        name, problem,
        f"3 steps each, {sum(one.num_files for one in found)} files (torch 1.13, with which the original's hooks of "
        "inputs fail; they are mended here): names, order, extremes, counts and printed elements are equal, also of an "
        "output that its module uses",
    )  # fmt: skip
