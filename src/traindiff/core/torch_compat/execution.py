"""Private names of torch's execution: autograd, tracing, dispatch modes and compilers."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # it has no public name
from torch.utils._python_dispatch import _get_current_dispatch_mode

# Autograd


def inside_backward() -> bool:
    """True while the autograd engine runs on this thread.

    There is no public way to ask; torch's own checkpointing and FSDP ask the same function.
    """
    return torch._C._current_graph_task_id() != -1


def can_tell_backward() -> bool:
    """True if this torch has what `inside_backward` asks; torch 1.13, which ONNX Runtime may come with, does not."""
    return hasattr(torch._C, "_current_graph_task_id")


def running_node() -> Any:
    """The graph node whose backward pass runs on this thread; None if no backward pass runs.

    There is no public way to ask; torch's own anomaly mode and its tools for debugging do it like this.
    """
    return torch._C._current_autograd_node()


_CHECKPOINTS = ("checkpoint", "check_point", "ckpt", "recomput", "remat", "offload")
"""Words in the names of functions that compute again what they have not kept."""


def inside_own_backward() -> bool:
    """True if a function of autograd calls something in its own backward pass, and is no activation checkpointing.

    Adjoints of solvers and reversible layers do: they call modules with other inputs than the forward pass, or with
    rounded ones. There is no public way to ask: torch's checkpointing is known by its file, and others (those of
    DeepSpeed, Megatron, torchgpipe) by the name of their function.
    """
    apply, engine = torch.autograd.function.BackwardCFunction.apply, torch.autograd.graph._engine_run_backward
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not engine.__code__:
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            return False
        if frame.f_code is apply.__code__:
            name = frame.f_locals["self"]._forward_cls.__qualname__.lower()
            return not any(word in name for word in _CHECKPOINTS)
        frame = frame.f_back
    return False


def node_number(node: Any) -> int:
    """The number of a node of the graph. A thread numbers nodes in the order in which its forward pass makes them."""
    return int(node._sequence_nr())


def next_node_number() -> int:
    """The number of the node that this thread makes next. Below autograd, the node of an operator exists already."""
    return int(torch._C._autograd._get_sequence_nr())


def result_shape(node: Any, number: int) -> tuple[int, ...]:
    """The shape of one result of an operation, given the operation's node and the number of the result."""
    return tuple(node._input_metadata[number].shape)


def num_results(node: Any) -> int:
    """The number of results of an operation, given the operation's node."""
    return len(node._input_metadata)


def hooks_on_node(node: Any, *, before: bool) -> dict[int, Callable[..., Any]]:
    """The hooks on a node of the graph that run before it or after it, by the numbers of their handles.

    Nothing lists them. But all that were registered in Python lie in one dict, and the handle of each refers to it.
    """
    handle = (node.register_prehook if before else node.register_hook)(_no_hook)
    found: dict[int, Callable[..., Any]] = handle.hooks_dict_ref()
    handle.remove()
    return found


def _no_hook(*_: Any) -> None:
    """Takes the place of a hook."""


def saved(node: Any, name: str, *default: Any) -> Any:
    """What an operation saved for its backward pass, given the operation's node; or the default, if there is one."""
    return getattr(node, f"_saved_{name}", *default)


def saved_dims(node: Any) -> tuple[int, ...]:
    """The dims that a transposition or permutation exchanges; torch keeps negative ones as unsigned numbers."""
    dims = (node._saved_dim0, node._saved_dim1) if hasattr(node, "_saved_dim0") else node._saved_dims
    return tuple(map(_signed, dims))


def saved_dim(node: Any) -> int:
    """The dim along which an operation that has one took a part, given the operation's node."""
    return int(_signed(node._saved_dim)) % len(node._saved_self_sym_sizes)


def saved_index(node: Any) -> int:
    """The index that a selection took."""
    return int(_signed(node._saved_index)) % int(node._saved_self_sym_sizes[saved_dim(node)])


def _signed(number: int) -> int:
    """A negative number that torch keeps as an unsigned one."""
    return number - (1 << 64) if number >= 1 << 63 else number


def version_of(tensor: torch.Tensor) -> int:
    """A counter of the writes to a tensor; -1 for inference tensors, which have none. There is no public counter."""
    return -1 if tensor.is_inference() else tensor._version


