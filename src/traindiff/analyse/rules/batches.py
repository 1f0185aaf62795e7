"""The batch of a step, sample by sample, as the model was given it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, NamedTuple

from traindiff.analyse.findings import Finding, ranks_text
from traindiff.analyse.merge.indexed import once, sites
from traindiff.analyse.merge.recorded_calls import num_cleared, samples_of
from traindiff.analyse.merge.site import MergedSite, StepTable
from traindiff.analyse.rules.rule import Contents, Found, Limit, Repeated, RepeatedRule
from traindiff.core.observation import SAMPLE
from traindiff.core.summary import UNIT_ROUNDOFF

FEW = 16
"""Elements below which a sample may well be constant."""


class SamplesVary(RepeatedRule):
    """Most samples of a batch are constant in every floating-point input: an image of one color, features of 0.

    Integers (tokens, masks, labels) may be constant, and so may floating-point masks beside an input that varies. Black
    frames and silence exist, so the rule only warns.
    """

    name = "constant-batch"
    finds = "Most samples of a batch hold one number each."
    needs = "samples of inputs in floating point"
    warns = True
    limits: ClassVar[Mapping[str, Limit]] = {
        "share": Limit(default=0.5, message="largest share of a batch's samples that may be constant"),
        "least_steps": Limit(default=3, message="steps in a row in which it must be so"),
    }

    def applies(self, contents: Contents) -> bool:
        """True if a step has something that it judges."""
        return any(
            not key.path and entry.dtype in UNIT_ROUNDOFF for key, entry in sites(contents.table, "batch", stage=SAMPLE)
        )

    def _wrong(self, table: StepTable) -> Found | None:
        shares: dict[str, list[bool]] = {}
        for key, entry in sites(table, "batch", stage=SAMPLE):
            if key.path or entry.dtype not in UNIT_ROUNDOFF or "mask" in key.slot:
                continue
            for part in entry.parts:
                if int(part.summary["count"]) >= FEW:
                    constant = float(part.summary["minimum"]) == float(part.summary["maximum"])
                    shares.setdefault(key.slot, []).append(constant)
        if not shares:
            return None
        share = min(sum(found) / len(found) for found in shares.values())
        slot = next(iter(shares))
        first = next(one for key, one in sites(table, "batch", stage=SAMPLE) if key[2:4] == ("", slot))
        numbers = {"share": share, "value": float(first.summary["maximum"])}
        return {"": (first, numbers)} if share > self.limit("share") else {}

    def _message(self, row: Repeated) -> str:
        return (
            f"{row.numbers['share']:.0%} of the samples of {row.site.key.slot} are constant (the first is "
            f"{row.numbers['value']:g} throughout), in {row.num_steps} steps in a row. Look at how samples are read, "
            "and at their normalization."
        )


class WholeSample(NamedTuple):
    """One sample: its micro-step, rank and place, and the fingerprints of its values in all inputs."""

    micro_step: int
    rank: int
    place: int
    fingerprints: tuple[int, ...]


def whole_samples(table: StepTable) -> list[WholeSample]:
    """The samples of a step over all inputs of the model; empty if they were not observed.

    Samples whose gradients were cleared before the step read them are left out: a saliency map may be of those that are
    trained on. Inputs that lack a sample at some place (a scalar, a mask that all samples share) are left out.
    """
    by_place: dict[tuple[int, int, int], dict[str, int]] = {}
    cleared = num_cleared(table)
    for (path, slot), samples in samples_of(table).items():
        if path:
            continue  # from a loader; the model may have been given something else
        for one in samples:
            if one.micro_step < cleared:
                continue
            by_place.setdefault((one.micro_step, one.rank, one.place), {})[slot] = one.fingerprint
    slots = {slot for found in by_place.values() for slot in found}
    shared = [slot for slot in sorted(slots) if all(slot in found for found in by_place.values())]
    return [
        WholeSample(*place, fingerprints=tuple(found[slot] for slot in shared))
        for place, found in sorted(by_place.items())
    ]


def elements_of_a_sample(table: StepTable) -> int:
    """Number of elements of a sample, over all inputs; 0 if samples were not observed."""
    first = (entry for key, entry in sites(table, "batch", stage=SAMPLE) if not (key.path or key.call))
    return sum(int(entry.parts[0].summary["count"]) for entry in first if entry.parts and not entry.unobserved)


@once
def inputs_of(table: StepTable) -> Sequence[MergedSite]:
    """The inputs of the model in the step's forward passes."""
    return [entry for key, entry in sites(table, "batch", stage="") if not (key.path or entry.unobserved)]


