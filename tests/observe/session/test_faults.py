"""An error of traindiff's own disables the tap in which it happened, and nothing else."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch

import traindiff
from tests.observe.hooks.reading import Row, row, rows
from tests.observe.hooks.test_undisturbed import assert_bitwise_equal
from tests.observe.hooks.trainings import TRAININGS, Outcome
from traindiff.core.tap_registry import OBSERVABLE
from traindiff.observe.torch.hooks.activations import Activations
from traindiff.observe.torch.session.observations import Observations
from traindiff.storage.written_files import WrittenFiles

Loses = dict[str, Any]

FAULTS: dict[str, tuple[str, list[Loses]]] = {
    "module_outputs": (
        "traindiff.observe.torch.hooks.activations.Activations._look",
        [{"phase": "forward"}, {"phase": "backward"}],
    ),
    "batch": ("traindiff.observe.torch.hooks.root_forward.RootForwardTap._random_state", [{"phase": "batch"}]),
    "model_state": (
        "traindiff.observe.torch.hooks.model_state.ModelStateTap.before_step",
        [{"phase": "param", "stage": "before"}, {"phase": "param", "slot": "buffer"}],
    ),
    "optimizer_step": (
        "traindiff.observe.torch.hooks.optimizer_step.OptimizerTap._gradient",
        [
            {"phase": "grad", "stage": ""},
            {"phase": "grad", "stage": "witness"},
            {"phase": "optimizer"},
            {"phase": "param", "stage": ""},
        ],
    ),
    "optimizer_replay": (
        "traindiff.observe.torch.hooks.optimizer_replay.OptimizerReplayTap._replay",
        [{"phase": "update"}],
    ),
    "loss": ("traindiff.observe.torch.hooks.backward_calls._Listener._begin", [{"phase": "loss"}]),
    "operators": ("traindiff.observe.torch.hooks.operators._Operators._emit", [{"stage": "operator"}]),
    "products": ("traindiff.observe.torch.hooks.products._Products._record", [{"stage": "product"}]),
    "layer_products": (
        "traindiff.observe.torch.hooks.layer_products._LayerProducts._emit",
        [{"stage": "witness product"}],
    ),
    "gradient_marks": ("traindiff.observe.torch.hooks.gradient_marks._GradientMarks.take", []),
    "parameter_gradients": ("traindiff.observe.torch.hooks.parameter_gradients._contribution", [{"stage": "micro"}]),
}
"""By tap: what is made to fail, and the observations that are lost; none of one that a right training never needs."""

TRAINING = TRAININGS["gradient_accumulation"]


class BrokenError(Exception):
    """What the broken part raises."""


def broken(*_: object, **__: object) -> None:
    raise BrokenError("on purpose")


def train(path: Path, **options: Any) -> Outcome:
    return TRAINING(lambda *args: traindiff.record(path, *args, observe=OBSERVABLE, **options))


def key(one: Row) -> tuple[object, ...]:
    seen, summary = one
    return seen.step, seen.micro_step, seen.phase, seen.stage, seen.path, seen.slot, seen.call, bytes(summary)


def faults(path: Path) -> list[tuple[str, str]]:
    return [(seen.slot, seen.unobserved) for seen, _ in rows(path, path="traindiff")]


@pytest.mark.parametrize("tap", FAULTS)
def test_a_fault_in_a_tap_disables_that_tap_only(tap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = TRAINING(lambda *_: nullcontext())
    assert_bitwise_equal(train(tmp_path / "whole"), expected)
    target, losses = FAULTS[tap]
    monkeypatch.setattr(target, broken)

    with pytest.warns(traindiff.TraindiffWarning) as caught:
        actual = train(tmp_path / "run")

    assert_bitwise_equal(actual, expected)
    assert [str(warning.message) for warning in caught] == [
        f"A part of traindiff ({tap}) failed and observes nothing more: BrokenError: on purpose. The training is not "
        "affected; the recording says what it lacks. record(strict=True) raises the error where it happens."
    ]
    assert faults(tmp_path / "run") == [(tap, f"the {tap} tap failed: BrokenError: on purpose")]
    lost = {key(one) for where in losses for one in rows(tmp_path / "whole", **where)}
    kept = {key(one) for one in rows(tmp_path / "whole")} - lost
    assert lost or not losses
    assert {key(one) for one in rows(tmp_path / "run")} >= kept
    assert traindiff.open_recording(str(tmp_path / "run")).status(0).ending == "closed"


@pytest.mark.filterwarnings("ignore:module forward hook with:UserWarning")  # one more that raises
@pytest.mark.parametrize("tap", FAULTS)
def test_a_fault_in_a_tap_raises_in_strict_mode(tap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FAULTS[tap][0], broken)

    with pytest.raises(BrokenError, match="on purpose"):
        train(tmp_path / "run", strict=True)


@pytest.mark.parametrize("tap", FAULTS)
def test_a_training_whose_warnings_are_errors_goes_on_too(
    tap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = TRAINING(lambda *_: nullcontext())
    monkeypatch.setattr(FAULTS[tap][0], broken)

    with warnings.catch_warnings(), caplog.at_level(logging.WARNING, logger="traindiff"):
        warnings.simplefilter("error")
        actual = train(tmp_path / "run")

    assert_bitwise_equal(actual, expected)
    assert len(faults(tmp_path / "run")) == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"A part of traindiff ({tap}) failed" in caplog.text


def test_a_fault_that_comes_late_keeps_what_was_seen_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []
    original = Activations.observe

    def fail_at_last(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return broken() if len(calls) == 20 else original(*args, **kwargs)

    train(tmp_path / "whole")
    monkeypatch.setattr(Activations, "observe", fail_at_last)
    with pytest.warns(traindiff.TraindiffWarning):
        train(tmp_path / "run")

    whole, kept = (rows(tmp_path / name, phase="forward", stage="") for name in ("whole", "run"))
    assert list(map(key, kept)) == list(map(key, whole[:19]))
    assert row(tmp_path / "run", path="traindiff")[0].step == whole[19][0].step


def test_what_a_tap_did_not_see_is_unknown_and_neither_absent_nor_healthy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "whole")
    for tap, (target, _) in FAULTS.items():
        with monkeypatch.context() as patch:
            patch.setattr(target, fails_the_second_time(target))
            with pytest.warns(traindiff.TraindiffWarning):
                train(tmp_path / tap)

        comparison = traindiff.compare(tmp_path / "whole", tmp_path / tap)
        verdict = traindiff.check(tmp_path / tap)

        assert comparison.verdict == "incomplete", str(comparison)
        assert verdict.verdict == "incomplete"
        step = row(tmp_path / tap, path="traindiff")[0].step
        message = (
            f"the {tap} tap failed: BrokenError: on purpose. What it would have seen from step {step} on is unknown."
        )
        assert comparison.notes[0] == f"candidate: on rank 0, {message}"
        assert verdict.notes[0] == f"On rank 0, {message}"


def fails_the_second_time(target: str) -> Callable[..., Any]:
    module, _, name = target.rpartition(".")
    original = getattr(resolve_name(module), name)
    calls: list[None] = []

    def function(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return broken() if len(calls) == 2 else original(*args, **kwargs)

    return function


def test_a_kernel_that_fails_disables_every_tap_that_uses_it_and_the_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = TRAINING(lambda *_: nullcontext())
    for way in ("add", "add_to"):
        monkeypatch.setattr(f"traindiff.core.kernels.store.SummaryStore.{way}", broken)

    with pytest.warns(traindiff.TraindiffWarning) as caught:
        actual = train(tmp_path / "run")

    assert_bitwise_equal(actual, expected)
    disabled = [slot for slot, _ in faults(tmp_path / "run")]
    assert sorted(disabled) == sorted([*(tap for tap, (_, losses) in FAULTS.items() if losses), "samples"])
    assert len(caught) == len(disabled)


def test_a_fault_that_loses_count_of_micro_steps_leaves_what_the_optimizer_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "whole")
    monkeypatch.setattr("traindiff.observe.common.batch_axis.BatchAxis.of_batch", broken)
    with pytest.warns(traindiff.TraindiffWarning, match="root_forward"):
        train(tmp_path / "run")

    for where in ({"phase": "grad", "stage": ""}, {"phase": "optimizer"}, {"phase": "param", "stage": ""}):
        kept, whole = ([key(one)[4:] for one in rows(tmp_path / name, **where)] for name in ("run", "whole"))
        assert kept == whole


def test_a_discovery_that_fails_disables_discovery_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = TRAININGS["plain"](lambda *_: nullcontext())
    monkeypatch.setattr("traindiff.observe.torch.hooks.optimizer_step.OptimizerTap.attach", broken)

    with pytest.warns(traindiff.TraindiffWarning, match="optimizer_discovery"):
        actual = TRAININGS["optimizer_not_given"](lambda *args: traindiff.record(tmp_path / "run", *args))

    assert_bitwise_equal(actual, expected)
    assert faults(tmp_path / "run")[0][0] == "optimizer_discovery"


def test_an_optimizer_that_cannot_be_written_down_is_still_observed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = WrittenFiles.put
    refused: list[str] = []

    def full(self: WrittenFiles, path: str, content: bytes) -> None:
        if b'"groups"' in content and not refused:
            refused.append(path)
            raise OSError(28, "No space left on device")
        put(self, path, content)

    monkeypatch.setattr(WrittenFiles, "put", full)
    TRAININGS["optimizer_not_given"](lambda *args: traindiff.record(tmp_path / "run", *args))

    assert len(refused) == 1
    assert [seen.step for seen, _ in rows(tmp_path / "run", phase="grad", path="0.weight")] == [0, 1, 2]
    recording = traindiff.open_recording(str(tmp_path / "run"))
    assert recording.rank_content(0)["optimizers"]  # it was written with the next step
    assert recording.status(0).ending == "closed"


def test_a_writer_that_fails_ends_the_recording_and_keeps_nothing_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = TRAINING(lambda *_: nullcontext())
    monkeypatch.setattr("traindiff.storage.RecordingWriter.write_step", broken)
    recorders: list[traindiff.Recorder] = []
    held: list[int] = []

    def observe(*args: Any) -> traindiff.Recorder:
        recorders.append(traindiff.record(tmp_path / "run", *args))
        args[1].register_step_post_hook(lambda *_: held.append(len(list(recorders[0]._observations.take()))))
        return recorders[0]

    with pytest.warns(
        traindiff.TraindiffWarning, match="could not write the recording, and records nothing more"
    ) as caught:
        actual = TRAINING(observe)

    assert_bitwise_equal(actual, expected)
    assert len(caught) == 1
    assert held == [0, 0, 0]
    assert rows(tmp_path / "run") == []


def test_a_writer_that_fails_in_strict_mode_raises_and_leaves_no_hooks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backward = torch.autograd.backward
    monkeypatch.setattr("traindiff.storage.RecordingWriter.write_step", broken)

    with pytest.raises(BrokenError):
        train(tmp_path / "run", strict=True)

    assert torch.autograd.backward is backward


def test_an_error_of_the_training_itself_is_not_swallowed(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with traindiff.record(tmp_path / "run", model):
        model.register_forward_hook(broken)
        with pytest.raises(BrokenError):
            model(torch.ones(1, 2))

    assert faults(tmp_path / "run") == []


def test_an_interrupt_inside_a_tap_reaches_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("traindiff.core.kernels.store.summarize", interrupt)

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run")


def test_a_fault_in_the_quick_way_disables_the_tap_and_goes_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken_without_a_guard(self: Observations, known: Any, tensor: Any, **about: Any) -> bool:
        if about.get("guarded") is False:
            broken()
        return again(self, known, tensor, **about)

    again = Observations.again
    expected = train(tmp_path / "whole")
    monkeypatch.setattr(Observations, "again", broken_without_a_guard)
    with pytest.warns(traindiff.TraindiffWarning, match="module_outputs"):
        actual = train(tmp_path / "run")

    assert_bitwise_equal(actual, expected)
    with pytest.raises(BrokenError):
        train(tmp_path / "strict", strict=True)
