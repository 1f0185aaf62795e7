"""Private names of what a training holds: modules, hooks, optimizers, loaders; and of distributed training."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from operator import attrgetter
from types import CellType, CodeType, FrameType, FunctionType, MethodType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from traindiff.core.torch_compat.autograd import version_of

_Tensor = TypeVar("_Tensor", bound=torch.Tensor)

# Modules

children_of: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")
"""The dict of a module's own children. The public iterators are slower, and leave out what appears twice."""

parameters_of: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
"""The dict of a module's own parameters, to exchange them without `__setattr__`, which checks them."""

buffers_of: Callable[[nn.Module], dict[str, torch.Tensor | None]] = attrgetter("_buffers")
"""The dict of a module's own buffers; `named_buffers` makes a set of all of them each time."""


def sparse_terms_of(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and values of a `sparse_coo` tensor as they are, also several of one place.

    The public methods give these only after `coalesce`, which adds up what belongs to one place.
    """
    return tensor._indices(), tensor._values()


def live_children_of(module: nn.Module) -> Iterator[nn.Module]:
    """The children of a module that may be half made, or taken apart; runs none of its code."""
    children = vars(module).get("_modules") or {}
    return (child for child in dict(children).values() if isinstance(child, nn.Module))


AnyBatchNorm: Any = nn.modules.batchnorm._BatchNorm
"""The class of BatchNorm1d, 2d and 3d; SynchronizedBatchNorm is one, too."""

AnyInstanceNorm: Any = nn.modules.instancenorm._InstanceNorm
"""The class of InstanceNorm1d, 2d and 3d."""


def dims_of_sample(module: Any) -> int:
    """Number of axes of one sample that an InstanceNorm takes; there is no public number."""
    found: int = module._get_no_batch_dim()
    return found


def is_data_parallel_copy(module: nn.Module) -> bool:
    """True for the copies that `torch.nn.DataParallel` makes for each call. There is no public mark."""
    return bool(getattr(module, "_is_replica", False))


def running_calls(thread: int | None = None) -> Iterator[nn.Module]:
    """The modules whose calls run on a thread, innermost first, as far as the stack shows them.

    There is no public way to ask. A call has a frame of this method, unless compiled code has taken its place.

    Args:
        thread: Its identifier. Default: this thread.
    """
    call = nn.Module._call_impl.__code__
    frame: FrameType | None = sys._getframe(1) if thread is None else sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code is call:
            yield frame.f_locals["self"]
        frame = frame.f_back


# Hooks

# The attributes in which torch keeps hooks, by key. Publicly a hook has a handle, which removes it from the dict that
# there was when it was attached; nothing tells whether it is still called, or which hooks there are.
FORWARD_HOOKS = "_forward_hooks"
FORWARD_PRE_HOOKS = "_forward_pre_hooks"
STEP_PRE_HOOKS = "_optimizer_step_pre_hooks"
STEP_POST_HOOKS = "_optimizer_step_post_hooks"
EVERY_STEP_PRE_HOOKS = "_global_optimizer_pre_hooks"  # of the module torch.optim.optimizer
GRADIENT_HOOKS = "_backward_hooks"  # of a tensor
ACCUMULATION_HOOKS = "_post_accumulate_grad_hooks"  # of a tensor that has a gradient


def has_communication_hook(model: nn.Module) -> bool:
    """True if a communication hook was registered on DistributedDataParallel that does more than torch's plain ones.

    Those of `default_hooks` compute the mean over ranks, in a dtype that `compressed_to` tells.

    Args:
        model: The wrapper, or a module that holds the wrapper.
    """
    hooks = [hook for one in (model, *live_children_of(model)) for hook in _communication_hooks(one)]
    return any(hook not in _dtypes_by_hook() for hook in hooks)


def compressed_to(module: nn.Module) -> torch.dtype | None:
    """The dtype in which a communication hook of torch makes DistributedDataParallel reduce gradients; or None."""
    return next((dtype for hook in _communication_hooks(module) if (dtype := _dtypes_by_hook().get(hook))), None)


def _communication_hooks(module: nn.Module) -> list[Any]:
    return [hook for hook, _ in getattr(module, "_comm_hooks", ())]


def _dtypes_by_hook() -> dict[Any, torch.dtype | None]:
    hooks = sys.modules.get("torch.distributed.algorithms.ddp_comm_hooks.default_hooks")
    if hooks is None:
        return {}
    return {
        hooks.allreduce_hook: None,
        hooks.fp16_compress_hook: torch.float16,
        hooks.bf16_compress_hook: torch.bfloat16,
    }


def join_class() -> type[Any] | None:
    """The class `Join`; None if this torch has no distributed training, or nothing has imported the class."""
    return getattr(sys.modules.get("torch.distributed.algorithms.join"), "Join", None)


def joined_by(join: Any) -> list[Any]:
    """The models and optimizers that a `Join` was given; it keeps them under a private name."""
    return [*join._joinables]


@contextmanager
def counting_iterations(join: Any) -> Iterator[list[None]]:
    """Inside it, one item for each iteration of the other ranks whose collectives this rank takes part in at the end.

    A `Join` calls a hook of each model and optimizer then, and takes no further ones.
    """
    found: list[None] = []
    hook = sys.modules["torch.distributed.algorithms.join"].JoinHook()
    hook.main_hook = lambda: found.append(None)
    join._join_hooks.append(hook)
    try:
        yield found
    finally:
        join._join_hooks.remove(hook)


def divides_by_active_ranks(joined: Iterable[Any]) -> bool:
    """True if DistributedDataParallel divides gradients by the number of ranks that still have inputs.

    `join(divide_by_initial_world_size=False)` sets a private name. Communication hooks divide by themselves.
    """
    return any(
        not getattr(one, "_divide_by_initial_world_size", True) and not _communication_hooks(one) for one in joined
    )


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a module itself, by name. Some models have methods of their own in place of `parameters`."""
    return {name: one for name, one in module._parameters.items() if one is not None}


def modules_by_name(module: nn.Module, *, tied: bool = False) -> dict[str, nn.Module]:
    """A module, under the empty name, and all modules inside it by name, each once.

    Methods such as `modules` and `named_parameters` of some models take other arguments, or return something else. So
    this and the functions below call none of them, and give what torch's own ones do.

    Args:
        module: The module.
        tied: True to get a module that is in several places under each of its names.
    """
    return dict(_named(module, "", None if tied else set()))


def _named(module: nn.Module, name: str, seen: set[int] | None) -> Iterator[tuple[str, nn.Module]]:
    if seen is not None:
        if id(module) in seen:
            return
        seen.add(id(module))
    yield name, module
    for own, child in children_of(module).items():
        if child is not None:
            yield from _named(child, f"{name}.{own}" if name else own, seen)


def modules_in(module: nn.Module) -> Iterator[nn.Module]:
    """A module and all modules inside it, each once; see `modules_by_name`."""
    return (one for _, one in _named(module, "", set()))


def parameters_by_name(module: nn.Module) -> dict[str, nn.Parameter]:
    """All parameters of a module and of those inside it by name, tied ones under each name; see `modules_by_name`."""
    return dict(_held(module, own_parameters, tied=True))


def parameters_in(module: nn.Module) -> Iterator[nn.Parameter]:
    """All parameters of a module and of those inside it, each once; see `modules_by_name`."""
    return (one for _, one in _held(module, own_parameters))


def own_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers of a module itself, by name."""
    return {name: one for name, one in module._buffers.items() if one is not None}


def buffers_by_name(module: nn.Module, *, tied: bool = False) -> dict[str, torch.Tensor]:
    """All buffers of a module and of those inside it by name, each once; see `modules_by_name`.

    Args:
        module: The module.
        tied: True to get a buffer that is in several places under each of its names.
    """
    return dict(_held(module, own_buffers, tied=tied))


def buffers_in(module: nn.Module) -> Iterator[torch.Tensor]:
    """All buffers of a module and of those inside it, each once; see `modules_by_name`."""
    return (one for _, one in _held(module, own_buffers))


def _held(
    module: nn.Module, own: Callable[[nn.Module], dict[str, _Tensor]], *, tied: bool = False
) -> Iterator[tuple[str, _Tensor]]:
    seen = set[int]()
    for path, inner in _named(module, "", None if tied else set()):
        for name, one in own(inner).items():
            if tied or id(one) not in seen:
                seen.add(id(one))
                yield f"{path}.{name}" if path else name, one


def left_to_each_rank(model: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters that DistributedDataParallel was told to ignore, such as the experts of each rank.

    The names are set by a private function of torch, or by the attribute itself, which its documentation names.
    """
    for module in modules_in(model):
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        yield from (one for name, one in parameters_by_name(module).items() if ignored and name in ignored)


# Optimizers


@cache
def _step_code() -> CodeType:
    """The code of the function in which torch wraps the `step` of each class of optimizers, to call hooks."""

    def step(*_: Any) -> None:
        pass

    wrapped: Any = torch.optim.Optimizer.profile_hook_step(step)
    code: CodeType = wrapped.__code__
    return code


def is_nested_step(optimizer: torch.optim.Optimizer) -> bool:
    """True if a hook of `optimizer.step` runs within another call of it: a subclass calls the `step` of its base.

    torch wraps the `step` of a class when an instance of it is made, so hooks run twice in one step of an optimizer if
    there is also one of its base class. There is no public way to tell the calls apart.
    """
    running = _running_steps()
    return len(running) > 1 and sum(one is optimizer for one in map(_stepping_in, running)) > 1


def is_stepping(optimizer: torch.optim.Optimizer) -> bool:
    """True if the caller runs within a call of `optimizer.step`, as hooks of other optimizers may."""
    return any(one is optimizer for one in map(_stepping_in, _running_steps()))


def _running_steps() -> list[FrameType]:
    """The frames of all calls of `step` that run on this thread."""
    found, step = [], _step_code()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is step:
            found.append(frame)
        frame = frame.f_back
    return found


def _stepping_in(frame: FrameType) -> Any:
    """The optimizer that steps in such a call; it is slow to ask."""
    return frame.f_locals["args"][0]


def calls_hooks(step: Any, optimizer: torch.optim.Optimizer) -> bool:
    """True if something in the place of `optimizer.step` leads to the method that calls the hooks.

    Every scheduler of learning rates puts a function there that does, others put the bound method itself, and users put
    functions that have it in their closure, or partial ones. There is no public mark of it: what wraps a function may
    have all of its attributes, and call another one. What torch compiles is not looked into: it may call no hooks.
    """
    waiting, seen = [step], set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, FunctionType) and one.__code__ is _step_code():
            return True
        waiting += _called_by(one, optimizer)
    return False


