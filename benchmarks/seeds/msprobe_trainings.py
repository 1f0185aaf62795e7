"""The trainings that msprobe's gradient monitor and its replacement are compared on.

A program: `python -m benchmarks.seeds.msprobe_trainings torch msprobe.pytorch` runs those of one framework with the
monitor of one package, each in a process of its own, and leaves the files in the current directory. The last line that
it prints is JSON: the error that each ended with, and the warnings.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

REPLACEMENT = "traindiff.compat.msprobe"

_LATER = {REPLACEMENT: ("traindiff.observe.torch.session.recorder", "traindiff.core.kernels.cpu.summarize")}
"""By package: what it imports when it is needed."""

MOST_SECONDS = 300
"""How long one training may take: the original hangs in MindSpore's graph mode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A monitored training. Names of trainings have no spaces: the original refuses paths that have some.

    Attributes:
        level: Of the monitor.
        steps: Iterations.
        dtype: Of the model.
        ranks: Processes.
        mode: Of MindSpore.
        file: Entries of the configuration file, instead of the usual ones.
        own: The same of the monitor's own entries.
        how: What is special about it.
    """

    level: str = "L1"
    steps: int = 3
    dtype: str = "float32"
    ranks: int = 1
    mode: str = "PYNATIVE_MODE"
    file: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    how: str = ""


WITHOUT_STOP = ("no-stop", "around-steps")
"""Trainings that leave it to the end of the process to end the monitor, which a copy of a process does not have."""

SMALL = {"bounds": [-0.05, 0, 0.05]}

TORCH: dict[str, Run] = {
    "L0": Run(level="L0"),
    "L1": Run(),
    "L2": Run(level="L2"),
    "float64": Run(level="L2", dtype="float64", own=SMALL),
    "bfloat16": Run(level="L2", dtype="bfloat16", own=SMALL),
    "float16": Run(level="L2", dtype="float16", own=SMALL),
    "bounds": Run(level="L2", own={"bounds": [-(2**63), -1, -0.05, -1e-3, 0, 1e-3, 0.05, 2**63 - 1]}),
    "defaults": Run(how="defaults"),
    "all-tasks": Run(how="all-tasks"),
    "step": Run(steps=9, file={"step": [0, 2, "4-6"]}),
    "step-argument": Run(steps=5, file={"step": [0]}, how="step-argument"),
    "param_list": Run(level="L2", own={"param_list": ["fc.bias", "scale"]}),
    "optimizer-calls": Run(steps=6, how="optimizer-calls"),
    "on-the-class": Run(how="on-the-class"),
    "around-steps": Run(how="around-steps"),
    "no-stop": Run(how="no-stop"),
    "main_grad": Run(level="L2", how="main_grad"),
    "main_grad-of-copies": Run(level="L2", how="copies"),
    "no-gradient": Run(how="no-gradient"),
    "traced": Run(how="traced"),
    "one-process": Run(file={"rank": [1]}),
    "ranks": Run(ranks=2, level="L2"),
    "rank-1-of-2": Run(ranks=2, file={"rank": [1]}),
    "ranks-0-1": Run(ranks=2, file={"rank": ["0-1"]}),
    "other-batches": Run(level="L2", how="other-batches"),
    "Adam": Run(level="L2", how="Adam"),
}

MINDSPORE: dict[str, Run] = {
    "ms-L0": Run(level="L0"),
    "ms-L1": Run(),
    "ms-L2": Run(level="L2", own=SMALL),
    "ms-float16": Run(level="L2", dtype="float16", own=SMALL),
    "ms-step": Run(steps=7, file={"step": [0, "2-3", 6]}),
    "ms-param_list": Run(own={"param_list": ["0.bias", "2.weight"]}),
    "ms-ranks": Run(ranks=2, level="L2"),
    "ms-rank-1-of-2": Run(ranks=2, file={"rank": [1]}),
    "graph-L1": Run(mode="GRAPH_MODE"),
}

GRAPH: dict[str, Run] = {
    "graph-L0": Run(level="L0", mode="GRAPH_MODE"),
    "graph-L2": Run(level="L2", mode="GRAPH_MODE", own=SMALL),
    "graph-step": Run(steps=7, mode="GRAPH_MODE", file={"step": [0, "2-3", 6]}),
    "graph-ranks": Run(ranks=2, level="L2", mode="GRAPH_MODE"),
    "graph-rank-1-of-2": Run(ranks=2, mode="GRAPH_MODE", file={"rank": [1]}),
}
"""Of the replacement alone: the original ends every training in graph mode on the CPU; "graph-L1" shows it."""


def main(what: str, tool: str, *arguments: str) -> None:
    """Run the trainings of a framework, one training of MindSpore, or a comparison."""
    if what == "compare":
        found: Any = _ended(partial(import_module(tool).GradComparator.compare_distributed, *arguments))
    elif arguments:
        (key,) = arguments
        train = _train_torch if what == "torch" else _train_mindspore
        found = _ended(partial(train, tool, {**TORCH, **MINDSPORE, **GRAPH}[key], Path(key)))
    elif what == "torch":
        for module in ("torch.nn.parallel", "torch.distributed", tool, *_LATER.get(tool, ())):
            import_module(module)  # once, for all copies of this process
        found = {
            key: _in_new_process(what, tool, key, run)
            if run.how in WITHOUT_STOP
            else _in_copy(partial(_train_torch, tool, run, Path(key)))
            for key, run in TORCH.items()
        }
    else:
        runs = MINDSPORE if tool != REPLACEMENT else {**MINDSPORE, **GRAPH}
        found = {key: _in_new_process(what, tool, key, run) for key, run in runs.items()}
    print(f"\n{json.dumps(found)}", flush=True)


def _ended(run: Callable[[], Any]) -> dict[str, Any]:
    """The error that a training ended with, and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = ""
        try:
            run()
        except Exception as raised:  # noqa: BLE001  it is compared
            error = f"{type(raised).__name__}: {raised}"
    return {"error": error, "warnings": [str(one.message) for one in caught]}


