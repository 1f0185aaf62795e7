"""Sentences that explain the first divergence: its surroundings, its module, its loss, its engine."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from traindiff.analyse.align.pairs import Aligned, in_baseline_order
from traindiff.analyse.align.side import RUNS
from traindiff.analyse.compare.clipping import KIND as CLIPPING
from traindiff.analyse.findings import Finding, listed_text, micro_steps_text
from traindiff.analyse.merge.distance import Pair, equal_bits
from traindiff.analyse.merge.parameters import Copies
from traindiff.analyse.merge.recorded_calls import num_cleared
from traindiff.analyse.merge.renames import Rename
from traindiff.analyse.merge.site import MergedSite, StepTable, num_micro_steps
from traindiff.analyse.rules.ranks import KIND as DISAGREEMENT
from traindiff.core.site import enclosing, label
from traindiff.core.summary import UNIT_ROUNDOFF, nonfinite_count

FLOW = ("batch", "forward", "loss", "backward")
"""Phases in which data flows from one site to the next in the order of execution."""


def flow(pairs: Iterable[Pair]) -> list[MergedSite]:
    """The sites of a step through which data flows, in the order of execution."""
    entries = [pair.baseline for pair in pairs if pair.baseline.key.phase in FLOW and pair.baseline.key.path != "rng"]
    return sorted(entries, key=lambda entry: entry.order)


def surroundings(
    finding: Finding, pairs: Sequence[Pair], aligned: Aligned, *, other_form: bool = False
) -> tuple[str, dict[str, Any]]:
    """A remark on the sites before a finding in its step, and the evidence for it.

    The evidence names the last site that agrees (`after`), if the order of execution tells. The remark says that the
    error may have happened at sites after it, if one run did not observe these.

    Args:
        finding: The first one.
        pairs: All pairs of its step.
        aligned: Sites of both runs, and sites of one run only.
        other_form: Whether the batch holds the same samples in another form, so that differing inputs do not agree.
    """
    if finding.phase not in FLOW or finding.phase == "batch" or finding.kind in ("missing", "extra"):
        return "", {}
    batch = [pair for pair in pairs if pair.baseline.key.phase == "batch"]
    apart = {pair.baseline.key for pair in batch if not equal_bits(pair)} if other_form else set()
    flowing = [entry for entry in flow(pairs) if entry.order < finding.order and entry.key not in apart]
    last = flowing[-1] if flowing else None
    after_pair = in_baseline_order(aligned.pairs)
    unseen: list[tuple[str, str]] = []
    low = last.order if last else -1
    for run, entries in (("candidate", aligned.only_baseline), ("baseline", aligned.only_candidate)):
        for entry in entries:
            order = entry.order if run == "candidate" else after_pair(entry.order) - 1
            if entry.key.phase == finding.phase and low <= order < finding.order:
                unseen.append((run, label(entry.key.path, entry.key.slot)))
    after = label(last.key.path, last.key.slot) if last else ""
    if not unseen:
        return "", {"after": after}
    run = unseen[0][0]
    names = [name for other, name in unseen if other == run]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    site, it = ("site", "it") if len(names) == 1 else ("sites", "one of them")
    hop = (
        f" Just before it, the {run} did not observe {len(names)} {site} that the other run has ({', '.join(names[:3])}"
        f"{more}): if what goes wrong is {it}, it shows here, one hop late."
    )
    return hop, {"after": after, "one_hop_late": names}


_OWN_STATISTICS = re.compile(r"(Lazy)?BatchNorm[123]d")


def has_batch_statistics(classes: Iterable[str]) -> bool:
    """True if one of these classes of modules normalizes by the statistics of a batch, on each rank alone."""
    return any(map(_OWN_STATISTICS.fullmatch, classes))


_RANDOM = re.compile(r"(Alpha|FeatureAlpha)?Dropout([123]d)?|RReLU")


def with_each_ranks_own(finding: Finding, modules: Mapping[str, str], sizes: tuple[int, int]) -> Finding:
    """The finding, with a remark if the result of its module depends on each rank's own samples.

    Args:
        finding: The first one.
        modules: Class name of each module by path, in the run that divides the batch over more ranks.
        sizes: Number of ranks that share the batch, in each run.
    """
    if sizes[0] == sizes[1] or finding.phase != "forward":
        return finding
    name = modules.get(finding.path, "")
    if _OWN_STATISTICS.fullmatch(name):
        message = (
            f" {name} takes the statistics of each rank's own samples; SyncBatchNorm takes those of the whole batch."
        )
    elif _RANDOM.fullmatch(name):
        message = f" {name} draws other numbers where the batch is divided over ranks: compare with it turned off."
    else:
        return finding
    return replace(finding, message=finding.message + message)


_COUNTER = "num_batches_tracked"


def batch_statistics_message(
    finding: Finding, modules: Mapping[str, str], recorded: Sequence[StepTable], micro_steps: tuple[int, int]
) -> str:
    """Why a BatchNorm's output differs, as a sentence after the finding's; empty for anything else.

    Args:
        finding: The first one.
        modules: Class name of each module by path.
        recorded: Its step as each run recorded it. In evaluation mode BatchNorm does not count its batches, and its
            counter is recorded in steps that change it.
        micro_steps: Number of micro-batches of the step, in each run.
    """
    name = modules.get(finding.path, "")
    if finding.phase != "forward" or not (_OWN_STATISTICS.fullmatch(name) or name == "SyncBatchNorm"):
        return ""
    counts = [any(key[:3] == ("param", "", f"{finding.path}.{_COUNTER}") for key in table) for table in recorded]
    for run, own, other in (("candidate", counts[1], counts[0]), ("baseline", counts[0], counts[1])):
        if other and not own:
            return (
                f" The {run}'s {name} does not take note of this batch, the other run's does: is it in evaluation mode?"
            )
    if micro_steps[0] != micro_steps[1]:
        return (
            f" {name} takes the statistics of each micro-batch, and the step has {micro_steps[0]} in the baseline and "
            f"{micro_steps[1]} in the candidate: such runs differ rightly."
        )
    return ""


def _may_be_of_data(finding: Finding) -> bool:
    """True for another loss that other data may explain."""
    looks_like_data = finding.kind in ("value", "scale", "offset") and "(=" not in finding.message
    is_loss = (finding.phase, finding.slot) == ("loss", "backward")
    return is_loss and looks_like_data and "losses" not in finding.evidence


def unseen_batch_message(finding: Finding, tables: Sequence[StepTable]) -> str:
    """A hint that a batch which could not be compared may explain another loss, as a sentence; empty if not.

    Args:
        finding: The first divergence.
        tables: The step of both runs, as recorded.
    """
    if not _may_be_of_data(finding):
        return ""
    unknown = next(
        (
            (label(key.path, key.slot), entry.unobserved)
            for table in tables
            for key, entry in table.items()
            if key[:2] == ("batch", "") and key.path != "rng" and entry.unobserved
        ),
        None,
    )
    if unknown is None:
        return ""
    site, why = unknown
    return f" The batch of this step could not be compared: {site} ({why}). Does it hold the same samples?"


def unseen_labels_message(finding: Finding, pairs: Iterable[Pair]) -> str:
    """A hint that unrecorded labels may explain another loss, as a sentence after the finding's; empty if not.

    Trainings that call `traindiff.inspect` know how to record them.
    """
    if not _may_be_of_data(finding):
        return ""
    if any(pair.baseline.key.phase == "forward" and pair.baseline.key.slot == "value" for pair in pairs):
        return ""
    return (
        " Labels that only the loss receives are not recorded: if they may differ, "
        'traindiff.inspect("labels", labels) records them.'
    )


def shifted_labels_message(finding: Finding, pairs: Iterable[Pair]) -> str:
    """A sentence if an input of whole numbers holds the same as another one in one run only; empty if not.

    A model that shifts labels itself is given the tokens themselves as labels.
    """
    given = (pair for pair in pairs if pair.baseline.key.phase in ("batch", "forward"))
    alike = [pair for pair in given if pair.baseline.dtype not in UNIT_ROUNDOFF]
    site = (finding.phase, finding.path, finding.slot)
    own = next((one for one in alike if one.baseline.key[:1] + one.baseline.key[2:4] == site), None)
    if own is None:
        return ""
    for other in alike:
        if other is own or (other.baseline.shape, other.baseline.dtype) != (own.baseline.shape, own.baseline.dtype):
            continue
        same = [
            one.summary["fingerprint"] == two.summary["fingerprint"]
            for one, two in ((own.baseline, other.baseline), (own.candidate, other.candidate))
        ]
        if same[0] != same[1]:
            key, runs = other.baseline.key, ("baseline", "candidate") if same[0] else ("candidate", "baseline")
            return (
                f" In the {runs[0]} it is equal to {label(key.path, key.slot)}, in the {runs[1]} it is not: are labels "
                "shifted in one run only?"
            )
    return ""


def other_buffers_message(finding: Finding, started: Iterable[str], changed: Iterable[str]) -> str:
    """A sentence about other buffers of a module, or of those around it; empty without any.

    Args:
        finding: The first divergence.
        started: Buffers that start with other values.
        changed: Buffers that the candidate alone has changed since the step before.
    """
    around = enclosing(finding.path)
    of_start, since = ([path for path in paths if path.rpartition(".")[0] in around] for paths in (started, changed))
    if finding.phase != "forward":
        return ""
    if of_start:
        subject = "A buffer starts" if len(of_start) == 1 else "Buffers start"
        return f" {subject} with other values: {listed_text(of_start, 'buffer')}."
    if since:
        subject = "a buffer" if len(since) == 1 else "buffers"
        return f" The candidate alone has changed {subject} since the step before: {listed_text(since, 'buffer')}."
    return ""


def unreached_positions_message(finding: Finding, pairs: Iterable[Pair]) -> str:
    """A sentence if the loss reaches another number of positions in each run; empty if not.

    Labels that are shifted once more, or padded otherwise, leave whole rows of zeros in the gradient of the logits.
    """
    if finding.phase not in ("loss", "backward"):
        return ""
    backward = (pair for pair in pairs if pair.baseline.key.phase == "backward" and not pair.baseline.key.stage)
    first = min(
        (pair for pair in backward if len(pair.baseline.shape) > 1), key=lambda pair: pair.baseline.order, default=None
    )
    if first is None or first.baseline.shape != first.candidate.shape:
        return ""
    if any(nonfinite_count(entry.summary) for entry in (first.baseline, first.candidate)):
        return ""
    width = first.baseline.shape[-1]
    zeros = [int(entry.summary["zero"]) for entry in (first.baseline, first.candidate)]
    if width < 2:
        return ""
    rows = [round(number / width) for number in zeros]
    others = sum(abs(number - width * count) for number, count in zip(zeros, rows, strict=True))
    if rows[0] == rows[1] or others > _ROUNDED_AWAY * width * abs(rows[0] - rows[1]):
        return ""
    positions = int(first.baseline.summary["count"]) // width
    return (
        f" The loss gives no gradient to {rows[0]} of {positions} positions in the baseline, and to {rows[1]} in the "
        "candidate: are labels shifted, padded or masked otherwise?"
    )


_ROUNDED_AWAY = 1 / 64
"""Single zeros beside whole rows of them, as a share of the elements of these rows: gradients that are rounded away."""


def unseen_contributions_message(
    finding: Finding, pairs: Iterable[Pair], micro_steps: int, tables: Sequence[StepTable]
) -> str:
    """A hint that gradients of micro-batches, cleared too early or not recorded, may explain another gradient."""
    if finding.phase != "grad" or micro_steps < 2:
        return ""
    for name, table, other in zip(RUNS, tables, tables[::-1], strict=True):
        cleared, there = num_cleared(table), num_cleared(other)
        if cleared * num_micro_steps(other) > there * num_micro_steps(table):
            return (
                f" In the {name}, the gradients of {micro_steps_text(range(cleared))} were cleared before the step "
                "read them: is zero_grad() called inside the loop over micro-batches?"
            )
    if finding.kind != "value":
        return ""
    if any(pair.baseline.key[:2] == ("grad", "micro") for pair in pairs):
        return ""
    return (
        f' It is a sum over {micro_steps} micro-batches: record(observe=["grad.micro", ...]) shows what each of them '
        "contributes."
    )


DEFAULT_LIMIT = 1.0
"""The norm to which DeepSpeed clips gradients since 0.19.3, unless its configuration says otherwise."""


def explained(finding: Finding, baseline: Mapping[str, Any], candidate: Mapping[str, Any]) -> Finding:
    """The finding, with a remark if an engine's own setting (in a `run.json`) explains it."""
    for name, run in (("baseline", baseline), ("candidate", candidate)):
        engine = run.get("engine") or {}
        if message := _clips_by_default(finding, name, engine) or _makes_adamw(finding, name, engine):
            return replace(finding, message=finding.message + message, evidence={**finding.evidence, "run": name})
    return finding


