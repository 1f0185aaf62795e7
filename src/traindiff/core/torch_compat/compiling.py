"""Private names of torch for tracing and compiling, and the files that tell their frames."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

is_dynamo_compiling: Callable[[], bool] = getattr(torch.compiler, "is_dynamo_compiling", torch.compiler.is_compiling)
"""True in Python code that `torch.compile` traces. `torch.compiler.is_compiling`, three times as slow, is true while a
model is exported, too."""


def is_tracing() -> bool:
    """True while `torch.jit.trace`, `make_fx` or an export of the model traces, in code that is not compiled itself.

    Of the public names, that for the first is not typed and that for the last slow: every hook asks. For `make_fx`
    there is no public way to ask.
    """
    if getattr(torch.compiler, "_is_compiling_flag", False) or _tracing_state() is not None:
        return True
    if not (_num_modes() or _PRE_DISPATCH is None or _is_included(_PRE_DISPATCH)):
        return False  # no mode at all is on, also none before dispatch
    proxies = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return proxies is not None and proxies.get_proxy_mode() is not None


_PRE_DISPATCH: Any = getattr(torch._C.DispatchKey, "PreDispatch", None)

_tracing_state, _num_modes = torch._C._get_tracing_state, torch._C._len_torch_dispatch_stack

_is_included: Callable[[Any], bool] = torch._C._dispatch_tls_is_dispatch_key_included


def is_exporting() -> bool:
    """True while `torch.export` traces a model.

    The flag exists since torch 2.7. Before torch 2.12, `torch.compiler.is_exporting()` is true in all code that
    `torch.compile` traces, too.
    """
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))


def script_compiler() -> Any:
    """The module whose `create_script_module` makes TorchScript modules for `torch.jit.script`."""
    from torch.jit import _recursive

    return _recursive


def register_ordered_effect(operator: Any) -> None:
    """Tell compilers that calls of `operator` must all happen, once, in order.

    The public way, `custom_op(...).register_effect`, exists only for operators made by `custom_op`, whose
    calls cost 38 us each where those of a plain library operator cost 6.5.
    """
    from torch._higher_order_ops import effects

    effects._register_effectful_op(operator, effects._EffectType.ORDERED)
    table = effects.with_effects.python_key_table
    if not isinstance(table, _HiddenFromModes):
        effects.with_effects.python_key_table = _HiddenFromModes(table)


class _HiddenFromModes(dict[Any, Any]):
    """The ways in which modes handle calls of operators with effects; modes that have none do not see ours.

    The code of `aot_eager` runs such calls under the modes of its caller, such as selective activation checkpointing,
    and torch raises where a mode has no way to handle them.
    """

    def __contains__(self, kind: object) -> bool:
        """True also for the mode that is on: of others, torch asks whether it may register a way."""
        return super().__contains__(kind) or kind is type(_get_current_dispatch_mode())

    def __missing__(self, kind: Any) -> Callable[..., Any]:
        def run(_: Any, token: Any, operator: Any, *args: Any, **named: Any) -> Any:
            from torch._higher_order_ops.effects import with_effects

            if getattr(operator, "namespace", "") == "traindiff":
                return with_effects(token, operator, *args, **named)
            return NotImplemented  # torch raises

        return run


def forget_compiled_code() -> None:
    """Have everything that was compiled compiled anew at its next call; nothing if nothing was compiled."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def exclude_from_compilation(function: Callable[..., Any], *, callees: bool) -> None:
    """Keep `function` from being compiled by itself when code that is not compiled calls it.

    While `torch.compile` is in use, every Python function that it did not trace into is compiled by itself when it is
    called: hooks too, and up to eight times, once per shape. Where a hook is traced together with the code that calls
    it, this changes nothing. There is no public way: `torch.compiler.disable` breaks the graph where the hook would
    be traced.

    Args:
        function: A Python function.
        callees: Exclude everything that it calls, too.
    """
    from torch._C._dynamo import eval_frame

    set_strategy = getattr(eval_frame, "set_code_exec_strategy", None)
    if set_strategy is not None:  # since torch 2.7; before, hooks are compiled by themselves
        skip, default = eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
        set_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip if callees else default))


