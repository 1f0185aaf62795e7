"""What stages of a pipeline hand on, and parameters that one run ties and the other holds on two ranks."""

from __future__ import annotations

import numpy as np
import pytest

from tests.made_up import summary_of
from traindiff.analyse.align.side import sites_in_order
from traindiff.analyse.merge.parameters import group_numbers, group_paths
from traindiff.analyse.merge.site import Part
from traindiff.analyse.merge.step_table import step_table
from traindiff.analyse.rules import RunFacts
from traindiff.analyse.rules.ranks import BoundariesHold
from traindiff.core.observation import BOUNDARY, PLACE, Observation
from traindiff.core.shards import Shard

ROWS = 4


def part(
    values: np.ndarray, path: str, slot: str, *, rank: int, place: int, micro_step: int = 0, phase: str = "forward"
) -> Part:
    shard = Shard.of_batch(values.shape, first=micro_step * ROWS)
    seen = Observation(
        step=0, micro_step=micro_step, optimizer="optimizer", phase=phase,
        stage=BOUNDARY if path.startswith("stage[") else "", path=path, slot=slot, call=0, order=place * PLACE,
        dtype="float32", shard=shard,
    )  # fmt: skip
    return seen, rank, summary_of(values, shard)


def activations(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(ROWS, 32)).astype(np.float32)


def in_bfloat16(values: np.ndarray) -> np.ndarray:
    return ((values.view(np.uint32) + 0x8000) & 0xFFFF0000).view(np.float32)


def handed_on(received: dict[int, np.ndarray]) -> list[Part]:
    """Stage 0 sends three micro-batches to stage 1."""
    sent = [part(activations(n), "stage[0]", "sent[0]", rank=0, place=1, micro_step=n) for n in range(3)]
    return [
        *sent,
        *(part(x, "stage[1]", "received[0]", rank=1, place=2, micro_step=n) for n, x in received.items()),
        part(activations(9), "layer.2", "output[0]", rank=1, place=2),
    ]


def test_what_arrives_as_it_was_sent_is_no_finding() -> None:
    table = step_table(handed_on({number: activations(number) for number in range(3)}))

    assert not list(BoundariesHold(RunFacts()).step(table, step=0))
    assert [key.path for key in sites_in_order(table)] == ["layer.2"]


@pytest.mark.parametrize(
    ("received", "message"),
    [
        (activations(1) * np.float32(1.5), "it differs by 0.52 of its size."),
        (activations(0), "what it sent in micro-step 0. Was a buffer read before it was filled?"),
        (np.float32(1.001) * activations(1), "it differs by 0.001 of its size."),
        (in_bfloat16(activations(1)), "as rounding to bfloat16 would make it."),
    ],
)
def test_what_arrives_as_something_else_is_described(received: np.ndarray, message: str) -> None:
    table = step_table(handed_on({0: activations(0), 1: received, 2: activations(2)}))

    (finding,) = BoundariesHold(RunFacts()).step(table, step=3)

    assert (finding.kind, finding.step, finding.micro_step, finding.rank, finding.path, finding.slot) == (
        "boundary", 3, 1, 1, "layer.2", "received[0]",
    )  # fmt: skip
    assert finding.message.startswith(
        "Stage 1 (rank 1) received something else than stage 0 (rank 0) sent, in micro-step 1 of 3: "
    )
    assert finding.message.endswith(message)


def test_gradients_are_handed_back_to_the_stage_before() -> None:
    def handed_back(slot: str, stage: int, n: int, scale: float = 1.0) -> Part:
        values = activations(n) * np.float32(scale)
        path, place = f"stage[{stage}]", 4 - stage
        return part(values, path, slot, rank=stage, place=place, micro_step=n, phase="backward")

    table = step_table([
        *(handed_back("received[0]", 1, n) for n in range(2)),
        handed_back("sent[0]", 0, 0),
        handed_back("sent[0]", 0, 1, 3.0),
    ])  # fmt: skip

    (finding,) = BoundariesHold(RunFacts()).step(table, step=0)

    assert finding.message == (
        "Stage 0 (rank 0) received something else than the gradient that stage 1 (rank 1) sent, in micro-step 1 of 2: "
        "it differs by 2.1 of its size."
    )
    assert (finding.rank, finding.micro_step, finding.evidence) == (0, 1, {"stage": 0, "micro_steps": [1]})


def test_what_was_not_recorded_on_one_side_is_unknown() -> None:
    table = step_table(handed_on({}))

    assert not list(BoundariesHold(RunFacts()).step(table, step=0))


def test_a_module_in_parts_returns_what_its_last_part_returns() -> None:
    """A container of which each stage has some layers; gradients go the other way."""
    forward = [part(activations(n), "layers", "output[0]", rank=n, place=1 + n) for n in range(3)]
    backward = [part(activations(n), "layers", "output[0]", rank=n, place=6 - n, phase="backward") for n in range(3)]

    for entry in step_table([*forward, *backward]).values():
        assert [held.rank for held in entry.parts] == [2]
        assert entry.summary["fingerprint"] == forward[2][2]["fingerprint"]


class Groups:
    """As much of a recording as tells the groups of its ranks."""

    def __init__(self, *counts: int, stages: int = 9) -> None:
        self.ranks = tuple(range(len(counts)))
        self._counts = counts
        self._stages = stages

    def rank_content(self, rank: int) -> dict:
        groups = [[f"rank{rank}.{number}"] for number in range(self._counts[rank])]
        name = "adam" if self._counts[rank] < 9 else "sgd"
        return {"pipeline": {"stages": [rank % self._stages]}, "optimizers": [{"name": name, "groups": groups}]}


def test_groups_are_the_same_ones_where_all_ranks_have_as_many() -> None:
    assert group_numbers(Groups(2, 2)) == {}  # type: ignore[arg-type]


def test_groups_are_each_stages_own_where_ranks_have_not_as_many() -> None:
    numbers = group_numbers(Groups(2, 1, 2))  # type: ignore[arg-type]

    assert numbers == {0: {("adam", 0): 0, ("adam", 1): 1}, 1: {("adam", 0): 2}, 2: {("adam", 0): 3, ("adam", 1): 4}}
    assert group_paths(numbers)[1] == {"adam.groups[0]": "adam.groups[2]"}


def test_ranks_with_the_same_stage_have_the_same_groups() -> None:
    numbers = group_numbers(Groups(2, 1, 2, 1, stages=2))  # type: ignore[arg-type]

    assert numbers[0] == numbers[2] == {("adam", 0): 0, ("adam", 1): 1}
    assert numbers[1] == numbers[3] == {("adam", 0): 2}


def test_groups_of_each_optimizer_are_numbered_by_themselves() -> None:
    numbers = group_numbers(Groups(9, 1, 2))  # type: ignore[arg-type]

    assert numbers[1] == {("adam", 0): 0}
    assert numbers[2] == {("adam", 0): 1, ("adam", 1): 2}
