"""Axes of device meshes: which ranks divide something among them, and which of them this one is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh

from traindiff.engines.distributed_tensor import is_distributed, mesh_of
from traindiff.taps._torch_compat import data_mesh_of, is_fully_sharded, root_mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAxis:
    """Ranks along one axis of a mesh.

    Attributes:
        ranks: Their numbers in the whole training.
        index: Which of them this one is.
    """

    ranks: tuple[int, ...]
    index: int

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.ranks)


def axis_of(given: Any, model: nn.Module) -> MeshAxis | str:
    """The axis that the user means, or what is wrong with it.

    Args:
        given: Name of an axis of the model's mesh, a DeviceMesh with one axis, or a process group.
        model: Its parameters may know the mesh.
    """
    if isinstance(given, str):
        return _named(given, model)
    if isinstance(given, distributed.ProcessGroup):
        return MeshAxis(ranks=tuple(distributed.get_process_group_ranks(given)), index=distributed.get_rank(given))
    if not isinstance(given, DeviceMesh):
        return f"has the axis {given!r}, which is no name, no DeviceMesh and no process group."
    if given.ndim != 1:
        return f"has as its axis a DeviceMesh with {given.ndim} axes."
    return MeshAxis(ranks=tuple(given.mesh.flatten().tolist()), index=given.get_local_rank())


def _named(name: str, model: nn.Module) -> MeshAxis | str:
    known: dict[str, None] = {}
    for mesh in _meshes(model):
        names = mesh.mesh_dim_names or ()
        if name in names:
            found: MeshAxis | str = axis_of(mesh if mesh.ndim == 1 else mesh[name], model)
            return found
        known |= dict.fromkeys(names)
    if not known:
        return f'has the axis "{name}", but no parameter of the model knows a DeviceMesh.'
    return f'has the axis "{name}", which the model\'s DeviceMesh does not have. Known: {", ".join(known)}.'


def _meshes(model: nn.Module) -> Iterator[Any]:
    """The meshes of the model's parameters, and what these are parts of; each once."""
    seen: dict[int, Any] = {}
    for mesh in _direct(model):
        for one in (mesh, root_mesh(mesh)):
            if id(one) not in seen:
                seen[id(one)] = one
                yield one


def _direct(model: nn.Module) -> Iterable[Any]:
    yield from (mesh_of(parameter) for parameter in model.parameters() if is_distributed(parameter))
    for module in model.modules():
        if is_fully_sharded(module) and (mesh := data_mesh_of(module)) is not None:
            yield mesh
