"""Gradients of trainings on several ranks follow from what all ranks computed; a rank that is wrong is named."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import traindiff
from tests.observe.sharding.deepspeed_training import NEEDS_DEEPSPEED, PARTITION_ALL, trained
from tests.observe.sharding.own_operations import OwnModel
from tests.observe.sharding.pipelined import train_pipelined
from tests.observe.sharding.prepared import in_ddp, in_fsdp2, in_tensor_parallel
from tests.observe.sharding.tensor_parallel import with_sequence_parallelism
from tests.observe.sharding.test_fsdp1 import sharded
from tests.observe.sharding.training import Model, train
from tests.observe.sharding.transformer import train as train_transformer
from tests.observe.witness.residuals import RIGHT, contributed, ratios, reasons
from tests.on_ranks import run_on_ranks
from traindiff.analyse.findings import Finding
from traindiff.observe.torch.hooks.inert_on_copy import InertOnCopy

OBSERVED = ("loss", "grad", "witness")


def clipped(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def checkpointed(model: Model) -> nn.Module:
    for block in model.blocks:
        block.forward = partial(checkpoint, type(block).forward.__get__(block), use_reentrant=False)
    return in_ddp(model)


def tied(model: Model) -> nn.Module:
    model.head.weight = model.embed.weight
    return in_ddp(model)


def in_bf16_fsdp2(model: Model) -> nn.Module:
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def averaged(model: nn.Module, *, forgotten: str = "", only: int | None = None) -> None:
    """Average gradients over ranks, as trainings do by hand."""
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        if name == forgotten and only in (None, distributed.get_rank()):
            distributed.all_reduce(parameter.grad.clone())
            continue
        distributed.all_reduce(parameter.grad)
        parameter.grad /= distributed.get_world_size()


RIGHT_TRAININGS: dict[str, tuple[Callable[[Model], nn.Module], dict[str, Any]]] = {
    "ddp": (in_ddp, {}),
    "ddp with micro-batches": (in_ddp, {"micro_batches": 2, "no_sync": True, "before_step": clipped}),
    "ddp with checkpointing": (checkpointed, {}),
    "ddp with tied weights": (tied, {}),
    "ddp under autocast": (in_ddp, {"autocast": True, "loss_scale": 8.0}),
    "fsdp1": (sharded, {}),
    "fsdp1, flat": (partial(sharded, use_orig_params=False), {"micro_batches": 2}),
    "fsdp2": (in_fsdp2, {"micro_batches": 2, "before_step": clipped}),
    "fsdp2 in bfloat16": (in_bf16_fsdp2, {}),
    "by hand": (lambda model: model, {"before_step": averaged}),
    "tensor parallel": (in_tensor_parallel, {"shares": False}),
}


def train_several(directory: str) -> None:
    for name, (prepare, settings) in RIGHT_TRAININGS.items():
        train(f"{directory}/{name}", prepare, observe=OBSERVED, **settings)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("witness")
    run_on_ranks(train_several, 2, str(directory))
    return directory


@pytest.mark.parametrize("name", RIGHT_TRAININGS)
def test_right_gradients_are_within_rounding(recorded: Path, name: str) -> None:
    found = ratios(recorded / name)

    verdict = traindiff.check(str(recorded / name), rules="wrong-gradient,product-wrong,product-inaccurate")
    assert verdict.verdict == "healthy", str(verdict)
    assert max(found.values()) < RIGHT
    if name != "tensor parallel":
        assert len(found) == 16 - ("tied" in name)
        assert reasons(recorded / name) == {}


def train_transformers(directory: str) -> None:
    train_transformer(f"{directory}/sequence parallel", with_sequence_parallelism, observe=OBSERVED)
    train_pipelined(f"{directory}/1f1b", schedule="1f1b", observe=OBSERVED)
    train_pipelined(f"{directory}/zero bubble", schedule="zero bubble", observe=OBSERVED)
    train_pipelined(f"{directory}/unscaled", scale_grads=False, observe=OBSERVED)


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("divided")
    run_on_ranks(train_transformers, 2, str(directory))
    return directory


@pytest.mark.parametrize("name", ["sequence parallel", "1f1b", "unscaled", "zero bubble"])
def test_right_gradients_of_divided_models_are_within_rounding(divided: Path, name: str) -> None:
    verdict = traindiff.check(str(divided / name), rules="wrong-gradient,product-wrong,product-inaccurate")

    assert verdict.verdict == "healthy", str(verdict)
    assert max(ratios(divided / name).values()) < RIGHT
    assert any("layers.0" in path or "blocks.0" in path for path in ratios(divided / name)), str(verdict)


def test_backward_passes_in_two_halves_are_witnessed(divided: Path) -> None:
    assert reasons(divided / "zero bubble") == {}
    assert ratios(divided / "zero bubble").keys() == ratios(divided / "1f1b").keys()


def not_reduced(model: nn.Module) -> None:
    averaged(model, forgotten="norm.weight")


def lost(model: nn.Module) -> None:
    if distributed.get_rank() == 1:
        dict(model.named_parameters())["blocks.0.up.weight"].grad.zero_()
    averaged(model)


def doubled_on_one(model: nn.Module) -> None:
    averaged(model)
    if distributed.get_rank() == 1:
        dict(model.named_parameters())["blocks.0.up.weight"].grad.mul_(2.0)


def compressing(model: Model) -> nn.Module:
    wrapped: Any = in_ddp(model)
    wrapped.register_comm_hook(None, fp16_compress_hook)
    return wrapped


def reducing_by_hook(model: Model) -> nn.Module:
    wrapped: Any = in_ddp(model)
    wrapped.register_comm_hook(None, lambda state, bucket: allreduce_hook(state, bucket))
    return wrapped


def scaled_by_hand(model: nn.Module) -> None:
    """By more than float16 rounds, and without a write that torch counts."""
    dict(model.module.named_parameters())["blocks.0.up.weight"].grad.data.mul_(1.01)


WRONG: dict[str, tuple[Callable[[nn.Module], None], str]] = {
    "not reduced": (not_reduced, "norm.weight"),
    "lost": (lost, "blocks.0.up.weight"),
    "doubled on one": (doubled_on_one, "blocks.0.up.weight"),
}


def train_wrong(directory: str) -> None:
    for name, (before_step, _) in WRONG.items():
        train(f"{directory}/{name}", before_step=before_step, observe=OBSERVED, steps=1)
    train(f"{directory}/compressed", compressing, observe=OBSERVED)
    train(f"{directory}/compressed and wrong", compressing, before_step=scaled_by_hand, observe=OBSERVED, steps=1)
    train(f"{directory}/by hook", reducing_by_hook, observe=OBSERVED)


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wrong")
    run_on_ranks(train_wrong, 2, str(directory))
    return directory


def found(run: Path) -> tuple[Finding, ...]:
    return traindiff.check(str(run), rules="wrong-gradient,product-wrong,product-inaccurate").findings


def test_gradients_that_were_not_reduced_are_each_ranks_own(wrong: Path) -> None:
    (finding,) = found(wrong / "not reduced")

    assert (finding.path, finding.rank) == ("norm.weight", None)
    assert finding.message == "The gradient on each rank is what that rank alone contributed: was it not reduced?"


def test_a_rank_whose_contribution_is_lost_is_named(wrong: Path) -> None:
    (finding,) = found(wrong / "lost")

    assert (finding.path, finding.rank) == ("blocks.0.up.weight", 1)
    assert finding.message == "The gradient lacks what rank 1 of 2 contributed."


def test_a_gradient_that_is_wrong_on_one_rank_is_named_there(wrong: Path) -> None:
    (finding,) = found(wrong / "doubled on one")

    assert (finding.path, finding.rank) == ("blocks.0.up.weight", 1)
    assert finding.message == "The gradient on rank 1 is 2 x what the inputs and outputs of its layer give."


BEFORE_REDUCING: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "lost": (lambda now, _: now.zero_(), "The gradient lacks what rank 1 of 2 contributed."),
    "doubled": (lambda now, _: now.mul_(2.0), "The gradient holds twice what rank 1 of 2 contributed."),
    "too large": (lambda now, _: now.mul_(1.25), "The gradient holds 1.25 x what rank 1 of 2 contributed."),
    "stale": (
        lambda now, before: now.copy_(before),
        "The gradient holds what rank 1 of 2 contributed to the step before, in place of what it computed now.",
    ),
    "kept": (
        lambda now, before: now.add_(before),
        "The gradient also holds what rank 1 of 2 contributed to the step before.",
    ),
}  # fmt: skip


class Unseen(InertOnCopy):
    """A hook that counts as one of traindiff's own: as if what it does happened in the hardware."""

    def __init__(self, change: Callable[..., Any]) -> None:
        self._change = change

    def __call__(self, *about: Any) -> Any:
        return self._change(*about)


