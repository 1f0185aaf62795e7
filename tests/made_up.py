"""Recordings of made-up runs, from NumPy arrays: no training and no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traindiff.analyse.compare import Comparison
from traindiff.core.kernels.reference import summarize_array
from traindiff.core.observation import Observation
from traindiff.core.shards import Shard
from traindiff.core.site import PHASES
from traindiff.core.summary import empty
from traindiff.storage import RecordingWriter

Array = NDArray[Any]
Compared = Callable[..., Comparison]
"""The fixture `compared`."""

Measured = Callable[..., Comparison]
"""The fixture `measured`."""


@dataclass(slots=True, kw_only=True)
class Seen:
    """One observation to be written: its tensor, and what is special about it."""

    values: Array
    about: dict[str, Any] = field(default_factory=dict)


Site = tuple[str, str, str, str]
"""Phase, stage, path, slot."""

Step = dict[Site, Seen]
Edit = Callable[[int, Step], None]


def random(*shape: int, seed: int, dtype: str = "float32") -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def summary_of(values: Array, shard: Shard | None = None) -> Any:
    flat = np.ascontiguousarray(values).reshape(-1)
    fractions = values.dtype.kind == "f"
    return summarize_array(
        flat,
        flat.view(f"u{values.dtype.itemsize}"),
        shard or Shard.whole(values.shape),
        tiny=float(np.finfo(values.dtype).smallest_normal) if fractions else 0.0,
    )


def observed(site: Site, seen: Seen, *, step: int, order: int) -> tuple[Observation, Any]:
    phase, stage, path, slot = site
    about = {
        "micro_step": 0, "optimizer": "optimizer", "call": 0, "dtype": seen.values.dtype.name,
        "shard": Shard.whole(seen.values.shape), **seen.about,
    }  # fmt: skip
    about = {"order": order, **about}
    observation = Observation(step=step, phase=phase, stage=stage, path=path, slot=slot, **about)
    return observation, empty() if observation.unobserved else summary_of(seen.values, observation.shard)


PARAMETERS = {"fc.weight": (8, 6), "fc.bias": (8,), "head.weight": (4, 8)}
GROUPS = [["fc.weight", "head.weight"], ["fc.bias"]]


def plain_step(step: int) -> Step:
    """One step of a run of two layers, in execution order; every run has the same numbers.

    There is no loss, so that an edited activation is not taken for another representation of the same thing.
    """
    seed = 1000 * step

    def tensor(number: int, *shape: int) -> Seen:
        return Seen(values=random(*shape, seed=seed + number))

    found: Step = {}
    if step == 0:
        for number, (path, shape) in enumerate(PARAMETERS.items()):
            found["param", "before", path, "value"] = Seen(values=random(*shape, seed=7 + number))
    found["batch", "", "", "input[0]"] = tensor(1, 5, 6)
    found["batch", "before", "rng", "cpu"] = Seen(values=np.full(4, step, dtype=np.uint8))
    found["forward", "", "fc", "output[0]"] = tensor(2, 5, 8)
    found["forward", "", "head", "output[0]"] = tensor(3, 5, 4)
    found["batch", "after", "rng", "cpu"] = Seen(values=np.full(4, step, dtype=np.uint8))
    found["backward", "", "head", "output[0]"] = tensor(4, 5, 4)
    found["backward", "", "fc", "output[0]"] = tensor(5, 5, 8)
    for number, group in enumerate(GROUPS):
        for slot, value in (("lr", 0.1), ("weight_decay", 0.01 * (1 - number))):
            found["optimizer", "", f"optimizer.groups[{number}]", slot] = Seen(values=np.array(value))
        for path in group:
            found["grad", "", path, "grad"] = tensor(10 + list(PARAMETERS).index(path), *PARAMETERS[path])
    for number, (path, shape) in enumerate(PARAMETERS.items()):
        found["optimizer", "", path, "momentum_buffer"] = tensor(20 + number, *shape)
        found["param", "", path, "value"] = Seen(
            values=random(*shape, seed=7 + number) * np.float32(1 - 0.01 * (step + 1))
        )
    return found


CONTENT: dict[str, Any] = {
    "model": "Sample",
    "modules": {"": "Sample", "fc": "Linear", "head": "Linear"},
    "parameters": {path: {"shape": list(shape), "dtype": "float32"} for path, shape in PARAMETERS.items()},
    "optimizers": [{"name": "optimizer", "type": "SGD", "groups": GROUPS}],
}


def record(
    path: Path,
    edit: Edit = lambda step, sites: None,
    *,
    steps: int | range = 3,
    content: Mapping[str, Any] = CONTENT,
    close: bool = True,
    run: Mapping[str, Any] | None = None,
    recorded: Mapping[str, Any] | None = None,
    build: Callable[[int], Step] = plain_step,
    rank: int = 0,
) -> Path:
    """Write what one rank records; `edit` changes the sites of each step before it is written."""
    settings = {"observe": list(PHASES), "ranks": None, "steps": None, "every": 1, "evaluation": False}
    about = {"world_size": 1, "mesh": None, "settings": {**settings, **(recorded or {})}}
    about = {**about, **(run or {}), "environment": {"machine": "made up", **(run or {}).get("environment", {})}}
    writer = RecordingWriter(str(path), run=about, rank=rank, world_size=about["world_size"])
    writer.write_rank(content)
    for step in range(steps) if isinstance(steps, int) else steps:
        sites = build(step)
        edit(step, sites)
        pairs = [observed(site, seen, step=step, order=order) for order, (site, seen) in enumerate(sites.items())]
        if pairs:
            writer.write_step([one for one, _ in pairs], np.array([summary for _, summary in pairs]))
    if close:
        writer.close()
    return path


def at(site: Site, change: Callable[[Array], Array], *, step: int | None = None) -> Edit:
    """An edit of one tensor, in one step or in all of them."""

    def edit(number: int, sites: Step) -> None:
        if step in (None, number):
            sites[site].values = np.asarray(change(sites[site].values.copy()))

    return edit


FC = ("forward", "", "fc", "output[0]")
HEAD = ("forward", "", "head", "output[0]")
BATCH = ("batch", "", "", "input[0]")


def scaled(site: tuple[str, str, str, str], size: float, *, step: int | None = None) -> Edit:
    """A tensor that is further from the baseline's by `size` of its norm."""
    return at(site, lambda x: (x * (1 + size)).astype(x.dtype), step=step)


def rotated(site: tuple[str, str, str, str], size: float) -> Edit:
    """A tensor that is further from the baseline's by `size` of its norm, and no multiple of it."""

    def change(x: Any) -> Any:
        noise = random(*x.shape, seed=3)
        return (x + size * np.linalg.norm(x) / np.linalg.norm(noise) * noise).astype(x.dtype)

    return at(site, change)


def both(*edits: Edit) -> Edit:
    def edit(step: int, sites: Step) -> None:
        for one in edits:
            one(step, sites)

    return edit


def same(step: int, sites: Step) -> None:
    pass
