"""The inputs of one call together: how many samples each has, and whether samples arrived at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from math import prod
from typing import ClassVar

from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.indexed import sites
from traindiff.analyse.merge.site import MergedSite, RankPart, StepTable
from traindiff.analyse.rules.batches import inputs_of
from traindiff.analyse.rules.rule import Contents, Found, Limit, Repeated, RepeatedRule
from traindiff.core.observation import SAMPLE
from traindiff.core.summary import UNIT_ROUNDOFF

_SHARED = ("mask", "position")
"""Words in the names of inputs that all samples rightly share."""

_WHOLE_NUMBERS = frozenset({"int64", "int32", "int16", "int8", "uint8"})


class InputsHaveAllSamples(RepeatedRule):
    """One input of whole numbers has a single sample, and the model returns one result for each of many samples.

    A processor that mixes up lists of texts and images returns the tokens of one sample for all of them, and
    broadcasting hides it. Positions and masks rightly have one row for all samples, and depend on nothing but the
    length. So the rule asks that the input has two axes or more, changes from step to step without changing its shape,
    and that the model's first output has as many samples as its largest input. One question about many images looks the
    same, so the rule only warns.
    """

    name = "single-sample-input"
    finds = "One input holds a single sample, which is broadcast over all samples of another input."
    needs = "two inputs of the model"
    warns = True
    limits: ClassVar[Mapping[str, Limit]] = {
        "least_steps": Limit(default=3, message="steps in a row in which it must be so"),
    }

    def applies(self, contents: Contents) -> bool:
        """True if a step has something that it judges."""
        return len({entry.key.slot for entry in inputs_of(contents.table)}) > 1

    def begin(self) -> None:
        """No input was seen so far."""
        super().begin()
        self._before: dict[str, tuple[tuple[int, ...], int]] = {}

    def _wrong(self, table: StepTable) -> Found | None:
        inputs = [entry for entry in inputs_of(table) if not entry.key.call and entry.parts]
        lengths = {entry.key.slot: _length(entry.parts[0]) for entry in inputs if entry.shape}
        most = max(lengths.values(), default=0)
        if most < 2:
            return None
        largest_slot = next(slot for slot, length in lengths.items() if length == most)
        output = next((one for key, one in sites(table, "forward", stage="") if not key.path and one.shape), None)
        found: Found = {}
        for entry in inputs:
            slot = entry.key.slot
            part = entry.parts[0]
            now = part.shard.shape, int(part.summary["fingerprint"])
            before = self._before.get(slot, now)
            self._before[slot] = now
            changes = before[0] == now[0] and before[1] != now[1]  # positions change with the length only
            if not changes or lengths.get(slot) != 1 or len(entry.shape) < 2 or entry.dtype not in _WHOLE_NUMBERS:
                continue
            if any(word in slot for word in _SHARED):
                continue
            if output is None or not output.parts or _length(output.parts[0]) != most:
                continue
            found[slot] = (entry, {"samples": most, "other": largest_slot})
        return found

    def _message(self, row: Repeated) -> str:
        samples, other = row.numbers["samples"], row.numbers["other"]
        return (
            f"{row.key} has 1 sample and {other} has {samples}, in {row.num_steps} steps in a row: the one is used for "
            "all of the others. If each of them has its own, look at what collates the batch."
        )


def _length(part: RankPart) -> int:
    """Length of axis 0 in one micro-step of one rank; 0 for a number."""
    return part.shard.shape[0] if part.shard.shape else 0


class InputsHaveEquallyMany(RepeatedRule):
    """Inputs of one call had equally many samples in all steps before, and now they have not.

    A loader that drops a sample from one input, or two loaders that are not in step, pair the wrong samples; a loss of
    means hides it. Inputs may differ in their first axis by right: nodes and edges of a graph, sequences whose first
    axis is time, loaders with other last batches. So two inputs are only held against each other if they were equally
    long in every step before, for at least `least_equal` steps, and the rule only warns.
    """

    name = "unequal-inputs"
    finds = "Inputs of one call have unlike numbers of samples, and had the same in the steps before."
    needs = "two inputs of the model"
    warns = True
    limits: ClassVar[Mapping[str, Limit]] = {
        "least_steps": Limit(default=1, message="steps in a row in which it must be so"),
        "least_equal": Limit(default=5, message="steps before, in which the inputs must have been equally long"),
    }

    def applies(self, contents: Contents) -> bool:
        """True if a step has something that it judges."""
        return len({entry.key.slot for entry in inputs_of(contents.table)}) > 1

    def begin(self) -> None:
        """No input was seen so far."""
        super().begin()
        self._equal: dict[tuple[str, str], int] = {}  # steps in which two inputs were equally long; -1 if once unlike

    def _wrong(self, table: StepTable) -> Found | None:
        inputs = {
            entry.key.slot: entry
            for entry in inputs_of(table)
            if not entry.key.call and entry.parts and entry.shape and _length(entry.parts[0]) > 1
            and not any(word in entry.key.slot for word in _SHARED)
        }  # fmt: skip
        found: Found = {}
        for first, second in combinations(sorted(inputs), 2):
            lengths = [_length(inputs[slot].parts[0]) for slot in (first, second)]
            before = self._equal.get((first, second), 0)
            if lengths[0] == lengths[1]:
                self._equal[first, second] = before + 1 if before >= 0 else before
            elif before >= self.limit("least_equal"):
                numbers = {"samples": lengths[0], "other": second, "samples_of_other": lengths[1], "equal": before}
                found[first, second] = inputs[first], numbers
            else:
                self._equal[first, second] = -1
        return found

    def _message(self, row: Repeated) -> str:
        numbers, slot = row.numbers, row.site.key.slot
        return (
            f"{slot} has {numbers['samples']} samples and {numbers['other']} has {numbers['samples_of_other']}; in the "
            f"{numbers['equal']} steps before, they had equally many. If they belong together sample by sample, look "
            "at what collates the batch, and at whether the loaders are in step."
        )


class SamplesArrive(RepeatedRule):
    """The whole batch, or one half of it, is zero in all inputs of the model, and in other steps it is not.

    A copy to another device that fails leaves zeros, for the whole batch or for the part of one device. Inputs with
    "mask" in their name do not count. If all inputs are whole numbers, one of them must be sequences of at least
    `least_tokens` numbers for each sample (tokens): labels and flags may well be 0 in a whole batch. A last batch that
    is padded to its full length looks the same, so the rule only warns. If every step is like this, the zeros are
    meant, or `constant-batch` finds them.
    """

    name = "zero-batch"
    finds = "A batch, or one half of it, is all zero."
    needs = "inputs of the model"
    warns = True
    limits: ClassVar[Mapping[str, Limit]] = {
        "least_steps": Limit(default=1, message="steps in a row in which it must be so"),
        "least_samples": Limit(default=4, message="samples that a batch must have for a half of it to count"),
        "least_tokens": Limit(default=8, message="whole numbers that a sample must have, if no input has fractions"),
    }

    def applies(self, contents: Contents) -> bool:
        """True if a step has something that it judges."""
        return bool(inputs_of(contents.table))

    def begin(self) -> None:
        """No batch was seen so far."""
        super().begin()
        self._present = False

    def _wrong(self, table: StepTable) -> Found | None:
        inputs = [entry for entry in inputs_of(table) if "mask" not in entry.key.slot and entry.shape]
        least = self.limit("least_tokens")
        if not any(entry.dtype in UNIT_ROUNDOFF or _numbers_of_a_sample(entry) >= least for entry in inputs):
            return None
        found: Found = {}
        if all(_is_zero(entry.summary) for entry in inputs):
            found["all samples"] = (inputs[0], {})
        elif half := _zero_half(table, least=int(self.limit("least_samples"))):
            found[half] = (inputs[0], {})
        else:
            self._present = True
        return found

    def end(self) -> Iterator[Finding]:
        """Batches that were lost, if others were not."""
        if self._present:
            yield from super().end()

    def _message(self, row: Repeated) -> str:
        steps = "" if row.num_steps == 1 else f" in {row.num_steps} steps in a row"
        return (
            f"All inputs are zero for {row.key} of the batch{steps}; in other steps they are not. If that is no "
            "padding, look at the loader, and at what copies the batch to the device."
        )


def _numbers_of_a_sample(entry: MergedSite) -> int:
    """Whole numbers of each sample in an input; 0 if it is of no whole numbers, or has one number for each sample."""
    if entry.dtype not in _WHOLE_NUMBERS or not entry.parts or len(entry.shape) < 2:
        return 0
    return prod(entry.parts[0].shard.shape[1:])


def _is_zero(summary: Mapping[str, int]) -> bool:
    return int(summary["zero"]) == int(summary["count"]) > 0


def _zero_half(table: StepTable, *, least: int) -> str:
    """Which half of a micro-batch is zero in all inputs, as a phrase; empty if none is."""
    zeros: dict[tuple[int, int], dict[int, list[bool]]] = {}
    for key, entry in sites(table, "batch", stage=SAMPLE):
        if key.path or "mask" in key.slot or entry.unobserved:
            continue
        for part in entry.parts:
            of_batch = zeros.setdefault((part.micro_step, part.rank), {})
            of_batch.setdefault(key.call, []).append(_is_zero(part.summary))
    for samples in zeros.values():
        lost = [all(samples[place]) for place in sorted(samples)]
        for name, half in (("the first half", 0), ("the second half", 1)):
            if len(lost) >= least and _is_half(lost, half):
                return name
    return ""


def _is_half(lost: Sequence[bool], half: int) -> bool:
    """True if exactly one half of the samples is lost; of an odd number, the first half has one more."""
    middle = (len(lost) + 1) // 2
    first, second = lost[:middle], lost[middle:]
    return all(second) and not any(first) if half else all(first) and not any(second)
