"""What data loaders yield is recorded, compared, and left as it is."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from typer.testing import CliRunner

import traindiff
from tests.observe.hooks.reading import row, rows
from traindiff.cli.commands import app
from traindiff.core.observation import SAMPLE
from traindiff.core.site import PHASES
from traindiff.core.tap_registry import OBSERVABLE, OBSERVED_BY_DEFAULT
from traindiff.core.torch_compat.training import loader_iterators
from traindiff.observe.torch.hooks import dataloader

WIDTH, SAMPLES, BATCH = 4, 12, 3
WITH_LOADER = (*OBSERVED_BY_DEFAULT, "dataloader")
NEXT = loader_iterators().__next__

Outcome = list[Tensor]


def samples() -> Tensor:
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))


def data_set() -> TensorDataset:
    return TensorDataset(samples(), torch.arange(SAMPLES))


def train(
    path: Path | None,
    loader: Any,
    *,
    inputs_of: Callable[[Any], Tensor] = lambda batch: batch[0],
    accumulate: int = 1,
    observe: Sequence[str] = WITH_LOADER,
    **options: Any,
) -> Outcome:
    """Train on what a loader yields; without a path, without a recording."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    optimizer = SGD(model.parameters(), lr=0.1)
    losses: Outcome = []
    recording = nullcontext() if path is None else traindiff.record(path, model, optimizer, observe=observe, **options)
    with recording:
        for number, batch in enumerate(loader):
            loss = model(inputs_of(batch)).square().mean()
            loss.backward()
            losses.append(loss.detach())
            if (number + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
    return [*losses, *(parameter.detach().clone() for parameter in model.parameters()), torch.get_rng_state()]


def loaded(path: Path, **where: Any) -> list[tuple[int, int, str, str, int]]:
    """Step, micro-step, path, slot and rows of each batch that a loader has yielded."""
    return [
        (seen.step, seen.micro_step, seen.path, seen.slot, seen.shard.offset[0])
        for seen, _ in rows(path, stage="loaded", **where)
    ]


class Numbers(IterableDataset[Tensor]):
    """Yields samples one after the other; workers take turns."""

    def __iter__(self) -> Iterator[Tensor]:
        worker = torch.utils.data.get_worker_info()
        step = worker.num_workers if worker else 1
        yield from samples()[worker.id if worker else 0 :: step]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["map", "iterable", "persistent"])
