"""Known mistakes of optimizers, in words."""

from __future__ import annotations

import re

MEANINGS = {
    # of bias corrections
    "no-bias-correction": "without bias correction",
    "first-correction-missing": "without the bias correction of the first moment",
    "second-correction-missing": "without the bias correction of the second moment",
    "second-correction-outside-root": "with the bias correction of the second moment outside the square root",
    "swapped-corrections": "with the bias corrections of both moments exchanged",
    "bias-corrected": "as if it corrected the bias of the average",
    "norm-corrected": "as if it corrected the bias of the infinity norm",
    # of eps
    "eps-inside-root": "as if eps were inside the square root",
    "eps-outside-root": "as if eps were outside the square root",
    "eps-before-correction": "as if eps were added before the bias of the second moment is corrected",
    "eps-after-correction": "as if eps were added after the bias of the second moment is corrected",
    "eps-in-divisor": "as if eps were added to the infinity norm when it divides, not to the gradient",
    "eps-in-divisor-only": "as if eps were added to the average of gradients only",
    "eps-added": "as if eps were added to the estimate of the variance, not its lower bound",
    # of weight decay
    "coupled-decay": "as if weight decay were added to the gradient (Adam's L2 penalty, not AdamW's decay)",
    "decoupled-decay": "as if weight decay were decoupled (AdamW's decay, not Adam's L2 penalty)",
    "no-decay": "without its weight decay",
    "decay-without-lr": "as if weight decay were not multiplied by the learning rate",
    "decay-twice": "with its weight decay applied twice",
    "decay-negative": "as if weight decay made the parameter grow",
    "decay-after-step": "as if weight decay came after the step, not before it",
    "decay-after-momentum": "as if weight decay were added after momentum, not to the gradient",
    "decay-term-missing": "without the decay of lambd",
    "lambda-without-eta": "as if lambd were not multiplied by the step size",
    # of states
    "state-one-step-late": "from moments that are one step old, without this step's gradient",
    "state-late": "from moments that are one step old, without this step's gradient",
    "first-moment-late": "from a first moment that is one step old, without this step's gradient",
    "second-moment-late": "from a second moment that is one step old, without this step's gradient",
    "norm-late": "from an infinity norm that is one step old, without this step's gradient",
    "centered-late": "from a mean gradient that is one step old, without this step's gradient",
    "schedule-one-step-late": "with the momentum of the step before",
    "schedule-product-late": "as if the product of momenta left this step out",
    "eta-one-step-late": "with the step size of one step before",
    "eta-not-used": "as if the step size did not decay",
    "state-reset": "as if it kept nothing of earlier steps",
    "step-one-behind": "as if it had counted one step less than it has",
    "step-one-ahead": "as if it had counted one step more than it has",
    "step-not-counted": "as if it did not count steps",
    "delta-after-update": "as if the average of updates contained this step's",
    "no-lr-decay": "as if the learning rate did not decay",
    "lr-decay-one-step-ahead": "as if the learning rate decayed one step early",
    # of moments
    "no-first-moment": "as if beta1 were 0: by the gradient, not its average",
    "no-second-moment": "without division by the second moment",
    "summed-first-moment": "as if the first moment were a sum: the gradient is not multiplied by 1 - beta1",
    "summed-second-moment": "as if the second moment were a sum: the squared gradient is not multiplied by 1 - beta2",
    "centered-second-moment": "as if the second moment were that of the gradient minus its average (AdaBelief)",
    "second-moment-of-update": "as if the second moment were that of the first moment, not of the gradient",
    "swapped-betas": "with beta1 and beta2 exchanged",
    "no-root": "without the square root in the divisor",
    "no-maximum": "as if the infinity norm were an average",
    "euclidean-norm": "as if the infinity norm were Adam's second moment",
    "no-amsgrad": "without amsgrad",
    "summed-average": "as if the average of squared gradients were a sum",
    "not-accumulated": "as if it kept no sum of squared gradients",
    "averaged-sum": "as if the sum of squared gradients were a mean",
    "sum-of-magnitudes": "as if it summed magnitudes of gradients, not squares",
    "no-scaling": "without division by the average of gradients",
    "swapped-averages": "with the averages of gradients and of updates exchanged",
    "delta-not-used": "as if there were no average of updates",
    "centered": "as if centered were set",
    "not-centered": "as if centered were not set",
    # of momentum
    "other-nesterov": "as if nesterov were set the other way round",
    "nesterov": "as if it had Nesterov momentum",
    "no-nesterov": "without Nesterov momentum",
    "no-gradient-term": "without the gradient's own term",
    "no-momentum": "without momentum",
    "no-momentum-schedule": "as if the momentum did not change with the steps",
    "dampened-first-step": "as if the first step were dampened, too",
    "averaged-momentum": "as if momentum were an average: the gradient is multiplied by 1 - momentum",
    "summed-momentum": "as if momentum were a sum: the gradient is not multiplied by 1 - momentum",
    "lr-inside-momentum": "as if the learning rate were inside the momentum buffer",
    "lookahead-twice": "as if Nesterov momentum looked ahead twice",
    # of rectification
    "no-rectification": "without rectification",
    "always-rectified": "as if it rectified from the first step on",
    "rectification-squared": "without the square root of the rectification",
    "unrectified-lr-missing": "as if steps without rectification had no learning rate",
    # of Rprop
    "no-backtracking": "as if it moved against the gradient where the gradient's sign changes",
    "no-growth": "as if step sizes did not grow",
    "no-upper-limit": "as if step sizes had no upper limit",
    "previous-gradient": "by the sign of the gradient of the step before",
    "factors-swapped": "with etaminus and etaplus exchanged",
    "shrinks-at-zero": "as if step sizes shrank where the gradient is 0",
    "gradient-not-dropped": "as if it moved where the gradient's sign changes",
    "lr-as-step": "as if the learning rate were the step size",
    "magnitude-kept": "by the gradient times the step size, not by its sign",
    # of Adafactor
    "no-clipping": "without clipping its update",
    "clipped-by-norm": "as if its update were clipped by the norm, not by the root mean square",
    "not-scaled-by-parameter": "as if the step size did not depend on the parameter's size",
    "no-relative-step": "as if the step size did not decay with the steps",
    "not-factored": "as if the variance were not factored",
    "fixed-decay": "as if the decay of the variance were fixed at 0.999",
    "rows-only": "as if the variance were that of rows only",
    "columns-only": "as if the variance were that of columns only",
    "not-normalized": "as if the factored variance were not divided by its mean",
    # of Muon
    "not-orthogonalized": "as if its update were normalized, not orthogonalized",
    "exactly-orthogonalized": "as if its update were orthogonalized exactly, not by Newton-Schulz iterations",
    "cubic-iteration": "by cubic Newton-Schulz iterations",
    "quintic-taylor-iteration": "by Newton-Schulz iterations with other coefficients (15/8, -5/4, 3/8)",
    "one-iteration-less": "with one Newton-Schulz iteration less",
    "one-iteration-more": "with one Newton-Schulz iteration more",
    "half-the-iterations": "with half of its Newton-Schulz iterations",
    "orthogonalized-before-momentum": "as if the gradient were orthogonalized before momentum",
    "no-lr-adjustment": "as if the learning rate did not depend on the shape",
    "lr-adjusted-as-original": "as if adjust_lr_fn were original",
    "lr-adjusted-to-adamw": "as if adjust_lr_fn were match_rms_adamw",
    "lr-adjusted-for-transpose": "as if the learning rate were adjusted for the transposed shape",
    "scaled-by-own-size": "as if its update were divided by its own norm",
    "row-normalized": "as if rows of its update were normalized, not orthogonalized",
    "sign-of-momentum": "by the sign of its momentum, not orthogonalized",
    # of LBFGS
    "no-history": "as if it kept no history: along the gradient",
    "history-unscaled": "as if the inverse Hessian began at 1, not at the scale of the latest step",
    # of inputs
    "other-sign": "in the opposite direction of what maximize asks for",
    "no-gradient": "as if there were no gradient",
    "sign-of-gradient": "as if it were given the sign of the gradient",
    "normalized-gradient": "as if the gradient were divided by its norm",
    "rows-without-gradient-move": "as if rows without a gradient moved, too",
    "averaged-parameter": "to the average of its values",
}
"""Meanings of the mistakes in the recording's stages `variant[NAME]`, in words that follow "moves it"."""