def _in_copy(run: Callable[[], Any]) -> dict[str, Any]:
    """Run it in a copy of this process: in one process, the original can neither end nor begin again."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sending.send(_ended(run)))
    process.start()
    process.join(MOST_SECONDS)
    found = receiving.recv() if receiving.poll() else {"error": f"ended with {process.exitcode}", "warnings": []}
    process.kill()
    result: dict[str, Any] = found
    return result


def _in_new_process(framework: str, tool: str, key: str, run: Run) -> dict[str, Any]:
    """Run a training in a new process, or in as many as there are ranks (of MindSpore)."""
    program = ["-m", "benchmarks.seeds.msprobe_trainings", framework, tool, key]
    if run.ranks > 1:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        program[:2] = [
            "-m", "mindspore.parallel.cluster.run", f"--worker_num={run.ranks}", f"--local_worker_num={run.ranks}",
            f"--master_port={port}", f"--log_dir={Path.cwd() / 'logs'}", "--join=True", __file__,
        ]  # fmt: skip
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # the launcher takes the first Python
    with subprocess.Popen(
        [sys.executable, *program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env={**os.environ, "PATH": path},
    ) as process:  # fmt: skip
        try:
            printed, _ = process.communicate(timeout=MOST_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            return {"error": f"it did not end within {MOST_SECONDS} seconds", "warnings": []}
    if process.returncode:
        return {"error": f"ended with {process.returncode}: {printed[-500:]}", "warnings": []}
    said = [line for line in printed.splitlines() if line.startswith('{"error"')]
    result: dict[str, Any] = json.loads(said[-1]) if said else {"error": "", "warnings": []}  # ranks write to files
    return result


def _configured(run: Run, where: Path) -> str:
    """Write the configuration file; returns its path."""
    where.mkdir(exist_ok=True)
    content: dict[str, Any] = {"task": "grad_probe", "dump_path": str(where / "dump")}
    if run.how != "defaults":
        own = {"grad_level": run.level, "param_list": [], "bounds": [-1, 0, 1], **run.own}
        content |= {"rank": [], "step": [], "grad_probe": own, **run.file}
    if run.how == "all-tasks":
        content |= {
            "level": "L1", "enable_dataloader": False, "async_dump": False, "run_ut": {"white_list": []},
            "tensor": {"scope": [], "list": [], "data_mode": ["all"], "file_format": "npy"},
            "free_benchmark": {"scope": [], "list": [], "fuzz_device": "npu", "max_sample": 20},
        }  # fmt: skip
    path = where / f"config-{os.getpid()}.json"
    path.write_text(json.dumps(content))
    return str(path)


def _train_torch(tool: str, run: Run, where: Path) -> None:
    if run.ranks == 1:
        _steps_of_torch(tool, run, where, rank=0)
        return
    where.mkdir(exist_ok=True)
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_train_rank, args=(tool, run, where, rank)) for rank in range(run.ranks)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    if codes := [one.exitcode for one in ranks if one.exitcode]:
        raise RuntimeError(f"ranks ended with {codes}")


def _train_rank(tool: str, run: Run, where: Path, rank: int) -> None:
    from torch import distributed

    distributed.init_process_group("gloo", f"file://{where.absolute()}/meeting", rank=rank, world_size=run.ranks)
    _steps_of_torch(tool, run, where, rank=rank)
    distributed.barrier()
    distributed.destroy_process_group()


def _model(run: Run) -> Any:
    import torch
    from torch import Tensor, nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 8)
            self.norm = nn.LayerNorm(8)
            self.head = nn.Linear(8, 3, bias=False)
            self.scale = nn.Parameter(torch.ones(1))
            self.unused = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(self.fc(x)).relu()) * self.scale

    torch.manual_seed(0)
    model = Model().to(getattr(torch, run.dtype))
    if run.how == "traced":
        return torch.jit.trace(model, torch.ones(1, 6), check_trace=False)
    return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True) if run.ranks > 1 else model


def _steps_of_torch(tool: str, run: Run, where: Path, *, rank: int) -> None:
    import torch

    torch.set_num_threads(1)
    model = _model(run)
    parameters = [*model.parameters()]
    held = [one.detach().float().clone().requires_grad_() for one in parameters] if run.how == "copies" else parameters
    optimizer = (torch.optim.Adam if run.how == "Adam" else torch.optim.SGD)(held, lr=0.1)
    kind = import_module(tool).PrecisionDebugger
    debugger = kind(_configured(run, where), **({"step": [1, "3-4"]} if run.how == "step-argument" else {}))
    (kind if run.how == "on-the-class" else debugger).monitor(model)
    data = torch.Generator().manual_seed(rank + (10 if run.how == "other-batches" else 1))
    for step in range(run.steps):
        if run.how == "around-steps":
            debugger.start(model)
        if run.how != "no-gradient":
            inputs = torch.randn(4, 6, generator=data).to(getattr(torch, run.dtype))
            model(inputs).square().mean().backward()
        if run.how in ("main_grad", "copies"):
            _accumulate(parameters, keep=run.how == "main_grad")
        if run.how != "optimizer-calls" or step % 2:
            optimizer.step()
            optimizer.zero_grad()
        if run.how == "around-steps":
            debugger.stop()
            debugger.step()
    if run.how not in WITHOUT_STOP and tool == REPLACEMENT:
        debugger.stop()  # under PyTorch, the original has nothing to end, and its `stop` does nothing


def _accumulate(parameters: list[Any], *, keep: bool) -> None:
    """Put gradients into `main_grad`, as Megatron does."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.main_grad = 2 * parameter.grad.float()
            parameter.grad = parameter.grad if keep else None


