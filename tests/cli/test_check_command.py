"""`traindiff check`: what it prints where, and how it exits."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.cli.conftest import Traindiff
from tests.made_up import at, record
from traindiff.analyse.check import RULES


def drifting(path: Path) -> str:
    """On rank 2 a parameter is another one from step 1 on."""
    for rank in range(3):
        edit = at(("param", "", "fc.weight", "value"), lambda values: values + 1, step=1)
        record(path, *([edit] if rank == 2 else []), rank=rank, run={"world_size": 3})
    return str(path)


def test_a_healthy_run_exits_with_zero(traindiff: Traindiff) -> None:
    result = traindiff("check", "baseline")

    assert (result.exit_code, result.stderr) == (0, "")
    verdict, space, rules = result.stdout.splitlines()
    assert (verdict, space) == ("healthy: no rule is broken, over 3 steps (0 to 2)", "")
    assert re.fullmatch(rf"{len(RULES)} rules: \d+ found nothing, \d+ not applicable \(.*\)\.", rules)


def test_a_rank_that_drifts_is_printed_and_exits_with_one(traindiff: Traindiff, tmp_path: Path) -> None:
    result = traindiff("check", drifting(tmp_path / "run"))

    assert result.exit_code == 1
    assert [
        line.rstrip() for line in result.stdout.partition(f"\n\n{len(RULES)} rules: 1 broken, ")[0].splitlines()
    ] == [
        "unhealthy: the run breaks rules that it should keep by itself, over 3 steps (0 to 2) on 3 ranks",
        "",
        "First finding: step 1, param, fc.weight value",
        "  Rank 2 holds another copy of fc.weight value than ranks 0 and 1. They differ by 1.1 of their size (relative "
        "L2).",
        "  more: traindiff explain ranks-disagree",
    ]


def test_json_is_all_that_is_on_standard_output(traindiff: Traindiff, tmp_path: Path) -> None:
    result = traindiff("check", drifting(tmp_path / "run"), "--json")

    found = json.loads(result.stdout)
    assert found["schema"] == {"name": "traindiff-check", "version": 1}
    assert (found["verdict"], found["ranks"], found["steps"]) == ("unhealthy", [0, 1, 2], [0, 1, 2])
    assert (found["findings"][0]["rank"], found["findings"][0]["site"]) == (2, "fc.weight")


def test_what_is_no_recording_exits_with_two(traindiff: Traindiff) -> None:
    result = traindiff("check", "nowhere")

    assert (result.exit_code, result.stdout) == (2, "")
    assert "nowhere" in result.stderr
