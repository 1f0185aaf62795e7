"""Parameters that are no copies of their master weights are found; copies are not, whatever made them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import traindiff
from tests.analyse.rules.test_replay import findings
from tests.made_up import Seen, Step, random
from tests.made_up import record as write
from tests.observe.hooks.models import mlp
from tests.observe.hooks.trainings import batches
from traindiff.analyse.findings import Finding

Copy = Callable[[list[nn.Parameter], list[Tensor], int], None]


def copy_all(parameters: list[nn.Parameter], masters: list[Tensor], _step: int) -> None:
    for parameter, master in zip(parameters, masters, strict=True):
        parameter.copy_(master)


def copy_but_the_first(parameters: list[nn.Parameter], masters: list[Tensor], _step: int) -> None:
    copy_all(parameters[1:], masters[1:], 0)


def copy_at_first(parameters: list[nn.Parameter], masters: list[Tensor], step: int) -> None:
    if step < 5:
        copy_all(parameters, masters, step)


def train(path: Path, copy: Copy, *, dtype: torch.dtype = torch.bfloat16) -> list[Finding]:
    """What is found in a training of a short dtype whose optimizer holds float32 copies, as Megatron's."""
    torch.manual_seed(0)
    model = mlp().to(dtype)
    parameters = list(model.parameters())
    masters = [one.detach().float().requires_grad_() for one in parameters]
    for parameter, master in zip(parameters, masters, strict=True):
        parameter.main_param = master  # type: ignore[attr-defined]
    optimizer = torch.optim.AdamW(masters, lr=0.01)
    with traindiff.record(path, model, optimizer, strict=True):
        for number, batch in enumerate(batches(10)):
            model(batch.to(dtype)).square().mean().backward()
            for parameter, master in zip(parameters, masters, strict=True):
                assert parameter.grad is not None
                master.grad, parameter.grad = parameter.grad.float(), None
            optimizer.step()
            with torch.no_grad():
                copy(parameters, masters, number)
    return findings(path)


def of_masters(found: list[Finding]) -> list[Finding]:
    return [one for one in found if one.kind == "master-weights"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_copies_of_master_weights_are_right(dtype: torch.dtype, tmp_path: Path) -> None:
    assert train(tmp_path / "run", copy_all, dtype=dtype) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_parameter_that_is_never_copied_is_named(dtype: torch.dtype, tmp_path: Path) -> None:
    found = of_masters(train(tmp_path / "run", copy_but_the_first, dtype=dtype))

    assert {(one.path, tuple(one.evidence["paths"])) for one in found} == {("0.weight", ("0.weight",))}
    assert found[0].step < 4
    name = str(dtype).removeprefix("torch.")
    assert found[0].message.startswith(
        f"0.weight is not its master weights rounded to {name}, when step {found[0].step} begins: they are "
    )


def test_a_copy_that_ends_in_mid_run_is_found(tmp_path: Path) -> None:
    found = of_masters(train(tmp_path / "run", copy_at_first))

    assert [one.step for one in found] == [6, 7, 8, 9]  # the updates of step 5 were not copied
    assert found[0].evidence["paths"][:3] == ["0.weight", "0.bias", "2.weight"]
    assert "The same is true of 0.bias, 2.weight, 2.bias." in found[0].message


@pytest.mark.parametrize(("off", "wrong"), [(0.0, False), (0.25, False), (0.3, True)])
@pytest.mark.parametrize("stage", ["", "before"])
def test_what_engines_record_after_their_steps_is_held_against_each_other(
    stage: str, off: float, wrong: bool, tmp_path: Path
) -> None:
    """As DeepSpeed's, whose parameters and master weights are recorded when it has exchanged them."""
    master = random(64, 32, seed=1)
    value = master + np.float32(off * 2.0**-8 * 16) * np.abs(master)  # 4 roundings are a quarter of this
    seen = value.astype(np.float16)

    def edit(number: int, sites: Step) -> None:
        if number == 1:
            sites["param", stage, "fc.weight", "master"] = Seen(values=master)
            sites["param", stage, "fc.weight", "value"] = Seen(values=seen, about={"dtype": "bfloat16"})

    found = of_masters(findings(write(tmp_path / "run", edit)))

    assert [one.step for one in found] == ([1] if wrong else [])


@pytest.mark.parametrize("what", ["same dtype", "not finite", "unobserved"])
def test_what_cannot_be_told_is_no_finding(what: str, tmp_path: Path) -> None:
    master = random(64, 32, seed=1)
    value = random(64, 32, seed=2)
    if what == "not finite":
        value[0, 0] = np.inf
    about = {"dtype": "float32" if what == "same dtype" else "bfloat16"}
    about |= {"unobserved": "lost"} if what == "unobserved" else {}

    def edit(_number: int, sites: Step) -> None:
        sites["param", "", "fc.weight", "master"] = Seen(values=master)
        sites["param", "", "fc.weight", "value"] = Seen(values=value, about=about)

    assert of_masters(findings(write(tmp_path / "run", edit))) == []


def test_a_comparison_says_which_run_computes_with_old_weights(tmp_path: Path) -> None:
    train(tmp_path / "right", copy_all)
    train(tmp_path / "wrong", copy_at_first)

    comparison = traindiff.compare(tmp_path / "right", tmp_path / "wrong")

    first = comparison.first_divergence
    assert comparison.verdict == "diverged"
    assert first is not None
    assert (first.step, first.phase, first.path, first.kind) == (6, "param", "0.weight", "master-weights")
    assert first.message.startswith("In the candidate, 0.weight is not its master weights rounded to bfloat16")


def test_a_run_does_not_differ_from_itself_where_another_parameter_is_nearly_a_finding(tmp_path: Path) -> None:
    master, rounding = random(64, 32, seed=1), 2.0**-8

    def edit(_step: int, sites: Step) -> None:
        for path, roundings in (("fc.weight", 3.0), ("head.weight", 20.0)):
            value = master * np.float32(1.0 + roundings * rounding)
            sites["param", "", path, "master"] = Seen(values=master)
            sites["param", "", path, "value"] = Seen(values=value, about={"dtype": "bfloat16"})

    run = write(tmp_path / "run", edit)

    assert {one.path for one in of_masters(findings(run))} == {"head.weight"}
    assert traindiff.compare(run, run).verdict == "identical"