class SamplesDiffer(RepeatedRule):
    """Most samples of a batch occur more than once, in all inputs of the model.

    If data-parallel ranks have the same samples, the sampler does not divide them. Drawing with replacement repeats
    some samples, and so do data with few different samples. So the rule only warns, and only if more than half of the
    samples of a batch of at least 8 are copies.
    """

    name = "duplicate-samples"
    finds = "Most samples of a batch are there more than once, or several ranks have the same ones."
    needs = "samples of batches"
    warns = True
    limits: ClassVar[Mapping[str, Limit]] = {
        "share": Limit(default=0.5, message="largest share of a batch's samples that may be copies of an earlier one"),
        "least_samples": Limit(default=8, message="samples that a batch must have; of few, some may be alike"),
        "least_elements": Limit(default=8, message="numbers that a sample must have; short ones are often alike"),
        "least_steps": Limit(default=3, message="steps in a row in which it must be so"),
    }

    def applies(self, contents: Contents) -> bool:
        """True if a step has something that it judges."""
        return SAMPLE in contents.stages

    def _wrong(self, table: StepTable) -> Found | None:
        samples, inputs = whole_samples(table), inputs_of(table)
        if not inputs or len(samples) < self.limit("least_samples"):
            return None
        if elements_of_a_sample(table) < self.limit("least_elements"):
            return None
        if _same_in_all_micro_steps(samples):
            return None  # `BatchesChange` finds that
        copies = len(samples) - len({one.fingerprints for one in samples})
        alike = _ranks_alike(samples)
        numbers = {"copies": copies, "samples": len(samples), "ranks": list(alike)}
        return {"": (inputs[0], numbers)} if alike or copies > self.limit("share") * len(samples) else {}

    def _message(self, row: Repeated) -> str:
        if ranks := row.numbers["ranks"]:
            return (
                f"{ranks_text(ranks)} have the same samples, in {row.num_steps} steps in a row: the work of all but "
                "one of them is lost. Give the loader a DistributedSampler, or a seed of each rank's own."
            )
        return (
            f"{row.numbers['copies']} of the {row.numbers['samples']} samples of a batch are copies of others, in "
            f"{row.num_steps} steps in a row. Look at the sampler, and at what collates the batch."
        )


def _ranks_alike(samples: Sequence[WholeSample]) -> tuple[int, ...]:
    """Ranks that have the same samples as another one."""
    by_rank: dict[int, list[tuple[int, ...]]] = {}
    for one in samples:
        by_rank.setdefault(one.rank, []).append(one.fingerprints)
    sets = {rank: tuple(sorted(found)) for rank, found in by_rank.items()}
    times = Counter(sets.values())
    return tuple(rank for rank, found in sets.items() if times[found] > 1)


def _same_in_all_micro_steps(samples: Sequence[WholeSample]) -> bool:
    found: dict[int, set[tuple[int, ...]]] = {}
    for one in samples:
        found.setdefault(one.micro_step, set()).add(one.fingerprints)
    return len(found) > 1 and len({frozenset(one) for one in found.values()}) == 1


