"""Tensors of two runs that cut the batch differently, and whose rows cannot be brought together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from traindiff.analyse.align.batch_indices import count_within
from traindiff.analyse.align.computed_rows import without_other_rows
from traindiff.analyse.align.other_form import has_other_form
from traindiff.analyse.align.paired_calls import with_paired_calls
from traindiff.analyse.align.regrouped_calls import regrouped
from traindiff.analyse.align.side import Tables
from traindiff.analyse.findings import Finding, more_text
from traindiff.analyse.merge.placed_parts import places_of
from traindiff.analyse.merge.recorded_calls import Samples, samples_of
from traindiff.analyse.merge.site import MergedSite, RankPart, SiteKey, StepTable
from traindiff.core.observation import ITSELF, SAMPLE
from traindiff.core.site import ROOT, label
from traindiff.core.summary import UNIT_ROUNDOFF, merge
from traindiff.storage.places import Place

Cut = Mapping[tuple[int, int], int]
"""Samples by micro-step and term: how a run cuts the batch of a step into micro-batches, and among ranks."""

Sides = tuple[Sequence[MergedSite], Sequence[MergedSite]]

_WITHOUT_ROWS = ("rng", ITSELF)


@dataclass(slots=True)
class Unplaced:
    """Sites of which some rows could not be brought together.

    Attributes:
        classes: Class names of the modules of both runs.
        pooled: Sites whose norms and sums were compared instead.
        left_out: Sites that were not compared.
        axes: Batch axes that would have to be declared, by path.
        latest: The baseline's entries of those sites in the latest step, in execution order.
        calls: Modules that the runs call on other parts of the batch: the most calls in a step.
        scalars: Whether such a module may return a scalar in the latest step.
        computed: Sites that one run computes for all rows, and the other for chosen rows.
        padded: Modules that the runs compute for other rows, such as those of sets that one of them pads.
        unseen: Modules of which what they return was not compared.
        other_form: Whether both runs were given the same samples in the latest step, padded or ordered otherwise.
    """

    classes: Collection[str] = ()
    pooled: dict[str, None] = field(default_factory=dict)
    left_out: dict[str, None] = field(default_factory=dict)
    axes: dict[str, int] = field(default_factory=dict)
    latest: tuple[MergedSite, ...] = ()
    calls: dict[str, int] = field(default_factory=dict)
    scalars: bool = False
    computed: dict[str, None] = field(default_factory=dict)
    padded: dict[str, None] = field(default_factory=dict)
    unseen: dict[str, None] = field(default_factory=dict)
    other_form: bool = False
    _lacking: set[SiteKey] = field(default_factory=set)  # left out in the latest step

    def begin(self) -> None:
        """Note that a step begins; nothing of it is left out so far."""
        self._lacking = set()
        self.latest = ()
        self.scalars = False
        self.other_form = False

    def comparable(self, tables: Tables) -> Tables:
        """The tables without sites whose rows cannot be brought together, or with their norms and sums.

        Nothing changes if both runs cut the batch in the same way: then micro-batches are compared one by one.
        """
        self.begin()
        rows = without_other_rows(with_paired_calls(tables), self.padded)
        self.padded.update(dict.fromkeys(rows.padded))
        chosen = (one for one in rows.without if one.key.path not in rows.padded)
        self.computed.update(dict.fromkeys(label(one.key.path, one.key.slot) for one in chosen))
        calls = regrouped(rows.tables)
        tables, self.scalars = calls.tables, bool(calls.calls)
        self.calls.update(calls.calls)
        cuts = _cut(tables[0]), _cut(tables[1])
        same_cut = cuts[0] == cuts[1] or not all(cuts)
        self.latest = rows.without
        sides = _by_site(tables[0]), _by_site(tables[1])
        # Sites that a map has joined are no sites of exact summaries any more, and need nothing further.
        moved = {key for side in sides for key, of in side.items() if any(one.exact and not one.placed for one in of)}
        self.other_form = has_other_form(tables, self.classes)
        if same_cut and not calls.sites and not moved and not self.other_form:
            return tables
        baseline, candidate = dict(tables[0]), dict(tables[1])
        samples = samples_of(tables[0]), samples_of(tables[1])
        cutters = _Cutter(cuts[0]), _Cutter(cuts[1])
        unplaced = [*rows.without]
        for site in sides[0]:
            both = sides[0][site], sides[1].get(site, [])
            if not both[1] or any(one.unobserved for side in both for one in side):
                continue
            if self.other_form and (site.phase == "batch" or _are_scalars(both)):
                continue
            without = site.phase == "backward" and site._replace(phase="forward") in self._lacking
            others = site in calls.sites or site in moved or self.other_form
            if not without and not others and (same_cut or _rows_fit(both, cutters, samples)):
                continue
            unplaced.append(both[0][0])
            for table, entries in zip((baseline, candidate), both, strict=True):
                for entry in entries:
                    del table[entry.key]
            axis = None if others else _undeclared_axis(both, cuts)
            self._pool(site, both, (baseline, candidate), axis=axis, named=not others, is_moved=site in moved)
        for key in _buffers_of_rows(tables, cuts):
            del baseline[key], candidate[key]
            self.left_out[label(key.path, key.slot)] = None
        self.latest = tuple(sorted(unplaced, key=lambda entry: entry.order))
        return baseline, candidate

    def _pool(
        self,
        site: SiteKey,
        both: Sides,
        tables: tuple[dict[SiteKey, MergedSite], dict[SiteKey, MergedSite]],
        *,
        axis: int | None,
        named: bool,
        is_moved: bool,
    ) -> None:
        """Put all rows of a site together, in no order, or leave it out."""
        name = label(site.path, site.slot)
        if site.phase == "backward" and site._replace(phase="forward") in self._lacking:
            return  # the gradient of what has no counterpart has none
        pools = [_pooled(site, entries, whole_numbers=is_moved and site.phase == "batch") for entries in both]
        if any(one is None for one in pools) or len({int(one.summary["count"]) for one in pools if one}) > 1:
            self.left_out[name] = None
            if site.phase == "forward":
                self.unseen[site.path] = None
            self._lacking.add(site)
            return
        for table, one in zip(tables, pools, strict=True):
            assert one is not None
            table[site] = one
        if named:
            self.pooled[name] = None
            if axis is not None:
                self.axes.setdefault(site.path or ROOT, axis)

    def notes(self) -> list[str]:
        """One sentence about each kind of them."""
        notes = []
        if self.calls:
            paths = {path or ROOT: None for path in self.calls}
            notes.append(
                f"The runs divide the batch otherwise among calls of {_named(paths, 'module')}: norms and sums over "
                "all calls of a step were compared there."
            )
        if self.computed:
            notes.append(
                f"One run computes {_named(self.computed)} for all samples, the other for rows that were chosen: these "
                "were not compared."
            )
        if self.padded:
            notes.append(
                f"The runs compute {_named(self.padded, 'module')} for other rows (padded ones, or a call for each "
                "sample): these were not compared, and what follows them agreed when this was first seen."
            )
        if self.pooled:
            notes.append(
                f"The runs cut the batch differently, and which row is which is not known at {_named(self.pooled)} "
                f"(chosen rows, or an axis that is not known as the batch axis). Norms and sums were compared "
                f"there.{self._advice()}"
            )
        if self.left_out:
            notes.append(
                f"The runs cut or pad the batch differently, so {_named(self.left_out)} cannot be compared (padding, "
                "numbers that count within a micro-batch, or a buffer with a row for each of its samples)."
            )
        return notes

    def remark(self, first: Finding, form: str = "") -> str:
        """A sentence for the first finding, if sites before it may not have been compared.

        Args:
            first: The first finding.
            form: How the batch is padded or ordered otherwise, as a sentence; empty if it is not.
        """
        if not self.left_out or first.phase not in ("forward", "loss", "backward", "grad"):
            return ""
        sites = "1 site" if len(self.left_out) == 1 else f"{len(self.left_out)} sites"
        counted = (
            " If padded positions count in it, that is it." if form and first.phase in ("loss", "backward") else ""
        )
        return (
            f" {form or 'The runs cut the batch differently.'} So {sites} could not be compared: what goes wrong may "
            f"be at one of them, and show only here.{counted}"
        )

    def _advice(self) -> str:
        if not self.axes:
            return ""
        declared = ", ".join(f'"{path}": {axis}' for path, axis in list(self.axes.items())[:3])
        options = " ".join(f"--batch-axis '{path}={axis}'" for path, axis in list(self.axes.items())[:3])
        return (
            f" record(batch_axis={{{declared}}}) or traindiff run {options} in both runs has rows compared one by one."
        )


def _are_scalars(sides: Sides) -> bool:
    return not any(entry.shape for side in sides for entry in side)


def _named(sites: Mapping[str, None], what: str = "site") -> str:
    return f"{next(iter(sites))}{more_text(len(sites) - 1, what)}"


def _cut(table: StepTable) -> Cut:
    """How a run cuts the batch, by its first input that has a batch axis; empty if there is none."""
    for key, entry in table.items():
        if key[:2] == ("batch", "") and key.path not in _WITHOUT_ROWS and entry.parts and not entry.unobserved:
            same = [one for other, one in table.items() if other[:5] == key[:5]]
            parts = [part for one in same for part in one.parts if part.shard.batched and part.shard.shape]
            if parts:
                return {(part.micro_step, part.term): part.shard.shape[0] for part in parts}
    return {}


def _by_site(table: StepTable) -> dict[SiteKey, list[MergedSite]]:
    """Inputs, activations and their gradients; of some there is an entry for each micro-step."""
    found: dict[SiteKey, list[MergedSite]] = {}
    for key, entry in table.items():
        flows = key.phase in ("batch", "forward", "backward") and key.path not in _WITHOUT_ROWS
        if flows and key.stage not in (SAMPLE, "evaluation"):
            found.setdefault(key.of_step, []).append(entry)
    return found


def _rows_fit(sides: Sides, cutters: tuple[_Cutter, _Cutter], samples: tuple[Samples, Samples]) -> bool:
    """True if each row of one run has a counterpart in the other."""
    if any(len(side) > 1 for side in sides):
        return False
    (baseline,), (candidate,) = sides
    if baseline.shape != candidate.shape:
        # Another number of samples is another batch, and not a question of how it is cut.
        return baseline.key.phase == "batch" and baseline.batched and candidate.batched
    if _are_renumbered(baseline, candidate, samples):
        return False
    if baseline.dtype not in UNIT_ROUNDOFF and baseline.dtype != "bool" and baseline.key.phase != "batch":
        return bool(baseline.summary["fingerprint"] == candidate.summary["fingerprint"])  # may be places in the batch
    if baseline.batched != candidate.batched:
        return False
    return all(own.cuts_evenly(one) for one, own in zip((baseline, candidate), cutters, strict=True))


def _are_renumbered(baseline: MergedSite, candidate: MergedSite, samples: tuple[Samples, Samples]) -> bool:
    """True for an input whose numbers differ only as they count within a micro-batch."""
    if baseline.key.phase != "batch" or baseline.summary["fingerprint"] == candidate.summary["fingerprint"]:
        return False
    site = baseline.key.path, baseline.key.slot
    return count_within(baseline, candidate, (samples[0].get(site, ()), samples[1].get(site, ())))


class _Cutter:
    """How a run cuts the batch. In a compact recording, most tensors have their parts in the same places."""

    def __init__(self, cut: Cut) -> None:
        self._cut = cut
        self._known: dict[int, bool] = {}  # by object that says where the parts are; those of one step all live

    def cuts_evenly(self, entry: MergedSite) -> bool:
        """True if each micro-batch has as many rows of a tensor per sample as the others."""
        if not entry.batched:
            return True
        places = places_of(entry.parts)
        if id(places) not in self._known:
            self._known[id(places)] = self._are_even(places)
        return self._known[id(places)]

    def _are_even(self, parts: Iterable[RankPart | Place]) -> bool:
        rows = {
            (part.shard.shape[0], self._cut[part.micro_step, part.term])
            for part in parts
            if part.shard.shape and (part.micro_step, part.term) in self._cut
        }
        return all(count * samples == first * own for count, own in rows for first, samples in rows)


def _pooled(site: SiteKey, entries: Sequence[MergedSite], *, whole_numbers: bool) -> MergedSite | None:
    """All rows of a tensor together, in no order; None if they are known as a sum only.

    Also None for whole numbers, unless it is known that they do not count within a micro-batch.
    """
    known = [one.exact or not one.placed for one in entries]  # of joined sites, norms and sums are known as well
    if not all(known) or (entries[0].dtype not in UNIT_ROUNDOFF and not whole_numbers):
        return None
    first = entries[0]
    summary = merge([one.summary for one in entries]) if len(entries) > 1 else first.summary.copy()
    summary["sketch"] = 0.0
    inner = {one.shape[1:] for one in entries}
    rows = sum(one.shape[0] for one in entries if one.shape)
    shape = (rows, *inner.pop()) if len(inner) == 1 and first.shape else (int(summary["count"]),)
    return replace(
        first, key=site, summary=summary, shape=shape, exact=False, parts=(), apart=(), batched=False, summed=False,
        placed=False,
    )  # fmt: skip


def _undeclared_axis(sides: Sides, cuts: tuple[Cut, Cut]) -> int | None:
    """The axis whose lengths are proportional to the samples of the micro-batches, if it is the only one."""
    found: set[int] = set()
    lengths: dict[int, set[tuple[int, int]]] = {}
    shapes = set()
    for side, cut in zip(sides, cuts, strict=True):
        for part in (part for one in side for part in one.parts):
            samples = cut.get((part.micro_step, part.term))
            if part.shard.batched or samples is None:
                return None
            shapes.add(part.shard.shape)
            for axis, length in enumerate(part.shard.shape):
                lengths.setdefault(axis, set()).add((length, samples))
    if len({len(shape) for shape in shapes}) != 1:
        return None
    for axis, seen in lengths.items():
        if len({length for length, _ in seen}) > 1:
            found.add(axis)
            if any(length * other != first * samples for length, samples in seen for first, other in seen):
                return None
    return found.pop() if len(found) == 1 else None


def _buffers_of_rows(tables: Tables, cuts: tuple[Cut, Cut]) -> list[SiteKey]:
    """Buffers with a row for each sample of a micro-batch, such as the state of a spiking layer, if the runs cut it."""
    found = []
    for key, entry in tables[0].items():
        other = tables[1].get(key)
        if key.phase != "param" or key.slot != "buffer" or other is None or len(entry.shape) != len(other.shape):
            continue
        sizes = [both for both in zip(entry.shape, other.shape, strict=True) if both[0] != both[1]]
        if len(sizes) == 1 and all(size in cut.values() for size, cut in zip(sizes[0], cuts, strict=True)):
            found.append(key)
    return found
