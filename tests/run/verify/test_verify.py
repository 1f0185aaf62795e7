"""`traindiff.verify` and `traindiff.calibrate`: whole verifications of a small training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import traindiff
from tests.run.verify.conftest import Verify
from tests.run.verify.recipes import Change, doubled_gradient, mlp, other_epsilon, other_gelu
from traindiff.analyse.compare import Verification
from traindiff.run.demo import recipes


def wrong_alone(verification: Verification, precision: str = "native") -> list[str]:
    """Phase and site of all that is wrong by itself."""
    pinned = next(one for one in verification.pinned if one.precision == precision)
    return [f"{one.phase} {one.site}" for one in pinned.comparison.findings]


# Verdicts.


def test_a_training_verified_against_itself_is_identical(tmp_path: Path) -> None:
    found = traindiff.verify(recipes.mlp, recipes.mlp, tmp_path, steps=2)

    assert (found.verdict, found.exit_code, found.first_divergence) == ("identical", 0, None)
    assert (found.pinned, found.pin_note) == ((), "")
    assert str(found).startswith(
        f"baseline   mlp (plain)\ncandidate  mlp (plain)\nfiles      {tmp_path}\n\n"
        "Your baseline's own noise is 0: run again, it gives the same bits.\n\nidentical: "
    )
    assert "Floors are measured from 3 replicas: ulp:1, ulp:2, reorder:1." in str(found)


def test_a_legal_variation_is_equivalent(verify: Verify) -> None:
    found = verify(mlp(micro_batches=4))

    assert (found.verdict, found.comparison.calibrated) == ("equivalent", True)
    assert found.pinned == ()


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (other_gelu, ["forward 1 output[0]", "backward 0 output[0]"]),
        (other_epsilon, ["forward 2 output[0]", "backward 1 output[0]", "grad 2.weight grad"]),
    ],
)
def test_a_wrong_operation_is_found_and_pinned_down_to_what_it_computes(
    change: Change, wrong: list[str], verify: Verify
) -> None:
    found = verify(mlp(change))

    assert (found.verdict, found.exit_code) == ("diverged", 1)
    assert found.first_divergence is not None
    assert f"forward {found.first_divergence.site}" == wrong[0]
    assert found.comparison.calibrated
    assert wrong_alone(found) == wrong


def test_a_wrong_gradient_is_pinned_down_to_exactly_its_parameter(verify: Verify) -> None:
    found = verify(mlp(before_step=doubled_gradient))

    assert wrong_alone(found) == ["grad 3.weight grad"]
    assert "given the baseline's tensors, 1 site is wrong alone:" in str(found)
    assert "step 0, micro-step 0, grad, 3.weight grad: The candidate's is 2 x the baseline's." in str(found)


def test_two_wrong_operations_are_both_named(verify: Verify) -> None:
    found = verify(mlp(other_gelu, other_epsilon))

    assert wrong_alone(found) == [
        "forward 1 output[0]", "forward 2 output[0]", "backward 1 output[0]", "backward 0 output[0]",
        "grad 2.weight grad",
    ]  # fmt: skip
    causes = [one.message.partition(":")[0] for one in found.pinned[0].comparison.findings]
    assert causes == ["1", "2", "2", "1", "2"]  # a gradient is wrong by the module that handed it back


def test_a_fault_that_begins_late_is_pinned_down_in_its_step(verify: Verify) -> None:
    def late(model: nn.Sequential) -> None:
        calls: list[None] = []

        def from_the_third_call(module: Any, *_: Any) -> None:
            calls.append(None)
            module.eps = 1e-5 if len(calls) < 3 else 1e-2

        model[2].register_forward_pre_hook(from_the_third_call)

    found = verify(mlp(late), steps=4)

    assert found.first_divergence is not None
    assert found.first_divergence.step == 2
    assert [one.step for one in found.pinned] == [2]
    assert wrong_alone(found)[0] == "forward 2 output[0]"


def test_what_bfloat16_hides_is_found_in_float32(verify: Verify) -> None:
    found = verify(mlp(other_gelu, dtype=torch.bfloat16), mlp(dtype=torch.bfloat16), pin="always")

    assert found.comparison.verdict == "equivalent"
    assert found.verdict == "diverged"
    assert [one.precision for one in found.pinned] == ["native", "float32"]
    assert wrong_alone(found, "float32") == ["forward 1 output[0]", "backward 0 output[0]"]
    assert found.first_divergence is not None
    assert found.first_divergence.path == "1"


def test_a_training_in_bfloat16_agrees_with_itself_in_float32_too(verify: Verify) -> None:
    found = verify(mlp(dtype=torch.bfloat16), mlp(dtype=torch.bfloat16), pin="always")

    assert [(one.precision, one.comparison.findings) for one in found.pinned] == [("native", ()), ("float32", ())]
    assert found.verdict == "identical"
    assert "in float32: given the baseline's tensors, every operation agrees." in str(found)


def test_runs_that_were_not_given_the_same_are_misaligned_and_not_pinned_down(verify: Verify) -> None:
    def initialized(model: nn.Sequential) -> None:
        nn.init.zeros_(model.get_parameter("3.bias"))

    found = verify(mlp(initialized))

    assert (found.verdict, found.exit_code, found.pinned) == ("misaligned", 3, ())


def test_what_is_only_represented_otherwise_is_not_held_against_the_baselines_tensors(verify: Verify) -> None:
    def reversed_batches() -> traindiff.Training:
        training = mlp()()
        assert isinstance(training, traindiff.Training)
        return replace(training, batches=[batch.flip(0) for batch in training.batches])

    found = verify(reversed_batches, pin="always")

    assert (found.verdict, found.exit_code, found.pinned) == ("equivalent", 0, ())
    assert found.comparison.representation[0].kind == "batch"
    assert "Nothing was run again with forced tensors: the candidate represents some otherwise" in str(found)


def test_nothing_is_pinned_down_where_that_was_not_wanted(verify: Verify) -> None:
    assert verify(mlp(other_gelu), pin="never").pinned == ()


def test_what_could_not_be_forced_is_said(verify: Verify) -> None:
    class Expanded(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)[:1].expand(len(x), -1)

    def expanding(model: nn.Sequential) -> None:
        model[0] = Expanded(6, 32)

    found = verify(mlp(expanding, other_epsilon), mlp(expanding))

    assert wrong_alone(found)[0] == "forward 2 output[0]"
    assert (
        "Not forced, so what is computed from it may carry earlier errors: 0 output[0] (its elements share memory)."
        in str(found)
    )


def test_a_compiled_candidate_is_compared_and_the_report_says_why_it_is_not_pinned_down(verify: Verify) -> None:
    found = verify(mlp(other_epsilon, lambda model: model.compile(backend="eager")))

    assert found.verdict == "diverged"
    assert found.pinned == ()
    assert found.pin_note.startswith("Step 0 could not be run again with forced tensors: recipe ")
    assert found.pin_note.endswith("Verify the same training without torch.compile.")
    assert found.pin_note in str(found)


# Recipes that cannot be used.


def test_a_recipe_that_is_another_training_each_time_is_refused_with_what_differs(verify: Verify) -> None:
    calls: list[None] = []

    def drifting(model: nn.Sequential) -> None:
        calls.append(None)
        with torch.no_grad():
            model.get_parameter("0.weight").add_(len(calls))

    with pytest.raises(traindiff.ConfigError) as caught:
        verify(mlp(), mlp(drifting))

    assert "is not the same training when it is called again. In step 0: 0.weight starts with other" in str(
        caught.value
    )
    assert "Prepare model, data and generators from scratch in each call" in str(caught.value)


def test_a_baseline_whose_numbers_vary_by_themselves_is_said_first_and_its_noise_is_used(verify: Verify) -> None:
    generator = torch.Generator().manual_seed(0)  # which is not seeded anew

    def varying(model: nn.Sequential) -> None:
        model[1].register_forward_hook(lambda _, __, out: out * (1 + 1e-3 * torch.rand(1, generator=generator)))

    found = verify(mlp(varying), mlp(varying), pin="never")

    assert found.verdict == "equivalent"
    first = str(found).splitlines()[4]
    assert first.startswith("Your baseline's own noise is 0.")
    assert "at most: run again, it differs by that in step" in first


def test_a_candidate_that_cannot_be_used_is_refused_before_anything_runs(verify: Verify, tmp_path: Path) -> None:
    def candidate() -> Any:
        return 3

    with pytest.raises(traindiff.ConfigError, match=r"returned an int\."):
        verify(candidate)

    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicas": ("ulp:1", "ulb:1")}, 'Did you mean "ulp"?'),
        ({"pin": "allways"}, 'Did you mean "always"?'),
        ({"steps": 0}, "must be a whole number, at least 1."),
        ({"rename": ["x"]}, 'has no "=".'),
        ({"rtol": -1.0}, "must be a number from 0 up."),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_runs(
    options: dict[str, Any], message: str, verify: Verify, tmp_path: Path
) -> None:
    with pytest.raises(traindiff.ConfigError) as caught:
        verify(mlp(), **options)

    assert message in str(caught.value)
    assert not (tmp_path / "runs").exists()


def failing(model: nn.Sequential) -> None:
    model[3].register_forward_pre_hook(lambda *_: 1 / 0)


def test_a_candidate_that_fails_is_incomplete_and_says_where_it_was(verify: Verify) -> None:
    found = verify(mlp(failing))

    assert (found.verdict, found.exit_code) == ("incomplete", 3)
    assert found.failed is not None
    assert (found.failed.run, found.failed.first) == ("candidate", 0)
    assert found.failed.message == (
        "Rank 0 raised ZeroDivisionError: division by zero. Before that it had ended no step. "
        "Its last observation: step 0, micro-step 0, forward, 2 output[0]."
    )
    assert "The run candidate failed. Rank 0 raised ZeroDivisionError" in str(found)
    assert "model[3].register_forward_pre_hook(lambda *_: 1 / 0)" in str(found)


def test_what_a_candidate_recorded_before_it_failed_is_compared(verify: Verify) -> None:
    def failing_later(model: nn.Sequential) -> None:
        calls: list[None] = []

        def hook(*_: Any) -> None:
            calls.append(None)
            if len(calls) == 2:
                raise ValueError("two steps are one too many")

        model[3].register_forward_pre_hook(hook)

    found = verify(mlp(other_gelu, failing_later), pin="never")

    assert (found.verdict, found.exit_code) == ("diverged", 1)
    assert found.first_divergence is not None
    assert (found.first_divergence.step, found.first_divergence.path) == (0, "1")
    assert found.failed is not None
    assert "Before that it had ended 1 step." in found.failed.message


def test_a_baseline_that_fails_is_refused_with_the_batch_and_the_exception(verify: Verify) -> None:
    with pytest.raises(traindiff.ConfigError) as caught:
        verify(mlp(), mlp(failing))

    assert str(caught.value).startswith("1 problem in verify(...), run baseline;")
    assert "calling it with batch 0 raised ZeroDivisionError" in str(caught.value)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


# What it leaves behind, and what it took.


def test_calibrate_gives_the_baseline_and_the_noise_for_compare(tmp_path: Path) -> None:
    heard: list[tuple[str, int, int]] = []

    baseline, noise = traindiff.calibrate(
        mlp(), tmp_path, steps=2, replicas=("ulp:3", "ulp:4"), progress=lambda *told: heard.append(told)
    )

    made = ["baseline", "repeated", "ulp-3", "ulp-4"]
    assert [baseline, *noise] == [str(tmp_path / name) for name in made]
    found = traindiff.compare(baseline, noise[2], noise=noise[:2])
    assert (found.verdict, found.calibrated) == ("equivalent", True)
    assert heard[:4] == [("baseline", 0, 2), ("baseline", 1, 2), ("baseline", 2, 2), ("repeated", 0, 2)]


def test_the_cost_is_stated_by_run(verify: Verify) -> None:
    found = verify(mlp(before_step=doubled_gradient), replicas=("ulp:1",), repeat=False)

    assert [(run.name, run.num_steps) for run in found.costs] == [
        ("baseline", 2), ("ulp-1", 2), ("candidate", 2), ("pinned-step-0-native/baseline", 1),
        ("pinned-step-0-native/ulp-1", 1), ("pinned-step-0-native/candidate", 1),
    ]  # fmt: skip
    assert str(found).splitlines()[-1].startswith("6 runs, 9 steps, ")
    assert found.peak_bytes > 0


def test_recordings_of_an_earlier_verification_are_replaced(verify: Verify) -> None:
    assert verify(mlp(other_gelu), pin="never").verdict == "diverged"
    assert verify(mlp(), pin="never").verdict == "identical"


@pytest.mark.parametrize("name", ["baseline", "candidate", "ulp-1"])
def test_a_recording_that_the_user_made_is_never_replaced(name: str, verify: Verify, tmp_path: Path) -> None:
    with traindiff.record(tmp_path / "runs" / name, nn.Linear(2, 2)):
        pass

    with pytest.raises(traindiff.ConfigError, match="is a recording that no recipe made, and would be replaced"):
        verify(mlp())

    assert [entry.name for entry in (tmp_path / "runs").iterdir()] == [name]


def test_the_json_has_the_keys_of_a_comparison_and_what_was_pinned_down(verify: Verify) -> None:
    found = json.loads(json.dumps(verify(mlp(before_step=doubled_gradient)).to_json(), allow_nan=False))

    assert found["schema"] == {"name": "traindiff-verification", "version": 1}
    assert (found["verdict"], found["calibrated"]) == ("diverged", True)
    assert {"step", "micro_step", "rank", "phase", "site", "slot", "kind", "ratio", "message"} <= set(
        found["first_divergence"]
    )
    assert found["first_divergence"]["site"] == "3.weight"
    assert [one["step"] for one in found["pinned"]] == [0]
    assert found["pinned"][0]["comparison"]["schema"]["name"] == "traindiff-comparison"
    assert found["pinned"][0]["comparison"]["first_divergence"]["site"] == "3.weight"
    assert {"name": "baseline", "num_steps": 2}.items() <= found["costs"][0].items()
    assert found["pin_note"] == ""
    assert {"baseline", "candidate", "findings", "representation", "unaligned", "noise", "steps", "notes"} <= set(found)
