"""One tensor at one site in one step: everything about it except its numbers."""

from __future__ import annotations

from typing import Literal, NamedTuple

from traindiff.core.shards import Shard

Merge = Literal["shard", "sum", "mean"]
"""How several observations of one site in one step are merged into one.

* `shard`: disjoint parts of a global tensor.
* `sum`: terms of a sum, e.g. the losses on which `backward` was called.
* `mean`: terms of a mean weighted by `weight`, e.g. the logged losses of micro-batches.
"""

ALL_GRADIENTS = "(all parameters)"
"""Path of operations on the gradients of several parameters together."""

MASTER = "master"
"""Slot, in the phase `param`, of the optimizer's own copy of the weights, if the model computes with another copy."""

LOSS_SCALE = "loss_scale"
"""Path, in the phase `loss`, of the factor by which the loss is multiplied before `backward`."""

SAMPLE = "sample"
"""Stage of one sample of a batch (phase `batch`); its `call` is its place in the micro-batch."""

ITSELF = "traindiff"
"""Path, in the phase `batch`, of a failure of traindiff itself; the slot names the part that failed."""

TAP_FAILED = "the {tap} tap failed"
"""Begin of the reason if a tap failed and observes nothing more; the slot is the tap."""

NO_REPLICA = "this is no full replica"
"""Begin of the reason if a training was not perturbed as it should have been."""

NOT_CALLED = "no output was observed"
"""Begin of the reason for a module of which not even a call was seen."""

UNSEEN = "not observed in this step"
"""Begin of the reason if a phase was not fully observed at a path in this step; at `ITSELF`, the whole step."""

MAYBE_UNSEEN = "maybe not observed in this step"
"""The same if perhaps there was nothing to observe: reported only if the other run observed something."""

NO_GRADIENT = "no gradient"
"""Begin of the reason if an optimizer stepped without a gradient to observe."""

REPLACED = f"{NO_GRADIENT}: the optimizer holds the tensor that had this place in the model before"
"""The reason if a new tensor took the place of a parameter in the model, and its optimizer goes on with the old one."""

TAKEN_OUT = f"{NO_GRADIENT}: the optimizer no longer holds it, although it still has a gradient"
"""The reason if a parameter was taken out of the groups of its optimizer, and goes on to require a gradient."""

SKIPPED = "skipped"
"""Slot, in the phase `optimizer`, that marks a step that the loss scaler skipped."""

RECOMPUTED = "recomputed"
"""Stage of tensors that activation checkpointing computes a second time."""

BEFORE = "before"
"""Stage of a parameter as an evaluation of the loss finds it: the first of a step, or a later one."""

EDITED = "edited"
"""Stage of a parameter as a step found it, if something else than the optimizer changed it since the step before."""

BY_HAND = "by hand"
"""Engine, in `mesh` of `run.json`, of a model that does not show why there are several ranks."""

FLIPPED = "flipped"
"""Stage of the number of the one bit of a tensor that changed in memory, though nothing wrote to it."""

REPEATED = "repeated"
"""Slot, in this stage, of the flag that an operator returned one other number than when it ran again, twice."""

CARRIED = "carried"
"""Stage of the flag that a backward pass has added to a gradient that nothing cleared since the step before read it."""

CLEARED = "cleared"
"""Stage of the number of the last micro-step whose gradients were cleared before any step read them."""

MODE = "mode"
"""Stage of the flag `training` of a module that differs from what it was in the step before, or at the beginning."""

DRAWS = "draws"
"""Stage of the flag that a module drew random numbers in a forward pass of an evaluation, in evaluation mode."""

BROADCAST = "broadcast"
"""Stage of the number N of outputs of the model that a loss compares with N numbers each, in a tensor of N x N.

The slot is `column` for outputs of the shape (N, 1), and `vector` for (N,)."""

REPLAYED = "replayed"
"""Stage of the update that an optimizer's formula gives, and of findings about it."""

ALIGNMENTS = "alignments"
"""Stage of the size of a loss that sums over alignments in logarithms (CTC): positions x ln(classes).

Its largest sums of logarithms have about this size, and their rounding is a relative error of its gradient."""

ESTIMATE = "estimate"
"""Stage of an estimate that a module divides its weight by: relative to what a further iteration gives, about 1."""

OPERATOR = "operator"
"""Stage of the inputs and outputs of one operator inside a module; its path is `MODULE/OPERATOR[N]`."""

