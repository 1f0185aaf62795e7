"""Training is bitwise the same with and without a watch."""

from __future__ import annotations

import gc
import io
import warnings
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import traindiff
from tests.observe.hooks.test_undisturbed import assert_bitwise_equal
from tests.observe.hooks.trainings import TRAININGS
from tests.observe.nonfinite.trainings import Net


@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_computes_the_same_bits_with_and_without_a_watch(name: str) -> None:
    expected = TRAININGS[name](lambda *_: nullcontext())
    printed = io.StringIO()

    def watch(model: Any, optimizer: Any) -> Any:
        return traindiff.watch(model, optimizer, output=None, file=printed, keep_inputs=True)

    actual = TRAININGS[name](watch)

    assert_bitwise_equal(actual, expected)
    assert "holds" not in printed.getvalue()


def numbers(broken: bool, watch: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), Net())
    optimizer = torch.optim.AdamW(model.parameters())
    found = []
    with watch(model, optimizer), warnings.catch_warnings():
        warnings.simplefilter("ignore", traindiff.TraindiffWarning)
        for step in range(4):
            model[2].steep.factor = float("inf") if broken and step == 2 else 1.0
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found += [loss.detach(), *(one.detach().clone() for one in model.parameters()), torch.get_rng_state()]
    return found


def test_a_training_that_breaks_goes_on_unchanged_to_the_bit_where_only_warnings_are_wanted(tmp_path: Path) -> None:
    expected = numbers(True, lambda *_: nullcontext())
    actual = numbers(
        True,
        lambda model, optimizer: traindiff.watch(
            model, optimizer, on_detect="warn", output=tmp_path, file=io.StringIO()
        ),
    )

    assert [one.numpy().tobytes() for one in actual] == [one.numpy().tobytes() for one in expected]
    assert list(tmp_path.iterdir())


def test_a_watch_leaves_no_hook_and_no_reference() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with traindiff.watch(model, optimizer, output=None) as watch:
        inputs = torch.randn(3, 8)
        model(inputs).sum().backward()
        optimizer.step()
        kept = weakref.ref(inputs)
        del inputs
        gc.collect()
        assert kept() is None

    assert not [
        hook
        for module in model.modules()
        for name, hooks in vars(module).items()
        if name.endswith("_hooks")
        for hook in hooks
    ]
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    del watch, optimizer
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_nothing_is_kept_of_a_step_that_has_ended_even_if_inputs_are_kept() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alive: list[Any] = []
    model[0].register_forward_hook(lambda _, __, output: alive.append(weakref.ref(output)))
    with traindiff.watch(model, optimizer, output=None, keep_inputs=True):
        for _ in range(2):
            model(torch.randn(3, 8)).sum()  # without a backward pass
            optimizer.step()
        gc.collect()
        assert [one() for one in alive] == [None, None]


def test_a_copy_of_a_watched_model_is_not_watched() -> None:
    import copy

    model = Net()
    with traindiff.watch(model, output=None):
        copied = copy.deepcopy(model)
        copied.scale.factor = float("inf")
        copied(torch.randn(3, 8))
