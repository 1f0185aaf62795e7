"""`GradComparator`: the similarity of two monitored trainings, and where the rule is broken."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from torch import nn

import traindiff
from tests.compat.msprobe.monitoring import monitored
from traindiff.compat.msprobe import GradComparator

pytest.importorskip("matplotlib")


def flipped(step: int, model: nn.Module) -> None:
    """From step 1 on, half of the gradient of one weight has the other sign."""
    if step >= 1:
        model.fc.weight.grad[:4].neg_()  # type: ignore[index,union-attr,operator]


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    where = tmp_path_factory.mktemp("dumps")
    monitored(where, name="first")
    monitored(where, name="second", edit=flipped)
    return where / "first", where / "second"


@pytest.fixture
def copies(dumps: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    for dump in dumps:
        shutil.copytree(dump, tmp_path / dump.name)
    return tmp_path / "first", tmp_path / "second"


def lines(path: Path) -> list[str]:
    content = path.read_bytes()
    assert content.startswith(b"\xef\xbb\xbf")
    return content.decode("utf-8-sig").split("\r\n")[:-1]


def test_the_step_and_the_parameter_that_break_the_rule_are_written(dumps: tuple[Path, Path], tmp_path: Path) -> None:
    found = GradComparator.compare_distributed(*dumps, tmp_path / "out")
    rank = tmp_path / "out" / "rank0"

    header, *rows = lines(rank / "broken_rule.csv")
    assert header == "step,param_name,similarity,before"
    assert [row.split(",")[:2] for row in rows] == [["1", "fc.weight"], ["1", "summary"]]
    assert [(one.step, one.parameter) for one in found[0].broken] == [(1, "fc.weight"), (1, None)]
    table = lines(rank / "similarities.csv")
    assert [line.partition(",")[0] for line in table] == ["step", "fc.weight", "fc.bias", "head.weight", "summary"]
    assert table[0] == "step,0,1,2"


def test_a_picture_of_each_parameter_of_all_and_the_heat_map_are_drawn(
    dumps: tuple[Path, Path], tmp_path: Path
) -> None:
    GradComparator.compare_distributed(*dumps, tmp_path / "out")
    pictures = {
        path.name: path.read_bytes() for path in (tmp_path / "out" / "rank0" / "similarities_picture").iterdir()
    }

    assert set(pictures) == {
        "fc.weight_similarities.png", "fc.bias_similarities.png", "head.weight_similarities.png",
        "summary_similarities.png", "heat_map.png",
    }  # fmt: skip
    assert all(content.startswith(b"\x89PNG") for content in pictures.values())
    assert len({*pictures.values()}) == 5


def test_a_parameter_of_one_side_is_named_and_the_rest_compared(copies: tuple[Path, Path], tmp_path: Path) -> None:
    for path in copies[1].rglob("fc.bias.npy"):
        path.unlink()
    with pytest.warns(traindiff.TraindiffWarning, match=r"rank0: only path1 has directions of fc\.bias\."):
        found = GradComparator.compare_distributed(*copies, tmp_path / "out")

    assert list(found[0].parameters) == ["fc.weight", "head.weight"]
    assert found[0].only == (("fc.bias",), ())


def test_a_parameter_that_lacks_a_step_has_an_empty_cell(copies: tuple[Path, Path], tmp_path: Path) -> None:
    (copies[0] / "rank0" / "step1" / "fc.bias.npy").unlink()
    GradComparator.compare_distributed(*copies, tmp_path / "out")

    (row,) = [line for line in lines(tmp_path / "out" / "rank0" / "similarities.csv") if line.startswith("fc.bias")]
    assert row == "fc.bias,1.0,,1.0"


def test_steps_of_one_side_are_named_and_the_rest_compared(tmp_path: Path) -> None:
    monitored(tmp_path, name="first", steps=3)
    monitored(tmp_path, name="second", steps=6)
    with pytest.warns(traindiff.TraindiffWarning, match=r"rank0: only path2 has step 3 and 2 more steps\."):
        found = GradComparator.compare_distributed(tmp_path / "first", tmp_path / "second", tmp_path / "out")
    assert found[0].steps == (0, 1, 2)


def test_another_shape_is_said_and_the_rest_compared(copies: tuple[Path, Path], tmp_path: Path) -> None:
    for path in copies[1].rglob("fc.bias.npy"):
        np.save(path, np.zeros(3, dtype=bool))
    with pytest.warns(traindiff.TraindiffWarning, match=r"fc\.bias was not compared: its shape is \[8\]"):
        found = GradComparator.compare_distributed(*copies, tmp_path / "out")
    assert "fc.bias" not in found[0].parameters


def test_wrapped_and_plain_models_compare(copies: tuple[Path, Path], tmp_path: Path) -> None:
    for path in [*copies[1].rglob("*.npy")]:
        path.rename(path.with_name(f"module.{path.name}"))
    for path in copies[1].rglob("*.csv"):
        content = path.read_bytes()
        for name in (b"fc.weight", b"fc.bias", b"head.weight"):
            content = content.replace(name, b"module." + name)
        path.write_bytes(content)
    pictures = tmp_path / "reversed" / "rank0" / "similarities_picture"

    found = GradComparator.compare_distributed(*copies, tmp_path / "out")
    GradComparator.compare_distributed(*reversed(copies), tmp_path / "reversed")

    assert (pictures / "module.fc.weight_similarities.png").exists()  # as the first directory calls it
    assert list(found[0].parameters) == ["fc.weight", "fc.bias", "head.weight"]


def test_steps_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("first", "second"):
        monitored(tmp_path, name=name, steps=12, param_list=["fc.bias"])
    found = GradComparator.compare_distributed(tmp_path / "first", tmp_path / "second", tmp_path / "out")
    assert found[0].steps == tuple(range(12))


def test_what_has_nothing_in_common_is_refused(tmp_path: Path) -> None:
    monitored(tmp_path, name="first", grad_level="L0")
    monitored(tmp_path, name="second", grad_level="L1")
    with pytest.raises(traindiff.ConfigError, match='"L1" or "L2"'):
        GradComparator.compare_distributed(tmp_path / "first", tmp_path / "second", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_of_two_dumps_without_directions_it_is_said_that_there_is_nothing_to_compare(tmp_path: Path) -> None:
    """Also where a parameter has one element, whose sign could be told from its extremes."""
    for name in ("first", "second"):
        monitored(tmp_path, name=name, grad_level="L0", model=nn.Sequential(nn.Linear(6, 1)))
        assert not list((tmp_path / name).rglob("*.npy"))
    with pytest.raises(traindiff.ConfigError, match="have no directions, so there is nothing to"):
        GradComparator.compare_distributed(tmp_path / "first", tmp_path / "second", tmp_path / "out")


def test_a_dump_without_directions_is_named(tmp_path: Path, dumps: tuple[Path, Path]) -> None:
    monitored(tmp_path, name="without", grad_level="L0")
    with pytest.raises(traindiff.ConfigError) as error:
        GradComparator.compare_distributed(dumps[0], tmp_path / "without", tmp_path / "out")
    assert f"{tmp_path / 'without'}\n    has no directions" in str(error.value)


def test_the_directories_of_one_rank_can_be_compared_by_themselves(dumps: tuple[Path, Path], tmp_path: Path) -> None:
    found = GradComparator.compare_distributed(*dumps, tmp_path / "all")
    alone = GradComparator.compare(dumps[0] / "rank0", dumps[1] / "rank0", tmp_path / "one")

    assert alone == found[0]
    for name in ("similarities.csv", "broken_rule.csv"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "all" / "rank0" / name).read_bytes()


def test_a_directory_that_is_not_there_is_named(dumps: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(traindiff.ConfigError, match=r"path2=.*none"):
        GradComparator.compare_distributed(dumps[0], tmp_path / "none", tmp_path / "out")