def test_every_batch_is_recorded_where_the_training_receives_it(kind: str, workers: int, tmp_path: Path) -> None:
    if kind == "persistent" and not workers:
        pytest.skip("only workers persist")
    dataset: Dataset[Any] = Numbers() if kind == "iterable" else data_set()

    def loader() -> DataLoader[Any]:
        return DataLoader(
            dataset, batch_size=BATCH, num_workers=workers, persistent_workers=kind == "persistent",
            generator=torch.Generator().manual_seed(2),
        )  # fmt: skip

    def inputs_of(batch: Any) -> Tensor:
        found: Tensor = batch if kind == "iterable" else batch[0]
        return found

    expected = train(None, loader(), inputs_of=inputs_of)
    actual = train(tmp_path / "run", loader(), inputs_of=inputs_of, strict=True)

    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))
    assert [(step, path, rows) for step, _, path, slot, rows in loaded(tmp_path / "run", slot="batch[0]")] == [
        (step, "dataloader", 0) for step in range(SAMPLES // BATCH)
    ]
    for step in range(SAMPLES // BATCH):
        seen = {stage: rows(tmp_path / "run", step=step, phase="batch", stage=stage) for stage in ("loaded", SAMPLE)}
        model = [one for one in rows(tmp_path / "run", step=step, phase="batch", stage="") if one[0].path == ""]
        assert seen["loaded"][0][1]["fingerprint"] == model[0][1]["fingerprint"]
        by_path = {
            path: [int(one["fingerprint"]) for where, one in seen[SAMPLE] if (where.path, where.slot) == path]
            for path in (("dataloader", "batch[0]"), ("", "input[0]"))
        }
        assert len(by_path["", "input[0]"]) == BATCH
        assert by_path["dataloader", "batch[0]"] == by_path["", "input[0]"]


def test_micro_batches_are_the_rows_of_one_batch(tmp_path: Path) -> None:
    train(tmp_path / "run", DataLoader(data_set(), batch_size=BATCH), accumulate=2)

    assert loaded(tmp_path / "run", slot="batch[0]") == [
        (step, micro_step, "dataloader", "batch[0]", BATCH * micro_step) for step in range(2) for micro_step in range(2)
    ]
    assert {seen.call for seen, _ in rows(tmp_path / "run", stage="loaded")} == {0}


def test_smaller_micro_batches_are_the_same_batch(tmp_path: Path) -> None:
    plain = ("batch", "dataloader", "samples")
    train(tmp_path / "whole", DataLoader(data_set(), batch_size=6), observe=plain)
    train(tmp_path / "split", DataLoader(data_set(), batch_size=3), observe=plain, accumulate=2)

    assert "dataloader" not in str(traindiff.compare(tmp_path / "whole", tmp_path / "split"))


@pytest.mark.parametrize("size", [BATCH, None])
def test_another_order_of_samples_is_found_at_the_loader(size: int | None, tmp_path: Path) -> None:
    order = [5, 1, 0, 3, 4, 2, *range(6, SAMPLES)]
    batches = [order[first : first + BATCH] for first in range(0, SAMPLES, BATCH)]
    held = data_set()
    whole = [[torch.stack(column) for column in zip(*(held[i] for i in one), strict=True)] for one in batches]
    loader: DataLoader[Any] = (
        DataLoader(held, batch_sampler=batches) if size else DataLoader(whole, batch_size=None)  # type: ignore[arg-type]
    )
    train(tmp_path / "baseline", DataLoader(data_set(), batch_size=BATCH))
    train(tmp_path / "candidate", loader)

    comparison = traindiff.compare(tmp_path / "baseline", tmp_path / "candidate")

    assert comparison.verdict == "misaligned"
    first = comparison.findings[0]
    assert (first.kind, first.step, first.path, first.slot) == ("batch", 0, "dataloader", "batch[0]")
    assert first.message == (
        "The batch differs: dataloader batch[0] holds other samples: 1 of its 3 samples is none of the baseline's, "
        "first number 0 of rank 0 in micro-step 0. It differs by 1.2 of the baseline's size (relative L2)."
    )


def test_samples_in_another_order_within_a_batch_are_said_to_be(tmp_path: Path) -> None:
    batches = [[2, 0, 1], *([first, first + 1, first + 2] for first in range(3, SAMPLES, 3))]
    train(tmp_path / "baseline", DataLoader(data_set(), batch_size=BATCH))
    train(tmp_path / "candidate", DataLoader(data_set(), batch_sampler=batches))

    comparison = traindiff.compare(tmp_path / "baseline", tmp_path / "candidate")

    assert comparison.findings[0].message == (
        "The batch differs: dataloader batch[0] holds the same samples in another order: the baseline's 2, 0, 1."
    )


def test_what_differs_between_loader_and_model_is_found_at_the_model(tmp_path: Path) -> None:
    train(tmp_path / "baseline", DataLoader(data_set(), batch_size=BATCH))
    train(tmp_path / "candidate", DataLoader(data_set(), batch_size=BATCH), inputs_of=lambda batch: batch[0] * 1.5)

    comparison = traindiff.compare(tmp_path / "baseline", tmp_path / "candidate")

    assert comparison.verdict == "misaligned"
    assert comparison.findings[0].path == ""
    assert "dataloader" not in {one.path for one in comparison.findings}


@pytest.mark.parametrize("without", ["baseline", "candidate"])
def test_a_run_that_was_not_asked_for_it_is_no_difference(without: str, tmp_path: Path) -> None:
    for name in ("baseline", "candidate"):
        observe = OBSERVED_BY_DEFAULT if name == without else WITH_LOADER
        train(tmp_path / name, DataLoader(data_set(), batch_size=BATCH), observe=observe)

    comparison = traindiff.compare(tmp_path / "baseline", tmp_path / "candidate")

    assert comparison.verdict == "identical"
    assert comparison.findings == ()
    assert comparison.unaligned == ((), ())
    assert [note for note in comparison.notes if "dataloader" in note] != []


class Pair(NamedTuple):
    first: Tensor
    label: int


@dataclass
class Record:
    inputs: Tensor
    name: str


class Unknown:
    """A batch that nobody looks into."""

    def __init__(self, inputs: Tensor) -> None:
        self.inputs = inputs

    def __len__(self) -> int:
        raise RuntimeError("nobody asks")


ODD: dict[str, tuple[Callable[[list[Any]], Any], Callable[[Any], Tensor], list[str]]] = {
    "nested": (
        lambda batch: {"x": [torch.stack([one for one, _ in batch])], "names": ["a", "b"], "none": None, 3: 4},
        lambda batch: batch["x"][0],
        ["batch.x[0]"],
    ),
    "named tuple": (
        lambda batch: Pair(torch.stack([one for one, _ in batch]), 7),
        lambda batch: batch.first,
        ["batch.first"],
    ),
    "dataclass": (
        lambda batch: Record(torch.stack([one for one, _ in batch]), "name"),
        lambda batch: batch.inputs,
        ["batch.inputs"],
    ),
    "numbers": (
        lambda batch: (torch.stack([one for one, _ in batch]), torch.tensor(3), 2.5, "text"),
        lambda batch: batch[0],
        ["batch[0]", "batch[1]"],
    ),
    "sparse": (
        lambda batch: (torch.stack([one for one, _ in batch]), torch.eye(len(batch)).to_sparse()),
        lambda batch: batch[0],
        ["batch[0]", "batch[1].indices", "batch[1].values"],
    ),
    "uneven": (
        lambda batch: (torch.stack([one for one, _ in batch]), torch.zeros(7, 2), torch.zeros(0)),
        lambda batch: batch[0],
        ["batch[0]", "batch[1]", "batch[2]"],
    ),
    "unknown": (
        lambda batch: Unknown(torch.stack([one for one, _ in batch])),
        lambda batch: batch.inputs,
        ["batch"],
    ),
}


@pytest.mark.parametrize("kind", ODD)
def test_odd_batches_are_left_alone_and_recorded_as_far_as_they_hold_tensors(kind: str, tmp_path: Path) -> None:
    collate, inputs_of, slots = ODD[kind]

    def loader() -> DataLoader[Any]:
        return DataLoader(data_set(), batch_size=BATCH, collate_fn=collate)

    expected = train(None, loader(), inputs_of=inputs_of)
    actual = train(tmp_path / "run", loader(), inputs_of=inputs_of, strict=True)

    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))
    first = [seen for seen, _ in rows(tmp_path / "run", stage="loaded", step=0)]
    assert [seen.slot for seen in first] == slots
    assert [seen.unobserved for seen in first if seen.slot == "batch"] == [dataloader.NO_TENSOR] * (kind == "unknown")


