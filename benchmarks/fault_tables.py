"""Tables of what was found and what was not, from the outcomes that benchmarks/faults.py measures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from benchmarks.fault_outcomes import Case, Outcome

from traindiff.core.summary import UNIT_ROUNDOFF

ROUNDING = {
    "float32": UNIT_ROUNDOFF["float32"], "bfloat16": UNIT_ROUNDOFF["bfloat16"], "autocast": UNIT_ROUNDOFF["bfloat16"]
}  # fmt: skip
"""One rounding, as a relative difference."""

MODES = ("free", "forced", "forced, in float32")
EITHER = "any of these"

WHY = """\
Most effects here are below one rounding of bfloat16. Others are above it and below the floor, which is two roundings
or more: `bit-flipped-in-mantissa` (forced), `batch-norm-eps`. A conversion to
bfloat16 does nothing in a bfloat16 training (`identical`), and little where everything is computed in float32, which
converts it away. `state-carried-over` exceeds its floor 25 times in a free run, but only at positions
of which the loss reads nothing: no loss, gradient or update differs, so it is reported as another representation.
Flipped bits do not show where everything is computed in float32: a view of the bits of a tensor that was converted is
a copy there, so what is written through it is lost. The modes complement each other.

Not in these tables: autocast (`--precision autocast`). Of it, on 2026-11-21, the five ways to write a linear layer
in the three models raised no false alarm, free or forced; the worst of them reached 0.46 of its floor.
"""
"""Said above the table of what is missed."""


def summary_table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Per precision and mode: what was found, located, falsely alarmed about, and with which margin."""
    yield (
        "| precision | mode | faults | found | located exactly | with an effect above one rounding | of these located "
        "| above a quarter of one | of these located "
        "| legal | false alarms | worst legal ratio | weakest fault ratio | margin |"
    )
    yield "| --- " * 14 + "|"
    effects, ineffective = effects_of(outcomes), without_effect(outcomes)
    outcomes = [*outcomes, *either(outcomes)]
    for precision in dict.fromkeys(one.case.precision for one in outcomes):
        for mode in (*MODES, EITHER):
            these = [one for one in outcomes if (one.case.precision, one.mode) == (precision, mode)]
            faults = [one for one in these if one.case.fault]
            legal = [one for one in these if not one.case.fault and one.verdict != "refused"]
            if not faults or not legal:
                continue
            unit = ROUNDING[precision]
            strong, quarter = (
                [
                    one for one in faults
                    if one.located or (effects.get(one.case.name, 0.0) > share * unit and one.case not in ineffective)
                ]
                for share in (1.0, 0.25)
            )  # fmt: skip
            located = [one for one in faults if one.located]
            worst = max(legal, key=lambda one: one.ratio)
            weakest = min(located, key=lambda one: one.ratio)
            found = sum(one.verdict in ("diverged", "misaligned") for one in faults)
            alarms = sum(not one.right for one in legal)
            margin = f"{weakest.ratio / worst.ratio:.3g}" if worst.ratio else "-"
            yield (
                f"| {precision} | {mode} | {len(faults)} | {found} | {len(located)} | {len(strong)} | "
                f"**{sum(one.located for one in strong)}** | {len(quarter)} | "
                f"**{sum(one.located for one in quarter)}** | {len(legal)} | "
                f"**{alarms}** | {worst.ratio:.2f} ({worst.case.name}, {worst.case.model}) "
                f"| {weakest.ratio:.3g} ({weakest.case.name}) | **{margin}** |"
            )


def effects_of(outcomes: Iterable[Outcome]) -> dict[str, float]:
    """By fault: how far it moves the tensor at its place, in the float32 training with forced inputs."""
    return {
        one.case.name: one.effect
        for one in outcomes
        if one.case.fault and (one.case.precision, one.mode) == ("float32", "forced")
    }


def without_effect(outcomes: Iterable[Outcome]) -> set[Case]:
    """The faults that change no bit of a free run, e.g. a conversion to bfloat16 in a bfloat16 training."""
    return {one.case for one in outcomes if one.case.fault and (one.mode, one.verdict) == ("free", "identical")}


def either(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """One outcome per case: the first mode that is right; of legal variations the first that is wrong."""
    found: dict[Case, Outcome] = {}
    for one in outcomes:
        held = found.get(one.case)
        if held is None or (held.right != one.case.fault and one.right == one.case.fault):
            found[one.case] = one
    return [replace(one, mode=EITHER) for one in found.values()]


def missed_table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Faults that were not found, or not where they are."""
    yield from WHY.splitlines()
    yield ""
    yield "| fault | precision | mode | where it is | what was said | effect | in roundings |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    effects = effects_of(outcomes)
    for one in outcomes:
        if one.case.fault and not one.located:
            effect, unit = effects.get(one.case.name, 0.0), ROUNDING[one.case.precision]
            said = f"{one.verdict}: {one.said}" if one.said else one.verdict
            yield (
                f"| {one.case.name} | {one.case.precision} | {one.mode} | {one.place} | {said} | {effect:.2g} "
                f"| {effect / unit:.2g} |"
            )


def alarms_table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Legal variations of which something was said."""
    wrong = [one for one in outcomes if not one.case.fault and not one.right]
    if not wrong:
        yield "None."
        return
    yield "| variation | model | precision | mode | what was said | ratio |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for one in wrong:
        said = f"{one.verdict}: {one.said or one.where}"
        yield f"| {one.case.name} | {one.case.model} | {one.case.precision} | {one.mode} | {said} | {one.ratio:.3g} |"


def faults_table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Every fault with the ratio of its first divergence, per precision and mode; `-` where it is not located."""
    faults = [one for one in outcomes if one.case.fault]
    columns = list(dict.fromkeys((one.case.precision, one.mode) for one in faults))
    yield f"| fault | model | where | {' | '.join(f'{precision}, {mode}' for precision, mode in columns)} |"
    yield f"| --- | --- | --- |{' --- |' * len(columns)}"
    by_place = {(one.case.name, one.case.precision, one.mode): one for one in faults}
    for name in dict.fromkeys(one.case.name for one in faults):
        row = [by_place.get((name, *column)) for column in columns]
        first = next(one for one in row if one)
        ratios = [f"{one.ratio:.3g}" if one and one.located else "-" for one in row]
        yield f"| {name} | {first.case.model} | {first.place} | {' | '.join(ratios)} |"


def legal_table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Every legal variation with its largest ratio, over models, per precision and mode."""
    legal = [one for one in outcomes if not one.case.fault]
    columns = list(dict.fromkeys((one.case.precision, one.mode) for one in legal))
    yield f"| variation | models | {' | '.join(f'{precision}, {mode}' for precision, mode in columns)} |"
    yield f"| --- | --- |{' --- |' * len(columns)}"
    for name in sorted({one.case.name for one in legal}):
        these = [one for one in legal if one.case.name == name]
        models = ", ".join(dict.fromkeys(one.case.model for one in these))
        ratios = []
        for column in columns:
            found = [one for one in these if (one.case.precision, one.mode) == column]
            known = [one.ratio for one in found if one.verdict != "refused"]
            ratios.append(f"{max(known):.2f}" if known else "refused" if found else "-")
        yield f"| {name} | {models} | {' | '.join(ratios)} |"
