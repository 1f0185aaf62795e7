"""Which sites of two runs are one, as a map says: renamed, fused, rearranged and padded tensors.

A fused tensor and its parts have elements in other places, so their sketches and fingerprints have nothing in common.
What does not depend on places adds up: counts, sums, norms, extremes, and the multiset of the bits. So the parts are
merged to one site that is not `placed`, and the whole is held against it. Updates are derived before, part by part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod, sqrt
from typing import Literal

from traindiff.analyse.align.module_names import module_names
from traindiff.analyse.findings import more_text
from traindiff.analyse.merge.renames import Renaming
from traindiff.analyse.merge.site import Bits, MergedSite, SiteKey
from traindiff.core.maps.entries import Entry
from traindiff.core.observation import BEFORE
from traindiff.core.site import printable
from traindiff.core.summary import merge
from traindiff.storage import Run

Hidden = Literal["unplaced", "padded"]
"""What is not known of a site: the places of its elements, or which rows are a padding."""

_STAGES = frozenset({"", BEFORE, "micro", "reduced", "unscaled"})
"""Stages of tensors; sites of other stages belong to a single run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideNames:
    """The names of one run's sites, and how they become the common ones.

    Attributes:
        parts: Common name of each path that is a part of one path of the other run.
        hidden: What is not known of a site, by common name.
        rows: Number of rows that both runs have of a padded parameter, by common name.
    """

    parts: Mapping[str, str] = field(default_factory=dict)
    hidden: Mapping[str, Hidden] = field(default_factory=dict)
    rows: Mapping[str, int] = field(default_factory=dict)

    def common(self, path: str) -> str:
        """The name of the site that a path belongs to. Paths of the candidate are renamed already."""
        return self.parts.get(path, path)

    def joined(self, table: Mapping[SiteKey, MergedSite], *, activations: bool = True) -> dict[SiteKey, MergedSite]:
        """The sites of a step under their common names, with parts merged.

        Args:
            table: The sites.
            activations: Whether activations of joined modules are kept, and their gradients. Their sums move with the
                parameters, and how far those are apart is known in part only.
        """
        if not self.parts and not self.hidden:
            return dict(table)
        grouped: dict[SiteKey, list[MergedSite]] = {}
        result: dict[SiteKey, MergedSite] = {}
        for key, entry in table.items():
            common = self.parts.get(key.path, key.path)
            if (common == key.path and common not in self.hidden) or key.stage not in _STAGES:
                result[key] = entry
                continue
            new = key._replace(path=common)
            grouped.setdefault(new, []).append(entry)
            result[new] = entry  # in the place of the last part
        sizes: dict[str, int] = {}
        for common in self.parts.values():
            sizes[common] = sizes.get(common, 0) + 1
        for key, entries in grouped.items():
            if not activations and key.phase in ("forward", "backward"):
                one = None
            elif self.hidden.get(key.path) == "padded":
                one = _without_padding(key, entries[0], self.rows.get(key.path))
            else:
                one = _site(key, entries, of=sizes.get(key.path, 1))
            if one is None:
                del result[key]
            else:
                result[key] = one
        return result


