"""What is saved, copied or exported of a training that is recorded is what it would be without a recording."""

from __future__ import annotations

import copy
import io
import pickle
import pickletools
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import traindiff
from tests.observe.hooks.models import mlp
from tests.observe.hooks.reading import rows, unobserved
from traindiff.core.tap_registry import OBSERVABLE


class WithState(nn.Module):
    """Gives its attributes for pickling by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(8, 4)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "more": 1}

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x)


class WithReduce(WithState):
    """Says how it is made again, with its attributes among the arguments."""

    def __reduce__(self) -> Any:
        return made_again, (vars(self).copy(),)


class WithSlots(WithState):
    """Has an attribute that is in no dict."""

    __slots__ = ("extra",)
    __getstate__ = object.__getstate__

    def __init__(self) -> None:
        super().__init__()
        self.extra = 3


class WholeOptimizer(SGD):
    """Pickles all of its attributes."""

    def __getstate__(self) -> dict[str, Any]:
        return vars(self).copy()


def made_again(attributes: dict[str, Any]) -> WithReduce:
    module = WithReduce()
    vars(module).update(attributes)
    return module


def hooked() -> nn.Module:
    """A model with hooks of the user's own, of every kind."""
    model = mlp()
    model[0].register_forward_pre_hook(changes_nothing, with_kwargs=True)
    model[0].register_forward_hook(changes_nothing, always_call=True)
    model[2].register_full_backward_hook(changes_nothing)
    return model


def changes_nothing(*_: Any) -> None:
    pass


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": mlp, "hooked": hooked, "with_state": WithState, "with_reduce": WithReduce, "with_slots": WithSlots,
}  # fmt: skip


@contextmanager
def observed(path: Path, model: nn.Module, optimizer: Any = None) -> Iterator[None]:
    run = traindiff.record(path, model, optimizer, observe=OBSERVABLE, strict=True)
    with run, traindiff.watch(model, optimizer, output=None):
        yield


def saved(whole: Any) -> bytes:
    file = io.BytesIO()
    torch.save(whole, file)
    return file.getvalue()


@pytest.mark.parametrize("name", MODELS)
def test_a_recorded_model_is_saved_as_the_bytes_of_one_that_is_not(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    optimizer = AdamW(model.parameters())
    write = (lambda: saved(model), lambda: saved((model, optimizer)), lambda: pickle.dumps(model))
    expected = [one() for one in write]

    with observed(tmp_path / "run", model, optimizer):
        actual = [one() for one in write]

    assert actual == expected
    assert [one() for one in write] == expected


def test_a_recorded_optimizer_that_pickles_all_its_attributes_is_saved_without_hooks(tmp_path: Path) -> None:
    model = mlp()
    optimizer = WholeOptimizer(model.parameters(), lr=0.1)
    expected = pickle.dumps(optimizer)

    with observed(tmp_path / "run", model, optimizer):
        assert pickle.dumps(optimizer) == expected
        copied = copy.deepcopy(optimizer)

    assert vars(copied).keys() == vars(optimizer).keys()
    assert not copied._optimizer_step_pre_hooks
    assert not copied._optimizer_step_post_hooks


def test_a_recorded_model_is_loaded_with_weights_only_in_a_process_without_traindiff(tmp_path: Path) -> None:
    model = mlp()
    optimizer = AdamW(model.parameters())
    with observed(tmp_path / "run", model, optimizer):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        torch.save(model, tmp_path / "model.pt")

    program = """
        import sys, torch
        from torch import nn
        sys.modules["traindiff"] = None  # an import fails
        with torch.serialization.safe_globals([nn.Sequential, nn.Linear, nn.ReLU]):
            model = torch.load(sys.argv[1])
        print([len(one._forward_hooks) for one in model.modules()], [*vars(model)] == [*vars(nn.Sequential())])
        model(torch.ones(2, 8)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    """
    loaded = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), tmp_path / "model.pt"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert loaded.stdout == "[0, 0, 0, 0] True\n", loaded.stderr


def test_a_loaded_model_is_recorded_like_the_one_that_was_saved(tmp_path: Path) -> None:
    model = mlp()
    with observed(tmp_path / "run", model):
        loaded = torch.load(io.BytesIO(saved(model)), weights_only=False)
        copied = copy.deepcopy(model)
        average = torch.optim.swa_utils.AveragedModel(model)
    for number, one in enumerate((loaded, copied, average)):
        optimizer = AdamW(one.parameters())
        with traindiff.record(tmp_path / f"again-{number}", one, optimizer, strict=True) as run:
            one(torch.ones(2, 8)).sum().backward()
            optimizer.step()
        assert run.step == 1


def test_hooks_of_the_user_are_copied_and_taps_are_not(tmp_path: Path) -> None:
    model = hooked()
    with observed(tmp_path / "run", model):
        copied = copy.deepcopy(model)

    def hooks(module: nn.Module) -> list[dict[str, Any]]:
        return [
            {name: value for name, value in vars(one).items() if "_hooks" in name and value} for one in module.modules()
        ]

    assert hooks(copied) == hooks(model)
    assert not any("traindiff" in name for one in copied.modules() for name in vars(one))


