"""Trainings with ONNX Runtime's convergence tools, or with those of `traindiff.compat.onnxruntime`.

They run in the environment of the original: `python -m benchmarks.seeds.onnxruntime_trainings PACKAGE` runs all with
the tools of one package, and writes the files that came out as JSON. ONNX Runtime's markers for profilers (NVTX) are
no-ops, because a torch for the CPU is built without them.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import shutil
import sys
import tempfile
import warnings
from collections import namedtuple
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

ORIGINAL = "onnxruntime.training.utils.hooks"
REPLACEMENT = "traindiff.compat.onnxruntime"

Files = dict[str, str]
"""Texts of the files of a directory by their paths, in order."""

Results = dict[str, Any]


def files_of(directory: Path) -> Files:
    """Texts of the files of statistics."""
    return {
        str(path.relative_to(directory)): path.read_text()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and "recording" not in path.relative_to(directory).parts
    }


def _model(dtype: str = "float32") -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 2)
    ).to(getattr(torch, dtype))


def _sum(output: Any) -> Any:
    """Sum of all floating-point tensors of an output."""
    from torch import Tensor

    if isinstance(output, Tensor):
        return output.sum() if output.dtype.is_floating_point else 0.0
    if isinstance(output, Mapping):
        return sum(map(_sum, output.values()))
    return sum(map(_sum, output)) if isinstance(output, (list, tuple)) else 0.0


def _train(model: Any, *, steps: int = 3, dtype: str = "float32", graphless: tuple[int, ...] = ()) -> None:
    import torch

    draws = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01) if list(model.parameters()) else None
    for step in range(steps):
        inputs = torch.randn(4, 6, generator=draws).to(getattr(torch, dtype))
        if step in graphless:
            with torch.no_grad():
                model(inputs)
            continue
        loss = _sum(model(inputs))
        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()


def _subscribed(tool: ModuleType, model: Any, *, steps: int = 3, dtype: str = "float32", **arguments: Any) -> Files:
    """Train a model that is followed; returns the files."""
    graphless = arguments.pop("graphless", ())
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory, "out")
        tool.GlobalSubscriberManager.subscribe(model, [tool.StatisticsSubscriber(str(out), **arguments)])
        _train(model, steps=steps, dtype=dtype, graphless=graphless)
        _end(tool)
        return files_of(out)


def _end(tool: ModuleType) -> None:
    if hasattr(tool.GlobalSubscriberManager, "unsubscribe"):
        tool.GlobalSubscriberManager.unsubscribe()


def _with_outputs(*outputs: Callable[[Any], Any]) -> Any:
    """A model of several layers, each of which makes one output."""
    from torch import nn

    class Layer(nn.Module):
        def __init__(self, made: Callable[[Any], Any]) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 6)
            self.made = made

        def forward(self, x: Any) -> Any:
            return self.made(self.fc(x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(map(Layer, outputs))

        def forward(self, x: Any) -> Any:
            return _sum([layer(x) for layer in self.layers])

    import torch

    torch.manual_seed(0)
    return Model()


_Pair = namedtuple("_Pair", "first second")


def _structures(tool: ModuleType) -> Files:
    def parts(x: Any) -> Any:
        return x.split([1, 2, 3], dim=1)

    return _subscribed(
        tool,
        _with_outputs(
            parts, lambda x: [parts(x)[0], (parts(x)[1], [parts(x)[2]])],
            lambda x: {"b": parts(x)[0], "a": {"d": parts(x)[1], "c": (parts(x)[2],)}},
            lambda x: _Pair(*parts(x)[:2]), lambda x: (None, x, 3, "text", True, 0.5), lambda x: x,
        ),
        steps=2,
    )  # fmt: skip


def _used_inside(tool: ModuleType, wrap: Callable[[Any], Any] = lambda model: model) -> list[str]:
    """Extremes of the gradient of an output from which its module computes another one."""
    found = _subscribed(tool, wrap(_with_outputs(lambda x: (x, x * 2))), steps=1)
    return found["step_0/Layer_2_0th_output_backward"].split("\n")[1].split(",")[0].split()[1::2]


def _several_outputs(tool: ModuleType) -> list[str]:
    """Order of the files of a model with two outputs."""
    from torch import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Any) -> Any:
            return self.one(x), self.other(x)

    return _subscribed(tool, Model(), steps=1)["step_0/order.txt"].split()


def _other_dtypes(tool: ModuleType) -> Files:
    import torch

    return _subscribed(
        tool,
        _with_outputs(lambda x: (x * 9).long(), lambda x: (x * 9).int(), lambda x: (x * 9).abs().to(torch.uint8)),
        steps=2,
    )


def _not_finite(tool: ModuleType) -> Files:
    return _subscribed(
        tool,
        _with_outputs(
            lambda x: x / 0.0, lambda x: (x - x) / 0.0, lambda x: x.clamp(min=0) / 0.0, lambda x: x.exp() * -1e38
        ),
        steps=2,
    )


def _shared(tool: ModuleType) -> Files:
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 6)
            self.also = nn.ModuleList([self.fc, nn.Linear(6, 6)])
            self.also[1].requires_grad_(requires_grad=False)

        def forward(self, x: Any) -> Any:
            return self.fc(x) + self.also[1](x).detach()

    torch.manual_seed(0)
    return _subscribed(tool, Model(), steps=2)


def _inspecting(inspect: Callable[[str, Any], Any], names: tuple[str, ...]) -> Any:
    from torch import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in names)

        def forward(self, x: Any) -> Any:
            for name, layer in zip(names, self.layers):  # noqa: B905
                x = inspect(name, layer(x)).tanh()
            return x

    import torch

    torch.manual_seed(0)
    return Model()


def _inspect_activation(tool: ModuleType) -> Files:
    return _subscribed(tool, _inspecting(tool.inspect_activation, ("fc1_out", "hidden", "last")), steps=2)


def _original_call(tool: ModuleType) -> Files:
    """`_InspectActivation.apply` with all arguments that 1.19 takes: the last two are the subscriber's methods."""

    def inspect(name: str, tensor: Any) -> Any:
        manager = tool.GlobalSubscriberManager
        one = manager.get_subscriber(tool.StatisticsSubscriber)
        return tool._InspectActivation.apply(
            name, None, manager.get_run_context(), tensor, one.module_post_forward_impl, one.module_pre_backward_impl
        )

    return _subscribed(tool, _inspecting(inspect, ("fc1_out", "relu_out")), steps=2)


