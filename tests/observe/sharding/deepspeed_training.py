"""The small training of `tests.observe.sharding.training`, under DeepSpeed's engine."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.nn import functional

import traindiff
from tests.observe.sharding.training import BATCH, LENGTH, VOCABULARY, Model

NEEDS_DEEPSPEED = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="deepspeed is not installed (pip install 'traindiff[deepspeed]', or: make test-deepspeed)",
)

PARTITION_ALL = {"stage3_param_persistence_threshold": 0}
"""Without it, ZeRO stage 3 keeps all parameters of so small a model gathered."""

WEIGHT_DECAYS = ({"weight_decay": 0.1}, {"weight_decay": 0.0})


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices with weight decay, everything else without."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return [{"params": one, **decay} for one, decay in zip((matrices, others), WEIGHT_DECAYS, strict=True)]


def torch_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameter_groups(model), lr=1e-2)


def torch_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameter_groups(model), lr=1e-2)


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
    make: Callable[[], Model] = Model,
) -> Any:
    """An engine with the small model. `zero` and `config` are merged into its configuration; no clipping by default."""
    deepspeed = import_deepspeed()
    torch.manual_seed(0)
    model = make()
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
    loss_factor: float = 1.0,
    after_making: Callable[[Any], None] = lambda engine: None,
    observe: Sequence[str] | None = None,
    **settings: Any,
) -> list[list[float]]:
    """Train, and record to `path` unless that is None.

    Args:
        path: The recording.
        stage: Of ZeRO.
        given: Which optimizer is given to `record`: the engine's, the one inside it, or none.
        root: Which module: the engine, or what it wraps.
        loss_factor: What the loss is multiplied by.
        after_making: Called with the engine.
        observe: What is recorded.
        settings: Of `make_engine`.

    Returns:
        Losses, and the sums of what this rank holds of the optimizer's state.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # DeepSpeed uses names of collectives that torch renames
        engine = make_engine(stage, **settings)
        after_making(engine)
        optimizer = {"engine's": engine.optimizer, "inner": engine.basic_optimizer, "none": None}[given]
        model = engine if root == "engine" else engine.module
        record = (
            nullcontext() if path is None else traindiff.record(path, model, optimizer, strict=True, observe=observe)
        )
        losses = []
        with record:
            for tokens in global_batches():
                parts = tokens.chunk(engine.gradient_accumulation_steps())
                losses += [step_engine(engine, part, loss_factor) for part in parts]
        state = [value for held in engine.basic_optimizer.state.values() for value in held.values()]
        return [losses, [float(value.double().sum()) for value in state if isinstance(value, torch.Tensor)]]


def trained(path: str | None, stage: int, settings: dict[str, Any]) -> list[list[float]]:
    """`train_engine`, with its settings as one argument."""
    return train_engine(path, stage, **settings)


def trained_and_counted(path: str | None, stage: int, settings: dict[str, Any]) -> list[Any]:
    """What `train_engine` returns, and the collectives that it called."""
    with counted_collectives() as called:
        numbers = train_engine(path, stage, **settings)
    return [numbers, called]


def compared(baseline: Path, candidate: Path) -> traindiff.Comparison:
    """Two recordings compared, of which neither has anything that the other has not."""
    comparison = traindiff.compare(baseline, candidate)
    assert not any(comparison.unaligned), str(comparison)
    return comparison


def global_batches() -> Iterator[torch.Tensor]:
    data = torch.Generator().manual_seed(1)
    for _ in range(3):
        yield torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=data)


def step_engine(engine: Any, part: torch.Tensor, loss_factor: float) -> float:
    """Give the engine this rank's part of a micro-batch."""
    mine = part.chunk(distributed.get_world_size())[distributed.get_rank()]
    logits = engine(mine[:, :-1])
    loss = functional.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten()) * loss_factor
    engine.backward(loss)
    engine.step()
    return float(loss)


def train_plain(
    path: str,
    *,
    micro_batches: int = 1,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = torch_adamw,
    dtype: torch.dtype = torch.float32,
    loss_factor: float = 1.0,
) -> None:
    """The same training in one process, without an engine."""
    torch.manual_seed(0)
    model = Model().to(dtype)
    torch_optimizer = optimizer(model)
    with traindiff.record(path, model, torch_optimizer, strict=True):
        for tokens in global_batches():
            for part in tokens.chunk(micro_batches):
                logits = model(part[:, :-1])
                loss = functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()) * loss_factor
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
