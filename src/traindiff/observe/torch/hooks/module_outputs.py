"""Observe what each module returns and the gradients of it, and tell of modules that no hook has heard."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import Any
from weakref import ReferenceType, ref

from torch import Tensor, nn

from traindiff.core.observation import MAYBE_UNSEEN, NOT_CALLED, UNSEEN
from traindiff.core.site import enclosing, path_in_whole
from traindiff.core.torch_compat.autograd import version_of
from traindiff.core.torch_compat.compiling import compiled_code_ran
from traindiff.core.torch_compat.training import parameters_in, parameters_of
from traindiff.observe.common.sink import Sink
from traindiff.observe.torch.hooks.activations import Activations
from traindiff.observe.torch.hooks.compiled import ModuleObserver, tap_compiled_module
from traindiff.observe.torch.hooks.context import TapContext
from traindiff.observe.torch.hooks.followed_modules import (
    REMOVED,
    Following,
    HeldHooks,
    has_forward,
    takes_hooks,
)
from traindiff.observe.torch.hooks.gradient_paths import GradientPaths
from traindiff.observe.torch.hooks.nested import tensors
from traindiff.observe.torch.hooks.swapped_tensors import HoldsTensors

COMPILED = (
    f"{NOT_CALLED}, although the root ran and torch.compile was in use: the module was called in compiled "
    "code without its hooks, called by its forward method, or not called"
)
QUIET = (
    "it returned nothing that its hooks saw, although its parameters got gradients: it was called without its hooks, "
    "by its forward method for example, or others used its parameters"
)
SCRIPTED = f"{NOT_CALLED}: TorchScript takes no hooks on modules"


def attach(context: TapContext) -> None:
    """Observe the selected modules."""
    _ModuleOutputs(context).attach()


class _ModuleOutputs:
    """Hooks each selected module. The root of a pipeline's stage is hooked for what it sends and receives, too."""

    def __init__(self, context: TapContext) -> None:
        self._context = context
        self._progress = context.sink.progress
        self._others = context.other_threads
        self._activations = Activations(context, tap="module_outputs")
        self._silent = SilentModules(context.targets.modules, context.sink)
        self._paths = GradientPaths(context)
        self._guarded = partial(context.sink.guarded, "module_outputs")

    def attach(self) -> None:
        guarded, modules = self._guarded, self._context.targets.modules
        events, idle = self._context.events, self._is_idle
        for event in (events.after_step, events.at_end):
            event.append(guarded(self._silent.report, idle=idle))
        events.after_call.append(guarded(self._silent.note_left, idle=idle))
        events.after_step.append(guarded(self._silent.end_step))
        events.after_step.append(guarded(self._paths.describe, idle=idle))
        self._context.undo.callback(self._activations.let_go)
        taking = [(path, module) for path, module in modules.items() if takes_hooks(module)]
        how = Following(hook=self._hook, lost=self._lost, grows=True)
        self._context.undo.enter_context(self._context.followed.follow(taking, how))

    def _hook(self, path: str, module: nn.Module, hooks: HeldHooks) -> None:
        site, guarded = path_in_whole(path), self._guarded
        self._activations.forget()  # another module may have the batch on another axis
        output = partial(self._output, site) if site else self._root_output
        if not site:
            hooks.before_forward(module, guarded(self._root_input, idle=self._is_idle))
        hooks.after_forward(module, guarded(output, idle=self._is_idle))
        observer = ModuleObserver(
            output=guarded(partial(self._compiled_output, path)),
            gradient=guarded(partial(self._activations.compiled_gradient, path)),
            no_gradient=guarded(partial(self._activations.compiled_leaf, path)),
        )
        hooks.undo.enter_context(tap_compiled_module(module, observer))

    def _is_idle(self) -> bool:
        """True in a step that is not recorded, and in calls that are no part of the training."""
        return not self._progress.observing or (bool(self._others.inside) and self._others.is_this())

    def _lost(self, path: str, why: str) -> None:
        if why or self._silent.is_called_beside_roots(path):
            self._silent.unseen(path, why or REMOVED)

    def _output(self, path: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:  # noqa: ARG002
        # Returning None tells torch to keep `output` as it is.
        found = [("output[0]", output)] if type(output) is Tensor else list(tensors(output, "output"))
        if self._activations.observe(path, found):
            self._paths.see(path, args, output)
            self._silent.heard(path, compiled=False, beside_roots=not self._progress.in_forward)

    def _root_output(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        chunk = self._progress.chunk
        if chunk is None or chunk.is_last:
            self._output("", module, args, output)
        else:
            self._activations.boundary(chunk, tensors(output, "sent"))

    def _root_input(self, module: nn.Module, args: tuple[Any, ...]) -> None:  # noqa: ARG002
        chunk = self._progress.chunk
        if chunk is not None and not chunk.is_first:
            self._activations.boundary(chunk, tensors(args, "received"))

    def _compiled_output(self, path: str, tensor: Tensor, slot: str) -> None:
        if not self._is_idle() and self._activations.compiled_output(path, tensor, slot):
            self._silent.heard(path, compiled=True)


class SilentModules(HoldsTensors):
    """Records, once, which of the observed modules returned nothing in a step that was recorded.

    A module that was merely not called is not worth telling of. Without compiled code, silence means just that. With
    compiled code it still does if the forward pass of the module around it is known to have been traced with hooks,
    or if the module has parameters to train and none of them has a gradient.

    If a module was heard in earlier steps and is silent in a later one, although its parameters got gradients in it,
    that step is recorded as unknown. Gradients that an earlier step has left do not count: with several optimizers,
    each may clear only its own, and only when its turn comes.

    Args:
        modules: The observed modules by canonical path.
        sink: Receives the silent ones as unobserved.
    """

    def __init__(self, modules: Mapping[str, nn.Module], sink: Sink) -> None:
        super().__init__()
        self._sink = sink
        self._modules = modules
        self._callable = {path: module for path, module in modules.items() if has_forward(module)}
        self._silent = dict(self._callable)
        self._traced: set[str] = set()
        self._heard: set[str] = set()
        self._now: set[str] = set()
        self._beside_roots: set[str] = set()
        # By id of the parameter: its latest gradient. None if that is not known.
        self._left: dict[int, tuple[ReferenceType[Tensor], int]] | None = {}

    def heard(self, path: str, *, compiled: bool, beside_roots: bool = False) -> None:
        """Note that the module at `path` returned something: in compiled code, or outside all forward passes."""
        self._now.add(path)
        if beside_roots:
            self._beside_roots.add(path)
        if self._silent.pop(path, None) is not None and compiled:
            self._traced |= {path, self._around(path)}

    def is_called_beside_roots(self, path: str) -> bool:
        """True if the module was ever called outside a forward pass of a root."""
        return path_in_whole(path) in self._beside_roots

    def unseen(self, path: str, why: str, *, how: str = UNSEEN) -> None:
        """Record that calls of a module in this step were not heard, or may not have been."""
        self._now.add(path_in_whole(path))
        for phase in ("forward", "backward") if self._sink.progress.observing else ():
            self._sink.unobserved(f"{how}: {why}", phase=phase, path=path_in_whole(path), slot="output[0]")

    def end_step(self) -> None:
        """Record which modules were heard in earlier steps, and may have been called unheard in this one."""
        progress = self._sink.progress
        if progress.observing and progress.forward_done:
            for path in sorted(self._heard - self._now):
                module = self._modules.get(path)
                if module is not None and any(map(self._has_new_gradient, parameters_in(module))):
                    self.unseen(path, QUIET, how=MAYBE_UNSEEN)
            self._heard |= self._now
        self._now.clear()

    def note_left(self, optimizer: str) -> None:
        """Note the gradients that a step leaves, if the next one is recorded."""
        if optimizer != self._sink.progress.optimizer:
            return
        all_of_them = chain.from_iterable([parameters_of(module).values() for module in self._modules.values()])
        trained = [one for one in all_of_them if one is not None and one.is_leaf]  # others are exchanged for a call
        found = [(id(one), gradient) for one in trained if (gradient := one.grad) is not None]
        self._left = {key: (ref(gradient), version_of(gradient)) for key, gradient in found}

    def forget_tensors(self) -> None:
        """See `HoldsTensors`."""
        self._left = None

    def _has_new_gradient(self, parameter: Tensor) -> bool:
        """True if a gradient is there that the step before has not left."""
        if not parameter.is_leaf or (gradient := parameter.grad) is None or self._left is None:
            return False
        before, version = self._left.get(id(parameter), (None, 0))
        return before is None or before() is not gradient or version_of(gradient) != version

    def report(self) -> None:
        """Record the silent modules after the first recorded step in which the root has run."""
        progress = self._sink.progress
        if not (progress.observing and progress.forward_done):
            return
        compiled = compiled_code_ran()
        for path, module in self._silent.items():
            scripted = not takes_hooks(module)
            if scripted or (compiled and not self._is_idle(path, module)):
                reason = SCRIPTED if scripted else COMPILED
                self._sink.unobserved(reason, phase="forward", path=path, slot="output[0]")
        self._silent.clear()  # once is enough
        self._callable.clear()

    def _is_idle(self, path: str, module: nn.Module) -> bool:
        """True if the module is known not to have been called."""
        trained = [parameter for parameter in parameters_in(module) if parameter.requires_grad]
        if trained:
            return all(parameter.grad is None for parameter in trained)
        return self._around(path) in self._traced

    def _around(self, path: str) -> str:
        """The nearest module around `path` that has a forward method."""
        return next((one for one in enclosing(path)[1:] if one in self._callable), "")
