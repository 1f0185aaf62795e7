"""What an operation contributes to the gradient of a parameter that it uses, from its node in the graph.

Letters in shapes: M rows, I and O the axes that a product sums over and has; K probes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from traindiff.core.torch_compat.autograd import num_results, result_shape, saved
from traindiff.core.witness import PROBES
from traindiff.observe.torch.witness import products as of
from traindiff.observe.torch.witness.errors import NotWitnessedError
from traindiff.observe.torch.witness.given import probed
from traindiff.observe.torch.witness.graph import CASTS, Place, chain_of, kind_of
from traindiff.observe.torch.witness.layers import Layers
from traindiff.observe.torch.witness.places import Axes, axes_of, saved_tensor, shape_of
from traindiff.observe.torch.witness.products import Products
from traindiff.observe.torch.witness.stacks import is_grouped, of_groups, of_stack, stack_of
from traindiff.observe.torch.witness.use import FLOAT32, Held, Use, roundoff

_NO_TOKEN = 1 << 63
"""Negative numbers of an embedding's padding are saved as unsigned numbers from here on."""


class _Kind(NamedTuple):
    """A kind of operation.

    Attributes:
        use: Makes the use of a parameter, given the layers, the place, the parameter and the gradient of the result.
        reads: Whether it reads what the operation saved.
        fits: Tells whether it knows the view of the parameter that the operation uses.
    """

    use: Callable[[Layers, Place, Held, Tensor], Use]
    reads: bool
    fits: Callable[[Place], bool]


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation that uses a parameter, of a known kind.

    Attributes:
        place: Where it is.
        kind: Its kind.
    """

    place: Place
    kind: _Kind

    @property
    def reads(self) -> bool:
        """True if `use` reads what the operation saved for its backward pass."""
        return self.kind.reads

    def use(self, layers: Layers, held: Held, gradient: Tensor) -> Use:
        """The use of the parameter.

        Args:
            layers: Makes uses.
            held: The parameter.
            gradient: Gradient of the operation's result.

        Raises:
            NotWitnessedError: It cannot be witnessed.
        """
        if gradient.is_complex() or gradient.is_nested or gradient.layout != torch.strided:
            raise NotWitnessedError("an operation that uses it has a complex, nested or sparse gradient")
        with torch.no_grad():
            return self.kind.use(layers, self.place, held, gradient.detach())


def operation_at(place: Place) -> Operation | None:
    """The operation at a place; None if what it contributes is not known."""
    name = kind_of(place.node)
    kind = _KINDS.get((name, place.number)) or _KINDS.get((name, _ANY))
    return Operation(place, kind) if kind is not None and kind.fits(place) else None


def _any_view(place: Place) -> bool:
    """True unless it is one of several results of an operation that divides the parameter."""
    return all(num_results(node) == 1 for node in chain_of(place))


def _whole(place: Place) -> bool:
    return all(kind_of(node) in CASTS for node in chain_of(place)[:-1])


def _matrices(place: Place) -> bool:
    """True if the parameter is a matrix with known axes, and the operation is one product, or it is a stack of them."""
    if stack_of(place) is not None:
        return True
    axes = axes_of(place)
    is_known = _sides(axes) is not None or _spread(axes) is not None
    return is_known and prod(shape_of(place.node)[:-2]) == 1


def _sides(axes: Axes | None) -> tuple[str, str] | None:
    """Which side of a parameter lies along each axis of a matrix: `rows`, `columns`, or empty for neither."""
    if axes is None:
        return None
    if len(axes) > 2 and all(not group for group in axes[:-2]):
        axes = axes[-2:]
    if len(axes) != 2:
        return None
    found = []
    for group in axes:
        if not group:
            found.append("")
        elif group == (0,):
            found.append("rows")
        elif 0 not in group and list(group) == sorted(group):
            found.append("columns")
        else:
            return None
    return None if found[0] == found[1] != "" else (found[0], found[1])


def _spread(axes: Axes | None) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Which of the three axes of a stack of matrices lie along each axis of one matrix, as in a sum over heads."""
    while axes is not None and len(axes) > 2 and not axes[0]:
        axes = axes[1:]
    if axes is None or len(axes) != 2 or sorted((*axes[0], *axes[1])) != [0, 1, 2]:
        return None
    return axes[0], axes[1]


def _added(layers: Layers, place: Place, held: Held, gradient: Tensor) -> Use:
    """Sums and differences."""
    factor = 1.0
    if place.number == 1:
        factor = float(saved(place.node, "alpha")) * (-1.0 if kind_of(place.node).startswith("Sub") else 1.0)
    return _elementwise(layers, place, held, gradient, factor * of.as_float(gradient))


