"""Scalars of a recording, for tools that plot those."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.made_up import FC, Seen, Step, at, record
from traindiff.core.steps import parse_steps
from traindiff.present.data.exports import exporter, scalars
from traindiff.present.data.observations import Filter
from traindiff.storage import open_recording


def loss(step: int, sites: Step) -> None:
    value = [2.5, math.nan, 0.5][step]
    sites["loss", "", "loss", "backward"] = Seen(values=np.array(value, np.float32))


@pytest.fixture
def run(tmp_path: Path) -> Any:
    return open_recording(str(record(tmp_path / "run", loss)))


def test_a_run_has_losses_settings_and_the_gradient_norm_by_itself(run: Any) -> None:
    found = dict(scalars(run, Filter(site="")))

    assert list(found) == [0, 1, 2]
    assert set(found[0]) == {
        "loss/loss backward", "optimizer/optimizer.groups[0] lr", "optimizer/optimizer.groups[0] weight_decay",
        "optimizer/optimizer.groups[1] lr", "optimizer/optimizer.groups[1] weight_decay", "grad/(all parameters) norm",
    }  # fmt: skip
    assert (found[0]["loss/loss backward"], found[2]["loss/loss backward"]) == (2.5, 0.5)
    assert math.isnan(found[1]["loss/loss backward"])
    assert found[0]["optimizer/optimizer.groups[0] lr"] == 0.1


def test_tensors_have_their_norms_where_they_are_wanted(run: Any) -> None:
    steps: Any = parse_steps("1-2", where="")
    found = dict(scalars(run, Filter(site="fc.*", phases=("grad",), steps=steps)))
    gradients = [name for name in found[1] if name.startswith("grad/fc.")]

    assert list(found) == [1, 2]
    assert gradients == [
        f"grad/{path} grad {number}" for path in ("fc.weight", "fc.bias") for number in ("norm", "largest")
    ]
    names = ("fc.weight", "fc.bias", "head.weight")
    everything = dict(scalars(run, Filter(site="*", phases=("grad",))))
    norms = [everything[1][f"grad/{name} grad norm"] for name in names]
    assert math.isclose(everything[1]["grad/(all parameters) norm"], math.hypot(*norms), rel_tol=1e-9)


def test_tensorboard_reads_what_is_written_for_it(run: Any, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed (make test-browser)")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    count = exporter("tensorboard")(run, scalars(run, Filter(site="")), tmp_path / "events")
    found = accumulator.EventAccumulator(str(tmp_path / "events"))
    found.Reload()

    assert count == 18
    events = found.Scalars("loss/loss backward")
    assert [event.step for event in events] == [0, 1, 2]
    assert [event.value for event in events][::2] == [2.5, 0.5]
    assert math.isnan(events[1].value)


def test_a_number_beyond_float32_is_infinite_for_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed (make test-browser)")

    def huge(step: int, sites: Step) -> None:
        at(FC, lambda values: values.astype(np.float64) * 1e200)(step, sites)

    run = open_recording(str(record(tmp_path / "run", huge)))

    assert exporter("tensorboard")(run, scalars(run, Filter(site="fc")), tmp_path / "events") > 0


def records(path: Path) -> Iterator[bytes]:
    """Records of wandb's own file: those of LevelDB's log, in blocks of 32 KiB, behind a head of 7 bytes."""
    content, at, record = path.read_bytes(), 7, b""
    while at < len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack("<HB", content[at + 4 : at + 7])
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def test_weights_and_biases_reads_what_is_written_for_it(run: Any, tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed (make test-browser)")
    from wandb.proto.wandb_internal_pb2 import Record

    count = exporter("wandb")(run, scalars(run, Filter(site="")), tmp_path / "out")
    (path,) = (tmp_path / "out" / "wandb").glob("offline-run-*/*.wandb")

    items = [item for data in records(path) for item in Record.FromString(data).history.item]
    assert count == 18
    assert [item.value_json for item in items if "loss/loss backward" in (item.key, *item.nested_key)] == [
        "2.5", "NaN", "0.5",
    ]  # fmt: skip
