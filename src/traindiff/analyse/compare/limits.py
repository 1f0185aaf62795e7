"""Limits of a verdict: what was not recorded, not observed, or has no counterpart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from traindiff.analyse.align.pairs import Unaligned
from traindiff.analyse.align.side import RUNS, Side
from traindiff.analyse.align.two_runs import TwoRuns
from traindiff.analyse.compare.accepted import Alone
from traindiff.analyse.findings import listed_text, more_text, ranks_text
from traindiff.analyse.merge.site import SiteKey
from traindiff.analyse.merge.unobserved import unrecorded_of
from traindiff.core.site import label
from traindiff.core.tap_registry import NOT_BY_DEFAULT
from traindiff.storage import Run

_BEFORE_LEARNING = ("batch", "forward", "backward")
"""Phases of tensors that losses, gradients and updates follow from."""


def limits(
    runs: TwoRuns,
    alone: Alone,
    *,
    learning_agrees: bool,
    gradients_agree: bool,
    learning_compared: bool,
    same_bits: bool,
) -> tuple[list[str], bool]:
    """Sentences that limit the verdict after all steps, and whether they leave it incomplete.

    Args:
        runs: The two runs.
        alone: By run, sites that the other run lacks, without those that the user accepts.
        learning_agrees: Whether losses, gradients and updates were compared and agree. Then batches and activations
            that were not compared are noted, and leave nothing open.
        gradients_agree: Whether gradients and updates were compared and agree. Then a loss that only one run has, and
            what leads to it, leave nothing open: the other asks for its gradients in another way.
        learning_compared: Whether losses, gradients and updates were compared. Then activations whose rows have no
            counterpart leave nothing open: a fault there shows in these.
        same_bits: Whether losses, gradients or updates were compared, and all observed tensors have the same bits. Then
            tensors that neither run observed, for the same reason, are noted, and leave nothing open.
    """
    endings = [
        f"{name}: {status.message}"
        for name, run in zip(RUNS, runs.runs, strict=True)
        for rank in run.ranks
        if (status := run.status(rank)).message  # of a rank whose recording was not closed
    ]
    gaps = [*_missing_ranks(runs), *_missing_steps(runs), *_unstepped(runs)]
    failures = list(_failures(runs))
    not_recorded, partly = _not_recorded(runs)
    notes = [
        *endings,
        *failures,
        *gaps,
        *_unobserved(runs),
        *not_recorded,
        *_of_several_optimizers(runs),
        *runs.passes.notes(),
        *_earlier_passes(runs),
    ]
    phases = {site.partition(" ")[0] for site in runs.presence.unobserved}
    of_one_run = [
        {_BEFORE_LEARNING[1] if _is_constant(one, other) else one.phase for one in sites}
        for sites, other in zip(alone, reversed(runs.sides), strict=True)
    ]
    phases.update(*of_one_run)
    if learning_agrees:
        open_sites = phases.difference(_BEFORE_LEARNING)
    elif gradients_agree and of_one_run[0] ^ of_one_run[1] >= {"loss"}:
        open_sites = phases.difference(_BEFORE_LEARNING, {"loss"})
    else:
        open_sites = phases
    if same_bits and not any(alone) and _unseen_alike(runs):
        failures, open_sites = [], set()
    without_rows = bool(runs.uneven.left_out) and not learning_compared
    return notes, bool(gaps) or bool(failures) or partly or bool(open_sites) or without_rows


def _is_constant(site: Unaligned, other: Side) -> bool:
    """True for a buffer of a module that the other run has not: it matters for what its module returns, if at all."""
    return (site.phase, site.slot) == ("param", "buffer") and site.path.rpartition(".")[0] not in other.paths


def not_followed(runs: TwoRuns) -> list[str]:
    """Optimizers that stepped beside the recorded ones, and whose models were not recorded."""
    return [
        f"Not recorded in the {name}, so not compared: {sentence}"
        for name, run in zip(RUNS, runs.runs, strict=True)
        for sentence in unrecorded_of(run)
    ]


def hints(runs: TwoRuns) -> list[str]:
    """The reasons why sites have no counterpart, if the recordings tell."""
    return [f"{label(one.path, one.slot)}: {one.why}." for one in runs.presence.sides()[0] if one.why][:3]


def _unseen_alike(runs: TwoRuns) -> bool:
    """True if both runs failed to observe the same tensors for the same reasons."""
    baseline, candidate = (failed.notes() for failed in runs.failed)
    return baseline == candidate and not runs.presence.one_sided


def _failures(runs: TwoRuns) -> Iterator[str]:
    """Sentences about what taps failed to observe; what both runs share is said once."""
    baseline, candidate = (dict.fromkeys(failed.notes()) for failed in runs.failed)
    for name, own, other in ((RUNS[0], baseline, candidate), (RUNS[1], candidate, baseline)):
        for message in own:
            if message not in other:
                yield f"{name}: {message[0].lower()}{message[1:]}"
            elif own is baseline:
                yield f"Both runs: {message[0].lower()}{message[1:]}"


def computed_notes(inputs: Mapping[str, tuple[int, str]]) -> list[str]:
    """A note for each reason for which inputs differ that are no other batch.

    Args:
        inputs: By input, the first step in which it differs, and the reason; see `returned_states`.
    """
    by_reason: dict[str, list[tuple[str, int]]] = {}
    for site, (step, why) in inputs.items():
        by_reason.setdefault(why, []).append((site, step))
    notes = []
    for why, sites in by_reason.items():
        (site, step), more = sites[0], more_text(len(sites) - 1, "input")
        notes.append(f"{site}{more} differ{'' if more else 's'} from step {step} on{why}.")
    return notes


def unjudged_note(sites: Mapping[SiteKey, int], *, is_represented_otherwise: bool) -> str:
    """A note on sites that could not be judged after the first difference; empty if there are none.

    Args:
        sites: By site, the first step in which its floor hides everything.
        is_represented_otherwise: Whether nothing diverges, and only the representation differs.
    """
    if not sites:
        return ""
    key, step = next(iter(sites.items()))
    more = more_text(len(sites) - 1, "site", before=", and")
    where = f"{key.phase} of {label(key.path, key.slot)}, from step {step} on{more}"
    if is_represented_otherwise:
        return f"Not judged one by one, because of that: {where}. Losses, gradients and updates were."
    return (
        f"Not judged after the first divergence: {where}. What precedes them differs by so much that even a lost "
        "tensor would not stand out. Mend the first divergence, and compare again."
    )


def parted_note(parted: Mapping[tuple[int | None, int], float]) -> str:
    """A note on parameters that part in steps that were not compared; empty if they do not.

    Args:
        parted: By two compared steps, how far they are apart at the second. The first is None for the steps before.
    """
    if not parted:
        return ""
    (first, second), apart = max(parted.items(), key=lambda item: item[1])
    steps = f"the steps before {second}" if first is None else f"the steps between {first} and {second}"
    return (
        f"Not judged: {steps}, which were not recorded or not chosen. After them the parameters "
        f"differ by {apart:.2g} of their size, and nothing tells whether rounding explains that. Compare these steps, "
        "or measure how far correct runs part (traindiff explain noise)."
    )


def _missing_ranks(runs: TwoRuns) -> Iterator[str]:
    """Sentences about missing ranks, and about ranks without the steps of other ranks."""
    for name, run, side in zip(RUNS, runs.runs, runs.sides, strict=True):
        if run.missing_ranks:
            ranks = ranks_text(run.missing_ranks, capital=False)
            left = "left no recording" if len(run.missing_ranks) == 1 else "left no recordings"
            yield f"{name}: {ranks} {left}.{_lost_stages(run, side)}"
    for name, behind in zip(RUNS, runs.behind, strict=True):
        for rank, step in sorted(behind.items()):
            yield f"{name}: rank {rank} did not record step {step}, which others did."


def _lost_stages(run: Run, side: Side) -> str:
    """Stages of a pipeline that only missing ranks hold."""
    here = {stage for rank in run.ranks for stage in side.stages_of(rank)}
    stages = sorted({stage for rank in run.missing_ranks for stage in side.stages_of(rank)} - here)
    if not stages:
        return ""
    return f" Not recorded, so not compared: stage {', '.join(map(str, stages))} of the pipeline."


def _missing_steps(runs: TwoRuns) -> Iterator[str]:
    """Steps that only one run has."""
    if not runs.compared:
        yield _nothing_in_common(runs)
        return
    for number, alone in enumerate(runs.alone):
        ended = runs.sides[1 - number]
        lasts = {name: runs.latest.get(name, runs.compared[-1]) for name in alone}
        after = [
            lasts[name]
            for name, steps in alone.items()
            for step in steps
            if step > lasts[name] and ended.ends_before(name, step)
        ]
        if after:
            steps = "1 later step of the other run was" if len(after) == 1 else f"{len(after)} later steps were"
            why = f" The reason: {ended.goes_on_elsewhere}." if ended.goes_on_elsewhere else ""
            yield (
                f"The {RUNS[1 - number]} ends after step {max(after)}; {steps} not compared. "
                f"(--steps compares a part on purpose.){why}"
            )


def _unstepped(runs: TwoRuns) -> Iterator[str]:
    """A sentence if no optimizer was called."""
    if runs.compared and not runs.stepped:
        yield (
            "No optimizer has stepped in what was compared, so what the runs do to their parameters is not known. "
            "Record both until optimizer.step() has returned."
        )


def _of_several_optimizers(runs: TwoRuns) -> Iterator[str]:
    """A sentence if there are parameters whose updates cannot be compared."""
    if shared := sorted(runs.moments.shared):
        yield (
            f"Not compared: the updates of {listed_text(shared, 'parameter')}. Several optimizers step them, and the "
            "two runs recorded other steps. To compare updates, too, record both with the same every= and steps=."
        )
    if changed := sorted(runs.moments.changed):
        yield (
            f"Not compared: some updates of {listed_text(changed, 'parameter')}. Only one run recorded the step before "
            "these, and something else than the optimizer changed them in between, such as clipping."
        )


def _earlier_passes(runs: TwoRuns) -> Iterator[str]:
    """A sentence if one run made passes before the other one began."""
    if runs.earlier is not None:
        run, step = runs.earlier
        yield (
            f"{RUNS[run]}: in step {step}, the first passes were not compared: the other run, which "
            "begins in this step, did not make them. They belong to another optimizer's step before it."
        )
    if runs.unheld:
        yield (
            f"Not compared: the values with which {listed_text(runs.unheld, 'parameter')} begin in the run that goes "
            "on. No optimizer holds them, and in the other run they changed within a step."
        )


def _unobserved(runs: TwoRuns) -> Iterator[str]:
    """A sentence if there are sites that were not observed."""
    if unobserved := runs.presence.unobserved:
        site, why = next(iter(unobserved.items()))
        yield f"Not observed, so unknown: {site} ({why}){more_text(len(unobserved) - 1, 'site')}."


def _nothing_in_common(runs: TwoRuns) -> str:
    """Why no step could be compared."""
    optimizers: Sequence[set[str]] = [{*side.groups} for side in runs.sides]
    names = [", ".join(sorted(one)) for one in optimizers]
    if all(names) and not optimizers[0] & optimizers[1]:
        return (
            f"The optimizers have other names: {names[0]} in the baseline, {names[1]} in the candidate. Steps "
            "are counted per optimizer; record both runs with the same names: optimizer={NAME: optimizer}."
        )
    for name, run, steps in zip(RUNS, runs.runs, runs.alone, strict=True):
        if not steps:
            return (
                f"The {name} ({run.path}) has no finished step among those asked for. Record it until the optimizer "
                "has stepped, or ask for other steps."
            )
    numbers = [sorted(step for one in alone.values() for step in one) for alone in runs.alone]
    ranges = [f"{steps[0]} to {steps[-1]}" for steps in numbers]
    return f"The recordings have no step in common: the baseline has steps {ranges[0]}, the candidate {ranges[1]}."


def _not_recorded(runs: TwoRuns) -> tuple[list[str], bool]:
    """Notes on observations that one run was not asked for, and whether the comparison is partial without them."""
    notes, partly = [], False
    for name, missing in zip(RUNS, runs.presence.not_recorded, strict=True):
        if missing:
            notes.append(f"Not recorded in the {name}, so not compared: {', '.join(missing)}.")
            # Evaluation and micro-batches are extras; without a whole phase the comparison is partial.
            partly |= bool(missing.keys() - {"evaluation", *NOT_BY_DEFAULT})
    inside = {"operators", "products"}
    if all(side.recorded & inside and side.recorded <= inside | {"evaluation"} for side in runs.sides):
        names = " and ".join(sorted(inside & {*runs.sides[0].recorded, *runs.sides[1].recorded}))
        notes.append(
            f"Both runs have recorded {names} alone, which have no verdict, so nothing was compared. Record what "
            "modules return, too: add the phases to observe, or choose modules by operators=."
        )
        partly = True
    return notes, partly


def rounded_notes(rounded: Mapping[str, float]) -> Iterator[str]:
    """A note on parameters that start with values that rounding parts.

    Args:
        rounded: Relative difference, by path.
    """
    if rounded:
        several = f" and {len(rounded) - 1} more" if len(rounded) > 1 else ""
        yield (
            f"Before the first step, rounding alone parts {next(iter(rounded))}{several}, by up to "
            f"{max(rounded.values()):.2g} of their size: were they computed by another number of threads, on another "
            "machine, or from the first batch? To start with the same values, save them once, and load them in both "
            "runs."
        )


def choices_notes(turned: Sequence[str], choices: Sequence[str]) -> Iterator[str]:
    """Notes on choices of rows that rounding turned: whole numbers of rows that differ, and parts of them.

    Args:
        turned: Places where another number of rows was chosen.
        choices: Places where a part of the choices turned, and how many.
    """
    if turned:
        yield (
            "A choice of rows (of a router, of a mask) that rounding may turn was made otherwise, first at "
            f"{turned[0]}. What follows in such a step was not judged."
        )
    if choices:
        yield (
            f"Rounding turned some choices of rows (of a router or a codebook), first at {choices[0]}. The floors of "
            "what follows allow for it, and rows that were chosen otherwise are not compared one by one."
        )
