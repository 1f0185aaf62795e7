"""Stages of gradients that a run did not need to record apart are those that came next."""

from __future__ import annotations

import numpy as np
import pytest

from tests.analyse.merge.test_step_table import part
from tests.made_up import Seen, observed, random
from traindiff.analyse.align.side import with_gradient_stages
from traindiff.analyse.merge.site import MergedSite, Part, SiteKey
from traindiff.analyse.merge.step_table import step_table
from traindiff.core.observation import ALL_GRADIENTS

FINAL = random(4, 6, seed=0)
REDUCED = random(4, 6, seed=1)


def gradient(stage: str, values: np.ndarray = FINAL, order: int = 7) -> Part:
    return part(values, site=("grad", stage, "fc.weight", "grad"), order=order)


def loss_scale() -> Part:
    seen, summary = observed(("loss", "", "loss_scale", "value"), Seen(values=np.array(8.0)), step=0, order=0)
    return seen, 0, summary


def clip() -> list[Part]:
    return [
        part(np.array(value), site=("grad", "clipped", ALL_GRADIENTS, slot), order=6)
        for slot, value in (("norm", 2.0), ("max_norm", 0.5))
    ]


OTHER = step_table([gradient("reduced", REDUCED), gradient("unscaled", REDUCED), gradient("micro"), gradient("")])


def filled(*parts: Part, asked: bool = False) -> dict[str, MergedSite]:
    table = with_gradient_stages(step_table(parts), OTHER, asked=asked)
    return {key.stage: entry for key, entry in table.items() if (key.phase, key.slot) == ("grad", "grad")}


def test_what_nothing_has_changed_is_what_the_optimizer_saw() -> None:
    found = filled(gradient(""))

    assert found.keys() == {"", "reduced", "unscaled"}
    for stage in ("reduced", "unscaled"):
        assert found[stage].summary == found[""].summary
        assert found[stage].key == SiteKey("grad", stage, "fc.weight", "grad")
        assert found[stage].order == found[""].order - 1


@pytest.mark.parametrize("between", [[loss_scale()], clip()], ids=["a loss scale", "clipping"])
def test_what_was_changed_without_recording_it_is_not_known(between: list[Part]) -> None:
    assert filled(gradient(""), *between).keys() == {""}
    assert filled(gradient(""), *between, asked=True).keys() == {"", "reduced", "unscaled"}


def test_without_a_loss_scale_gradients_are_unscaled_as_they_were_reduced() -> None:
    reduced = gradient("reduced", REDUCED, order=5)

    plain = filled(reduced, gradient(""), asked=True)
    scaled = filled(reduced, gradient(""), loss_scale(), asked=True)

    assert plain["unscaled"].summary == plain["reduced"].summary
    assert scaled["unscaled"].summary == scaled[""].summary


def test_without_gradients_there_are_no_stages_of_them() -> None:
    assert filled(loss_scale()) == {}
    assert filled(part(FINAL, site=("grad", "", "other.weight", "grad"))).keys() == {""}
