"""`traindiff verify --matrix`: a row for each combination, baselines shared, finished ones kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.run.verify import divided
from traindiff.analyse.compare.investigation import Matrix, MatrixRow
from traindiff.present.text.results import print_matrix
from traindiff.run.verify.matrix import Combination, _directory, verify_matrix
from traindiff.run.verify.request import VerifyRequest


def asked(output: Path, candidate: Any = divided.recipe, **question: Any) -> VerifyRequest:
    asks = {"steps": 1, "replicas": ("ulp:1", "ulp:2"), "pin": "never", **question}
    return VerifyRequest(recipe=divided.recipe, candidate=candidate, output=output, repeat=False, **asks)


def combination(**varied: Any) -> Combination:
    return Combination(varied=varied, options=varied)


ALL = [
    combination(gradient_accumulation_steps=1),
    combination(gradient_accumulation_steps=4),
    combination(dtype="bfloat16"),
    combination(engine="plain", nproc=2),
]


def words(matrix: Matrix) -> list[str]:
    return [row.verdict for row in matrix.rows]


def test_combinations_share_their_baseline_and_what_cannot_be_run_is_a_row_with_the_reason(tmp_path: Path) -> None:
    heard: list[str] = []
    found = verify_matrix(asked(tmp_path), ALL, on_row=lambda row: heard.append(row.name))

    assert words(found) == ["identical", "equivalent", "identical", "impossible"]
    assert found.exit_code == 0
    assert "with nothing for further ranks" in found.rows[3].message
    assert heard == [row.name for row in found.rows]
    assert sorted(entry.name for entry in (tmp_path / "baselines").iterdir()) == ["plain", "plain,dtype=bfloat16"]
    assert (Path(found.rows[1].output) / "report.txt").exists()


def test_what_is_finished_is_kept_until_something_changes(tmp_path: Path) -> None:
    first = verify_matrix(asked(tmp_path), ALL[:2])
    baseline = tmp_path / "baselines" / "plain" / "baseline" / "run.json"
    recorded = baseline.stat().st_mtime_ns

    again = verify_matrix(asked(tmp_path), ALL[:3])
    assert [row.kept for row in again.rows] == [True, True, False]
    assert [replace(row, kept=False) for row in again.rows[:2]] == list(first.rows)

    changed = verify_matrix(asked(tmp_path, rtol=0.1), ALL[:1])
    assert not changed.rows[0].kept
    assert baseline.stat().st_mtime_ns == recorded  # on which it does not depend

    longer = verify_matrix(asked(tmp_path, steps=2), ALL[:1])
    assert not longer.rows[0].kept
    assert baseline.stat().st_mtime_ns != recorded

    assert not verify_matrix(asked(tmp_path, steps=2), ALL[:1], fresh=True).rows[0].kept


def test_the_worst_of_those_that_ran_decides_how_it_exits(tmp_path: Path) -> None:
    found = verify_matrix(asked(tmp_path, divided.other_epsilon), [ALL[0], ALL[3]])

    assert words(found) == ["diverged", "impossible"]
    assert found.exit_code == 1
    assert found.rows[0].message.startswith(
        "step 0, micro-step 0, forward, 2 output[0]: 2: eps is 1e-05 in the baseline and "
    )


def test_a_candidate_that_fails_is_a_row_and_the_others_are_still_run(tmp_path: Path) -> None:
    found = verify_matrix(asked(tmp_path, divided.raising, steps=2), ALL[:2])

    assert words(found) == ["incomplete", "incomplete"]
    assert found.rows[0].message.startswith("Rank 0 raised ValueError: two steps are one too many.")


def row(verdict: str, exit_code: int) -> MatrixRow:
    return MatrixRow(
        name="engine=ddp", varied={}, verdict=verdict, message="", seconds=1.25, output="x", exit_code=exit_code
    )


def test_the_table_has_a_line_for_each_combination_and_a_count_of_verdicts() -> None:
    rows = (
        row("equivalent", 0),
        replace(row("diverged", 1), name="engine=fsdp2", message="step 0, grad, w grad: doubled.", kept=True),
        replace(row("impossible", 0), name="engine=tp", message="nproc=1 is too few.", seconds=0.0),
    )
    console = Console(width=120, highlight=False)

    with console.capture() as printed:
        print_matrix(console, Matrix(recipe="train.py:recipe", output="out", rows=rows))

    lines = [line.rstrip() for line in printed.get().splitlines()]
    assert lines[0] == "train.py:recipe; a report of each combination is below out"
    assert [line.split()[:2] for line in lines[2:6]] == [
        ["combination", "verdict"], ["engine=ddp", "equivalent"], ["engine=fsdp2", "diverged"],
        ["engine=tp", "impossible"],
    ]  # fmt: skip
    assert lines[3].endswith("1.2 s")
    assert lines[4].endswith("kept")
    assert lines[-1] == "3 combinations: 1 equivalent, 1 diverged, 1 impossible."


def test_a_row_comes_through_json_as_it_was() -> None:
    assert MatrixRow(**json.loads(json.dumps(row("diverged", 1).to_json()))) == row("diverged", 1)


def test_a_verdict_is_not_kept_when_the_module_of_its_recipe_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "of_matrix"
    package.mkdir()
    (package / "__init__.py").touch()
    text = "from tests.run.verify.divided import recipe\n"
    (package / "training.py").write_text(text)
    question = replace(asked(tmp_path / "runs"), recipe="of_matrix.training:recipe", replicas=())

    def kept() -> bool:
        return verify_matrix(question, ALL[:1]).rows[0].kept

    assert (kept(), kept()) == (False, True)
    (package / "training.py").write_text(f"{text}# another learning rate\n")
    assert not kept()


def test_directories_of_different_names_differ() -> None:
    names = ["engine=a b", "engine=a_b", "engine=a, b", "engine=a,b", "engine=" + "a" * 200, "engine=" + "a" * 201]

    assert len({_directory(name) for name in names}) == len(names)
    assert _directory("engine=ddp, dtype=float32") == "engine=ddp,dtype=float32"
