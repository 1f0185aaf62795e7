"""Compiled code cannot be perturbed: say so before the training, or where it turns out."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import nn

from traindiff.errors import ConfigError, NotPerturbedError, Problem
from traindiff.replica_setting import ReplicaSetting
from traindiff.replicas.replica import NAME
from traindiff.site import ROOT, canonical_paths
from traindiff.taps._torch_compat import is_compiled
from traindiff.taps.compiled import tap_compiled_module
from traindiff.taps.compiled_observers import ModuleObserver
from traindiff.taps.silent_modules import takes_hooks
from traindiff.taps.sink import Sink


def compiled_parts(root: nn.Module) -> str:
    """Names of the compiled modules of a model, a few of them; empty where there is none."""
    compiled = [name or ROOT for name, module in root.named_modules() if is_compiled(module)]
    return ", ".join(compiled[:3]) + (", ..." if len(compiled) > 3 else "")


def refuse_compiled(setting: ReplicaSetting, root: nn.Module) -> None:
    """Refuse a model of which a part is compiled.

    Raises:
        ConfigError: Names the parts.
    """
    among = compiled_parts(root)
    if not among:
        return
    problem = Problem(
        where=f'record(replica="{setting}")',
        what=f"cannot perturb compiled code, and the model has some: {among}.",
        fix="Record the replica of the same training without torch.compile; what it measures holds for both.",
    )
    raise ConfigError("record(...)", [problem], consequence="nothing was attached to the model")


def notice_compiled(root: nn.Module, sink: Sink) -> ExitStack:
    """Report a fault when a module runs in compiled code: a function that calls it may be compiled at any time."""
    observer = ModuleObserver(output=sink.guarded(NAME, _fault))
    modules = dict(root.named_modules())
    with ExitStack() as undo:
        for name in canonical_paths(modules):
            if takes_hooks(modules[name]):
                undo.enter_context(tap_compiled_module(modules[name], observer))
        return undo.pop_all()


def _fault(*_: Any) -> None:
    raise NotPerturbedError(
        "a part of the model ran in compiled code, where nothing is perturbed; record replicas without torch.compile"
    )
