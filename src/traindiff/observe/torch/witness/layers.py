"""Which layers can be witnessed, and which uses of parameters one call of a layer makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, distributed, nn

from traindiff.core.shards import Region
from traindiff.core.site import canonical_path
from traindiff.core.torch_compat.alike import looks_like
from traindiff.core.torch_compat.autograd import inside_backward, keeps_saved_tensors_elsewhere, saved, version_of
from traindiff.core.torch_compat.operators import float32_matmul_precision
from traindiff.core.torch_compat.training import AnyBatchNorm, AnyInstanceNorm, parameters_of
from traindiff.core.witness import PROBES
from traindiff.observe.torch.hooks.swapped_tensors import HoldsTensors
from traindiff.observe.torch.session.targets import Targets
from traindiff.observe.torch.sharding.distributed_tensor import is_distributed, region_of
from traindiff.observe.torch.sharding.layout import Layout
from traindiff.observe.torch.witness import products as of
from traindiff.observe.torch.witness.errors import KEPT_AWAY, NotWitnessedError
from traindiff.observe.torch.witness.graph import kind_of
from traindiff.observe.torch.witness.normalized import Normalized, RMSNorm, is_batched
from traindiff.observe.torch.witness.probes import Extent, Probes
from traindiff.observe.torch.witness.products import Products
from traindiff.observe.torch.witness.use import FLOAT32, Held, Use, of_matrices, roundoff, smallest


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A parameter as it lies over ranks, found once; see `Held`."""

    tensor: ReferenceType[Tensor]
    layout: Layout
    shape: torch.Size
    path: str
    extent: Extent
    divided: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Linear:
    """The uses in calls of a linear layer that look alike, with parameters that are whole on this rank.

    Attributes:
        looks: Tells whether the input, the output and the parameters of a call look so.
        held: These parameters.
        about: What else the uses depend on.
        weight: Path, extent and the signs of the columns of the weight, if it is used.
        uses: Of the weight, whose products are to be replaced, and of the bias.
    """

    looks: Callable[[Sequence[Any]], bool]
    held: Sequence[ReferenceType[Tensor]]
    about: Any
    weight: tuple[str, Extent, Tensor] | None
    uses: list[Use]


