"""The configuration file: everything that is wrong with it is said at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import traindiff
from tests.compat.msprobe.monitoring import configuration
from traindiff.compat.msprobe.configuration import read_configuration


def test_the_configuration_of_the_guide_is_read_as_it_says(tmp_path: Path) -> None:
    content = """{"task": "grad_probe", "dump_path": "./dump_path", "rank": [], "step": [],
     "grad_probe": {"grad_level": "L1", "param_list": [], "bounds": [-1, 0, 1]}}"""
    (tmp_path / "config.json").write_text(content)
    found = read_configuration(tmp_path / "config.json")

    assert (found.dump_path, found.ranks, found.steps, found.level) == ("./dump_path", None, None, "L1")
    assert (found.parameters, found.bounds, found.overwrite) == ((), (-1, 0, 1), False)


def test_what_is_left_out_has_the_defaults_of_the_guide(tmp_path: Path) -> None:
    found = read_configuration(configuration(tmp_path))
    assert (found.level, found.bounds, found.digest) == ("L1", (-1, 0, 1), "md5")


def test_numbers_and_ranges_are_taken_together(tmp_path: Path) -> None:
    found = read_configuration(configuration(tmp_path, rank=[3, "0-1"], step=[9, 0, "4-6", 5]))
    assert found.ranks == (range(3, 4), range(2))
    assert found.steps == "9-9,0-0,4-6,5-5"


def test_a_range_may_have_more_numbers_than_memory(tmp_path: Path) -> None:
    found = read_configuration(configuration(tmp_path, rank=["0-99999999999"], step=["7-99999999999"]))
    assert found.steps == "7-99999999999"
    assert found.ranks == (range(100_000_000_000),)


def test_a_file_that_is_nested_without_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(traindiff.ConfigError, match="is not JSON"):
        read_configuration(tmp_path / "config.json")


def test_a_path_that_no_system_takes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(traindiff.ConfigError, match="not a path"):
        read_configuration(configuration(tmp_path, dump_path="a\0b"))


def test_sections_of_other_tasks_are_let_alone(tmp_path: Path) -> None:
    read_configuration(configuration(tmp_path, level="L1", statistics={"list": []}, enable_dataloader=False))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dump_pth": "x"}, 'Did you mean "dump_path"?'),
        ({"param_lst": ["x"]}, '"param_lst" is not an entry'),
        ({"task": "statistics"}, 'Write "task": "grad_probe".'),
        ({"dump_path": ""}, '"dump_path"'),
        ({"grad_probe": {"grad_levle": "L2"}}, 'Did you mean "grad_level"?'),
        ({"grad_probe": []}, "must be an object"),
        ({"grad_level": "L3"}, '"L3" is not a level'),
        ({"hash": "crc32"}, '"crc32" is not a hash'),
        ({"param_list": "fc.weight"}, '"param_list"'),
        ({"bounds": [1, 0]}, 'Write "bounds": [0, 1].'),
        ({"bounds": ["a"]}, "must be a list of finite numbers"),
        ({"bounds": [2**63]}, "beyond the range of int64"),
        ({"rank": 0}, '"rank"'),
        ({"rank": [-1]}, "not a list of numbers from 0"),
        ({"step": ["6-4"]}, '"step"'),
        ({"step": ["1,2"]}, '"step"'),
        ({"step": [True]}, '"step"'),
        ({"overwrite": "yes"}, 'Write "overwrite": true.'),
    ],
)
def test_what_is_wrong_is_said_with_what_to_write_instead(tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(traindiff.ConfigError) as error:
        read_configuration(configuration(tmp_path, **wrong))
    assert message in str(error.value)
    assert len(error.value.problems) == 1


def test_all_problems_are_listed_together(tmp_path: Path) -> None:
    with pytest.raises(traindiff.ConfigError) as error:
        read_configuration(configuration(tmp_path, task="tensor", rank="all", grad_level="L9", bounds=[0, 0]))
    assert len(error.value.problems) == 4


@pytest.mark.parametrize("content", [None, "", "[]", "{"])
def test_a_file_that_is_none_is_named(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(traindiff.ConfigError, match=r"config\.json"):
        read_configuration(path)


def test_a_byte_order_mark_is_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"task": "grad_probe", "dump_path": "x"}), encoding="utf-8-sig")
    assert read_configuration(path).dump_path == "x"
