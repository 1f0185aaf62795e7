"""Activations and their gradients: which there are, in which order, under which names."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import traindiff
from tests.observe.hooks.models import CONTAINERS, Checkpointed, Returning, WithTable, mlp
from tests.observe.hooks.reading import row, rows, sites, unobserved
from tests.observe.hooks.trainings import TRAININGS, batches
from traindiff.core.kernels import summarize
from traindiff.core.kernels.torch_arrays import sparse_parts
from traindiff.core.shards import Shard
from traindiff.observe.torch.session.models import unwrapped


def fingerprint(tensor: Tensor) -> int:
    return int(summarize(tensor, Shard.whole(tuple(tensor.shape)))["fingerprint"])


def record_one_step(path: Path, model: nn.Module, *args: Tensor, **options: object) -> None:
    optimizer = SGD(model.parameters(), lr=0.1)
    with traindiff.record(path, model, optimizer, strict=True, **options):
        model(*args).sum().backward()
        optimizer.step()


def test_activations_and_their_gradients_come_in_execution_order(tmp_path: Path) -> None:
    record_one_step(tmp_path / "run", mlp(), next(batches()))

    forward, backward = rows(tmp_path / "run", phase="forward"), rows(tmp_path / "run", phase="backward")

    assert sites(forward) == [("0", "output[0]"), ("1", "output[0]"), ("2", "output[0]"), ("", "output[0]")]
    # The root returns what its last module returned: one tensor, seen twice.
    assert sites(backward) == [("2", "output[0]"), ("", "output[0]"), ("1", "output[0]"), ("0", "output[0]")]
    orders = [seen.order for seen, _ in [*forward, *backward]]
    assert orders == sorted(orders)
    assert all(seen.merge == "shard" for seen, _ in forward)


def test_what_is_recorded_are_the_values_and_the_gradients(tmp_path: Path) -> None:
    model, batch = mlp(), next(batches())
    kept: list[Tensor] = []
    model[1].register_forward_hook(lambda *args: kept.append(args[2]) or args[2].retain_grad())
    record_one_step(tmp_path / "run", model, batch)

    _, forward = row(tmp_path / "run", phase="forward", path="1")
    _, backward = row(tmp_path / "run", phase="backward", path="1")

    assert forward["fingerprint"] == fingerprint(kept[0])
    assert backward["fingerprint"] == fingerprint(kept[0].grad)


def test_an_activation_is_seen_before_it_is_overwritten_in_place(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 4))
    batch = next(batches())
    expected = fingerprint(model[0](batch))

    record_one_step(tmp_path / "run", model, batch)

    assert row(tmp_path / "run", phase="forward", path="0")[1]["fingerprint"] == expected
    assert row(tmp_path / "run", phase="forward", path="1")[1]["negative"] == 0
    assert len(rows(tmp_path / "run", phase="backward")) == 4


def test_calls_of_a_shared_module_are_numbered(tmp_path: Path) -> None:
    TRAININGS["module_called_twice"](lambda *args: traindiff.record(tmp_path / "run", *args))

    for phase, calls in (("forward", [0, 1]), ("backward", [1, 0])):
        found = rows(tmp_path / "run", phase=phase, path="0", step=1)
        assert [seen.call for seen, _ in found] == calls


@pytest.mark.parametrize(
    ("container", "slots"),
    [
        ("dict", ["output.hidden", "output.logits"]),
        ("dataclass", ["output.logits", "output.hidden[0]"]),
        ("namedtuple", ["output.first", "output.second"]),
        ("nested", ["output.a[0][0]", "output.a[1]"]),
    ],
)
def test_outputs_in_containers_are_named_after_their_place(container: str, slots: list[str], tmp_path: Path) -> None:
    build, logits = CONTAINERS[container]
    model = Returning(build)
    optimizer = SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        logits(model(next(batches()))).sum().backward()
        optimizer.step()

    assert [seen.slot for seen, _ in rows(tmp_path / "run", phase="forward", path="")] == slots
    assert sorted(seen.slot for seen, _ in rows(tmp_path / "run", phase="backward", path="")) == sorted(slots)


@pytest.mark.parametrize(
    ("use_reentrant", "recomputed"),
    [
        (True, ["inner.0", "inner.1", "inner.2", "inner"]),
        (False, ["inner.0", "inner.1"]),  # torch stops as soon as it has the last tensor that it needs
    ],
)
def test_recomputation_is_recorded_as_such(use_reentrant: bool, recomputed: list[str], tmp_path: Path) -> None:
    torch.manual_seed(0)
    record_one_step(tmp_path / "run", Checkpointed(use_reentrant=use_reentrant), next(batches()))

    assert [seen.path for seen, _ in rows(tmp_path / "run", stage="recomputed")] == recomputed
    for path in recomputed:
        original, repeated = rows(tmp_path / "run", phase="forward", path=path)
        assert (original[0].stage, repeated[0].stage) == ("", "recomputed")
        assert (original[0].call, repeated[0].call) == (0, 0)
        assert original[0].shard == repeated[0].shard
        assert original[1]["fingerprint"] == repeated[1]["fingerprint"]
    assert len(rows(tmp_path / "run", phase="backward", path="inner.0")) == 1


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed_micro_batches_are_parts_of_the_batch(use_reentrant: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Checkpointed(use_reentrant=use_reentrant)
    optimizer = SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        for part in next(batches()).split([4, 2]):
            model(part).sum().backward()
        optimizer.step()

    for where in ({"phase": "forward", "stage": "recomputed"}, {"phase": "backward"}):
        found = rows(tmp_path / "run", path="inner.0", **where)
        assert [(seen.micro_step, seen.shard.offset, seen.shard.shape) for seen, _ in found] == [
            (0, (0, 0), (4, 16)), (1, (4, 0), (2, 16)),
        ]  # fmt: skip


def test_a_second_backward_through_a_graph_is_another_term(tmp_path: Path) -> None:
    TRAININGS["graph_kept_for_a_second_backward"](lambda *args: traindiff.record(tmp_path / "run", *args))

    found = rows(tmp_path / "run", phase="backward", path="1", step=0)

    assert [seen.stage for seen, _ in found] == ["", "again[1]"]


def test_a_parameter_that_a_module_returns_is_seen_once_per_step(tmp_path: Path) -> None:
    TRAININGS["parameter_as_output"](lambda *args: traindiff.record(tmp_path / "run", *args))

    for phase in ("forward", "backward"):
        found = rows(tmp_path / "run", phase=phase, path="positions")
        assert [(seen.step, seen.stage) for seen, _ in found] == [(0, ""), (1, ""), (2, "")]


def test_a_parameter_that_a_module_returns_is_seen_once_per_micro_step(tmp_path: Path) -> None:
    model = WithTable()
    optimizer = SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        for part in next(batches()).split(2):
            model(part).sum().backward()
        optimizer.step()

    found = rows(tmp_path / "run", phase="backward", path="positions")
    assert [(seen.micro_step, seen.stage) for seen, _ in found] == [(0, ""), (1, ""), (2, "")]


def test_evaluation_is_not_recorded_unless_it_is_asked_for(tmp_path: Path) -> None:
    for evaluation in (False, True):
        path = tmp_path / f"run-{evaluation}"
        TRAININGS["evaluation_between_steps"](
            lambda *args, path=path, evaluation=evaluation: traindiff.record(path, *args, evaluation=evaluation)
        )

    assert rows(tmp_path / "run-False", stage="evaluation") == []
    found = rows(tmp_path / "run-True", stage="evaluation", step=1)
    assert sites(found) == [
        ("", "input[0]"), ("0", "output[0]"), ("1", "output[0]"), ("2", "output[0]"), ("", "output[0]"),
    ]  # fmt: skip
    trained = [
        [(seen.path, seen.slot, bytes(s)) for seen, s in rows(tmp_path / f"run-{e}", stage="")] for e in (False, True)
    ]
    assert trained[0] == trained[1]


def test_a_complex_activation_has_a_last_axis_of_two(tmp_path: Path) -> None:
    class Fourier(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.fft(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fourier, self.layer = Fourier(), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.fourier(self.layer.weight * x).abs())

    record_one_step(tmp_path / "run", Model(), next(batches()))

    for phase in ("forward", "backward"):
        seen, summary = row(tmp_path / "run", phase=phase, path="fourier")
        assert seen.dtype == "complex64"
        assert (seen.shard.shape, seen.shard.global_shape) == ((6, 8, 2), (-1, 8, 2))
        assert summary["count"] == 6 * 8 * 2


class Odd(nn.Module):
    """Returns tensors that no kernel can summarize."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(8, 4), kind

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        odd = {
            "meta": lambda: x.to("meta"),
            "nested": lambda: torch.nested.nested_tensor([x[0], x[1]]),
            "jagged": lambda: torch.nested.nested_tensor([x[0], x[1]], layout=torch.jagged),
            "quantized": lambda: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        }[self.kind]()
        return {"odd": odd, "plain": self.layer(x)}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch calls most of these a prototype
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("meta", "a tensor on the meta device has no elements"),
        ("nested", "a nested tensor has no dense elements"),
        ("jagged", "a nested tensor has no dense elements"),
        ("quantized", "quantized dtype qint8 is not supported"),
    ],
)
def test_what_cannot_be_summarized_is_recorded_as_unobserved_with_the_reason(
    kind: str, reason: str, tmp_path: Path
) -> None:
    model = Odd(kind)
    optimizer = SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        model(next(batches()))["plain"].sum().backward()
        optimizer.step()

    assert unobserved(tmp_path / "run") == [("", "output.odd", reason)]
    _, summary = row(tmp_path / "run", slot="output.odd")
    assert summary["count"] == 0
    assert row(tmp_path / "run", phase="forward", slot="output.plain")[1]["count"] == 24


