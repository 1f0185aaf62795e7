"""Tensors and histograms beside the summaries: written before they are named, read as they were."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.storage.samples import RUN, observation, summaries
from traindiff.core.shards import Shard
from traindiff.core.summary import Detail, RawTensor
from traindiff.errors import CorruptRecordingError
from traindiff.storage import Recording, RecordingWriter, open_recording
from traindiff.storage.location import LONGEST, file_name
from traindiff.storage.tensor_files import dump, load

VALUES = np.array([[1.0, -2.5], [0.0, np.inf]], dtype=np.float32)


def raw(array: np.ndarray, dtype: str) -> RawTensor:
    return RawTensor(dtype=dtype, shape=array.shape, data=array.tobytes())


def write(path: Path, *, site: str = "a/../b") -> Recording:
    """Two steps of two observations; the second one of each has details."""
    writer = RecordingWriter(str(path), run=RUN)
    for step in range(2):
        shard = Shard.whole(VALUES.shape)
        seen = [observation(step=step), observation(step=step, path=site, slot="grad", dtype="float32", shard=shard)]
        tensors = {"value": raw(VALUES + step, "float32")}
        detail = Detail(exponents=np.eye(320, dtype=np.int64)[step], tensors=tensors)
        writer.write_step(seen, summaries(2), {1: detail})
    writer.close()
    return open_recording(str(path))


def test_tensors_and_exponents_come_back_with_their_observation(tmp_path: Path) -> None:
    recording = write(tmp_path / "run")

    for number, step in enumerate(recording.steps(0)):
        np.testing.assert_array_equal(recording.tensors(step, 1)["value"], VALUES + number)
        np.testing.assert_array_equal(step.stored.exponents[1], np.eye(320)[number])
        assert recording.tensors(step, 0) == {}
        assert 0 not in step.stored.exponents


def test_a_hostile_site_stays_inside_the_recording(tmp_path: Path) -> None:
    write(tmp_path / "run", site="../../outside")

    files = list(tmp_path.rglob("*.safetensors"))
    assert len(files) == 2
    assert all(path.is_relative_to(tmp_path / "run" / "rank-00000" / "tensors") for path in files)


def test_bfloat16_is_stored_as_such_and_read_as_float32(tmp_path: Path) -> None:
    bits = np.array([0x3F80, 0xC020, 0x7F80], dtype=np.uint16)  # 1, -2.5, inf
    writer = RecordingWriter(str(tmp_path / "run"), run=RUN)
    seen = observation(shard=Shard.whole(bits.shape))
    writer.write_step([seen], summaries(1), {0: Detail(tensors={"value": raw(bits, "bfloat16")})})
    writer.close()

    recording = open_recording(str(tmp_path / "run"))
    (step,) = recording.steps(0)
    np.testing.assert_array_equal(recording.tensors(step, 0)["value"], np.float32([1.0, -2.5, np.inf]))


def test_a_damaged_or_missing_tensor_file_is_named(tmp_path: Path) -> None:
    recording = write(tmp_path / "run")
    first, second = recording.steps(0)
    path = tmp_path / "run" / "rank-00000"
    (path / first.stored.files[1]).write_bytes(b"\xff" * 40)
    (path / second.stored.files[1]).unlink()

    with pytest.raises(CorruptRecordingError, match=r"step-000000/00000001-.*damaged: its content has checksum"):
        recording.tensors(first, 1)
    with pytest.raises(CorruptRecordingError, match=r"step-000001/00000003-.*missing"):
        recording.tensors(second, 1)


def test_bits_of_which_many_are_alike_are_compressed_and_read_as_they_were() -> None:
    bits = {"positive": np.zeros(5000, dtype=np.uint8), "signless": np.full(5000, 255, dtype=np.uint8)}
    bits["positive"][:3] = 1, 2, 4
    data = dump({name: raw(array, "uint8") for name, array in bits.items()}, site="fc.weight grad")

    assert len(data) < 500
    found = load(data, where="here", shard=Shard.whole((200, 200)))
    assert {name: array.tolist() for name, array in found.items()} == {name: a.tolist() for name, a in bits.items()}


def test_damaged_compressed_bits_are_named() -> None:
    bits = raw(np.zeros(5000, dtype=np.uint8), "uint8")
    data = bytearray(dump({"positive": bits, "signless": bits}, site="fc.weight grad"))
    data[-6] ^= 0xFF

    with pytest.raises(CorruptRecordingError, match="here is damaged"):
        load(bytes(data), where="here", shard=Shard.whole((200, 200)))


@given(st.text(max_size=200))
def test_every_text_becomes_a_plain_file_name(text: str) -> None:
    name = file_name(text)

    assert 0 < len(name) <= LONGEST
    assert not set(name) - set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-%~")
    assert not name.startswith(".")


@given(st.lists(st.text(st.sampled_from("aA%_~./é\x00"), max_size=8), unique=True, max_size=30))
def test_different_texts_have_different_file_names(texts: list[str]) -> None:
    assert len({file_name(text) for text in texts}) == len(texts)


def test_texts_that_differ_behind_the_longest_name_have_different_ones() -> None:
    assert file_name("x" * 400) != file_name("x" * 401)


@pytest.mark.parametrize("name", ["con", "NUL.txt", "..", ".hidden", "", "com1"])
def test_reserved_names_are_avoided(name: str) -> None:
    assert file_name(name) == f"%_{name}"