def _clips_by_default(finding: Finding, name: str, engine: Mapping[str, Any]) -> str:
    if not engine or finding.kind != CLIPPING or finding.evidence.get("run") != name:
        return ""
    if finding.evidence.get("limit") != DEFAULT_LIMIT or engine.get("gradient_clipping") != DEFAULT_LIMIT:
        return ""
    return (
        ' DeepSpeed does so by default since 0.19.3: write "gradient_clipping": 0.0 in its configuration, or clip in '
        "both runs."
    )


def _makes_adamw(finding: Finding, name: str, engine: Mapping[str, Any]) -> str:
    if finding.kind != "hyper-parameter" or finding.slot not in ("decoupled_weight_decay", "weight_decay"):
        return ""
    if str(engine.get("asked_for")).lower() != "adam" or not engine.get("decoupled_weight_decay"):
        return ""
    return (
        f" The {name}'s configuration asks DeepSpeed for Adam, and it makes AdamW of that ({engine['optimizer']}): "
        'write "adam_w_mode": false for Adam.'
    )


def with_names(finding: Finding, copies: Copies, rename: Rename = str) -> Finding:
    """The finding about copies that disagree, with the names that they have on other ranks."""
    names = [
        f"rank {rank} calls it {path}"
        for rank, paths in copies.items()
        for path, first in paths.items()
        if rename(first) == finding.path
    ]
    if finding.kind != DISAGREEMENT or not names:
        return finding
    why = " Are the gradients of a tied parameter added up over the ranks that have it?"
    return replace(finding, message=f"{finding.message} ({', '.join(names)}.){why if finding.phase == 'grad' else ''}")
