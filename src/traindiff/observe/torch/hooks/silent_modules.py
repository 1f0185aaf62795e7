"""Modules of which nothing was observed because their code was compiled where taps cannot see."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import getattr_static

import torch
from torch import nn

from traindiff.core._torch_compat import compiled_code_ran
from traindiff.core.observation import MAYBE_UNSEEN, NOT_CALLED, UNSEEN
from traindiff.core.site import path_in_whole
from traindiff.observe.common.sink import Sink

COMPILED = (
    f"{NOT_CALLED}, although the root ran and torch.compile was in use: the module was called in compiled "
    "code without its hooks, called by its forward method, or not called"
)
QUIET = (
    "it returned nothing that its hooks saw, although its parameters have gradients: it was called without its hooks, "
    "by its forward method for example, or others used its parameters"
)
SCRIPTED = f"{NOT_CALLED}: TorchScript takes no hooks on modules"


def takes_hooks(module: nn.Module) -> bool:
    """Whether outputs of the module can be observed at all."""
    return not isinstance(module, torch.jit.ScriptModule)


class SilentModules:
    """Says, once, which of the observed modules never returned anything in a step that was recorded.

    A module that was merely not called is no news. Without compiled code, silence means just that. With
    it, it still does if the forward pass of the module around it is known to have been traced with hooks,
    or if the module has parameters to train and none of them has a gradient.

    Of a module that was heard in earlier steps and is not in a later one, although parameters of it have gradients
    there, that step is not known.

    Args:
        modules: The observed modules by canonical path.
        sink: Receives the silent ones as unobserved.
    """

    def __init__(self, modules: Mapping[str, nn.Module], sink: Sink) -> None:
        self._sink = sink
        self._modules = modules
        self._callable = {path: module for path, module in modules.items() if _has_forward(module)}
        self._silent = dict(self._callable)
        self._traced: set[str] = set()
        self._reported = False
        self._heard: set[str] = set()
        self._now: set[str] = set()
        self._beside_roots: set[str] = set()

    def heard(self, path: str, *, compiled: bool, beside_roots: bool = False) -> None:
        """The module at `path` returned something: in compiled code or not, outside all forward passes or not."""
        self._now.add(path)
        if beside_roots:
            self._beside_roots.add(path)
        if self._silent.pop(path, None) is not None and compiled:
            self._traced |= {path, self._around(path)}

    def is_called_beside_roots(self, path: str) -> bool:
        """Whether the module was ever called outside a forward pass of a root."""
        return path_in_whole(path) in self._beside_roots

    def unseen(self, path: str, why: str, *, how: str = UNSEEN) -> None:
        """Record that calls of a module in this step were not heard, or may not have been."""
        self._now.add(path_in_whole(path))
        for phase in ("forward", "backward") if self._sink.progress.observing else ():
            self._sink.unobserved(f"{how}: {why}", phase=phase, path=path_in_whole(path), slot="output[0]")

    def end_step(self) -> None:
        """Record which modules may have been called unheard in this step: they were heard in earlier ones."""
        progress = self._sink.progress
        if progress.observing and progress.forward_done:
            for path in sorted(self._heard - self._now):
                module = self._modules.get(path)
                if module is not None and any(one.grad is not None for one in module.parameters()):
                    self.unseen(path, QUIET, how=MAYBE_UNSEEN)
            self._heard |= self._now
        self._now.clear()

    def report(self) -> None:
        """Record the silent modules, if the root has run in a step that is recorded, and only the first time."""
        progress = self._sink.progress
        if self._reported or not (progress.observing and progress.forward_done):
            return
        self._reported = True
        compiled = compiled_code_ran()
        for path, module in self._silent.items():
            scripted = not takes_hooks(module)
            if scripted or (compiled and not self._is_idle(path, module)):
                reason = SCRIPTED if scripted else COMPILED
                self._sink.unobserved(reason, phase="forward", path=path, slot="output[0]")
        self._silent.clear()
        self._callable.clear()

    def _is_idle(self, path: str, module: nn.Module) -> bool:
        """Whether the module is known not to have been called."""
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if trained:
            return all(parameter.grad is None for parameter in trained)
        return self._around(path) in self._traced

    def _around(self, path: str) -> str:
        """The nearest module around `path` that has a forward method."""
        while path:
            path = path.rpartition(".")[0]
            if path in self._callable:
                break
        return path


def _has_forward(module: nn.Module) -> bool:
    # Static: TorchScript computes the attribute, and cannot for a class.
    return getattr_static(type(module), "forward") is not nn.Module.forward
