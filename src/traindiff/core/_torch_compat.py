"""Every private torch API that traindiff uses, each with the reason."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from types import CodeType, FrameType
from typing import Any

import torch


def inside_backward() -> bool:
    """Whether the autograd engine is running on this thread.

    There is no public way to ask; torch's own checkpointing and FSDP ask the same function.
    """
    return torch._C._current_graph_task_id() != -1


def inside_transform() -> bool:
    """Whether a transform of `torch.func` (vmap, grad, jacrev, ...) is running, whose tensors stand for others.

    There is no public way to ask.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_tracing() -> bool:
    """Whether `torch.jit.trace` or `make_fx` writes down what is computed.

    The public name for the first is not typed; for the second there is no public way to ask.
    """
    if torch._C._get_tracing_state() is not None:
        return True
    proxies = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return proxies is not None and proxies.get_proxy_mode() is not None


def is_exporting() -> bool:
    """Whether `torch.export` traces a model. There is a public name for it since torch 2.7."""
    return torch.compiler.is_exporting() if hasattr(torch.compiler, "is_exporting") else False


def running_node() -> Any:
    """The node of the graph whose backward pass runs on this thread; None where none does.

    There is no public way to ask; torch's own anomaly mode and its tools for debugging do it like this.
    """
    return torch._C._current_autograd_node()


def node_number(node: Any) -> int:
    """The number of a node: they count up in the order in which a thread's forward pass makes them."""
    return int(node._sequence_nr())


def next_node_number() -> int:
    """The number of the node that this thread will make next. Below autograd, that of an operator is made already."""
    return int(torch._C._autograd._get_sequence_nr())


def schemas_of(name: str) -> list[Any]:
    """The schemas of all overloads of an operator, e.g. `aten::add`; none where there is no such operator.

    `torch.ops` finds operators by attributes of objects, which have others too; this asks what is registered.
    """
    return list(torch._C._jit_get_schemas_for_operator(name))


def register_ordered_effect(operator: Any) -> None:
    """Tell compilers that calls of `operator` must all happen, once, in order.

    The public way, `custom_op(...).register_effect`, exists only for operators made by `custom_op`, whose
    calls cost 38 us each where those of a plain library operator cost 6.5.
    """
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

    _register_effectful_op(operator, _EffectType.ORDERED)


def script_compiler() -> Any:
    """The module that makes a TorchScript module, by `create_script_module`, of what `torch.jit.script` is given."""
    from torch.jit import _recursive

    return _recursive


def forget_compiled_code() -> None:
    """Have everything that was compiled compiled anew at its next call; nothing if there is nothing."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def exclude_from_compilation(function: Callable[..., Any], *, callees: bool) -> None:
    """Have `function` run without being compiled where code that is not compiled calls it.

    While `torch.compile` is at work, every Python function that it did not trace into is compiled by
    itself when it is called: hooks too, and up to eight times over, once per shape. Where a hook is
    traced together with the code that calls it, this changes nothing. There is no public way:
    `torch.compiler.disable` breaks the graph where the hook would be traced.

    Args:
        function: A Python function.
        callees: Whether this holds for everything that it calls, too.
    """
    from torch._C._dynamo import eval_frame

    set_strategy = getattr(eval_frame, "set_code_exec_strategy", None)
    if set_strategy is not None:  # since torch 2.7; before, hooks are compiled by themselves
        skip, default = eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
        set_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip if callees else default))


@cache
def _step_code() -> CodeType:
    """The code of the function in which torch wraps the `step` of each class of optimizers, to call hooks."""

    def step(*_: Any) -> None:
        pass

    wrapped: Any = torch.optim.Optimizer.profile_hook_step(step)
    code: CodeType = wrapped.__code__
    return code


def is_nested_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a hook of `optimizer.step` runs within another call of it: that of a subclass, which calls its base's.

    torch wraps the `step` of a class when an instance of it is made, so hooks run twice in one step of an optimizer if
    there is also one of its base class. There is no public way to tell the calls apart.
    """
    return _running_steps(optimizer) > 1


