"""Run the other tests of this directory in Triton's interpreter, where no GPU is needed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


PART = (
    "bit_pattern or lengths_around or flat_ranges or what_is_added or tables_are_read or read_late or spacing0 "
    "or in_a_graph or plan or a_witnessed or witnessed_tables or (witnessed and (sizes1 or shape1))"
)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("chosen", "least"), [(PART, 20), pytest.param("test", 60, marks=pytest.mark.release)], ids=["part", "whole"]
)
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is the interpreter's process")
def test_the_kernel_matches_the_reference_in_tritons_interpreter(chosen: str, least: int) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-k",
        chosen,
        str(HERE),
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    environment.pop("PYTEST_ADDOPTS", None)

    run = subprocess.run(
        command, env=environment, cwd=HERE.parents[2], capture_output=True, text=True, timeout=880, check=False
    )

    assert run.returncode == 0, run.stdout + run.stderr
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None
    assert int(passed[1]) >= least, run.stdout
