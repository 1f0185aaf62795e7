"""How the losses of micro-batches combine follows from their gradients, whatever the trainer's convention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import traindiff
from tests.analyse.merge.test_step_table import part
from traindiff.analyse.align.micro_losses import with_added_losses, with_combined_losses
from traindiff.analyse.merge.site import Part, StepTable
from traindiff.analyse.merge.step_table import step_table
from traindiff.core.summary import number


class Classifier(nn.Module):
    """Returns its loss, as the models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor, labels: Tensor, num_items: int | None = None) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.fc(x)))
        if num_items is None:
            loss = functional.cross_entropy(logits, labels)
        else:
            loss = functional.cross_entropy(logits, labels, reduction="sum") / num_items
        return {"loss": loss, "logits": logits}


def train(path: Path, parts: int, how: str, scale: float = 1.0) -> Path:
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with traindiff.record(path, model, optimizer):
        for step in range(3):
            data = torch.Generator().manual_seed(step)
            x, labels = torch.randn(12, 6, generator=data), torch.randint(5, (12,), generator=data)
            for one, wanted in zip(x.chunk(parts), labels.chunk(parts), strict=True):
                if how == "shares of a sum":
                    loss = model(one, wanted, 12)["loss"]
                else:
                    loss = model(one, wanted)["loss"]
                    loss = loss / parts if how == "means" else loss
                (loss * scale).backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("how", ["shares of a sum", "means"])
def test_both_conventions_are_equivalent_to_one_batch(how: str, turned: bool, scale: float, tmp_path: Path) -> None:
    runs = train(tmp_path / "whole", 1, "means", scale), train(tmp_path / "parts", 4, how, scale)
    found = traindiff.compare(*(runs[::-1] if turned else runs))
    assert (found.verdict, found.findings, found.unaligned) == ("equivalent", (), ((), ()))


def test_means_that_are_not_divided_are_found_at_the_loss(tmp_path: Path) -> None:
    found = traindiff.compare(train(tmp_path / "whole", 1, "means"), train(tmp_path / "parts", 4, "means, not divided"))
    first = found.first_divergence
    assert first is not None
    assert (first.step, first.path, first.slot, first.kind) == (0, "", "output.loss", "scale")
    assert "is 4 x the baseline's" in first.message


def test_runs_that_are_cut_alike_keep_what_was_observed(tmp_path: Path) -> None:
    runs = [train(tmp_path / name, 4, "shares of a sum") for name in ("a", "b")]
    found = traindiff.compare(*runs)
    assert found.verdict == "identical"
    assert {(row.phase, row.slot) for row in found.differences} >= {("forward", "output.loss")}


