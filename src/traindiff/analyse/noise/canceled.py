"""What cancels: outputs and gradients that are far smaller than the terms they add up, losses close to their minimum.

Rounding, and the differences of what an operation reads, are relative to its terms. If these cancel, the same error is
a larger part of what is left. A training that converges comes there: its outputs are nearly what they should be, and
the gradients of samples add up to nearly nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from traindiff.analyse.merge.distance import Pair
from traindiff.analyse.merge.site import MergedSite, SiteKey
from traindiff.analyse.noise.seen_loss import SeenLoss, SeenNow
from traindiff.analyse.noise.uncalibrated import BEYOND, FEW_FLIPS, GAIN, Floors
from traindiff.core.summary import UNIT_ROUNDOFF, largest, norm_of, number

_SAME = 1e-3
"""Relative difference up to which two curvatures of a loss are the same. Both are computed from float32 numbers."""

_CHANGED = 0.01
"""Relative change of a loss above which an unchanged curvature tells that the loss is quadratic."""

_FEW_CLASSES = 16
"""Elements of a row that may all have a large gradient."""

_NEARLY_FITTED = 16.0
"""Elements of which an L1 loss turns the gradient around, as a multiple of the relative difference of the output: such
a loss fits some of them exactly. Measured in small networks of 250 steps: up to 9."""


@dataclass(frozen=True, slots=True)
class _Head:
    """An output that the loss is computed from.

    Attributes:
        gain: `||g|| ||y|| / |L|`, of the output y, its gradient g and the loss L: by how much a relative error of the
            output, at worst, is larger in the loss.
        width: Elements in each row.
        quadratic: Whether the loss is quadratic in the output.
        signs: Elements of the gradient, if all have one size: those of a sum of distances, as of an L1 loss; else 0.
        turn: `k ||y|| / ||g||` with the largest curvature k so far: by how much a relative error of the output is
            larger in its gradient; 0 if it is not known.
        largest: The largest norm of its gradient so far in the run, over that of this step.
    """

    gain: float
    width: int
    quadratic: bool
    signs: int
    turn: float
    largest: float

    @property
    def spread(self) -> float:
        """How much smaller errors are along a gradient that has few large elements, if they are independent."""
        return math.sqrt(max(1.0, self.width / _FEW_CLASSES))


class Cancellation:
    """How much cancels in the outputs, the gradients and the loss of one step.

    A layer multiplies what it reads by its weight. Of unrelated factors, the root mean square of a product of K terms
    is sqrt(K) times that of the factors. An output, or a weight's gradient, that is smaller has canceled. What a layer
    reads is not recorded as such: it is the latest tensor before it that has the right number of elements.

    A loss L that is never negative, and has curvature k in an output y with gradient g, meets `||g||^2 <= 2 k L`, and a
    quadratic one `=` (Srebro, Sridharan and Tewari, 2010, lemma 2.1). So k is known if the loss is quadratic, and its
    gradient moves by k times what the output moves. Of other losses k is at least that; where the elements of a row
    differ independently, a gradient with one large element in each row moves by their root mean square.

    Args:
        pairs: Of the step, in execution order.
        parameters: By path: the parameters as the step found them.
        seen: What earlier steps tell of the loss. This step is added.
        clipped: Factor by which clipping made the gradients smaller that the optimizer used.
    """

    def __init__(
        self, pairs: Sequence[Pair], parameters: Mapping[str, Pair], seen: SeenLoss, clipped: float = 1.0
    ) -> None:
        self._terms: dict[SiteKey, float] = {}  # size of what outputs, and gradients of weights, would be
        self._heads: dict[SiteKey, _Head] = {}  # by the key of the gradient
        self._seen = seen
        self._see(pairs, parameters)
        for one in seen.see(pair.baseline for pair in pairs):
            self._heads[one.gradient.key] = self._head(one)
        self._small = seen.largest / seen.latest if seen.latest else 1.0  # how much larger the loss has been
        if seen.scale is None:
            used = [pair.baseline for pair in pairs if pair.baseline.key in self._terms]
            terms = [(one, clipped * self._terms[one.key]) for one in used if one.key.phase == "grad"]
            sizes = [norm_of(one.summary) / size for one, size in terms if size > 0.0]
            seen.scale = min(1.0, max(sizes, default=0.0)) or None
            seen.lacks_scale = seen.scale is None and bool(terms)
        self.used = seen.used(clipped)
        """Factor by which gradients that the optimizer used are smaller than what the backward pass made of them."""

    def _see(self, pairs: Iterable[Pair], parameters: Mapping[str, Pair]) -> None:
        inputs = _Inputs()
        read: dict[SiteKey, tuple[_Layer, MergedSite]] = {}  # by output: the layer, and what it has read
        for entry in (pair.baseline for pair in pairs if not pair.baseline.unobserved):
            key = entry.key
            if key.phase in ("batch", "forward") and not key.stage and entry.dtype in UNIT_ROUNDOFF:
                if key.phase == "forward":
                    self._see_output(entry, parameters, inputs, read)
                inputs.add(entry)
            elif key.phase == "backward":
                self._see_gradient(entry, read)

    def _see_output(
        self,
        entry: MergedSite,
        parameters: Mapping[str, Pair],
        inputs: _Inputs,
        read: dict[SiteKey, tuple[_Layer, MergedSite]],
    ) -> None:
        layer = _Layer.of(entry, parameters)
        source = None if layer is None else inputs.of(layer)
        if layer is None or source is None:
            return
        read[entry.key] = layer, source
        if not layer.normalizes:
            product = layer.outputs * layer.terms * layer.weights * _mean_square(source)
            self._add(entry.key, product + layer.outputs * layer.bias)

    def _see_gradient(self, entry: MergedSite, read: Mapping[SiteKey, tuple[_Layer, MergedSite]]) -> None:
        found = read.get(entry.key._replace(phase="forward"))
        if found is None:
            return
        (layer, source), gradient = found, _mean_square(entry)
        squares, handed_on = _mean_square(source), layer.outputs * layer.terms * layer.weights * gradient
        if source.key.phase == "forward":
            # Of what a norm hands on, the mean and the part along its output are subtracted.
            handed_on /= squares if layer.normalizes and squares else 1.0
            self._add(source.key._replace(phase="backward"), handed_on)
        if not layer.normalizes:  # each element of its weight's gradient adds up a product for each row
            rows = layer.outputs / layer.width
            self._add(SiteKey("grad", "", layer.path, "grad"), layer.size * rows * gradient * squares)

    def _add(self, key: SiteKey, squares: float) -> None:
        self._terms[key] = math.hypot(self._terms.get(key, 0.0), math.sqrt(squares))

    def _head(self, seen: SeenNow) -> _Head:
        output, gradient, before, now = seen
        g, y, loss = norm_of(gradient.summary), norm_of(output.summary), now.loss
        width = output.shape[-1] if len(output.shape) > 1 else 1
        count = int(output.summary["count"])
        changed = before is not None and abs(before.loss - loss) > _CHANGED * loss
        constant = before is not None and changed and _is_near(now.curvature, before.curvature)
        usual = any(_is_near(now.curvature, k / n) for k in (1.0, 2.0) for n in (1, count, max(1, count // width)))
        quadratic = count > 1 and (constant or usual) and not self._seen.signed
        return _Head(
            gain=g * y / loss, width=max(1, width), quadratic=quadratic, signs=_num_signs(gradient),
            turn=0.0 if self._seen.signed else max(now.steepest, quadratic * now.curvature) / g * y,
            largest=now.largest / g,
        )  # fmt: skip

    def of(self, pair: Pair) -> float:
        """Size of the terms of an output, its gradient or a weight's, as a multiple of its own; at least 1."""
        key = pair.baseline.key
        terms = self._terms.get(key._replace(stage="", micro_step=0) if key.phase == "grad" else key, 0.0)
        terms *= self.used if key.phase == "grad" and not key.stage else 1.0
        size = norm_of(pair.baseline.summary) if terms else 0.0
        return max(1.0, terms / size) if size else 1.0

    def knows(self, pair: Pair) -> bool:
        """True if the terms of a parameter's gradient are known."""
        return pair.baseline.key._replace(stage="", micro_step=0) in self._terms

    def of_loss(self, pair: Pair, floors: Floors) -> float:
        """Floor of the loss, from the differences measured at its inputs."""
        inputs = max(floors.flow, floors.parameters)
        if not inputs:
            return 0.0
        if not number(pair.baseline.summary):  # a loss with a margin, which every sample keeps in the baseline
            most = (floors.precision + GAIN * inputs) * self._seen.largest
            return math.inf if abs(number(pair.candidate.summary)) <= most else 0.0
        own = floors.precision * self._small
        return own + max((_of_loss(head, inputs, floors.precision) for head in self._heads.values()), default=0.0)

    def of_gradient(self, pair: Pair, floors: Floors) -> float:
        """Floor of the gradient of an output that the loss is computed from; 0 for others."""
        head, inputs = self._heads.get(pair.baseline.key), max(floors.flow, floors.parameters)
        if head is None or not inputs:
            return 0.0
        if head.signs:  # an element that is nearly what it should be has either sign
            turned = FEW_FLIPS + _NEARLY_FITTED * head.signs * inputs
            return 2.0 * math.sqrt(turned / head.signs)
        if head.quadratic:
            return floors.precision + BEYOND * head.turn * inputs
        # A probability close to 1 is rounded as 1 is, and what is missing of it is as large as it was before the fit.
        return floors.precision * head.largest + GAIN * max(1.0, head.turn / head.spread) * inputs