@dataclass(slots=True)
class Layers(HoldsTensors):
    """Finds the uses of parameters in calls of modules.

    Args:
        targets: The parameters.
        probes: Their signs.
    """

    targets: Targets
    probes: Probes
    _flat: dict[str, Tensor] = field(init=False)
    _places: dict[int, _Place] = field(init=False, default_factory=dict)
    _linears: dict[str, _Linear] = field(init=False, default_factory=dict)
    _latest: tuple[ReferenceType[Tensor], int, Tensor, Tensor] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        HoldsTensors.__init__(self)  # there is no `super()` in a class with slots
        self._flat = {member.path: one.tensor for one in self.targets.layout.flat for member in one.members}

    def forget_tensors(self) -> None:
        """See `HoldsTensors`."""
        self._places.clear()
        self._linears.clear()
        self._latest = None

    def uses(
        self, path: str, module: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any], output: Tensor
    ) -> Iterator[Use]:
        """The uses of parameters in a call.

        Raises:
            NotWitnessedError: The call cannot be witnessed.
        """
        kind = _KINDS.get(type(module).forward)
        if kind is None:
            return
        if "forward" in vars(module):
            raise NotWitnessedError("the forward method of its module was replaced")
        given = _in_order(type(module).forward, module, args, named)
        if not given or not isinstance(given[0], Tensor):
            raise NotWitnessedError("its module was given no tensor")
        if given[0].is_nested or given[0].layout != torch.strided:
            raise NotWitnessedError("its module was given a nested or sparse tensor")
        if output.is_complex() or given[0].is_complex():
            raise NotWitnessedError("it is complex")
        yield from kind(self, path, module, given, output)

    def held(self, path: str, owner: nn.Module, name: str, *others: Tensor) -> Held | None:
        """A parameter of a module; None without one that is trained and observed.

        Args:
            path: Canonical path of the module.
            owner: The module.
            name: Name of the parameter in it.
            others: Inputs and outputs of the call.
        """
        if name in getattr(owner, "parametrizations", ()):
            return None  # it is computed when it is read: a spectral norm would iterate once more
        own = getattr(owner, name, None)
        if not isinstance(own, Tensor) or not own.requires_grad:
            return None
        found = self.name_of(path, name, own)
        if not (isinstance(own, nn.Parameter) or found in self._flat or is_distributed(own)):
            return None  # in the place of the parameter for one call, as `torch.func.functional_call` puts it there
        return self.held_tensor(found, own, *others)

    def name_of(self, path: str, name: str, own: Tensor) -> str:
        """The canonical path of a parameter of a module, given the module's path."""
        return self.targets.names.get(id(own)) or self.targets.first_name(canonical_path(f"{path}.{name}".strip(".")))

    def held_tensor(self, found: str, tensor: Tensor, *others: Tensor) -> Held | None:
        """The same for the tensor of a parameter.

        Args:
            found: Canonical path of the parameter.
            tensor: The tensor that operations use.
            others: Inputs and outputs of the operation.
        """
        place = self._place_of(found, tensor)
        if place is None:
            return None
        divided = place.divided or any(is_distributed(one) and _is_divided(one) for one in others)
        local = _local(tensor) if is_distributed(tensor) else tensor
        leaf = self._flat.get(found, tensor)
        return Held(path=found, leaf=id(leaf), local=local.detach(), extent=place.extent, divided=divided)

    def _place_of(self, found: str, own: Tensor) -> _Place | None:
        """Which of the elements of a parameter this rank has; None if it is not observed."""
        layout = self.targets.layout
        known = self._places.get(id(own))
        if (
            known is not None and known.layout is layout and known.tensor() is own and known.shape == own.shape
            and known.path == found
        ):  # fmt: skip
            return known
        if found not in self.targets.paths or not self.targets.selects(found):
            return None
        if is_distributed(own):
            region: Region | None = region_of(own)
            divided = region is not None and not region.is_whole
        else:
            region = layout.region_of_parameter(own, path=found, phase="param")
            divided = region is not None
            if region is None and layout.data.alike > layout.data.parts:
                raise NotWitnessedError("ranks divide the model, and which part of the sum this rank has is not known")
        region = region or Region.whole(tuple(own.shape))
        extent = Extent.of(region)
        if extent is None or region.term is not None:
            raise NotWitnessedError("ranks divide it along an axis behind the second")
        place = _Place(tensor=ref(own), layout=layout, shape=own.shape, path=found, extent=extent, divided=divided)
        if id(own) in self.targets.names:  # a parameter, and not a view of a flat one that lives for one call
            self._places[id(own)] = place
        return place

    def linear(self, path: str, module: nn.Module, given: tuple[Any, ...], output: Tensor) -> Iterator[Use]:
        """Uses in a call of a linear layer."""
        own = parameters_of(module)  # has none that code computes
        held = [one for one in (own.get("weight"), own.get("bias")) if one is not None]
        tensors = [given[0], output, *held]
        about = self.targets.layout, float32_matmul_precision()
        known = self._linears.get(path)
        if (
            known is not None and known.about == about and known.looks(tensors)
            and all(one() is other for one, other in zip(known.held, held, strict=True))
        ):  # fmt: skip
            if known.weight is not None:
                at, extent, signs = known.weight
                p = self._products(given[0], given[0].detach(), signs)
                yield known.uses[0].with_products(partial(self._rows, at, extent, p))
            yield from known.uses[known.weight is not None :]
            return
        weight, bias = self.held(path, module, "weight", given[0], output), self.held(path, module, "bias", output)
        uses = list(self.product(given[0], weight, bias, output))
        if not any(one is not None and one.divided for one in (weight, bias)) and all(map(_is_plain, tensors)):
            found = None
            if weight is not None:
                found = weight.path, weight.extent, self.probes.columns(weight.path, weight.extent, given[0])
            if (looks := looks_like(tensors)) is not None:
                self._linears[path] = _Linear(
                    looks=looks, held=[ref(one) for one in held], about=about, weight=found,
                    uses=uses if found is None else [self._without_input(uses[0], *found), *uses[1:]],
                )  # fmt: skip
        yield from uses

    def _without_input(self, use: Use, path: str, extent: Extent, signs: Tensor) -> Use:
        """A use of a weight that does not keep the input of its call."""
        return use.with_products(partial(self._rows, path, extent, signs.new_empty(0, PROBES)))

    def product(self, given: Tensor, weight: Held | None, bias: Held | None, output: Tensor) -> Iterator[Use]:
        """Uses in a product with a transposed weight, and of a bias that is added."""
        if weight is not None:
            x = _local(given)
            b = self.probes.columns(weight.path, weight.extent, x)
            if x.shape[-1] != b.shape[1]:
                raise NotWitnessedError("its layer was given another part of its input than the weight is of")
            p = self._products(given, x, b)
            yield self.use(
                weight,
                partial(self._rows, weight.path, weight.extent, p),
                given,
                output,
                width=sum(weight.extent.shape),
            )
        if bias is not None:
            yield self.use(
                bias, partial(self._sums, bias.path, bias.extent), output, output, width=bias.extent.shape[0]
            )

    def convolution(self, path: str, module: Any, given: tuple[Any, ...], output: Tensor) -> Iterator[Use]:
        """Uses in a call of a convolution, transposed or not."""
        x = given[0]
        weight, bias = (self.held(path, module, name, x, output) for name in ("weight", "bias"))
        if any(one is not None and one.divided for one in (weight, bias)):
            raise NotWitnessedError("ranks divide a convolution")
        dims = len(module.kernel_size)
        if weight is not None:
            rows = self.probes.rows(weight.path, weight.extent, x)
            columns = self.probes.columns(weight.path, weight.extent, x)
            if module.transposed:
                found = of.transposed_convolution(x, module, rows)
                found = partial(_given_second, found, columns)
            else:
                found = of.convolution(x, module, columns, padding=of.padded(module))
                found = partial(_given_second, found, rows)
            use = self.use(weight, found, x, output, width=sum(weight.extent.shape), is_convolution=True)
            yield replace(use, sums=use.result) if of.adds_samples(output) else use
        if bias is not None:
            yield self.use(
                bias,
                partial(self._sums, bias.path, bias.extent, channels=-1 - dims),
                output,
                output,
                width=bias.extent.shape[0],
            )

    def embedding(self, path: str, module: Any, given: tuple[Any, ...], output: Tensor) -> Iterator[Use]:
        """Uses in a call of an embedding."""
        weight = self.held(path, module, "weight", output)
        if weight is None:
            return
        if weight.divided:
            raise NotWitnessedError("ranks divide an embedding")
        rows = self.probes.row_factors(weight.path, weight.extent, weight.local)
        found = of.embedding(module, given[0], rows)
        columns = self.probes.columns(weight.path, weight.extent, weight.local)
        yield self.own_sums(weight, partial(_given_second, found, columns), output)

    def embedding_bag(self, path: str, module: Any, given: tuple[Any, ...], output: Tensor) -> Iterator[Use]:
        """Uses in a call of an embedding with bags."""
        weight = self.held(path, module, "weight", output)
        if weight is None:
            return
        if weight.divided:
            raise NotWitnessedError("ranks divide an embedding")
        rows = self.probes.row_factors(weight.path, weight.extent, weight.local)
        if module.mode == "max":
            node = output.grad_fn
            if node is None or kind_of(node) != "EmbeddingBagBackward" or keeps_saved_tensors_elsewhere():
                raise NotWitnessedError(KEPT_AWAY)
            found = of.largest_in_bags(saved(node, "result3"), saved(node, "result2"), rows)
        else:
            tokens, offsets, weights = (*given, None, None)[:3]
            found = of.embedding_bag(module, tokens, offsets, weights, rows)
        columns = self.probes.columns(weight.path, weight.extent, weight.local)
        yield self.own_sums(weight, partial(_given_second, found, columns), output)

    def norm(self, path: str, module: Any, given: tuple[Any, ...], output: Tensor) -> Iterator[Use]:
        """Uses in a call of a normalization."""
        x = given[0]
        weight, bias = (self.held(path, module, name, x, output) for name in ("weight", "bias"))
        if any(one is not None and one.local.shape != _shape_of(module) for one in (weight, bias)):
            raise NotWitnessedError("ranks divide a normalization")
        axis = None if isinstance(module, (nn.LayerNorm, RMSNorm)) else 1 if is_batched(module, x) else 0
        if weight is not None:
            normalized = Normalized(module, _local(x))
            found = partial(self._scaled, weight, axis, normalized)
            yield replace(self.own_sums(weight, found, output), normalized=normalized)
        if bias is not None:
            yield self.own_sums(bias, partial(self._scaled, bias, axis, None), output)

    def _rows(self, path: str, extent: Extent, p: Tensor, gradient: Tensor) -> Products:
        g = _local(gradient)
        a = self.probes.rows(path, extent, g)
        if g.shape[-1] != a.shape[1] or g[..., 0].numel() != p.shape[0]:
            raise NotWitnessedError("the gradient of its layer's output is another part than the weight is of")
        return of.of_rows(self._products(gradient, g, a), p)

    def _sums(self, path: str, extent: Extent, gradient: Tensor, *, channels: int = -1) -> Products:
        g = _local(gradient)
        a = self.probes.rows(path, extent, g)
        if g.shape[channels] != a.shape[1]:
            raise NotWitnessedError("the gradient of its layer's output is another part than the bias is of")
        q = self._products(gradient, g, a) if channels == -1 else of.of_tensor(g.movedim(channels, -1), a)
        return of.of_rows(q, self.probes.column_factors(path, extent, g))

    def _scaled(self, held: Held, axis: int | None, normalized: Normalized | None, gradient: Tensor) -> Products:
        g = _local(gradient)
        if normalized is not None and normalized.shape != g.shape:
            raise NotWitnessedError("the gradient of its layer's output is another part than its input is of")
        if normalized is not None and axis is None:
            found = normalized.projected(g, self.probes.elements(held.path, held.extent, g))
            if found is not None:
                q, shift = found
                return of.of_rows(q, q.new_ones(1, PROBES), shift=shift)
        x = None if normalized is None else normalized()
        terms = of.scaled(x, g, held.local.dim(), axis=axis)
        q = of.of_tensor(terms, self.probes.elements(held.path, held.extent, terms))
        return of.of_rows(q, q.new_ones(1, PROBES), shift=0.0 if normalized is None else normalized.shift(g))

    def _products(self, tensor: Tensor, local: Tensor, signs: Tensor) -> Tensor:
        """Rows of a tensor times signs; several layers may be given one tensor, and a bias has its weight's gradient.

        Args:
            tensor: The tensor that layers were given, or returned.
            local: Its local elements.
            signs: From `probes`.
        """
        latest, version = self._latest, version_of(tensor)
        may_be_refilled = tensor.grad_fn is None and not inside_backward()  # a batch, in memory that NumPy writes to
        if (
            latest is not None and latest[0]() is tensor and latest[1] == version and latest[2] is signs
            and not may_be_refilled
        ):  # fmt: skip
            return latest[3]
        found = of.of_tensor(local, signs)
        self._latest = ref(tensor), version, signs, found
        return found

    def use(
        self, held: Held, found: Callable[[Tensor], Products], given: Tensor, output: Tensor, *, width: int,
        is_convolution: bool = False,
    ) -> Use:  # fmt: skip
        """A use whose sum over rows is in float32 at least."""
        result, source = roundoff(output), roundoff(given)
        operand = max(result if result > source else 0.0, of_matrices(given, is_convolution=is_convolution))
        exact = FLOAT32 if max(result, source, roundoff(held.local)) >= FLOAT32 else result
        return Use(
            path=held.path, leaf=held.leaf, products=found, result=max(result, roundoff(held.local)), operand=operand,
            sums=exact, width=width, smallest=smallest(output, held.local), size=held.local.numel(),
            is_own=held.divided,
        )  # fmt: skip

    def own_sums(self, held: Held, found: Callable[[Tensor], Products], output: Tensor) -> Use:
        """A use whose sum over rows is in the dtype of the parameter."""
        own = max(roundoff(held.local), roundoff(output))  # autocast converts parameters, too
        return Use(
            path=held.path, leaf=held.leaf, products=found, result=own, operand=0.0, sums=own,
            width=sum(held.extent.shape), smallest=smallest(held.local), size=held.local.numel(), is_own=held.divided,
        )  # fmt: skip


