"""Small inputs of every kind that traindiff reads: what mutants are made of.

A recording has a few rows, so that opening and reading it takes milliseconds. Nothing here trains; only the saved calls
of a watch need torch.
"""

from __future__ import annotations

import hashlib
import io
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from tests.made_up import random, summary_of
from tests.storage.hostile import batch_of, encoded, messages_of, put_messages
from traindiff.compat.msprobe.tables import Columns, Row
from traindiff.compat.msprobe.tables import dump as dump_table
from traindiff.compat.onnxruntime.statistics import Statistics
from traindiff.compat.onnxruntime.statistics import dump as dump_statistics
from traindiff.core.observation import Observation
from traindiff.core.shards import Shard
from traindiff.core.site import PHASES
from traindiff.core.summary import Detail, RawTensor
from traindiff.storage import RecordingWriter
from traindiff.storage.gap import Gap

Files = dict[str, bytes]
"""Content by path."""

Rows = list[tuple[Observation, Any]]

_PARAMETERS = {"fc.weight": (4, 3), "fc.bias": (4,)}
_CONTENT: dict[str, Any] = {
    "model": "Sample",
    "modules": {"": "Sample", "fc": "Linear"},
    "parameters": {
        path: {"shape": list(shape), "dtype": "float32", "requires_grad": True} for path, shape in _PARAMETERS.items()
    },
    "buffers": {"fc.steps": {"shape": [], "dtype": "int64", "requires_grad": False}},
    "tied": {"out.weight": "fc.weight"},
    "optimizers": [{"name": "optimizer", "type": "SGD", "groups": [["fc.weight"], ["fc.bias"]]}],
    "pid": 7,
}
_SETTINGS: dict[str, Any] = {
    "observe": list(PHASES), "select": ["*"], "detail": ["summary"], "bounds": [], "steps": None, "ranks": None,
    "every": 1, "batch_axis": {}, "sample_order": "blocks", "shards": [], "operators": [], "evaluation": False,
    "replica": None,
}  # fmt: skip
_ABOUT: dict[str, Any] = {
    "engine": None, "forced_by": None, "recipe": None, "created": "2026-01-01T00:00:00+00:00", "command": ["train.py"],
    "versions": {"torch": "2.13.0", "traindiff": "1"}, "environment": {"machine": "made up"},
    "source": {"revision": "0" * 40, "modified": False},
}  # fmt: skip


def _row(
    phase: str, path: str, slot: str, *shape: int, step: int, number: int, **about: Any
) -> tuple[Observation, Any]:
    values = about.pop("values", None)
    if values is None:
        values = random(*shape, seed=100 * step + number)
    shard = about.pop("shard", Shard.whole(values.shape))
    seen = Observation(
        step=step, phase=phase, path=path, slot=slot, order=number, dtype=values.dtype.name, shard=shard,
        **{"micro_step": 0, "optimizer": "optimizer", "stage": "", "call": 0, **about},
    )  # fmt: skip
    return seen, summary_of(values, shard)


def _training_step(step: int) -> Rows:
    """Eight sites of a step of one layer."""
    before = [("param", "fc.weight", "value", (4, 3), {"stage": "before"})] if step == 0 else []
    sites: list[tuple[str, str, str, tuple[int, ...], dict[str, Any]]] = [
        *before,
        ("batch", "", "input[0]", (2, 3), {"shard": Shard.of_batch((2, 3), first=0)}),
        ("forward", "fc", "output[0]", (2, 4), {"shard": Shard.of_batch((2, 4), first=0)}),
        ("loss", "loss", "backward", (), {"merge": "sum"}),
        ("backward", "fc", "output[0]", (2, 4), {"shard": Shard.of_batch((2, 4), first=0)}),
        ("grad", "fc.weight", "grad", (4, 3), {}),
        ("optimizer", "optimizer.groups[0]", "lr", (), {"values": np.array(0.1)}),
        ("param", "fc.weight", "value", (4, 3), {}),
    ]  # fmt: skip
    return [
        _row(phase, path, slot, *shape, step=step, number=number, **about)
        for number, (phase, path, slot, shape, about) in enumerate(sites)
    ]


