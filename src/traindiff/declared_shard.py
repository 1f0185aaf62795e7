"""`traindiff.shard`: what the user says of plain tensors that hold only a part of a global one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from traindiff.errors import Problem

_FIX = 'Write shards=[traindiff.shard("*.attention.core", dim=1, axis="tp"), ...].'


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredShard:
    """How some tensors are divided along one axis of a device mesh; see `shard`."""

    pattern: str
    dim: int | None
    axis: Any
    blocks: int = 1
    partial: bool = False

    @property
    def axis_name(self) -> str:
        """The axis as people read it."""
        if isinstance(self.axis, str):
            return self.axis
        names = getattr(self.axis, "mesh_dim_names", None)
        return str(names[0]) if names else type(self.axis).__name__

    def __str__(self) -> str:
        dim = "partial=True" if self.partial else f"dim={self.dim}"
        return f'shard("{self.pattern}", {dim}, axis="{self.axis_name}")'


def shard(pattern: str, *, dim: int | None = None, axis: Any, blocks: int = 1, partial: bool = False) -> DeclaredShard:
    """Say which part of a global tensor each rank holds of plain tensors, for `record(shards=...)`.

    ```python
    traindiff.record(path, model, optimizer, shards=[
        traindiff.shard("*.qkv", dim=-1, axis=tp, blocks=3),          # its output, and the gradient of it
        traindiff.shard("*.qkv.weight", dim=0, axis=tp, blocks=3),    # value, gradient, optimizer state
        traindiff.shard("*.proj", partial=True, axis=tp),             # a term of a sum, before the all-reduce
    ])
    ```

    Of several declarations for one axis and one tensor, the first holds. Declarations for several axes are
    carried out one after the other. Parts are taken as equally long on all ranks.

    Args:
        pattern: Glob over canonical paths of modules (`"(root)"` for the model, and its inputs), or over a path and a
            slot (`"attention output[1]"`). One that matches no module is of parameters.
        dim: Which dim is divided; None where each rank has all of the tensor.
        axis: Over which ranks: the name of an axis of the model's DeviceMesh, a DeviceMesh with one axis, or a
            process group.
        blocks: How many equal blocks the dim consists of, each of which is divided by itself: 3 for queries,
            keys and values in one tensor.
        partial: Whether each rank has a term of a sum instead.

    Returns:
        The declaration, for the list that `record(shards=...)` takes. It is checked there.
    """
    return DeclaredShard(pattern=pattern, dim=dim, axis=axis, blocks=blocks, partial=partial)


def checked_shards(value: object, problems: list[Problem]) -> tuple[DeclaredShard, ...]:
    """The declarations that the user listed; appends to `problems` what is wrong with them."""
    if isinstance(value, DeclaredShard):
        value = [value]
    if not isinstance(value, Iterable) or isinstance(value, str):
        what = "must be a list of declarations."
        problems.append(Problem(where=f"record(shards={value!r})", what=what, fix=_FIX))
        return ()
    found = tuple(value)
    for one in found:
        if not isinstance(one, DeclaredShard):
            what = f"has {one!r}, which is no declaration."
            problems.append(Problem(where="record(shards=...)", what=what, fix=_FIX))
        else:
            problems += _problems(one)
    return tuple(one for one in found if isinstance(one, DeclaredShard))


def _problems(one: DeclaredShard) -> list[Problem]:
    where = f"record(shards=...), {one.pattern!r}"
    found = []
    if not isinstance(one.pattern, str) or not one.pattern:
        what = "is no pattern over paths of modules or parameters."
        found.append(Problem(where=where, what=what, fix=_FIX))
    if one.dim is not None and (not isinstance(one.dim, int) or isinstance(one.dim, bool)):
        found.append(
            Problem(
                where=where,
                what=f"has dim={one.dim!r}, which is no dim of a tensor.",
                fix="Write a whole number, e.g. dim=1, or leave it out where each rank has all of the tensor.",
            )
        )
    if one.partial and one.dim is not None:
        what = f"is partial and has dim={one.dim}: a term of a sum has all elements."
        found.append(Problem(where=where, what=what, fix=f"Write either dim={one.dim} or partial=True."))
    if not isinstance(one.blocks, int) or one.blocks < 1:
        what = f"has blocks={one.blocks!r}, which is no number of blocks."
        found.append(
            Problem(
                where=where,
                what=what,
                fix="Write of how many equal blocks the dim consists, e.g. blocks=3, or leave it out.",
            )
        )
    return found