def _train_mindspore(tool: str, run: Run, where: Path) -> None:
    import mindspore
    import numpy as np
    from mindspore import Tensor, communication, nn

    rank = 0
    mindspore.set_context(mode=getattr(mindspore, run.mode), device_target="CPU")
    if run.ranks > 1:
        communication.init()
        rank = communication.get_rank()
        mindspore.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True, device_num=run.ranks)
    random = np.random.default_rng(0)
    net = nn.SequentialCell(nn.Dense(6, 8), nn.ReLU(), nn.Dense(8, 3))
    dtype = getattr(mindspore, run.dtype)
    net.to_float(dtype)
    for parameter in net.trainable_params():
        parameter.set_data(Tensor(random.standard_normal(parameter.shape).astype(np.float32), dtype))
    optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
    debugger = import_module(tool).PrecisionDebugger(_configured(run, where))
    debugger.monitor(optimizer)

    def forward(inputs: Any) -> Any:  # MindSpore cannot compile a lambda here
        return net(inputs).square().mean()

    gradients = mindspore.value_and_grad(forward, None, optimizer.parameters)
    reduced = nn.DistributedGradReducer(optimizer.parameters, mean=True, degree=run.ranks) if run.ranks > 1 else tuple

    def step(inputs: Any) -> Any:
        loss, found = gradients(inputs)
        optimizer(reduced(found))
        return loss

    call = mindspore.jit(step) if run.mode == "GRAPH_MODE" else step
    random = np.random.default_rng(1 + rank)
    for _ in range(run.steps):
        call(Tensor(random.standard_normal((4, 6)).astype(np.float32), dtype))
    debugger.stop()


if __name__ == "__main__":
    # As a file, which the launcher of MindSpore runs, it would find the `msprobe.py` beside it in place of the package.
    sys.path[:] = [path for path in sys.path if Path(path) != Path(__file__).parent]
    main(*sys.argv[1:])