def _write(
    path: Path,
    steps: list[Rows],
    *,
    run: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    content: Mapping[str, Any] | None = None,
    rank: int = 0,
    details: Mapping[int, Detail] | None = None,
    close: bool = True,
) -> None:
    about = {"world_size": 1, "mesh": None, **_ABOUT, "settings": {**_SETTINGS, **(settings or {})}, **(run or {})}
    writer = RecordingWriter(str(path), run=about, rank=rank, world_size=about["world_size"])
    same = {"world_size": about["world_size"], "mesh": about["mesh"]}
    writer.write_rank({**_CONTENT, **same, **(content or {})})
    for rows in steps:
        writer.write_step([seen for seen, _ in rows], np.array([summary for _, summary in rows]), details or {})
    if not close:
        writer.give_up(Gap(reason="No space left on device", step=len(steps), optimizer="optimizer"))
    writer.close()


def _plain(path: Path) -> None:
    _write(path, [_training_step(0), _training_step(1)])


def _detailed(path: Path) -> None:
    """Exponents, signs (compressed too), intervals, MD5 and whole tensors."""
    values = random(4, 3, seed=5)
    kept = {
        "value": RawTensor(dtype="float32", shape=(4, 3), data=values.tobytes()),
        "positive": RawTensor(dtype="uint8", shape=(2,), data=b"\x5a\x05"),
        "signless": RawTensor(dtype="uint8", shape=(2,), data=b"\x00\x01"),
        "intervals": RawTensor(dtype="int64", shape=(3,), data=struct.pack("<3q", 2, 6, 4)),
        "md5": RawTensor(dtype="uint8", shape=(16,), data=hashlib.md5(values.tobytes()).digest()),
    }
    # Many alike, so that the writer compresses them.
    bits = {name: RawTensor(dtype="uint8", shape=(64,), data=bytes([part]) * 64) for name, part in _BITS.items()}
    half = RawTensor(dtype="bfloat16", shape=(2, 4), data=bytes(16))
    rows = [*_training_step(1), _row("grad", "fc.table", "grad", 64, 8, step=1, number=9)]
    place = {(seen.phase, seen.path): number for number, (seen, _) in enumerate(rows)}
    details = {
        place["grad", "fc.weight"]: Detail(exponents=_exponents(rows[place["grad", "fc.weight"]][1]), tensors=kept),
        place["grad", "fc.table"]: Detail(tensors=bits),
        place["forward", "fc"]: Detail(exponents=_exponents(rows[place["forward", "fc"]][1]), tensors={"value": half}),
    }
    settings = {"detail": ["summary", "exponents", "signs", "md5", "tensors"], "bounds": [-1.0, 1.0]}
    _write(path, [rows], settings=settings, details=details)


def _exponents(summary: Any) -> Any:
    """A histogram of as many elements as a summary has."""
    counts = np.zeros(320, dtype=np.int64)
    counts[159] = summary["count"]
    return counts


_BITS = {"positive": 0x55, "signless": 0x00}


def _ranks(path: Path) -> None:
    """Two ranks that divide the batch, a gradient and its loss scale; the disk of the second was full in its second
    step."""
    for rank in range(2):
        steps = []
        for step in range(2):
            shard = Shard.of_batch((2, 4), first=2 * rank)
            half = Shard(shape=(2, 3), global_shape=(4, 3), offset=(2 * rank, 0))
            steps.append(
                [
                    _row("forward", "fc", "output[0]", 2, 4, step=step, number=0, shard=shard),
                    _row("loss", "loss_scale", "value", step=step, number=1, values=np.array(1024.0), merge="mean"),
                    _row("loss", "loss", "logged", step=step, number=2, merge="mean", weight=2.0, term=rank),
                    _row("grad", "fc.weight", "grad", 2, 3, step=step, number=3, shard=half, scaled=True, factor=2.0),
                    _row("grad", "fc.bias", "grad", 4, step=step, number=4, stage="micro", merge="sum", term=rank),
                    _row("optimizer", "optimizer", "skipped", step=step, number=5, values=np.array(float(step))),
                ]
            )
        mesh = {"data_parallel": 2, "engine": "ddp"}
        _write(path, steps[: 2 - rank], run={"world_size": 2, "mesh": mesh}, rank=rank, close=rank == 0)


