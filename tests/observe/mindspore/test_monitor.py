"""The gradient monitor of msprobe under MindSpore: the same calls and files, in both modes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn
from numpy.typing import NDArray

import traindiff
from tests.observe.mindspore.drawn import batches
from tests.observe.mindspore.test_against_torch import TORCH, Baselines
from tests.observe.mindspore.test_modes import plain_bits
from tests.observe.mindspore.training import MODES, RENAME, Training
from traindiff.compat.msprobe import PrecisionDebugger, tables
from traindiff.compat.msprobe.layout import direction_file, summaries_in
from traindiff.compat.msprobe.tables import Row
from traindiff.mindspore import record

Gradients = list[NDArray[Any]]


def configuration(where: Path, *, level: str = "L2", **settings: Any) -> Path:
    own = {"grad_level": level, "param_list": settings.pop("param_list", []), "bounds": [-0.05, 0, 0.05]}
    content = {"task": "grad_probe", "dump_path": str(where / "dump"), "rank": [], "step": [], "grad_probe": own}
    path = where / "config.json"
    path.write_text(json.dumps({**content, **settings}))
    return path


def rows(where: Path) -> list[dict[str, Row]]:
    """Rows by name, of each step."""
    return [
        {row.name: row for row in tables.load(path.read_bytes(), where=str(path)).rows}
        for path in summaries_in(where / "dump" / "rank0").values()
    ]


def trained(training: Training, *, compiled: bool) -> list[Gradients]:
    """Train on all batches; gives what gradients the optimizer was given, by step."""
    gradients = mindspore.value_and_grad(training.forward, None, training.optimizer.parameters)
    optimizer = training.optimizer

    def step(inputs: Tensor, labels: Tensor) -> Any:
        _, found = gradients(inputs, labels)
        optimizer(found)
        return found

    call = mindspore.jit(step) if compiled else step
    return [[one.asnumpy().copy() for one in call(Tensor(inputs), Tensor(labels))] for inputs, labels in batches()]


@pytest.mark.parametrize("compiled", [False, True], ids=["called", "compiled"])
@pytest.mark.parametrize("mode", MODES)
def test_rows_and_directions_are_those_of_the_gradients(mode: str, compiled: bool, tmp_path: Path) -> None:
    training = Training(mode, "adam")
    debugger = PrecisionDebugger(configuration(tmp_path))
    debugger.monitor(training.optimizer)
    gradients = trained(training, compiled=compiled)
    debugger.stop()

    names = [parameter.name for parameter in training.optimizer.parameters]
    found = rows(tmp_path)
    assert len(found) == len(gradients) == 4
    for step, (table, own) in enumerate(zip(found, gradients, strict=True)):
        assert sorted(table) == sorted(names)
        for name, gradient in zip(names, own, strict=True):
            row = table[name]
            assert row.shape == gradient.shape
            assert (row.maximum, row.minimum) == (gradient.max(), gradient.min())
            assert row.norm == np.float32(np.linalg.norm(gradient.astype("f8")))
            inside = np.searchsorted(np.float32([-0.05, 0, 0.05]), gradient.reshape(-1))
            shares = (np.bincount(inside, minlength=4) / gradient.size).tolist()
            assert row.shares == (*shares, (gradient == 0).mean())
            directions = np.load(direction_file(tmp_path / "dump" / "rank0", step, name))
            np.testing.assert_array_equal(directions, gradient > 0)


@pytest.mark.parametrize(("mode", "way"), [("pynative", "functions"), ("graph", "jit"), ("graph", "model")])
def test_the_training_computes_the_same_bits(mode: str, way: str, tmp_path: Path) -> None:
    training = Training(mode, "momentum")
    debugger = PrecisionDebugger(configuration(tmp_path, level="L1"))
    debugger.monitor(training.optimizer)
    training.run(way)
    debugger.stop()

    assert training.bits() == plain_bits(mode, "momentum", way)
    assert [len(table) for table in rows(tmp_path)] == [6, 6, 6, 6]


def test_the_hash_is_an_md5(tmp_path: Path) -> None:
    training = Training("pynative", "momentum")
    debugger = PrecisionDebugger(configuration(tmp_path, level="L0"))
    debugger.monitor(training.optimizer)
    gradients = trained(training, compiled=False)
    debugger.stop()

    for table, own in zip(rows(tmp_path), gradients, strict=True):
        digests = [hashlib.md5(one.tobytes(), usedforsecurity=False).hexdigest() for one in own]
        assert [table[one.name].digest for one in training.optimizer.parameters] == digests


def test_steps_and_parameters_are_chosen(tmp_path: Path) -> None:
    training = Training("graph", "momentum")
    names = [parameter.name for parameter in training.optimizer.parameters]
    debugger = PrecisionDebugger(configuration(tmp_path, step=[0, "2-3"], param_list=names[:2]))
    debugger.monitor(training.optimizer)
    training.run("jit")
    debugger.stop()

    assert list(summaries_in(tmp_path / "dump" / "rank0")) == [0, 2, 3]
    assert [list(table) for table in rows(tmp_path)] == [names[:2]] * 3


def test_two_optimizers_count_their_own_steps(tmp_path: Path) -> None:
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    nets = [nn.Dense(2, 2), nn.Dense(2, 2)]
    for name, net in zip("ab", nets, strict=True):
        net.update_parameters_name(f"{name}.")
    optimizers = [nn.Momentum(net.trainable_params(), 0.1, 0.9) for net in nets]
    debugger = PrecisionDebugger(configuration(tmp_path))
    debugger.monitor(optimizers)
    for step in range(4):
        optimizers[0](tuple(mindspore.ops.ones_like(one) for one in optimizers[0].parameters))
        if step % 2:
            optimizers[1](tuple(mindspore.ops.ones_like(one) for one in optimizers[1].parameters))
    debugger.stop()

    first, both = ["a.bias", "a.weight"], ["a.bias", "a.weight", "b.bias", "b.weight"]
    assert [sorted(table) for table in rows(tmp_path)] == [both, both, first, first]


def test_a_second_call_with_the_same_optimizer_counts_nothing_twice(tmp_path: Path) -> None:
    training = Training("pynative", "momentum")
    debugger = PrecisionDebugger(configuration(tmp_path))
    debugger.monitor(training.optimizer)
    with pytest.warns(traindiff.TraindiffWarning, match="is monitored already"):
        debugger.monitor(training.optimizer)
    training.run("functions")
    debugger.stop()

    assert len(rows(tmp_path)) == 4


def test_an_optimizer_in_code_that_is_compiled_already_is_not_monitored_in_vain(tmp_path: Path) -> None:
    training = Training("graph", "momentum")
    training.run("jit")
    debugger = PrecisionDebugger(configuration(tmp_path))
    debugger.monitor(training.optimizer)
    training.run("jit")

    with pytest.warns(traindiff.TraindiffWarning, match="no step was seen: what calls it was compiled before"):
        debugger.stop()
    assert not (tmp_path / "dump" / "rank0").exists()


def test_a_cell_and_a_misspelt_parameter_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    training = Training("graph", "momentum")
    with pytest.raises(traindiff.ConfigError, match="Give the optimizer that the training calls"):
        PrecisionDebugger(configuration(tmp_path)).monitor(training.net)
    misspelt = configuration(tmp_path, param_list=["first.wieght"])
    with pytest.raises(traindiff.ConfigError, match=r'Did you mean "first\.weight"\?'):
        PrecisionDebugger(misspelt).monitor(training.optimizer)
    assert not (tmp_path / "dump").exists()
    assert "construct" not in vars(training.optimizer)


@pytest.mark.skipif(not TORCH, reason="TRAINDIFF_TORCH_PYTHON names no Python with torch")
def test_directions_compare_with_those_of_torch(tmp_path: Path) -> None:
    baseline = Baselines(tmp_path)("momentum", "learned", "signs")
    training = Training("graph", "momentum")
    with record(tmp_path / "run", training.net, training.optimizer, detail="signs", strict=True) as run:
        training.run("jit", run.log)

    found = traindiff.compare(baseline, tmp_path / "run", rename=RENAME)

    assert (found.verdict, found.findings) == ("equivalent", ())
    assert found.directions is not None
    assert len(found.directions.parameters) == 6
    assert found.directions.broken == ()
    assert min(one.share for one in found.directions.summary if one is not None and one.share is not None) > 0.98
