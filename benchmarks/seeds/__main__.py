"""Run each original beside its replacement and write SEEDS.md: `python -m benchmarks.seeds [SYSTEM ...]`."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import torch
from benchmarks.seeds.environments import ENVIRONMENTS, NoEnvironmentError, python_of
from benchmarks.seeds.table import document, section, sections

SYSTEMS = ("model_stepper", "compare_loss", "msprobe", "debug_underflow_overflow", "onnxruntime")
"""The modules beside this one, in the order of SEEDS.md.

Each has TITLE, PACKAGES and features(); if its original is no package, also REPOSITORY and COMMIT.
"""

RESULTS = Path(__file__).parents[1] / "SEEDS.md"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the systems; returns 1 if a feature is missing, or if an original could not be run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.seeds", description=__doc__)
    parser.add_argument("systems", nargs="*", metavar="SYSTEM", help=f"default: {' '.join(SYSTEMS)}")
    parser.add_argument(
        "--environments", type=Path, default=ENVIRONMENTS, help="folder of the environments (default: %(default)s)"
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="the file to write (default: %(default)s)")
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.systems if name not in SYSTEMS]:
        parser.error(f"{unknown[0]} is not a system; known: {', '.join(SYSTEMS)}")
    failed = False
    for name in given.systems or SYSTEMS:
        system = import_module(f"benchmarks.seeds.{name}")
        try:
            found = system.features(python_of(name, system.PACKAGES, folder=given.environments))
        except NoEnvironmentError as error:
            print(f"{system.TITLE}: {error}", file=sys.stderr)
            failed = True
            continue
        failed |= any(one.outcome == "missing" for one in found)
        text = section(system.TITLE, _source(system), found)
        print(text, end="\n\n", flush=True)
        _keep(given.output, system.TITLE, text)
    return int(failed)


def _source(system: ModuleType) -> str:
    if system.PACKAGES:
        original = ", ".join(system.PACKAGES)
    else:
        original = f"{system.REPOSITORY} at {system.COMMIT[:7]}, deepspeed=={version('deepspeed')}"
    ran = f"Run on {datetime.now(UTC):%Y-%m-%d} with Python {platform.python_version()}, torch {torch.__version__}."
    return f"Original: {original}. {ran}"


def _keep(file: Path, title: str, text: str) -> None:
    """Write one section into the file; the others stay as they were."""
    known = {**(sections(file.read_text()) if file.exists() else {}), title: text}
    titles = [import_module(f"benchmarks.seeds.{name}").TITLE for name in SYSTEMS]
    file.write_text(document({one: known[one] for one in titles if one in known}, titles=titles))


if __name__ == "__main__":
    sys.exit(main())