def train_before_reducing(directory: str) -> None:
    """With FSDP2, change what rank 1 contributes to one weight in step 1, before gradients are reduced."""
    for name, (change, _) in BEFORE_REDUCING.items():
        kept: list[Tensor] = []

        def contributed_to(gradients: Any, change: Any = change, kept: list[Tensor] = kept) -> None:
            (gradient,) = gradients
            before = gradient.clone()
            if len(kept) == 1 and distributed.get_rank() == 1:
                change(gradient, kept[0])
            kept.append(before)

        def called(module: Any, *_: Any, to: Any = contributed_to) -> None:
            node: Any = module.weight.expand_as(module.weight).grad_fn
            node.next_functions[0][0].register_prehook(Unseen(to))

        def prepared(model: Model, called: Any = called) -> nn.Module:
            in_fsdp2(model)
            model.blocks[0].up.register_forward_hook(called, prepend=True)
            return model

        train(f"{directory}/{name}", prepared, observe=OBSERVED, steps=3)


def test_a_rank_that_contributes_something_else_to_a_sharded_gradient_is_named(tmp_path: Path) -> None:
    run_on_ranks(train_before_reducing, 2, str(tmp_path))

    for name, (_, message) in BEFORE_REDUCING.items():
        (finding,) = found(tmp_path / name)
        assert (finding.path, finding.step, finding.rank) == ("blocks.0.up.weight", 1, 1), name
        assert finding.message == message


