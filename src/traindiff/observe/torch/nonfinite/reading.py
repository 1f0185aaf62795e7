"""Read what is watched: each tensor once, as long as nobody writes to it, and without waiting for a device."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from traindiff.core.kernels.extent import Extent, extent, stored_values
from traindiff.core.torch_compat.autograd import version_of
from traindiff.core.torch_compat.training import arrived, has_arrived, is_asynchronous
from traindiff.errors import UnsupportedTensorError
from traindiff.observe.torch.hooks.swapped_tensors import HoldsTensors


class Reading:
    """What is known of one tensor at one moment.

    Attributes:
        extent: Between which magnitudes its elements lie; None while a device computes that, and where nothing can be
            read.
        dtype: Of the tensor.
        reason: Why nothing can be read; empty where something can.
        has_gradient: Whether the tensor is a part of a graph.
        masks: Whether what is not finite of it is -inf alone; None where nobody has looked.
        is_meant: Whether the tensor was seen at a site where the user says that NaN and infinities are meant.
    """

    __slots__ = ("dtype", "extent", "has_gradient", "is_meant", "masks", "reason")

    def __init__(self, tensor: Tensor) -> None:
        self.extent: Extent | None = None
        self.dtype = tensor.dtype
        self.reason = ""
        self.masks: bool | None = None
        self.is_meant = False
        self.has_gradient = tensor.requires_grad

    @property
    def has_arrived(self) -> bool:
        """True if everything is known that there is to know."""
        return self.extent is not None or bool(self.reason)

    @property
    def is_non_finite(self) -> bool:
        """True if an element is known to be NaN or infinite."""
        return self.extent is not None and not self.extent.is_finite

    @property
    def is_nan(self) -> bool:
        """True if an element is known to be NaN."""
        return self.is_non_finite and self.extent is not None and math.isnan(self.extent.largest)


class Reader(HoldsTensors):
    """Reads tensors.

    Args:
        at_once: Types of devices whose tensors are read when they are seen; those of others are read by their device,
            and what it finds arrives with `end_step` of the step after.
    """

    def __init__(self, at_once: frozenset[str] = frozenset({"cpu"})) -> None:
        super().__init__()
        self._at_once = at_once
        self._known: dict[int, tuple[ReferenceType[Tensor], int, Reading]] = {}
        self._running: list[tuple[Reading, _Bounds, int]] = []
        self._sent: deque[_Sent] = deque()

    def read(self, tensor: Tensor) -> Reading:
        """The reading of a tensor; the one that there is, where it has been read and not been written to since."""
        version = version_of(tensor)
        known = self._known.get(id(tensor))
        if known is not None and known[1] == version >= 0 and known[0]() is tensor:
            return known[2]
        reading = self.read_again(tensor)
        self._known[id(tensor)] = ref(tensor), version, reading
        return reading

    def read_again(self, tensor: Tensor) -> Reading:
        """A new reading of a tensor."""
        reading = Reading(tensor)
        try:
            if is_asynchronous(tensor):
                if not has_arrived(tensor):
                    reading.reason = "a collective is still computing it"
                    return reading
                tensor = arrived(tensor)
            if tensor.device.type in self._at_once:
                reading.extent = extent(tensor)
            else:
                self._running.append((reading, _bounds(tensor), tensor.numel()))
        except UnsupportedTensorError as error:
            reading.reason = str(error)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            reading.reason = f"its elements cannot be read: {str(error).partition(chr(10))[0]}"
        return reading

    def forget_tensors(self) -> None:
        """See `HoldsTensors`."""
        self._known.clear()

    def forget(self) -> None:
        """Read everything again that is seen from now on."""
        self._known.clear()

    def end_step(self) -> None:
        """Send what devices have found on its way, and take in what has arrived of earlier steps.

        What was sent two steps ago is waited for: it is there, unless the host is more than a step ahead of the device.
        """
        running, self._running = self._running, []
        devices = {bounds[0].device for _, bounds, _ in running}
        for device in devices:
            self._sent.append(_Sent([one for one in running if one[1][0].device == device], device))
        while self._sent and (self._sent[0].is_there or len(self._sent) > 2 * max(1, len(devices))):
            self._sent.popleft().take_in()

    def wait(self) -> None:
        """Take in everything. Waits for devices."""
        self.end_step()
        while self._sent:
            self._sent.popleft().take_in()


class _Sent:
    """Bounds on their way from a device to the host."""

    def __init__(self, running: list[tuple[Reading, _Bounds, int]], device: torch.device) -> None:
        by_dtype: dict[torch.dtype, list[tuple[Reading, _Bounds, int]]] = defaultdict(list)
        for one in running:
            by_dtype[one[1][0].dtype].append(one)
        self._readings = [(reading, count) for group in by_dtype.values() for reading, _, count in group]
        numbers = ([number for _, bounds, _ in group for number in bounds] for group in by_dtype.values())
        together = torch.cat([torch.stack(of_dtype).to(torch.float32) for of_dtype in numbers]).view(-1, 3)
        self._event: Any = None
        if device.type == "cuda":
            self._host = torch.empty(together.shape, dtype=together.dtype, pin_memory=True)
            self._host.copy_(together, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(device))
        else:
            self._host = together.cpu()

    @property
    def is_there(self) -> bool:
        return self._event is None or bool(self._event.query())

    def take_in(self) -> None:
        if self._event is not None:
            self._event.synchronize()
        for (reading, count), (smallest, least, most) in zip(self._readings, self._host.tolist(), strict=True):
            largest = math.nan if math.isnan(least) or math.isnan(most) else max(abs(least), abs(most))
            reading.extent = Extent(math.nan if math.isnan(largest) else smallest, largest, count)
            reading.masks = least == -math.inf and most < math.inf


_Bounds = tuple[Tensor, Tensor, Tensor]


def _bounds(tensor: Tensor) -> _Bounds:
    """Least magnitude, least and largest element, of one dtype, on the tensor's device, without copying it."""
    with torch.no_grad():
        values = stored_values(tensor)
        if not values.numel():
            nothing = torch.zeros((), device=values.device)
            return nothing, nothing, nothing
        if not values.dtype.is_floating_point:
            values = values.to(torch.float32)
        least, most = torch.aminmax(values)
        return torch.linalg.vector_norm(values, -math.inf), least, most


