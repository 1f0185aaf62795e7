"""Save a training and load it again: with its own functions, or else with the usual ones of its engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

from traindiff.errors import ConfigError, Problem, type_of
from traindiff.run.config.setup import Setup
from traindiff.run.config.training import Training
from traindiff.run.resume.held import find_held, get_state, global_generators, kind_of, set_state

_OWN = "Give traindiff.Training(save=..., load=...), functions of a directory that do what the training does itself."


def refuse_half(training: Training, *, where: str, asked_by: str) -> None:
    """Raise `ConfigError` if a training gives only one of `save` and `load`."""
    if (training.save is None) != (training.load is None):
        given, lacking = ("save", "load") if training.load is None else ("load", "save")
        what = f"gives {given} and not {lacking}: what one writes, the other has to read."
        raise ConfigError(asked_by, [Problem(where=f"{where}, {lacking}", what=what, fix="Give both, or neither.")])


def save_training(training: Training, setup: Setup, directory: Path, *, num_batches: int) -> None:
    """Save a training between two steps; to be called on all ranks.

    Args:
        training: The prepared training.
        setup: How it is run.
        directory: Exists, and is empty.
        num_batches: Batches that the training has taken.
    """
    if training.save is not None:
        training.save(directory)
        return
    random = {name: get() for name, (get, _) in global_generators().items()}
    held = {name: _state_of(one) for name, one in find_held(training).items()}
    held = {name: one for name, one in held.items() if one is not None}
    torch.save({"random": random, "held": held, "batches": num_batches}, directory / f"rank-{_rank()}.pt")
    if setup.engine == "deepspeed":
        training.model.save_checkpoint(str(directory), tag="state")  # type: ignore[operator]
    elif setup.engine in ("fsdp1", "fsdp2", "tp"):
        _save_distributed(training, directory)
    elif setup.engine == "pp" or _rank() == 0:
        torch.save(_plain_state(training), directory / f"state-{_rank()}.pt")
    if distributed.is_initialized():
        distributed.barrier()


def load_training(training: Training, setup: Setup, directory: Path, *, where: str, asked_by: str) -> Iterator[Any]:
    """Load what `save_training` has written into a fresh training; to be called on all ranks.

    Returns:
        The batches that follow.

    Raises:
        ConfigError: The training's own `load` returned something that is no batches.
    """
    if training.load is not None:
        returned = training.load(directory)
        if returned is None:
            return iter(training.batches)
        if isinstance(returned, int) and not isinstance(returned, bool):
            return _after(training.batches, returned)
        if isinstance(returned, Iterable):
            return iter(returned)
        fix = "Return nothing, the number of batches to skip, or the batches that follow."
        raise ConfigError(asked_by, [Problem(where=f"{where}, load", what=f"returned {type_of(returned)}.", fix=fix)])
    return _load_all(training, setup, directory)


def _load_all(training: Training, setup: Setup, directory: Path) -> Iterator[Any]:
    """Load everything that traindiff itself has saved; random generators last, since everything else may draw."""
    own = directory / f"rank-{_rank()}.pt"
    saved = torch.load(own if own.exists() else directory / "rank-0.pt", weights_only=True)
    if setup.engine == "deepspeed":
        training.model.load_checkpoint(str(directory), tag="state")  # type: ignore[operator]
    elif setup.engine in ("fsdp1", "fsdp2", "tp"):
        _load_distributed(training, directory)
    else:
        number = _rank() if setup.engine == "pp" else 0
        _load_plain(training, torch.load(directory / f"state-{number}.pt", weights_only=True))
    batches = _after(training.batches, saved["batches"])
    held = find_held(training)
    for name, state in saved["held"].items():
        if name in held:
            _restore(held[name], state)
    if own.exists():
        for name, (_, put) in global_generators().items():
            if name in saved["random"]:
                put(saved["random"][name])
    return batches


def _rank() -> int:
    return distributed.get_rank() if distributed.is_initialized() else 0


def _after(batches: Iterable[Any], count: int) -> Iterator[Any]:
    following = iter(batches)
    for _ in range(count):
        next(following, None)
    return following


def _optimizers(training: Training) -> dict[str, Any]:
    given = training.optimizer
    if given is None:
        return {}
    if isinstance(given, dict):
        return dict(given)
    several = given if isinstance(given, (list, tuple)) else [given]
    return {str(number): one for number, one in enumerate(several)}


def _plain_state(training: Training) -> dict[str, Any]:
    optimizers = {name: one.state_dict() for name, one in _optimizers(training).items()}
    return {"model": training.model.state_dict(), "optimizers": optimizers}


def _load_plain(training: Training, saved: dict[str, Any]) -> None:
    training.model.load_state_dict(saved["model"])
    for name, one in _optimizers(training).items():
        one.load_state_dict(saved["optimizers"][name])


def _save_distributed(training: Training, directory: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save

    model, optimizer = get_state_dict(training.model, list(_optimizers(training).values()))
    save({"model": model, "optimizer": optimizer}, checkpoint_id=str(directory / "distributed"))


def _load_distributed(training: Training, directory: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    optimizers = list(_optimizers(training).values())
    model, optimizer = get_state_dict(training.model, optimizers)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    load(state, checkpoint_id=str(directory / "distributed"))
    set_state_dict(
        training.model, optimizers, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )  # fmt: skip


def _state_of(one: Any) -> Any:
    """The state of an object that a training holds; None for a number, which nothing could be put in place of."""
    kind = kind_of(one)
    if kind == "generator":
        return get_state(one)
    if kind == "tensor":
        return one.detach()
    return None if kind == "counter" else one.state_dict()


def _restore(one: Any, state: Any) -> None:
    kind = kind_of(one)
    if kind == "generator":
        set_state(one, state)
    elif isinstance(one, Tensor):
        with torch.no_grad():
            one.copy_(state)
    elif isinstance(one, nn.Module) or kind != "counter":
        one.load_state_dict(state)