Function = TypeVar("Function", bound=Callable[..., Any])


def not_traced(function: Function) -> Function:
    """The function, which `torch.compile` calls as it is between two graphs, instead of tracing into it.

    `torch.compiler.disable` does the same, but imports the compiler here, and not when the function is first called.
    """
    disabled = getattr(torch, "_disable_dynamo", None)  # since torch 2.0
    found: Function = function if disabled is None else disabled(function)
    return found


def compiled_code_ran() -> bool:
    """True if anything was compiled since `forget_compiled_code`. There is no public count."""
    module = sys.modules.get("torch._dynamo.convert_frame")
    return module is not None and module.FRAME_COUNTER > 0


def from_compiled_code(tensor: torch.Tensor) -> bool:
    """True if backward enters compiled code at this tensor."""
    return type(tensor.grad_fn).__name__ == "CompiledFunctionBackward"


def is_compiled(module: torch.nn.Module) -> bool:
    """True if calls of the module run compiled code, by `torch.compile(module)` or `module.compile()`.

    There is no public way to ask.
    """
    return getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule"


def compile_with_hooks(has_others: Callable[[torch.nn.Module], bool]) -> Callable[[], None]:
    """Have hooks traced into compiled code, without a change in what is compiled; returns a function that undoes it.

    By default torch does not check the hooks of modules before it reuses code, so that code compiled for one module is
    used for another of its class that has hooks, and they never run. (`torch._dynamo.config.skip_nnmodule_hook_guards`)

    If torch cannot compile the call of a module of `torch.nn` by itself (`nn.Sequential(...).compile()`, or layers in
    code that it has given up), it runs the module as it is, unless the module has hooks (`trace_rules.check_verbose`,
    since torch 2.11). Then hooks that only observe would have code compiled that the training runs uncompiled.

    Args:
        has_others: True for modules that have hooks which count for the second, too.
    """
    import torch._dynamo.config as config
    from torch._dynamo import utils as of_dynamo

    utils: Any = of_dynamo
    guards, has_hooks = config.skip_nnmodule_hook_guards, utils.nnmodule_has_hooks

    def counts(module: torch.nn.Module, *args: Any, **kwargs: Any) -> bool:
        return bool(has_hooks(module, *args, **kwargs)) and has_others(module)

    config.skip_nnmodule_hook_guards = False
    utils.nnmodule_has_hooks = counts

    def undo() -> None:
        config.skip_nnmodule_hook_guards = guards
        utils.nnmodule_has_hooks = has_hooks

    return undo


def log_recompilations() -> None:
    """Have compilers log guards, recompilations and graph breaks. `set_logs` is documented, and has this name alone."""
    import torch._logging as logs

    logs.set_logs(guards=True, recompiles=True, graph_breaks=True)  # type: ignore[attr-defined]


TORCH_FILES = Path(torch.__file__).absolute().parent
"""The directory of torch."""

COMPILER_FILES = f"{TORCH_FILES / '_dynamo'}{os.sep}"
"""The compiler's own files; compiled code is called by a function `compile_wrapper` in one of them."""

INDUCTOR_FILES = f"{TORCH_FILES / '_inductor'}{os.sep}"
"""The files of the default backend of compilers; one of them calls the code that it has generated."""

BACKWARD_FILE = str(TORCH_FILES / "autograd" / "graph.py")
"""The file of the functions that start the autograd engine."""

MODULE_CALL = str(TORCH_FILES / "nn" / "modules" / "module.py"), "_call_impl"
"""File and name of the function that calls a module with its hooks. There is no public way to tell its frames."""
