"""Whatever a recording holds, it is read, or refused with the place and the reason: right checksums prove nothing."""

from __future__ import annotations

import os
import random
import resource
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.storage.hostile import (
    batch_of,
    change_buffer,
    change_columns,
    change_json,
    compressed_buffers,
    encoded,
    messages_of,
    put_message,
    put_messages,
    put_tensor_file,
    safetensors,
)
from tests.storage.samples import RUN, content, observation, summaries, write
from traindiff.core.shards import Shard
from traindiff.core.summary import Detail, RawTensor
from traindiff.errors import CorruptRecordingError, RecordingError
from traindiff.storage import RecordingWriter, open_recording
from traindiff.storage.batch_metadata import EXPANSION, FREE_BYTES

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write(tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def rank(run: Path) -> Path:
    return run / "rank-00000"


def read_all(run: Path) -> None:
    recording = open_recording(str(run))
    for rank in recording.ranks:
        recording.rank_content(rank)
        recording.status(rank)
        for step in recording.steps(rank):
            for row in range(len(step.observations)):
                recording.tensors(step, row)


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("step", [0, 0, 1], 'column "step" differs'),
        ("step", [-1] * 3, "negative number"),
        ("micro_step", [-1] * 3, "negative number"),
        ("optimizer", ["a", "b", "b"], 'column "optimizer" differs'),
        ("phase", ["fore"] * 3, "'fore'"),
        ("merge", ["max"] * 3, "'max'"),
        ("factor", [0.0, 1, 1], "no factor"),
        ("factor", [float("nan"), 1, 1], "no factor"),
        ("count", [25, 1, 1], "counts more elements than its tensor has"),
        ("nan", [2, 0, 0], "more elements of one kind"),
        ("path", ["x" * (1 << 21), "", ""], "a text has 2097152 characters"),
        ("shape", [[-1, 6]] * 3, "negative number"),
        ("shape", [[4, 6, 1]] * 3, "no part of a tensor"),
        ("shape", [[5, 6]] * 3, "goes beyond"),
        ("offset", [[1, 0]] * 3, "goes beyond"),
        ("offset", [[2**62, 0]] * 3, "goes beyond"),
        ("global_shape", [[2**40, 2**40]] * 3, "more than 4611686018427387904 elements"),
        ("global_shape", [[4, -1]] * 3, "negative number"),
        ("global_shape", [[]] * 3, "no part of a tensor"),
        ("spacing", [[0, 0]] * 3, "rows of a part"),
        ("spacing", [[3, 4]] * 3, "rows of a part"),
        ("spacing", [[1, 4, 4]] * 3, "rows of a part"),
        ("exponents", [[1]] * 3, "has not 320 counts"),
        ("exponents", [[-1] + [0] * 319] * 3, "counts what is not there"),
        ("exponents", [[2] + [0] * 319] * 3, "counts what is not there"),
        ("tensors", ["../../secret"] * 3, "not the name of a file with tensors"),
        ("tensors", ["/etc/passwd"] * 3, "not the name of a file with tensors"),
        ("tensors", ["tensors/step-000000/../../../x.00000000.safetensors"] * 3, "not the name of a file"),
        ("tensors", ["tensors/step-000000/00000000-x.00000000.safetensors"] * 3, "the file is missing"),
    ],
)
def test_rows_that_no_observation_has_are_refused(rank: Path, column: str, values: list[Any], message: str) -> None:
    change_columns(rank, **{column: values})

    with pytest.raises(CorruptRecordingError, match=message):
        read_all(rank.parent)


def test_a_step_of_many_axes_is_refused(rank: Path) -> None:
    axes = [[1] * 65] * 3
    change_columns(rank, shape=axes, global_shape=axes, offset=[[0] * 65] * 3)

    with pytest.raises(CorruptRecordingError, match="more than 64 axes"):
        read_all(rank.parent)