def test_a_shallow_copy_shares_its_hooks_with_the_model_as_ever(tmp_path: Path) -> None:
    model = mlp()
    with observed(tmp_path / "run", model):
        copied = copy.copy(model)
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    copied(torch.ones(2, 8))

    assert calls == [1]
    assert copied._forward_hooks is model._forward_hooks


def test_a_shallow_copy_is_called_beside_the_model(tmp_path: Path) -> None:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True, evaluation=True):
        for step in range(3):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                with torch.no_grad():
                    copy.copy(model)(torch.ones(5, 8))

    found = rows(tmp_path / "run", phase="batch", slot="input[0]")
    assert [(one.step, one.stage, one.shard.shape) for one, _ in found] == [(step, "", (2, 8)) for step in range(3)]
    assert unobserved(tmp_path / "run") == []


def test_a_training_that_goes_on_with_a_shallow_copy_is_unknown_from_there(tmp_path: Path) -> None:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        for called in (model, copy.copy(model)):
            called(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    missing = [(one.step, one.phase, one.unobserved) for one, _ in rows(tmp_path / "run") if one.unobserved]
    assert {(step, phase) for step, phase, _ in missing} == {
        (1, phase) for phase in ("batch", "forward", "loss", "backward", "grad")
    }
    assert all("a shallow copy of the module was called" in why for *_, why in missing)


def test_a_model_whose_class_pickles_it_by_itself_names_nothing_of_traindiff(tmp_path: Path) -> None:
    class ByItself(WithState):
        def __getstate__(self) -> Any:
            return {"inside": pickle.dumps(vars(self))}

    model = ByItself()
    with observed(tmp_path / "run", model):
        inside = model.__getstate__()["inside"]

    strings = [str(argument) for _, argument, _ in pickletools.genops(inside) if isinstance(argument, str)]
    assert not [one for one in strings if one.startswith("traindiff")]
    pickle.loads(inside)["_modules"]["inside"](torch.ones(1, 8))


@pytest.mark.parametrize("strict", [False, True])
def test_a_recorded_model_is_exported_as_if_it_were_not(strict: bool, tmp_path: Path) -> None:
    model = mlp()
    inputs = (torch.ones(2, 8),)
    expected = torch.export.export(model, inputs, strict=strict)

    with observed(tmp_path / "run", model):
        actual = torch.export.export(model, inputs, strict=strict)

    assert [str(node.target) for node in actual.graph.nodes] == [str(node.target) for node in expected.graph.nodes]
    assert actual.graph_signature == expected.graph_signature


def test_when_the_last_session_ends_classes_are_as_they_were(tmp_path: Path) -> None:
    before = [dict(vars(kind)) for kind in (nn.Module, torch.optim.Optimizer)]
    with observed(tmp_path / "run", mlp()):
        assert "__reduce_ex__" in vars(nn.Module)

    assert [dict(vars(kind)) for kind in (nn.Module, torch.optim.Optimizer)] == before


class InEnvelope(WithState):
    """Gives its attributes beside others, deeper than Python does."""

    def __getstate__(self) -> dict[str, Any]:
        return {"version": 2, "content": {"state": copy.deepcopy(vars(self))}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state["content"]["state"])


class InList(WithState):
    """Gives its attributes as pairs."""

    def __getstate__(self) -> Any:
        return [list(vars(self).items())]

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state[0])


class ReducesItself(WithState):
    """Has an own method in the place of torch's."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return empty, (), vars(self)


class CopiesItself(WithState):
    """Has an own method for deep copies."""

    def __deepcopy__(self, memo: dict[int, Any]) -> CopiesItself:
        copied = CopiesItself.__new__(CopiesItself)
        vars(copied).update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return copied


def empty() -> ReducesItself:
    return ReducesItself.__new__(ReducesItself)


@pytest.mark.parametrize("kind", [InEnvelope, InList, ReducesItself, CopiesItself])
def test_a_class_that_pickles_in_its_own_way_is_saved_and_copied_as_without_hooks(
    kind: type[nn.Module], tmp_path: Path
) -> None:
    model = nn.Sequential(kind(), nn.ReLU())
    expected, methods = saved(model), dict(vars(kind))

    with observed(tmp_path / "run", model):
        model(torch.ones(2, 8)).sum().backward()
        model.zero_grad()
        actual, copied = saved(model), copy.deepcopy(model)
        shared = copy.copy(model[0])._forward_hooks is model[0]._forward_hooks

    assert globals_of(actual) == globals_of(expected) == globals_of(saved(copied))
    assert shared is (kind is not InEnvelope)  # which copies its attributes itself
    assert dict(vars(kind)) == methods


def globals_of(file: bytes) -> list[str]:
    """The classes and functions that a file of `torch.save` names."""
    with zipfile.ZipFile(io.BytesIO(file)) as archive:
        pickled = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    return [str(argument) for operation, argument, _ in pickletools.genops(pickled) if operation.name == "GLOBAL"]