def _bias(layers: Layers, place: Place, held: Held, gradient: Tensor) -> Use:
    """What is added to a product of matrices."""
    return _elementwise(layers, place, held, gradient, saved(place.node, "beta") * of.as_float(gradient))


def _multiplied(layers: Layers, place: Place, held: Held, gradient: Tensor) -> Use:
    """Products of elements."""
    other = saved_tensor(place, "other" if place.number == 0 else "self")
    product = of.as_float(gradient) * of.as_float(other)
    return _elementwise(layers, place, held, gradient, product, operand=roundoff(gradient))


def _norm_weight(layers: Layers, place: Place, held: Held, gradient: Tensor) -> Use:
    """Weights of a layer norm."""
    x, mean, scale = (of.as_float(saved_tensor(place, name)) for name in ("input", "result1", "result2"))
    g = of.as_float(gradient)
    shift = (g * (mean * scale)).double().square().sum()
    return _elementwise(layers, place, held, gradient, g * ((x - mean) * scale), is_norm=True, shift=shift)


def _norm_bias(layers: Layers, place: Place, held: Held, gradient: Tensor) -> Use:
    """Biases of a layer norm."""
    return _elementwise(layers, place, held, gradient, of.as_float(gradient), is_norm=True)


def _joined(layers: Layers, place: Place, held: Held, gradient: Tensor) -> Use:
    """Tensors that are put together; the node only cuts the gradient."""
    return _elementwise(layers, place, held, gradient, place.node(of.as_float(gradient))[place.number])


def _embedded(layers: Layers, place: Place, held: Held, gradient: Tensor) -> Use:
    """Rows of a table."""
    padding = int(saved(place.node, "padding_idx"))
    table: Any = SimpleNamespace(
        padding_idx=None if padding < 0 or padding >= _NO_TOKEN else padding, num_embeddings=held.extent.shape[0],
        scale_grad_by_freq=bool(saved(place.node, "scale_grad_by_freq")),
    )  # fmt: skip
    rows = layers.probes.row_factors(held.path, held.extent, held.local)
    found = of.embedding(table, saved_tensor(place, "indices"), rows)
    columns = layers.probes.columns(held.path, held.extent, gradient)
    return layers.own_sums(held, lambda g: found(g, columns), gradient)


def _first_factor(layers: Layers, place: Place, held: Held, gradient: Tensor) -> Use:
    """The first factor of a product of matrices A B: its gradient is G Bᵀ."""
    other = saved_tensor(place, "batch2" if kind_of(place.node).startswith("Baddbmm") else "mat2")
    return _product(layers, place, held, gradient, other, left=gradient.mT, right=other.mT)


def _second_factor(layers: Layers, place: Place, held: Held, gradient: Tensor) -> Use:
    """The second factor: its gradient is Aᵀ G."""
    name = {"AddmmBackward": "mat1", "BaddbmmBackward": "batch1"}.get(kind_of(place.node), "self")
    other = saved_tensor(place, name)
    return _product(layers, place, held, gradient, other, left=other, right=gradient)


def _grouped(layers: Layers, place: Place, held: Held, gradient: Tensor) -> Use:
    """The matrices of a product whose rows are in groups, one for each matrix."""
    other, ends = saved_tensor(place, "self"), saved_tensor(place, "offs")
    return of_groups(layers, place, held, gradient, left=other, ends=ends)


def _product(
    layers: Layers, place: Place, held: Held, gradient: Tensor, other: Tensor, *, left: Tensor, right: Tensor
) -> Use:
    """A factor whose gradient is the sum over rows of `left rightᵀ`; shapes (..., M, I) and (..., M, O)."""
    if stack_of(place) is not None:
        return of_stack(layers, place, held, gradient, other, left=left, right=right)
    left, right = _matrix(left), _matrix(right)
    axes = axes_of(place)
    sides, spread = _sides(axes), _spread(axes)
    signs = {
        "rows": layers.probes.rows(held.path, held.extent, gradient),
        "columns": layers.probes.columns(held.path, held.extent, gradient),
    }
    factor = torch.full((PROBES,), float(saved(place.node, "alpha", 1.0)), dtype=torch.float64)
    factor = factor.to(gradient.device)
    if sides is not None:
        for side in [one for one in signs if one not in sides]:
            factor = factor * signs[side][:, 0].double()  # of an axis of size 1
        signs[""] = torch.ones_like(signs["rows"][:, :1])
        found = [(part, signs[side]) for part, side in zip((left, right), sides, strict=True)]
    else:
        assert spread is not None
        by_axis = signs["rows"], *layers.probes.axes(held.path, held.extent, gradient)
        laid = [_of_axes([by_axis[axis] for axis in group]) for group in spread]
        found = [*zip((left, right), laid, strict=True)]
    if any(part.shape[1] != side.shape[1] for part, side in found):
        raise NotWitnessedError("an operation uses another part of it than this rank has")
    terms = [of.of_tensor(part, side) for part, side in found]

    def products(_: Tensor) -> Products:
        return of.of_rows(terms[0] * factor, terms[1])

    return layers.use(held, products, other, gradient, width=sum(held.extent.shape))


