"""The detector of `transformers.debug_utils`, under its names, with its arguments and its output.

```python
from traindiff.compat.transformers import DebugUnderflowOverflow

debug_overflow = DebugUnderflowOverflow(model)
```

Each tensor is read once for its least and largest magnitude, and again only where these are not finite. Tensors in
dicts and dataclasses are looked at; what makes the original raise an error of its own (empty, boolean, sparse and
float8 tensors) is printed. `traindiff.watch` also sees the backward pass, gradients and the optimizer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, nn

from traindiff.core.kernels.extent import Extent, extent, stored_values
from traindiff.errors import NonFiniteError, StoppedError, UnsupportedTensorError
from traindiff.observe.torch.nonfinite.calls import within
from traindiff.observe.torch.nonfinite.frames import HEAD

_PREFIX = " " * 17


class DebugUnderflowOverflow:
    """Print absolute minima and maxima of a model's weights, inputs and outputs when one of them is NaN or infinite.

    Every module's forward pass makes a frame. When a frame holds NaN or infinity, the last frames are printed and
    an error is raised. Batches are calls of the model, counted from 0.

    Args:
        model: The model.
        max_frames_to_save: How many frames are printed.
        trace_batch_nums: Batches of which every frame is printed; nothing is detected in them.
        abort_after_batch_num: Raise an error when a batch after this one would begin.
    """

    def __init__(
        self,
        model: nn.Module,
        max_frames_to_save: int = 21,
        trace_batch_nums: Collection[int] | None = None,
        abort_after_batch_num: int | None = None,
    ) -> None:
        self.model = model
        self.trace_batch_nums = trace_batch_nums or []
        self.abort_after_batch_num = abort_after_batch_num
        self.batch_number = 0
        self.detected_overflow = False
        self.module_names = {module: name for name, module in model.named_modules()}
        self._largest: int | None = max_frames_to_save
        self._frames: list[str] = []
        self._lines: list[str] = [*self._batch_starts()]
        self._handles = [module.register_forward_hook(self.forward_hook) for module in model.modules()]

    def remove(self) -> None:
        """Take the hooks off the model, which the original cannot."""
        for handle in self._handles:
            handle.remove()

    def forward_hook(self, module: nn.Module, input: Any, output: Any) -> None:  # noqa: A002
        """Look at one call of a module.

        Raises:
            NonFiniteError: It holds NaN or infinity. It is a `ValueError`, as the original's.
            StoppedError: The batch is behind the last one that was wanted. It is a `ValueError`, too.
        """
        traces = self.batch_number in self.trace_batch_nums
        if traces:
            self._forget()
        ends = module is self.model
        if ends:
            self.batch_number += 1
        self._make_frame(module, input, output)
        if traces:
            print("\n".join(self._frames))  # noqa: T201
            self._forget()
        if ends:
            self._lines += self._batch_starts()
        if self.detected_overflow and not traces:
            self._print_frames()
            raise NonFiniteError(
                "DebugUnderflowOverflow: inf/nan detected, aborting as there is no point running further. "
                "Please scroll up above this traceback to see the activation values prior to this event."
            )
        if self.abort_after_batch_num is not None and self.batch_number > self.abort_after_batch_num:
            raise StoppedError(
                f"DebugUnderflowOverflow: aborting after {self.batch_number} batches due to"
                f" `abort_after_batch_num={self.abort_after_batch_num}` arg"
            )

    def _batch_starts(self) -> list[str]:
        """Lines that the next frame begins with."""
        return [f"\n\n{_PREFIX} *** Starting batch number={self.batch_number} ***", HEAD]

    def _make_frame(self, module: nn.Module, given: Any, output: Any) -> None:
        self._lines.append(f"{_PREFIX} {self.module_names[module]} {type(module).__name__}")
        for name, parameter in module.named_parameters(recurse=False):
            self._add(parameter, name)
        for number, one in enumerate(given) if isinstance(given, tuple) else [(None, given)]:
            self._add(one, "input" if number is None else f"input[{number}]")
        for slot, one in _outputs(output):
            self._add(one, slot)
        self._frames.append("\n".join(self._lines))
        if self._largest is not None:
            del self._frames[: -self._largest or len(self._frames)]
        self._lines = []

    def _add(self, value: Any, name: str) -> None:
        if isinstance(value, Tensor):
            found = _extent(value)
            self._lines.append(_line(found, name))
            if found is not None and not found.is_finite and detect_overflow(value, name):
                self.detected_overflow = True
        elif value is None:
            self._lines.append(f"{'None':>17} {name}")
        else:
            inside = [(slot, one) for slot, one in within(value, name) if isinstance(one, Tensor)]
            for slot, one in inside:
                self._add(one, slot)
            if not inside:
                self._lines.append(f"{'not a tensor':>17} {name}")

    def _forget(self) -> None:
        self._frames = []
        self._largest = None  # as in the original: a traced batch ends the limit

    def _print_frames(self) -> None:
        head = f"\nDetected inf/nan during batch_number={self.batch_number}\nLast {len(self._frames)} forward frames:"
        print(head, HEAD, *self._frames, "\n\n", sep="\n")  # noqa: T201
        self._forget()


def get_abs_min_max(var: Tensor, ctx: str) -> str:
    """The least and the largest absolute value of a tensor as one line: `2.17e-07 4.50e+00 weight`.

    Args:
        var: The tensor.
        ctx: What it is called.
    """
    return _line(_extent(var), ctx)


def detect_overflow(var: Tensor, ctx: str) -> bool:
    """True if a tensor holds NaN or infinity; prints `{ctx} has nans`, `{ctx} has infs`, or both.

    Args:
        var: The tensor.
        ctx: What it is called.
    """
    found = _extent(var)
    if found is None or found.is_finite:
        return False
    values = stored_values(var)
    if bool(values.isnan().any()):
        print(f"{ctx} has nans")  # noqa: T201
    if bool(values.isinf().any()):
        print(f"{ctx} has infs")  # noqa: T201
    return True


class UnderflowOverflowCallback:
    """For the `Trainer` of transformers: what `--debug underflow_overflow` does, as a callback.

    ```python
    trainer = Trainer(model, args, callbacks=[UnderflowOverflowCallback()])
    ```

    It is attached when the training begins and removed when it ends.

    Args:
        max_frames_to_save: See `DebugUnderflowOverflow`.
        trace_batch_nums: See `DebugUnderflowOverflow`.
        abort_after_batch_num: See `DebugUnderflowOverflow`.
    """

    def __init__(
        self,
        max_frames_to_save: int = 21,
        trace_batch_nums: Sequence[int] | None = None,
        abort_after_batch_num: int | None = None,
    ) -> None:
        self._arguments = max_frames_to_save, trace_batch_nums, abort_after_batch_num
        self._running: DebugUnderflowOverflow | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:  # noqa: ARG002
        """Attach the detector."""
        self._running = DebugUnderflowOverflow(model, *self._arguments)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Remove it."""
        if self._running is not None:
            self._running.remove()
            self._running = None

    def __getattr__(self, name: str) -> Any:
        """Every other event is none of its business; it needs no transformers to say so."""
        if name.startswith("on_"):
            return _ignore
        return object.__getattribute__(self, name)


def _ignore(args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG001
    return None


def _outputs(output: Any) -> list[tuple[str, Any]]:
    """What a module returns, with the names of the original: tuples are looked into, two deep."""
    if not isinstance(output, tuple):
        return [("output", output)]
    found = []
    for number, one in enumerate(output):
        if isinstance(one, tuple):
            found += [(f"output[{number}][{position}]", inner) for position, inner in enumerate(one)]
        else:
            found.append((f"output[{number}]", one))
    return found


def _extent(tensor: Tensor) -> Extent | None:
    """The extent of a tensor; None where nothing can be read."""
    try:
        return extent(tensor)
    except UnsupportedTensorError:
        return None


def _line(found: Extent | None, name: str) -> str:
    if found is None or not found.count:
        return f"{'not read' if found is None else 'empty':>17} {name}"
    return f"{found.smallest:8.2e} {found.largest:8.2e} {name}"
