"""Samples of two batches are matched by what they hold."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tests.analyse.merge.test_step_table import part
from tests.made_up import random
from traindiff.analyse.align.exact import samples_message
from traindiff.analyse.merge.recorded_calls import Sample, samples_of
from traindiff.analyse.merge.site import Part
from traindiff.analyse.merge.step_table import step_table


def batch(*ranks: Sequence[int], micro_step: int = 0) -> list[Sample]:
    """Samples by rank; equal numbers are equal samples."""
    return [
        Sample(micro_step, rank, place, fingerprint)
        for rank, held in enumerate(ranks)
        for place, fingerprint in enumerate(held)
    ]


@pytest.mark.parametrize(
    ("candidate", "message"),
    [
        (batch([2, 0, 1, 3]), "holds the same samples in another order: the baseline's 2, 0, 1, 3."),
        (
            batch([0, 2], [1, 3]),
            "holds the same samples in another order: of the baseline's, rank 0 has 0, 2, rank 1 has 1, 3, in turn, as "
            'a distributed sampler gives them; record it with sample_order="interleaved".',
        ),
        (
            batch([0, 1], [2, 3]),
            "holds the same samples in another order: of the baseline's, rank 0 has 0, 1, rank 1 has 2, 3, one block "
            'each; record it with sample_order="blocks".',
        ),
        (
            [*batch([0], [2]), *batch([1], [3], micro_step=1)],
            "holds the same samples in another order: of the baseline's, rank 0 has 0, 1, rank 1 has 2, 3, one block "
            "each.",
        ),
        (batch([0, 1, 2, 3]), "holds the same samples in the same order, divided or padded otherwise."),
        (
            batch([0, 3], [2, 1]),
            "holds the same samples in another order: of the baseline's, rank 0 has 0, 3, rank 1 has 2, 1.",
        ),
        (
            batch([0, 9], [2, 8]),
            "holds other samples: 2 of its 4 samples are none of the baseline's, first number 1 of rank 0 in "
            "micro-step 0.",
        ),
        (
            batch([0, 1], [0, 1]),
            "holds other samples: 2 samples come more than once, first at number 0 of rank 0 in micro-step 0, and 2 of "
            "the baseline's 4 samples are missing, first number 2 of rank 0 in micro-step 0. Only what rank 1 holds "
            "differs.",
        ),
        (
            batch([0, 1, 2]),
            "holds other samples: 1 of the baseline's 4 samples is missing, first number 3 of rank 0 in micro-step 0.",
        ),
        ([], ""),
    ],
)
def test_what_is_said_of_the_samples(candidate: Sequence[Sample], message: str) -> None:
    assert samples_message(batch([0, 1, 2, 3]), candidate) == message


def sample(number: int, *, rank: int, place: int, term: int = 0, micro_step: int = 0) -> Part:
    site = ("batch", "sample", "", "input[0]")
    return part(random(6, seed=number), rank=rank, site=site, call=place, term=term, micro_step=micro_step)


def test_samples_are_those_of_all_ranks_and_micro_steps() -> None:
    parts = [
        sample(3, rank=1, place=0, term=1, micro_step=1),
        sample(0, rank=0, place=0),
        sample(0, rank=0, place=0, micro_step=1),
        sample(2, rank=1, place=0, term=1),
    ]

    found = samples_of(step_table(parts))["", "input[0]"]

    assert [(one.micro_step, one.rank, one.place) for one in found] == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]
    assert found[0].fingerprint == found[2].fingerprint
    assert len(np.unique([one.fingerprint for one in found])) == 3


def test_ranks_that_work_on_the_same_samples_have_them_once() -> None:
    parts = [sample(number, rank=rank, place=number) for number in range(2) for rank in range(2)]

    assert len(samples_of(step_table(parts))["", "input[0]"]) == 2