class BatchesChange(RepeatedRule):
    """A step has the same batch as the step before, again and again, or all its micro-batches have the same samples.

    The rule compares all inputs of the model by fingerprints that do not depend on the order of elements. An optimizer
    that evaluates the loss several times in a step (LBFGS) may use one batch for all evaluations, so the rule does not
    compare these. If the workers of a loader draw the same random numbers, each batch comes as often as there are
    workers: so the rule also counts the steps of the whole run that repeat the one before. People try a model on one
    batch, the data may be a single batch, and PPO takes several steps on each batch, so the rule only warns.
    """

    name = "repeated-batch"
    finds = "Step after step has the same batch, or its micro-steps have."
    needs = "inputs of the model"
    warns = True
    limits: ClassVar[Mapping[str, Limit]] = {
        "least_steps": Limit(
            default=3, message="steps in a row that repeat the one before, or their own micro-batches"
        ),
        "share": Limit(
            default=0.4, message="largest share of all steps that may repeat the step before; 2 workers: 0.5"
        ),
        "least_repeats": Limit(default=6, message="steps that must repeat the one before, for a share to count"),
    }

    def applies(self, contents: Contents) -> bool:
        """True if a step has something that it judges."""
        return bool(inputs_of(contents.table))

    def begin(self) -> None:
        """No batch was seen so far."""
        super().begin()
        self._before: tuple[tuple[str, int], ...] = ()
        self._num_steps = 0
        self._num_repeats = 0
        self._first = -1
        self._input: MergedSite | None = None

    def _wrong(self, table: StepTable) -> Found | None:
        inputs = inputs_of(table)
        if not inputs:
            return None
        now = tuple((entry.key.slot, int(entry.summary["multiset"])) for entry in inputs)
        found: Found = {}
        self._num_steps += 1
        if now == self._before:
            found["the step before"] = (inputs[0], {})
            self._input = self._input or inputs[0].without_parts()
            self._num_repeats += 1
        if _same_in_micro_steps(table):
            found["micro-steps"] = (inputs[0], {})
        self._before = now
        return found

    def step(self, table: StepTable, *, step: int) -> None:
        """Count how long faults last; the findings come at the end."""
        super().step(table, step=step)
        if self._num_repeats == 1 and self._first < 0:
            self._first = step

    def end(self) -> Iterator[Finding]:
        """Findings of the whole run."""
        in_a_row = list(super().end())
        yield from in_a_row
        often = self._num_repeats > self.limit("share") * (self._num_steps - 1)
        if self._input is None or self._num_repeats < self.limit("least_repeats") or not often or in_a_row:
            return
        message = (
            f"{self._num_repeats} of {self._num_steps} steps have the same batch as the step before: batches come "
            "several times in a row. That is right if the training takes several steps on each batch (the epochs of "
            "PPO or GRPO). If not: do the workers of a loader draw the same random numbers? Each needs a seed of its "
            "own: look at worker_init_fn."
        )
        yield self.finding(self._input, message, step=self._first, num_steps=self._num_repeats)

    def _message(self, row: Repeated) -> str:
        if row.key == "the step before":
            return (
                f"{row.num_steps} steps in a row have the same batch as the step before. That is right if the training "
                "takes several steps on each batch (the epochs of PPO or GRPO). If not, look at the sampler, and at "
                "whether the loader is made anew in each step."
            )
        return (
            f"All micro-steps of a step have the same samples, in {row.num_steps} steps: gradients are accumulated "
            "over one micro-batch. Is the next one taken inside the loop over micro-steps?"
        )


def _same_in_micro_steps(table: StepTable) -> bool:
    """True if every micro-step of a rank has the same samples."""
    found: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for one in whole_samples(table):
        found.setdefault((one.rank, one.micro_step), []).append(one.fingerprints)
    by_rank: dict[int, set[tuple[tuple[int, ...], ...]]] = {}
    for (rank, _), samples in found.items():
        by_rank.setdefault(rank, set()).add(tuple(sorted(samples)))
    num_micro_steps = len({micro_step for _, micro_step in found})
    return num_micro_steps > 1 and all(len(samples) == 1 for samples in by_rank.values())