def two_losses(path: Path, how: str) -> Path:
    """Two heads on one body; each loss has a backward pass of its own, or both have one."""
    torch.manual_seed(0)
    body, heads = nn.Linear(6, 16), nn.ModuleList([nn.Linear(16, 5), nn.Linear(16, 5)])
    model = nn.ModuleDict({"body": body, "heads": heads})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with traindiff.record(path, model, optimizer):
        for step in range(3):
            data = torch.Generator().manual_seed(step)
            x, labels = torch.randn(12, 6, generator=data), torch.randint(5, (12,), generator=data)
            hidden = torch.tanh(body(x))
            losses = [functional.cross_entropy(head(hidden), labels) for head in heads]
            if how == "one after the other":
                losses[0].backward(retain_graph=True)
                losses[1].backward()
            elif how == "in the other order":
                losses[1].backward(retain_graph=True)
                losses[0].backward()
            elif how == "the first one":
                losses[0].backward()
            else:
                (losses[0] + losses[1]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


@pytest.mark.parametrize("turned", [False, True])
def test_losses_with_a_backward_pass_each_are_as_their_sum(turned: bool, tmp_path: Path) -> None:
    runs = two_losses(tmp_path / "each", "one after the other"), two_losses(tmp_path / "sum", "their sum")
    found = traindiff.compare(*(runs[::-1] if turned else runs))
    assert (found.verdict, found.findings) == ("equivalent", ())


@pytest.mark.parametrize("how", ["their sum", "one after the other"])
def test_a_loss_without_a_backward_pass_is_found_at_the_loss(how: str, tmp_path: Path) -> None:
    found = traindiff.compare(two_losses(tmp_path / "both", how), two_losses(tmp_path / "one", "the first one"))
    first = found.first_divergence
    assert first is not None
    assert (found.verdict, first.step) == ("diverged", 0)
    assert first.phase in ("loss", "backward")


def test_the_order_of_two_backward_passes_is_legal(tmp_path: Path) -> None:
    found = traindiff.compare(
        two_losses(tmp_path / "each", "one after the other"), two_losses(tmp_path / "turned", "in the other order")
    )
    assert (found.verdict, found.findings) == ("equivalent", ())


def scalars(
    values: list[float], *, phase: str = "forward", stage: str = "", slot: str = "output.loss", **about: Any
) -> list[Part]:
    """A number of each micro-step."""
    site = (phase, stage, "", slot)
    return [
        part(np.array(value), site=site, order=place, micro_step=place, term=place, merge="sum", **about)
        for place, value in enumerate(values)
    ]


def numbers(table: StepTable, phase: str) -> dict[tuple[str, int], float]:
    return {(key.slot, key.call): number(entry.summary) for key, entry in table.items() if key.phase == phase}


def test_a_loss_is_the_sum_of_its_parts_times_their_gradients_where_both_runs_have_these() -> None:
    whole = [*scalars([3.0]), *scalars([1.0], phase="backward")]
    parts = [*scalars([2.0, 4.0]), *scalars([0.5, 0.5], phase="backward")]

    found = with_combined_losses((step_table(whole), step_table(parts)))

    assert [numbers(table, "forward") for table in found] == [{("output.loss", 0): 3.0}] * 2
    assert [numbers(table, "backward") for table in found] == [{}] * 2  # they are used up


@pytest.mark.parametrize("turned", [False, True])
def test_a_loss_of_which_one_run_lacks_the_gradient_is_left_as_it_is(turned: bool) -> None:
    tables = (
        step_table([*scalars([3.0]), *scalars([1.0], phase="backward")]),
        step_table(scalars([2.0, 4.0])),
    )
    tables = tables[::-1] if turned else tables

    assert with_combined_losses(tables) == tables


def called(*losses: float, phase: str = "loss", stage: str = "", **about: Any) -> list[Part]:
    """Tensors on which `backward` is called one after the other."""
    return [
        part(np.array(loss), site=(phase, stage, "loss", "backward"), call=call, order=call, **about)
        for call, loss in enumerate(losses)
    ]


def test_several_calls_of_backward_are_the_sum_of_their_losses() -> None:
    found = with_added_losses((step_table(called(3.0)), step_table(called(1.0, 2.0))))

    assert [numbers(table, "loss") for table in found] == [{("backward", 0): 3.0}] * 2


def test_the_same_calls_of_backward_in_another_order_are_the_same_sum() -> None:
    found = with_added_losses((step_table(called(2.0, 1.0)), step_table(called(1.0, 2.0))))

    assert [numbers(table, "loss") for table in found] == [{("backward", 0): 3.0}] * 2


@pytest.mark.parametrize(
    ("baseline", "candidate"),
    [
        (called(1.0, 2.0), called(1.0, 2.0)),
        (called(1.0, 2.0), called(1.0, 2.1)),  # another number is to be found at its own call
        (called(3.0, phase="forward"), called(1.0, 2.0, phase="forward")),
        (called(3.0, stage="scaled"), called(1.0, 2.0, stage="scaled")),
        (called(3.0, unobserved="not"), called(1.0, 2.0, unobserved="not")),
    ],
    ids=["as many", "another one", "no losses", "of a stage", "not observed"],
)
def test_other_numbers_are_not_added_up(baseline: list[Part], candidate: list[Part]) -> None:
    tables = step_table(baseline), step_table(candidate)

    assert with_added_losses(tables) is tables


def test_a_sum_that_is_not_finite_is_unknown() -> None:
    found = with_added_losses((step_table(called(3.0)), step_table(called(1.0, float("inf")))))

    assert [numbers(table, "loss") for table in found] == [{("backward", 0): 3.0}, {}]
