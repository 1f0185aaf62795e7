"""What recording costs on a GPU, in under 8 minutes: `make bench-gpu`. Writes benchmarks/GPU.md.

Plain and observed training take turns in one process, a few steps each, and the time includes the host's: the device is
waited for at the end of each turn. Rows that would begin after the time limit are left out, and named.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from math import prod
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import gpu_kernel
import torch
from gpt import GPT
from machine import machine
from overhead import FOUR, debug_underflow_overflow
from torch import Tensor
from torch.nn import functional

import traindiff
from traindiff.core.tap_registry import OBSERVED_BY_DEFAULT
from traindiff.run.doctor.timing import Ratio, interleaved

RESULTS = Path(__file__).with_name("GPU.md")
LIMIT_SECONDS = 8 * 60.0
STEPS_A_TURN = 3


@dataclass(frozen=True, kw_only=True)
class Size:
    """A GPT and its batches."""

    name: str
    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int
    batch: int


SIZES = (
    Size(name="GPT-2, 124 M", layers=12, width=768, heads=12, vocabulary=50257, context=1024, batch=8),
    Size(name="GPT, 1.3 B", layers=24, width=2048, heads=16, vocabulary=50257, context=1024, batch=4),
)
TINY = (Size(name="tiny", layers=2, width=64, heads=4, vocabulary=256, context=32, batch=2),)


class Training:
    """A GPT in bfloat16 with a fused AdamW, as the benchmarks of peers have it."""

    def __init__(self, size: Size, device: torch.device, *, compiled: bool) -> None:
        torch.manual_seed(0)
        self.model = GPT(
            size.layers, width=size.width, vocabulary=size.vocabulary, heads=size.heads, context=size.context
        ).to(device, torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.call: Callable[[Tensor], Tensor] = torch.compile(self.model) if compiled else self.model
        self._tokens = torch.randint(size.vocabulary, (size.batch, size.context + 1), device=device)

    def step(self) -> None:
        """One step of the optimizer."""
        logits = self.call(self._tokens[:, :-1])
        functional.cross_entropy(logits.flatten(0, 1), self._tokens[:, 1:].flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def turn(self) -> None:
        """A few steps, until the device has done them."""
        for _ in range(STEPS_A_TURN):
            self.step()
        synchronize()


def recording(training: Training, directory: Path, settings: dict[str, Any]) -> AbstractContextManager[Any]:
    """A recording of the training."""
    path = directory / "run"
    shutil.rmtree(path, ignore_errors=True)
    return traindiff.record(path, training.model, training.optimizer, **settings)


Watch = Callable[[Training, Path], AbstractContextManager[Any]]

OBSERVED: dict[str, Watch] = {
    "nothing (how far ratios of equal work scatter)": lambda *_: nullcontext(),
    "parameters, gradients, activations, their gradients": partial(recording, settings={"observe": FOUR}),
    "what `record` observes by default": partial(recording, settings={}),
    "the same, and the witness": partial(recording, settings={"observe": (*OBSERVED_BY_DEFAULT, "witness")}),
    "attached, between recorded steps (every=100)": partial(recording, settings={"every": 100}),
    "`watch`": lambda training, _: traindiff.watch(training.model, training.optimizer),
}


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def memory_speed(device: torch.device) -> float:
    """Bytes a second at which `torch.sum` reads a large tensor: the best of several."""
    tensor = torch.ones(1 << 28 if device.type == "cuda" else 1 << 24, device=device)
    best = 0.0
    for _ in range(5):
        synchronize()
        before = perf_counter()
        tensor.sum()
        synchronize()
        best = max(best, tensor.nbytes / (perf_counter() - before))
    return best


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What one step of a recording holds."""

    num_observations: int
    num_bytes: int


def observed_in(directory: Path) -> Observed:
    """The observations of the last step, and the bytes of the tensors that they read."""
    path = directory / "run"
    if not path.exists():
        return Observed(num_observations=0, num_bytes=0)
    *_, last = traindiff.open_recording(str(path)).steps(0)
    sizes = [prod(seen.shard.shape) * _item_size(seen.dtype) for seen in last.observations if not seen.unobserved]
    return Observed(num_observations=len(sizes), num_bytes=sum(sizes))


