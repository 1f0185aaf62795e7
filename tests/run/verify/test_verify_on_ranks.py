"""`traindiff.verify` under engines: each rank in a process of its own, faults pinned down, failures told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import traindiff
from tests.run.verify import divided
from tests.run.verify.conftest import Verify
from traindiff.analyse.compare import Verification
from traindiff.run.config.setup import Setup

DDP = Setup(engine="ddp", nproc=2)


@pytest.fixture
def verify(verify: Verify) -> Verify:
    """Verify two steps under an engine, against the same training without one."""

    def run(candidate: Any = divided.recipe, setup: Setup = DDP, recipe: Any = divided.recipe, **options: Any) -> Any:
        few = {"repeat": False, "replicas": ("ulp:1", "ulp:2")}
        return verify(candidate, recipe, setup=setup, **{**few, **options})

    return run


def wrong_alone(verification: Verification) -> list[str]:
    return [f"{one.phase} {one.site}" for one in verification.pinned[0].comparison.findings]


def test_a_training_under_ddp_is_equivalent_to_one_process_and_what_was_run_is_said(
    verify: Verify, tmp_path: Path
) -> None:
    found = verify()

    assert (found.verdict, found.exit_code) == ("equivalent", 0)
    assert found.comparison.unaligned == ((), ())
    assert str(found).splitlines()[:3] == [
        "baseline   recipe (plain)",
        "candidate  recipe (ddp, nproc=2)",
        f"files      {tmp_path / 'runs'}",
    ]
    assert found.sides[1].setup["engine"] == "ddp"
    assert (tmp_path / "runs" / "report.txt").read_text().startswith("baseline   recipe (plain)\n")
    assert json.loads((tmp_path / "runs" / "verification.json").read_text()) == found.to_json()


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_given_the_baselines_tensors_every_operation_of_an_engine_agrees(engine: Any, verify: Verify) -> None:
    found = verify(setup=Setup(engine=engine, nproc=2), steps=1, pin="always")

    assert found.verdict == "equivalent"
    assert [pinned.comparison.findings for pinned in found.pinned] == [()]
    assert "not be forced" not in str(found)
    assert "Not forced" not in str(found)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
@pytest.mark.parametrize(
    ("candidate", "wrong"),
    [
        (divided.other_epsilon, ["forward 2 output[0]", "backward 1 output[0]", "grad 2.weight grad"]),
        (divided.doubled_gradient, ["grad 3.weight grad"]),
    ],
)
def test_a_fault_is_pinned_down_to_what_computes_it_under_an_engine(
    candidate: Any, wrong: list[str], engine: Any, verify: Verify
) -> None:
    found = verify(candidate, Setup(engine=engine, nproc=2), steps=1)

    assert (found.verdict, found.exit_code) == ("diverged", 1)
    assert wrong_alone(found) == wrong


def test_micro_batches_on_ranks_are_forced_to_their_rows(verify: Verify) -> None:
    found = verify(divided.other_epsilon, Setup(engine="ddp", nproc=2, gradient_accumulation_steps=2), steps=1)

    assert wrong_alone(found) == ["forward 2 output[0]", "backward 1 output[0]", "grad 2.weight grad"]


def test_a_candidate_that_raises_on_one_rank_is_incomplete_with_what_that_rank_saw_and_printed(verify: Verify) -> None:
    found = verify(divided.raising, steps=3)

    assert (found.verdict, found.exit_code) == ("incomplete", 3)
    assert found.failed is not None
    assert found.failed.message == (
        "Rank 1 raised ValueError: two steps are one too many. Before that it had ended 1 step. "
        "Its last observation: step 1, micro-step 0, forward, 1 output[0]."
    )
    assert found.comparison.steps == (0,)
    assert "out of data" in str(found)
    assert [rank["rank"] for rank in found.to_json()["failed"]["ranks"]] == [0, 1]


def test_a_candidate_of_which_a_rank_is_killed_keeps_the_steps_that_it_has_ended(verify: Verify) -> None:
    found = verify(divided.killed, steps=3)

    assert (found.verdict, found.exit_code) == ("incomplete", 3)
    assert found.failed is not None
    assert "Rank 1 was ended by signal 9, SIGKILL" in found.failed.message
    assert "Its last observation: step 1, micro-step 0, forward, 1 output[0]." in found.failed.message
    assert found.comparison.steps == (0,)
    assert found.comparison.findings == ()


def test_a_candidate_that_hangs_is_ended_and_shows_where_it_hangs(verify: Verify) -> None:
    found = verify(divided.hanging, steps=3, timeout=8)

    assert (found.verdict, found.exit_code) == ("incomplete", 3)
    assert found.failed is not None
    assert found.failed.message.startswith("Rank 1 did not end step 1 in ")
    assert "divided.py" in next(rank.stack for rank in found.failed.ranks if rank.rank == 1)


@pytest.mark.parametrize(
    ("fault", "end"), [("killed", "was ended by signal 9, SIGKILL"), ("hanging", "did not end step 1 in ")]
)
def test_a_baseline_that_does_not_end_is_refused_and_the_report_says_how_it_ended(
    fault: str, end: str, verify: Verify, tmp_path: Path
) -> None:
    with pytest.raises(traindiff.ConfigError) as caught:
        verify(f"tests.run.verify.divided:{fault}", Setup(), f"tests.run.verify.divided:{fault}", steps=3, timeout=5)

    assert "1 problem in verify(...); nothing was done.\n\n  run baseline\n" in str(caught.value)
    assert f"failed. Rank 0 {end}" in str(caught.value)
    report = (tmp_path / "runs" / "report.txt").read_text()
    assert "incomplete: nothing could be compared" in report
    assert f"The run baseline failed. Rank 0 {end}" in report
    assert "The candidate cannot be judged without it." in report
    found = json.loads((tmp_path / "runs" / "verification.json").read_text())
    assert (found["verdict"], found["failed"]["run"]) == ("incomplete", "baseline")


def test_what_the_machine_cannot_run_is_said_all_at_once_before_anything_is_started(
    verify: Verify, tmp_path: Path
) -> None:
    with pytest.raises(traindiff.ConfigError) as caught:
        verify(setup=Setup(engine="plain", nproc=2, zero_stage=1), timeout=-1.0)

    assert [problem.where for problem in caught.value.problems] == [
        "timeout=-1", "engine=plain, nproc=2", "engine=plain, zero_stage=1",
    ]  # fmt: skip
    assert not (tmp_path / "runs").exists()


def test_a_recipe_without_a_loss_is_refused_for_an_engine_before_anything_is_run(
    verify: Verify, tmp_path: Path
) -> None:
    with pytest.raises(traindiff.ConfigError, match="cannot be run as: ddp, nproc=2"):
        verify("tests.run.verify.divided:without_a_loss")

    assert not (tmp_path / "runs").exists()


def test_a_function_that_other_processes_cannot_import_is_refused_for_an_engine(verify: Verify) -> None:
    with pytest.raises(traindiff.ConfigError, match="they cannot import it"):
        verify(lambda: divided.recipe())


def test_a_compiled_candidate_is_not_forced_and_what_the_compiler_said_is_gathered(
    verify: Verify, tmp_path: Path
) -> None:
    found = verify(divided.breaking_its_graph, Setup(compile=True), steps=1, pin="always", compiler_logs=True)

    assert found.verdict in ("identical", "equivalent")
    assert found.pin_note.startswith("Step 0 was not run again with forced tensors: what compiled code computes")
    assert found.compiler is not None
    assert found.compiler.num_guards > 0
    assert any("divided.py" in one for one in found.compiler.graph_breaks)
    assert "__graph_breaks" in Path(found.compiler.file).read_text()
    assert found.compiler.message in (tmp_path / "runs" / "report.txt").read_text()