def is_stepping(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a hook of some optimizer runs within a call of `optimizer.step`."""
    return _running_steps(optimizer) > 0


def _running_steps(optimizer: torch.optim.Optimizer) -> int:
    calls, step = 0, _step_code()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is step and frame.f_locals["args"][0] is optimizer:
            calls += 1
        frame = frame.f_back
    return calls


def scale_of(scaler: Any) -> torch.Tensor | None:
    """The scale of a `GradScaler`, on its device; None before the first loss. The public way waits for the device."""
    scale: torch.Tensor | None = scaler._scale
    return scale


def compiled_code_ran() -> bool:
    """Whether anything was compiled since `forget_compiled_code`. There is no public count."""
    module = sys.modules.get("torch._dynamo.convert_frame")
    return module is not None and module.FRAME_COUNTER > 0


def from_compiled_code(tensor: torch.Tensor) -> bool:
    """Whether backward enters compiled code at this tensor."""
    return type(tensor.grad_fn).__name__ == "CompiledFunctionBackward"


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether calls of the module run compiled code, by `torch.compile(module)` or `module.compile()`.

    There is no public way to ask.
    """
    return getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule"


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


def take_dispatch_modes() -> list[Any]:
    """Take all dispatch modes off this thread's stack; gives them, the outermost first.

    There is no public way. torch's own `_disable_current_modes` does it like this, for the length of a block.
    """
    count = torch._C._len_torch_dispatch_stack()
    if not count:
        return []
    from torch.utils._python_dispatch import _pop_mode

    return [_pop_mode() for _ in range(count)][::-1]


def put_dispatch_modes(modes: Iterable[Any]) -> None:
    """Put dispatch modes on this thread's stack, above those that are there."""
    for mode in modes:
        from torch.utils._python_dispatch import _push_mode

        _push_mode(mode)


def without_torch_function() -> AbstractContextManager[Any]:
    """Inside it, neither modes nor subclasses of tensors are told which functions of torch are called.

    The public name, `torch._C.DisableTorchFunctionSubclass`, leaves modes on.
    """
    return torch._C.DisableTorchFunction()


def with_torch_function() -> AbstractContextManager[Any]:
    """Inside it, they are told again. There is no public way."""
    guard: AbstractContextManager[Any] = torch._C._EnableTorchFunction()
    return guard


def leave_dispatch_mode(mode: Any) -> None:
    """Take a `TorchDispatchMode` off this thread's stack, even if other modes were entered after it.

    Publicly, modes can only be left in the reverse order; a recording may be closed at any time.
    """
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

    stack = _get_current_dispatch_mode_stack()
    if mode not in stack:  # another thread's
        return
    above = []
    while (top := _get_current_dispatch_mode_stack()[-1]) is not mode:
        above.append(top)
        _pop_mode()
    if getattr(mode, "old_dispatch_mode_flags", True):
        mode.__exit__(None, None, None)
    else:  # it was left already, in a backward pass, after which autograd has put it back
        _pop_mode()
    for one in reversed(above):
        _push_mode(one)


def hide_dispatch_mode(mode: Any) -> Callable[[], None]:
    """Take a `TorchDispatchMode` off this thread's stack for a moment; returns what puts it back, on top."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

    stack = _get_current_dispatch_mode_stack()
    if mode not in stack:
        return lambda: None
    place = stack.index(mode)
    for _ in stack[place:]:
        _pop_mode()
    for one in stack[place + 1 :]:
        _push_mode(one)
    return lambda: None if mode in _get_current_dispatch_mode_stack() else _push_mode(mode)


def patch_hook_guards() -> Callable[[], None]:
    """Have compiled code look at the hooks of modules before it is used again; returns what undoes it.

    By default it does not, so that code compiled for one module is used for another of its class
    that has hooks, and they never run. (`torch._dynamo.config.skip_nnmodule_hook_guards`)
    """
    import torch._dynamo.config as config

    before = config.skip_nnmodule_hook_guards
    config.skip_nnmodule_hook_guards = False

    def undo() -> None:
        config.skip_nnmodule_hook_guards = before

    return undo


def pipeline_classes() -> tuple[type[Any], type[Any], type[Any]] | None:
    """Base classes of pipeline stages, of schedules with one stage per rank, and of those with several.

    None unless `torch.distributed.pipelining` was imported: there is nothing to follow then. The classes are
    private, but their subclasses are the public ones, and these inherit what is called for each micro-batch.
    """
    schedules = sys.modules.get("torch.distributed.pipelining.schedules")
    stage = sys.modules.get("torch.distributed.pipelining.stage")
    if schedules is None or stage is None:
        return None
    return stage._PipelineStageBase, schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti


def stages_of(schedule: Any) -> list[Any]:
    """The stages of a pipeline's schedule that this rank works on. A schedule has no public attribute for them."""
    return list(schedule._stages) if hasattr(schedule, "_stages") else [schedule._stage]


def num_chunks_of(schedule: Any) -> int:
    """Into how many micro-batches a pipeline's schedule divides a batch. There is no public attribute for it."""
    return int(schedule._n_microbatches)


def runs_backward(schedule: Any) -> bool:
    """Whether a pipeline's schedule runs backward passes now: not in `eval`. There is no public way to ask."""
    return bool(schedule._has_backward)


def data_mesh_of(module: Any) -> Any:
    """The mesh over which FSDP2 shards and replicates a module's parameters; None where it holds none of its own.

    Parameters tell only the mesh of all that divides them, tensor parallelism too. There is no public way to ask.
    """
    group = module._get_fsdp_state()._fsdp_param_group
    return None if group is None else group.mesh_info.mesh


def is_fully_sharded(module: Any) -> bool:
    """Whether FSDP2 manages the module. Imports nothing: where there is one, its module is loaded."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def replicating_group(module: Any) -> Any:
    """The ranks that hold copies of this rank's part of a module of FSDP1 (HYBRID_SHARD); None where none do.

    There is no public way to ask; `process_group` is that of the ranks that divide the parameters.
    """
    return getattr(module, "_inter_node_pg", None)


def root_mesh(mesh: Any) -> Any:
    """The mesh of which this one has some of the axes. There is no public way to ask."""
    find = getattr(mesh, "_get_root_mesh", None)  # since torch 2.7
    return mesh if find is None else find()


def localized_layout(parameter: Any) -> Any:
    """Layout of the DTensor for which a plain parameter stands, where DDP is used beside tensor parallelism; or None.

    `torch.distributed.tensor.parallel.ddp` keeps it in an attribute of the parameter.
    """
    return getattr(parameter, "_st_info", None)


def result_shape(node: Any, number: int) -> tuple[int, ...]:
    """Shape of a result of an operation, by its node in the graph of autograd and the number of the result."""
    return tuple(node._input_metadata[number].shape)


def saved_dims(node: Any) -> tuple[int, ...]:
    """Dims that a node of a transposition or permutation exchanges; negative ones are kept as unsigned numbers."""
    dims = (node._saved_dim0, node._saved_dim1) if hasattr(node, "_saved_dim0") else node._saved_dims
    return tuple(dim - (1 << 64) if dim >= 1 << 63 else dim for dim in dims)


def is_asynchronous(tensor: torch.Tensor) -> bool:
    """Whether the tensor is the result of a collective which may still be running. There is no public class."""
    module = sys.modules.get("torch.distributed._functional_collectives")
    return module is not None and isinstance(tensor, module.AsyncCollectiveTensor)


def has_arrived(tensor: Any) -> bool:
    """Whether somebody has waited for an asynchronous tensor, so that reading it waits for nothing.

    The tensor only knows of waits for itself. One for a view of it shows by no collective being waited for at all.
    """
    return bool(tensor.completed) or torch._C._distributed_c10d._get_work_registry_size() == 0


def versions_of(tensor: Any) -> tuple[int, int]:
    """Counters that move when an asynchronous tensor, or what it stands for, is written to."""
    return version_of(tensor), version_of(tensor.elem)


def version_of(tensor: torch.Tensor) -> int:
    """Counts what is written into a tensor; -1 where nobody counts. There is no public way to ask."""
    return -1 if tensor.is_inference() else tensor._version


def arrived(tensor: Any) -> torch.Tensor:
    """What an asynchronous tensor stands for, after a wait where nobody has waited for it.

    It does not take note of this wait, as it would of `trigger_wait`: the training waits as often as without it.
    """
    result: torch.Tensor = tensor.wait()
    return result


def loader_iterators() -> type[Any]:
    """The class of all that iterates over a `DataLoader`, with and without workers.

    There is no hook for what a loader yields, and no public name for what yields it; iterators that were made before
    could not be followed by their loader.
    """
    return torch.utils.data.dataloader._BaseDataLoaderIter


def drawing_of(iterator: Any) -> Any:
    """What draws the indices of an iterator's batches: one per loader, of which an iterator knows nothing else."""
    return iterator._index_sampler


def default_store() -> Any:
    """The key-value store through which the ranks of the default process group have found each other.

    There is no public way to get it after `init_process_group` has made it; torch's own `monitored_barrier` and
    elastic agents use it in the same way.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