def _override(tool: ModuleType) -> Files:
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory, "out")
        for steps in (5, 3):
            model = _model()
            one = tool.StatisticsSubscriber(str(out), override_output_dir=True)
            tool.GlobalSubscriberManager.subscribe(model, [one])
            _train(model, steps=steps)
            _end(tool)
        return files_of(out)


def _again(tool: ModuleType) -> Files:
    """One manager, two models: the directory of the second."""
    with tempfile.TemporaryDirectory() as directory:
        for name in ("first", "second"):
            model = _model()
            tool.GlobalSubscriberManager.subscribe(model, [tool.StatisticsSubscriber(str(Path(directory, name)))])
            _train(model, steps=2)
        _end(tool)
        return files_of(Path(directory))


def _kind(call: Callable[[], Any], *kinds: type[BaseException]) -> str:
    """The name of the first of these errors that a call raises."""
    try:
        call()
    except Exception as error:  # noqa: BLE001  which one is the result
        return next((one.__name__ for one in kinds if isinstance(error, one)), type(error).__name__)
    return "no error"


def _errors(tool: ModuleType) -> list[str]:
    kinds = (FileExistsError, RuntimeError, ValueError)
    manager = tool.GlobalSubscriberManager
    with tempfile.TemporaryDirectory() as directory:
        there = Path(directory, "there")
        there.mkdir()
        found = [_kind(lambda: tool.StatisticsSubscriber(str(there)), *kinds)]
        (there / "step_0").mkdir()
        (there / "step_0" / "order.txt").write_text("")
        found.append(_kind(lambda: tool.StatisticsSubscriber(str(there)), *kinds))
        one = tool.StatisticsSubscriber(str(Path(directory, "out")))
        found.append(_kind(lambda: manager.subscribe(lambda x: x, [one]), *kinds))
        found.append(_kind(lambda: manager.subscribe(_model(), ["subscriber"]), *kinds))
        found.append(_kind(lambda: manager.subscribe(_model(), []), *kinds))
        found.append(_kind(lambda: manager.get_subscriber(dict), *kinds))
    return found


def _of_known(tool: ModuleType, dtype: str) -> list[float]:
    """Mean and standard deviation that are written of one tensor."""
    from torch import nn

    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory, "out")
        tool.GlobalSubscriberManager.subscribe(nn.Identity(), [tool.StatisticsSubscriber(str(out))])
        tool.inspect_activation("known", _known(dtype))
        text = (out / "step_0" / "known_forward").read_text()
        _end(tool)
    _, _, mean, std = (
        part.rpartition(": ")[2] for part in text.split("\n")[1].replace(" max", ", max").split(", ")[-4:]
    )
    return [float(mean), float(std)]


def _known(dtype: str) -> Any:
    import torch

    return (torch.rand(40, 50, generator=torch.Generator().manual_seed(3)) * 300).to(getattr(torch, dtype))