@pytest.mark.parametrize(("column", "buffer", "form"), [("path", 1, "<i"), ("slot", 1, "<i"), ("path", 2, "<B")])
@pytest.mark.parametrize("number", [-1, 2**31 - 1, 200, 1 << 20])
def test_offsets_and_texts_that_arrow_does_not_look_at_are_refused(
    rank: Path, column: str, buffer: int, form: str, number: int
) -> None:
    """`show` died of a signal: Arrow's reader trusts what it is given."""
    change_columns(rank, path=["first", "the second", "a third"], slot=["", "x", "output[17]"])
    size = struct.calcsize(form)
    bits = 8 * size - (form == "<i")

    def change(data: bytearray) -> None:
        value = 0xFF if form == "<B" else max(-1, min(number, 2**bits - 1))
        struct.pack_into(form, data, size, value)

    change_buffer(rank, column, buffer, change)

    with pytest.raises(CorruptRecordingError, match="malformed"):
        read_all(rank.parent)


def expanding(rows: int) -> pa.RecordBatch:
    """A batch that LZ4 makes almost nothing of."""
    from traindiff.core.summary import empty
    from traindiff.storage.columns import to_batch

    seen = observation(optimizer="", phase="", path="", slot="", dtype="", shard=Shard.whole(()))
    return to_batch([seen] * rows, empty(rows))


