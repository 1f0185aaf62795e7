"""What is taken out of a training that may vary: dropout, kernels that are not deterministic, threads."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from traindiff.run.verify.determinism import CONTROLS, controlled, take_out_dropout


def test_functions_drop_nothing_inside_and_everything_is_as_it_was_afterwards() -> None:
    x = torch.ones(4, 8, 16)
    threads = torch.get_num_threads()
    with controlled(tuple(CONTROLS)):
        assert torch.get_num_threads() == 1
        assert torch.are_deterministic_algorithms_enabled()
        for drop in (functional.dropout, functional.alpha_dropout, torch.dropout):
            assert torch.equal(drop(x, 0.5, True), x)
        assert torch.equal(functional.dropout(x, p=0.5), x)
        fused = functional.scaled_dot_product_attention
        assert torch.equal(fused(x, x, x, dropout_p=0.9), fused(x, x, x))
    assert torch.get_num_threads() == threads
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.equal(functional.dropout(x, 0.5), x)


def test_without_dropout_nothing_else_is_changed() -> None:
    x = torch.ones(4, 8)
    with controlled(("dropout",)):
        assert not torch.are_deterministic_algorithms_enabled()
        assert torch.equal(functional.dropout(x, 0.5), x)


def test_modules_that_drop_are_told_not_to() -> None:
    model = nn.ModuleList(
        [nn.Dropout(0.5), nn.AlphaDropout(0.5), nn.MultiheadAttention(8, 2, dropout=0.5), nn.LSTM(4, 4, 2, dropout=0.5)]
    )
    take_out_dropout(model)

    x = torch.ones(3, 5, 8)
    assert torch.equal(model[0](x), x)
    assert torch.equal(model[1](x), x)
    first, again = (model[2](x, x, x)[0] for _ in range(2))
    assert torch.equal(first, again)
    first, again = (model[3](x[..., :4])[0] for _ in range(2))
    assert torch.equal(first, again)
