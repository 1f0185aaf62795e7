"""What a rank tells rank 0 after a batch: the steps of each run, as bytes."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from traindiff.recording import StepObservations
from traindiff.recording.schema import SCHEMA, from_batch, to_batch

_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMessage:
    """What a rank says of one run.

    Attributes:
        run: Content of `run.json`; None where that has been said.
        content: Content of `rank.json`; None where that has been said.
        steps: The steps that it has ended since the last message.
    """

    run: Mapping[str, Any] | None
    content: Mapping[str, Any] | None
    steps: Sequence[StepObservations]


def encoded(runs: Sequence[RunMessage]) -> bytes:
    """The bytes of a message: the length of a head, the head in JSON, and the steps as an Arrow stream."""
    head = [
        {
            "run": one.run,
            "content": one.content,
            "steps": [{"optimizer": step.optimizer, "step": step.step} for step in one.steps],
        }
        for one in runs
    ]
    text = json.dumps(head).encode()
    buffer = io.BytesIO()
    buffer.write(len(text).to_bytes(_LENGTH_BYTES, "little"))
    buffer.write(text)
    with pa.ipc.new_stream(buffer, SCHEMA) as stream:
        for one in runs:
            for step in one.steps:
                stream.write_batch(to_batch(step.observations, step.summaries))
    return buffer.getvalue()


def decoded(message: bytes, rank: int) -> list[RunMessage]:
    """What `encoded` was given, by the rank that sent it."""
    length = int.from_bytes(message[:_LENGTH_BYTES], "little")
    head = json.loads(message[_LENGTH_BYTES : _LENGTH_BYTES + length])
    found = []
    with pa.ipc.open_stream(pa.py_buffer(memoryview(message)[_LENGTH_BYTES + length :])) as stream:
        for one in head:
            steps = []
            for about in one["steps"]:
                observations, summaries, _ = from_batch(stream.read_next_batch())
                steps.append(
                    StepObservations(
                        rank=rank, optimizer=about["optimizer"], step=about["step"], observations=observations,
                        summaries=summaries,
                    )
                )  # fmt: skip
            found.append(RunMessage(run=one["run"], content=one["content"], steps=steps))
    return found
