"""The account of a script's run: what was recorded, and what could not be; printed at its end."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

MOST = 5
"""Most untrained models, and most optimizers that are not followed, that are named one by one."""


_LATER = (
    "A recording has the models that are there when the training begins; to record this one, call traindiff.record in "
    "the script."
)

_WITHOUT_MODULE = (
    "activations and their gradients, because the optimizer's tensors are of no torch.nn.Module. The recording begins "
    "with the gradients of the first step."
)

_OF_NONE = "they belong to none of the recorded models."


@dataclass(slots=True, kw_only=True)
class SeenOptimizer:
    """An optimizer of the script.

    Attributes:
        kind: Its class.
        num_parameters: Number of its tensors.
        num_steps: Number of its steps.
        followed_as: Its name in the recording; empty if it was not followed.
        model: Class of the model that it trains, if it was made after the recording began, for another model.
    """

    kind: str
    num_parameters: int
    num_steps: int = 0
    followed_as: str = ""
    model: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenModel:
    """A module that is part of no other.

    Attributes:
        name: In the recording; empty if there is only one model.
        kind: Its class.
        num_tensors: Number of its parameters.
        num_scripted: Number of TorchScript modules in it, which take no hooks.
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
    """Everything that was seen so far.

    Attributes:
        recording: The directory that the user asked for.
        models: The recorded models.
        untrained: Models whose parameters no optimizer holds.
        optimizers: All optimizers that were made.
        without_module: True if the optimizers hold tensors of no module.
        attached_late: True if the first forward pass ended before anything was attached.
        num_processes: Processes that the script has started, without those of data loaders.
        torch_imported: True if the script has imported torch.
        own_recording: Path of the script's own recording; empty if there is none.
        failure: An error of traindiff's that prevents the recording.
        refused: True if the request cannot be fulfilled, which was reported already.
        left_out: True if this rank is not to be recorded.
    """

    recording: str
    models: list[SeenModel] = field(default_factory=list)
    untrained: list[SeenModel] = field(default_factory=list)
    optimizers: list[SeenOptimizer] = field(default_factory=list)
    without_module: bool = False
    attached_late: bool = False
    num_processes: int = 0
    torch_imported: bool = False
    own_recording: str = ""
    failure: str = ""
    refused: bool = False
    left_out: bool = False

    def lines(self) -> Iterator[str]:
        """Lines for the user."""
        if self.refused:
            return
        if self.left_out:
            yield "Rank 0 was not recorded: --ranks does not name it."
        elif not self.models:
            yield f"Nothing was recorded: {self._why_nothing()}"
        else:
            yield f"Recorded in {self.recording}: {self._steps()}."
            if not self.without_module:
                yield f"Models: {'; '.join(map(str, self.models))}."
        yield from self._unseen()
        if self.models and not self.left_out:
            path = shlex.quote(self.recording)
            yield f"Next: traindiff check {path}. With another recording: traindiff compare {path} OTHER."

    def not_followed(self) -> list[str]:
        """Sentences about the optimizers that have stepped and hold nothing of the recorded models."""
        others = [one for one in self.optimizers if self.models and one.num_steps and not one.followed_as]
        alike = Counter((one.kind, one.num_parameters, one.num_steps, one.model) for one in others)
        found = [_WITHOUT_MODULE] if self.without_module else []
        for (kind, num_parameters, num_steps, model), number in alike.most_common(MOST):
            times = f"{number} times " if number > 1 else ""
            one = f"{times}{kind} with {_count(num_parameters, 'parameter')}, {_count(num_steps, 'step')}"
            found.append(one + (f", of a model that came later ({model}). {_LATER}" if model else f": {_OF_NONE}"))
        if more := alike.most_common()[MOST:]:
            steps = _count(sum(key[2] * number for key, number in more), "step")
            count = _count(sum(number for _, number in more), "more optimizer")
            found.append(f"{count}, {steps}, of none of the recorded models.")
        return found

    def _steps(self) -> str:
        """Steps of followed optimizers; consecutive optimizers of the same name count as one."""
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
            inside = ", and the processes that it started are not followed" if self.num_processes else ""
            return (
                f"traindiff finds what trains by its torch.optim.Optimizer, and the script made none{inside}. If it "
                "updates parameters by hand, let torch.optim.SGD do that."
            )
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
                "Not seen: the forward pass of the first step, in which no module was called in a way that can be "
                "observed (compiled together with other code, called by its forward method, or called before its "
                "optimizer was made). The recording begins with the parameters and gradients of that step."
            )
        yield from (f"Not followed: {one}" for one in self.not_followed())
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
                "torchrun ... -m traindiff run ..., so that each is recorded. In a process that is no rank, call "
                "traindiff.record(...)."
            )


def _count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"