def _item_size(name: str) -> int:
    dtype = getattr(torch, name, None)
    return int(dtype.itemsize) if isinstance(dtype, torch.dtype) else 8


def measured(
    size: Size, device: torch.device, watch: Watch, *, compiled: bool, rounds: int
) -> tuple[Ratio, float, Observed]:
    """The ratio of step times, the microseconds of CPU time of the host for each observation, and what was observed."""
    plain, watched = (Training(size, device, compiled=compiled) for _ in range(2))
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        with watch(watched, directory):  # recorded first: attaching makes compiled code be compiled anew
            for training in (plain, watched):
                training.turn()
            ratio = interleaved(plain.turn, watched.turn, rounds=rounds, clock=perf_counter)
            host = interleaved(plain.turn, watched.turn, rounds=max(2, rounds // 3), clock=process_time)
        seen = observed_in(directory)
    more = (host.median - 1.0) * host.baseline_seconds / STEPS_A_TURN
    each = more / seen.num_observations * 1e6 if seen.num_observations else 0.0
    del plain, watched
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    torch.compiler.reset()
    return ratio, each, seen


def rows(sizes: tuple[Size, ...], device: torch.device, *, rounds: int, until: float) -> list[str]:
    """Lines of the table of trainings."""
    speed = memory_speed(device)
    watches = dict(OBSERVED)
    try:
        import transformers
    except ModuleNotFoundError:
        print("transformers is not installed (pip install 'traindiff[bench]'): no row for DebugUnderflowOverflow.")
    else:
        name = f"transformers {transformers.__version__} DebugUnderflowOverflow (forward only)"
        watches[name] = lambda training, _: debug_underflow_overflow(training)
    lines = [
        f"`torch.sum` reads {speed / 1e9:.0f} GB/s.",
        "",
        "| training | what is observed | step time / plain | quartiles | plain step | memory's limit | host, us each |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    left_out = []
    for size in sizes:
        for compiled in (False, True):
            for name, watch in watches.items():
                what = f"{size.name}, {'compiled' if compiled else 'eager'} | {name}"
                if perf_counter() > until:
                    left_out.append(what.replace(" |", ":"))
                    continue
                ratio, each, seen = measured(size, device, watch, compiled=compiled, rounds=rounds)
                plain = ratio.baseline_seconds / STEPS_A_TURN
                limit = f"{1 + seen.num_bytes / speed / plain:.3f}" if seen.num_bytes else "-"
                host = f"{each:.1f}" if seen.num_observations else "-"
                lines.append(
                    f"| {what} | **{ratio.median:.3f}** | {ratio.low:.3f} - {ratio.high:.3f} | {plain * 1e3:.1f} ms "
                    f"| {limit} | {host} |"
                )
                print(lines[-1], flush=True)
    if left_out:
        lines += ["", f"Not measured for want of time: {'; '.join(left_out)}."]
    return lines


def card(device: torch.device) -> str:
    """The GPU and its driver."""
    if device.type != "cuda":
        return "no GPU"
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split("\n")[0].strip()
    except (OSError, subprocess.CalledProcessError):
        driver = "unknown"
    return f"{torch.cuda.get_device_name(device)}, driver {driver}, CUDA {torch.version.cuda}"


def main() -> None:
    """Measure, print, and write GPU.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", help="cpu tries the program with a tiny model; writes nothing")
    parser.add_argument("--rounds", type=int, default=9, help="rounds per row")
    parser.add_argument("--seconds", type=float, default=LIMIT_SECONDS, help="no row begins after this time")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("There is no GPU here: nothing was measured.")
        return
    began = perf_counter()
    head = f"Written by `make bench-gpu` on {datetime.now(UTC):%Y-%m-%d}. {card(device)}. {machine()}."
    print(head)
    sizes = SIZES if device.type == "cuda" else TINY
    lines = rows(sizes, device, rounds=options.rounds, until=began + options.seconds - 30.0)
    if device.type == "cuda":
        kernels = gpu_kernel.table(device)
        text = [
            "# What recording costs on a GPU",
            "",
            head,
            "",
            *(__doc__ or "").splitlines()[2:],
            "",
            *lines,
            "",
            *kernels,
        ]
        RESULTS.write_text("\n".join([*text, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
