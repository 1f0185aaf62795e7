"""The origin: the first tensor that is not finite although everything that it was computed from is."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from traindiff.core.kernels.extent import extent
from traindiff.core.site import ROOT, printable
from traindiff.core.torch_compat.training import own_buffers, own_parameters
from traindiff.errors import UnsupportedTensorError
from traindiff.observe.torch.nonfinite.calls import Arguments, Call
from traindiff.observe.torch.nonfinite.frames import Frame
from traindiff.observe.torch.nonfinite.reading import Reading, only_masks

_MOST_NAMED = 3
"""The most sites that a message names as those where NaN and infinity are meant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The place where a training's numbers first became NaN or infinite.

    Attributes:
        step: The step, counted from 0.
        micro_step: The micro-step in it, counted from 0.
        rank: The rank that found it.
        phase: `batch`, `forward`, `loss`, `backward`, `grad`, `optimizer` or `param`.
        path: Canonical path of the module or parameter.
        slot: Which tensor of it: `output`, `input[0]`, `grad`, `exp_avg_sq`.
        message: One sentence.
        saved: Directory with its tensors, for `traindiff rerun`; None if nothing was saved.
    """

    step: int
    micro_step: int
    rank: int
    phase: str
    path: str
    slot: str
    message: str
    saved: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """An origin while the training is still at it.

    Attributes:
        phase: See `Origin`.
        path: See `Origin`.
        slot: See `Origin`.
        message: See `Origin`.
        call: The call of a module that computed it, where one is known.
        arguments: What the call was given, where that still lives.
        gradients: Gradients of the call's outputs by slot, where its backward pass is what failed.
        tensors: Further tensors to save, by name.
        frame: What is printed of the call in which it was seen, which has not ended.
    """

    phase: str
    path: str
    slot: str
    message: str
    call: Call | None = None
    arguments: Arguments | None = None
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    frame: Frame | None = None


def of_input(call: Call, slot: str, reading: Reading, tensor: Tensor | None, *, meant: Collection[str] = ()) -> Found:
    """An input is not finite, and nothing before it was: the batch, or code between modules.

    Args:
        call: The call that was given it.
        slot: Of the input.
        reading: Of the input.
        tensor: The input, if it is there.
        meant: Sites before it with NaN or infinity that is meant.
    """
    kept = {} if tensor is None else {slot: tensor}
    if call.parent is None:
        message = f"The batch: {_site(call.path, slot)} {_is(reading)} when the forward pass begins."
        if slot not in call.held_back:
            message += f' If that is meant, say so: nonfinite="{call.path or ROOT} {slot}".'
        return Found(phase="batch", path=call.path, slot=slot, message=message, tensors=kept, frame=call.frame)
    parent = call.parent
    since = f"between {_named(call.behind)} and {_named(call.path)}" if call.behind else f"before {_named(call.path)}"
    names = _bad_weights(parent)
    but = f", but {_and(names)} of {_named(parent.path)} is not" if names else ""
    message = (
        f"{_site(call.path, slot)} {_is(reading)}, {'passed on or ' if meant else ''}made by the code of "
        f"{_named(parent.path)} ({parent.kind}) itself, {since}: what that was given, and every output before it, "
        f"is finite{_except(meant)}{but}."
    )
    return Found(
        phase="forward", path=call.path, slot=slot, message=message, call=parent, arguments=parent.arguments,
        tensors=kept, frame=call.frame,
    )  # fmt: skip


def of_output(call: Call, slot: str, reading: Reading) -> Found:
    """An output is not finite; the inputs are."""
    whole = f"{_site(call.path, slot)} {_is(reading)}"
    if names := _bad_weights(call):
        by_code = all(name in own_parameters(call.module) for name in names)
        changed = ", changed outside of the optimizer" if by_code else ""
        message = f"{whole}, as does {_and(names)} of {_named(call.path)}{changed}."
    else:
        _read_weights_again(call)
        largest = ", ".join(
            f"{name} up to {one.extent.largest:.3g}"
            for name, one in call.frame.read("")
            if not name.startswith("output")
            and one.extent is not None
            and one.extent.is_finite
            and one.dtype.is_floating_point
        )
        sizes = f" ({largest})" if largest else ""
        given = [_site(call.path, name) for name, one in call.frame.read("input") if one.is_non_finite]
        hint = f' If its -inf masks something on purpose, say so: masks="{call.path or ROOT} {slot}".'
        message = (
            f"{whole}; what {call.kind} was given is finite{_except(given)}{sizes}{_limit(reading)}."
            f"{hint if reading.masks else ''}"
        )
    return Found(phase="forward", path=call.path, slot=slot, message=message, call=call, arguments=call.arguments)


def _bad_weights(call: Call) -> list[str]:
    """Own parameters and buffers that are not finite now, whatever was read of them before; no masks."""
    parameters = [name for name, one in own_parameters(call.module).items() if not _is_finite(one)]
    buffers = own_buffers(call.module).items()
    return parameters + [name for name, one in buffers if not _is_finite(one) and not only_masks(one)]


def _read_weights_again(call: Call) -> None:
    """Put into the frame what weights are now, if they have grown since: code may write to them through `.data`."""
    weights = own_parameters(call.module)
    for name, one in call.frame.read(""):
        if name not in weights or one.extent is None:
            continue
        try:
            now = extent(weights[name])
        except UnsupportedTensorError:
            continue
        if now.largest > one.extent.largest:
            one.extent = now


def _is_finite(tensor: Tensor) -> bool:
    """True if all is finite that a tensor holds here; what cannot be read is not held against it."""
    try:
        return extent(tensor).is_finite
    except UnsupportedTensorError:
        return True


def of_seen_output(path: str, slot: str, reading: Reading, *, meant: Collection[str]) -> Found:
    """An output in compiled code is not finite; every one before it is."""
    message = (
        f"{_site(path, slot)} {_is(reading)}; every output that was seen before it is finite{_except(meant)}. "
        "It was computed in compiled code, where inputs are not seen."
    )
    return Found(phase="forward", path=path, slot=slot, message=message)


def of_seen_gradient(path: str, slot: str, reading: Reading) -> Found:
    """A gradient in compiled code is not finite; every one before it is."""
    message = (
        f"The gradient that comes back to {_site(path, slot)} in compiled code {_is(reading)}; those before it do not."
    )
    return Found(phase="backward", path=path, slot=f"grad {slot}", message=message)


def of_loss(reading: Reading, *, outputs: bool, meant: Collection[str]) -> Found:
    """The loss is not finite; every output of a module is."""
    made = "so the loss function made it" if not meant else "so the loss function made it, or it comes from there"
    seen = f": every output of a module is finite{_except(meant)}, {made}" if outputs else ""
    return Found(phase="loss", path="loss", slot="backward", message=f"The loss {_is(reading)}{seen}.")


def of_gradient(call: Call, slot: str, reading: Reading) -> Found:
    """A gradient that comes back to an output is not finite; those before it in the backward pass are."""
    takers = {taker.path: taker for taker, _ in call.takers.get(slot, ())}
    parent = call.passed_on.get(slot, call).parent
    begins = f"The gradient that comes back to {_site(call.path, slot)} {_is(reading)}"
    blamed: Call | None = None
    if len(takers) == 1:
        blamed = next(iter(takers.values()))
        what = f"made by the backward pass of {_named(blamed.path)} ({blamed.kind})"
    elif takers:
        what = f"the sum of what the backward passes of {_and([_named(path) for path in takers])} made"
    elif parent is None:
        what = "made by the backward pass of the loss"
    else:
        blamed = parent
        what = (
            f"made by the backward pass of the code of {_named(blamed.path)} ({blamed.kind}) behind {_named(call.path)}"
        )
    message = f"{begins}: {what}{_grown(blamed)}; every gradient before it is finite."
    return Found(phase="backward", path=call.path, slot=f"grad {slot}", message=message, call=blamed)


def of_input_gradient(call: Call, slot: str, reading: Reading) -> Found:
    """The gradient of what a module was given is not finite; those before it in the backward pass are."""
    message = (
        f"The gradient of {_site(call.path, slot)} {_is(reading)}: made by the backward pass of {_named(call.path)} "
        f"({call.kind}){_grown(call)}; every gradient before it is finite."
    )
    return Found(phase="backward", path=call.path, slot=f"grad {slot}", message=message, call=call)


def of_parameter_gradient(path: str, reading: Reading, others: int, tensor: Tensor | None) -> Found:
    """The gradient of a parameter is not finite when the optimizer steps; the gradients of all activations are."""
    more = f" (of {others + 1} such, that of the module which was called last)" if others else ""
    message = (
        f"The gradient of {path} {_is(reading)} when the optimizer steps{more}; "
        "no gradient of an activation was seen that is not finite."
    )
    kept = {} if tensor is None else {f"{path} grad": tensor}
    return Found(phase="grad", path=path, slot="grad", message=message, tensors=kept)


def of_step(path: str, slot: str, reading: Reading, gradient: Reading | None, tensors: Mapping[str, Tensor]) -> Found:
    """The optimizer has made a state or a parameter that is not finite, of gradients that are."""
    what = f"{path} {slot}" if slot != "value" else f"The parameter {path}"
    given = ""
    if gradient is not None and gradient.extent is not None:
        largest = gradient.extent.largest
        square = f", its square {largest * largest:.3g}" if slot.endswith("_sq") else ""
        given = f": its gradient is finite (up to {largest:.3g}{square})"
    message = f"{what} {_is(reading)} after the step{given}{_limit(reading)}."
    return Found(
        phase="param" if slot == "value" else "optimizer", path=path, slot=slot, message=message, tensors=tensors
    )


def of_buffer(path: str, reading: Reading, *, first: bool, meant: Collection[str]) -> Found:
    """A buffer has become NaN or infinite, and nothing else; or was so before the first step."""
    when = (
        "before it is first used"
        if first
        else f"after the step, and did not before; what was computed in it is finite{_except(meant)}"
    )
    message = f"The buffer {path} {_is(reading)} {when}."
    return Found(phase="param", path=path, slot="buffer", message=message)


def of_setting(path: str, slot: str, reading: Reading) -> Found:
    """A setting of the optimizer is not finite."""
    return Found(phase="optimizer", path=path, slot=slot, message=f"The setting {slot} of {path} {_is(reading)}.")


def of_first_parameter(path: str, reading: Reading, tensor: Tensor | None) -> Found:
    """A parameter is not finite before the first step."""
    message = f"The parameter {path} {_is(reading)} before it is first used: initialization, or what was loaded."
    return Found(
        phase="param",
        path=path,
        slot="value",
        message=message,
        tensors={} if tensor is None else {f"{path} value": tensor},
    )


def _is(reading: Reading) -> str:
    if reading.extent is not None and reading.extent.count == 1:
        return "is NaN" if reading.is_nan else "is infinite"
    return "holds NaN" if reading.is_nan else "holds infinity"


def _site(path: str, slot: str) -> str:
    return f"{_named(path)} {slot}"


def _named(path: str | None) -> str:
    return printable(path or ROOT)


def _except(sites: Collection[str]) -> str:
    """Where NaN and infinity are meant."""
    named = [printable(site) for site in islice(sites, _MOST_NAMED)]
    more = [f"{len(sites) - _MOST_NAMED} more"] if len(sites) > _MOST_NAMED else []
    return f" except where it need not be ({_and([*named, *more])})" if sites else ""


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _limit(reading: Reading) -> str:
    if reading.is_nan or not reading.dtype.is_floating_point:
        return ""
    return f"; the largest {str(reading.dtype).removeprefix('torch.')} is {torch.finfo(reading.dtype).max:.3g}"


def _grown(call: Call | None) -> str:
    """The size of the gradients that a module's backward pass received."""
    if call is None or call.backward is None:
        return ""
    found = [one.extent.largest for _, one in call.backward.read("grad output") if one.extent is not None]
    return f" from gradients up to {max(found):.3g}" if found else ""