class SiteMap:
    """Which sites of two runs are one.

    Args:
        entries: Of a map; without any, all names are what they are.
        runs: The two runs.

    Attributes:
        sides: The names of each run.
        rename: Turns the candidate's paths into the baseline's, except for parts of fused tensors.
        is_unplaced: Whether some tensors are compared by what does not depend on the places of their elements.
        notes: Entries that name nothing.
    """

    def __init__(self, entries: Sequence[Entry], runs: tuple[Run, Run], rename: Renaming) -> None:
        self.notes: list[str] = []
        held = [_parameters(run) if entries else {} for run in runs]
        own: dict[str, str] = {}
        parts: tuple[dict[str, str], dict[str, str]] = {}, {}
        hidden: dict[str, Hidden] = {}
        rows: dict[str, int] = {}
        pairs: list[tuple[list[str], list[str], Entry]] = []
        named: list[tuple[str, str]] = []
        classes = [_classes(run) if entries else {} for run in runs]
        for number, entry in enumerate(entries):
            names = [one.keys() for one in (classes if entry.is_module else held)]
            found = list(entry.expanded(*names))
            if entry.is_module:
                named += [(here[0], there[0]) for here, there in found]
            else:
                pairs += [(here, there, entry) for here, there in found]
            if not found and not entry.is_optional:
                shown = printable(entry.baseline[0])
                self.notes.append(f"Warning: entry {number + 1} of the map ({shown}) names what is not there.")
        for here, there, entry in pairs:
            hides = _hides(entry, [held[0][name] for name in here], [held[1][name] for name in there])
            if hides == "padded":
                rows[here[0]] = min(held[0][here[0]][0], held[1][there[0]][0])
            _file(own, parts, hidden, here, there, hides)
        looked_up = {path for path, name in classes[0].items() if "Embedding" in name}
        for here, there, moved in module_names(pairs, named, [one.keys() for one in classes], hidden):
            # A padded table returns the rows of tokens, which are all there.
            hides = None if moved == "padded" and here[0] in looked_up else moved
            _file(own, parts, hidden, here, there, hides)
        self.sides = (
            SideNames(parts=parts[0], hidden=hidden, rows=rows),
            SideNames(parts=parts[1], hidden=hidden, rows=rows),
        )
        self.rename = _Mapped(own, rename) if entries else rename
        self._fused = sorted({*parts[0].values(), *parts[1].values(), *hidden})

    def joins(self, path: str) -> bool:
        """True if the elements of the site at this common name are in other places in the two runs."""
        return path in self.sides[0].hidden

    @property
    def is_unplaced(self) -> bool:
        """True if tensors are compared by what does not depend on the places of their elements."""
        return bool(self._fused)

    def note(self) -> str:
        """A sentence about what was compared in part; empty if there is none."""
        if not self._fused:
            return ""
        several = len(self._fused) > 1
        return (
            f"{self._fused[0]}{more_text(len(self._fused) - 1, 'site')} {'are' if several else 'is'} fused or laid out "
            "otherwise in one run, so only what does not depend on the places of elements was compared there: counts, "
            "sums, norms, and the bits in any order; of updates, only whether their sizes are within a factor of 2."
        )


class _Mapped(Renaming):
    """Names of a map, and rules for the others.

    Args:
        names: The baseline's path of some of the candidate's.
        rules: For all other paths.
    """

    def __init__(self, names: Mapping[str, str], rules: Renaming) -> None:
        super().__init__()
        self._names = names
        self._others = rules

    def __call__(self, path: str) -> str:
        """The path under the baseline's name."""
        found = self._names.get(path)
        return self._others(path) if found is None else found

    @property
    def has_rules(self) -> bool:
        """True if it may change a path."""
        return bool(self._names) or self._others.has_rules

    @property
    def unused(self) -> tuple[str, ...]:
        """Rules that matched nothing so far, as the user wrote them."""
        return self._others.unused


def _classes(run: Run) -> dict[str, str]:
    return {path: name for one in map(run.rank_content, run.ranks) for path, name in one.get("modules", {}).items()}


