"""Observe what each module returns in the forward pass, and the gradients of it in the backward pass."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor, nn

from traindiff.core.site import path_in_whole
from traindiff.observe.torch.hooks.activations import Activations
from traindiff.observe.torch.hooks.compiled import ModuleObserver, tap_compiled_module
from traindiff.observe.torch.hooks.context import TapContext
from traindiff.observe.torch.hooks.followed_modules import REMOVED, Following, HeldHooks
from traindiff.observe.torch.hooks.nested import tensors
from traindiff.observe.torch.hooks.silent_modules import SilentModules, takes_hooks


def attach(context: TapContext) -> ExitStack:
    """Observe the selected modules. Close the result to remove the tap."""
    return _ModuleOutputs(context).attach()


class _ModuleOutputs:
    def __init__(self, context: TapContext) -> None:
        self._context = context
        self._progress = context.sink.progress
        self._activations = Activations(context, tap="module_outputs")
        self._silent = SilentModules(context.modules, context.sink)
        self._guarded = partial(context.sink.guarded, "module_outputs")

    def attach(self) -> ExitStack:
        guarded, modules = self._guarded, self._context.modules
        for event in (self._context.events.after_step, self._context.events.at_end):
            event.append(guarded(self._silent.report))
        self._context.events.after_step.append(guarded(self._silent.end_step))
        with ExitStack() as undo:
            undo.callback(self._activations.let_go)
            taking = {path: module for path, module in modules.items() if takes_hooks(module)}
            how = Following(hook=self._hook, lost=self._lost, grows=True)
            undo.enter_context(self._context.followed.follow(taking, how))
            return undo.pop_all()

    def _hook(self, path: str, module: nn.Module, hooks: HeldHooks) -> None:
        site, guarded = path_in_whole(path), self._guarded
        hook = guarded(partial(self._output, site))
        if not site:
            hook = guarded(self._root_output)
            hooks.before_forward(module, guarded(self._root_input))
        hooks.after_forward(module, hook)
        observer = ModuleObserver(
            output=guarded(partial(self._compiled_output, path)),
            gradient=guarded(partial(self._activations.compiled_gradient, path)),
            no_gradient=guarded(partial(self._activations.compiled_leaf, path)),
        )
        hooks.undo.enter_context(tap_compiled_module(module, observer))

    def _lost(self, path: str, why: str) -> None:
        if why or self._silent.is_called_beside_roots(path):
            self._silent.unseen(path, why or REMOVED)

    def _output(self, path: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:  # noqa: ARG002
        # Returning None tells torch to keep `output` as it is.
        if self._activations.observe(path, list(tensors(output, "output"))):
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
        if self._activations.compiled_output(path, tensor, slot):
            self._silent.heard(path, compiled=True)