def _operators(path: Path) -> None:
    """Operators of a module, a recomputed one, and the pass backward of one."""
    stages = {"stage": "operator"}
    rows = [
        _row("forward", "fc/aten.addmm[0]", "input[0]", 4, step=0, number=0, **stages),
        _row("forward", "fc/aten.addmm[0]", "output[0]", 2, 4, step=0, number=1, **stages),
        _row("forward", "fc/aten.addmm[0]", "output[0]", 2, 4, step=0, number=2, stage="operator recomputed"),
        _row("backward", "fc/aten.mm[0]", "input[1]", 2, 4, step=0, number=3, **stages),
        _row("update", "fc.weight", "SGD", 4, 3, step=0, number=4, stage="residual"),
        _row("update", "fc.weight", "SGD", 4, 3, step=0, number=5, stage="variant[no momentum]"),
    ]
    called = {"file": "train.py", "line": 3, "function": "forward", "code": "return self.fc(x)"}
    operators = {
        "forward": {"fc/aten.addmm[0]": {"source": called, "settings": {"beta": "1"}}},
        "backward": {"fc/aten.mm[0]": {"settings": {}, "node": "AddmmBackward0", "of": "fc/aten.addmm[0]"}},
    }
    _write(path, [rows], settings={"operators": ["fc"]}, content={"operators": operators})


def _pipeline(path: Path) -> None:
    """Two stages of a pipeline, with what one sends to the next."""
    mesh = {
        "data_parallel": 1, "engine": "pipeline", "pipeline": 2, "schedule": "Schedule1F1B", "micro_batches": 2,
        "scales_gradients": True,
    }  # fmt: skip
    for rank in range(2):
        place = (1 + rank) << 24
        slot = "received[0]" if rank else "sent[0]"
        seen, summary = _row("forward", f"stage[{rank}]", slot, 2, 4, step=0, number=0, stage="boundary")
        rows = [
            (seen._replace(order=place), summary),
            _row("forward", f"fc{rank}", "output[0]", 2, 4, step=0, number=1),
            _row("grad", f"fc{rank}.weight", "grad", 4, 3, step=0, number=2),
            _row("param", f"fc{rank}.weight", "value", 4, 3, step=0, number=3),
        ]
        content = {
            "pipeline": {"num_stages": 2, "stages": [rank], "ranks": [0, 1]},
            "parameters": {f"fc{rank}.weight": {"shape": [4, 3], "dtype": "float32", "requires_grad": True}},
            "optimizers": [{"name": "optimizer", "type": "Adam", "groups": [[f"fc{rank}.weight"]]}],
            "not_forced": {f"fc{rank} output[0]": "it has no gradient"},
        }
        _write(path, [rows], run={"world_size": 2, "mesh": mesh, "forced_by": "other"}, rank=rank, content=content)


def _cut(path: Path) -> None:
    """A run that was killed while it wrote its third step."""
    _write(path, [_training_step(number) for number in range(3)])
    seals = path / "rank-00000" / "observations.crc"
    *lines, _ = seals.read_bytes().splitlines(keepends=True)
    seals.write_bytes(b"".join(lines))
    stream = path / "rank-00000" / "observations.arrows"
    stream.write_bytes(stream.read_bytes()[:-200])


def _optimizers(path: Path) -> None:
    """Steps of two optimizers in turn, an evaluation, a site that was not observed and a scalar logged late."""
    first, second = _training_step(0)[:4], _training_step(0)[4:]
    of_second = [(seen._replace(optimizer="other", stage="evaluation" * (not at)), one) for at, (seen, one) in
                 enumerate(second)]  # fmt: skip
    seen, summary = _row("forward", "fc", "output[1]", 2, step=0, number=9)
    late = [
        (seen._replace(unobserved="it is a list", dtype=""), summary),
        _row("loss", "x", "logged", step=0, number=10),
    ]
    content = {
        "optimizers": [
            {"name": "optimizer", "type": "SGD", "groups": [["fc.weight"]]},
            {"name": "other", "type": "AdamW", "groups": [["fc.bias"]]},
        ]
    }
    engine = {
        "name": "deepspeed", "zero_stage": 1, "gradient_clipping": 1.0, "gradient_accumulation_steps": 2,
        "loss_scale": "dynamic", "dtype": "float16", "optimizer": "FusedAdam", "decoupled_weight_decay": True,
        "asked_for": "Adam",
    }  # fmt: skip
    run = {"engine": engine, "recipe": "train:recipe"}
    _write(path, [first, of_second, late], content=content, run=run, settings={"replica": "ulp:1", "evaluation": True})


