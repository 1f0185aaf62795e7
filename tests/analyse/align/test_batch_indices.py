"""Micro-batches whose inputs count from 0 again, and modules that return a sum over their micro-batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import traindiff
from traindiff.analyse.align.uneven import Unplaced
from traindiff.analyse.compare.verdict import Comparison

_STEP = 3
"""The step of a fault."""


class Graphs(nn.Module):
    """A layer over the edges of graphs, and one number per class of each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.head = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, edges: Tensor, graph: Tensor, count: int) -> Tensor:
        x = self.lift(x)
        x = torch.relu(x.index_add(0, edges[1], x[edges[0]]))
        out: Tensor = self.head(x.new_zeros(count, 8).index_add(0, graph, x))
        return out


def collated(step: int, graphs: range, nodes: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, edges, graph, labels = [], [], [], []
    for place, number in enumerate(graphs):
        generator = torch.Generator().manual_seed(100 * step + number)
        own = nodes + number % 3
        x.append(torch.randn(own, 5, generator=generator))
        edges.append(torch.randint(own, (2, 2 * own), generator=generator) + sum(map(len, x[:-1])))
        graph.append(torch.full((own,), place))
        labels.append(number % 3)
    return torch.cat(x), torch.cat(edges, 1), torch.cat(graph), torch.tensor(labels)


def of_graphs(path: Path, micro_batches: int, fault: str = "", *, nodes: int = 3) -> Path:
    torch.manual_seed(0)
    model = Graphs()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    size = 8 // micro_batches
    with traindiff.record(path, model, optimizer):
        for step in range(5):
            for micro in range(micro_batches):
                x, edges, graph, labels = collated(step, range(micro * size, (micro + 1) * size), nodes)
                if step == _STEP:
                    labels = labels.roll(1) if fault == "labels" else labels
                    edges = edges.flip(0) if fault == "edges" else edges
                    graph = graph.where(graph != 1, 0) if fault == "graph" else graph
                    graph = graph.max() - graph if fault == "reversed" else graph
                    x = x.roll(1, 0) if fault == "x" else x
                (cross_entropy(model(x, edges, graph, size), labels) / micro_batches).backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


def compared(where: Path, micro_batches: tuple[int, int], fault: str = "", *, nodes: int = 3) -> Comparison:
    one, other = micro_batches
    return traindiff.compare(
        of_graphs(where / "b", one, nodes=nodes), of_graphs(where / "c", other, fault, nodes=nodes)
    )


@pytest.mark.parametrize("micro_batches", [(1, 2), (2, 1), (2, 4), (1, 8)])
def test_numbers_of_graphs_begin_again_in_each_micro_batch(micro_batches: tuple[int, int], tmp_path: Path) -> None:
    found = compared(tmp_path, micro_batches)

    assert (found.verdict, found.findings) == ("equivalent", ())


def test_numbers_of_many_nodes_are_known_by_their_range(tmp_path: Path) -> None:
    found = compared(tmp_path, (1, 2), nodes=150)

    assert (found.verdict, found.findings) == ("equivalent", ())


@pytest.mark.parametrize(
    ("fault", "verdict", "phase"),
    [
        ("labels", "diverged", "loss"),
        ("edges", "diverged", "forward"),
        ("graph", "misaligned", "batch"),
        ("reversed", "misaligned", "batch"),
        ("x", "misaligned", "batch"),
    ],
)
def test_a_fault_beside_such_numbers_is_the_first_divergence(
    fault: str, verdict: str, phase: str, tmp_path: Path
) -> None:
    found = compared(tmp_path, (1, 2), fault)

    assert found.verdict == verdict
    assert found.first_divergence is not None
    assert (found.first_divergence.step, found.first_divergence.phase) == (_STEP, phase)


def test_a_wrong_number_is_no_missing_sample(tmp_path: Path) -> None:
    first = compared(tmp_path, (1, 2), "graph").first_divergence

    assert first is not None
    assert "input[2] holds other numbers. That the runs cut the batch differently does not explain it" in first.message


class Pool(nn.Module):
    """The sum over a batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(0)


class Pooled(nn.Module):
    """A loss with a part that is computed from a sum over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4))
        self.pool = Pool()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.net(x)
        return cross_entropy(x, y, reduction="sum") + 0.1 * self.pool(x).sum()


def of_sums(path: Path, micro_batches: int, *, rolled: bool = False, factor: float = 1.0, mean: bool = True) -> Path:
    torch.manual_seed(0)
    model = Pooled()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with traindiff.record(path, model, optimizer):
        for step in range(5):
            generator = torch.Generator().manual_seed(step)
            x, y = torch.randn(12, 6, generator=generator), torch.randint(4, (12,), generator=generator)
            y = y.roll(1) if rolled and step == _STEP else y
            for some, their in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True):
                loss = model(some, their) * (factor if step == _STEP else 1.0)
                (loss / 12 if mean else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


@pytest.mark.parametrize("mean", [True, False])
def test_a_sum_over_the_batch_may_be_divided_among_micro_batches(mean: bool, tmp_path: Path) -> None:
    baseline = of_sums(tmp_path / "b", 1, mean=mean)

    for micro_batches in (2, 3):
        found = traindiff.compare(baseline, of_sums(tmp_path / f"{micro_batches}", micro_batches, mean=mean))
        assert (found.verdict, found.findings) == ("equivalent", ())
        assert not any("representation" in note for note in found.notes)

    rolled = traindiff.compare(baseline, of_sums(tmp_path / "rolled", 2, mean=mean, rolled=True))
    assert rolled.verdict == "misaligned"
    assert rolled.first_divergence is not None
    assert (rolled.first_divergence.step, rolled.first_divergence.phase) == (_STEP, "batch")

    halved = traindiff.compare(baseline, of_sums(tmp_path / "halved", 2, mean=mean, factor=0.5))
    assert halved.verdict == "diverged"
    assert halved.first_divergence is not None
    assert (halved.first_divergence.step, halved.first_divergence.kind) == (_STEP, "scale")


def test_advice_on_batch_axes_names_the_same_modules_in_both_forms() -> None:
    (note,) = Unplaced(pooled={"a output[0]": None}, axes={"a": 1, "b": 0}).notes()

    assert 'record(batch_axis={"a": 1, "b": 0})' in note
    assert "--batch-axis 'a=1' --batch-axis 'b=0'" in note
