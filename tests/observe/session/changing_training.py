"""A small training that changes what is recorded of it, in ways that leave every bit of it as it is."""

from __future__ import annotations

import copy
import types
from collections import OrderedDict, UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam
from torch.optim import optimizer as optimizers

import traindiff


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Training:
    """The model, its optimizer, and how they are called: an edit may exchange each of them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: Any = Model()
        self.optimizer: Any = Adam(self.model.parameters(), lr=1e-2)
        self.call: Callable[[Tensor], Tensor] = lambda x: self.model(x)

    def put_in_optimizer(self, replaced: dict[Tensor, Tensor]) -> None:
        """Have the optimizer hold other parameters, with the state of those that they replace."""
        for group in self.optimizer.param_groups:
            group["params"] = [replaced.get(one, one) for one in group["params"]]
        for before, after in replaced.items():
            self.optimizer.state[after] = self.optimizer.state.pop(before)


Edit = Callable[[Training], None]


def train(
    path: Path,
    edit: Edit | None = None,
    *,
    when: str = "before",
    step: int = 2,
    steps: int = 5,
    given: bool = True,
    micro_batches: int = 1,
    also: Edit | None = None,
    **settings: Any,
) -> Training:
    """Record a training in which `edit` is called once, `when` in step `step`; `also` before every later step."""
    training = Training()
    inputs = torch.Generator().manual_seed(1)
    with traindiff.record(path, training.model, training.optimizer if given else None, **settings):
        for number in range(steps):
            if also is not None and number > step:
                also(training)
            for micro in range(micro_batches):
                now = edit if edit is not None and number == step and micro == micro_batches - 1 else lambda _: None
                if when == "before":
                    now(training)
                if not micro:
                    training.optimizer.zero_grad()
                loss = (training.call(torch.randn(6, 4, generator=inputs)) - 1).square().mean()
                if when == "after forward":
                    now(training)
                loss.backward()
            if when == "after backward" and edit is not None and number == step:
                edit(training)
            training.optimizer.step()
    return training


def clear_forward_hooks(training: Training) -> None:
    for module in training.model.modules():
        module._forward_hooks.clear()


def clear_hooks_of_a_layer(training: Training) -> None:
    training.model.blocks[0].up._forward_hooks.clear()


def clear_all_module_hooks(training: Training) -> None:
    for module in training.model.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()


def clear_hooks_of_the_root(training: Training) -> None:
    training.model._forward_hooks.clear()
    training.model._forward_pre_hooks.clear()


def clear_hooks_before_the_root(training: Training) -> None:
    training.model._forward_pre_hooks.clear()


def put_empty_dicts(training: Training) -> None:
    for module in training.model.modules():
        module._forward_hooks = OrderedDict()
        module._forward_pre_hooks = OrderedDict()


def put_copied_dicts(training: Training) -> None:
    for module in training.model.modules():
        module._forward_hooks = OrderedDict(module._forward_hooks)
        module._forward_pre_hooks = OrderedDict(module._forward_pre_hooks)


def put_a_plain_dict(training: Training) -> None:
    training.model.blocks[0].up.__dict__["_forward_hooks"] = {}


def clear_step_hooks(training: Training) -> None:
    training.optimizer._optimizer_step_pre_hooks.clear()
    training.optimizer._optimizer_step_post_hooks.clear()


def clear_hooks_before_steps(training: Training) -> None:
    training.optimizer._optimizer_step_pre_hooks.clear()


def clear_hooks_after_steps(training: Training) -> None:
    training.optimizer._optimizer_step_post_hooks.clear()


def clear_global_hooks(_: Training) -> None:
    nn.modules.module._global_forward_hooks.clear()
    nn.modules.module._global_forward_pre_hooks.clear()
    optimizers._global_optimizer_pre_hooks.clear()
    optimizers._global_optimizer_post_hooks.clear()


def clear_everything(training: Training) -> None:
    clear_all_module_hooks(training)
    clear_step_hooks(training)
    clear_global_hooks(training)


def clear_parameter_hooks(training: Training) -> None:
    for parameter in training.model.parameters():
        parameter._backward_hooks = None
        parameter._post_accumulate_grad_hooks = None


def replace_the_head(training: Training) -> None:
    head = nn.Linear(8, 3)
    head.load_state_dict(training.model.head.state_dict())
    training.put_in_optimizer(dict(zip(training.model.head.parameters(), head.parameters(), strict=True)))
    training.model.head = head


def replace_the_head_around_its_parameters(training: Training) -> None:
    head = nn.Linear(8, 3)
    head.weight, head.bias = training.model.head.weight, training.model.head.bias
    training.model.head = head


def replace_the_blocks_by_copies(training: Training) -> None:
    before = [*training.model.blocks.parameters()]
    training.model.blocks = copy.deepcopy(training.model.blocks)
    training.put_in_optimizer(dict(zip(before, training.model.blocks.parameters(), strict=True)))


def wrap_the_head(training: Training) -> None:
    training.model.head = nn.Sequential(training.model.head)


def replace_a_parameter(training: Training) -> None:
    weight = nn.Parameter(training.model.head.weight.detach().clone())
    training.put_in_optimizer({training.model.head.weight: weight})
    training.model.head.weight = weight


def put_a_parameter_into_its_dict(training: Training) -> None:
    weight = nn.Parameter(training.model.head.weight.detach().clone())
    training.put_in_optimizer({training.model.head.weight: weight})
    training.model.head._parameters["weight"] = weight


def put_a_mapping_in_place_of_the_parameters_dict(training: Training) -> None:
    training.model.head.__dict__["_parameters"] = UserDict(training.model.head._parameters)
    put_a_parameter_into_its_dict(training)


def assign_a_state_dict(training: Training) -> None:
    before = [*training.model.parameters()]
    training.model.load_state_dict({k: v.clone() for k, v in training.model.state_dict().items()}, assign=True)
    training.put_in_optimizer(dict(zip(before, training.model.parameters(), strict=True)))


def assign_a_state_dict_and_make_an_optimizer(training: Training) -> None:
    training.model.load_state_dict({k: v.clone() for k, v in training.model.state_dict().items()}, assign=True)
    make_an_optimizer(training)


def make_an_optimizer(training: Training) -> None:
    state = training.optimizer.state_dict()
    training.optimizer = Adam(training.model.parameters(), lr=1e-2)
    training.optimizer.load_state_dict(state)


def split_the_optimizer(training: Training) -> None:
    before, parameters = training.optimizer, [*training.model.parameters()]
    parts = [Adam(parameters[:4], lr=1e-2), Adam(parameters[4:], lr=1e-2)]
    for part in parts:
        for parameter in part.param_groups[0]["params"]:
            part.state[parameter] = before.state[parameter]

    def for_each(name: str) -> Callable[[], None]:
        return lambda: [getattr(part, name)() for part in parts] and None

    training.optimizer = types.SimpleNamespace(zero_grad=for_each("zero_grad"), step=for_each("step"))


def load_the_optimizer(training: Training) -> None:
    training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))


def set_the_optimizers_state(training: Training) -> None:
    training.optimizer.__setstate__(training.optimizer.__getstate__())


def make_groups_anew(training: Training) -> None:
    (group,) = training.optimizer.param_groups
    training.optimizer.param_groups.clear()
    parameters = group.pop("params")
    training.optimizer.add_param_group({**group, "params": parameters[:4]})
    training.optimizer.add_param_group({**group, "params": parameters[4:]})


def wrap_step(training: Training) -> None:
    step = training.optimizer.step
    training.optimizer.step = lambda: step()


def replace_step(training: Training) -> None:
    training.optimizer.step = types.MethodType(Adam.step.__wrapped__, training.optimizer)  # type: ignore[attr-defined]


def replace_a_forward(training: Training) -> None:
    head = training.model.head
    head.forward = lambda x: nn.functional.linear(x, head.weight, head.bias)


def replace_a_call(training: Training) -> None:
    up = training.model.blocks[0].up
    up._call_impl = up.forward


def replace_the_call_of_the_root(training: Training) -> None:
    training.model._call_impl = training.model.forward


def call_forward(training: Training) -> None:
    training.call = training.model.forward


def go_on_with_copies(training: Training) -> None:
    training.model, training.optimizer = copy.deepcopy((training.model, training.optimizer))


def set_data(training: Training) -> None:
    for parameter in training.model.parameters():
        parameter.data = parameter.data.clone()


def freeze_and_thaw(training: Training) -> None:
    training.model.head.requires_grad_(False).requires_grad_(True)


def convert_there_and_back(training: Training) -> None:
    training.model.double().float()


def wrap_the_model(training: Training) -> None:
    training.model = nn.Sequential(training.model)