RECORDINGS: Mapping[str, Callable[[Path], None]] = {
    "plain": _plain, "detailed": _detailed, "ranks": _ranks, "operators": _operators, "pipeline": _pipeline,
    "cut": _cut,
    "optimizers": _optimizers,
}  # fmt: skip
"""What writes a recording, by name."""

_COMPRESSED = {"plain", "cut"}
"""Recordings that stay compressed. The others are read three times as fast, and so are their mutants."""


def recording(name: str) -> Files:
    """The files of a recording of `RECORDINGS`."""
    with TemporaryDirectory() as scratch:
        root = Path(scratch) / name
        RECORDINGS[name](root)
        for rank in () if name in _COMPRESSED else root.glob("rank-*"):
            first, *steps, last = messages_of(rank)
            put_messages(rank, [first, *(encoded(batch_of(one)) for one in steps), last])
        return {str(one.relative_to(root)): one.read_bytes() for one in sorted(root.rglob("*")) if one.is_file()}


def msprobe() -> Files:
    """What msprobe's gradient monitor writes: tables of two steps on two ranks, and directions."""
    found: Files = {}
    columns = Columns(bounds=(-1.0, 0.0, 1.0))
    for rank in range(2):
        for step in range(2):
            rows = [
                Row(name="module.fc.weight", shape=(4, 3), maximum=1.5, minimum=-2.0, norm=3.0,
                    shares=(0.25, 0.25, 0.25, 0.25, 0.0)),
                Row(name="module.fc.bias", shape=(4,), maximum=0.5, minimum=-0.5, norm=1.0,
                    shares=(0.0, 0.5, 0.5, 0.0, 0.25)),
            ]  # fmt: skip
            found[f"rank{rank}/grad_summary_{step}.csv"] = dump_table(columns, rows)
            content = io.BytesIO()
            np.save(content, random(4, 3, seed=step) > 0)
            found[f"rank{rank}/step{step}/module.fc.weight.npy"] = content.getvalue()
    return found


def onnxruntime() -> Files:
    """What ONNX Runtime's StatisticsSubscriber writes: an activation and its gradient, in two steps."""
    found: Files = {}
    for step in range(2):
        names = []
        for direction in ("forward", "backward"):
            statistics = Statistics(
                name="Linear_1_0th_output", direction=direction, depth=1, shape=(2, 2), dtype="float32", minimum=-1.0,
                maximum=2.0, mean=0.5, std=1.0, num_nan=0, num_infinite=0, num_negative=1, num_positive=2, num_zero=1,
                samples="tensor([-1.0000,  0.0000,  1.0000,\n         2.0000])",
            )  # fmt: skip
            names.append(f"Linear_1_0th_output_{direction}")
            found[f"step_{step}/{names[-1]}"] = dump_statistics(statistics).encode()
        found[f"step_{step}/order.txt"] = ("\n".join(names) + "\n").encode()
    return found


def configuration() -> Files:
    """Limits for rules of `check`."""
    return {"limits.toml": b"# limits\n[spike]\nnorm_factor = 10\n'least_steps' = 3\n[dead-units]\n"}


def saved_calls() -> dict[str, Files]:
    """What watches save of a module that made infinity: forward, and in its backward pass. Needs torch."""
    import torch
    from torch import nn

    import traindiff

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 6)
            self.norm = nn.LayerNorm(6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = nn.functional.dropout(nn.functional.gelu(self.norm(self.up(x))), 0.1)
            return torch.cat([hidden.exp() * 1e38 * 1e3, torch.full((2, 1), float("inf"), device=x.device)], 1)

    class Root(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sqrt(x * x).to(torch.float64)

    def saved(model: nn.Module, *, backward: bool) -> Files:
        with TemporaryDirectory() as scratch:
            try:
                with traindiff.watch(model, output=scratch, file=io.StringIO(), keep_inputs=backward):
                    output = model(torch.ones(2, 4))
                    output.sum().backward()
            except traindiff.NonFiniteError:
                pass
            (found,) = Path(scratch).iterdir()
            return {one.name: one.read_bytes() for one in found.iterdir()}

    torch.manual_seed(0)
    root = nn.Sequential(nn.Linear(4, 4), Root())
    for parameter in root.parameters():
        parameter.data.zero_()
    return {"saved": saved(nn.Sequential(Mlp()), backward=False), "saved-backward": saved(root, backward=True)}
