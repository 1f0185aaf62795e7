"""Find what a script trains, and attach a recording to it before the first forward pass."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from traindiff.core.settings import RecordSettings
from traindiff.core.torch_compat.training import is_loader_worker, is_nested_step, modules_in, parameters_in
from traindiff.errors import ConfigError, TraindiffWarning
from traindiff.observe.torch.hooks.out_of_sight import out_of_sight
from traindiff.observe.torch.hooks.step_hooks import has_closure, inner_optimizer
from traindiff.observe.torch.session.models import (
    NoModule,
    called_of,
    can_be_name,
    distinct,
    live_modules,
    outermost,
    takes_hooks,
    trained_parts,
    unwrapped,
)
from traindiff.observe.torch.session.record import recorder_of
from traindiff.observe.torch.session.recorder import Recorder
from traindiff.observe.torch.session.targets import find_targets
from traindiff.run.script.account import Account, SeenModel, SeenOptimizer
from traindiff.run.script.script import is_script_itself
from traindiff.run.script.signals import (
    is_recorded_by_script,
    module_called,
    optimizer_made,
    process_started,
    program_started,
    recorder_made,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRequest:
    """The recording that the user asked for."""

    path: str
    settings: RecordSettings
    overwrite: bool = False


class Follower:
    """Waits for the first call, with gradients enabled, of a module that holds parameters of an optimizer.

    By then a training has made its models, their wrappers and its optimizers. From this call on, all modules that hold
    parameters of optimizers and are part of no other are recorded, as `traindiff.record` does it. Forked processes are
    left alone.

    Args:
        request: The recording that the user asked for.
        account: Is kept up to date.
        refuse: Called with the reason if it does not suit this training; ends the training.
    """

    def __init__(self, request: RecordRequest, account: Account, *, refuse: Callable[[ConfigError], None]) -> None:
        self._request = request
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
        self._while_recording = ExitStack()

    def start(self) -> None:
        """Start to look for a training. Torch has been imported by now."""
        self._account.torch_imported = True
        self._undo.callback(self._while_recording.close)
        self._undo.enter_context(optimizer_made.attach(self._guarded(self._made)))
        self._undo.enter_context(process_started.attach(self._guarded(self._started)))
        self._undo.enter_context(program_started.attach(self._guarded(self._launched)))
        self._undo.callback(register_optimizer_step_post_hook(self._guarded(self._stepped)).remove)
        self._until_attached.enter_context(module_called.attach(self._guarded(self._called)))
        self._undo.callback(register_optimizer_step_pre_hook(self._guarded(self._stepping)).remove)

    def ended_by(self, error: BaseException) -> None:
        """Note the exception that ends the script."""
        if self._recorder is not None and not self._is_elsewhere():
            self._recorder.ended_by(error)

    def end(self) -> None:
        """Complete the recording."""
        if self._is_elsewhere():
            return
        with self._undo, self._until_attached:
            self._complete()

    def _guarded(self, listener: Callable[..., None]) -> Callable[..., None]:
        """`listener`, made harmless: the training continues whatever goes wrong in it."""

        def call(*args: Any) -> None:
            try:
                with out_of_sight():
                    listener(*args)
            except Exception as error:  # an error here must not end the training
                if self._request.settings.strict:
                    raise
                self._account.failure = f"traindiff failed: {type(error).__name__}: {error}."
                self._until_attached.close()

        return call

    def _complete(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
            names = [one.followed_as for one in self._account.optimizers]
            for seen in self._account.optimizers:
                if names.count(seen.followed_as) == 1:  # includes steps that a loss scaler skipped
                    seen.num_steps = self._recorder.steps.get(seen.followed_as, seen.num_steps)

    def _is_elsewhere(self) -> bool:
        return os.getpid() != self._process

    @property
    def _waits(self) -> bool:
        account = self._account
        ended = account.own_recording or account.failure or account.refused or account.left_out
        return not (account.models or ended)

    def _made(self, optimizer: Optimizer) -> None:
        """Note the parameters of a new optimizer: DeepSpeed replaces them later by its own tensors."""
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
        """Count a program that runs the script again: trainers do this for further ranks."""
        is_script = isinstance(command, (list, tuple)) and any(is_script_itself(str(one)) for one in command[1:])
        self._account.num_processes += is_script and not self._is_elsewhere()

    def _stepping(self, optimizer: Optimizer, *call: Any) -> None:
        """Handle an optimizer that is about to be called: if no module was, a closure or other code computes all."""
        if self._is_elsewhere():
            return
        if self._recorder is not None and self._were_given:
            self._recorder.follow(optimizer, *call)
        if not self._waits or not (given := self._given.get(optimizer)):
            return
        live = live_modules()
        trains_a_module = bool(outermost(live, given))
        if not trains_a_module and outermost(live, frozenset().union(*self._given.values())):
            return  # it trains something beside a model, which will be called
        if has_closure(optimizer, *call):
            self._attach(None, stepping=optimizer)
        elif not _only_makes_state(optimizer):
            self._account.attached_late = trains_a_module
            self._attach(None, stepping=optimizer)

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        """Handle an optimizer that was called: the recording follows it, unless it holds nothing of the models."""
        seen = self._seen.get(optimizer)
        if seen is None or self._is_elsewhere() or is_nested_step(optimizer):
            return
        if self._waits and _only_makes_state(optimizer):
            return
        seen.num_steps += 1
        if not seen.followed_as and self._recorder is not None:
            self._note_followed(optimizer, seen)
            if seen.num_steps == 1 and not seen.followed_as:
                trained = outermost(live_modules(), self._given.get(optimizer, frozenset()))
                seen.model = ", ".join(dict.fromkeys(type(unwrapped(one)).__name__ for one in trained[:2]))

    def _note_followed(self, optimizer: Optimizer, seen: SeenOptimizer) -> None:
        for name, tap in {} if self._recorder is None else self._recorder.followed.items():
            if tap.optimizer is optimizer:
                seen.followed_as = name
            elif inner_optimizer(tap.optimizer) is optimizer and seen in self._account.optimizers:
                self._account.optimizers.remove(seen)  # its wrapper is followed

    def _called(self, module: nn.Module) -> None:
        if not self._given or module in self._others or not torch.is_grad_enabled() or self._is_elsewhere():
            return
        if self._waits or self._account.without_module:
            held = frozenset().union(*self._given.values())
            if any(id(one) in held for one in parameters_in(module)):
                self._attach(module)
            else:
                self._others.add(module)

    def _attach(self, called: nn.Module | None, *, stepping: Optimizer | None = None) -> None:
        """Attach the recording. Ends the training if the request is wrong.

        Args:
            called: The module that is about to be called, if known.
            stepping: The optimizer that is about to be called, if it calls the forward pass itself.
        """
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("default", TraindiffWarning)  # regardless of the script's filters
                self._record(called, stepping, sys._getframe(3))
        except ConfigError as error:
            self._account.refused = True
            self._refuse(error)
        finally:
            if not (self._waits or self._account.without_module):
                self._until_attached.close()

    def _record(self, called: nn.Module | None, stepping: Optimizer | None, frame: FrameType) -> None:
        replaces = self._recorder is not None
        if replaces:
            self._end_without_module()
        if path := is_recorded_by_script():
            self._account.own_recording = path
            return
        live = live_modules()
        models = self._in_order(distinct(outermost(live, frozenset().union(*self._given.values())), called))
        if not models:  # the module contains itself, or the tensors are of none
            models = [NoModule() if called is None else called]
        if unseen := next((one for one in models if not takes_hooks(one)), None):
            self._account.failure = _SCRIPTED.format(type(unseen).__name__)
            self._until_attached.close()
            return
        names = named_models(models, frame) if len(models) > 1 else {"": models[0]}
        around = next((one for one in models if any(inner is called for inner in modules_in(one))), None)
        if stepping is None:
            roots = [root for one in models for root in called_of(one, called if one is around else None)]
        else:
            roots = [root for one in models for root in (one, *trained_parts(one))]
        request = self._request
        targets = find_targets(
            models[0] if len(models) == 1 else names,
            None if stepping is None else self._named_optimizers(stepping, models),
            select=request.settings.select, called=roots, operators=request.settings.operators,
        )  # fmt: skip
        overwrite = request.overwrite or replaces
        recorder = recorder_of(request.path, targets, request.settings, overwrite=overwrite)
        if not recorder.is_recording:
            self._account.left_out = True
            return
        self._recorder, self._were_given = recorder, stepping is not None
        recorder.describe_at_end("not_followed", self._account.not_followed)
        self._while_recording.enter_context(recorder_made.attach(self._give_way))
        self._account.models += [_seen(name, model) for name, model in names.items()]
        self._account.without_module = isinstance(models[0], NoModule)
        inside = {id(one) for model in models for one in modules_in(model)}
        others = [one for one in live if id(one) not in inside and not _is_only_a_shape(one)]
        every = {id(parameter) for one in others for parameter in parameters_in(one)}
        self._account.untrained += [_seen("", one) for one in outermost(others, every)]

    def _end_without_module(self) -> None:
        """End the recording of tensors of no module, because a model is trained now."""
        self._while_recording.close()
        if self._recorder is not None:
            self._recorder.close()
        self._account.models.clear()
        for seen in self._account.optimizers:
            seen.followed_as = ""

    def _named_optimizers(self, first: Optimizer, models: list[nn.Module]) -> dict[str, Optimizer]:
        """The optimizers of some models, with the names that they would get if they were found at their first step."""
        own = {id(one) for model in models for one in parameters_in(model)}
        inner = {id(inner_optimizer(one)) for one in self._given if inner_optimizer(one) is not one}
        others = [
            one
            for one, given in self._given.items()
            if one is not first and id(one) not in inner and not own.isdisjoint(given)
        ]
        return {"optimizer": first, **{f"optimizer[{number}]": one for number, one in enumerate(others, start=1)}}

    def _in_order(self, models: list[nn.Module]) -> list[nn.Module]:
        """Models in the order of the optimizers that hold their parameters."""
        given = list(self._given.values())

        def place(model: nn.Module) -> int:
            own = {id(one) for one in parameters_in(model)}
            return next((number for number, ids in enumerate(given) if not own.isdisjoint(ids)), len(given))

        return sorted(models, key=place)

    def _give_way(self, path: str) -> None:
        """End this recording, because the script now records itself."""
        self._account.own_recording = path
        self._complete()


_SCRIPTED = (
    "the script trains a {}, which torch.jit.script has made, and in which nothing can be observed. Train the module "
    "that torch.jit.script was given."
)


def _seen(name: str, model: nn.Module) -> SeenModel:
    modules = list(modules_in(model))
    inner = unwrapped(model)
    kind = type(inner).__name__ if inner is model else f"{type(inner).__name__} ({type(model).__name__})"
    return SeenModel(
        name=name,
        kind=kind,
        num_tensors=len(list(parameters_in(model))),
        num_scripted=sum(isinstance(one, torch.jit.ScriptModule) for one in modules),
    )


def _is_only_a_shape(model: nn.Module) -> bool:
    """True for a model that cannot run: all of its parameters are on the meta device."""
    return all(one.device.type == "meta" for one in parameters_in(model))


def names_of_kinds(kinds: Sequence[str]) -> list[str]:
    """A name for each model from its class, numbered from the second model of a class on."""
    return [kind if kinds.index(kind) == at else f"{kind}_{kinds[:at].count(kind)}" for at, kind in enumerate(kinds)]


def named_models(models: Sequence[nn.Module], frame: FrameType | None) -> dict[str, nn.Module]:
    """Unique names for several models.

    Args:
        models: As the training calls them, wrapped or not.
        frame: Where it calls them. Variables of `__main__` come first, then those of the outermost function with the
            attributes of its `self`, and so on: functions further inside may call any model `model`.
    """
    scopes: list[Mapping[str, Any]] = []
    while frame is not None:
        scopes[:0] = [frame.f_locals, *_attributes(frame.f_locals)]
        frame = frame.f_back
    scopes.insert(0, vars(sys.modules["__main__"]))
    kinds = names_of_kinds([type(unwrapped(model)).__name__ for model in models])
    found: dict[str, nn.Module] = {}
    for model, kind in zip(models, kinds, strict=True):
        names = (name for scope in scopes for name in _names_in(scope, model))
        found[next((name for name in names if name not in found), kind)] = model
    return found


def _names_in(scope: Mapping[str, Any], model: nn.Module) -> list[str]:
    """The model's names in a scope, those of the model itself before those of its wrapper."""
    inner = unwrapped(model)
    held = [(name, one) for name, one in list(scope.items()) if one is model or one is inner]
    usable = [(name, one) for name, one in held if _is_usable(name)]
    return [name for name, one in sorted(usable, key=lambda pair: pair[1] is not inner)]


def _is_usable(name: str) -> bool:
    return name.isidentifier() and not name.startswith("_") and name != "self" and can_be_name(name)


def _attributes(variables: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The attributes of an object that holds models, e.g. the trainer whose method runs."""
    owner = variables.get("self")
    own = getattr(owner, "__dict__", None)
    return [own] if isinstance(own, dict) and not isinstance(owner, nn.Module) else []


def _only_makes_state(optimizer: Optimizer) -> bool:
    """True for a step that trains nothing: torch.distributed.checkpoint takes one to have an optimizer make its state.

    All learning rates and all gradients are zero in it.
    """
    groups = optimizer.param_groups
    gradients = [one.grad for group in groups for one in group["params"] if one.grad is not None]
    return all(float(group.get("lr", 1.0)) == 0.0 for group in groups) and not any(bool(one.any()) for one in gradients)
