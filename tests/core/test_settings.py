"""What users write wrong, and what they are told."""

from __future__ import annotations

import json
from inspect import signature
from typing import Any

import pytest

from traindiff.core.settings import (
    SETTINGS,
    CommonOptions,
    RecordOptions,
    RecordSettings,
    check_names,
    record_settings,
    takes_settings,
)
from traindiff.core.shards import shard
from traindiff.core.site import PHASES
from traindiff.core.tap_registry import OBSERVABLE
from traindiff.errors import ConfigError


def problems_of(**changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        record_settings(**changes)
    return str(caught.value)


def test_each_setting_has_a_written_form_and_a_checked_one() -> None:
    assert RecordOptions.__optional_keys__ == set(SETTINGS)
    assert CommonOptions.__optional_keys__ < RecordOptions.__optional_keys__


def test_settings_that_are_left_out_have_the_defaults_that_the_signature_shows() -> None:
    written = {name: setting.default for name, setting in SETTINGS.items()}

    assert record_settings() == record_settings(**written) == RecordSettings()


def test_a_signature_shows_the_settings_in_their_order() -> None:
    @takes_settings(CommonOptions)
    def record(path: str, **settings: Any) -> None: ...

    shown = signature(record).parameters

    assert list(shown) == ["path", *(name for name in SETTINGS if name in CommonOptions.__optional_keys__)]
    assert (shown["every"].default, shown["every"].annotation) == (1, int)
    assert shown["select"].default == "*"


def test_an_unknown_setting_is_refused_before_it_is_dropped() -> None:
    assert 'Did you mean "every"?' in problems_of(evry=3)


def test_all_phases_are_observed_unless_some_are_named() -> None:
    assert record_settings().observe == {*PHASES, "replay", "samples"}
    assert record_settings(observe="loss").observe == {"loss"}
    assert record_settings(observe=("grad", "grad.micro")).observe == {"grad", "grad.micro"}
    assert record_settings(observe=(phase for phase in ["grad"])).observe == {"grad"}


def test_settings_are_brought_into_one_form() -> None:
    assert record_settings(select="a.*").select == ("a.*",)
    assert record_settings(select=["a", "b"]).select == ("a", "b")
    assert record_settings(detail="signs").detail == {"summary", "signs"}
    assert record_settings(detail=["exponents", "tensors"]).detail == {"summary", "exponents", "tensors"}
    assert record_settings(ranks=2).ranks == (2,)
    assert record_settings(ranks=[3, 1, 3]).ranks == (1, 3)
    assert record_settings(ranks=range(2)).ranks == (0, 1)
    assert record_settings(batch_axis=1).batch_axis == {"*": 1}
    assert record_settings(batch_axis=0).batch_axis == {"*": 0}
    assert record_settings(batch_axis={"a.*": None, "b": -1}).batch_axis == {"a.*": None, "b": -1}


@pytest.mark.parametrize(
    ("changes", "recorded"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"every": 3}, [0, 3, 6]),
        ({"steps": "1-4"}, [1, 2, 3, 4]),
        ({"steps": "1-6", "every": 2}, [2, 4, 6]),
    ],
)
def test_a_step_is_recorded_if_both_steps_and_every_say_so(changes: dict[str, Any], recorded: list[int]) -> None:
    chosen = record_settings(**changes)

    assert [step for step in range(8) if chosen.records(step)] == recorded


def test_settings_are_written_as_json_in_one_order() -> None:
    shards = [shard("*.core", dim=1, axis="tp")]
    chosen = record_settings(
        observe=["param", "batch"], steps="0-3", ranks=[0], batch_axis={"a": None}, every=2, shards=shards
    )

    assert json.loads(json.dumps(chosen.to_json())) == {
        "observe": ["batch", "param"], "select": ["*"], "detail": ["summary"], "steps": "0-3", "ranks": [0],
        "bounds": [], "every": 2, "batch_axis": {"a": None}, "evaluation": False, "replica": None,
        "sample_order": "blocks", "shards": ['shard("*.core", dim=1, axis="tp")'], "operators": [],
    }  # fmt: skip


