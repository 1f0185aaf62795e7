"""When a recording ends, however it ends, nothing of it is left on the training."""

from __future__ import annotations

import copy
import gc
import io
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim import optimizer as optimizer_module

import traindiff
from tests.observe.hooks.models import WithTable, mlp
from tests.observe.hooks.reading import rows
from tests.observe.hooks.trainings import TRAININGS, batches
from traindiff.core.tap_registry import OBSERVABLE
from traindiff.observe.torch.hooks import backward_calls, inspect

BACKWARD = torch.autograd.backward

MODULE_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called", "_state_dict_hooks",
)  # fmt: skip
OPTIMIZER_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def assert_nothing_left(model: nn.Module, *optimizers: Optimizer) -> None:
    for module in model.modules():
        for hooks in MODULE_HOOKS:
            assert not getattr(module, hooks), (module, hooks)
        assert not [name for name in vars(module) if "traindiff" in name]
    for name, parameter in model.named_parameters():
        assert not parameter._backward_hooks, name
        assert not parameter._post_accumulate_grad_hooks, name
    for optimizer in optimizers:
        for hooks in OPTIMIZER_HOOKS:
            assert not getattr(optimizer, hooks), hooks
    assert not optimizer_module._global_optimizer_pre_hooks
    assert not optimizer_module._global_optimizer_post_hooks
    assert torch.autograd.backward is BACKWARD
    assert not backward_calls._listeners
    assert not inspect._observers


def train(model: nn.Module, optimizer: Optimizer, steps: int = 2, *, compiled: bool = False) -> None:
    called = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    for batch in batches(steps):
        optimizer.zero_grad()
        called(batch).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("name", TRAININGS)
def test_closing_removes_every_hook(name: str, tmp_path: Path) -> None:
    seen: list[tuple[nn.Module, Any]] = []

    def observe(model: nn.Module, optimizer: Any) -> traindiff.Recorder:
        seen.append((model, optimizer))
        return traindiff.record(tmp_path / "run", model, optimizer, observe=OBSERVABLE)

    TRAININGS[name](observe)

    model, optimizer = seen[0]
    given = optimizer if isinstance(optimizer, list) else [optimizer] if optimizer else []
    assert_nothing_left(model, *given)


def test_a_found_optimizer_is_left_as_it_was(tmp_path: Path) -> None:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model):
        train(model, optimizer)

    assert_nothing_left(model, optimizer)


def test_a_with_block_that_raises_removes_every_hook_and_keeps_what_was_seen(tmp_path: Path) -> None:
    model = mlp()
    optimizer = AdamW(model.parameters())

    def fail_in_the_third_step() -> None:
        with traindiff.record(tmp_path / "run", model, optimizer):
            train(model, optimizer, steps=2)
            model(torch.ones(2, 8))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_in_the_third_step()

    assert_nothing_left(model, optimizer)
    assert {seen.step for seen, _ in rows(tmp_path / "run", phase="grad")} == {0, 1}
    assert {seen.step for seen, _ in rows(tmp_path / "run", phase="forward")} == {0, 1, 2}


def test_a_forward_pass_that_raises_leaves_the_recording_usable(tmp_path: Path) -> None:
    model = mlp()
    optimizer = AdamW(model.parameters())
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            model(torch.ones(2, 9))
        train(model, optimizer, steps=1)

    assert_nothing_left(model, optimizer)
    assert len(rows(tmp_path / "run", phase="loss")) == 1


REGISTER = [
    (nn.Module, "register_forward_hook"),
    (nn.Module, "register_forward_pre_hook"),
    (torch.Tensor, "register_hook"),
    (Optimizer, "register_step_pre_hook"),
    (Optimizer, "register_step_post_hook"),
]


class Failing:
    """A method that works so many times and fails then."""

    def __init__(self, method: Callable[..., Any], times: int) -> None:
        self.method, self.times = method, times
        self.failed = False

    def __get__(self, instance: object, owner: type) -> Callable[..., Any]:
        return partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.times -= 1
        if self.times < 0:
            self.failed = True
            raise MemoryError("no room for a hook")
        return self.method(*args, **kwargs)


@pytest.mark.parametrize(("owner", "name"), REGISTER)
def test_a_recording_leaves_no_hooks_when_attaching_fails_at_any_of_them(
    owner: type[Any], name: str, tmp_path: Path
) -> None:
    model = mlp()
    optimizer = AdamW(model.parameters())

    def attach() -> None:
        traindiff.record(tmp_path / "run", model, optimizer, observe=OBSERVABLE, overwrite=True).close()

    for number in count():
        register = Failing(getattr(owner, name), number)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(owner, name, register)
            with suppress(MemoryError):
                attach()
        assert_nothing_left(model, optimizer)
        if not register.failed:
            break

    assert number > 0
    with traindiff.record(tmp_path / "run", model, optimizer, overwrite=True):
        train(model, optimizer)


def test_failing_to_write_the_rank_file_leaves_no_hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    optimizer = AdamW(model.parameters())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("traindiff.storage.RecordingWriter.write_rank", full)
    with pytest.warns(traindiff.TraindiffWarning, match="No space left"):
        traindiff.record(tmp_path / "run", model, optimizer).close()

    assert_nothing_left(model, optimizer)


@pytest.mark.parametrize("given", [True, False])
def test_a_closed_recorder_keeps_neither_model_nor_optimizer_alive(given: bool, tmp_path: Path) -> None:
    model = mlp()
    optimizer = AdamW(model.parameters())
    with traindiff.record(tmp_path / "run", model, optimizer if given else None, observe=OBSERVABLE) as run:
        train(model, optimizer)
    alive = weakref.ref(model), weakref.ref(optimizer), weakref.ref(model[0].weight)

    del model, optimizer
    gc.collect()

    assert [reference() for reference in alive] == [None, None, None]
    assert run.step == 2


