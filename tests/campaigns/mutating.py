"""Which seeds there are, and how one number becomes one mutant."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from tests.campaigns import (
    arrow_mutators,
    json_mutators,
    place_mutators,
    seal_mutators,
    seeds,
    tensor_mutators,
    text_mutators,
)
from tests.campaigns.byte_mutators import mangled
from tests.campaigns.drafts import Draft, Tree
from tests.campaigns.seeds import Files

Kind = str
"""`recording`, or another kind of input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seed:
    """What mutants are made of.

    Attributes:
        name: Of it.
        kind: Which readers read it: `recording`, `msprobe`, `onnxruntime`, `configuration` or `saved`.
        files: Its content.
    """

    name: str
    kind: Kind
    files: Files


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One mutant.

    Attributes:
        seed: What it was made of.
        mutator: How: names joined by `+`.
        tree: What it is on disk.
    """

    seed: Seed
    mutator: str
    tree: Tree


def all_seeds() -> list[Seed]:
    """Every seed but those that need torch."""
    found = [Seed(name=name, kind="recording", files=seeds.recording(name)) for name in seeds.RECORDINGS]
    found.append(Seed(name="msprobe", kind="msprobe", files=seeds.msprobe()))
    found.append(Seed(name="onnxruntime", kind="onnxruntime", files=seeds.onnxruntime()))
    found.append(Seed(name="configuration", kind="configuration", files=seeds.configuration()))
    return found


def saved_seeds() -> list[Seed]:
    """What watches save; they need torch."""
    return [Seed(name=name, kind="saved", files=files) for name, files in seeds.saved_calls().items()]


def _bytes(draft: Draft, rng: Random) -> None:
    """Bytes of a file, whose checksum no longer fits."""
    tree = {path: content for path, content in draft.tree().items() if isinstance(content, bytes)}
    path = rng.choice(sorted(tree))
    draft.files = {**tree, path: mangled(tree[path], rng, list(tree.values()))}
    draft.manifests.clear()
    draft.streams.clear()


def _json(draft: Draft, rng: Random) -> None:
    path = rng.choice(sorted(draft.manifests))
    draft.manifests[path] = json_mutators.mutated(draft.manifests[path], rng)


def _json_bytes(draft: Draft, rng: Random) -> None:
    """Bytes of a JSON text, whose checksum is computed anew where it still is JSON."""
    path = rng.choice(sorted(draft.manifests))
    text = draft.manifests[path].encode("utf-8", "surrogatepass")
    draft.manifests[path] = mangled(text, rng).decode("utf-8", "surrogateescape")


def _stream(name: str) -> Callable[[Draft, Random], None]:
    def change(draft: Draft, rng: Random) -> None:
        arrow_mutators.mutate(draft.streams[rng.choice(sorted(draft.streams))], name, rng)

    return change


def _seals(draft: Draft, rng: Random) -> None:
    seal_mutators.mutate(draft.streams[rng.choice(sorted(draft.streams))], rng)


def _file(ending: str, change: Callable[[bytes, Random], bytes]) -> Callable[[Draft, Random], None]:
    def mutate(draft: Draft, rng: Random) -> None:
        names = sorted(name for name in draft.files if name.endswith(ending))
        name = rng.choice(names) if names else None
        if name is None:
            raise ValueError("no such file")
        draft.files[name] = change(draft.files[name], rng)

    return mutate


_NAMED = re.compile(r"(?P<folder>rank-\d+)/(?P<start>tensors/.*)\.[0-9a-f]{8}\.safetensors")


def _tensors(draft: Draft, rng: Random) -> None:
    """A file of tensors, under the name that its checksum gives it as a rule."""
    names = sorted(name for name in draft.files if name.endswith(".safetensors"))
    name = rng.choice(names)
    content = tensor_mutators.mutated_safetensors(draft.files[name], rng)
    match = _NAMED.fullmatch(name)
    if match and rng.random() < 0.85:
        del draft.files[name]
        folder, old = match["folder"], name.removeprefix(match["folder"] + "/")
        new = f"{match['start']}.{zlib.crc32(content):08x}.safetensors"
        if folder in draft.streams:
            arrow_mutators.rename_file(draft.streams[folder], old, new)
        name = f"{folder}/{new}"
    draft.files[name] = content


def _json_text(data: bytes, rng: Random) -> bytes:
    try:
        return json_mutators.mutated(data.decode(), rng).encode("utf-8", "surrogatepass")
    except ValueError:
        return mangled(data, rng)


Mutator = Callable[[Draft, Random], None]

MUTATORS: Mapping[Kind, Mapping[str, tuple[float, Mutator]]] = {
    "recording": {
        "bytes": (6, _bytes),
        "json": (14, _json),
        "json bytes": (3, _json_bytes),
        "seals": (7, _seals),
        **{f"arrow {name}": (weight, _stream(name)) for name, (weight, _) in arrow_mutators.ARROW.items()},
        "tensors": (8, _tensors),
    },
    "msprobe": {
        "bytes": (2, _bytes),
        "npy": (8, _file(".npy", tensor_mutators.mutated_npy)),
        "csv": (12, _file(".csv", text_mutators.mutated_text)),
    },
    "onnxruntime": {"bytes": (2, _bytes), "text": (12, _file("", text_mutators.mutated_text))},
    "configuration": {"bytes": (2, _bytes), "text": (6, _file("", text_mutators.mutated_text))},
    "saved": {
        "bytes": (2, _bytes),
        "json": (16, _file(".json", _json_text)),
        "tensors": (6, _file(".safetensors", tensor_mutators.mutated_safetensors)),
    },
}
"""Weight and mutator by name, for each kind of seed."""

PLACES = "places"
"""Name of the mutator of what is no regular file, which any kind has."""

_SHARE_OF_PLACES = 0.06


def mutant(seed: Seed, rng: Random) -> Mutant:
    """Make a mutant: one change as a rule, sometimes several."""
    draft = Draft.of(seed.files)
    names: list[str] = []
    places = (
        rng.random() < _SHARE_OF_PLACES and seed.kind != "configuration"
    )  # which the user names, links and pipes too
    known = MUTATORS[seed.kind]
    weights = [weight for weight, _ in known.values()]
    while not names or (rng.random() < 0.2 and len(names) < 3):
        if places and not names:
            names.append(PLACES)
            continue
        name = rng.choices(list(known), weights)[0]
        try:
            known[name][1](draft, rng)
        except (ValueError, IndexError, KeyError, RecursionError):  # nothing of the kind is in it any more
            if len(names) > 2:
                break
            continue
        names.append(name)
    tree = draft.tree()
    if places:
        place_mutators.mutate(tree, rng)
    return Mutant(seed=seed, mutator="+".join(names), tree=tree)