def _called_by(step: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
    """The functions that something in the place of `optimizer.step` may call."""
    if isinstance(step, MethodType) and step.__self__ is optimizer:
        return [step.__func__]
    if isinstance(step, partial):
        return [step.func, *step.args]
    if not isinstance(step, FunctionType):
        return []
    if step.__globals__ is vars(torch.optim.lr_scheduler):
        return [getattr(step, "__wrapped__", None)]
    if str(step.__globals__.get("__name__")).startswith("torch."):
        return []
    return [cell.cell_contents for cell in step.__closure__ or () if cell != CellType()]  # which is empty


def scale_of(scaler: Any) -> torch.Tensor | None:
    """The scale of a `GradScaler`, on its device; None before the first loss. The public way waits for the device."""
    scale: torch.Tensor | None = scaler._scale
    return scale


CLIPS_WITH_NORM = "_clip_grads_with_norm_"
"""The function of `torch.nn.utils.clip_grad` to which every call of `clip_grad_norm_` leads, since torch 2.6.

Its public name is another attribute of the same module's package; `clip_grad_norm_` does not look it up there.
"""

# Loaders


def loader_iterators() -> type[Any]:
    """The base class of all iterators of a `DataLoader`, with and without workers.

    PyTorch has no hook for the batches that a loader yields, and no public name for the class that yields them. To wrap
    the loader instead would miss iterators that exist already.
    """
    return torch.utils.data.dataloader._BaseDataLoaderIter


def index_sampler_of(iterator: Any) -> Any:
    """The sampler that draws the indices of an iterator's batches: one per loader, which the iterator does not know."""
    return iterator._index_sampler


def is_loader_worker(process: Any) -> bool:
    """True for a process that loads data for a `DataLoader`: it runs a function of torch. There is no public mark."""
    return getattr(getattr(process, "_target", None), "__module__", "") == "torch.utils.data._utils.worker"


# Printing


def print_options() -> dict[str, Any]:
    """The options of `torch.set_printoptions` as they are now; publicly they can be set and not read."""
    from torch import _tensor_str

    return dict(vars(_tensor_str.PRINT_OPTS))


# Pipelines

PREPARES_STAGES = ("_initialize_stage", "_initialize_stages")
"""Methods in which schedules of one stage, and of several, find out shapes before their first step."""


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
    """The number of micro-batches into which a schedule divides a batch. There is no public attribute for it."""
    return int(schedule._n_microbatches)


def runs_backward(schedule: Any) -> bool:
    """True if a schedule runs backward passes now: not in `eval`. There is no public way to ask."""
    return bool(schedule._has_backward)


# FSDP


def data_mesh_of(module: Any) -> Any:
    """The mesh over which FSDP2 shards and replicates a module's parameters; None if it holds none of its own.

    Parameters tell only the mesh of all that divides them, tensor parallelism too. There is no public way to ask.
    """
    group = _group_of(module)
    return None if group is None else group.mesh_info.mesh


def reduction_dtype(module: Any) -> torch.dtype | None:
    """The dtype in which FSDP2 reduces the gradients of a module's own parameters; None if it keeps theirs.

    There is no public way to ask for the policy that `fully_shard` was given.
    """
    policy = getattr(_group_of(module), "mp_policy", None)  # not in all releases of torch
    return None if policy is None else policy.reduce_dtype


def divisor_of(module: Any) -> Callable[[], float | None] | None:
    """Reads the number by which FSDP2 divides gradients of a module's own parameters after it has added them up.

    The training sets it at any time with `set_gradient_divide_factor`, of each module by itself, and with
    `set_reduce_scatter_divide_factor` in torch before 2.8. The number is None if it is that of the ranks. The result
    is None if the module holds no parameters of its own.
    """
    group = _group_of(module)
    names = ("gradient_divide_factor", "reduce_scatter_divide_factor")
    name = next((name for name in names if hasattr(group, name)), None)
    return None if name is None else partial(getattr, group, name)


def _group_of(module: Any) -> Any:
    """The parameters that FSDP2 manages together in a module; the first of several groups, whose settings are equal."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch before 2.12 had one group at most
    return state._fsdp_param_group if groups is None else next(iter(groups), None)


def is_fully_sharded(module: Any) -> bool:
    """True if FSDP2 manages the module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def replicating_group(module: Any) -> Any:
    """The ranks that hold copies of this rank's part of a module of FSDP1 (HYBRID_SHARD); None if no rank does.

    There is no public way to ask; `process_group` is that of the ranks that divide the parameters.
    """
    return getattr(module, "_inter_node_pg", None)


FLAT_PARAMETER = "_flat_param"
"""The name of FSDP1's flat parameter where it is registered."""


class FlatLayout(NamedTuple):
    """How FSDP1 has laid out the parameters of a module in a flat one; entries are in order.

    Attributes:
        tensor: The flat parameter.
        names: Names of the parameters in the wrapped module.
        shapes: Their shapes.
        ranges: The range of each that this rank holds; with `offset_in_shard`, `intra_param_start_idx`,
            `numel_in_shard`.
        shared: Further names of them; with `prim_module_name`, `prim_param_name`, `module_name`, `param_name`.
        parameters: The module's own parameters, views of the flat one; None where that has replaced them.
        local_size: Elements of the local part, with padding.
        padded: Elements of each parameter and of the padding between them, and whether it is padding.
    """

    tensor: Any
    names: Sequence[str]
    shapes: Sequence[Any]
    ranges: Sequence[Any]
    shared: Sequence[Any]
    parameters: Sequence[Any] | None
    local_size: int
    padded: Sequence[tuple[int, bool]]


def flat_layout(module: Any) -> FlatLayout | None:
    """The flat parameter of a module of FSDP1; None if it has none of its own.

    There is no public way to ask what a flat parameter is made of; the attributes are described in the docstring of
    torch.distributed.fsdp._flat_param.FlatParameter and have been the same since torch 2.1.
    """
    if module._handle is None:
        return None
    flat: Any = module._handle.flat_param
    return FlatLayout(
        tensor=flat,
        names=flat._fqns,
        shapes=flat._shapes,
        ranges=flat._shard_param_infos,
        shared=flat._shared_param_infos,
        parameters=flat._params,
        local_size=int(flat._sharded_size.numel()),
        padded=list(zip(flat._numels_with_padding, flat._is_padding_mask, strict=True)),
    )


# Meshes and layouts

TO_LOCAL = "_ToTorchTensorBackward"
"""Name of the node of `DTensor.to_local`. It has `dtensor_spec`, the layout of the DTensor, and `grad_placements`."""


def root_mesh(mesh: Any) -> Any:
    """The mesh of which this one has some of the axes. There is no public way to ask."""
    find = getattr(mesh, "_get_root_mesh", None)  # since torch 2.7
    return mesh if find is None else find()


def localized_layout(parameter: Any) -> Any:
    """The layout of the DTensor for which a plain parameter stands, if DDP is used beside tensor parallelism; or None.

    `torch.distributed.tensor.parallel.ddp` keeps it in an attribute of the parameter.
    """
    return getattr(parameter, "_st_info", None)


# Collectives


def is_asynchronous(tensor: torch.Tensor) -> bool:
    """True for the result of a collective which may still be running. There is no public class."""
    if type(tensor) is torch.Tensor:
        return False
    module = sys.modules.get("torch.distributed._functional_collectives")
    return module is not None and isinstance(tensor, module.AsyncCollectiveTensor)


def has_arrived(tensor: Any) -> bool:
    """True if somebody has waited for an asynchronous tensor, so that reading it waits for nothing.

    The tensor only knows of waits for itself. A wait for a view of it shows by no collective being waited for at all.
    """
    return bool(tensor.completed) or torch._C._distributed_c10d._get_work_registry_size() == 0


def versions_of(tensor: Any) -> tuple[int, int]:
    """Counters of the writes to an asynchronous tensor, and to the tensor for which it stands."""
    return version_of(tensor), version_of(tensor.elem)


def arrived(tensor: Any) -> torch.Tensor:
    """The tensor for which an asynchronous one stands, after a wait if nobody has waited for it.

    It does not take note of this wait, as it would of `trigger_wait`: the training waits as often as without it.
    """
    result: torch.Tensor = tensor.wait()
    return result


def default_store() -> Any:
    """The key-value store through which the ranks of the default process group have found each other.

    There is no public way to get it after `init_process_group` has made it; torch's own `monitored_barrier` and
    elastic agents use it in the same way.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