SPARSE: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": lambda x: x.to_sparse(), "csr": lambda x: x.to_sparse_csr(), "csc": lambda x: x.to_sparse_csc(),
    "bsr": lambda x: x.to_sparse_bsr((2, 2)),
}  # fmt: skip


class Graph(nn.Module):
    """Multiplies features by a sparse matrix that it is given, and that one of its modules returns."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.layer, self.edges, self.factor = nn.Linear(8, 4), nn.Identity(), factor

    def forward(self, matrix: Tensor, x: Tensor) -> Tensor:
        edges = self.edges(matrix if self.factor == 1.0 else matrix * self.factor)
        return edges.to_dense() @ self.layer(x)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", SPARSE)
def test_sparse_tensors_are_observed_by_their_parts(kind: str, tmp_path: Path) -> None:
    for name, factor in (("run", 1.0), ("again", 1.0), ("other", 1.5)):
        torch.manual_seed(0)
        matrix = SPARSE[kind](torch.eye(6) + torch.eye(6).roll(1, 0))
        record_one_step(tmp_path / name, Graph(factor), matrix, torch.ones(6, 8))

    assert unobserved(tmp_path / "run") == []
    parts = {"coo": ("indices",), "csr": ("crow_indices", "col_indices"), "bsr": ("crow_indices", "col_indices"),
             "csc": ("ccol_indices", "row_indices")}[kind]  # fmt: skip
    for phase, path, slot in (("batch", "", "input[0]"), ("forward", "edges", "output[0]")):
        for part in (*parts, "values"):
            assert row(tmp_path / "run", phase=phase, path=path, slot=f"{slot}.{part}")[1]["count"] > 0
    assert traindiff.compare(tmp_path / "run", tmp_path / "again").verdict == "identical"
    first = traindiff.compare(tmp_path / "run", tmp_path / "other").first_divergence
    assert first is not None
    assert (first.path, first.slot, first.kind) == ("edges", "output[0].values", "scale")


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_equal_sparse_tensors_have_equal_parts() -> None:
    indices, values = torch.tensor([[2, 0, 2], [1, 1, 1]]), torch.tensor([1.0, 2.0, 3.0])
    loose = torch.sparse_coo_tensor(indices, values, (3, 3))
    tight = torch.sparse_coo_tensor(torch.tensor([[0, 2], [1, 1]]), torch.tensor([2.0, 4.0]), (3, 3))

    assert not loose.is_coalesced()
    pairs = zip(sparse_parts(loose), sparse_parts(tight), strict=True)
    assert all(name == other and torch.equal(one, two) for (name, one), (other, two) in pairs)
    assert not loose.is_coalesced()


def test_a_part_that_is_called_without_gradients_is_evaluation(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1))
    optimizer = SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        for batch in itertools.islice(batches(), 2):
            with torch.no_grad():
                model[0](batch)
            model(batch).sum().backward()
            optimizer.step()
        with torch.no_grad():
            model[0](batch)

    assert {seen.step for seen, _ in rows(tmp_path / "run")} == {0, 1}
    assert len(rows(tmp_path / "run", phase="forward", path="0")) == 2


def test_a_nested_input_of_the_root_is_unobserved_and_the_rest_is_seen(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, ragged: Tensor, x: Tensor) -> Tensor:
            return self.layer(x)

    ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    record_one_step(tmp_path / "run", Model(), ragged, next(batches()))

    assert unobserved(tmp_path / "run") == [("", "input[0]", "a nested tensor has no dense elements")]
    assert row(tmp_path / "run", phase="batch", slot="input[1]")[0].shard.batched


def test_only_selected_modules_are_observed(tmp_path: Path) -> None:
    model = nn.Sequential(mlp(), nn.Linear(4, 2))
    record_one_step(tmp_path / "run", model, next(batches()), select=["0.*", "1.weight"])

    assert {seen.path for seen, _ in rows(tmp_path / "run", phase="forward")} == {"0.0", "0.1", "0.2"}
    assert {seen.path for seen, _ in rows(tmp_path / "run", phase="backward")} == {"0.0", "0.1", "0.2"}


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


class HoldsTwice(nn.Module):
    """As Fabric of Lightning: the model in its engine's wrapper, and beside it the model alone."""

    def __init__(self, engine: nn.Module, model: nn.Module) -> None:
        super().__init__()
        self._forward_module = engine
        self._original_module = model

    def forward(self, x: Tensor) -> Tensor:
        return self._forward_module(x)