def keeps_saved_tensors_elsewhere() -> bool:
    """True if the forward pass that runs does not keep what its backward pass needs, but hands it to hooks.

    Activation checkpointing and offloading do. There is no public way to ask; older torch releases have none.
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is not None and top(True) is not None  # noqa: FBT003  that hooks are ignored while torch traces


saved_tensors_module: Any = torch._C._autograd
"""Has the functions that switch hooks on saved tensors on and off, which have no public names."""

SAVED_TENSORS_PUSH, SAVED_TENSORS_POP = "_push_saved_tensors_default_hooks", "_pop_saved_tensors_default_hooks"


def storage_key(tensor: torch.Tensor) -> int:
    """A number that tensors share if they share a storage. `data_ptr`, the public name, is 0 for empty storages."""
    return int(tensor.untyped_storage()._cdata)


# Tracing


is_dynamo_compiling: Callable[[], bool] = getattr(torch.compiler, "is_dynamo_compiling", torch.compiler.is_compiling)
"""True in Python code that `torch.compile` traces. `torch.compiler.is_compiling`, three times as slow, is true while a
model is exported, too."""


def is_view_of_another(tensor: torch.Tensor) -> bool:
    """True if autograd knows the tensor as a view, so that to write to it writes to another tensor, too."""
    return tensor._is_view()


def inside_transform() -> bool:
    """True inside a transform of `torch.func` (vmap, grad, jacrev, ...), whose tensors stand for others.

    There is no public way to ask.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


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


_HAS_CUDA = torch.backends.cuda.is_built()


def is_capturing() -> bool:
    """True while this thread captures a CUDA graph. To read a number then would break the capture.

    What a hook enqueues would be in the graph, and write where the replays find nothing of a recording any more.
    """
    return _HAS_CUDA and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


_RELAXED = 2


@contextmanager
def beside_captures() -> Iterator[None]:
    """A context in which this thread may wait for a GPU, although another thread captures a CUDA graph.

    By default a capture forbids every thread to ask whether work is done, and the one that asks spoils the capture:
    the training would end there. The CUDA driver has a mode for each thread that allows it. torch has no name for it.
    """
    exchange = _exchange_capture_mode()
    if exchange is None:
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))  # afterwards it holds the mode that this thread had
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


@cache
def _exchange_capture_mode() -> Any:
    """The driver's function, or None without a GPU of NVIDIA."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode if _HAS_CUDA else None
    except (OSError, AttributeError):
        return None


def stream_number(device: torch.device) -> int | None:
    """What tells the current stream of a GPU from its others; None if this torch does not say.

    `torch.cuda.current_stream` makes an object, in 6 us; torch's own compiled code asks this function.
    """
    ask = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return None if ask is None else int(ask(device.index))


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


# Operators


DRAWING = frozenset(
    {
        "rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm", "normal", "normal_",
        "uniform", "uniform_", "bernoulli", "bernoulli_", "exponential_", "cauchy_", "geometric_", "log_normal_",
        "poisson", "multinomial", "binomial", "random_", "normal_functional",
    }
)  # fmt: skip
"""Names of the operators of aten whose output is nothing but random numbers."""


def operator_schema(operator: Any) -> Any:
    """The schema of an operator that was dispatched; None if it has none. There is no public way to ask."""
    return getattr(operator, "_schema", None)


def is_overload(operator: object) -> bool:
    """True for one overload of an operator, e.g. `torch.ops.aten.add.Tensor`. Its class has no public name."""
    return isinstance(operator, torch._ops.OpOverload)


def schemas_of(name: str) -> list[Any]:
    """The schemas of all overloads of an operator, e.g. of `aten::add`; none if there is no such operator.

    `torch.ops` finds operators by attributes of objects, which have others too; this asks what is registered.
    """
    return list(torch._C._jit_get_schemas_for_operator(name))


def inputs_may_be_rounded_to(device: str, *, convolution: bool) -> str:
    """The format to which products of float32 may round their inputs: `tf32`, `bf16`, or empty.

    The settings have public names on each backend since torch 2.9. `fp32_precision` is that of one kind of operators
    there, and `none` asks the backend's, and then the one of all.

    Args:
        device: Type of the device.
        convolution: True for convolutions, False for matrix products.
    """
    backends: Any = torch.backends
    backend = {"cuda": backends.cudnn if convolution else backends.cuda, "cpu": backends.mkldnn}.get(device)
    own = getattr(backend, "conv" if convolution else "matmul", None)
    for settings in (own, backend, backends):
        found = getattr(settings, "fp32_precision", None)
        if found not in (None, "none"):
            return str(found) if found in ("tf32", "bf16") else ""
    return ""


def float32_matmul_precision() -> str:
    """What `torch.get_float32_matmul_precision` returns: `highest`, `high` or `medium`.

    Since torch 2.9 that function raises an error if a program has used the new names of these settings
    (`torch.backends.cuda.matmul.fp32_precision = "tf32"`). Then this is the shortest precision that they allow.
    """
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        allowed = {inputs_may_be_rounded_to(device, convolution=False) for device in ("cpu", "cuda")}
        return "medium" if "bf16" in allowed else "high" if "tf32" in allowed else "highest"


def cuda_matmul_tf32() -> bool:
    """`torch.backends.cuda.matmul.allow_tf32`, which raises the same errors as `torch.get_float32_matmul_precision`."""
    try:
        return bool(torch.backends.cuda.matmul.allow_tf32)
    except RuntimeError:
        return inputs_may_be_rounded_to("cuda", convolution=False) == "tf32"


def partial_sums_may_be_short(device: str, dtype: torch.dtype) -> bool:
    """True if a library may add up parts of a sum in this dtype, the one of the output."""
    settings: Any = torch.backends.cuda.matmul
    if device == "cuda" and dtype == torch.bfloat16:
        return bool(settings.allow_bf16_reduced_precision_reduction)
    if device == "cuda" and dtype == torch.float16:
        names = ("allow_fp16_reduced_precision_reduction", "allow_fp16_accumulation")
        return any(bool(getattr(settings, name, False)) for name in names)
    if device == "cpu" and dtype == torch.float16:
        return bool(getattr(torch._C, "_get_cpu_allow_fp16_reduced_precision_reduction", lambda: False)())
    return False


@contextmanager
def without_onednn() -> Iterator[None]:
    """Inside it, layers are made of operators that exist in every dtype.

    The public way, `torch.backends.mkldnn.flags`, sets the precision of oneDNN on Intel GPUs too, and warns of it.
    """
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)  # noqa: FBT003
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


# Modes


def take_dispatch_modes() -> list[Any]:
    """Take all dispatch modes off this thread's stack; returns them, the outermost first.

    There is no public way. torch's own `_disable_current_modes` does it like this, for the length of a block.
    """
    count = _num_modes()
    if not count:
        return []
    from torch.utils._python_dispatch import _pop_mode

    return [_pop_mode() for _ in range(count)][::-1]


def has_dispatch_modes() -> bool:
    """True if a dispatch mode is on this thread's stack. There is no public way to ask."""
    return int(_num_modes()) > 0