def _called_twice(tool: ModuleType) -> list[str]:
    def inspect(_: str, tensor: Any) -> Any:
        return tool.inspect_activation("same", tensor)

    from torch import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 6)

        def forward(self, x: Any) -> Any:
            return inspect("", self.fc(inspect("", self.fc(x))))

    names = _subscribed(tool, Model(), steps=1)
    return sorted({path for path in names if "Linear" in path or "same" in path or "order" in path})


def _odd_outputs(tool: ModuleType) -> list[str]:
    @dataclass
    class Output:
        logits: Any

    found = []
    for made in (lambda x: x[:0], Output):
        with contextlib.redirect_stdout(io.StringIO()):
            found.append(_kind(lambda m=made: _subscribed(tool, _with_outputs(m), steps=1)))  # type: ignore[misc]
    return found


def _removed(tool: ModuleType) -> list[int]:
    """Directories of steps that are there at the end, and warnings."""
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out, model = Path(directory, "out"), _model()
        tool.GlobalSubscriberManager.subscribe(model, [tool.StatisticsSubscriber(str(out))])
        _train(model, steps=2)
        shutil.rmtree(out)
        _train(model, steps=3)
        _end(tool)
        return [len(list(out.glob("step_*"))), sum("StatisticsSubscriber" in str(one.message) for one in caught)]


def _foreign(tool: ModuleType) -> list[str]:
    with tempfile.TemporaryDirectory() as directory:
        notes = Path(directory, "out", "notes.txt")
        notes.parent.mkdir()
        notes.write_text("mine")
        said = _kind(lambda: tool.StatisticsSubscriber(str(notes.parent), override_output_dir=True), FileExistsError)
        return [*([said] if said != "no error" else []), "kept" if notes.exists() else "removed"]


def _no_subscriber(tool: ModuleType) -> list[str]:
    import torch

    tool.GlobalSubscriberManager = tool.SubscriberManager()
    tensor = torch.ones(2)
    try:
        return ["the tensor" if tool.inspect_activation("x", tensor) is tensor else "another"]
    except RuntimeError:
        return ["RuntimeError"]


def _checkpointing(tool: ModuleType) -> list[str]:
    from torch.utils.checkpoint import checkpoint

    model = _model()
    inner = model.forward
    model.forward = lambda x: checkpoint(inner, x, use_reentrant=False)
    return sorted({path.split("/")[0] for path in _subscribed(tool, model, steps=2)})


def _hooks(tool: ModuleType) -> int:
    """Hooks that are left on a model when another one is subscribed."""
    first = _model()
    with tempfile.TemporaryDirectory() as directory:
        for number, model in enumerate((first, _model())):
            one = tool.StatisticsSubscriber(str(Path(directory, str(number))))
            tool.GlobalSubscriberManager.subscribe(model, [one])
        left = sum(len(module._forward_hooks) for module in first.modules())
        _end(tool)
    return left


def _graph(tool: ModuleType) -> str:
    """The last node of the graph of a followed model."""
    import torch

    with tempfile.TemporaryDirectory() as directory:
        model = _model()
        tool.GlobalSubscriberManager.subscribe(model, [tool.StatisticsSubscriber(str(Path(directory, "out")))])
        name = type(model(torch.ones(2, 6)).grad_fn).__name__
        _end(tool)
    return name


def _printing(tool: ModuleType) -> str:
    import torch

    torch.set_printoptions(profile="default")
    before = str(torch.arange(90.0) / 7)
    _subscribed(tool, _model(), steps=1)
    return "default" if str(torch.arange(90.0) / 7) == before else "changed"


def _subclass(tool: ModuleType) -> list[str]:
    calls = []

    def noting(*_: Any) -> None:
        calls.append("called")

    try:
        kind = type("Mine", (tool.StatisticsSubscriber,), {"module_post_forward_impl": noting})
    except ValueError as error:
        return [type(error).__name__]
    with tempfile.TemporaryDirectory() as directory:
        model = _model()
        tool.GlobalSubscriberManager.subscribe(model, [kind(str(Path(directory, "out")))])
        _train(model, steps=1)
    return sorted(set(calls))


def _zero(tool: ModuleType) -> list[str]:
    names = ("ZeROOffloadSubscriber", "configure_ort_compatible_zero_stage3")
    return ["there" if hasattr(tool, name) else "ImportError" for name in names]


def _ranks(tool: ModuleType) -> list[Any]:
    """Files of each of two ranks, and in how many directories one `output_dir` has files of both."""
    import torch.multiprocessing as processes

    is_original = tool.__name__ == ORIGINAL
    with tempfile.TemporaryDirectory() as directory:
        processes.spawn(_rank, args=(tool.__name__, directory), nprocs=2)
        here = Path(directory)
        own = [here / (f"out_{rank}" if is_original else f"out/rank_{rank}") for rank in range(2)]
        recorded = sorted(
            int(one.name) for one in (here / "out" / "recording").glob("*") if one.is_dir() and one.name.isdigit()
        )
        if not recorded and not is_original:
            from traindiff.storage import open_recording

            recorded = list(open_recording(here / "out" / "recording").ranks)
        return [*map(files_of, own), 1 if is_original else len(list((here / "out").glob("rank_*"))), recorded]