def only_masks(tensor: Tensor) -> bool:
    """True if what is not finite of a tensor is -inf alone. Waits for its device."""
    values = stored_values(tensor)
    return bool(values.dtype.is_floating_point and not values.isnan().any() and not (values == math.inf).any())


def is_additive_mask(tensor: Tensor) -> bool:
    """True if a tensor holds nothing but 0 and -inf, or the least number of its dtype. Waits for its device.

    One that holds nothing but -inf masks everything: it is none.
    """
    values = stored_values(tensor)
    if not values.dtype.is_floating_point:
        return values.dtype is torch.bool
    lowest = torch.finfo(values.dtype).min
    masked = values == -math.inf
    return bool((masked | (values == 0) | (values == lowest)).all()) and not bool(masked.all())


def may_mask(reading: Reading, tensor: Tensor | None) -> bool:
    """True if -inf is all that is not finite of a tensor, as far as is known without it."""
    if reading.is_nan:
        return False
    if reading.masks is None:
        reading.masks = tensor is not None and only_masks(tensor)
    return reading.masks


def is_mask(site: str, reading: Reading, tensor: Tensor | None, *, declared: Iterable[str]) -> bool:
    """True if what is not finite of a tensor is nothing but a mask's -inf.

    A tensor without gradient that holds only 0 and -inf (or the least number of its dtype) is a mask wherever it is.

    Args:
        site: Path and slot.
        reading: Of the tensor.
        tensor: The tensor, while it is there. Without it, -inf alone in what has no gradient will do.
        declared: Globs over sites of masks: `"*.attention input.mask"`, `"mask_maker output"`.
    """
    if not may_mask(reading, tensor):
        return False
    if is_declared(site, declared):
        return True
    return not reading.has_gradient and (tensor is None or is_additive_mask(tensor))


def is_declared(site: str, patterns: Iterable[str]) -> bool:
    """True if one of the globs over sites names a site. Brackets are those of slots."""
    return any(fnmatchcase(site, pattern.replace("[", "[[]")) for pattern in patterns)
