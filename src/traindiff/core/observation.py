"""One tensor seen at one site, at one moment: everything about it but its numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from traindiff.core.shards import Shard

Merge = Literal["shard", "sum", "mean"]
"""How the observations of one site in one step become one.

* `shard`: disjoint parts of a global tensor.
* `sum`: terms of a sum, e.g. the losses on which `backward` was called.
* `mean`: terms of a mean weighted by `weight`, e.g. the logged losses of micro-batches.
"""

ALL_GRADIENTS = "(all parameters)"
"""Path of what is done to the gradients of several parameters together."""

MASTER = "master"
"""Slot, in the phase `param`, of the weights that an optimizer steps on, where the model computes with others."""

LOSS_SCALE = "loss_scale"
"""Path, in the phase `loss`, of the scale by which a loss is multiplied before `backward`."""

SAMPLE = "sample"
"""Stage of one sample of a batch (phase `batch`); its `call` is its place in the micro-batch."""

ITSELF = "traindiff"
"""Path, in the phase `batch`, of what traindiff could not do; the slot says which part of it."""

TAP_FAILED = "the {tap} tap failed"
"""How the reason begins where a tap, which is the slot then, observes nothing more."""

NO_REPLICA = "this is no full replica"
"""How the reason begins where a training was not perturbed as it should have been."""

NOT_CALLED = "no output was observed"
"""How the reason begins for a module of which not even a call was seen."""

UNSEEN = "not observed in this step"
"""How the reason begins where a step was not fully observed, in all that one phase has at a path; at `ITSELF`, in all
that it has."""

MAYBE_UNSEEN = "maybe not observed in this step"
"""The same where there may have been nothing to observe: worth a word only where the other run has something."""

NO_GRADIENT = "no gradient"
"""How the reason begins where an optimizer stepped and there was no gradient to observe."""

SKIPPED = "skipped"
"""Slot, in the phase `optimizer`, of the mark of a step that a loss scaler left out."""

RECOMPUTED = "recomputed"
"""Stage of what activation checkpointing computes a second time."""

OPERATOR = "operator"
"""Stage of what one operator was given and returned, inside a module that was zoomed into; its path is
`MODULE/OPERATOR[N]`."""

RECOMPUTED_OPERATOR = "operator recomputed"
"""The same of an operator that activation checkpointing runs a second time."""

OPERATOR_STAGES = frozenset({OPERATOR, RECOMPUTED_OPERATOR})

BOUNDARY = "boundary"
"""Stage of what one stage of a pipeline hands to the next: no site of the whole model."""

PLACE = 1 << 24
"""`order // PLACE` is a place in the dataflow of a model that is divided into the stages of a pipeline.

Place 0 is before the first forward pass, 1 + s the forward pass of stage s, 2 S - s its backward pass, of S stages, and
2 S + 1 what comes after. Without a pipeline all is in place 0.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One tensor at one site, at one (step, micro-step, phase).

    Attributes:
        step: Calls of `optimizer` completed before, from 0.
        micro_step: Calls of `backward` in this step before this observation belongs to the next.
        optimizer: Name of the optimizer that counts `step`.
        phase: One of `traindiff.core.site.PHASES`.
        stage: Part of a phase: `micro` (gradient of one micro-batch), `reduced`, `unscaled` and `clipped`
            (gradients between the backward pass and the optimizer), `before` (parameter before the step),
            `recomputed` (forward pass repeated by activation checkpointing), `sample` (one sample of a
            batch), `evaluation` (forward pass without gradients), `boundary` (handed from one stage of a
            pipeline to the next), `after`, `operator` and `operator recomputed` (one operator inside a module), or
            empty.
        path: Canonical dotted path of the module or parameter.
        slot: Which tensor of it: `output[0]`, `grad`, `exp_avg`.
        call: How often this module had been called before in this micro-step.
        order: Position in execution order within the step; see `PLACE`.
        dtype: Name of the dtype as torch spells it without its prefix, e.g. `bfloat16`.
        shard: Which elements of the global tensor, with the batch axis in front.
        merge: How it merges with the other observations of its site in the step.
        weight: Weight in a weighted mean, e.g. samples in the micro-batch.
        factor: What the engine multiplied this tensor by, relative to the gradient of the loss
            over the global batch.
        term: Which of the terms of a sum or mean this is. Parts of one site with the same micro-step, place and
            term are copies, e.g. on tensor-parallel ranks that work on the same samples.
        scaled: Whether it is also multiplied by the loss scale, which the step has at the site `loss_scale`.
        unobserved: Why there are no numbers; empty for an observed tensor.
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
