"""What `compare`, `check` and `show` say of settings and recordings that they cannot use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import traindiff
from tests.made_up import Seen, Step, at, record
from tests.messages.provoking import Chapter
from traindiff.present.data.observations import parse_filter

chapter = Chapter("traindiff.compare and traindiff.check", [])
situation = chapter.situation


def compared(here: Path, **settings: Any) -> None:
    """Compare two runs that are there."""
    baseline, candidate = (record(here / name) for name in ("baseline", "candidate"))
    traindiff.compare(baseline, candidate, **settings)


@situation("steps that are none")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    compared(here, steps="a-b")


@situation("no step")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    compared(here, steps=[])


@situation("rtol and atol that cannot be")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    compared(here, rtol=-1.0, atol=float("nan"))


@situation("renames that are none")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    compared(here, rename=["layers", "=h", "(=h", "h=\\3"])


@situation("a rename that makes two paths one")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    compared(here, rename={"head|fc": "layer"})


@situation("several optimizers of one parameter, and other steps")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    def trained(name: str, every: int) -> Path:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2)
        optimizers = [torch.optim.SGD(model.parameters(), lr=rate) for rate in (0.1, 0.2)]
        with traindiff.record(here / name, model, optimizers, every=every):
            for step in range(4):
                model.zero_grad()
                model(torch.ones(3, 4)).square().mean().backward()
                optimizers[step % 2].step()
        return here / name

    return "\n".join(traindiff.compare(trained("whole", 1), trained("part", 2)).notes)


@situation("a critic that steps twice and is clipped, recorded from the beginning, and from its middle on")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    def trained(name: str, begin: int, *, first: str = "critic", every: int = 1) -> Path:
        torch.manual_seed(0)
        models = {"critic": torch.nn.Linear(4, 1), "actor": torch.nn.Linear(4, 4)}
        optimizers = {one: torch.optim.SGD(model.parameters(), lr=0.1) for one, model in models.items()}
        for turn in range(4):
            if turn == begin:
                ordered = sorted(optimizers.items(), key=lambda one: one[0] != first)
                session = traindiff.record(here / name, models, [one for _, one in ordered], every=every)
            for one in ("critic", "critic", "actor"):
                models["critic"](models["actor"](torch.randn(3, 4))).mean().backward()
                optimizers[one].step()
                torch.nn.ModuleDict(models).zero_grad()
                with torch.no_grad():
                    models["critic"].weight.clamp_(-0.1, 0.1)
        session.close()
        return here / name

    passes = traindiff.compare(trained("whole", 0), trained("resumed", 2)).notes
    updates = traindiff.compare(trained("each", 0, first="actor"), trained("second", 0, first="actor", every=2)).notes
    return "\n".join((*passes, *updates))


@situation("noise of another training")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    noise = record(here / "noise", at(("batch", "", "", "input[0]"), lambda values: values + 1))
    compared(here, noise=noise)


@situation("noise of another model")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    def other(step: int) -> Step:
        return {("forward", "", "other", "output[0]"): Seen(values=np.ones((3, 4), np.float32))}

    compared(here, noise=record(here / "noise", build=other))


@situation("the candidate as noise")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    compared(here, noise=here / "candidate")


@situation("the baseline as noise")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    compared(here, noise=here / "baseline")


@situation("check: rules that there are not")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    traindiff.check(str(record(here / "run")), rules="non-finit,spike", skip="spikes")


@situation("check: rules that are all skipped")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    traindiff.check(str(record(here / "run")), rules="spike", skip="spike")


@situation("check: rules that are none")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    traindiff.check(str(record(here / "run")), rules=3)  # type: ignore[arg-type]


@situation("check: limits that there are not, and values that are none")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    limits: Any = {
        "spikes": {"deviations": 20},
        "spike": {"deviation": 20, "norm_factor": "ten"},
        "non-finite": {"least_steps": 3},
        "underflow": 0.5,
    }
    traindiff.check(str(record(here / "run")), config=limits)


@situation("check: a file of limits that is not there")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    traindiff.check(str(record(here / "run")), config="limits.toml")


@situation("check: a file of limits that no file is called")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    traindiff.check(str(record(here / "run")), config="limits\0.toml")


@situation("check: a file of limits that is not TOML")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    (here / "limits.toml").write_text("spike: 20\n")
    traindiff.check(str(record(here / "run")), config=str(here / "limits.toml"))


@situation("check: steps that are none")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    traindiff.check(str(record(here / "run")), steps="last")


@situation("show: phases that there are not")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    parse_filter("*", ("gradient", "params"), None, asked_by="show", consequence="nothing was done")
