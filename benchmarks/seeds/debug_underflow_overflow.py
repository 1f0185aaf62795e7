"""transformers' `DebugUnderflowOverflow` beside `traindiff.compat.transformers`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.seeds.debug_underflow_overflow_trainings import METHODS, ORIGINAL, REPLACEMENT, Lines, Results
from benchmarks.seeds.running import difference, results_of
from benchmarks.seeds.table import Feature, compared, differing

TITLE = "transformers: DebugUnderflowOverflow"
PACKAGES = (
    "torch==2.13.0", "transformers==5.23.0", "accelerate==1.15.0", "pyarrow==26.0.1", "llvmlite==0.50.0",
)  # fmt: skip
"""The last two are for the replacement, which runs in the same environment: a `Trainer` needs both."""

FEATURES = (
    ("detection", "Detection: the frames that led to NaN or infinity are printed, and `ValueError` raised",
     "float32, bfloat16, float16, float64; 4 trainings each"),
    ("frames", "`max_frames_to_save`",
     "1, 3 and 100 frames, and the 21 that are the default"),
    ("trace", "`trace_batch_nums`: whole batches are printed, without detection",
     "batches 1 and 3 of trainings without and with infinity"),
    ("abort", "`abort_after_batch_num`",
     "after batches 0 and 3, with and without tracing"),
    ("functions", "`detect_overflow(var, ctx)` and `get_abs_min_max(var, ctx)`",
     "results and output in five dtypes, with NaN and infinities"),
    ("replaced functions", "a changed `detect_overflow` or `get_abs_min_max`",
     "output with own functions in their places"),
    ("subclasses", "methods and attributes, and subclasses of the detector",
     f"each of the {len(METHODS)} methods overridden in turn: calls, output, attributes at the end"),
    ("own frames", "a subclass with frames of its own",
     "`create_frame` written with `expand_frame`, `analyse_variable`, `batch_end_frame`, `save_frame`"),
    ("options", "`DebugOption`",
     "names, values, texts, the error, and `in training_args.debug`"),
    ("ranks", "several GPUs, with DistributedDataParallel",
     "two ranks over gloo on the CPU: output and error of each"),
    ("trainer", "`--debug underflow_overflow` of `Trainer`",
     "the same `Trainer` with `UnderflowOverflowCallback()` instead"),
)  # fmt: skip
"""Key of the training, name of the feature as the original documents it, and what is compared."""

TRAININGS = "benchmarks.seeds.debug_underflow_overflow_trainings"


def features(original: Path | None) -> list[Feature]:
    """Compare what both printed and raised, and in which state they ended."""
    assert original is not None
    with tempfile.TemporaryDirectory() as directory:
        theirs, ours = (
            results_of(original, TRAININGS, module, folder=Path(directory)) for module in (ORIGINAL, REPLACEMENT)
        )
    rows = []
    for key, name, what in FEATURES:
        lines = sum(str(entry).count("\n") + 1 for entry in theirs[key])
        rows.append(compared(name, difference(theirs[key], ours[key]), f"{what}: {lines:,} lines, all equal"))
    return [*rows, *_differences(theirs, ours)]


def _differences(theirs: Results, ours: Results) -> Iterator[Feature]:
    """Rows of the differences on purpose: each is checked to be what its note says."""
    printed, error = ours["dataclasses"]
    found = "output.logits has infs" in printed and "inf output.logits\n" in printed and error.startswith("ValueError")
    blind = theirs["dataclasses"] == ["", "none raised"]
    yield differing(
        "outputs that are dicts, lists or dataclasses",
        "" if found and blind else f"{theirs['dataclasses']} and {ours['dataclasses']}",
        "the original calls them `not a tensor`: it missed an infinity in one. The replacement looks inside, printed "
        "`inf output.logits`, and raised the error. Models of transformers return dataclasses",
    )
    left_out = [line for line in _lines(theirs["t5"]) if line.strip() != "not a tensor output"]
    inside = [line for line in _lines(ours["t5"]) if not _is_inside(line)]
    yield differing(
        "a model of transformers (T5, as in the documentation)", difference(left_out, inside),
        f"{len(left_out):,} lines of a float32 and a bfloat16 model are equal; only the lines of the outputs that are "
        "dataclasses are not, as in the row above",
    )  # fmt: skip
    frames = [str(side["shared"]).count("inner Linear") for side in (theirs, ours)]
    yield differing(
        "a module in several places of the model", "" if frames == [2, 1] else f"frames: {frames}",
        "one call makes one frame here; the original attaches its hook once for each place, and prints the frame twice",
    )  # fmt: skip
    odd = [str(side["odd tensors"]) for side in (theirs, ours)]
    yield differing(
        "empty, boolean and sparse tensors",
        "" if odd[0].count("Error") == 3 and odd[1].count("Error") == 0 and "empty" in odd[1] else str(odd),
        "the original ends the training with an error of torch; the replacement prints what can be read, or `empty`",
    )


def _lines(printed: list[Any]) -> Lines:
    return "\n".join(map(str, printed)).splitlines()


def _is_inside(line: str) -> bool:
    """True for a line of a tensor inside of an output that is a dataclass."""
    name = line.split()[-1] if line.split() else ""
    return name.startswith("output.")
