"""The noise floor of each site of a step: measured by replicas if there are any, else from rounding."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from traindiff.analyse.merge.distance import ESTIMATED_PERMUTED_NORMS, Pair, has_other_losses, norms_apart
from traindiff.analyse.merge.site import MergedSite, SiteKey
from traindiff.analyse.noise.canceled import Cancellation
from traindiff.analyse.noise.choices import TurnedChoices
from traindiff.analyse.noise.coherent import CoherentErrors, canceled_means
from traindiff.analyse.noise.gradients import (
    NO_CLASSES,
    Terms,
    gradient_floor,
    reduced_terms,
    summed_rows,
    terms_by_module,
    turned_share,
)
from traindiff.analyse.noise.lost import lost_in_rounding, lost_rows, subnormal_error
from traindiff.analyse.noise.measured import ALONE, FEW, SAFETY, Calibration, StepNoise, basis
from traindiff.analyse.noise.moments import MomentFloors, Moved
from traindiff.analyse.noise.nonlinear import NonlinearUpdates
from traindiff.analyse.noise.run_floors import (
    FIRST_MOMENTS,
    LINEAR_STATE,
    GradientsTogether,
    RunFloors,
    at_the_beginning,
    is_quotient,
)
from traindiff.analyse.noise.uncalibrated import BEYOND, Floors
from traindiff.analyse.noise.unseen import HiddenPath, UnplacedNoise, UnseenNoise
from traindiff.core.summary import UNIT_ROUNDOFF, finite_count, norm_of, rounding

UNSEEN_ROUNDINGS = 2.0
"""Unit roundoffs by which two running averages part in a step that was not recorded. Measured with a fused Adam beside
a foreach one, in bfloat16, over 1 to 99 such steps: 0.5 to 0.7 in each, as one of them rounds 0.999 V to V."""

ALIGNED = 2.0
"""What the gradient of a CTC loss differs by, in roundings of its largest sums of logarithms; `GAIN` comes on top.
Measured with torch's kernel on the CPU, with 10 to 1,000 positions and 12 to 1,000 classes: 0.6 to 2.4 if its inputs
are rounded otherwise; against float64, 0.8 to 15."""

UNSEEN_TERMS = 10
"""Steps whose gradients are most of a running average, with the usual coefficients of momentum."""

MOST_UNSEEN = 0.5
"""Most that such steps may part them: a state that was lost differs by its whole size."""


class SiteFloors:
    """Floors of one step, in the order of execution.

    Without replicas a site is judged by rounding and by the differences measured at its inputs. With replicas it may
    differ by as much as they do at the same site, and by less if the candidate's inputs agree much better than theirs
    did. Rounding and inputs decide if few replicas cannot tell (a handful of numbers, signs), and after the runs have
    differed by more than noise.

    After the first divergence inputs differ by more than noise, and floors grow with them. So each site has a second
    floor: the *undisturbed* one, as if every difference so far were noise. A difference between the two follows from
    the first divergence. What is measured on the data's path after the divergence does not enter undisturbed floors,
    even where it is small: a site with a high floor of its own (a canceled sum) would hand it on as noise. In its place
    the floor that the site had before the divergence counts.

    Args:
        run: Carried from step to step.
        parameters: By path: the parameters as the step found them, on both sides.
        pairs: All pairs of the step.
        samples: Elements in the batch.
        micro_steps: Micro-batches in the step, of the run that has more of them.
        noise: Differences of replicas in this step; None without them.
        calibration: Constants of the measured floors.
        forced: Whether the candidate was given the baseline's tensors after each operation, so that all inputs agree
            and each operation is judged alone.
        leaky: Whether the model has gates that leave no zeros when they shut, as LeakyReLU.
        classes: Class names of norms, other than LayerNorm, and of embeddings, by path.
        unplaced: The baseline's entries of sites whose rows could not be brought together, in execution order.
        unpaired: Entries of sites that only one run has.
        hidden: Stretches of activations that one run alone has observed, see `unseen.hidden_activations`.
        computed_in: The shortest dtype to which autocast converts in one of the runs; empty without autocast.
        other_form: Whether both runs were given the same samples, padded or ordered otherwise.
        calls: By module that the runs call on other parts of the batch: the most calls in a step.
        holders: Paths of modules that hold parameters and are never called.
        clipped: Factor by which clipping made the baseline's gradients smaller.
        searches: The loss is evaluated several times in the step, and replays judge what the optimizer did.
        alignments: Size of the largest loss that sums over alignments.
    """

    def __init__(
        self,
        run: RunFloors,
        *,
        parameters: Mapping[str, Pair],
        pairs: Sequence[Pair],
        samples: int,
        micro_steps: int,
        noise: StepNoise | None,
        calibration: Calibration,
        forced: bool = False,
        leaky: bool = False,
        classes: Mapping[str, str] = NO_CLASSES,
        unplaced: Sequence[MergedSite] = (),
        unpaired: Sequence[MergedSite] = (),
        hidden: Sequence[MergedSite] = (),
        computed_in: str = "",
        other_form: bool = False,
        calls: Mapping[str, int] = MappingProxyType({}),
        holders: Collection[str] = (),
        clipped: float = 1.0,
        searches: bool = False,
        alignments: float = 0.0,
    ) -> None:
        self._run = run
        self._forced = forced
        self._leaky = leaky
        self._turned_signs: dict[SiteKey, int] = {}  # of what goes into gates, by its site
        self._parameters = parameters
        self._samples = samples
        self._micro_steps = micro_steps
        self._noise = noise.sizes if noise else None
        self._replica_inputs = noise.inputs if noise else 0.0  # of the model, which a training may compute
        moments: Mapping[SiteKey, float] = noise.moments if noise else {}
        self._moments = MomentFloors(lambda key: SAFETY * calibration.constant(key.phase) * moments.get(key, 0.0))
        self._calibration = calibration
        self._lost = {**lost_in_rounding(pairs), **lost_rows(pairs)}
        # The largest difference of such gradients so far, from which only others of them follow; and as each was seen.
        self._lost_flow, self._lost_inputs = 0.0, dict[SiteKey, float]()
        self._terms: Mapping[str, Terms] = terms_by_module(pairs, classes, (*unplaced, *unpaired))
        self._calls = calls
        self._canceled = Cancellation(pairs, parameters, run.loss, clipped)
        self._used_terms = reduced_terms(self._terms, self._canceled.used)
        run.sums.see(pairs, [pair.baseline for pair in pairs if self._sums_unknown(pair)], self._used_terms, classes)
        self._canceled_means = canceled_means(pairs)
        self._coherent = CoherentErrors(self._used_terms, parameters)
        self._has_coherent = bool(self._coherent)
        self._rounded = 0.0  # largest unit roundoff of the baseline so far in the step
        self._noise_flow = 0.0  # largest difference of a replica so far in the step
        self._nonlinear = NonlinearUpdates(run, parameters, pairs)
        self._together = GradientsTogether(run, pairs, searches=searches)
        self.finish = self._together.finish
        self._seen: dict[str, Pair] = {}  # gradients, by parameter
        self._gradients: dict[str, float] = {}  # measured floors of gradients, by parameter
        self._alone = Floors(settings_differ=run.settings_differ, coefficients=run.coefficients)  # all inputs agree
        self._floors = self._calm = self._alone
        if not forced:
            self._floors, self._calm = at_the_beginning(parameters, run)
        run.begin(pairs, (self._alone, self._floors, self._calm))
        floors = self._floors  # not `self`, which would be in a cycle with its choices, and outlive the step
        self.choices = TurnedChoices(
            pairs, unplaced, most=lambda rows, computed: floors.turned_rows(rows, computed=computed)
        )
        self._unseen = UnseenNoise()
        self._unplaced = UnplacedNoise(sorted((*unplaced, *hidden), key=lambda entry: entry.order))
        self._hidden = HiddenPath(pairs, hidden, unplaced, computed_in, other_form=other_form, holders=holders)
        self._has_hidden = bool(self._hidden)
        self.parted = not forced and (bool(run.disturbed) or run.settings_differ)  # more than noise differs so far
        self._undisturbed: dict[SiteKey, float] = {}
        self._alignments = alignments

    @property
    def inputs_differ(self) -> bool:
        """True if anything that this step has read so far differs at all."""
        return bool(self._floors.flow or self._floors.parameters)

    @property
    def noise_at_inputs(self) -> bool:
        """True if anything that this step has read so far differs by noise, not by what a divergence makes of it."""
        return bool(self._calm.flow or self._calm.parameters)

    def parted_unseen(self, drift: float = 0.0) -> float:
        """Relative difference of all parameters, if it is more than rounding and steps not compared led to it; or 0.

        Args:
            drift: What it is, if this is the first step.
        """
        rounded = max((rounding(pair.baseline.dtype) for pair in self._parameters.values()), default=0.0)
        apart = drift or (self._floors.parameters if self._run.unseen_steps and not self._forced else 0.0)
        return apart if apart > rounded else 0.0

    def turned_rows(self, rows: int, *, undisturbed: bool = False) -> float:
        """Number of rows of a choice that may change, of so many; see `Floors.turned_rows`.

        Args:
            rows: Number of rows in the baseline.
            undisturbed: Count differences within noise only.
        """
        return (self._calm if undisturbed else self._floors).turned_rows(rows)

    def of(self, pair: Pair) -> float:
        """Floor of a pair: the largest relative difference that is not a finding."""
        key = pair.baseline.key
        if self._alignments and key.phase in ("backward", "grad"):  # what comes back from the loss
            for floors in (self._floors, self._calm, self._alone):
                floors.saw(ALIGNED * UNIT_ROUNDOFF["float32"] * self._alignments)
            self._alignments = 0.0
        for floors in (self._floors, self._calm, self._alone) if self._has_hidden or self._unplaced else ():
            flows = not self._forced and floors is not self._alone
            self._unplaced.enter(floors, until=pair.baseline.order, flows=flows)
            self._hidden.enter(floors, key, pair.baseline.order, flows=flows)
        if key in self._lost or (key.phase == "optimizer" and key.slot == "step"):
            return self._undisturbed.setdefault(key, self._lost.get(key, 0.0))
        self._rounded = max(self._rounded, UNIT_ROUNDOFF.get(pair.baseline.dtype, 0.0))
        if self._leaky and key.phase == "forward":
            negative = (int(entry.summary["negative"]) for entry in (pair.baseline, pair.candidate))
            self._turned_signs[key] = abs(next(negative) - next(negative))
        derived = self._derived(pair, self._floors)  # also updates what later floors depend on
        tiny = subnormal_error(pair)
        floor = self._joined(pair, self.measured(pair), derived) + tiny
        if self.parted:
            self._undisturbed[key] = min(floor, max(self._calm_floor(pair) + tiny, self._run.quiet.get(key, 0.0)))
        else:
            self._undisturbed[key] = floor
            if math.isfinite(floor):
                self._run.quiet[key] = floor
        return floor

    def undisturbed(self, pair: Pair) -> float:
        """The floor of a pair if every difference so far were noise; call `of` first. 0 for whole numbers."""
        return self._undisturbed.get(pair.baseline.key, 0.0)

    def _calm_floor(self, pair: Pair) -> float:
        derived, measured = self._derived(pair, self._calm), self.measured(pair)
        if measured is None or self._is_unmeasurable(pair):
            return max(derived, measured or 0.0)
        return max(measured, self._gated(pair, self._calm))

    def measured(self, pair: Pair, *, summed: bool = True) -> float | None:
        """Largest difference that a replica may have at this site; None if no replica has the site.

        Args:
            pair: Both sides.
            summed: Also allow for a kernel that sums its rows one after the other; see `basis`.
        """
        if self._noise is None or pair.baseline.key not in self._noise:
            return None
        key = pair.baseline.key
        constant = SAFETY * self._calibration.constant(key.phase)
        floor = constant * basis(
            pair, self._noise[key], storage=self.storage(pair),
            terms=summed_rows(pair, self._terms) if summed else 1.0,
            rounded=self._rounded, inside=self._inside(pair),
        )  # fmt: skip
        if summed:
            floor = max(floor, self._coherent_floor(pair, self._floors))
        if key.phase == "grad":
            self._gradients[key.path] = max(self._gradients.get(key.path, 0.0), floor)
        if key.phase == "optimizer":
            gradient = self._gradients.get(key.path, 0.0)
            squared = gradient * (2.0 + gradient)  # (1 + e)^2 - 1
            floor = max(floor, gradient if key.slot in FIRST_MOMENTS else squared)
        return floor

    def _inside(self, pair: Pair) -> float:
        """Unit roundoff of the shorter dtype that a tensor may have been computed in; 0 if replicas show it.

        Under autocast a matrix product rounds its operands, and the gradients that it returns, to a shorter dtype,
        whatever the dtype of the tensors around it. An equal but different formula rounds otherwise there. Forced
        replicas round the inputs of an operation in its own, longer dtype, and hardly show it. Running statistics are
        of activations whose weights autocast has rounded, in every replica alike.
        """
        of_gradient = self._forced and pair.baseline.key.phase in ("backward", "grad")
        return self._rounded if of_gradient or pair.baseline.key.slot == "buffer" else 0.0

    def saw(self, pair: Pair, size: float, *, found: bool = False) -> None:
        """Note a measured difference; later floors of the step follow from it.

        Args:
            pair: Both sides.
            size: Relative L2 difference.
            found: Whether it is a finding. It is more than noise then, as if it exceeded its undisturbed floor.
        """
        key, floors = pair.baseline.key, self._floors
        measured = self.measured(pair) or 0.0
        if not self._run.learning_differs:
            self._run.learning_differs = self._learning_differs(pair, size, measured)
        if key.phase in ("forward", "backward", "loss"):
            if self.judges_moments:
                self._moments.saw(pair, handed_on=not self._forced)
            if not self._run.learning_differs:
                self._unseen.saw(pair)
        if self._forced:
            return
        expected = None if self._noise is None else self._noise.get(key)
        self._run.exceeded_noise |= expected is not None and self._exceeds_noise(pair, size, measured)
        if key.phase == "optimizer":
            self._run.note_states([pair.baseline])
            self._run.carried[key] = 0.0 if found or size > self._undisturbed.get(key, math.inf) else size
        elif key.phase == "grad" and key.slot == "grad":
            self._seen[key.path] = pair
            self._together.saw(pair, norms_apart(pair) if key.path in self._run.permuted else size)
        on_path = key.phase in ("forward", "backward", "loss") or (key.phase == "grad" and not key.stage)
        flows = on_path and key not in self._lost
        self._note_lost(key, size, on_path=on_path)
        if flows and expected is not None and math.isfinite(max(expected)):
            self._noise_flow = max(self._noise_flow, *expected)
        if found or size > self._undisturbed.get(key, math.inf):
            self.disturb(pair)
            floors.enter(pair, size, flows=flows)
        else:
            self._calm.enter(pair, size, flows=flows and not self.parted)
            floors.enter(pair, size, flows=flows)

    def _learning_differs(self, pair: Pair, size: float, measured: float) -> bool:
        """True if what a training learns differs here by more than its own rounding and than replicas do."""
        key = pair.baseline.key
        learns = key.phase in ("loss", "update") or key[:2] in (("grad", ""), ("param", ""))
        if not learns or key.slot in ("norm", "value") or has_other_losses(pair):
            return False
        floor = max(measured, self._derived(pair, self._alone))
        permuted = key.path in self._run.permuted
        estimated = ESTIMATED_PERMUTED_NORMS if permuted and not pair.candidate.exact else 0.0
        apart = norms_apart(pair) if permuted else size
        unseen = self._unseen.behind(self._floors.flow, floor=floor, dtype=pair.baseline.dtype)
        if key.phase == "grad" and not self._forced:  # adaptive updates follow what differs within the floor
            self._alone.saw_gradient(key.path, min(apart, floor))
        return apart > max(floor + unseen, estimated)

    def _exceeds_noise(self, pair: Pair, size: float, measured: float) -> bool:
        """True if a difference is larger than those of replicas, as far as these can tell."""
        phase = pair.baseline.key.phase
        if phase not in ("update", "param") and int(finite_count(pair.baseline.summary)) < FEW:
            return phase == "loss" and math.isinf(size)  # a margin that is kept in one run alone
        # A BatchNorm that sums in another order than the replicas may differ more, and is still right.
        shown = measured if phase == "grad" else self.measured(pair, summed=False)
        return size > (shown or 0.0)

    def _note_lost(self, key: SiteKey, size: float, *, on_path: bool) -> None:
        if on_path and key in self._lost:
            self._lost_inputs[key] = self._lost_flow
            self._lost_flow = max(self._lost_flow, size)

    def disturb(self, pair: Pair) -> None:
        """Note that a pair differs by more than noise. What follows from it differs, too."""
        if self._forced:
            return
        self.parted = True
        if pair.baseline.key.phase in ("grad", "optimizer", "update"):
            self._run.disturbed.add(pair.baseline.key.path)

    def saw_other_inputs(self, size: float, *, noise: bool = False) -> None:
        """Note that the batch, the random state or a choice differs by so much, and whether that may be noise."""
        self._floors.saw(size)
        if noise:
            self._calm.saw(size)
            self._run.exceeded_noise |= self._noise is not None and size > SAFETY * self._replica_inputs
        elif size:
            self.parted = True

    def factor(self, pair: Pair, *, left_over: float) -> float:
        """Floor of a difference that is only a constant factor; see `Floors.factor`."""
        dtypes, key = (pair.baseline.dtype, pair.candidate.dtype), pair.baseline.key
        incoming = max(left_over, self._lost_inputs.get(key, self._lost_flow if key in self._lost else 0.0))
        derived = self._floors.factor(key.path, dtypes, left_over=incoming, storage=self.storage(pair))
        derived += self._run.correction(pair.baseline.key) + self._run.approximated(pair) + self._together.length(pair)
        return self._joined(pair, self.measured(pair), derived) + subnormal_error(pair)

    @property
    def judges_moments(self) -> bool:
        """Whether norms and sums are judged: both runs compute with the same parameters, as in the first step."""
        return not self._floors.parameters

    def moved(self, pair: Pair, floor: float) -> Moved | None:
        """The norm or sum of a pair, if it moved further than rounding moves it; None if that cannot be told.

        Args:
            pair: Both sides.
            floor: Floor of their relative L2 difference.
        """
        return self._moments.moved(pair, floor) if self.judges_moments else None

    def norm_limit(self, pair: Pair, floor: float) -> float | None:
        """How far the norm of a pair may move, as a part of it, given the arguments of `moved`; None if unknown."""
        return self._moments.limit(pair, floor) if self.judges_moments else None

    @property
    def least_factor(self) -> float:
        """A number that `factor` is never below, for any pair; 0 if it is not known without measuring."""
        return self._floors.least_factor if self._noise is None else 0.0

    def storage(self, pair: Pair) -> float:
        """Norm of a parameter over norm of its update; 0 for anything but updates.

        If the baseline lost its whole update to rounding, the candidate's may be as large as rounding loses: then inf.
        Nothing bounds what follows from a divergence there.
        """
        key = pair.baseline.key
        before, size = self._parameters.get(key.path), norm_of(pair.baseline.summary)
        if before is None or key.phase != "update":
            return 0.0
        whole, u = norm_of(before.baseline.summary), UNIT_ROUNDOFF.get(pair.baseline.dtype, 0.0)
        if size:
            return whole / size
        return math.inf if self.parted or norm_of(pair.candidate.summary) <= 2.0 * u * whole else 0.0

    def _joined(self, pair: Pair, measured: float | None, derived: float) -> float:
        """One floor from the measured one and the one that follows from rounding and inputs."""
        if measured is None or (pair.baseline.key.phase == "loss" and math.isinf(derived)):
            return derived
        if pair.baseline.key.phase in ("optimizer", "update"):
            if self._run.mixing:  # a whole update depends on a few inner products: of these, each replica is one draw
                measured *= ALONE / SAFETY
            if self._run.settings_differ or self._run.mixing:
                return max(measured, derived)  # replicas only show the baseline's settings
            measured = max(measured, self._run.coefficients) + self._run.correction(pair.baseline.key)
        if self._run.exceeded_noise:
            return max(measured, derived)
        flow = max(self._floors.flow, self._floors.parameters)
        closer = min(1.0, flow / self._noise_flow) if self._noise_flow else 1.0
        given_inputs = max(derived, measured * closer)
        if self._is_unmeasurable(pair):
            return given_inputs
        return max(min(measured, given_inputs), self._gated(pair, self._floors))

    def _is_unmeasurable(self, pair: Pair) -> bool:
        """True if a few replicas cannot tell how far correct runs may differ.

        For a handful of numbers, the differences of replicas are a few random draws. The first updates of adaptive
        optimizers are signs, which rarely flip, and change by their whole size if they do. What only one of several
        replicas computes at all, it may compute with the baseline's bits.
        """
        key = pair.baseline.key
        few = int(finite_count(pair.baseline.summary)) < FEW
        alone = len((self._noise or {}).get(key, ())) < min(2, len(self._calibration.replicas))
        return few or alone or is_quotient(key, self._run.adaptive) or self._nonlinear.has(pair, self.storage(pair))

    def _coherent_floor(self, pair: Pair, floors: Floors) -> float:
        inputs, own = max(floors.flow, floors.parameters), floors.own.get(pair.baseline.key.path, 0.0)
        return self._coherent.floor(pair, inputs, own)

    def _derived(self, pair: Pair, floors: Floors) -> float:
        independent = self._independent(pair, floors) + self._run.approximated(pair)
        return max(independent, self._coherent_floor(pair, floors)) if self._has_coherent else independent

    def _independent(self, pair: Pair, floors: Floors) -> float:
        key = pair.baseline.key
        dtypes = (pair.baseline.dtype, pair.candidate.dtype)
        if key.phase in ("forward", "backward"):
            self._alone.activation(key.path, dtypes)  # notes the dtype
            floor = max(floors.activation(key.path, dtypes), self._gated(pair, floors), self._summation(pair))
            if key.phase == "backward":
                floor = max(floor, self._canceled.of_gradient(pair, floors))
            return floor * self._cancellation(pair) + _added(pair, floors)
        if key.phase == "loss" or key.slot == "norm":
            canceled = self._canceled.of_loss(pair, floors) if key.phase == "loss" else 0.0
            return max(floors.scalar(self._samples), canceled)
        if key.phase == "grad":
            # One run may call the module once on all rows, where the other rounds the gradient of each call.
            each = (self._calls.get(key.path.rpartition(".")[0], 1) - 1) * UNIT_ROUNDOFF.get(pair.baseline.dtype, 0.0)
            terms = self._terms if key.stage else self._used_terms
            floor = gradient_floor(pair, terms, floors, accumulated=self._micro_steps) + each
            return floor * self._cancellation(pair)
        if key.phase in ("optimizer", "update"):
            return self._of_optimizer(pair, floors)
        buffer = max(floors.activation(key.path.rpartition(".")[0], dtypes), self._summation(pair))
        return buffer * self._canceled_means.get(key, 1.0)

    def _of_optimizer(self, pair: Pair, floors: Floors) -> float:
        """Floor of a state of an optimizer, or of an update, if it differs independently."""
        key, dtypes = pair.baseline.key, (pair.baseline.dtype, pair.candidate.dtype)
        if key.phase == "optimizer":
            if key.slot not in LINEAR_STATE:
                self._run.adaptive.add(key.path)
            in_its_basis = key.path in self._run.preconditioned and key.slot not in LINEAR_STATE and not key.group
            in_its_basis &= norms_apart(pair) < MOST_UNSEEN  # a basis changes no norm by much, a lost state does
            if key.slot in self._run.preconditioners or in_its_basis:
                # How far an inverse is apart, or an eigenvector, depends on the condition; the update is judged.
                return math.inf
            if key.slot.endswith("]") and int(pair.baseline.summary["count"]) == 1:
                return math.inf  # LBFGS keeps lists of inner products, which may cancel; their vectors are judged
            if not is_quotient(key, self._run.adaptive):
                own = floors.state(key.path, dtypes)
                return max((own + self._carried(pair, own)) * self._shrunk(pair), self._together.floor(pair))
        adaptive = key.path in self._run.adaptive or self._nonlinear.has(pair, self.storage(pair))
        is_seen = self._forced or key.phase != "update" or key.path in self._seen
        unseen = 0.0 if is_seen else gradient_floor(pair, self._terms, floors, accumulated=self._micro_steps)
        if key.path in self._run.preconditioned:  # what the optimizer rounds itself counts like a gradient's error
            unseen = max(unseen, UNIT_ROUNDOFF.get(pair.baseline.dtype, 0.0))
        floor = floors.update(key.path, dtypes[0], adaptive=adaptive, storage=self.storage(pair), unseen=unseen)
        turned = self._turned(pair, floors) if adaptive and not self._forced else 0.0
        return max(floor, turned, self._together.floor(pair)) + self._run.correction(pair.baseline.key)

    def _cancellation(self, pair: Pair) -> float:
        """How much cancels in an output, the gradient of one or of a parameter; at least 1."""
        known = self._canceled.of(pair)
        if not self._sums_unknown(pair):
            return known
        return max(known, self._run.sums.cancellation(pair.baseline, self._used_terms))

    def _sums_unknown(self, pair: Pair) -> bool:
        """True for the gradient of a weight whose layer does not show what it reads."""
        return pair.baseline.key.phase == "grad" and len(pair.baseline.shape) > 1 and not self._canceled.knows(pair)

    def _summation(self, pair: Pair) -> float:
        """Floor of values computed from a mean and a variance over many rows; 0 for anything else.

        A kernel that sums one row after the other in float32 is off by sqrt(rows) u. Measured with torch's BatchNorm on
        the CPU, channels last, for 2,048 to 200,704 rows: 0.15 to 0.83 sqrt(rows) u (0.7 u in the usual layout).
        """
        rows = summed_rows(pair, self._terms)
        return SAFETY * math.sqrt(rows) * UNIT_ROUNDOFF["float32"] if rows > 1.0 else 0.0

    def _shrunk(self, pair: Pair) -> float:
        """Ratio by which a running average shrank in the step: its error was relative to its larger size."""
        size = norm_of(pair.baseline.summary)
        return max(1.0, self._run.states.get(pair.baseline.key, 0.0) / size) if size else 1.0

    def _carried(self, pair: Pair, own: float) -> float:
        """What a running average has from the step before: most of it stays.

        In 16 bits it is rounded in each step, also in those that were not recorded. In longer dtypes what stays is far
        below what the gradients differ by, unless the average has shrunk in an earlier step, or steps that nobody
        compared have parted it: by as much as this one each, or, if its gradients are only noise, wholly.

        Args:
            pair: Both sides.
            own: How far this step may move both apart.
        """
        u = max(UNIT_ROUNDOFF.get(one.dtype, 0.0) for one in (pair.baseline, pair.candidate))
        carried = self._run.carried.get(pair.baseline.key, 0.0)
        if u <= UNIT_ROUNDOFF["float32"]:
            if terms := min(self._run.unseen_steps, UNSEEN_TERMS):
                carried = max(carried, min(own * terms, MOST_UNSEEN) if own < 1.0 else math.inf)
            return carried if carried > own else 0.0
        return carried + min(UNSEEN_ROUNDINGS * u * self._run.unseen_steps, MOST_UNSEEN)

    def _turned(self, pair: Pair, floors: Floors) -> float:
        """Floor of an adaptive update whose elements flip where the gradient is only noise."""
        seen = self._seen.get(pair.baseline.key.path)
        if seen is None:
            return 0.0
        expected = max(floors.gradients.get(pair.baseline.key.path, 0.0), rounding(seen.baseline.dtype))
        return 2.0 * math.sqrt(turned_share(seen, expected))

    def _gated(self, pair: Pair, floors: Floors) -> float:
        key = pair.baseline.key
        if key.phase not in ("forward", "backward"):
            return 0.0
        inputs = max(floors.flow, floors.parameters)
        chosen = self.choices.floor(pair, inputs=inputs, precision=floors.precision)
        if key.phase == "forward":
            return chosen
        turned = self._turned_signs.get(key._replace(phase="forward")) if self._leaky else None
        return max(chosen, floors.gated(pair.baseline.summary, pair.candidate.summary, turned))


def _added(pair: Pair, floors: Floors) -> float:
    """What the difference of a module's bias makes of its output, which may be smaller than the bias: it is added."""
    key = pair.baseline.key
    apart = floors.biases.get(key.path, 0.0) if key.phase == "forward" else 0.0
    size = norm_of(pair.baseline.summary) if apart else 0.0
    return BEYOND * apart * math.sqrt(int(pair.baseline.summary["count"])) / size if size else 0.0
