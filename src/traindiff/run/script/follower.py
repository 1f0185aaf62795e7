"""Find what a script trains, and attach the taps of a recording to it before the first forward pass."""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import wraps
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from traindiff.core.settings import RecordSettings
from traindiff.core.torch_compat.training import is_loader_worker, is_nested_step
from traindiff.errors import ConfigError, TraindiffWarning
from traindiff.observe.common.listeners import Listeners
from traindiff.observe.torch.hooks.optimizer_step import has_closure, inner_optimizer
from traindiff.observe.torch.hooks.out_of_sight import out_of_sight
from traindiff.observe.torch.session.recorder import Recorder
from traindiff.run.script.account import Account, SeenModel, SeenOptimizer
from traindiff.run.script.script import is_script_itself
from traindiff.run.script.signals import on_module_called, on_optimizer_made, on_process_started, on_program_started

if TYPE_CHECKING:
    from traindiff.observe.torch.session.recorder import Recorder


def is_recorded_by_script() -> str:
    """Path of a recording that is being written in this process; empty if there is none."""
    open_ones = (one for one in gc.get_objects() if issubclass(type(one), Recorder) and one.is_recording)
    return next((one.path for one in open_ones), "")


def on_recorder_made(listener: Callable[[str], None]) -> ExitStack:
    """Have `listener` called before a further recording begins, with its path. Close the result to end it."""
    return _made.attach(listener)


def _replace_init() -> None:
    original = Recorder.__init__

    @wraps(original)
    def init(self: Recorder, path: str, *args: Any, **kwargs: Any) -> None:
        for listener in _made:
            listener(path)
        original(self, path, *args, **kwargs)

    _made.replace(Recorder, "__init__", init)


