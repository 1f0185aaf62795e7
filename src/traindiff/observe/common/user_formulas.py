"""Formulas of optimizers that users declare, so that their updates can be replayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from traindiff.errors import ConfigError, Problem

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class UserFormula:
    """The formula of a class of optimizers.

    Attributes:
        after: A function of parameter, gradient, state and settings that returns the parameter after the step.
        needs_whole: True if an element depends on others.
    """

    after: Callable[..., Any]
    needs_whole: bool


FORMULAS: dict[type, UserFormula] = {}
"""The formulas that were declared, by the class of their optimizers."""


def formula(kind: type, *, whole: bool = False) -> Callable[[Function], Function]:
    """Declare how an optimizer of your own changes a parameter, so that recordings judge its updates.

    ```python
    from traindiff.testing import formula


    @formula(Lion)
    def lion(parameter, gradient, state, settings):
        beta1, beta2 = settings["betas"]
        direction = beta1 * state.get("exp_avg", 0.0) + (1 - beta1) * gradient
        return parameter * (1 - settings["lr"] * settings["weight_decay"]) - settings["lr"] * direction.sign()
    ```

    In some steps, `traindiff.record` computes the function in float64 with what the optimizer finds, and compares the
    result with what the optimizer did (traindiff explain replay). It computes the largest difference that rounding
    allows along with it. So the arguments are not tensors, but numbers that pass on their rounding error. They support
    `+ - * / **`, `abs`, `sqrt`, `rsqrt`, `square`, `sign`, `maximum`, `minimum`, `clamp`, `mean`, `norm` and `mT`, as
    methods and as functions of torch.

    Args:
        kind: The class of the optimizers. A later declaration for the class replaces an earlier one.
        whole: Whether an element of the update depends on other elements, as a norm or a matrix product does. Then the
            function is called with whole parameters of at most 4,194,304 elements, in their own shape, and parameters
            of which a rank holds a part are not replayed. By default it is called with flat ranges of parameters.

    Returns:
        A decorator that returns the function as it is. The function is called with

        * `parameter` and `gradient` (unscaled), float64, [elements] or of the parameter's shape;
        * `state`: what `optimizer.state[parameter]` held before the step, by name: tensors with as many elements as
          the parameter like the parameter, others only with `whole`; numbers and tensors with one element as numbers.
          It is empty in the first step;
        * `settings`: the parameter's entry of `optimizer.param_groups`, without `params`.

        It must not change them. It returns the parameter after the step. An expression that begins with the parameter
        is stored in the parameter's dtype after each operation, as in `p.mul_(...).sub_(...)`. If the function raises,
        the parameter is not replayed, and the recording says why.

    Raises:
        ConfigError: `kind` is not a class.
    """
    given: object = kind
    if not isinstance(given, type):
        problem = Problem(
            where=f"formula({kind!r})", what="is not a class of optimizers.", fix="Write the class: @formula(Lion)."
        )
        raise ConfigError("traindiff.testing.formula", [problem], consequence="no formula was declared")

    def declare(function: Function) -> Function:
        FORMULAS[kind] = UserFormula(after=function, needs_whole=whole)
        return function

    return declare