def test_every_problem_is_listed_at_once_with_near_misses() -> None:
    assert problems_of(
        observe=["gradient", "forward", "weights"], detail="sumary", steps="9-1", ranks=-1, every=0, batch_axis="1"
    ) == (
        "7 problems in record(...); nothing was attached to the model.\n"
        "\n"
        "  record(observe=...)\n"
        '    "gradient" is not something to observe.\n'
        '    Did you mean "grad"? '
        f"Known: {', '.join(sorted(OBSERVABLE))}.\n"
        "\n"
        "  record(observe=...)\n"
        '    "weights" is not something to observe.\n'
        f"    Known: {', '.join(sorted(OBSERVABLE))}.\n"
        "\n"
        "  record(detail=...)\n"
        '    "sumary" is not a detail.\n'
        '    Did you mean "summary"? Known: exponents, md5, signs, summary, tensors.\n'
        "\n"
        "  record(steps=...)\n"
        "    the range '9-1' ends before it begins.\n"
        '    Write steps like "0-9,20,30-", counted from 0, or leave it out for all of them.\n'
        "\n"
        "  record(ranks=-1)\n"
        "    must be a rank, or a list of ranks, counted from 0.\n"
        "    Write ranks=[0, 1], or leave it out to record all of them.\n"
        "\n"
        "  record(every=0)\n"
        "    must be a whole number of steps, at least 1.\n"
        "    Write every=1 to record every step, or leave it out.\n"
        "\n"
        "  record(batch_axis='1')\n"
        "    must be an axis, or axes by pattern over module paths.\n"
        '    Write batch_axis=1, or batch_axis={"encoder.*": 1, "rotary": None}.'
    )


def test_observing_nothing_is_a_problem() -> None:
    assert problems_of(observe=[]) == (
        "1 problem in record(...); nothing was attached to the model.\n"
        "\n"
        "  record(observe=...)\n"
        "    is empty: nothing would be recorded.\n"
        f"    Name some of: {', '.join(OBSERVABLE)}."
    )


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"observe": 3}, "record(observe=...)"),
        ({"observe": "activations"}, "record(observe=...)"),
        ({"select": 3}, "record(select=3)"),
        ({"select": ["a", None]}, "record(select=['a', None])"),
        ({"detail": None}, "record(detail=...)"),
        ({"every": -2}, "record(every=-2)"),
        ({"every": 1.5}, "record(every=1.5)"),
        ({"every": "2"}, "record(every='2')"),
        ({"every": True}, "record(every=True)"),
        ({"steps": "x"}, "record(steps=...)"),
        ({"steps": 1.5}, "record(steps=...)"),
        ({"ranks": "0"}, "record(ranks='0')"),
        ({"ranks": [0, -1]}, "record(ranks=[0, -1])"),
        ({"ranks": [True]}, "record(ranks=[True])"),
        ({"ranks": 1.0}, "record(ranks=1.0)"),
        ({"batch_axis": 1.0}, "record(batch_axis=1.0)"),
        ({"batch_axis": True}, "record(batch_axis=True)"),
        ({"batch_axis": {"a": "1"}}, "record(batch_axis={'a': '1'})"),
        ({"batch_axis": [1]}, "record(batch_axis=[1])"),
    ],
)
def test_each_wrong_setting_is_one_problem_that_names_it(changes: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        record_settings(**changes)

    assert [problem.where for problem in caught.value.problems] == [where]


def test_flags_are_true_or_false() -> None:
    assert "record(evaluation='yes')\n    must be True or False." in problems_of(evaluation="yes")
    assert "record(strict=1)" in problems_of(strict=1)


def test_who_writes_start_step_and_end_step_is_told_what_says_the_same() -> None:
    with pytest.raises(ConfigError) as caught:
        check_names(["start_step", "end_step"], known=["steps", "every"])

    assert str(caught.value).count("steps=range(10, 20), which ends before 20") == 2
