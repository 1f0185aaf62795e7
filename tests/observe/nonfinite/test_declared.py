"""NaN and infinities that the user declares are no origin; what is computed from them must be finite, or is found."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import traindiff
from tests.observe.nonfinite.trainings import found, train

MISSING = torch.tensor([[1.0, math.nan, 3.0], [math.nan, 1.0, 2.0]])


class Filled(nn.Module):
    """Puts 0 in place of missing values, or forgets to."""

    def __init__(self, *, forgets: bool = False) -> None:
        super().__init__()
        self.forgets = forgets
        self.first, self.fc = nn.Identity(), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        result: Tensor = self.fc(x * 1.0 if self.forgets else x.nan_to_num(0.0))
        return result


class Distances(nn.Linear):
    """The nearest of some distances: +inf is out of reach."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).masked_fill(torch.tensor([True, False]), math.inf)


class Nearest(nn.Module):
    def __init__(self, *, forgets: bool = False) -> None:
        super().__init__()
        self.distances, self.forgets = Distances(3, 2), forgets

    def forward(self, x: Tensor) -> Tensor:
        distances: Tensor = self.distances(x)
        return distances.sum(-1) if self.forgets else distances.amin(-1)


def test_missing_values_in_the_batch_are_found_with_the_words_that_declare_them() -> None:
    message = found(make=Filled, batch=MISSING)

    assert message.endswith(
        "The batch: (root) input[0] holds NaN when the forward pass begins. "
        'If that is meant, say so: nonfinite="(root) input[0]".'
    )
    watch, printed = train(make=Filled, batch=MISSING, nonfinite="(root) input[0]")
    assert (watch.origins, printed) == ([], "")  # also where the same tensor is given to another module


def test_nan_that_spreads_from_a_declared_site_is_found_and_the_message_says_where_it_was_meant() -> None:
    message = found(make=lambda: Filled(forgets=True), batch=MISSING, nonfinite=["(root) input[0]"])

    assert (
        "fc input[0] holds NaN, passed on or made by the code of (root) (Filled) itself, between first and fc: what "
        "that was given, and every output before it, is finite except where it need not be ((root) input[0], first "
        "input[0] and first output)."
    ) in message
    message = found(make=lambda: Filled(forgets=True), batch=MISSING, nonfinite=["(root) *", "fc input*"])
    assert "fc output holds NaN; what Linear was given is finite except where it need not be (fc input[0])" in message


def test_infinite_distances_are_declared_and_what_is_made_of_them_is_judged() -> None:
    batch = torch.ones(2, 3)

    assert "distances output holds infinity; what Distances was given is finite" in found(make=Nearest, batch=batch)
    assert train(make=Nearest, batch=batch, nonfinite="distances output")[1] == ""
    message = found(make=lambda: Nearest(forgets=True), batch=batch, nonfinite="distances output")
    assert "(root) output holds infinity" in message
    message = found(make=lambda: Nearest(forgets=True), batch=batch, nonfinite="* output")
    assert (
        "The loss is infinite: every output of a module is finite except where it need not be (distances output and "
        "(root) output), so the loss function made it, or it comes from there."
    ) in message


def test_a_mask_that_is_declared_may_still_hold_no_nan() -> None:
    assert "(root) input[0] holds NaN" in found(make=Filled, batch=MISSING, masks="*")


def test_a_buffer_that_is_declared_may_become_nan() -> None:
    class Bank(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 2)
            self.register_buffer("bank", torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            self.bank.fill_(math.nan)
            return super().forward(x)

    batch = torch.ones(2, 3)
    assert "The buffer 0.bank holds NaN after the step" in found(make=lambda: nn.Sequential(Bank()), batch=batch)
    assert train(make=lambda: nn.Sequential(Bank()), batch=batch, nonfinite="0.bank buffer")[1] == ""


def test_a_gradient_that_is_nan_is_found_although_all_sites_are_declared() -> None:
    class Steep(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            hidden = super().forward(x)
            return torch.where(hidden.detach() > math.inf, (hidden * 0).sqrt(), hidden * 0 + 1)

    message = found(make=lambda: Steep(3, 2), batch=torch.ones(2, 3), nonfinite="*")
    assert "gradient" in message


@pytest.mark.parametrize("value", [3, [None]])
def test_a_declaration_that_is_none_is_an_error(value: Any) -> None:
    with pytest.raises(traindiff.ConfigError, match=r'Write nonfinite=\["\(root\) input\[0\]"\]'):
        traindiff.watch(nn.Linear(2, 2), nonfinite=value)