def test_loaders_are_named_in_the_order_of_their_first_use_and_keep_their_names(tmp_path: Path) -> None:
    labels = DataLoader(torch.arange(SAMPLES), batch_size=BATCH)  # type: ignore[arg-type]
    loader = DataLoader(data_set(), batch_size=BATCH)

    def two_epochs() -> Iterator[Any]:
        for _ in range(2):
            for batch, label in zip(loader, labels, strict=True):
                assert torch.equal(batch[1], label)
                yield batch

    train(tmp_path / "run", two_epochs())

    steps = 2 * SAMPLES // BATCH
    expected = [(step, path) for step in range(steps) for path in ("dataloader", "dataloader[1]")]
    found = [(step, path) for step, _, path, slot, _ in loaded(tmp_path / "run") if slot == "batch[0]"]
    assert found == expected


def test_an_iterator_that_is_running_already_is_followed(tmp_path: Path) -> None:
    iterator = iter(DataLoader(data_set(), batch_size=BATCH))
    next(iterator)

    train(tmp_path / "run", iterator)

    assert [step for step, *_ in loaded(tmp_path / "run", slot="batch[0]")] == [0, 1, 2]


def test_a_batch_that_is_asked_for_early_belongs_to_the_step_in_which_it_comes(tmp_path: Path) -> None:
    def ahead() -> Iterator[Any]:
        iterator = iter(DataLoader(data_set(), batch_size=BATCH))
        waiting = next(iterator)
        for batch in iterator:
            yield waiting
            waiting = batch
        yield waiting

    train(tmp_path / "run", ahead())

    assert [(step, rows) for step, *_, rows in loaded(tmp_path / "run", slot="batch[0]")] == [
        (0, 0), (0, 0), (1, 0), (2, 0)
    ]  # fmt: skip
    assert [seen.call for seen, _ in rows(tmp_path / "run", stage="loaded", slot="batch[0]", step=0)] == [0, 1]


