"""What cannot be seen is refused or said, and never recorded as nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn

import traindiff
from tests.observe.mindspore.drawn import batches
from tests.observe.mindspore.test_modes import rows
from tests.observe.mindspore.training import Perceptron, Training
from traindiff import ConfigError, TraindiffError, TraindiffWarning
from traindiff.mindspore import record


def unobserved(path: Path) -> dict[tuple[int, str, str, str], str]:
    return {
        (seen.step, seen.phase, seen.path, seen.slot): seen.unobserved
        for step in traindiff.open_recording(path).steps(0)
        for seen in step.observations
        if seen.unobserved
    }


@pytest.mark.parametrize("way", ["jit", "model"])
def test_a_training_that_was_compiled_before_is_said_not_to_be_seen(way: str, tmp_path: Path) -> None:
    training = Training("graph", "momentum")
    training.run(way)

    message = "have changed, and no step was seen: what calls it was compiled before"
    with (
        pytest.warns(TraindiffWarning, match=message),
        record(tmp_path / "run", training.net, training.optimizer) as run,
    ):
        training.run(way, run.log)

    (reason,) = [message for (_, _, path, _), message in unobserved(tmp_path / "run").items() if path == "traindiff"]
    assert reason.startswith("the optimizer_step tap failed")
    message = (
        "Call record(...), or monitor(...), before the first call of what mindspore.jit has decorated, or of Model"
    )
    assert message in reason


def test_where_it_is_strict_steps_that_are_not_seen_are_an_error(tmp_path: Path) -> None:
    training = Training("graph", "momentum")
    training.run("jit")

    with (
        pytest.raises(TraindiffError, match="no step was seen"),
        record(tmp_path / "run", training.net, training.optimizer, strict=True) as run,
    ):
        training.run("jit", run.log)

    assert "construct" not in vars(training.optimizer)


def test_a_recording_in_which_nothing_was_seen_is_never_equivalent(tmp_path: Path) -> None:
    training = Training("graph", "momentum")
    training.run("model")
    with pytest.warns(TraindiffWarning), record(tmp_path / "blind", training.net, training.optimizer):
        training.run("model")
    again = Training("graph", "momentum")
    with record(tmp_path / "seen", again.net, again.optimizer):
        again.run("model")

    assert traindiff.compare(tmp_path / "seen", tmp_path / "blind").verdict == "incomplete"


def test_cells_in_compiled_code_are_said_not_to_be_seen(tmp_path: Path) -> None:
    training = Training("pynative", "momentum")
    with record(tmp_path / "run", training.net, training.optimizer, strict=True):
        training.run("jit")

    reasons = unobserved(tmp_path / "run")

    assert {key[0] for key in reasons} == {0, 1, 2, 3}
    assert {key[2] for key in reasons if key[1] == "forward"} == {"", "act", "first", "last", "norm"}
    assert set(reasons.values()) == {"it runs in a graph that MindSpore has compiled, where cells cannot be seen"}


def test_a_cell_that_is_compiled_alone_is_seen_and_what_is_in_it_is_said_not_to_be(tmp_path: Path) -> None:
    training = Training("pynative", "momentum")
    training.net.first.construct = mindspore.jit(training.net.first.construct)
    with record(tmp_path / "run", training.net, training.optimizer, strict=True):
        training.run("functions")

    assert unobserved(tmp_path / "run") == {}
    assert (0, "forward", "", "first", "output[0]") in rows(tmp_path / "run")


class Unused(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Perceptron()
        self.spare = nn.Dense(3, 2)

    def construct(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs)


def test_parameters_without_gradient_and_cells_that_are_not_called_are_told_apart(tmp_path: Path) -> None:
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    net = Unused()
    net.inner.norm.gamma.requires_grad = False
    optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
    criterion = nn.CrossEntropyLoss()

    def forward(inputs: Tensor, labels: Tensor) -> Tensor:
        return criterion(net(inputs), labels)

    gradients = mindspore.value_and_grad(forward, None, optimizer.parameters)
    with record(tmp_path / "run", net, optimizer, strict=True):
        inputs, labels = batches()[0]
        optimizer(gradients(Tensor(inputs), Tensor(labels))[1])

    found, reasons = rows(tmp_path / "run"), unobserved(tmp_path / "run")
    assert list(reasons) == [(0, "forward", "spare", "output[0]")]
    assert reasons[0, "forward", "spare", "output[0]"].startswith("no output was observed")
    assert float(found[0, "grad", "", "spare.weight", "grad"]["sum_of_squares"]) == 0.0
    assert (0, "param", "before", "inner.norm.gamma", "value") in found
    assert (0, "param", "", "inner.norm.gamma", "value") not in found


def test_running_statistics_are_recorded_as_buffers(tmp_path: Path) -> None:
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    net = nn.SequentialCell(nn.Dense(12, 6), nn.BatchNorm1d(6))
    net.set_train()
    optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
    gradients = mindspore.value_and_grad(lambda inputs: net(inputs).square().mean(), None, optimizer.parameters)
    with record(tmp_path / "run", net, optimizer, strict=True):
        optimizer(gradients(Tensor(batches()[0][0]))[1])

    found = rows(tmp_path / "run")
    before, after = (found[0, "param", stage, "1.moving_mean", "buffer"] for stage in ("before", ""))
    assert float(before["sum_of_squares"]) == 0.0
    assert float(after["sum_of_squares"]) > 0.0
    content = traindiff.open_recording(tmp_path / "run").rank_content(0)
    assert sorted(content["buffers"]) == ["1.moving_mean", "1.moving_variance"]


def test_a_loss_scale_of_the_optimizer_is_the_factor_of_its_gradients(tmp_path: Path) -> None:
    found = {}
    for scale in (1.0, 8.0):
        training = Training("pynative", "momentum")
        optimizer = nn.Momentum(training.net.trainable_params(), 0.05, 0.9, loss_scale=scale)
        gradients = mindspore.value_and_grad(training.forward, None, optimizer.parameters)
        found[scale] = tmp_path / str(scale)
        with record(found[scale], training.net, optimizer, strict=True):
            for inputs, labels in batches():
                scaled = tuple(one * scale for one in gradients(Tensor(inputs), Tensor(labels))[1])
                optimizer(scaled)

    compared = traindiff.compare(found[1.0], found[8.0])
    assert compared.verdict in ("identical", "equivalent")
    assert float(rows(found[8.0])[0, "grad", "", "last.bias", "grad"]["maximum"]) == pytest.approx(
        8 * float(rows(found[1.0])[0, "grad", "", "last.bias", "grad"]["maximum"])
    )


def test_without_a_cell_the_optimizer_alone_is_observed(tmp_path: Path) -> None:
    training = Training("pynative", "momentum")
    with record(tmp_path / "run", None, training.optimizer, strict=True):
        training.run("functions")

    assert {key[1] for key in rows(tmp_path / "run")} == {"grad", "optimizer", "param"}
    assert (3, "grad", "", "norm.gamma", "grad") in rows(tmp_path / "run")


def test_an_error_in_a_tap_ends_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training("graph", "momentum")

    def broken(*_: Any) -> None:
        raise ValueError("broken on purpose")

    monkeypatch.setattr("traindiff.observe.mindspore.step_tap.StepTap.gradient", broken)
    message = r"optimizer_step\) failed and observes nothing more: ValueError: broken"
    with pytest.warns(TraindiffWarning, match=message), record(tmp_path / "run", training.net, training.optimizer):
        training.run("jit")

    monkeypatch.undo()
    plain = Training("graph", "momentum")
    plain.run("jit")
    assert training.bits() == plain.bits()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"observe": "forward"}, 'forward" cannot be seen in graph mode, in which MindSpore compiles cells as a whole'),
        ({"observe": "backward"}, 'backward" cannot be observed of a MindSpore training'),
        ({"observe": "gradients"}, 'gradients" is not something to observe'),
        ({"selct": "x"}, 'Did you mean "select"?'),
        ({"select": "lst.*"}, "matches none of the model's 11 cells and parameters"),
        ({"optimizer": None}, "is None, not one of MindSpore's optimizers"),
        ({"cell": 3}, "is an int, not a mindspore.nn.Cell"),
        ({"cell": None, "observe": "batch"}, 'batch" is of the model, and no cell was given'),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_written(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    training = Training("graph", "momentum")
    given = {"cell": training.net, "optimizer": training.optimizer, **settings}

    with pytest.raises(ConfigError) as caught:
        record(tmp_path / "run", given.pop("cell"), given.pop("optimizer"), **given)

    assert message in str(caught.value)
    assert not (tmp_path / "run").exists()
    assert "construct" not in vars(training.optimizer)


@pytest.mark.parametrize("dtype", [mindspore.float16, mindspore.float64])
def test_gradients_of_shorter_and_longer_dtypes_are_recorded_as_they_are(dtype: Any, tmp_path: Path) -> None:
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    values = np.array([1.5, -0.25, 0.0, 3.0], dtype=np.float32)
    weight = mindspore.Parameter(Tensor(values, dtype), name="weight")
    net = nn.SequentialCell()
    net.weight = weight
    optimizer = nn.Momentum([weight], 0.5, 0.0)
    with record(tmp_path / "run", net, optimizer, observe=("grad", "param"), strict=True):
        optimizer((Tensor(values, dtype),))

    (step,) = traindiff.open_recording(tmp_path / "run").steps(0)
    assert {seen.dtype for seen in step.observations} == {str(dtype).lower()}
    sums = [float(one["sum"]) for one in step.summaries]
    assert sums == [4.25, 4.25, 2.125]


class Sparse(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingLookup(10, 4, target="CPU", sparse=True)
        self.head = nn.Dense(4, 2)

    def construct(self, indices: Tensor) -> Tensor:
        return self.head(self.table(indices)).sum()


def test_a_sparse_gradient_in_a_graph_is_said_not_to_be_seen_and_ends_no_training(tmp_path: Path) -> None:
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    net = Sparse()
    optimizer = nn.LazyAdam(net.trainable_params(), 0.1)
    step = nn.TrainOneStepCell(net, optimizer)
    with record(tmp_path / "run", net, optimizer, strict=True):
        step(Tensor(np.array([1, 2, 2, 5], dtype=np.int32)))

    assert unobserved(tmp_path / "run") == {
        (0, "grad", "table.embedding_table", "grad"): (
            "its gradient did not come into the optimizer as a dense tensor that can be seen there"
        )
    }
    assert (0, "grad", "", "head.weight", "grad") in rows(tmp_path / "run")