_num_function_modes: Callable[[], int] = torch._C._len_torch_function_stack


def has_function_modes() -> bool:
    """True if a `TorchFunctionMode` is on this thread's stack. There is no public way to ask."""
    return _num_function_modes() > 0


def put_dispatch_modes(modes: Iterable[Any]) -> None:
    """Put dispatch modes on this thread's stack, above those that are there."""
    for mode in modes:
        from torch.utils._python_dispatch import _push_mode

        _push_mode(mode)


def without_torch_function() -> AbstractContextManager[Any]:
    """Inside it, calls of torch's functions are shown neither to modes nor to subclasses of tensors.

    The public name, `torch._C.DisableTorchFunctionSubclass`, leaves modes on.
    """
    return torch._C.DisableTorchFunction()


def with_torch_function() -> AbstractContextManager[Any]:
    """Inside it, calls are shown to them again. There is no public way."""
    guard: AbstractContextManager[Any] = torch._C._EnableTorchFunction()
    return guard


def leave_dispatch_mode(mode: Any) -> None:
    """Take a `TorchDispatchMode` off this thread's stack, even if other modes were entered after it.

    Publicly, modes can only be left in the reverse order; a recording may be closed at any time.
    """
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode

    stack = _get_current_dispatch_mode_stack()
    if mode not in stack:  # it is on the stack of another thread
        return
    above = [_pop_mode() for _ in stack[stack.index(mode) + 1 :]]
    if getattr(mode, "old_dispatch_mode_flags", True):
        mode.__exit__(None, None, None)
    else:  # it was left already, in a backward pass, after which autograd has put it back
        _pop_mode()
    put_dispatch_modes(reversed(above))


def hide_dispatch_mode(mode: Any) -> Callable[[], None]:
    """Take a `TorchDispatchMode` off this thread's stack; returns a function that puts it back, on top."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

    stack = _get_current_dispatch_mode_stack()
    if mode not in stack:
        return lambda: None
    place = stack.index(mode)
    for _ in stack[place:]:
        _pop_mode()
    put_dispatch_modes(stack[place + 1 :])
    return lambda: None if mode in _get_current_dispatch_mode_stack() else _push_mode(mode)


# Compilers


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


def keep_out_of_cuda_graphs(operators: Sequence[str]) -> Callable[[], None]:
    """Have code that is compiled from now on call these operators between CUDA graphs; returns what undoes it.

    With `mode="reduce-overhead"` the default backend captures compiled code, and a replay runs no Python. Where an
    operator in a captured part takes a tensor of the CPU, torch 2.9 to 2.13 end the training ("Expected all cuda
    outputs in cuda graph recording"), since the part hands that tensor on.

    Args:
        operators: Their names with the namespace, such as `traindiff::observe`.
    """
    import torch._inductor.config as config

    found: Any = config
    if hasattr(found, "custom_should_partition_ops"):
        name = "custom_should_partition_ops"
        value: Any = [*found.custom_should_partition_ops, *operators]
    elif hasattr(found, "graph_partition"):  # torch 2.8 and 2.9.0: code with tensors of the CPU is then not captured
        name, value = "graph_partition", False
    else:
        return lambda: None
    before = getattr(found, name)
    setattr(found, name, value)
    return lambda: setattr(found, name, before)


def log_recompilations() -> None:
    """Have compilers log guards, recompilations and graph breaks. `set_logs` is documented, and has this name alone."""
    import torch._logging as logs

    logs.set_logs(guards=True, recompiles=True, graph_breaks=True)  # type: ignore[attr-defined]


# Frames

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