def _of_axes(signs: Sequence[Tensor]) -> Tensor:
    """Signs of several axes that lie along one, given those of each, shape (PROBES, length)."""
    found = signs[0]
    for one in signs[1:]:
        found = (found[:, :, None] * one[:, None, :]).flatten(1)
    return found


def _elementwise(
    layers: Layers, place: Place, held: Held, gradient: Tensor, product: Tensor, *, operand: float = 0.0,
    is_norm: bool = False, shift: float | Tensor = 0.0,
) -> Use:  # fmt: skip
    """What is added up, along the axes that were broadcast, to the gradient of the operation's input.

    Args:
        layers: The signs.
        place: The operation.
        held: The parameter.
        gradient: Gradient of the operation's result.
        product: Its product with the other operand, in float32 at least.
        operand: Unit roundoff of the dtype in which the operation computes that product.
        is_norm: A norm adds up row by row, in the dtype of the parameter. Sums that follow a broadcast are added up in
            pairs, and rounded once.
        shift: See `Products`.
    """
    chain = chain_of(place)

    def products(_: Tensor) -> Products:
        following, number = place.node.next_functions[place.number]
        total = product.sum_to_size(result_shape(following, number))
        least = total.numel()
        for node in chain[:-1]:
            if kind_of(node) not in CASTS:
                total = node(total)
            least = min(least, total.numel())
        if total.numel() != prod(held.extent.shape):
            raise NotWitnessedError("an operation uses another part of it than this rank has")
        a = layers.probes.row_factors(held.path, held.extent, total)
        b = layers.probes.columns(held.path, held.extent, total)
        squares = PROBES * _square(product)
        changes = 2.0 * squares
        if is_norm:
            terms = product.reshape(-1, prod(result_shape(following, number)))
            changes = PROBES * (_square(terms[:1]) + _square(terms.diff(dim=0)))
        totals = torch.cat([probed(total.reshape(held.extent.shape), a, b), torch.stack([squares, changes])])
        return Products(totals=totals, rows=max(1, product.numel() // max(1, least)), shift=shift)

    use = layers.own_sums(held, products, gradient)
    return use if is_norm else replace(use, operand=operand, sums=FLOAT32)


def _square(tensor: Tensor) -> Tensor:
    square: Tensor = torch.linalg.vector_norm(tensor).double().square()
    return square


def _matrix(tensor: Tensor) -> Tensor:
    """A tensor without axes of size 1 in front of the last two."""
    if tensor.dim() > 2 and prod(tensor.shape[:-2]) != 1:
        raise NotWitnessedError("an operation uses it in several products")
    return tensor.reshape(tensor.shape[-2:])


_ANY = -1
"""Stands for every input."""

_KINDS: Mapping[tuple[str, int], _Kind] = {
    **dict.fromkeys([("AddBackward", _ANY), ("SubBackward", _ANY)], _Kind(_added, reads=False, fits=_any_view)),
    **dict.fromkeys([("CatBackward", _ANY), ("StackBackward", _ANY)], _Kind(_joined, reads=False, fits=_any_view)),
    ("MulBackward", _ANY): _Kind(_multiplied, reads=True, fits=_any_view),
    **dict.fromkeys([("AddmmBackward", 0), ("BaddbmmBackward", 0)], _Kind(_bias, reads=False, fits=_any_view)),
    ("GroupedMmBackward", 1): _Kind(_grouped, reads=True, fits=is_grouped),
    **dict.fromkeys(
        [("AddmmBackward", 1), ("MmBackward", 0), ("BmmBackward", 0), ("BaddbmmBackward", 1)],
        _Kind(_first_factor, reads=True, fits=_matrices),
    ),
    **dict.fromkeys(
        [("AddmmBackward", 2), ("MmBackward", 1), ("BmmBackward", 1), ("BaddbmmBackward", 2)],
        _Kind(_second_factor, reads=True, fits=_matrices),
    ),
    ("NativeLayerNormBackward", 1): _Kind(_norm_weight, reads=True, fits=_any_view),
    ("NativeLayerNormBackward", 2): _Kind(_norm_bias, reads=False, fits=_any_view),
    ("EmbeddingBackward", 0): _Kind(_embedded, reads=True, fits=_whole),
}
"""By the name of the node, and the number of the input, or `_ANY`."""