def test_batches_for_evaluation_are_not_recorded(tmp_path: Path) -> None:
    def evaluating_between() -> Iterator[Any]:
        with torch.no_grad():  # takes no name from the loaders of the training
            next(iter(DataLoader(data_set(), batch_size=BATCH)))
        for batch in DataLoader(data_set(), batch_size=BATCH):
            yield batch
            with torch.no_grad():
                list(DataLoader(data_set(), batch_size=BATCH))

    train(tmp_path / "run", evaluating_between(), evaluation=True)

    assert {path for _, _, path, _, _ in loaded(tmp_path / "run")} == {"dataloader"}


def test_steps_that_are_not_recorded_have_no_batches(tmp_path: Path) -> None:
    train(tmp_path / "run", DataLoader(data_set(), batch_size=BATCH), every=2)

    assert {step for step, *_ in loaded(tmp_path / "run")} == {0, 2}


def test_a_loader_on_another_thread_is_said_not_to_be_followed(tmp_path: Path) -> None:
    def elsewhere() -> Iterator[Any]:
        batches: list[Any] = []
        thread = threading.Thread(target=lambda: batches.extend(DataLoader(data_set(), batch_size=BATCH)))
        thread.start()
        thread.join()
        yield from batches

    train(tmp_path / "run", elsewhere(), strict=True)

    seen, _ = row(tmp_path / "run", stage="loaded")
    assert (seen.path, seen.unobserved) == ("dataloader", dataloader.ELSEWHERE)


def test_the_axis_of_the_samples_can_be_declared(tmp_path: Path) -> None:
    loader = DataLoader(
        data_set(), batch_size=BATCH, collate_fn=lambda batch: torch.stack([one for one, _ in batch], dim=1)
    )
    train(tmp_path / "run", loader, inputs_of=lambda batch: batch.T, batch_axis={"dataloader": 1})

    seen, _ = row(tmp_path / "run", stage="loaded", step=0)
    assert seen.shard.shape == (BATCH, WIDTH)
    assert len(rows(tmp_path / "run", stage=SAMPLE, path="dataloader", step=0)) == BATCH


def test_nothing_is_left_and_nothing_is_kept(tmp_path: Path) -> None:
    kept: list[weakref.ref[Any]] = []

    def noting() -> Iterator[Any]:
        loader = DataLoader(data_set(), batch_size=BATCH)
        kept.append(weakref.ref(loader))
        for batch in loader:
            kept.extend(map(weakref.ref, batch))
            yield batch

    model = nn.Linear(WIDTH, 2)
    with traindiff.record(tmp_path / "run", model, SGD(model.parameters(), lr=0.1), observe=OBSERVABLE):
        assert loader_iterators().__next__ is not NEXT
        for batch in noting():
            model(batch[0]).sum().backward()
            model.zero_grad()
        del batch
        gc.collect()
        assert [one for one in kept if one() is not None] == []

    assert loader_iterators().__next__ is NEXT
    assert len(dataloader._listeners) == 0


def test_it_is_off_where_it_is_not_asked_for(tmp_path: Path) -> None:
    train(tmp_path / "run", DataLoader(data_set(), batch_size=BATCH), observe=PHASES)

    assert loaded(tmp_path / "run") == []


def test_show_names_the_loader(tmp_path: Path) -> None:
    train(tmp_path / "run", DataLoader(data_set(), batch_size=BATCH))

    shown = CliRunner().invoke(app, ["show", str(tmp_path / "run"), "--site", "dataloader", "--steps", "0"])

    assert shown.output.splitlines()[-2:] == [
        "0     batch (loaded)  dataloader batch[0]  float32 3x4  3.33  -0.773  -1.61  0.304     0    0    0",
        "0     batch (loaded)  dataloader batch[1]  int64 3         -       -      0      2     1    0    0",
    ]


def test_what_it_failed_to_observe_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = train(tmp_path / "baseline", DataLoader(data_set(), batch_size=BATCH))
    monkeypatch.setattr(dataloader, "tensors", lambda *_: 1 / 0)
    with pytest.warns(traindiff.TraindiffWarning, match=r"A part of traindiff \(dataloader\) failed"):
        actual = train(tmp_path / "candidate", DataLoader(data_set(), batch_size=BATCH))

    comparison = traindiff.compare(tmp_path / "baseline", tmp_path / "candidate")

    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))
    assert comparison.findings == ()
    assert comparison.verdict == "incomplete"
    assert comparison.notes[0] == (
        "candidate: on rank 0, the dataloader tap failed: ZeroDivisionError: division by zero. What it would have seen "
        "from step 0 on is unknown."
    )