WRAPPINGS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "once": Wrapper,
    "twice": lambda model: HoldsTwice(model, model),
    "twice, once in an engine": lambda model: HoldsTwice(Wrapper(model), model),
}


@pytest.mark.parametrize("wrap", WRAPPINGS.values(), ids=WRAPPINGS)
def test_wrapped_and_plain_models_have_the_same_sites(wrap: Callable[[nn.Module], nn.Module], tmp_path: Path) -> None:
    for name, made in (("plain", lambda model: model), ("wrapped", wrap)):
        torch.manual_seed(0)
        record_one_step(tmp_path / name, made(mlp()), next(batches()))

    actual, expected = (
        [(seen.phase, seen.stage, seen.path, seen.slot, bytes(s)) for seen, s in rows(tmp_path / name)]
        for name in ("wrapped", "plain")
    )
    assert actual == expected


@pytest.mark.parametrize("wrap", WRAPPINGS.values(), ids=WRAPPINGS)
def test_the_model_inside_wrappers_is_found(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = mlp()

    assert unwrapped(wrap(model)) is model


class PartlyUsed(nn.Module):
    """One function of two outputs, of which only one is used, and a parameter for which it gives no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 6)
        self.halves = Halves()
        self.down = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        used, _ = self.halves(self.up(x))
        return self.down(used)


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unmoved = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        used, unused = x.split(3, dim=1)
        return WithoutGradient.apply(used, self.unmoved), unused


class WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Tensor) -> Tensor:
        return x * parameter

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


@pytest.mark.parametrize("options", [{}, {"replica": "ulp:1"}, {"observe": ["forward", "backward", "grad.micro"]}])
def test_a_gradient_that_autograd_passes_on_as_none_is_passed_over(options: dict[str, Any], tmp_path: Path) -> None:
    record_one_step(tmp_path / "run", PartlyUsed(), next(batches()), **options)

    backward = sites(rows(tmp_path / "run", phase="backward"))

    assert ("halves", "output[0]") in backward
    assert ("up", "output[0]") in backward
    assert ("halves", "output[1]") not in backward
