"""Describe what surrounds a training's computation: torch's flags, autocast, the gradient scaler, and schedulers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from traindiff.core.torch_compat.operators import cuda_matmul_tf32, float32_matmul_precision
from traindiff.core.torch_compat.training import modules_in, own_parameters
from traindiff.observe.common.listeners import Listeners
from traindiff.observe.torch.hooks.context import TapContext
from traindiff.observe.torch.hooks.loss_scale import ScalerListener, tap_loss_scaler
from traindiff.observe.torch.hooks.optimizer_step import IMPLEMENTATION_CHOICES
from traindiff.observe.torch.plain_settings import settings_of

NAME = "surroundings"
"""Key in `rank.json`."""

_FLAGS: Mapping[str, Callable[[], object]] = {
    "default_dtype": torch.get_default_dtype,
    "float32_matmul_precision": float32_matmul_precision,
    "deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
    "cuda_matmul_reduced_precision": lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    "cudnn_deterministic": lambda: torch.backends.cudnn.deterministic,
    "cudnn_benchmark": lambda: torch.backends.cudnn.benchmark,
    "mkldnn": lambda: torch.backends.mkldnn.enabled,
    "sdpa_flash": torch.backends.cuda.flash_sdp_enabled,
    "sdpa_memory_efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
    "sdpa_math": torch.backends.cuda.math_sdp_enabled,
    "sdpa_cudnn": torch.backends.cuda.cudnn_sdp_enabled,
}
"""Global flags of torch that can change numbers. Reading them computes nothing on a device."""

_CONVOLUTIONS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
)  # fmt: skip

_ROUNDING: Mapping[str, tuple[Callable[[], object], tuple[type[nn.Module], ...]]] = {
    "cuda_matmul_tf32": (cuda_matmul_tf32, (nn.Module,)),
    "cudnn_tf32": (lambda: torch.backends.cudnn.allow_tf32, (*_CONVOLUTIONS, nn.RNNBase)),
    "cudnn_recurrent": (lambda: torch.backends.cudnn.enabled, (nn.RNNBase,)),
}
"""What makes numbers less exact on a GPU, and in which modules. False where a model has none of them on a GPU.

`cudnn_tf32`, by which cuDNN rounds float32 to TF32, is True by default: a run on a CPU and one on a GPU differ by it.
cuDNN's recurrent layers approximate their tanh and sigmoid; see `traindiff.analyse.noise.run_floors.APPROXIMATED`."""

_DEVICES = ("cpu", "cuda")

_STATE = frozenset({"last_epoch", "num_bad_epochs", "best", "cooldown_counter", "T_cur", "T_i"})
"""Attributes of schedulers that change from step to step."""


def attach(context: TapContext) -> None:
    """Describe in `rank.json` what surrounds the computation, as texts by name.

    Flags and autocast are those before the first forward pass with gradients; the scaler is described when it first
    scales a loss, and a scheduler when it first steps.
    """
    tap = _SurroundingsTap(context)
    guarded = partial(context.sink.guarded, NAME)
    context.events.before_step.append(guarded(tap.look))
    context.undo.enter_context(_listeners.attach(guarded(tap.scheduler)))
    context.undo.enter_context(tap_loss_scaler(ScalerListener(scaling=guarded(tap.scaler))))


class _SurroundingsTap:
    def __init__(self, context: TapContext) -> None:
        self._context = context
        self._found: dict[str, dict[str, str]] = {}
        self._schedulers: set[int] = set()

    def look(self) -> None:
        """Read the flags, once."""
        if "torch" in self._found:
            return
        self._found["torch"] = dict(_readable({**_FLAGS, **_rounding(self._context.targets.roots)}))
        self._found["autocast"] = dict(_autocast())
        for name, tap in self._context.optimizers.items():
            groups = getattr(tap.optimizer, "param_groups", None) or [{}]
            choices = sorted(IMPLEMENTATION_CHOICES & groups[0].keys() - {"params"})
            self._found[f"{name} implementation"] = {choice: repr(groups[0][choice]) for choice in choices}
        self._describe()

    def scaler(self, scaler: GradScaler) -> None:
        """Describe a gradient scaler, once."""
        if "scaler" not in self._found:
            kind = type(scaler)
            self._found["scaler"] = {
                "class": f"{kind.__module__}.{kind.__qualname__}",
                "growth_factor": repr(scaler.get_growth_factor()),
                "backoff_factor": repr(scaler.get_backoff_factor()),
                "growth_interval": repr(scaler.get_growth_interval()),
            }
            self._describe()

    def scheduler(self, scheduler: Any) -> None:
        """Describe a learning rate scheduler of a followed optimizer, once."""
        if id(scheduler) in self._schedulers:
            return
        self._schedulers.add(id(scheduler))
        of = (name for name, tap in self._context.optimizers.items() if tap.optimizer is scheduler.optimizer)
        name = next(of, None)
        if name is not None:
            number = sum(path.startswith(f"{name} scheduler") for path in self._found)
            path = f"{name} scheduler" + (f"[{number}]" if number else "")
            self._found[path] = {key: value for key, value in settings_of(scheduler).items() if key not in _STATE}
            self._describe()

    def _describe(self) -> None:
        self._context.describe(NAME, self._found)


def _rounding(roots: Iterable[nn.Module]) -> dict[str, Callable[[], object]]:
    """Whether each of `_ROUNDING` is in effect."""
    on_gpu = [one for root in roots for one in modules_in(root) if _is_on_gpu(one)]
    return {
        name: read if any(isinstance(one, kinds) for one in on_gpu) else lambda: False
        for name, (read, kinds) in _ROUNDING.items()
    }


def _is_on_gpu(module: nn.Module) -> bool:
    return any(one.device.type == "cuda" for one in own_parameters(module).values())


def _readable(flags: Mapping[str, Callable[[], object]]) -> Iterator[tuple[str, str]]:
    """The flags that this torch has and can read: it refuses some if a program sets them in two ways."""
    for name, read in flags.items():
        try:
            yield name, str(read())
        except (RuntimeError, AttributeError):
            continue


def _autocast() -> Iterator[tuple[str, str]]:
    for device in _DEVICES:
        enabled = torch.is_autocast_enabled(device)
        yield device, str(torch.get_autocast_dtype(device)).removeprefix("torch.") if enabled else "off"


def _install() -> None:
    for kind in _kinds(LRScheduler):
        if "step" in vars(kind):
            _listeners.replace(kind, "step", _observed(vars(kind)["step"]))


_listeners: Listeners[Callable[[Any], None]] = Listeners(_install)


def _kinds(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for subclass in kind.__subclasses__():
        yield from _kinds(subclass)


def _observed(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        for listener in _listeners:
            listener(self)
        return original(self, *args, **kwargs)

    return step