SLIPS = frozenset(
    {
        "no-bias-correction", "second-correction-missing", "swapped-corrections", "second-correction-outside-root",
        "eps-inside-root", "eps-before-correction", "coupled-decay", "decoupled-decay", "no-decay", "decay-without-lr",
        "decay-twice", "decay-negative", "swapped-betas", "state-one-step-late", "state-late", "step-one-behind",
        "step-one-ahead", "other-sign", "no-amsgrad", "other-nesterov",
    }
)  # fmt: skip
"""Mistakes that a step of its own may make, and may mean; others are likely what it is for, as in AdaBelief."""

_SETTING = re.compile(r"(?P<name>[^=]+)=(?P<value>\S+)(?: \(of (?P<where>.+)\))?")


def is_a_method(variant: str) -> bool:
    """True if a mistake is likely another method, which an optimizer has a step of its own for."""
    return variant not in SLIPS and _SETTING.fullmatch(variant) is None


def meaning(variant: str) -> str:
    """The effect of a known mistake, in words that follow "moves it"."""
    if variant.startswith("gradient x "):
        return f"as if the gradient were {variant.removeprefix('gradient x ')} x what it is"
    if variant.startswith("settings of "):
        return f"with the {variant}"
    found = _SETTING.fullmatch(variant)
    if found is None:
        return MEANINGS.get(variant, f"as if by {variant}")
    where = f", as in {found['where']}" if found["where"] else ""
    return f"as if {found['name']} were {found['value']}{where}"
