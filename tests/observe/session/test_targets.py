"""What a recording is asked to observe, and what users are told when it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import traindiff
from tests.observe.hooks.models import TiedWeights, mlp
from traindiff.errors import ConfigError, TraindiffWarning
from traindiff.observe.torch.session.targets import find_targets
from traindiff.storage import open_recording


def message(tmp_path: Path, model: object, optimizer: object = None, **options: object) -> str:
    with pytest.raises(ConfigError) as caught:
        traindiff.record(tmp_path / "run", model, optimizer, **options)
    assert not (tmp_path / "run").exists()
    return str(caught.value)


def test_what_is_no_module_and_what_is_no_optimizer_are_both_named(tmp_path: Path) -> None:
    assert message(tmp_path, {"weight": 1}, [SGD(mlp().parameters()), "adam"]) == (
        "2 problems in record(...); nothing was attached to the model.\n"
        "\n"
        "  record(model=...), 'weight'\n"
        "    is an int, not a torch.nn.Module.\n"
        "    Give the module that the training loop calls.\n"
        "\n"
        "  record(optimizer=...), optimizer[1]\n"
        "    is a str, not a torch.optim.Optimizer.\n"
        "    Give the optimizer whose step() the training calls, or leave it out to have it found."
    )


@pytest.mark.parametrize("optimizer", ["adam", 3, mlp(), {"first": None}, mlp().parameters()])
def test_each_thing_that_is_no_optimizer_is_one_problem(optimizer: object, tmp_path: Path) -> None:
    assert message(tmp_path, mlp(), optimizer).startswith("1 problem in record(...)")


def test_a_selection_that_matches_nothing_shows_what_paths_look_like(tmp_path: Path) -> None:
    assert message(tmp_path, mlp(), select=["encoder.*", "head"]) == (
        "1 problem in record(...); nothing was attached to the model.\n"
        "\n"
        "  record(select=['encoder.*', 'head'])\n"
        "    matches none of the model's 8 modules and parameters.\n"
        "    Paths look like: 0, 1, 2, ... Use '*' for all of them."
    )


def test_a_part_of_a_selection_that_matches_nothing_is_warned_about(tmp_path: Path) -> None:
    with pytest.warns(TraindiffWarning, match=r"record\(select=\.\.\.\): no module, .* matches 'encoder\.\*'\."):
        traindiff.record(tmp_path / "run", mlp(), select=["encoder.*", "0"]).close()


def test_a_misspelt_setting_is_named_and_the_nearest_one_suggested(tmp_path: Path) -> None:
    said = message(tmp_path, mlp(), evry=3, selct="*")

    assert said.startswith("2 problems in record(...); nothing was attached to the model.\n\n  record(evry=...)\n")
    assert '"evry" is not a setting.\n    Did you mean "every"? Known: batch_axis, bounds, compact, ' in said
    assert 'Did you mean "select"?' in said


@pytest.mark.parametrize("path", [None, 3, "", b"run"])
def test_what_is_no_path_is_said(path: object) -> None:
    with pytest.raises(ConfigError, match=r"record\(path=.*\)\n    is not a path\."):
        traindiff.record(path, mlp())


def test_a_model_in_place_of_the_path_is_not_printed_as_a_whole(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        traindiff.record(nn.Sequential(*(nn.Linear(2, 2) for _ in range(200))), str(tmp_path / "run"))  # type: ignore[arg-type]

    assert len(str(caught.value)) < 700
    assert 'Write the directory to make first: record("runs/baseline", model, optimizer).' in str(caught.value)


def test_a_selection_that_matches_nothing_of_a_single_module_shows_what_there_is(tmp_path: Path) -> None:
    assert message(tmp_path, nn.ReLU(), select="x").endswith(
        "    matches none of the model's 1 modules and parameters.\n"
        "    Paths look like: (root). Use '*' for all of them."
    )


def test_settings_are_checked_before_the_model(tmp_path: Path) -> None:
    assert "evry" not in message(tmp_path, "no model", every=0)
    assert message(tmp_path, "no model", every=0).startswith("1 problem in record(...)")


def test_a_path_that_is_taken_is_found_before_anything_is_attached(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model = mlp()
    with pytest.raises(ConfigError, match=r"is a file, and a recording is a directory\."):
        traindiff.record(tmp_path / "file", model)

    assert not any(module._forward_hooks for module in model.modules())


def test_targets_have_canonical_names() -> None:
    model = nn.Sequential(mlp())
    model.register_buffer("mask", nn.Parameter().detach())
    targets = find_targets(model, SGD(model.parameters()), select=["0.2*", "mask"])

    assert list(targets.modules) == ["0.2"]
    assert list(targets.parameters) == ["0.2.weight", "0.2.bias"]
    assert list(targets.buffers) == ["mask"]
    assert set(targets.names.values()) == {"0.0.weight", "0.0.bias", "0.2.weight", "0.2.bias"}
    assert targets.primary == "optimizer"


def test_either_name_of_a_tied_weight_selects_it() -> None:
    for select in ("embedding.weight", "head.weight"):
        targets = find_targets(TiedWeights(), None, select=[select])

        assert list(targets.parameters) == ["embedding.weight"]


def test_the_names_of_optimizers_are_the_users() -> None:
    model = mlp()
    optimizers = {"slow": SGD(model[0].parameters()), "fast": SGD(model[2].parameters())}
    targets = find_targets(model, optimizers, select=["*"])

    assert list(targets.optimizers) == ["slow", "fast"]
    assert targets.primary == "slow"


def test_a_model_with_lazy_parameters_can_be_recorded(tmp_path: Path) -> None:
    model = nn.Sequential(nn.LazyLinear(4))
    with traindiff.record(tmp_path / "run", model, strict=True):
        model(torch.ones(2, 3)).sum().backward()

    parameters = open_recording(str(tmp_path / "run")).rank_content(0)["parameters"]
    assert parameters["0.weight"]["shape"] == [4, 3]  # as it was in the end


class Around(torch.optim.Optimizer):
    """Calls another optimizer and, as those of Opacus, has none of the attributes of its base class."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattribute__(self, name: str) -> Any:
        return getattr(self._inner, name) if name in ("param_groups", "state") else super().__getattribute__(name)

    def step(self, closure: Any = None) -> Any:
        """Clip gradients, and take a step."""
        for group in self.param_groups:
            nn.utils.clip_grad_value_(group["params"], 0.01)
        return self._inner.step(closure)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("given", [True, False])
def test_the_optimizer_inside_one_without_hooks_is_recorded(depth: int, *, given: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer: torch.optim.Optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(depth):
        optimizer = Around(optimizer)

    with traindiff.record(tmp_path / "run", model, optimizer if given else None, strict=True):
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()

    verdict = traindiff.check(tmp_path / "run")
    assert (verdict.verdict, verdict.to_json()["steps"]) == ("healthy", [0, 1, 2])
    content = open_recording(tmp_path / "run").rank_content(0)
    assert [one["type"] for one in content["optimizers"]] == ["SGD"]


def test_an_optimizer_without_hooks_that_calls_no_other_one_is_named(tmp_path: Path) -> None:
    assert message(tmp_path, mlp(), Around(None)).endswith(
        "  record(optimizer=...), optimizer\n"
        "    is an Around, whose class has not called torch.optim.Optimizer.__init__.\n"
        "    Give the optimizer whose step() it calls, or call super().__init__() in its class."
    )
