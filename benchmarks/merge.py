"""What comparing recordings of many ranks costs: `python benchmarks/merge.py`.

Recordings are simulated: the sites of a Llama with 7 billion parameters, sharded by rows over the ranks as
FSDP does it, activations of which each rank has a part of the batch. Summaries are random numbers that keep the law
of merging, so that a run on N ranks is equivalent to the run on one; no tensor is ever made. Each comparison runs in
a process of its own, which reports its time and its peak memory. Needs 3 GB of disk, and removes what it wrote.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from machine import machine

from traindiff.core.observation import Observation
from traindiff.core.shards import BUCKETS, OPEN, Shard
from traindiff.core.summary import SUMMARY, Summaries, empty, scale
from traindiff.storage import RecordingWriter

LAYERS, WIDTH, HIDDEN, VOCABULARY = 32, 4096, 11008, 32000
SAMPLES, LENGTH = 512, 16
RANKS = (1, 8, 64, 512)
STEPS = (2, 4, 8)
RANKS_OF_LONG_RUNS = 16

_CHILD = """
import json, re, resource, sys, time
from pathlib import Path
import traindiff
import pyarrow, numpy

def peak_bytes():
    # Not ru_maxrss: it survives exec, so that it begins with the memory of the process that started this one.
    return 1024 * int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])

traindiff.compare
before, empty = resource.getrusage(resource.RUSAGE_SELF), peak_bytes()
begin = time.perf_counter()
comparison = traindiff.compare(*sys.argv[1:3])
seconds = time.perf_counter() - begin
after = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({
    "verdict": comparison.verdict, "steps": len(comparison.steps), "seconds": seconds,
    "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    "peak_bytes": peak_bytes(), "empty_bytes": empty,
    "notes": list(comparison.notes), "first": comparison.first_divergence and comparison.first_divergence.message,
}))
"""


@dataclass(frozen=True, kw_only=True)
class Site:
    """A tensor of the whole model.

    Attributes:
        about: Phase, stage, path and slot.
        shape: Global shape; axis 0 is the batch axis of activations.
        batched: Whether it has one.
        whole: Whether every rank has all of it: a number, a setting.
    """

    about: tuple[str, str, str, str]
    shape: tuple[int, ...]
    batched: bool = False
    whole: bool = False

    def shard(self, rank: int, num_ranks: int) -> Shard:
        """The rows of a rank."""
        if self.whole:
            return Shard.whole(self.shape)
        rows = -(-self.shape[0] // num_ranks)
        first = min(rank * rows, self.shape[0])
        shape = (min(rows, self.shape[0] - first), *self.shape[1:])
        whole = (OPEN if self.batched else self.shape[0], *self.shape[1:])
        return Shard(shape=shape, global_shape=whole, offset=(first, *(0 for _ in shape[1:])))


def parameters() -> dict[str, tuple[int, ...]]:
    """Shapes of the model's parameters by path."""
    attention = {f"self_attn.{name}_proj.weight": (WIDTH, WIDTH) for name in "qkvo"}
    dense = {"mlp.gate_proj.weight": (HIDDEN, WIDTH), "mlp.up_proj.weight": (HIDDEN, WIDTH)}
    layer = {
        **attention, **dense, "mlp.down_proj.weight": (WIDTH, HIDDEN),
        "input_layernorm.weight": (WIDTH,), "post_attention_layernorm.weight": (WIDTH,),
    }  # fmt: skip
    layers = {f"model.layers.{n}.{name}": shape for n in range(LAYERS) for name, shape in layer.items()}
    return {
        "model.embed_tokens.weight": (VOCABULARY, WIDTH), **layers, "model.norm.weight": (WIDTH,),
        "lm_head.weight": (VOCABULARY, WIDTH),
    }  # fmt: skip


