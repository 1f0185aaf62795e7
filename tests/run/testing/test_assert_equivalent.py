"""`traindiff.testing.assert_equivalent`: passes what agrees, and says where the rest parts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.made_up import FC, record, same, scaled
from tests.run.verify.recipes import Change, mlp, one_thread
from traindiff.errors import ConfigError
from traindiff.testing import assert_equivalent

SCALED = scaled(FC, 0.01, step=1)


@pytest.fixture
def recordings(tmp_path: Path) -> tuple[str, str]:
    return str(record(tmp_path / "baseline", same)), str(record(tmp_path / "candidate", same))


def other_epsilon(model: Change) -> None:
    model[2].eps = 1e-3


def test_recordings_of_the_same_bits_pass(recordings: tuple[str, str]) -> None:
    assert assert_equivalent(*recordings, identical=True).verdict == "identical"


def test_a_recording_that_parts_fails_with_the_first_divergence(tmp_path: Path, recordings: tuple[str, str]) -> None:
    other = record(tmp_path / "other", SCALED)

    message = (
        r"(?s)^diverged: step 1, micro-step 0, forward, fc output\[0\]: The candidate's is 1\.01 x the baseline's\.\n.*"
        r"First divergence: step 1, .*candidate: .*other\nreport:    traindiff report .*other -o report\.html$"
    )
    with pytest.raises(AssertionError, match=message):
        assert_equivalent(recordings[0], other)


def test_a_tolerance_takes_the_place_of_floors(tmp_path: Path, recordings: tuple[str, str]) -> None:
    other = record(tmp_path / "other", SCALED)

    assert assert_equivalent(recordings[0], other, rtol=10.0, atol=10.0).verdict == "equivalent"


def test_identical_demands_the_same_bits(tmp_path: Path, recordings: tuple[str, str]) -> None:
    other = record(tmp_path / "other", SCALED)

    message = (
        r"(?s)^diverged.*First divergence: step 1, micro-step 0, forward, fc output\[0\].*Any bit that differs counts"
    )
    with pytest.raises(AssertionError, match=message):
        assert_equivalent(recordings[0], other, rtol=10.0, atol=10.0, identical=True)


def test_what_could_not_be_compared_whole_fails(tmp_path: Path, recordings: tuple[str, str]) -> None:
    shorter = record(tmp_path / "shorter", same, steps=2)

    with pytest.raises(AssertionError, match=r"^incomplete"):
        assert_equivalent(recordings[0], shorter)


def test_recipes_are_run_and_a_difference_is_pinned_down(tmp_path: Path) -> None:
    with one_thread(), pytest.raises(AssertionError, match=r"(?s)First divergence: step 0, .*2 output\[0\].*Pinned"):
        assert_equivalent(mlp(), mlp(other_epsilon), steps=2, output=tmp_path / "runs")
    assert (tmp_path / "runs" / "candidate" / "run.json").is_file()


def test_recipes_must_give_the_same_bits_if_that_is_demanded(tmp_path: Path) -> None:
    def other_sum(model: Change) -> None:
        model[0].register_forward_hook(lambda module, _, output: (output + 1.0) - 1.0)

    with one_thread():
        assert_equivalent(mlp(), mlp(other_sum), steps=1, replicas=("ulp:1",), rtol=1.0)
        with pytest.raises(AssertionError, match=r"(?s)First divergence: step 0, .*forward, 0 output.*Any bit that"):
            assert_equivalent(
                mlp(), mlp(other_sum), steps=1, replicas=("ulp:1",), rtol=1.0, identical=True, output=tmp_path / "runs"
            )


def test_recordings_of_recipes_that_agree_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    with one_thread():
        result = assert_equivalent(mlp(), mlp(), steps=2, replicas=("ulp:1",))

    assert result.verdict == "identical"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"output": "runs"}, "output is not a setting for two recordings"),
        ({"replicas": ()}, "replicas is not a setting for two recordings"),
    ],
)
def test_settings_of_recipes_are_refused_for_recordings(
    recordings: tuple[str, str], settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        assert_equivalent(*recordings, **settings)  # type: ignore[arg-type]

    assert message in " ".join(str(raised.value).split())


def test_a_recipe_is_not_compared_with_a_recording(recordings: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match="Give two recordings"):
        assert_equivalent(recordings[0], mlp())


def test_noise_is_refused_for_recipes(recordings: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match="noise"):
        assert_equivalent(mlp(), mlp(), noise=recordings[0])