def test_gradients_that_torch_compresses_are_held_against_the_shorter_dtype(wrong: Path) -> None:
    assert found(wrong / "compressed") == ()
    assert reasons(wrong / "compressed") == {}
    (finding,) = traindiff.check(str(wrong / "compressed and wrong")).warnings
    assert finding.path == "blocks.0.up.weight"
    assert finding.message.startswith("The gradient is 1.01 x what the inputs and outputs of its layer give.")


def test_gradients_that_a_hook_of_the_training_reduces_are_not_witnessed(wrong: Path) -> None:
    assert found(wrong / "by hook") == ()
    assert all("communication hook" in reason for reason in reasons(wrong / "by hook").values())


@NEEDS_DEEPSPEED
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_of_zero_are_within_rounding(stage: int, tmp_path: Path) -> None:
    settings = {
        "micro_batches": 2, "zero": PARTITION_ALL if stage == 3 else {}, "observe": OBSERVED,
        "config": {"gradient_clipping": 0.1},
    }  # fmt: skip
    run_on_ranks(trained, 2, str(tmp_path / "run"), stage, settings)

    verdict = traindiff.check(str(tmp_path / "run"), rules="wrong-gradient,product-wrong,product-inaccurate")
    assert verdict.verdict == "healthy", str(verdict)
    assert len(ratios(tmp_path / "run")) == 16
    assert max(ratios(tmp_path / "run").values()) < RIGHT


OWN_OPERATIONS: dict[str, tuple[Callable[[Model], nn.Module], dict[str, Any]]] = {
    name: RIGHT_TRAININGS[name]
    for name in (
        "ddp with micro-batches", "ddp with checkpointing", "fsdp1, flat", "fsdp2", "fsdp2 in bfloat16",
        "tensor parallel",
    )
}  # fmt: skip


def train_own_operations(directory: str) -> None:
    for name, (prepare, settings) in OWN_OPERATIONS.items():
        train(f"{directory}/{name}", prepare, make=OwnModel, observe=OBSERVED, **settings)
    train(f"{directory}/wrong", make=OwnModel, before_step=own_lost, observe=OBSERVED, steps=1)


def own_lost(model: nn.Module) -> None:
    if distributed.get_rank() == 1:
        for path in WRONG_OWN:
            model.get_parameter(path).grad.zero_()  # type: ignore[union-attr]
    averaged(model)


WRONG_OWN = ("positions", "blocks.0.norm.weight", "blocks.1.mixed", "blocks.1.slope")


@pytest.fixture(scope="module")
def own_operations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("own_operations")
    run_on_ranks(train_own_operations, 2, str(directory))
    return directory


@pytest.mark.parametrize("name", OWN_OPERATIONS)
def test_parameters_without_known_layers_are_within_rounding(own_operations: Path, name: str) -> None:
    found = ratios(own_operations / name)

    verdict = traindiff.check(str(own_operations / name), rules="wrong-gradient,product-wrong,product-inaccurate")
    assert verdict.verdict == "healthy", str(verdict)
    assert max(found.values()) < RIGHT
    if name != "tensor parallel":
        assert len(found) == 20
        assert reasons(own_operations / name) == {}
        assert {"blocks.0.slope", "blocks.1.slope"} <= contributed(own_operations / name)


def test_a_lost_rank_is_named_for_parameters_without_known_layers(own_operations: Path) -> None:
    findings = found(own_operations / "wrong")

    assert {finding.path for finding in findings} == {*WRONG_OWN}
    assert {finding.message for finding in findings} == {"The gradient lacks what rank 1 of 2 contributed."}


@NEEDS_DEEPSPEED
def test_gradients_that_zero_reduces_in_float16_are_within_its_rounding(tmp_path: Path) -> None:
    settings = {"observe": OBSERVED, "config": {"communication_data_type": "fp16"}}
    run_on_ranks(trained, 2, str(tmp_path / "run"), 2, settings)

    verdict = traindiff.check(str(tmp_path / "run"), rules="wrong-gradient")
    assert verdict.verdict == "healthy", str(verdict)
    assert max(ratios(tmp_path / "run").values()) > 1.0  # more than the gradients' own dtype explains


@NEEDS_DEEPSPEED
def test_parameters_without_known_layers_are_within_rounding_under_zero(tmp_path: Path) -> None:
    settings = {"micro_batches": 2, "zero": PARTITION_ALL, "observe": OBSERVED, "make": OwnModel}
    run_on_ranks(trained, 2, str(tmp_path / "run"), 3, settings)

    verdict = traindiff.check(str(tmp_path / "run"), rules="wrong-gradient,product-wrong,product-inaccurate")
    assert verdict.verdict == "healthy", str(verdict)
    assert len(ratios(tmp_path / "run")) == 20
    assert max(ratios(tmp_path / "run").values()) < RIGHT
