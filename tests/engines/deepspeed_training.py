"""The small training of `tests.engines.training`, under DeepSpeed's engine."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import distributed, nn
from torch.nn import functional

import traindiff
from tests.engines.training import BATCH, LENGTH, VOCABULARY, Model

WEIGHT_DECAYS = ({"weight_decay": 0.1}, {"weight_decay": 0.0})


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices with weight decay, everything else without."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return [{"params": one, **decay} for one, decay in zip((matrices, others), WEIGHT_DECAYS, strict=True)]


def torch_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameter_groups(model), lr=1e-2)


def import_deepspeed() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed
        from deepspeed import ops
    ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled when first used, which takes minutes
    return deepspeed


def make_engine(
    stage: int,
    *,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = torch_adamw,
    micro_batches: int = 1,
    zero: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
) -> Any:
    """An engine with the small model. `zero` and `config` are merged into its configuration; no clipping by default."""
    deepspeed = import_deepspeed()
    torch.manual_seed(0)
    model = Model()
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=parameter_groups(model),
        optimizer=optimizer(model) if optimizer else None,
        config={
            "train_micro_batch_size_per_gpu": BATCH // distributed.get_world_size() // micro_batches,
            "gradient_accumulation_steps": micro_batches,
            "gradient_clipping": 0.0,
            "steps_per_print": None,
            "zero_optimization": {"stage": stage, **(zero or {})},
            **(config or {}),
        },
    )
    return engine


def train_engine(
    path: str | None,
    stage: int,
    *,
    given: str = "engine's",
    root: str = "engine",
    steps: int = 3,
    before_step: Callable[[Any], None] = lambda engine: None,
    **settings: Any,
) -> list[list[float]]:
    """Train, and record to `path` unless that is None.

    Args:
        path: The recording.
        stage: Of ZeRO.
        given: Which optimizer is given to `record`: the engine's, the one inside it, or none.
        root: Which module: the engine, or what it wraps.
        steps: Steps of the optimizer.
        before_step: Called before each of them.
        settings: Of `make_engine`.

    Returns:
        Losses, and the sums of what this rank holds of the optimizer's state.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # DeepSpeed uses names of collectives that torch renames
        engine = make_engine(stage, **settings)
        optimizer = {"engine's": engine.optimizer, "inner": engine.basic_optimizer, "none": None}[given]
        model = engine if root == "engine" else engine.module
        record = nullcontext() if path is None else traindiff.record(path, model, optimizer, strict=True)
        losses = []
        with record:
            for tokens in global_batches(steps):
                losses += [step_engine(engine, part, before_step) for part in tokens.chunk(micro_batches_of(engine))]
        state = [value for held in engine.basic_optimizer.state.values() for value in held.values()]
        return [losses, [float(value.double().sum()) for value in state if isinstance(value, torch.Tensor)]]


def global_batches(steps: int) -> Iterator[torch.Tensor]:
    data = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=data)


def micro_batches_of(engine: Any) -> int:
    return int(engine.gradient_accumulation_steps())


def step_engine(engine: Any, part: torch.Tensor, before_step: Callable[[Any], None]) -> float:
    """Give the engine this rank's part of a micro-batch."""
    mine = part.chunk(distributed.get_world_size())[distributed.get_rank()]
    logits = engine(mine[:, :-1])
    loss = functional.cross_entropy(logits.flatten(0, 1).float(), mine[:, 1:].flatten())
    engine.backward(loss)
    if engine.is_gradient_accumulation_boundary():
        before_step(engine)
    engine.step()
    return float(loss)


def train_plain(
    path: str,
    *,
    micro_batches: int = 1,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = torch_adamw,
    dtype: torch.dtype = torch.float32,
) -> None:
    """The same training in one process, without an engine."""
    torch.manual_seed(0)
    model = Model().to(dtype)
    torch_optimizer = optimizer(model)
    with traindiff.record(path, model, torch_optimizer, strict=True):
        for tokens in global_batches(3):
            for part in tokens.chunk(micro_batches):
                logits = model(part[:, :-1])
                loss = functional.cross_entropy(logits.flatten(0, 1).float(), part[:, 1:].flatten())
                (loss / micro_batches).backward()
            torch_optimizer.step()
            torch_optimizer.zero_grad()


@contextmanager
def counted_collectives() -> Iterator[list[str]]:
    """Names of the functions of torch.distributed that are called: what communicates, and what waits."""
    from torch.distributed import distributed_c10d

    names = [
        name
        for name in distributed_c10d.__all__
        if any(word in name for word in ("all_", "reduce", "gather", "broadcast", "scatter", "barrier", "send", "recv"))
        and callable(getattr(distributed_c10d, name))
        and name[0].islower()
    ]
    called: list[str] = []
    original = {name: getattr(distributed_c10d, name) for name in names}

    def count(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return original[name](*args, **kwargs)

        return call

    places = (distributed, distributed_c10d)
    for place in places:
        for name in names:
            setattr(place, name, count(name))
    try:
        yield called
    finally:
        for place in places:
            for name in names:
                setattr(place, name, original[name])
