"""What is written is what is read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.storage.samples import RUN, content, observation, read, step, summaries, write
from traindiff.core.observation import Observation
from traindiff.core.shards import Shard
from traindiff.core.site import PHASES, printable
from traindiff.core.summary import SUMMARY, empty
from traindiff.storage import RecordingWriter, open_recording
from traindiff.storage.columns import Columns, to_batch
from traindiff.storage.schema import NOTHING_STORED, SCHEMA, Stored, from_batch

boxes = st.lists(st.tuples(st.integers(0, 2**10), st.integers(0, 999), st.integers(0, 99)), max_size=4).map(
    lambda axes: Shard(
        shape=tuple(length for length, _, _ in axes),
        global_shape=tuple(sum(axis) for axis in axes),
        offset=tuple(before for _, before, _ in axes),
    )
)
ranges = st.tuples(st.integers(0, 2**20), st.integers(0, 2**20)).map(
    lambda ends: Shard(shape=(min(ends),), global_shape=(2**11, 2**10), offset=(max(ends),))
)
batches = st.tuples(st.integers(0, 2**40), st.integers(0, 9), st.integers(1, 4), st.integers(4, 9)).map(
    lambda one: Shard.of_batch((one[1] * one[2], 8), first=one[0], spacing=one[2:])
)
texts = st.text().map(printable)
observations = st.builds(
    Observation,
    step=st.integers(0, 2**62), micro_step=st.integers(0, 2**31 - 1), optimizer=texts, phase=st.sampled_from(PHASES),
    stage=texts, path=texts, slot=texts, call=st.integers(0, 2**31 - 1),
    order=st.integers(0, 2**62), dtype=texts,
    shard=boxes | ranges | batches,
    merge=st.sampled_from(["shard", "sum", "mean"]), weight=st.floats(allow_nan=False),
    factor=st.floats(min_value=0, exclude_min=True, allow_nan=False, allow_infinity=False), unobserved=texts,
    term=st.integers(0, 2**31 - 1), scaled=st.booleans(), evaluation=st.integers(0, 2**31 - 1),
)  # fmt: skip


@given(st.lists(observations, min_size=1, max_size=4))
def test_a_batch_gives_back_its_observations_and_summaries(seen: list[Observation]) -> None:
    seen = [one._replace(step=seen[0].step, optimizer=seen[0].optimizer) for one in seen]
    numbers = summaries(len(seen))
    numbers["count"] = np.minimum(1, [one.shard.size for one in seen])
    numbers["negative"] = numbers["subnormal"] = 0

    batch = to_batch(seen, numbers)
    actual, actual_numbers, _ = from_batch(batch)

    assert batch.schema.equals(SCHEMA)
    assert actual == seen
    assert actual_numbers.dtype == SUMMARY
    assert actual_numbers.tobytes() == numbers.tobytes()


def test_the_columns_are_those_of_format_version_1() -> None:
    golden = (Path(__file__).parent / "golden" / "schema.txt").read_text()

    actual = [f"{field.name}: {field.type}{'' if field.nullable else ' not null'}" for field in SCHEMA]

    assert "\n".join(actual) + "\n" == golden


def test_a_closed_recording_reads_back_in_full(tmp_path: Path) -> None:
    write(tmp_path / "run", steps=3)

    recording = open_recording(str(tmp_path / "run"))

    assert content(recording) == [("optimizer", n, step(n)[0], step(n)[1].tobytes()) for n in range(3)]
    assert [part.rank for part in recording.steps(0)] == [0, 0, 0]
    assert recording.ranks == (0,)
    assert recording.world_size == 1
    assert recording.missing_ranks == ()
    assert recording.run == {**RUN, "format": "traindiff-recording", "version": 1}
    assert recording.rank_content(0) == {"model": "Sample", "parameters": {}}
    assert recording.status(0).ending == "closed"
    assert recording.status(0).message == ""


def test_a_recording_without_steps_reads_back_empty(tmp_path: Path) -> None:
    write(tmp_path / "run", steps=0)

    assert read(tmp_path / "run") == []
    assert open_recording(str(tmp_path / "run")).status(0).ending == "closed"


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("close", [True, False])
def test_plain_arrow_reads_the_stream(tmp_path: Path, steps: int, close: bool) -> None:
    writer = write(tmp_path / "run", steps=steps, close=close)

    with (tmp_path / "run/rank-00000/observations.arrows").open("rb") as file:
        stream = pa.ipc.open_stream(file)
        assert stream.schema.equals(SCHEMA)
        batches = list(stream)

    assert [from_batch(batch)[0] for batch in batches] == [step(number)[0] for number in range(steps)]
    writer.close()


def test_each_step_can_be_read_as_soon_as_it_is_written(tmp_path: Path) -> None:
    writer = write(tmp_path / "run", steps=0, close=False)
    for number in range(3):
        writer.write_step(*step(number))
        assert [part.step for part in read(tmp_path / "run")] == list(range(number + 1))
        assert open_recording(str(tmp_path / "run")).status(0).ending == "unclosed"
    writer.close()


def test_a_scalar_that_was_logged_late_is_part_of_its_step(tmp_path: Path) -> None:
    writer = write(tmp_path / "run", steps=1, close=False)
    late = observation(step=0, phase="loss", path="loss", slot="logged", order=99)
    writer.write_step([late], summaries(1, seed=5))
    writer.write_step(*step(1))
    writer.close()

    first, second = read(tmp_path / "run")

    assert first.observations == [*step(0)[0], late]
    assert first.summaries.tobytes() == step(0)[1].tobytes() + summaries(1, seed=5).tobytes()
    assert second.step == 1


def test_a_late_scalar_finds_its_step_across_steps_of_another_optimizer(tmp_path: Path) -> None:
    writer = write(tmp_path / "run", steps=0, close=False)
    late = [observation(step=n, optimizer="first", phase="loss", path="loss", slot="logged") for n in range(2)]
    for number in range(2):
        writer.write_step(*step(number, optimizer="first"))
        writer.write_step(*step(number, optimizer="second"))
        writer.write_step([late[number]], summaries(1))
    writer.close()

    parts = read(tmp_path / "run")

    assert [(part.optimizer, part.step) for part in parts] == [
        ("first", 0), ("second", 0), ("first", 1), ("second", 1),
    ]  # fmt: skip
    assert [part.observations[-1] for part in parts if part.optimizer == "first"] == late


def test_the_rank_file_may_be_replaced_while_the_run_goes_on(tmp_path: Path) -> None:
    writer = write(tmp_path / "run", close=False)

    writer.write_rank({"model": "Found"})

    assert open_recording(str(tmp_path / "run")).rank_content(0) == {"model": "Found"}
    writer.close()


def test_closing_twice_is_closing_once(tmp_path: Path) -> None:
    writer = write(tmp_path / "run")
    before = (tmp_path / "run/rank-00000/observations.arrows").read_bytes()

    writer.close()

    assert (tmp_path / "run/rank-00000/observations.arrows").read_bytes() == before


def test_a_url_works_wherever_a_path_does() -> None:
    url = "memory://traindiff-round-trip/run"
    write(url, steps=2)

    assert content(url) == [("optimizer", n, step(n)[0], step(n)[1].tobytes()) for n in range(2)]
    assert open_recording(url).status(0).ending == "closed"
    assert open_recording(url).rank_content(0)["model"] == "Sample"

    write(url, steps=1, overwrite=True)
    assert len(read(url)) == 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(st.lists(st.integers(0, 4), max_size=5))
def test_steps_of_any_size_follow_each_other(tmp_path: Path, sizes: list[int]) -> None:
    writer = RecordingWriter(str(tmp_path / "run"), run=RUN, overwrite=True)
    for number, size in enumerate(sizes):
        writer.write_step(*step(number, sites=size + 1))
    writer.close()

    assert [len(part.observations) for part in read(tmp_path / "run")] == [size + 1 for size in sizes]


def test_a_batch_does_not_depend_on_the_batches_before_it() -> None:
    columns, first = Columns(), step(0)[0]
    other = [one._replace(path=f"{one.path}.other", shard=Shard.whole((3, 1)), scaled=True) for one in first]
    for number, seen in enumerate([first, first, other, first, first[:1], first]):
        later = [one._replace(step=number) for one in seen]
        stored = Stored(exponents={0: np.arange(320)}) if number % 2 else NOTHING_STORED
        made = columns.batch(later, empty(len(later)), stored)
        assert made.equals(to_batch(later, empty(len(later)), stored))
        made.validate(full=True)