def sites(*, first_step: bool) -> Iterator[Site]:
    """What a step records, in the order of execution."""
    held = parameters()
    if first_step:
        for path, shape in held.items():
            yield Site(about=("param", "before", path, "value"), shape=shape)
    yield Site(about=("batch", "", "", "input[0]"), shape=(SAMPLES, LENGTH), batched=True)
    modules = {path.removesuffix(".weight"): shape[0] if len(shape) > 1 else WIDTH for path, shape in held.items()}
    activations = [
        Site(about=("forward", "", path, "output[0]"), shape=(SAMPLES, LENGTH, width), batched=True)
        for path, width in modules.items()
    ]
    yield from activations
    for one in reversed(activations):
        yield Site(about=("backward", "", *one.about[2:]), shape=one.shape, batched=True)
    for slot in ("lr", "beta1", "beta2", "eps", "weight_decay"):
        yield Site(about=("optimizer", "", "optimizer.groups[0]", slot), shape=(), whole=True)
    for path, shape in held.items():
        yield Site(about=("grad", "", path, "grad"), shape=shape)
    for path, shape in held.items():
        yield Site(about=("optimizer", "", path, "step"), shape=(), whole=True)
        for slot in ("exp_avg", "exp_avg_sq"):
            yield Site(about=("optimizer", "", path, slot), shape=shape)
        yield Site(about=("param", "", path, "value"), shape=shape)


def of_the_whole(step: Sequence[Site], number: int) -> Summaries:
    """Summaries of the whole tensors of a step: the same for any number of ranks."""
    random = np.random.default_rng(number)
    found = empty(len(step))
    found["count"] = [prod(site.shape) for site in step]
    found["negative"] = found["count"] // 2
    found["minimum"], found["maximum"], found["smallest"] = -4.0, 4.0, 1e-9
    found["sum"] = random.normal(size=len(step))
    found["sum_of_squares"] = found["count"]
    found["sketch"] = random.normal(size=found["sketch"].shape) * np.sqrt(found["count"] / 64.0)[:, None]
    for name in ("fingerprint", "multiset"):
        found[name] = random.integers(2**64, size=len(step), dtype=np.uint64)
    for name in ("row", "column"):
        found[f"{name}_largest"] = 4.0
        found[f"{name}_squares"] = (found["count"] / BUCKETS)[:, None]
    for name in _OF_FRACTIONS:
        found[name][[site.about[0] == "batch" for site in step]] = 0.0  # whole numbers: tokens
    return found


_OF_FRACTIONS = ("sum", "sum_of_squares", "sketch", "row_largest", "column_largest", "row_squares", "column_squares")