def _shape_of(module: Any) -> tuple[int, ...]:
    """Shape of the weight of a normalization."""
    found = getattr(module, "normalized_shape", None)
    if found is not None:
        return tuple(found)
    return (getattr(module, "num_features", None) or module.num_channels,)


def _given_second(function: Callable[[Tensor, Tensor], Products], signs: Tensor, gradient: Tensor) -> Products:
    return function(_local(gradient), signs)


def _local(tensor: Any) -> Tensor:
    """The local elements of a tensor."""
    if not is_distributed(tensor):
        found: Tensor = tensor.detach()
        return found
    if any(placement.is_partial() for placement in tensor.placements):
        raise NotWitnessedError("ranks hold terms of the gradient of its layer's output")
    with torch.no_grad():
        local: Tensor = tensor.to_local()
    return local


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter)


def _is_divided(tensor: Any) -> bool:
    """True if ranks have different parts of a tensor; of a tensor whose terms they have, the gradients are copies."""
    return any(placement.is_shard() for placement in tensor.placements)


def _in_order(
    forward: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[Any, ...]:
    """The arguments of a call in the order of its signature, those that were given by name included."""
    if not named:
        return args
    bound = signature(forward).bind(module, *args, **named)
    bound.apply_defaults()
    return bound.args[1:]


def own_term(term: int, num_terms: int) -> int:
    """Number of the term of a rank that has its own among ranks which work on the same samples."""
    return term + num_terms * (1 + distributed.get_rank())


_KINDS: Mapping[Any, Callable[..., Iterator[Use]]] = {
    nn.Linear.forward: Layers.linear,
    **dict.fromkeys(
        (
            nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward, nn.ConvTranspose1d.forward,
            nn.ConvTranspose2d.forward, nn.ConvTranspose3d.forward,
        ),
        Layers.convolution,
    ),
    nn.Embedding.forward: Layers.embedding,
    nn.EmbeddingBag.forward: Layers.embedding_bag,
    **dict.fromkeys(
        (
            nn.LayerNorm.forward, RMSNorm.forward, nn.GroupNorm.forward, AnyBatchNorm.forward, AnyInstanceNorm.forward,
        ),
        Layers.norm,
    ),
}  # fmt: skip
"""Methods of `Layers` by the forward function of a class: a subclass that overrides it is another layer."""


def is_known(module: nn.Module) -> bool:
    """True if calls of the module can be witnessed."""
    return type(module).forward in _KINDS
