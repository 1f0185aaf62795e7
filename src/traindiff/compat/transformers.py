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

from collections import deque
from collections.abc import Collection, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor, nn

from traindiff.core.kernels.extent import Extent, extent, stored_values
from traindiff.core.torch_compat.training import modules_by_name, modules_in, own_parameters
from traindiff.errors import NonFiniteError, StoppedError, UnsupportedTensorError
from traindiff.observe.torch.nonfinite.calls import within
from traindiff.observe.torch.nonfinite.frames import HEAD

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


class DebugOption(str, Enum):  # noqa: UP042  as the original: StrEnum is formatted differently
    """The values of `--debug`; equal to those of transformers, and to their texts."""

    UNDERFLOW_OVERFLOW = "underflow_overflow"
    TPU_METRICS_DEBUG = "tpu_metrics_debug"

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        known = [one.value for one in cls]
        raise ValueError(f"{value} is not a valid {cls.__name__}, please select one of {known}")


class DebugUnderflowOverflow:
    """Print absolute minima and maxima of a model's weights, inputs and outputs when one of them is NaN or infinite.

    Every module's forward pass makes a frame. When a frame holds NaN or infinity, the last frames are printed and
    an error is raised. Batches are calls of the model, counted from 0.

    The methods and attributes are those of the original, and call each other as there: a subclass may replace any.

    Args:
        model: The model.
        max_frames_to_save: How many frames are printed.
        trace_batch_nums: Batches of which every frame is printed; nothing is detected in them.
        abort_after_batch_num: Raise an error when a batch after this one would begin.

    Attributes:
        frames: The frames that are kept, as text, the latest last.
        frame: The lines of the frame that is being made.
        batch_number: Calls of the model that have returned.
        total_calls: Calls of modules that have returned.
        detected_overflow: True if a frame held NaN or infinity.
        prefix: Spaces at the beginning of a title line.
        module_names: Path of each module.
    """

    def __init__(
        self,
        model: nn.Module,
        max_frames_to_save: int = 21,
        trace_batch_nums: Collection[int] | None = None,
        abort_after_batch_num: int | None = None,
    ) -> None:
        self.model = model
        self.trace_batch_nums = [] if trace_batch_nums is None else trace_batch_nums
        self.abort_after_batch_num = abort_after_batch_num
        self.batch_number = 0
        self.total_calls = 0
        self.detected_overflow = False
        self.prefix = " " * 17
        self.frames: deque[str] | list[str] = deque(maxlen=max_frames_to_save)
        self.frame: list[str] = []
        self._handles: list[RemovableHandle] = []
        self.analyse_model()
        self.register_forward_hook()

    def analyse_model(self) -> None:
        """Find the path of each module; a module in several places has its first one."""
        self.module_names = {module: name for name, module in modules_by_name(self.model).items()}

    def register_forward_hook(self) -> None:
        """Follow every module of the model, each once."""
        for module in modules_in(self.model):
            self._register_forward_hook(module)

    def _register_forward_hook(self, module: nn.Module) -> None:
        """Follow a module."""
        self._handles.append(module.register_forward_hook(self.forward_hook))

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
            self.reset_saved_frames()
        if not self.total_calls:
            self.batch_start_frame()
        self.total_calls += 1
        ends = module is self.model
        if ends:
            self.batch_number += 1
        self.create_frame(module, input, output)
        if traces:
            self.trace_frames()
        if ends:
            self.batch_start_frame()
        if self.detected_overflow and not traces:
            self.dump_saved_frames()
            raise NonFiniteError(
                "DebugUnderflowOverflow: inf/nan detected, aborting as there is no point running further. "
                "Please scroll up above this traceback to see the activation values prior to this event."
            )
        if self.abort_after_batch_num is not None and self.batch_number > self.abort_after_batch_num:
            raise StoppedError(
                f"DebugUnderflowOverflow: aborting after {self.batch_number} batches due to"
                f" `abort_after_batch_num={self.abort_after_batch_num}` arg"
            )

    def create_frame(self, module: nn.Module, input: Any, output: Any) -> None:  # noqa: A002
        """Make the frame of one call of a module, and keep it."""
        self.expand_frame(f"{self.prefix} {self.module_names[module]} {type(module).__name__}")
        for name, parameter in own_parameters(module).items():
            self.analyse_variable(parameter, name)
        for number, one in enumerate(input) if isinstance(input, tuple) else [(None, input)]:
            self.analyse_variable(one, "input" if number is None else f"input[{number}]")
        for slot, one in _outputs(output):
            self.analyse_variable(one, slot)
        self.save_frame()

    def analyse_variable(self, var: Any, ctx: str) -> None:
        """Add what is known of a value to the frame: a line, or several where it holds tensors.

        Args:
            var: The value.
            ctx: What it is called.
        """
        if isinstance(var, Tensor):
            line, is_finite = _read(var, ctx)
            self.expand_frame(line)
            if not is_finite:
                self.detected_overflow = True
        elif var is None:
            self.expand_frame(f"{'None':>17} {ctx}")
        else:
            inside = [(slot, one) for slot, one in within(var, ctx) if isinstance(one, Tensor)]
            for slot, one in inside:
                self.analyse_variable(one, slot)
            if not inside:
                self.expand_frame(f"{'not a tensor':>17} {ctx}")

    def batch_start_frame(self) -> None:
        """Begin the next frame with the lines that begin a batch."""
        self.expand_frame(f"\n\n{self.prefix} *** Starting batch number={self.batch_number} ***")
        self.expand_frame(HEAD)

    def batch_end_frame(self) -> None:
        """Add the line that ends a batch; as in the original, only a subclass calls it."""
        self.expand_frame(f"{self.prefix} *** Finished batch number={self.batch_number - 1} ***\n\n")

    def expand_frame(self, line: str) -> None:
        """Add a line to the frame."""
        self.frame.append(line)

    def save_frame(self, frame: str | None = None) -> None:
        """Keep the frame, and begin the next one.

        Args:
            frame: A last line for it.
        """
        if frame is not None:
            self.expand_frame(frame)
        self.frames.append("\n".join(self.frame))
        self.frame = []

    def reset_saved_frames(self) -> None:
        """Forget the kept frames, and their limit with them, as the original does: a traced batch is printed whole."""
        self.frames = []

    def trace_frames(self) -> None:
        """Print the kept frames, and forget them."""
        print("\n".join(self.frames))  # noqa: T201
        self.frames = []

    def dump_saved_frames(self) -> None:
        """Print the kept frames as those that led to NaN or infinity, and forget them."""
        head = f"\nDetected inf/nan during batch_number={self.batch_number}\nLast {len(self.frames)} forward frames:"
        print(head, HEAD, "\n".join(self.frames), "\n\n", sep="\n")  # noqa: T201
        self.frames = []


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


_OWN = get_abs_min_max, detect_overflow


def _read(tensor: Tensor, name: str) -> tuple[str, bool]:
    """The line of a tensor, and whether it is finite.

    The two functions above would read it twice. They are called all the same where one of them has been replaced.
    """
    if (get_abs_min_max, detect_overflow) != _OWN:
        return get_abs_min_max(tensor, name), not detect_overflow(tensor, name)
    found = _extent(tensor)
    return _line(found, name), found is None or found.is_finite or not detect_overflow(tensor, name)


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