def _rank(rank: int, module: str, directory: str) -> None:
    import torch
    from torch import distributed, nn

    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    tool = _tool(module)
    distributed.init_process_group("gloo", init_method=f"file://{directory}/meeting", rank=rank, world_size=2)
    model = nn.parallel.DistributedDataParallel(_model())
    out = Path(directory, f"out_{rank}" if module == ORIGINAL else "out")
    tool.GlobalSubscriberManager.subscribe(model, [tool.StatisticsSubscriber(str(out), override_output_dir=True)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    draws = torch.Generator().manual_seed(rank)
    for _ in range(3):
        model(torch.randn(4, 6, generator=draws)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    _end(tool)
    distributed.barrier()
    distributed.destroy_process_group()


def _mend_hooks_of_inputs() -> None:
    """Let the original's hooks return keyword arguments, which torch 1.13 would take for further inputs."""
    from torch import nn

    register = nn.Module.register_forward_pre_hook

    def registered(module: Any, hook: Callable[..., Any]) -> Any:
        def positional(*given: Any) -> Any:
            found = hook(*given)
            has_keywords = isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], dict)
            return found[0] if has_keywords else found

        return register(module, positional)

    nn.Module.register_forward_pre_hook = registered  # type: ignore[assignment,method-assign]


def _ortmodule(tool: ModuleType) -> Results:
    """The same model under ORTModule, subscribed before and after it is wrapped."""
    from onnxruntime.training.ortmodule import DebugOptions, LogLevel, ORTModule

    _mend_hooks_of_inputs()

    def wrapped(model: Any) -> Any:
        return ORTModule(model, DebugOptions(log_level=LogLevel.ERROR))

    found: Results = {}
    for when in ("before", "after"):
        with tempfile.TemporaryDirectory() as directory:
            out, model = Path(directory, "out"), _model()
            if when == "before":
                tool.GlobalSubscriberManager.subscribe(model, [tool.StatisticsSubscriber(str(out))])
            model = wrapped(model)
            if when == "after":
                tool.GlobalSubscriberManager.subscribe(model, [tool.StatisticsSubscriber(str(out))])
            _train(model)
            _end(tool)
            found[when] = files_of(out)
    return {**found, "used inside": _used_inside(tool, wrapped)}


def _everything(tool: ModuleType) -> Results:
    results: Results = {
        dtype: _subscribed(tool, _model(dtype), dtype=dtype) for dtype in ("float32", "float64", "bfloat16", "float16")
    }
    results |= {
        "used inside": _used_inside(tool),
        "several outputs": _several_outputs(tool),
        "other dtypes": _other_dtypes(tool),
        "not finite": _not_finite(tool),
        "steps": _subscribed(tool, _model(), steps=5, start_step=1, end_step=3),
        "structures": _structures(tool),
        "evaluation": _subscribed(tool, _model(), steps=4, graphless=(0, 2)),
        "shared": _shared(tool),
        "inspect_activation": _inspect_activation(tool),
        "_InspectActivation": _original_call(tool),
        "buckets": _subscribed(tool, _model(), bucket_size=7),
        "run_on_cpu": _subscribed(tool, _model(), run_on_cpu=True),
        "override": _override(tool),
        "again": _again(tool),
        "errors": _errors(tool),
        "moments": {dtype: _of_known(tool, dtype) for dtype in ("float32", "float64", "bfloat16")},
        "exact": {
            dtype: [float(_known(dtype).double().mean()), float(_known(dtype).double().std())]
            for dtype in ("float32", "float64", "bfloat16")
        },
        "called twice": _called_twice(tool),
        "odd outputs": _odd_outputs(tool),
        "removed": _removed(tool),
        "foreign": _foreign(tool),
        "checkpointing": _checkpointing(tool),
        "hooks": _hooks(tool),
        "graph": _graph(tool),
        "subclass": _subclass(tool),
        "zero": _zero(tool),
        "printing": _printing(tool),
        "ranks": _ranks(tool),
        "no subscriber": _no_subscriber(tool),
    }
    return results


def _tool(package: str) -> ModuleType:
    import torch

    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None
    return importlib.import_module(package)


def main(package: str, only: str = "") -> None:
    """Run everything with the tools of one package, and write the results."""
    tool = _tool(package)
    warnings.simplefilter("ignore")
    results = _ortmodule(tool) if only == "ortmodule" else _everything(tool)
    sys.stdout.write(f"\n{json.dumps(results)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