_made: Listeners[Callable[[str], None]] = Listeners(_replace_init)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is to be recorded of a script.

    Attributes:
        path: Directory to write.
        settings: What, and how.
        overwrite: Replace a recording that is already there.
    """

    path: str
    settings: RecordSettings
    overwrite: bool = False


class Follower:
    """Waits for the first call, where gradients are enabled, of a module that holds parameters of an optimizer.

    By then a training has made what it trains: models, what wraps them, optimizers. All modules that hold parameters
    of optimizers and are part of no other are recorded, as `traindiff.record` does it, from this very call on.
    Processes that are forked off are left alone.

    Args:
        wanted: What is to be recorded.
        account: Is kept up to date with what is seen.
        refuse: Called with what is wrong with `wanted` for this training; ends it.
    """

    def __init__(self, wanted: Wanted, account: Account, *, refuse: Callable[[ConfigError], None]) -> None:
        self._wanted = wanted
        self._account = account
        self._refuse = refuse
        self._process = os.getpid()
        self._given: WeakKeyDictionary[Optimizer, frozenset[int]] = WeakKeyDictionary()
        self._seen: WeakKeyDictionary[Optimizer, SeenOptimizer] = WeakKeyDictionary()
        self._others: WeakSet[nn.Module] = WeakSet()
        self._recorder: Recorder | None = None
        self._were_given = False
        self._undo = ExitStack()
        self._until_attached = ExitStack()

    def start(self) -> None:
        """Begin to look out for a training. Torch has been imported by now."""
        self._account.torch_imported = True
        self._undo.enter_context(on_optimizer_made(self._guarded(self._made)))
        self._undo.enter_context(on_process_started(self._guarded(self._started)))
        self._undo.enter_context(on_program_started(self._guarded(self._launched)))
        self._undo.callback(register_optimizer_step_post_hook(self._guarded(self._stepped)).remove)
        self._until_attached.enter_context(on_module_called(self._guarded(self._called)))
        self._undo.callback(register_optimizer_step_pre_hook(self._guarded(self._stepping)).remove)

    def ended_by(self, error: BaseException) -> None:
        """The script has raised this, which ends it."""
        if self._recorder is not None and not self._is_elsewhere():
            self._recorder.ended_by(error)

    def end(self) -> None:
        """Complete the recording."""
        if self._is_elsewhere():
            return
        with self._undo, self._until_attached:
            self._complete()

    def _guarded(self, listener: Callable[..., None]) -> Callable[..., None]:
        """`listener`, made harmless: whatever goes wrong in it, the training goes on."""

        def call(*args: Any) -> None:
            try:
                with out_of_sight():
                    listener(*args)
            except Exception as error:  # the training is none of its business
                if self._wanted.settings.strict:
                    raise
                self._account.failure = f"traindiff failed: {type(error).__name__}: {error}."
                self._until_attached.close()

        return call

    def _complete(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
            names = [one.followed_as for one in self._account.optimizers]
            for seen in self._account.optimizers:
                if names.count(seen.followed_as) == 1:  # with steps that a loss scaler has left out
                    seen.num_steps = self._recorder.steps.get(seen.followed_as, seen.num_steps)

    def _is_elsewhere(self) -> bool:
        return os.getpid() != self._process

    @property
    def _waits(self) -> bool:
        account = self._account
        ended = account.own_recording or account.failure or account.refused or account.left_out
        return not (account.models or ended)

    def _made(self, optimizer: Optimizer) -> None:
        """Note what an optimizer was given: DeepSpeed later puts tensors of its own in the place of that."""
        if self._is_elsewhere():
            return
        given = frozenset(id(one) for group in optimizer.param_groups for one in group["params"])
        self._given[optimizer] = given
        self._others.clear()
        if optimizer not in self._seen:
            self._seen[optimizer] = SeenOptimizer(kind=type(optimizer).__name__, num_parameters=len(given))
            self._account.optimizers.append(self._seen[optimizer])

    def _started(self, process: BaseProcess) -> None:
        self._account.num_processes += not is_loader_worker(process) and not self._is_elsewhere()

    def _launched(self, command: object) -> None:
        """A program was started. Trainers start the script again for further ranks."""
        is_script = isinstance(command, (list, tuple)) and any(is_script_itself(str(one)) for one in command[1:])
        self._account.num_processes += is_script and not self._is_elsewhere()

    def _stepping(self, optimizer: Optimizer, *call: Any) -> None:
        """An optimizer is about to be called. The closure that it is given may be what computes everything."""
        if self._is_elsewhere():
            return
        if self._recorder is not None and self._were_given:
            self._recorder.follow(optimizer, *call)
        if not self._waits or not has_closure(optimizer, *call):
            return
        if self._trains_a_module(optimizer):
            self._attach(None, stepping=optimizer)

    def _trains_a_module(self, optimizer: Optimizer) -> bool:
        from traindiff.observe.torch.session.models import live_modules, outermost

        return bool(outermost(live_modules(), self._given.get(optimizer, frozenset())))

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        """An optimizer has been called: by now a recording follows it, unless it holds nothing of the models."""
        seen = self._seen.get(optimizer)
        if seen is None or self._is_elsewhere() or is_nested_step(optimizer):
            return
        seen.num_steps += 1
        if seen.num_steps == 1 and self._waits and self._trains_a_module(optimizer):
            self._account.attached_late = True
            self._attach(None)
        elif not seen.followed_as and self._recorder is not None:
            self._note_followed(optimizer, seen)

    def _note_followed(self, optimizer: Optimizer, seen: SeenOptimizer) -> None:
        for name, tap in {} if self._recorder is None else self._recorder.followed.items():
            if tap.optimizer is optimizer:
                seen.followed_as = name
            elif inner_optimizer(tap.optimizer) is optimizer and seen in self._account.optimizers:
                self._account.optimizers.remove(seen)  # the one around it is followed

    def _called(self, module: nn.Module) -> None:
        if not self._given or module in self._others or not torch.is_grad_enabled() or self._is_elsewhere():
            return
        if self._waits:
            held = frozenset().union(*self._given.values())
            if any(id(one) in held for one in module.parameters()):
                self._attach(module)
            else:
                self._others.add(module)

    def _attach(self, called: nn.Module | None, *, stepping: Optimizer | None = None) -> None:
        """Attach the taps. Ends the training where what was asked for is wrong.

        Args:
            called: The module that is about to be called, where that is known.
            stepping: The optimizer that is about to be called, where it is one that calls for the forward pass itself.
        """
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("default", TraindiffWarning)  # whatever the script makes of warnings
                self._record(called, stepping, sys._getframe(3))
        except ConfigError as error:
            self._account.refused = True
            self._refuse(error)
        finally:
            if not self._waits:
                self._until_attached.close()

    def _record(self, called: nn.Module | None, stepping: Optimizer | None, frame: FrameType) -> None:
        # Only now: importing all this is not for scripts that train nothing.
        from traindiff.observe.torch.session.models import (
            called_of,
            distinct,
            live_modules,
            outermost,
            takes_hooks,
            trained_parts,
        )
        from traindiff.observe.torch.session.record import recorder_of
        from traindiff.observe.torch.session.targets import find_targets
        from traindiff.run.script.account import named_models

        if path := is_recorded_by_script():
            self._account.own_recording = path
            return
        live = live_modules()
        models = self._in_order(distinct(outermost(live, frozenset().union(*self._given.values())), called))
        if not models and called is not None:  # it is part of itself
            models = [called]
        if unseen := next((one for one in models if not takes_hooks(one)), None):
            self._account.failure = _SCRIPTED.format(type(unseen).__name__)
            self._until_attached.close()
            return
        names = named_models(models, frame) if len(models) > 1 else {"": models[0]}
        around = next((one for one in models if any(inner is called for inner in one.modules())), None)
        if stepping is None:
            roots = [root for one in models for root in called_of(one, called if one is around else None)]
        else:
            roots = [root for one in models for root in (one, *trained_parts(one))]
        wanted = self._wanted
        targets = find_targets(
            models[0] if len(models) == 1 else names,
            None if stepping is None else self._named_optimizers(stepping, models),
            select=wanted.settings.select,
            called=roots,
            operators=wanted.settings.operators,
        )
        recorder = recorder_of(wanted.path, targets, wanted.settings, overwrite=wanted.overwrite)
        if not recorder.is_recording:
            self._account.left_out = True
            return
        self._recorder, self._were_given = recorder, stepping is not None
        self._undo.enter_context(on_recorder_made(self._give_way))
        self._account.models += [_seen(name, model) for name, model in names.items()]
        inside = {id(one) for model in models for one in model.modules()}
        others = [one for one in live if id(one) not in inside]
        every = {id(parameter) for one in others for parameter in one.parameters()}
        self._account.untrained += [_seen("", one) for one in outermost(others, every)]

    def _named_optimizers(self, first: Optimizer, models: list[nn.Module]) -> dict[str, Optimizer]:
        """The optimizers of some models, with the names that they would have if they were found when they step."""
        own = {id(one) for model in models for one in model.parameters()}
        inner = {id(inner_optimizer(one)) for one in self._given if inner_optimizer(one) is not one}
        others = [
            one
            for one, given in self._given.items()
            if one is not first and id(one) not in inner and not own.isdisjoint(given)
        ]
        return {"optimizer": first, **{f"optimizer[{number}]": one for number, one in enumerate(others, start=1)}}

    def _in_order(self, models: list[nn.Module]) -> list[nn.Module]:
        """Models in the order of the optimizers that hold parameters of them."""
        given = list(self._given.values())

        def place(model: nn.Module) -> int:
            own = {id(one) for one in model.parameters()}
            return next((number for number, ids in enumerate(given) if not own.isdisjoint(ids)), len(given))

        return sorted(models, key=place)

    def _give_way(self, path: str) -> None:
        """The script records itself from now on."""
        self._account.own_recording = path
        self._complete()


_SCRIPTED = (
    "the script trains a {}, which torch.jit.script has made, and in which nothing can be observed. Train the module "
    "that torch.jit.script was given."
)


def _seen(name: str, model: nn.Module) -> SeenModel:
    from traindiff.observe.torch.session.models import unwrapped

    modules = list(model.modules())
    inner = unwrapped(model)
    kind = type(inner).__name__ if inner is model else f"{type(inner).__name__} ({type(model).__name__})"
    return SeenModel(
        name=name,
        kind=kind,
        num_tensors=len(list(model.parameters())),
        num_scripted=sum(isinstance(one, torch.jit.ScriptModule) for one in modules),
    )