def shares(step: Sequence[Site], whole: Summaries, num_ranks: int, number: int) -> Iterator[Summaries]:
    """Summaries of each rank's shards: their merge is the summary of the whole."""
    left = whole.copy()
    copies = np.array([site.whole for site in step])
    sums = [name for name in SUMMARY.names or () if SUMMARY[name].base.kind == "f" and not _is_extreme(name)]
    factors = np.array([_factor(site, num_ranks) for site in step])
    for rank in range(num_ranks):
        random = np.random.default_rng((number, rank))
        shards = [site.shard(rank, num_ranks) for site in step]
        size = np.array([shard.size for shard in shards])
        last = np.array([_is_last(site, shard) for site, shard in zip(step, shards, strict=True)])
        part = whole.copy()
        part["count"] = size
        part["negative"] = np.where(last, left["negative"], np.minimum(size, left["negative"]) // 2)
        for name in sums:
            # What is left for the last rank then stays close to its share, and positive.
            noise = 1.0 + 0.1 / math.sqrt(num_ranks) * random.normal(size=whole[name].shape)
            share = size.reshape(-1, *(1,) * (whole[name].ndim - 1)) / np.maximum(1, whole["count"]).reshape(
                -1, *(1,) * (whole[name].ndim - 1)
            )
            part[name] = np.where(last.reshape(share.shape), left[name], whole[name] * share * noise)
        for name in ("fingerprint", "multiset"):
            part[name] = np.where(last, left[name], random.integers(2**64, size=len(step), dtype=np.uint64))
        part[size == 0] = empty()
        for name in (*sums, "negative", "fingerprint", "multiset"):
            left[name] -= part[name]
        part[copies] = whole[copies]
        yield scale(part, factors)


def _factor(site: Site, num_ranks: int) -> float:
    """What an engine that averages gradients multiplies those of activations by."""
    return float(num_ranks) if site.about[0] == "backward" else 1.0


def _is_last(site: Site, shard: Shard) -> bool:
    return bool(site.shape) and shard.size > 0 and shard.offset[0] + shard.shape[0] == site.shape[0]


def _is_extreme(name: str) -> bool:
    return name in ("minimum", "maximum", "smallest") or name.endswith("largest")


def write(path: Path, *, num_ranks: int, num_steps: int) -> int:
    """Write a recording; returns the observations of a step, over all ranks."""
    run = {
        "world_size": num_ranks,
        "mesh": {"data_parallel": num_ranks, "engine": "fully_shard"} if num_ranks > 1 else None,
        "settings": {"observe": ["batch", "forward", "backward", "grad", "optimizer", "param", "update"], "every": 1},
        "versions": {},
        "environment": {},
    }
    held = parameters()
    modules = {site.about[2]: "Linear" for site in sites(first_step=False) if site.about[0] == "forward"}
    content = {
        "model": "Llama",
        "modules": modules,
        "parameters": {path: {"shape": list(shape), "dtype": "bfloat16"} for path, shape in held.items()},
        "buffers": {},
        "tied": {},
        "optimizers": [{"name": "optimizer", "type": "AdamW", "groups": [list(held)]}],
    }
    writers = [RecordingWriter(str(path), run=run, rank=rank, world_size=num_ranks) for rank in range(num_ranks)]
    for writer in writers:
        writer.write_rank(content)
    for number in range(num_steps):
        step = list(sites(first_step=number == 0))
        whole = of_the_whole(step, number)
        for rank, part in enumerate(shares(step, whole, num_ranks, number)):
            seen = [_observed(site, order, number, rank, num_ranks) for order, site in enumerate(step)]
            writers[rank].write_step(seen, part)
    for writer in writers:
        writer.close()
    return len(step) * num_ranks


def _observed(site: Site, order: int, step: int, rank: int, num_ranks: int) -> Observation:
    phase, stage, path, slot = site.about
    dtype = "int64" if phase == "batch" else "float64" if site.whole else "bfloat16"
    return Observation(
        step=step, micro_step=0, optimizer="optimizer", phase=phase, stage=stage, path=path, slot=slot, call=0,
        order=order, dtype=dtype, shard=site.shard(rank, num_ranks),
        factor=_factor(site, num_ranks), term=rank,
    )  # fmt: skip


def measure(baseline: Path, candidate: Path) -> dict[str, float | int | str]:
    """Compare two recordings in a process of their own."""
    command = [sys.executable, "-c", _CHILD, str(baseline), str(candidate)]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float | int | str] = json.loads(result.stdout)
    if found["verdict"] not in ("identical", "equivalent"):
        raise SystemExit(f"{baseline} and {candidate}: {found}")
    return found


def _size_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _row(name: str, num_ranks: int, num_steps: int, directory: Path) -> str:
    """Write a run on so many ranks and one on a single rank, compare and remove them."""
    sides = directory / "one", directory / "many"
    begin = time.perf_counter()
    write(sides[0], num_ranks=1, num_steps=num_steps)
    observations = write(sides[1], num_ranks=num_ranks, num_steps=num_steps)
    wrote = time.perf_counter() - begin
    found = measure(*sides)
    size = _size_bytes(sides[1])
    for side in sides:
        shutil.rmtree(side)
    print(f"wrote {num_ranks} ranks, {num_steps} steps in {wrote:.0f} s: {found}", file=sys.stderr)
    per = float(found["cpu_seconds"]) / num_steps / (observations + observations / num_ranks)
    used = (int(found["peak_bytes"]) - int(found["empty_bytes"])) / 1e6
    return (
        f"| {name} | {num_ranks} | {num_steps} | {observations * num_steps:,} | {size / 1e6:,.0f} MB | "
        f"{float(found['cpu_seconds']):.1f} s | {float(found['seconds']):.1f} s | {per * 1e6:.1f} us | {used:,.0f} MB |"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=RANKS)
    parser.add_argument("--steps", type=int, nargs="*", default=STEPS)
    parser.add_argument("--directory", help="where recordings are written for a while; default: the temporary one")
    arguments = parser.parse_args()
    print(f"{machine()}\n")
    print("| | ranks | steps | observations | on disk | CPU time | elapsed | CPU time each | peak memory |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        for num_ranks in arguments.ranks:
            print(_row("ranks", num_ranks, 1, Path(name)), flush=True)
        for num_steps in arguments.steps:
            print(_row("steps", RANKS_OF_LONG_RUNS, num_steps, Path(name)), flush=True)


if __name__ == "__main__":
    main()