def _parameters(run: Run) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters and buffers of a run, by path, with further names of tied ones."""
    found: dict[str, tuple[int, ...]] = {}
    for content in map(run.rank_content, run.ranks):
        for part in ("parameters", "buffers"):
            found.update((path, tuple(about.get("shape", ()))) for path, about in content.get(part, {}).items())
        tied = content.get("tied", {}).items()
        found.update((other, found[path]) for other, path in tied if path in found)
    return found


def _hides(entry: Entry, here: Sequence[tuple[int, ...]], there: Sequence[tuple[int, ...]]) -> Hidden | None:
    """What an entry leaves unknown of a parameter; None if nothing."""
    if not entry.layout.is_plain or len(here) + len(there) > 2:
        return "unplaced"
    (baseline,), (candidate,) = here, there
    longer = len(baseline) == len(candidate) > 0 and baseline[1:] == candidate[1:] and baseline[0] != candidate[0]
    return "padded" if longer else None


def _file(
    own: dict[str, str],
    parts: tuple[dict[str, str], dict[str, str]],
    hidden: dict[str, Hidden],
    here: Sequence[str],
    there: Sequence[str],
    hides: Hidden | None,
) -> None:
    """Note the names of one site of both runs, and what is not known of it."""
    common = here[0] if len(here) == 1 else _together(here)
    if len(there) == 1:
        own[there[0]] = common
    else:
        parts[1].update(dict.fromkeys(there, common))
    if len(here) > 1:
        parts[0].update(dict.fromkeys(here, common))
    if hides is not None:
        hidden[common] = hides


def _together(names: Sequence[str]) -> str:
    """One name for several that differ in one place: `layers.0.{q,k,v}.weight`."""
    split = [name.split(".") for name in names]
    if len({len(one) for one in split}) == 1:
        places = [place for place, words in enumerate(zip(*split, strict=True)) if len({*words}) > 1]
        if len(places) == 1:
            words = list(split[0])
            words[places[0]] = f"{{{','.join(one[places[0]] for one in split)}}}"
            return ".".join(words)
    return " + ".join(names)


def _without_padding(key: SiteKey, entry: MergedSite, rows: int | None) -> MergedSite | None:
    """A padded parameter without its padding, if that is zero: it adds nothing to sums, sketches and fingerprints.

    What a padded layer returns has its rows in other places, so it is not compared: None.
    """
    if key.phase in ("forward", "backward"):
        return None
    if entry.unobserved or rows is None or not entry.shape or entry.shape[0] <= rows:
        return replace(entry, key=key)
    shape = (rows, *entry.shape[1:])
    summary = entry.summary.copy()
    padding = int(summary["count"]) - prod(shape)
    summary["count"] -= padding
    summary["zero"] = max(0, int(summary["zero"]) - padding)
    return replace(entry, key=key, shape=shape, summary=summary, parts=())


def _site(key: SiteKey, entries: Sequence[MergedSite], *, of: int) -> MergedSite | None:
    """The site that some parts make up; None if it cannot be compared.

    Args:
        key: Its common key.
        entries: Its parts in this step.
        of: Number of parts that it has in this run.
    """
    first, last = entries[0], max(entries, key=lambda entry: entry.order)
    unknown = next((entry.unobserved for entry in entries if entry.unobserved), "")
    activation = key.phase in ("forward", "backward")
    if activation and len(entries) != of:
        return None  # what only some of the modules return
    if unknown:
        return replace(last, key=key, unobserved=unknown, parts=())
    if not first.shape and len(entries) > 1:  # counts of steps: the one that is behind
        return replace(min(entries, key=lambda entry: float(entry.summary["sum"])), key=key, order=last.order)
    if len(entries) != of:
        return replace(last, key=key, unobserved=f"only {len(entries)} of its {of} parts were seen", parts=())
    summary = merge([entry.summary for entry in entries]) if len(entries) > 1 else first.summary.copy()
    summary["sketch"] = 0.0
    if not all(entry.exact for entry in entries):  # norms that are estimated; see `has_estimated_norm`
        summary["sketch"][0] = sqrt(max(0.0, float(summary["sum_of_squares"])))
    bits: tuple[Bits, ...] = ()
    if all(entry.exact for entry in entries) and len({(entry.dtype, entry.factor) for entry in entries}) == 1:
        bits = (Bits(key.path, first.dtype, (), first.factor, int(summary["multiset"])),)
    return replace(
        last, key=key, summary=summary, shape=(int(summary["count"]),), exact=False, parts=(), apart=(), batched=False,
        summed=False, placed=False, origin=bits, spread=max(entry.spread for entry in entries),
    )  # fmt: skip
