"""Settings of modules that differ between two runs are the first thing that a finding there says."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import traindiff
from traindiff.analyse.compare.configuration import Configurations
from traindiff.analyse.findings import Finding
from traindiff.observe.torch.session.configuration import settings_of
from traindiff.storage import open_recording


def net(*, eps: float = 1e-5, act: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8, eps=eps), act or nn.GELU(), nn.Linear(8, 3))


def recorded(path: Path, model: nn.Module, **of_optimizer: Any) -> Path:
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2, **of_optimizer)
    with traindiff.record(path, model, optimizer):
        for step in range(3):
            x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


def test_another_eps_is_the_first_thing_said_of_a_norm(tmp_path: Path) -> None:
    found = traindiff.compare(recorded(tmp_path / "a", net()), recorded(tmp_path / "b", net(eps=0.01)))
    first = found.first_divergence
    assert first is not None
    assert first.path == "1"
    assert first.message.startswith("1: eps is 1e-05 in the baseline and 0.01 in the candidate. The ")
    assert first.evidence["settings"] == ["eps is 1e-05 in the baseline and 0.01 in the candidate"]
    assert "Settings differ: 1: eps is 1e-05 in the baseline and 0.01 in the candidate." in found.notes


def test_another_class_is_named_without_its_settings(tmp_path: Path) -> None:
    found = traindiff.compare(recorded(tmp_path / "a", net()), recorded(tmp_path / "b", net(act=nn.ELU())))
    first = found.first_divergence
    assert first is not None
    assert first.message.startswith("2: the module is GELU in the baseline and ELU in the candidate. ")


def test_a_replaced_forward_and_a_frozen_parameter_are_named(tmp_path: Path) -> None:
    model = net()
    model[0].forward = partial(lambda module, x: nn.functional.linear(x, module.weight), model[0])
    found = traindiff.compare(recorded(tmp_path / "a", net()), recorded(tmp_path / "b", model))
    assert found.first_divergence is not None
    assert found.first_divergence.message.startswith("0: its forward was replaced in the candidate, by tests.analyse.")
    frozen = net()
    frozen[3].requires_grad_(False)
    found = traindiff.compare(tmp_path / "a", recorded(tmp_path / "c", frozen))
    assert found.first_divergence is not None
    assert "3.weight: it is frozen in the candidate (requires_grad is False). " in found.first_divergence.message


def test_equal_runs_have_no_such_note_and_what_changes_no_number_is_not_listed(tmp_path: Path) -> None:
    model = net(act=nn.ReLU(inplace=True))
    found = traindiff.compare(
        recorded(tmp_path / "a", net(act=nn.ReLU())), recorded(tmp_path / "b", model), rename=None
    )
    assert found.verdict == "identical"
    assert not [note for note in found.notes if "Settings differ" in note]


def test_settings_are_those_at_the_beginning_without_what_is_private_or_large(tmp_path: Path) -> None:
    module = nn.Conv2d(3, 4, (3, 1), padding=(1, 0))
    module.table = torch.ones(3)
    module.names = ["x"] * 1000
    module.title = "x" * 1000
    found = settings_of(module)
    assert found["class"] == "torch.nn.modules.conv.Conv2d"
    assert (found["kernel_size"], found["padding"], found["groups"]) == ("(3, 1)", "(1, 0)", "1")
    assert len(found["title"]) == 200
    assert not {"table", "names", "weight"} & found.keys()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer):
        model(torch.ones(2, 4)).sum().backward()
        model[1].eps = 5.0  # type: ignore[union-attr]
        optimizer.step()
    held = open_recording(str(tmp_path / "run")).rank_content(0)["module_settings"]
    assert held["1"]["eps"] == "1e-05"


def test_another_optimizer_is_named_by_its_class() -> None:
    sides = [{"optimizers": [{"name": "optimizer", "type": name, "groups": []}]} for name in ("Adam", "AdamW")]
    found = Configurations([sides[0]], [sides[1]])
    assert found.notes() == ["Settings differ: optimizer: type is Adam in the baseline and AdamW in the candidate."]


def dropping(path: Path, *, evaluates_from: int) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with traindiff.record(path, model, optimizer):
        for step in range(4):
            torch.manual_seed(step)
            if step == evaluates_from:
                model[1].eval()
            model(torch.randn(6, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


def test_evaluation_mode_in_one_run_is_named_with_its_first_step(tmp_path: Path) -> None:
    right = dropping(tmp_path / "a", evaluates_from=9)
    for step in (0, 2):
        found = traindiff.compare(right, dropping(tmp_path / f"from-{step}", evaluates_from=step))
        first = found.first_divergence
        assert first is not None
        assert (first.step, first.phase, first.path) == (step, "forward", "1")
        said = f"1: it is in evaluation mode in the candidate from step {step} on (eval() was called). "
        assert first.message.startswith(said)
    both = traindiff.compare(tmp_path / "from-2", dropping(tmp_path / "again", evaluates_from=2))
    assert (both.verdict, both.notes) == ("identical", ())


def adversaries(path: Path, *, evaluates_from: int) -> Path:
    """The critic's steps end in the middle of the loop, so the generator changes its mode inside a step."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"generator": nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5)), "critic": nn.Linear(8, 1)})
    generator, critic = model["generator"], model["critic"]
    optimizers = {name: torch.optim.SGD(model[name].parameters(), lr=0.1) for name in ("critic", "generator")}
    with traindiff.record(path, model, optimizers):
        for step in range(4):
            torch.manual_seed(step)
            if step == evaluates_from:
                generator[1].eval()  # type: ignore[index]
            made = generator(torch.randn(6, 4))
            critic(made.detach()).mean().backward()
            optimizers["critic"].step()
            optimizers["critic"].zero_grad()
            (-critic(made)).mean().backward()
            optimizers["generator"].step()
            optimizers["generator"].zero_grad()
    return path


