"""However MindSpore trains, the same is recorded, and the training computes what it would without."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from mindspore import nn

import traindiff
from tests.observe.mindspore.training import MODES, NOT_OF_MODELS, WAYS, Training
from traindiff.mindspore import record

LEARNED = ("grad", "optimizer", "update", "param")


@cache
def plain_bits(mode: str, optimizer: str, way: str) -> str:
    training = Training(mode, optimizer)
    training.run(way)
    return training.bits()


def rows(path: Path) -> dict[tuple[Any, ...], Any]:
    """Every observation's summary, by where and when it is."""
    return {
        (seen.step, seen.phase, seen.stage, seen.path, seen.slot): summary
        for found in traindiff.open_recording(path).steps(0)
        for seen, summary in zip(found.observations, found.summaries, strict=True)
    }


@pytest.mark.parametrize(
    "optimizer",
    [
        "momentum", "adam-defaults", "adam-weight-decay", "scheduled", "groups", "experimental-adamw", "mint-adam",
        "mint-sgd",
    ],
)  # fmt: skip
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", MODES)
def test_the_training_is_the_same_to_the_bit_and_all_of_it_is_recorded(
    mode: str, way: str, optimizer: str, tmp_path: Path
) -> None:
    if way == "model" and optimizer in NOT_OF_MODELS:
        pytest.skip("mindspore.Model takes no such optimizer")
    training = Training(mode, optimizer)
    call = nn.Cell.__call__

    with record(tmp_path / "run", training.net, training.optimizer, strict=True) as run:
        training.run(way, run.log)

    assert training.bits() == plain_bits(mode, optimizer, way)
    assert nn.Cell.__call__ is call
    assert [name for name in vars(training.optimizer) if name == "construct" or "traindiff" in name] == []
    found = rows(tmp_path / "run")
    paths = [path for path, _ in training.net.parameters_and_names()]
    for step in range(4):
        assert {key[3] for key in found if key[:3] == (step, "grad", "")} == set(paths)
        assert {key[3] for key in found if key[:3] == (step, "param", "")} == set(paths)
    for path, parameter in training.net.parameters_and_names():
        last = found[3, "param", "", path, "value"]
        assert float(last["sum"]) == pytest.approx(float(parameter.asnumpy().astype("f8").sum()), abs=1e-12)
    assert {key[0] for key in found if key[2] == "before"} == {0}


@pytest.mark.parametrize(("optimizer", "settings"), [("adam-defaults", 5), ("groups", 6 * 5)])
def test_every_way_records_the_same(optimizer: str, settings: int, tmp_path: Path) -> None:
    """Compiled code may round otherwise than single operators do."""
    for mode in MODES:
        for way in WAYS:
            training = Training(mode, optimizer)
            with record(tmp_path / f"{mode}-{way}", training.net, training.optimizer, observe=LEARNED, strict=True):
                training.run(way)

    first = tmp_path / "pynative-functions"
    gradients, parameters, state = 6, 6, 3 * 6
    assert len(rows(first)) == parameters + 4 * (gradients + parameters + state + settings)
    for other in tmp_path.iterdir():
        assert rows(other).keys() == rows(first).keys()
        assert traindiff.compare(first, other).verdict in ("identical", "equivalent")


@pytest.mark.parametrize(("mode", "way"), [("pynative", "functions"), ("pynative", "jit"), ("graph", "functions")])
def test_steps_are_recorded_as_asked_with_parameters_before_each(mode: str, way: str, tmp_path: Path) -> None:
    training = Training(mode, "momentum")
    with record(tmp_path / "run", training.net, training.optimizer, steps="1,3", strict=True) as run:
        training.run(way, run.log)

    found = rows(tmp_path / "run")

    assert {key[0] for key in found} == {1, 3}
    assert {key[0] for key in found if key[2] == "before"} == {1, 3}
    assert {key[0] for key in found if key[3] == "loss"} == {1, 3}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("early", [True, False], ids=["before the step", "after the step"])
def test_a_loss_is_filed_under_the_step_that_it_is_of(mode: str, early: bool, tmp_path: Path) -> None:
    from mindspore import Tensor

    from tests.observe.mindspore.drawn import batches

    training = Training(mode, "momentum")
    losses = []
    with record(tmp_path / "run", training.net, training.optimizer, strict=True) as run:
        for inputs, labels in batches():
            loss, gradients = training._gradients(Tensor(inputs), Tensor(labels))
            losses.append(float(loss.asnumpy()))
            if early:
                run.log("loss", loss)
            training.optimizer(gradients)
            if not early:
                run.log("loss", loss)
        assert run.step == 4

    found = rows(tmp_path / "run")
    assert [float(found[step, "loss", "", "loss", "logged"]["sum"]) for step in range(4)] == losses


def test_several_forward_passes_of_a_step_are_its_micro_steps(tmp_path: Path) -> None:
    from mindspore import Tensor

    from tests.observe.mindspore.drawn import batches

    training = Training("pynative", "momentum")
    with record(tmp_path / "run", training.net, training.optimizer, strict=True):
        for inputs, labels in batches()[:2]:
            parts = [
                training._gradients(Tensor(inputs[half]), Tensor(labels[half]))[1] for half in (slice(8), slice(8, 16))
            ]
            training.optimizer(tuple((one + other) / 2 for one, other in zip(*parts, strict=True)))

    whole = Training("pynative", "momentum")
    with record(tmp_path / "whole", whole.net, whole.optimizer, steps="0-1", strict=True):
        whole.run("functions")

    found = traindiff.compare(tmp_path / "whole", tmp_path / "run")
    assert (found.verdict, found.findings) == ("equivalent", ())
    micro_steps = {
        seen.micro_step for step in traindiff.open_recording(tmp_path / "run").steps(0) for seen in step.observations
    }
    assert micro_steps == {0, 1}


@pytest.mark.parametrize("way", ["jit", "model"])
def test_a_second_recording_sees_what_was_compiled_in_the_first(way: str, tmp_path: Path) -> None:
    training = Training("graph", "momentum")
    for number in range(2):
        with record(tmp_path / str(number), training.net, training.optimizer, strict=True):
            training.run(way)

    first, second = (rows(tmp_path / str(number)) for number in range(2))

    assert first.keys() == second.keys()
    assert int(first[3, "param", "", "last.bias", "value"]["fingerprint"]) == int(
        second[0, "param", "before", "last.bias", "value"]["fingerprint"]
    )
