"""Trainings with transformers' detector, or with that of `traindiff.compat.transformers`.

They run in the environment of the original: `python -m benchmarks.seeds.debug_underflow_overflow_trainings MODULE` runs
all with the detector of one module, and writes what came out as JSON.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

ORIGINAL = "transformers.debug_utils"
REPLACEMENT = "traindiff.compat.transformers"

METHODS = (
    "analyse_model", "register_forward_hook", "_register_forward_hook", "forward_hook", "create_frame",
    "analyse_variable", "expand_frame", "save_frame", "batch_start_frame", "batch_end_frame", "reset_saved_frames",
    "trace_frames", "dump_saved_frames",
)  # fmt: skip
"""All methods of the original."""

ATTRIBUTES = (
    "trace_batch_nums", "abort_after_batch_num", "frames", "frame", "batch_number", "total_calls", "detected_overflow",
    "prefix",
)  # fmt: skip
"""Its attributes that are no modules."""

Lines = list[str]
Results = dict[str, Any]


def _net(dtype: str = "float32") -> Any:
    """A small model with inputs and outputs of all kinds; `factor` is what breaks it."""
    import torch
    from torch import Tensor, nn

    class Several(nn.Module):
        def forward(self, x: Tensor, flag: int) -> Any:
            return x, (x * 2, None), "text", None, torch.tensor(3), flag

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(7, 8)
            self.blocks = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.5), nn.Linear(8, 4))
            self.several = Several()
            self.factor = 1.0

        def forward(self, tokens: Tensor) -> Any:
            hidden, *_ = self.several(self.table(tokens) * self.factor, 1)
            return self.blocks(hidden), None

    torch.manual_seed(0)
    return Net().to(getattr(torch, dtype))


def _ran(
    tool: ModuleType, factors: list[float], *, kind: Any = None, dtype: str = "float32", **arguments: Any
) -> Lines:
    """Train with the detector; returns what it printed, the error, and the state of the detector."""
    import torch

    model = _net(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    detector = (kind or tool.DebugUnderflowOverflow)(model, **arguments)
    error = "no error"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            for model.factor in factors:
                model(torch.arange(7))[0].sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        except ValueError as raised:
            error = str(raised)
    state = {name: _plain(getattr(detector, name)) for name in ATTRIBUTES}
    return [printed.getvalue(), error, json.dumps(state)]


def _plain(value: Any) -> Any:
    return list(value) if hasattr(value, "append") else value


def _detection(tool: ModuleType) -> Lines:
    return [
        line
        for dtype in ("float32", "bfloat16", "float16", "float64")
        for factors in ([1.0] * 6, [1.0, 1.0, math.inf], [1e4, 1e30, 1e39], [1.0, math.nan, 1.0])
        for line in _ran(tool, factors, dtype=dtype)
    ]


def _subclasses(tool: ModuleType) -> Lines:
    found = []
    for method in METHODS:
        calls: list[int] = []

        def noting(self: Any, *args: Any, _method: str = method, _calls: list[int] = calls, **kwargs: Any) -> Any:
            _calls.append(len(args) + len(kwargs))
            return getattr(tool.DebugUnderflowOverflow, _method)(self, *args, **kwargs)

        kind = type("Mine", (tool.DebugUnderflowOverflow,), {method: noting})
        found += [*_ran(tool, [1.0, 1.0, math.inf], kind=kind, trace_batch_nums=[1]), f"{method}: {len(calls)} calls"]
    return found


def _own_frames(tool: ModuleType) -> Lines:
    """A subclass that uses the documented parts to print something else."""

    class Mine(tool.DebugUnderflowOverflow):  # type: ignore[misc, name-defined]
        def create_frame(self, module: Any, input: Any, output: Any) -> None:  # noqa: A002, ARG002
            self.expand_frame(f"{self.prefix}{self.total_calls} {self.module_names[module]}")
            for name, parameter in module.named_parameters(recurse=False):
                self.analyse_variable(parameter * math.inf, name)
            if module is self.model:
                self.batch_end_frame()
            self.save_frame("the end of a frame")

    return [*_ran(tool, [1.0], kind=Mine), *_ran(tool, [1.0, 1.0], kind=Mine, trace_batch_nums=[0])]


def _functions(tool: ModuleType) -> Lines:
    import torch

    found = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64):
        odd = [] if dtype == torch.int64 else [math.inf, -math.inf, math.nan]
        for last in (0, *odd):
            tensor = torch.tensor([[-3, 0.5, 1e-4], [2, last, 1e4]]).to(dtype)
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                detected = tool.detect_overflow(tensor, "after layer_norm")
            found += [tool.get_abs_min_max(tensor, "weight"), f"{detected} {printed.getvalue()}"]
    return found


def _replaced_functions(tool: ModuleType) -> Lines:
    """The documentation of `detect_overflow` invites users to change it."""
    before = tool.detect_overflow, tool.get_abs_min_max
    try:
        tool.detect_overflow = lambda var, _: bool((var.abs() > 2).any())  # type: ignore[attr-defined]
        tool.get_abs_min_max = lambda var, ctx: f"{var.float().norm():.3e} {ctx}"  # type: ignore[attr-defined]
        return _ran(tool, [1.0, 3.0])
    finally:
        tool.detect_overflow, tool.get_abs_min_max = before  # type: ignore[attr-defined]


def _options(tool: ModuleType) -> Lines:
    """`DebugOption` in the ways in which scripts use it, among the options that `TrainingArguments` has read."""
    from transformers import TrainingArguments

    found = [f"{one} {one!r} {one.value} {one.name} {str.__str__(one)}" for one in tool.DebugOption]
    for text in ("", "underflow_overflow", "tpu_metrics_debug underflow_overflow"):
        with tempfile.TemporaryDirectory() as directory:
            given = TrainingArguments(directory, debug=text, use_cpu=True, report_to=[]).debug
        found += [f"{one in given} {one in {*given}}" for one in tool.DebugOption]
    try:
        tool.DebugOption("x")
    except ValueError as error:
        found.append(str(error))
    return [*found, str(tool.DebugOption("underflow_overflow") is tool.DebugOption.UNDERFLOW_OVERFLOW)]


def _trainer(tool: ModuleType) -> Lines:
    """`--debug underflow_overflow` of a `Trainer`; with the replacement, its callback."""
    import torch
    import transformers

    is_original = tool.__name__ == ORIGINAL
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=50, n_positions=16)
    tokens = torch.randint(0, 50, (16, 6), generator=torch.Generator().manual_seed(0))
    samples = [{"input_ids": row, "labels": row} for row in tokens]
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    model.transformer.h[0].mlp.c_fc.weight.data.fill_(1e38)
    with tempfile.TemporaryDirectory() as directory:
        settings = {"debug": "underflow_overflow"} if is_original else {}
        arguments = transformers.TrainingArguments(
            directory, max_steps=2, per_device_train_batch_size=4, report_to=[], use_cpu=True, disable_tqdm=True,
            save_strategy="no", **settings,
        )  # fmt: skip
        callbacks = [] if is_original else [tool.UnderflowOverflowCallback()]
        trainer = transformers.Trainer(model, arguments, train_dataset=samples, callbacks=callbacks)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            try:
                trainer.train()
            except ValueError as error:
                return [printed.getvalue(), str(error)]
    return [printed.getvalue(), "no error"]


def _ranks(tool: ModuleType) -> Lines:
    """Two ranks under DistributedDataParallel, with inputs of their own."""
    import torch.multiprocessing as processes

    with tempfile.TemporaryDirectory() as directory:
        processes.spawn(_rank, args=(tool.__name__, directory), nprocs=2)
        return [line for rank in range(2) for line in json.loads(Path(directory, f"{rank}.json").read_text())]


def _rank(rank: int, module: str, directory: str) -> None:
    import torch
    from torch import distributed, nn

    distributed.init_process_group("gloo", init_method=f"file://{directory}/meeting", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    tool = import_module(module)
    tool.DebugUnderflowOverflow(model, trace_batch_nums=[1])
    found = []
    for factor in (1.0, 2.0, math.inf):
        inputs = torch.full((3, 4), factor + rank)
        found += _raised(lambda x=inputs: model(x).sum().backward())  # type: ignore[misc]
    Path(directory, f"{rank}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


def _raised(run: Callable[[], Any]) -> Lines:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            run()
        except (ValueError, RuntimeError) as error:
            kind = "ValueError" if isinstance(error, ValueError) else "RuntimeError"
            return [printed.getvalue(), f"{kind}: {error}"]
    return [printed.getvalue(), "none raised"]


def _dataclasses(tool: ModuleType) -> Lines:
    import torch
    from torch import nn
    from transformers.modeling_outputs import CausalLMOutput

    class Model(nn.Module):
        def forward(self, x: Any) -> Any:
            return CausalLMOutput(logits=x / 0)

    model = nn.Sequential(Model())
    tool.DebugUnderflowOverflow(model)
    return _raised(lambda: model(torch.ones(3)))


def _t5(tool: ModuleType) -> Lines:
    import torch
    import transformers

    config = transformers.T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        model = transformers.T5ForConditionalGeneration(config).to(dtype)
        tool.DebugUnderflowOverflow(model, max_frames_to_save=100, trace_batch_nums=[0], abort_after_batch_num=0)
        tokens = torch.arange(12).reshape(2, 6)
        found += _raised(lambda m=model, t=tokens: m(input_ids=t, labels=t))  # type: ignore[misc]
    return found


def _shared(tool: ModuleType) -> Lines:
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.holder = nn.ModuleList([self.inner])

        def forward(self, x: Any) -> Any:
            return self.inner(x)

    torch.manual_seed(0)
    model = Model()
    tool.DebugUnderflowOverflow(model, trace_batch_nums=[0])
    return _raised(lambda: model(torch.ones(2)))


def _odd_tensors(tool: ModuleType) -> Lines:
    import torch
    from torch import nn

    found = []
    for tensor in (torch.empty(0), torch.tensor([True, False]), torch.eye(2).to_sparse()):
        model = nn.Sequential(nn.Identity())
        tool.DebugUnderflowOverflow(model, trace_batch_nums=[0])
        found += _raised(lambda m=model, t=tensor: m(t))  # type: ignore[misc]
    return found


RUNS: dict[str, Callable[[ModuleType], list[Any]]] = {
    "detection": _detection,
    "frames": lambda tool: [
            line for most in (1, 3, 100, 21) for line in _ran(tool, [1.0] * 9 + [math.inf], max_frames_to_save=most)
        ],
    "trace": lambda tool: [
            line for factors in ([1.0] * 5, [1.0, math.inf, 1.0, 1.0, 1.0], [1.0] * 3 + [math.inf] * 2)
            for line in _ran(tool, factors, trace_batch_nums=[1, 3])
        ],
    "abort": lambda tool: [
            line for traced in ([], [1, 3]) for last in (0, 3)
            for line in _ran(tool, [1.0] * 6, trace_batch_nums=traced, abort_after_batch_num=last)
        ],
    "functions": _functions,
    "replaced functions": _replaced_functions,
    "subclasses": _subclasses,
    "own frames": _own_frames,
    "options": _options,
    "ranks": _ranks,
    "trainer": _trainer,
    "dataclasses": _dataclasses, "t5": _t5, "shared": _shared, "odd tensors": _odd_tensors,
}  # fmt: skip


def main(module: str) -> None:
    """Run everything with one module, and write the results."""
    tool = import_module(module)
    results = {key: run(tool) for key, run in RUNS.items()}
    sys.stdout.write(f"\n{json.dumps(results)}\n")


if __name__ == "__main__":
    main(sys.argv[1])