def test_a_mode_that_changes_inside_a_step_is_named_where_it_shows(tmp_path: Path) -> None:
    found = traindiff.compare(
        adversaries(tmp_path / "a", evaluates_from=9), adversaries(tmp_path / "b", evaluates_from=2)
    )
    first = found.first_divergence
    assert first is not None
    assert (first.phase, first.path) == ("forward", "generator.1")
    assert first.message.startswith(f"generator.1: it is in evaluation mode in the candidate from step {first.step} on")


def test_a_validation_in_one_run_only_is_not_said_to_change_modes(tmp_path: Path) -> None:
    def trained(path: Path, *, validates: bool, factor: float) -> Path:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with traindiff.record(path, model, optimizer):
            for step in range(3):
                if validates:
                    model.eval()
                    with torch.no_grad():
                        model(torch.ones(2, 4))
                    model.train()
                x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
                (model(x).square().mean() * (factor if step == 2 else 1.0)).backward()
                optimizer.step()
                optimizer.zero_grad()
        return path

    baseline = trained(tmp_path / "a", validates=False, factor=1.0)
    found = traindiff.compare(baseline, trained(tmp_path / "b", validates=True, factor=1.5))
    assert found.first_divergence is not None
    assert "evaluation mode" not in str(found)


def of_modules(**classes: str) -> dict[str, Any]:
    return {"module_settings": {path.replace("_", "."): {"class": name} for path, name in classes.items()}}


@pytest.mark.parametrize(
    ("phase", "path", "told"),
    [
        ("grad", "block.fc.weight", "block.fc: "),  # that of the module that has the parameter
        ("update", "block.fc.weight", "block.fc: "),
        ("forward", "block.fc", "block.fc: "),
        ("forward", "block.fc.act", "block.fc: "),
        ("grad", "block.other.weight", ""),
        ("grad", "weight", ""),
        ("batch", "block.fc", ""),
        ("param", "block.fc.weight", ""),
    ],
)
def test_a_finding_names_the_settings_of_its_own_module(phase: str, path: str, told: str) -> None:
    found = Configurations([of_modules(block_fc="Linear")], [of_modules(block_fc="Mine")])
    finding = Finding(step=0, phase=phase, path=path, slot="x", order=0, kind="value", message="It differs.")

    message = found.explained(finding).message

    assert message.startswith(told)
    assert message.endswith("It differs.")
    assert (message == "It differs.") == (not told)


@pytest.mark.parametrize(
    ("names", "differ"),
    [
        (("__main__.Net", "__mp_main__.Net"), False),  # of a script that starts its ranks itself
        (("__mp_main__.Net", "package.train.Net"), False),
        (("__main__.Net", "package.train.Other"), True),
        (("package.one.Net", "package.two.Net"), True),
        (("__main__.Net", "__main__.Ornet"), True),
    ],
)
def test_a_class_of_a_script_is_the_same_however_the_script_is_run(names: tuple[str, str], differ: bool) -> None:
    finding = Finding(step=0, phase="forward", path="block", slot="x", order=0, kind="value", message="It differs.")
    for before, after in (names, names[::-1]):
        found = Configurations([of_modules(block=before)], [of_modules(block=after)])
        assert found.explained(finding).message.startswith("block: the module is") == differ


def weights_of_two_layers(*, tied: bool) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight if tied else nn.Parameter(model[0].weight.detach().clone())
    return model


