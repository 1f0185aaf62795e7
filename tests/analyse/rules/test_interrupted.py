"""Ranks that an error ends in the middle of a forward pass, while others left nothing of the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from tests.made_up import summary_of
from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.site import Part
from traindiff.analyse.merge.step_table import step_table
from traindiff.analyse.rules import RunFacts
from traindiff.analyse.rules.interrupted import ForwardPassesEnd
from traindiff.core.observation import Observation
from traindiff.core.shards import Shard

ERROR = {0: "RuntimeError: Connection reset by peer"}
PATHS = ("embedding", "experts.gate", "experts", "head", "")


def part(path: str, order: int, *, rank: int, phase: str = "forward", step: int = 0) -> Part:
    values = np.ones((4, 3), np.float32)
    shard = Shard.whole(values.shape) if phase == "param" else Shard.of_batch(values.shape, first=4 * rank)
    seen = Observation(
        step=step, micro_step=0, optimizer="optimizer", phase=phase, stage="", path=path,
        slot="value" if phase == "param" else "output[0]", call=0, order=order, dtype="float32", shard=shard,
    )  # fmt: skip
    return seen, rank, summary_of(values, shard)


def judged(
    last: Mapping[int, Sequence[str]], *, errors: Mapping[int, str] = ERROR, step: int = 1, parameters: bool = False
) -> list[Finding]:
    """Findings about a step after a whole one of two ranks, given the modules that each rank had returned from."""
    rule = ForwardPassesEnd(RunFacts(errors=errors))
    whole = [part(path, order, rank=rank) for rank in (0, 1) for order, path in enumerate(PATHS)]
    whole += [part("head.weight", 9, rank=rank, phase="param") for rank in (0, 1)]
    assert list(rule.step(step_table(whole), step=0)) == []
    parts = [part(path, order, rank=rank, step=1) for rank, paths in last.items() for order, path in enumerate(paths)]
    parts += [part("head.weight", 9, rank=rank, phase="param", step=1) for rank in last if parameters]
    return list(rule.step(step_table(parts), step=step))


def test_the_module_that_did_not_return_is_named() -> None:
    (found,) = judged({0: PATHS[:2]})

    assert (found.step, found.rank, found.phase, found.path, found.slot) == (1, 0, "forward", "experts", "output[0]")
    assert found.message == (
        "An error ended rank 0 in the forward pass of step 1, after experts.gate had returned and before experts did, "
        "which came next in step 0. Rank 1 left nothing of this step. Do ranks wait for each other in experts, with "
        "tensors of other lengths?"
    )


@pytest.mark.parametrize(
    ("last", "settings"),
    [
        ({0: PATHS[:2]}, {"errors": {}}),  # a rank that a user ends, or that only looked at a part of the model
        ({0: PATHS}, {}),  # the forward pass has ended
        ({0: PATHS[:2], 1: PATHS[:2]}, {}),  # all ranks came so far
        ({0: PATHS[:2]}, {"step": 3}),  # what lies between is not known
        ({0: ["other"]}, {}),  # it ran something else
        ({0: PATHS[:2]}, {"parameters": True}),  # the step has ended
        ({0: []}, {}),
    ],
)
def test_other_ends_are_no_finding(last: Mapping[int, Sequence[str]], settings: dict[str, object]) -> None:
    assert judged(last, **settings) == []  # type: ignore[arg-type]
