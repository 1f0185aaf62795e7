"""Two directories of statistics as one file per step for each, as ONNX Runtime's tool of this name makes them.

    python -m traindiff.compat.onnxruntime.merge_activation_summary --pt_dir pt_out --ort_dir ort_out --output_dir out

Files are joined in the order of the first directory's first step, then those that only other steps have. The first
difference that means something is found by
`traindiff compare pt_out/recording ort_out/recording`.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from traindiff.compat.onnxruntime.statistics import ORDER, order_of, ranks_in, steps_in, text_of
from traindiff.errors import ConfigError, NotARecordingError, Problem, TraindiffError

MERGED = ("merge_pt", "merge_ort")
"""Directories that it writes."""

_FILE = re.compile(r"step_\d+_\.txt", re.ASCII)


def merge(pt_dir: str, ort_dir: str, output_dir: str, *, overwrite: bool = False) -> list[str]:
    """Join the files of each step, in the same order for both directories.

    Args:
        pt_dir: `output_dir` of the run under PyTorch. Its first step gives the order. For several ranks, that of one
            rank.
        ort_dir: `output_dir` of the other run.
        output_dir: Directory to make; has `merge_pt/step_N_.txt` and `merge_ort/step_N_.txt`.
        overwrite: Replace the files that an earlier call made there.

    Returns:
        Files that are in the order and missing in a directory.

    Raises:
        ConfigError: `output_dir` exists, and `overwrite` is not given, or it holds other files.
        NotARecordingError: One of the directories has no such files.
    """
    sides = [(Path(directory), steps_in(Path(directory))) for directory in (pt_dir, ort_dir)]
    for directory, steps in sides:
        if not steps or not (next(iter(steps.values())) / ORDER).is_file():
            ranks = "" if steps else ", ".join(path.name for path in ranks_in(directory).values())
            raise NotARecordingError(
                f"{directory} holds the ranks {ranks}, which are merged one by one. Give one of these directories."
                if ranks
                else f"{directory} holds no step_0/{ORDER} or the like, so no StatisticsSubscriber has written it. "
                "Give the directory that its output_dir named."
            )
    orders = [{step: order_of(path) if (path / ORDER).is_file() else [] for step, path in steps.items()}
              for _, steps in sides]  # fmt: skip
    _make_room(Path(output_dir), overwrite=overwrite)
    first = next(iter(orders[0].values()))
    missing = []
    for name, (_, steps), own in zip(MERGED, sides, orders, strict=True):
        merged = Path(output_dir, name)
        merged.mkdir(parents=True, exist_ok=True)
        for number, step in steps.items():
            with (merged / f"{step.name}_.txt").open("wb") as file:
                for one in dict.fromkeys([*first, *own[number]]):
                    if (step / one).is_file():
                        file.write(text_of(step, one).encode() + b"\n")
                    else:
                        missing.append(str(step / one))
    return missing


def _make_room(output: Path, *, overwrite: bool) -> None:
    if not output.exists():
        return
    other = _others(output) if output.is_dir() else ["a file"]
    if other or not overwrite:
        what = f"is there, and holds other things ({', '.join(other[:3])})." if other else "is there already."
        fix = "Give a directory that does not exist yet." if other else "Give another one, or --overwrite."
        problem = Problem(where=f"--output_dir {output}", what=what, fix=fix)
        raise ConfigError("merge_activation_summary", [problem], consequence="nothing was merged")
    for name in MERGED:
        if (output / name).is_dir():
            shutil.rmtree(output / name)


def _others(output: Path) -> list[str]:
    """Files of a directory that are not merged files."""
    merged = [output / name for name in MERGED if (output / name).is_dir() and not (output / name).is_symlink()]
    inside = [one for directory in merged for one in directory.iterdir()]
    other = [one for one in output.iterdir() if one not in merged]
    other += [one for one in inside if not one.is_file() or not _FILE.fullmatch(one.name)]
    return sorted(str(one.relative_to(output)) for one in other)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m traindiff.compat.onnxruntime.merge_activation_summary",
        description="Join the statistics of each step, of two runs in the same order.",
    )
    parser.add_argument("--pt_dir", required=True, help="output_dir of the run under PyTorch.")
    parser.add_argument("--ort_dir", required=True, help="output_dir of the run under ORTModule.")
    parser.add_argument("--output_dir", required=True, help="Directory to make.")
    parser.add_argument("--overwrite", action="store_true", help="Replace what was merged there before.")
    given = parser.parse_args(arguments)
    try:
        missing = merge(given.pt_dir, given.ort_dir, given.output_dir, overwrite=given.overwrite)
    except TraindiffError as error:
        sys.stderr.write(f"traindiff: {error}\n")
        return 2
    for one in missing:
        sys.stderr.write(f"traindiff: {one} is not there; an exported graph leaves out what nothing depends on\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