def _of_loss(head: _Head, inputs: float, precision: float) -> float:
    if head.quadratic:  # the first and the second order of (y + d)^2
        moved = head.gain * inputs
        return BEYOND * moved * (1.0 + moved / 4.0)
    gain = head.gain / head.spread
    moved = max(1.0, gain) * inputs
    return GAIN * moved * max(1.0, moved) + gain * head.largest * precision


_FEW_SIGNS = 8
"""Fewer elements may have one size by themselves, as the two classes of a single sample."""


def _num_signs(gradient: MergedSite) -> int:
    """Number of elements that are not zero, if all have one size and either sign; else 0."""
    summary = gradient.summary
    count = int(summary["count"]) - int(summary["zero"])
    most = float(largest(summary))
    same = _is_near(count * most * most, float(summary["sum_of_squares"]))
    return count if count >= _FEW_SIGNS and same and 0 < int(summary["negative"]) < count else 0


def _is_near(curvature: float, expected: float) -> bool:
    return abs(curvature - expected) <= _SAME * expected


@dataclass(frozen=True, slots=True)
class _Layer:
    """A product of an input and a weight, as linear layers and convolutions compute it, or a norm.

    Attributes:
        path: Of the weight.
        size: Its elements.
        weights: Their mean square.
        bias: Mean square of the bias; 0 without one.
        terms: Products in each element of the output.
        outputs: Elements of the output.
        width: Channels of the output.
        inputs: Elements of the input by which it is found; or its samples and channels, of a convolution.
        normalizes: Whether it is a norm, which divides by the size of its input.
    """

    path: str
    size: int
    weights: float
    bias: float
    terms: float
    outputs: int
    width: int
    inputs: tuple[tuple[int, ...], ...]
    normalizes: bool = False

    @classmethod
    def of(cls, output: MergedSite, parameters: Mapping[str, Pair]) -> _Layer | None:
        """The layer that has an output; None if it is none."""
        module, shape = output.key.path, output.shape
        path = f"{module}.weight" if module else "weight"
        weight = parameters.get(path)
        if weight is None or output.key.slot != "output[0]" or not shape or weight.baseline.unobserved:
            return None
        sides, outputs = weight.baseline.shape, int(output.summary["count"])
        size = math.prod(sides)
        inputs: tuple[tuple[int, ...], ...] = ((outputs,),)
        if not size or not outputs:
            return None
        if len(sides) == 1:
            if size not in shape[1:]:
                return None
            width = size
        elif len(sides) == 2:
            width = shape[-1] if shape[-1] in sides else 0
            inputs = ((outputs // width * (size // width),),) if width else ()
        else:
            width = shape[1] if len(shape) > 1 else 0
            if width not in sides[:2]:
                return None
            other = sides[1] if width == sides[0] else sides[0]
            inputs = tuple((shape[0], channels) for channels in (other, width, other * width))
        if not width:
            return None
        biased = parameters.get(f"{module}.bias" if module else "bias")
        bias = 0.0 if biased is None or biased.baseline.unobserved else _mean_square(biased.baseline)
        return cls(
            path=path, size=size, weights=_mean_square(weight.baseline), bias=bias, terms=size / width,
            outputs=outputs, width=width, inputs=inputs, normalizes=len(sides) == 1,
        )  # fmt: skip


class _Inputs:
    """The tensors of a step so far, by which layers may have read them."""

    def __init__(self) -> None:
        self._latest: dict[tuple[int, ...], MergedSite] = {}

    def add(self, entry: MergedSite) -> None:
        self._latest[(int(entry.summary["count"]),)] = entry
        if len(entry.shape) > 2:
            self._latest[entry.shape[:2]] = entry

    def of(self, layer: _Layer) -> MergedSite | None:
        """What a layer has read; None if it is not known."""
        return next((self._latest[one] for one in layer.inputs if one in self._latest), None)


def _mean_square(entry: MergedSite) -> float:
    count = int(entry.summary["count"])
    squares = float(entry.summary["sum_of_squares"])
    return squares / count if count > 0 and 0.0 < squares < math.inf else 0.0
