"""Which layers can be witnessed, and which uses of parameters one call of a layer makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn

from traindiff.core.shards import Region
from traindiff.core.site import canonical_path
from traindiff.core.torch_compat.training import AnyBatchNorm, AnyInstanceNorm
from traindiff.observe.torch.session.targets import Targets
from traindiff.observe.torch.sharding.distributed_tensor import is_distributed, region_of
from traindiff.observe.torch.witness import products as of
from traindiff.observe.torch.witness.errors import NotWitnessedError
from traindiff.observe.torch.witness.given import probed
from traindiff.observe.torch.witness.normalized import Normalized, RMSNorm, is_batched
from traindiff.observe.torch.witness.probes import Extent, Probes
from traindiff.observe.torch.witness.products import Products
from traindiff.observe.torch.witness.use import FLOAT32, Held, Use, of_matrices, roundoff, smallest


@dataclass(slots=True)
class Layers:
    """Finds the uses of parameters in calls of modules.

    Args:
        targets: The parameters.
        probes: Their signs.
    """

    targets: Targets
    probes: Probes
    _flat: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self._flat = {member.path: one.tensor for one in self.targets.layout.flat for member in one.members}

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
        given = (*args, *named.values())
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
        own = getattr(owner, name, None)
        if not isinstance(own, Tensor) or not own.requires_grad:
            return None
        tensor: Tensor = own
        found = self.targets.names.get(id(tensor)) or self.targets.first_name(
            canonical_path(f"{path}.{name}".strip("."))
        )
        return self.held_tensor(found, tensor, *others)

    def held_tensor(self, found: str, tensor: Tensor, *others: Tensor) -> Held | None:
        """The same for the tensor of a parameter.

        Args:
            found: Canonical path of the parameter.
            tensor: The tensor that operations use.
            others: Inputs and outputs of the operation.
        """
        if found not in self.targets.paths or not self.targets.selects(found):
            return None
        leaf = id(self._flat.get(found, tensor))
        layout = self.targets.layout
        whole = Region.whole(tuple(tensor.shape))
        divided = any(is_distributed(one) and _is_divided(one) for one in others)
        if is_distributed(tensor):
            region: Region = region_of(tensor)
            divided = divided or not region.is_whole
            tensor = _local(tensor)
        else:
            known = layout.region_of_parameter(tensor, path=found, phase="param")
            region, divided = known or whole, divided or known is not None
            if known is None and layout.data.alike > layout.data.parts:
                raise NotWitnessedError("ranks divide the model, and which part of the sum this rank has is not known")
        extent = Extent.of(region)
        if extent is None or region.term is not None:
            raise NotWitnessedError("ranks divide it along an axis behind the second")
        return Held(path=found, leaf=leaf, local=tensor.detach(), extent=extent, divided=divided)

    def linear(self, path: str, module: nn.Module, given: tuple[Any, ...], output: Tensor) -> Iterator[Use]:
        """Uses in a call of a linear layer."""
        weight, bias = self.held(path, module, "weight", given[0], output), self.held(path, module, "bias", output)
        yield from self.product(given[0], weight, bias, output)

    def product(self, given: Tensor, weight: Held | None, bias: Held | None, output: Tensor) -> Iterator[Use]:
        """Uses in a product with a transposed weight, and of a bias that is added."""
        if weight is not None:
            x = _local(given)
            b = self.probes.columns(weight.path, weight.extent, x)
            if x.shape[-1] != b.shape[0]:
                raise NotWitnessedError("its layer was given another part of its input than the weight is of")
            p = of.projected(x, b)
            yield self.use(weight, partial(self._rows, weight, p), given, output, width=sum(weight.extent.shape))
        if bias is not None:
            yield self.use(bias, partial(self._sums, bias), output, output, width=bias.extent.shape[0])

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
            yield self.use(weight, found, x, output, width=sum(weight.extent.shape), is_convolution=True)
        if bias is not None:
            yield self.use(
                bias, partial(self._sums, bias, channels=-1 - dims), output, output, width=bias.extent.shape[0]
            )

    def embedding(self, path: str, module: Any, given: tuple[Any, ...], output: Tensor) -> Iterator[Use]:
        """Uses in a call of an embedding."""
        weight = self.held(path, module, "weight", output)
        if weight is None:
            return
        if weight.divided:
            raise NotWitnessedError("ranks divide an embedding")
        rows = self.probes.rows(weight.path, weight.extent, weight.local)
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
        if module.mode == "max":
            raise NotWitnessedError("an EmbeddingBag with mode max is not linear in it")
        tokens, offsets, weights = (*given, None, None)[:3]
        rows = self.probes.rows(weight.path, weight.extent, weight.local)
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

    def _rows(self, weight: Held, p: Tensor, gradient: Tensor) -> Products:
        g = _local(gradient)
        a = self.probes.rows(weight.path, weight.extent, g)
        if g.shape[-1] != a.shape[0] or g[..., 0].numel() != p.shape[0]:
            raise NotWitnessedError("the gradient of its layer's output is another part than the weight is of")
        return of.of_rows(of.projected(g, a), p)

    def _sums(self, bias: Held, gradient: Tensor, *, channels: int = -1) -> Products:
        g = _local(gradient).movedim(channels, -1)
        a = self.probes.rows(bias.path, bias.extent, g)
        if g.shape[-1] != a.shape[0]:
            raise NotWitnessedError("the gradient of its layer's output is another part than the bias is of")
        return of.of_sums(g, a * self.probes.columns(bias.path, bias.extent, g))

    def _scaled(self, held: Held, axis: int | None, normalized: Normalized | None, gradient: Tensor) -> Products:
        g = _local(gradient)
        x = None if normalized is None else normalized()
        if x is not None and x.shape != g.shape:
            raise NotWitnessedError("the gradient of its layer's output is another part than its input is of")
        total, squares, rows = of.scaled(x, g, held.local, axis=axis)
        a = self.probes.rows(held.path, held.extent, g)
        b = self.probes.columns(held.path, held.extent, g)
        return Products(
            sums=probed(total.reshape(held.extent.shape), a.double(), b.double()), squares=squares, rows=rows
        )

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


def _is_divided(tensor: Any) -> bool:
    """True if ranks have different parts of a tensor; of a tensor whose terms they have, the gradients are copies."""
    return any(placement.is_shard() for placement in tensor.placements)


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