def test_a_graph_that_outlives_the_recording_observes_nothing_more(tmp_path: Path) -> None:
    model = WithTable()
    optimizer = AdamW(model.parameters())
    with traindiff.record(tmp_path / "run", model, optimizer) as run:
        loss = model(next(batches())).square().mean()
    alive = weakref.ref(model)

    loss.backward()
    run.log("late", 1.0)
    run.close()

    assert rows(tmp_path / "run", phase="backward") == []
    assert rows(tmp_path / "run", phase="loss") == []
    del model, optimizer
    gc.collect()
    assert alive() is None


def test_a_recorder_that_is_never_closed_is_closed_when_the_interpreter_exits(tmp_path: Path) -> None:
    code = f"""
import torch, traindiff
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
traindiff.record({str(tmp_path / "run")!r}, model, optimizer)  # nobody holds the recorder
model(torch.ones(3, 2)).sum().backward()
optimizer.step()
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)

    assert traindiff.open_recording(str(tmp_path / "run")).status(0).ending == "closed"
    assert {seen.step for seen, _ in rows(tmp_path / "run")} == {0}


def test_several_recordings_of_one_training_do_not_disturb_each_other(tmp_path: Path) -> None:
    model = mlp()
    optimizer = AdamW(model.parameters())
    outer = traindiff.record(tmp_path / "outer", model, optimizer)
    inner = traindiff.record(tmp_path / "inner", model, optimizer)
    train(model, optimizer, steps=1)
    outer.close()
    assert torch.autograd.backward is not BACKWARD
    train(model, optimizer, steps=1)
    inner.close()

    assert_nothing_left(model, optimizer)
    assert [{seen.step for seen, _ in rows(tmp_path / name)} for name in ("outer", "inner")] == [{0}, {0, 1}]
    first, second = (
        [(seen.path, seen.slot, bytes(summary)) for seen, summary in rows(tmp_path / name, step=0)]
        for name in ("outer", "inner")
    )
    assert first == second


def test_closing_twice_is_closing_once(tmp_path: Path) -> None:
    model = mlp()
    run = traindiff.record(tmp_path / "run", model)
    run.close()
    run.close()

    assert_nothing_left(model)


def test_a_copy_of_the_model_is_not_observed(tmp_path: Path) -> None:
    model = mlp()
    optimizer = AdamW(model.parameters())
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        average = copy.deepcopy(model)
        average(torch.ones(2, 8)).sum().backward()
        train(model, optimizer, steps=1)
    average(torch.ones(2, 8))

    found = rows(tmp_path / "run", phase="forward")
    assert [(seen.path, seen.call) for seen, _ in found] == [("0", 0), ("1", 0), ("2", 0), ("", 0)]


def test_a_compiled_copy_of_a_compiled_model_is_not_observed(tmp_path: Path) -> None:
    model = mlp()
    optimizer = AdamW(model.parameters())
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        train(model, optimizer, steps=1, compiled=True)
        average = copy.deepcopy(model)
        torch.compile(average, backend="aot_eager", fullgraph=True)(torch.ones(2, 8)).sum().backward()

    found = rows(tmp_path / "run", phase="forward")
    assert sorted((seen.path, seen.call) for seen, _ in found) == [("", 0), ("0", 0), ("1", 0), ("2", 0)]
    assert not [seen for seen, _ in rows(tmp_path / "run") if seen.step > 0]


def test_a_model_that_is_saved_as_a_whole_is_loaded_without_traindiff(tmp_path: Path) -> None:
    model = mlp()
    optimizer = AdamW(model.parameters())
    with (
        traindiff.record(tmp_path / "run", model, optimizer, observe=OBSERVABLE),
        traindiff.watch(model, optimizer, output=None),
    ):
        torch.save(model, tmp_path / "model.pt")
        torch.save(model(torch.ones(2, 8)), io.BytesIO())

    program = """
        import sys, torch
        sys.modules["traindiff"] = None  # an import fails
        model = torch.load(sys.argv[1], weights_only=False)
        print(model(torch.ones(2, 8)).tolist())
        print(torch.compile(model, backend="aot_eager")(torch.ones(2, 8)).shape)
    """
    loaded = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), tmp_path / "model.pt"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert loaded.stdout.splitlines() == [str(model(torch.ones(2, 8)).tolist()), "torch.Size([2, 4])"], loaded.stderr


@pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated:DeprecationWarning")
def test_torchscript_compiles_a_model_that_is_recorded_as_if_it_were_not(tmp_path: Path) -> None:
    model = mlp()
    optimizer = AdamW(model.parameters())
    plain = torch.jit.script(model).code
    with (
        traindiff.record(tmp_path / "run", model, optimizer, strict=True),
        traindiff.watch(model, optimizer, output=None),
    ):
        train(model, optimizer, steps=1)
        scripted = torch.jit.script(model)
        with pytest.raises(torch.jit.frontend.NotSupportedError):
            torch.jit.script(nn.Sequential(model, Unscriptable()))
        train(model, optimizer, steps=1)

    assert scripted.code == plain
    assert "_traindiff_number" not in dir(scripted[0])
    torch.jit.save(scripted, io.BytesIO())
    assert {seen.step for seen, _ in rows(tmp_path / "run", phase="forward")} == {0, 1}
    assert_nothing_left(model, optimizer)


class Unscriptable(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        yield x


def test_a_process_without_a_recording_is_as_if_traindiff_were_not_there() -> None:
    TRAININGS["plain"](lambda *_: nullcontext())

    assert torch.autograd.backward is BACKWARD
