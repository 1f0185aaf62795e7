"""How replicas are asked for, and what is said where that is wrong."""

from __future__ import annotations

import pytest

from tests.core.test_settings import problems_of
from traindiff.core.setting_checks import ReplicaSetting
from traindiff.core.settings import record_settings


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (None, None),
        ("ulp:1", ReplicaSetting(kind="ulp", seed=1)),
        ("ulp", ReplicaSetting(kind="ulp", seed=0)),
        ("reorder:20", ReplicaSetting(kind="reorder", seed=20)),
        ("float64", ReplicaSetting(kind="float64")),
    ],
)
def test_a_replica_is_read_from_its_name(written: str | None, expected: ReplicaSetting | None) -> None:
    assert record_settings(replica=written).replica == expected


@pytest.mark.parametrize("written", ["ulp:1", "reorder:0", "channel:2", "float64"])
def test_a_replica_is_written_as_it_is_read(written: str) -> None:
    assert record_settings(replica=written).to_json()["replica"] == written


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("ulps:1", ["  record(replica='ulps:1')", '"ulps" is not a replica.', 'Did you mean "ulp"? Known: channel,']),
        ("float32", ['Did you mean "float64"? ']),
        ("float64:1", ["'float64:1' has a seed, but nothing of a float64 replica is random."]),
        ("ulp:x", ["'ulp:x' is not a replica.", 'Write "ulp:1", "reorder:1", "channel:1" or "float64".']),
        ("ulp:-1", ["'ulp:-1' is not a replica."]),
        (1, ["1 is not a replica."]),
    ],
)  # fmt: skip
def test_a_wrong_replica_is_one_problem(written: object, message: list[str]) -> None:
    found = problems_of(replica=written)

    assert found.startswith("1 problem")
    for text in message:
        assert text in found


def test_a_replica_is_made_on_every_rank() -> None:
    assert "would perturb the training on some ranks only, and the ranks would drift apart." in problems_of(
        replica="ulp:1", ranks=[0]
    )