def test_a_message_that_expands_to_far_more_than_it_is_is_refused_before_it_is_decoded(rank: Path) -> None:
    batch = expanding(40_000)
    message = encoded(batch, compression="lz4")
    assert batch.nbytes > FREE_BYTES + EXPANSION * len(message)
    put_message(rank, 1, message)
    before = pa.total_allocated_bytes(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    del batch
    with pytest.raises(CorruptRecordingError, match="more than they may"):
        read_all(rank.parent)

    assert pa.total_allocated_bytes() <= before[0]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before[1] + 50_000


def test_messages_of_one_step_that_expand_together_are_refused(rank: Path) -> None:
    first, *_, last = messages_of(rank)
    message = encoded(expanding(4000), compression="lz4")
    put_messages(rank, [first, *[message] * 4, last])

    with pytest.raises(CorruptRecordingError, match="its messages hold"):
        read_all(rank.parent)


def test_a_step_that_compresses_too_well_is_written_without_and_read(tmp_path: Path) -> None:
    writer = RecordingWriter(str(tmp_path / "run"), run=RUN)
    one = observation(unobserved="why", optimizer="", path="", slot="", dtype="", shard=Shard.whole(()))
    seen = [one] * 40_000
    numbers = np.zeros(len(seen), summaries(1).dtype)
    writer.write_step(seen, numbers)
    writer.close()
    assert (tmp_path / "run" / "rank-00000" / "observations.arrows").stat().st_size > numbers.nbytes

    assert content(tmp_path / "run")[0][2] == seen


@pytest.mark.parametrize("size", [2**62, 2**33, -2, 0, 3])
def test_a_false_size_of_a_compressed_buffer_is_refused(rank: Path, size: int) -> None:
    message = bytearray(encoded(batch_of(messages_of(rank)[1]), compression="lz4"))
    places = list(compressed_buffers(bytes(message)))
    assert len(places) > 5
    for place in places:
        changed = bytearray(message)
        struct.pack_into("<q", changed, place, size)
        put_message(rank, 1, bytes(changed))
        with pytest.raises(CorruptRecordingError):
            read_all(rank.parent)


@pytest.mark.parametrize("compression", [None, "lz4"])
def test_mutated_messages_with_right_checksums_are_read_or_refused(rank: Path, compression: str | None) -> None:
    first, *steps, last = messages_of(rank)
    whole = [first, *(encoded(batch_of(one), compression=compression) for one in steps), last]
    generator = random.Random(0)
    odd = [b"\0" * 4, b"\xff" * 4, b"\xff\xff\xff\x7f", b"\0\0\0\x80", b"\xff" * 8, struct.pack("<q", 2**62)]
    refused = 0
    for _ in range(400):
        number = generator.randrange(len(steps) + 1)
        message = bytearray(whole[number])
        (metadata,) = struct.unpack_from("<i", message, 4)
        for _ in range(generator.choice([1, 1, 3])):
            place = generator.randrange(8 + metadata if generator.random() < 0.6 else len(message)) & ~3
            change = generator.choice([*odd, bytes([message[place] ^ 1 << generator.randrange(8)])])
            message[place : place + len(change)] = change
        put_messages(rank, [*whole[:number], bytes(message), *whole[number + 1 :]])
        try:
            read_all(rank.parent)
        except CorruptRecordingError:
            refused += 1

    assert refused > 200


@pytest.mark.parametrize(
    "line",
    [b"0 " + b"9" * 5000 + b" 00000000\n", b"9" * 5000 + b" 8 00000000\n", b"0 -8 00000000\n", b"0" * 100_000],
)
def test_a_seal_with_endless_digits_is_damage(rank: Path, line: bytes) -> None:
    (rank / "observations.crc").write_bytes(line)

    with pytest.raises(CorruptRecordingError, match=r"observations\.crc is damaged: line 1"):
        read_all(rank.parent)


def test_a_length_beyond_the_file_allocates_nothing(rank: Path) -> None:
    (rank / "observations.crc").write_bytes(b"0 %d 00000000\n" % 10**17)

    assert list(open_recording(str(rank.parent)).steps(0)) == []
    assert open_recording(str(rank.parent)).status(0).ending == "truncated"


def test_what_follows_the_end_of_the_stream_is_damage(rank: Path) -> None:
    messages = messages_of(rank)
    put_messages(rank, [*messages, messages[1]])

    with pytest.raises(CorruptRecordingError, match="message 5 follows the end"):
        read_all(rank.parent)


@pytest.mark.parametrize("order", [(0, 2, 1, 3, 4), (0, 1, 2, 3, 1, 4), (0, 1, 2, 3, 2, 3, 4)])
def test_steps_that_are_moved_or_repeated_are_damage(rank: Path, order: tuple[int, ...]) -> None:
    messages = messages_of(rank)
    put_messages(rank, [messages[number] for number in order])

    with pytest.raises(CorruptRecordingError, match=r'step \d of "optimizer" follows its step \d, and steps ascend'):
        read_all(rank.parent)


def test_a_short_message_that_is_not_the_end_is_damage(rank: Path) -> None:
    put_messages(rank, [*messages_of(rank)[:-1], b"12345678"])

    with pytest.raises(CorruptRecordingError, match="not the end of the stream"):
        read_all(rank.parent)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: run.pop("world_size"), 'has no "world_size"'),
        (lambda run: run.pop("settings"), 'has no "settings"'),
        (lambda run: run.pop("version"), 'has no "version"'),
        (lambda run: run.update(version="1"), "version must be an integer"),
        (lambda run: run.update(version=0), "version is 0"),
        (lambda run: run.update(world_size=10**9), "world_size is 1000000000"),
        (lambda run: run.update(world_size=0), "world_size is 0"),
        (lambda run: run.update(settings=[]), "settings must be an object, found a list"),
        (lambda run: run["settings"].update(every=0), "settings.every is 0"),
        (lambda run: run["settings"].update(detail="signs"), "settings.detail must be a list"),
        (lambda run: run["settings"].update(ranks=["0"]), r"settings.ranks\[0\] must be an integer"),
        (lambda run: run.update(mesh=[1]), "mesh must be an object"),
        (lambda run: run.update(environment=None), "environment must be an object"),
        (lambda run: run.update(more=nested(100)), "nested 101 deep"),
    ],
)
def test_a_run_file_that_lacks_what_readers_need_is_damage(
    run: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    change_json(run / "run.json", change)

    with pytest.raises(CorruptRecordingError, match=rf"run\.json is damaged: .*{message}"):
        open_recording(str(run))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"optimizers": [{"groups": []}]}, r'optimizers\[0\] has no "name"'),
        ({"optimizers": [{"name": "o", "type": "", "groups": [[1]]}]}, r"groups\[0\]\[0\] must be a text"),
        ({"parameters": ["a"]}, "parameters must be an object"),
        ({"parameters": {"a": []}}, r'parameters\["a"\] must be an object'),
        ({"pipeline": {}}, 'pipeline has no "num_stages"'),
        ({"pipeline": {"num_stages": 1, "stages": [], "ranks": []}}, "stages has 0 items"),
        ({"operators": {"forward": []}}, r'operators\["forward"\] must be an object'),
    ],
)
def test_a_rank_file_of_another_shape_is_damage(rank: Path, more: dict[str, Any], message: str) -> None:
    change_json(rank / "rank.json", lambda content: content.update(more))

    with pytest.raises(CorruptRecordingError, match=rf"rank\.json is damaged: .*{message}"):
        open_recording(str(rank.parent)).rank_content(0)


