"""Private names of torch for CUDA: graphs that are captured, and streams."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

_HAS_CUDA = torch.backends.cuda.is_built()


def is_capturing() -> bool:
    """True while this thread captures a CUDA graph. To read a number then would break the capture.

    What a hook enqueues would be in the graph, and write where the replays find nothing of a recording any more.
    """
    return _HAS_CUDA and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


_RELAXED = 2


@contextmanager
def beside_captures() -> Iterator[None]:
    """A context in which this thread may wait for a GPU, although another thread captures a CUDA graph.

    By default a capture forbids every thread to ask whether work is done, and the one that asks spoils the capture:
    the training would end there. The CUDA driver has a mode for each thread that allows it. torch has no name for it.
    """
    exchange = _exchange_capture_mode()
    if exchange is None:
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))  # afterwards it holds the mode that this thread had
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


@cache
def _exchange_capture_mode() -> Any:
    """The driver's function, or None without a GPU of NVIDIA."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode if _HAS_CUDA else None
    except (OSError, AttributeError):
        return None


def stream_number(device: torch.device) -> int | None:
    """What tells the current stream of a GPU from its others; None if this torch does not say.

    `torch.cuda.current_stream` makes an object, in 6 us; torch's own compiled code asks this function.
    """
    ask = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return None if ask is None else int(ask(device.index))


def keep_out_of_cuda_graphs(operators: Sequence[str]) -> Callable[[], None]:
    """Have code that is compiled from now on call these operators between CUDA graphs; returns what undoes it.

    With `mode="reduce-overhead"` the default backend captures compiled code, and a replay runs no Python. Where an
    operator in a captured part takes a tensor of the CPU, torch 2.9 to 2.13 end the training ("Expected all cuda
    outputs in cuda graph recording"), since the part hands that tensor on.

    Args:
        operators: Their names with the namespace, such as `traindiff::observe`.
    """
    import torch._inductor.config as config

    found: Any = config
    if hasattr(found, "custom_should_partition_ops"):
        name = "custom_should_partition_ops"
        value: Any = [*found.custom_should_partition_ops, *operators]
    elif hasattr(found, "graph_partition"):  # torch 2.8 and 2.9.0: code with tensors of the CPU is then not captured
        name, value = "graph_partition", False
    else:
        return lambda: None
    before = getattr(found, name)
    setattr(found, name, value)
    return lambda: setattr(found, name, before)