@pytest.mark.parametrize("baseline", [True, False])
def test_a_parameter_that_is_tied_in_one_run_is_the_first_thing_said(baseline: bool, tmp_path: Path) -> None:
    runs = [recorded(tmp_path / str(tied), weights_of_two_layers(tied=tied)) for tied in (baseline, not baseline)]
    found = traindiff.compare(*runs)

    run, other = ("baseline", "candidate") if baseline else ("candidate", "baseline")
    told = f"0.weight: it is also 2.weight in the {run} (tied), and 2.weight is a parameter of its own in the {other}."
    assert found.verdict == "diverged"
    assert any(one.path == "0.weight" and one.message.startswith(told) for one in found.findings)
    assert found.first_divergence is not None
    assert found.first_divergence.phase == "grad"
    assert f"Settings differ: {told}" in found.notes


def test_a_pipeline_that_holds_the_two_on_different_ranks_is_not_untied() -> None:
    whole = {"parameters": {"emb.weight": {}}, "tied": {"head.weight": "emb.weight"}}
    stages = [{"parameters": {"emb.weight": {}}}, {"parameters": {"head.weight": {}}}]

    assert Configurations([whole], stages).notes() == []
    assert Configurations(stages, [whole]).notes() == []
    assert Configurations([whole], [{"parameters": {"emb.weight": {}, "head.weight": {}}}]).notes()


@dataclass
class Config:
    """As many repositories have it: each module keeps the whole configuration."""

    size: int = 4
    gain: float = 1.0
    table: Any = None


class Scaled(nn.Module):
    """A linear layer times a number of its configuration, and a table that follows from it."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, self.fc = config, nn.Linear(config.size, 3)
        self.register_buffer("table", torch.full((3,), 1.0 if config.table is None else config.table))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) * self.config.gain * self.table


def scaled(**settings: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Scaled(Config(**settings)))


def test_a_value_of_a_configuration_object_is_a_setting(tmp_path: Path) -> None:
    found = traindiff.compare(recorded(tmp_path / "a", scaled()), recorded(tmp_path / "b", scaled(gain=1.01)))

    assert found.first_divergence is not None
    assert found.first_divergence.path == "0"
    assert found.first_divergence.message.startswith(
        "0: config.gain is 1.0 in the baseline and 1.01 in the candidate. "
    )


@pytest.mark.parametrize(
    ("name", "value", "known"),
    [
        ("config", {"n_head": 4, "_private": 1, "of": object(), 3: 4}, {"config.n_head": "4"}),
        ("model_args", Config(), {"model_args.size": "4", "model_args.gain": "1.0", "model_args.table": "None"}),
        ("config", Config, {}),
        ("configure", Config(), {}),
        ("config", 7, {"config": "7"}),
    ],
)
def test_plain_values_of_what_is_named_as_a_configuration_are_settings(
    name: str, value: object, known: dict[str, str]
) -> None:
    module = nn.Identity()
    setattr(module, name, value)

    found = settings_of(module)

    assert {key: text for key, text in found.items() if key.startswith(("c", "m"))} == {
        "class": "torch.nn.modules.linear.Identity", **known,
    }  # fmt: skip


def noisy(x: torch.Tensor) -> torch.Tensor:
    return x + (x.bfloat16().float() - x).detach() * 0.5


@pytest.mark.parametrize(
    ("changes", "guessed"), [({}, True), ({"table": 1.0001}, False), ({"gain": 1.0 + 1e-9}, False)]
)
def test_a_difference_with_a_known_cause_is_no_rounding(
    changes: dict[str, float], guessed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    baseline = recorded(tmp_path / "a", wide())
    plain = Scaled.forward
    monkeypatch.setattr(Scaled, "forward", lambda self, x: noisy(plain(self, x)))

    first = traindiff.compare(baseline, recorded(tmp_path / "b", wide(**changes))).first_divergence

    assert first is not None
    assert (first.kind == "precision", "rounding to bfloat16" in first.message) == (guessed, guessed)


def wide(*, table: float = 1.0, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    model = Scaled(Config(**settings))
    model.fc, model.table = nn.Linear(4, 64), torch.full((64,), table)
    return nn.Sequential(model)


def test_a_setting_that_differs_comes_before_a_module_that_is_not_called(tmp_path: Path) -> None:
    other = net(eps=0.01)
    bypassed = other[0]
    other.forward = lambda x: other[3](other[2](other[1](x @ bypassed.weight.T + bypassed.bias)))  # type: ignore[method-assign]

    found = traindiff.compare(recorded(tmp_path / "a", net()), recorded(tmp_path / "b", other))

    assert found.first_divergence is not None
    assert found.first_divergence.message.startswith("1: eps is 1e-05 in the baseline and 0.01 in the candidate. ")
    assert [one.path for one in found.findings][:2] == ["1", "0"]
