"""What a run of a script has seen, and what it could not: said at the end of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from torch import nn

from traindiff.observe.torch.session.models import can_be_name, unwrapped

MOST = 5
"""Models that no optimizer trains, and optimizers that are not followed, which are named one by one."""


@dataclass(slots=True, kw_only=True)
class SeenOptimizer:
    """An optimizer that the script has made.

    Attributes:
        kind: Its class.
        num_parameters: How many tensors it was given.
        num_steps: How often it was called.
        followed_as: Its name in the recording; empty where it was not followed.
    """

    kind: str
    num_parameters: int
    num_steps: int = 0
    followed_as: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenModel:
    """A module that is part of no other.

    Attributes:
        name: In the recording; empty where there is one model only.
        kind: Its class.
        num_tensors: How many parameters it has.
        num_scripted: How many modules in it are TorchScript's, which takes no hooks.
    """

    name: str
    kind: str
    num_tensors: int
    num_scripted: int = 0

    def __str__(self) -> str:
        named = f"{self.name}: {self.kind}" if self.name else self.kind
        return f"{named}, {_count(self.num_tensors, 'parameter')}"


@dataclass(slots=True, kw_only=True)
class Account:
    """What was seen so far.

    Attributes:
        recording: The directory that was asked for.
        models: What is recorded.
        untrained: Models that no optimizer holds a parameter of.
        optimizers: All that were made.
        attached_late: Whether nothing was attached before the first step had ended.
        num_processes: Processes that the script has started, but for those of data loaders.
        torch_imported: Whether the script has imported torch.
        own_recording: Where the script itself records; empty where it does not.
        failure: Why nothing is recorded, where that is an error of traindiff's.
        refused: Whether what was asked for cannot be done, which has been said.
        left_out: Whether this rank is none of those that are to be recorded.
    """

    recording: str
    models: list[SeenModel] = field(default_factory=list)
    untrained: list[SeenModel] = field(default_factory=list)
    optimizers: list[SeenOptimizer] = field(default_factory=list)
    attached_late: bool = False
    num_processes: int = 0
    torch_imported: bool = False
    own_recording: str = ""
    failure: str = ""
    refused: bool = False
    left_out: bool = False

    def lines(self) -> Iterator[str]:
        """What to tell the user, one line each."""
        if self.refused:
            return
        if self.left_out:
            yield "Rank 0 was not recorded: --ranks does not name it."
        elif not self.models:
            yield f"Nothing was recorded: {self._why_nothing()}"
        else:
            yield f"Recorded in {self.recording}: {self._steps()}."
            yield f"Models: {'; '.join(map(str, self.models))}."
        yield from self._unseen()

    def _steps(self) -> str:
        """Steps of optimizers that were followed; those that one after another had the same name are one."""
        steps: dict[tuple[str, str], int] = {}
        for one in self.optimizers:
            if one.followed_as:
                followed = one.kind, one.followed_as
                steps[followed] = steps.get(followed, 0) + one.num_steps
        counted = (
            f"{_count(number, 'step')} of {kind}" + (f" ({name})" if len(steps) > 1 else "")
            for (kind, name), number in steps.items()
        )
        return ", ".join(counted) or "no step"

    def _why_nothing(self) -> str:
        if self.own_recording:
            return f"the script records itself, in {self.own_recording}."
        if self.failure:
            return self.failure
        if not self.torch_imported:
            return "the script did not import torch."
        if not self.optimizers:
            return "the script made no optimizer of torch's kind, and what trains is found by its optimizers."
        kinds = ", ".join(one.kind for one in self.optimizers)
        return (
            f"no module that holds parameters of {kinds} was called where gradients are enabled: "
            "models that only evaluate are not recorded."
        )

    def _unseen(self) -> Iterator[str]:
        if self.models and self.own_recording:
            yield f"The script records itself, in {self.own_recording}; from there on, this recording ends."
        if self.models and self.attached_late:
            yield (
                "Not seen: the first step of the training, in which no module was called in a way that can be observed "
                "(compiled together with other code, or called by its forward method). Step 0 of the recording is "
                "step 1 of the training."
            )
        others = [one for one in self.optimizers if self.models and one.num_steps and not one.followed_as]
        for one in others[:MOST]:
            yield (
                f"Not followed: {one.kind} with {_count(one.num_parameters, 'parameter')}, "
                f"{_count(one.num_steps, 'step')}: they belong to none of the models above."
            )
        if (more := len(others) - MOST) > 0:
            steps = _count(sum(one.num_steps for one in others[MOST:]), "step")
            yield f"Not followed: {_count(more, 'more optimizer')}, {steps}, of none of the models above."
        for model in self.untrained[:MOST]:
            yield f"Not recorded: {model}, which no optimizer trains."
        if (more := len(self.untrained) - MOST) > 0:
            yield f"Not recorded: {_count(more, 'more model')} that no optimizer trains."
        for model in self.models:
            if model.num_scripted:
                modules = _count(model.num_scripted, "module")
                yield f"Not seen: the outputs of {modules} of {model.kind}: TorchScript's cannot be observed."
        if self.num_processes:
            yield (
                f"Not followed: {_count(self.num_processes, 'process')} that the script started. Start ranks with "
                "torchrun ... -m traindiff run ..., so that each is recorded."
            )


def _count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def names_of_kinds(kinds: Sequence[str]) -> list[str]:
    """A name for each model from its class, those after the first of a class numbered."""
    return [kind if kinds.index(kind) == at else f"{kind}_{kinds[:at].count(kind)}" for at, kind in enumerate(kinds)]


def named_models(models: Sequence[nn.Module], frame: FrameType | None) -> dict[str, nn.Module]:
    """Names for several models, each used once.

    Args:
        models: As the training calls them, wrapped or not.
        frame: Where it does so. The variables of `__main__` are looked at first, then those of the outermost function,
            with the attributes of what `self` is there, and so on: functions inside may call any model `model`.
    """
    scopes: list[Mapping[str, Any]] = []
    while frame is not None:
        scopes[:0] = [frame.f_locals, *_attributes(frame.f_locals)]
        frame = frame.f_back
    scopes.insert(0, vars(sys.modules["__main__"]))
    kinds = names_of_kinds([type(unwrapped(model)).__name__ for model in models])
    found: dict[str, nn.Module] = {}
    for model, kind in zip(models, kinds, strict=True):
        names = (name for scope in scopes for name in _names_in(scope, model))
        found[next((name for name in names if name not in found), kind)] = model
    return found


def _names_in(scope: Mapping[str, Any], model: nn.Module) -> list[str]:
    """Names in a scope of a model, those of the model itself before those of a wrapper around it."""
    inner = unwrapped(model)
    held = [(name, one) for name, one in list(scope.items()) if one is model or one is inner]
    usable = [(name, one) for name, one in held if _is_usable(name)]
    return [name for name, one in sorted(usable, key=lambda pair: pair[1] is not inner)]


def _is_usable(name: str) -> bool:
    return name.isidentifier() and not name.startswith("_") and name != "self" and can_be_name(name)


def _attributes(variables: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The attributes of an object that holds models, e.g. the trainer whose method runs."""
    owner = variables.get("self")
    own = getattr(owner, "__dict__", None)
    return [own] if isinstance(own, dict) and not isinstance(owner, nn.Module) else []