@pytest.mark.parametrize("data", [b"[" * 100_000, b'{"a":' * 100_000, b'{"a": ' + b"1" * 5000 + b"}"])
@pytest.mark.parametrize("name", ["run.json", "rank-00000/rank.json"])
def test_json_that_python_gives_up_on_is_damage(run: Path, name: str, data: bytes) -> None:
    (run / name).write_bytes(data)

    with pytest.raises(CorruptRecordingError, match=rf"{name} is damaged"):
        open_recording(str(run)).rank_content(0)


FILES = ["run.json", "rank-00000/rank.json", "rank-00000/observations.arrows", "rank-00000/observations.crc"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["fifo", "device", "directory", "outside", "huge"])
def test_what_is_no_regular_file_of_the_recording_is_refused_and_never_waited_for(
    run: Path, name: str, kind: str
) -> None:
    (run.parent / "outside").write_bytes((run / name).read_bytes())
    (run / name).unlink()
    if kind == "fifo":
        os.mkfifo(run / name)
    elif kind == "device":
        (run / name).symlink_to("/dev/zero")
    elif kind == "directory":
        (run / name).mkdir()
    elif kind == "outside":
        (run / name).symlink_to(run.parent / "outside")
    else:
        with (run / name).open("wb") as file:
            file.truncate(1 << 42)

    begin = time.perf_counter()
    with pytest.raises(RecordingError):
        read_all(run)

    assert time.perf_counter() - begin < 10


def test_a_rank_that_is_a_link_to_elsewhere_is_refused(run: Path) -> None:
    shutil.move(run / "rank-00000", run.parent / "elsewhere")
    (run / "rank-00000").symlink_to(run.parent / "elsewhere")

    with pytest.raises(CorruptRecordingError, match="leads outside"):
        read_all(run)


def raw(array: np.ndarray) -> RawTensor:
    return RawTensor(dtype=str(array.dtype), shape=array.shape, data=array.tobytes())


@pytest.fixture
def with_tensors(tmp_path: Path) -> Path:
    """A recording of one tensor with a file; the name of the file is the only one there."""
    writer = RecordingWriter(str(tmp_path / "run"), run=RUN)
    bits = np.zeros(1024, np.uint8)
    tensors = {
        "value": raw(np.zeros((64, 128), np.float32)), "positive": raw(bits), "signless": raw(bits + 255),
        "md5": raw(np.frombuffer(bytes.fromhex("bb7df04e1b0a2570657527a7e108ae23"), np.uint8)),
    }  # fmt: skip
    writer.write_step([observation(shard=Shard.whole((64, 128)))], summaries(1), {0: Detail(tensors=tensors)})
    writer.close()
    return tmp_path / "run"


def tensor_file(run: Path) -> Path:
    return next(run.rglob("*.safetensors"))