RECOMPUTED_OPERATOR = "operator recomputed"
"""The same for an operator that activation checkpointing runs a second time."""

OPERATOR_STAGES = frozenset({OPERATOR, RECOMPUTED_OPERATOR})

WITNESS = "witness"
"""Stage of both sides of the identity that a gradient is checked by; see `traindiff.core.witness`."""

PRODUCT = "product"
"""Stage of the check of one matrix product or convolution; its path is that of the operator."""

RECOMPUTED_PRODUCT = "product recomputed"
"""The same for a product that activation checkpointing computes a second time."""

WITNESSED_PRODUCT = "witness product"
"""Stage of the check of what a linear layer returned, or of the gradient of its input; its path is the layer's."""

PRODUCT_STAGES = frozenset({PRODUCT, RECOMPUTED_PRODUCT, WITNESSED_PRODUCT})

RESIDUAL, ERROR, ALLOWED, WORST_ROW, MEDIAN, FORMAT = "residual", "error", "allowed", "row", "median", "format"
"""Ends of the slots of a product's check: see FORMAT.md."""

BOUNDARY = "boundary"
"""Stage of tensors that one pipeline stage sends to the next; the whole model has no such site."""

PLACE = 1 << 24
"""`order // PLACE` is a place in the dataflow of a model that is divided into pipeline stages.

With S stages, place 0 is before the first forward pass, 1 + s is the forward pass of stage s, 2 S - s its backward
pass, and 2 S + 1 comes after the last one. Without a pipeline, everything is in place 0.
"""


class Observation(NamedTuple):
    """One tensor at one site, at one (step, micro-step, phase). A tuple, because a step has thousands of them.

    Attributes:
        step: Number of completed calls of `optimizer`.
        micro_step: Number of the micro-step within the evaluation, counted by calls of `backward`.
        evaluation: Number of the evaluation of the loss within the step, which is one evaluation as a rule. An
            optimizer that is given a closure may evaluate the loss several times, at other parameters each time.
            Micro-steps of one evaluation are terms of one gradient; those of several evaluations are not.
        optimizer: Name of the optimizer that counts `step`.
        phase: One of `traindiff.core.site.PHASES`.
        stage: Part of a phase: `micro` (gradient of one micro-batch), `reduced`, `unscaled` and `clipped`
            (gradients between the backward pass and the optimizer), `before` (parameter before the step),
            `recomputed` (forward pass repeated by activation checkpointing), `sample` (one sample of a
            batch), `evaluation` (forward pass without gradients), `boundary` (handed from one stage of a
            pipeline to the next), `witness`, `after`, `operator` and `operator recomputed` (one operator inside a
            module), `product` and `product recomputed` (the check of a matrix product), or empty.
        path: Canonical dotted path of the module or parameter.
        slot: Which tensor of it: `output[0]`, `grad`, `exp_avg`.
        call: Number of earlier calls of this module in this micro-step.
        order: Position in execution order within the step; see `PLACE`.
        dtype: Name of the dtype as torch spells it without its prefix, e.g. `bfloat16`.
        shard: Elements of the global tensor that this one holds, with the batch axis in front.
        merge: How it is merged with the other observations of its site in the step.
        weight: Weight in a weighted mean, e.g. samples in the micro-batch.
        factor: Factor by which the engine multiplied this tensor, relative to the gradient of the loss over the
            global batch.
        term: Number of this term of a sum or mean. Parts of one site with the same micro-step, place and term are
            copies, e.g. on tensor-parallel ranks that work on the same samples.
        scaled: Whether it is also multiplied by the loss scale, which is recorded at the site `loss_scale`.
        unobserved: The reason why there are no numbers; empty for an observed tensor.
    """

    step: int
    micro_step: int
    optimizer: str
    phase: str
    stage: str
    path: str
    slot: str
    call: int
    order: int
    dtype: str
    shard: Shard
    merge: Merge = "shard"
    weight: float = 1.0
    factor: float = 1.0
    term: int = 0
    scaled: bool = False
    unobserved: str = ""
    evaluation: int = 0


_OF_EVALUATIONS = frozenset({"batch", "forward", "loss", "backward", "grad"})


def is_of_evaluation(phase: str, stage: str) -> bool:
    """True if observations of this phase and stage belong to one evaluation of the loss, and not to the whole step."""
    return phase in _OF_EVALUATIONS or (phase == "param" and stage == BEFORE)