def test_every_flipped_byte_of_a_tensor_file_is_noticed_by_whoever_reads_the_steps(with_tensors: Path) -> None:
    file = tensor_file(with_tensors)
    whole = file.read_bytes()
    for place in random.Random(0).sample(range(len(whole)), 200):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(CorruptRecordingError, match=r"safetensors is damaged: its content has checksum"):
            list(open_recording(str(with_tensors)).steps(0))
    file.write_bytes(whole)
    read_all(with_tensors)


def test_a_missing_tensor_file_is_noticed_by_whoever_reads_the_steps(with_tensors: Path) -> None:
    tensor_file(with_tensors).unlink()

    with pytest.raises(CorruptRecordingError, match=r"safetensors is damaged: the file is missing"):
        list(open_recording(str(with_tensors)).steps(0))


def value(shape: list[Any], data: list[Any], *, dtype: Any = "F32", name: str = "value") -> dict[str, Any]:
    return {name: {"dtype": dtype, "shape": shape, "data_offsets": data}}


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (b"", "it has 0 bytes"),
        (struct.pack("<Q", 2**63), "its header has 9223372036854775808 bytes"),
        (safetensors(b"[" * 50_000), "nested 50000 deep"),
        (safetensors([]), "must be an object"),
        (safetensors(value([2**40, 2**40], [0, 8]), bytes(8)), "8 from 0|are expected"),
        (safetensors(value([-1], [0, 8]), bytes(8)), "shape"),
        (safetensors(value([2], [0, 8], dtype="F3"), bytes(8)), "dtype"),
        (safetensors(value([2], [0]), bytes(8)), "data_offsets"),
        (safetensors(value([2], [0, 8]), bytes(8)), r"value has the shape \[2\], and must have \[64, 128\]"),
        (safetensors(value([2], [0, 8]), bytes(9)), "8 bytes, and 9 are there"),
        (safetensors(value([1 << 20], [0, 1 << 20], dtype="U8", name="positive"), bytes(1 << 20)), "may have"),
        (safetensors({**value([4], [0, 4], dtype="U8", name="md5")}, bytes(4)), r"md5 has the shape \[4\]"),
        (
            safetensors(value([40], [0, 40], dtype="U8", name="nan.zstd"), struct.pack("<Q", 1 << 30) + bytes(32)),
            "nan.zstd says that it holds 1073741824 bytes, and 1024 are expected",
        ),
        (
            safetensors(value([40], [0, 40], dtype="U8", name="nan.zstd"), struct.pack("<Q", 1024) + bytes(32)),
            "ZSTD|zstd",
        ),
        (
            safetensors(
                {**value([64, 128], [0, 32768]), **value([16], [32768, 32784], dtype="U8", name="md5")}, bytes(32784)
            ),
            "its value has another MD5",
        ),
    ],
)
def test_a_tensor_file_with_the_right_checksum_is_checked_all_the_same(
    with_tensors: Path, file: bytes, message: str
) -> None:
    rank = with_tensors / "rank-00000"
    name = put_tensor_file(rank, str(tensor_file(with_tensors).relative_to(rank)), file)
    change_columns(rank, tensors=[name])

    with pytest.raises(CorruptRecordingError, match=message):
        read_all(with_tensors)


def test_a_tensor_file_of_a_whole_md5_is_read(with_tensors: Path) -> None:
    (step,) = open_recording(str(with_tensors)).steps(0)

    assert open_recording(str(with_tensors)).tensors(step, 0)["value"].shape == (64, 128)


def test_reading_a_hostile_recording_takes_little_memory(rank: Path) -> None:
    batch = expanding(40_000)
    put_message(rank, 1, encoded(batch, compression="lz4"))
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_DATA, (512 << 20, 512 << 20))\n"
        "from traindiff.storage import open_recording\n"
        "list(open_recording(sys.argv[1]).steps(0))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(rank.parent)], capture_output=True, text=True, check=False, timeout=60
    )

    assert "CorruptRecordingError" in result.stderr, result.stderr
