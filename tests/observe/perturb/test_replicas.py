"""What holds for replicas of every kind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import traindiff
from tests.observe.hooks.reading import rows
from tests.observe.hooks.test_removal import assert_nothing_left
from tests.observe.hooks.test_undisturbed import assert_bitwise_equal
from tests.observe.hooks.trainings import TRAININGS, Outcome
from tests.observe.perturb.replicas import train
from traindiff.core.tap_registry import OBSERVABLE

REPLICAS = ("ulp:1", "reorder:1", "float64")


def fingerprints(path: Path, **where: Any) -> list[tuple[Any, ...]]:
    return [
        (seen.step, seen.micro_step, seen.phase, seen.stage, seen.path, seen.slot, seen.call, bytes(summary))
        for seen, summary in rows(path, **where)
    ]


@pytest.mark.parametrize("replica", REPLICAS)
@pytest.mark.parametrize("name", TRAININGS)
def test_a_replica_is_the_same_training_within_rounding(name: str, replica: str, tmp_path: Path) -> None:
    expected = TRAININGS[name](lambda *_: nullcontext())

    actual = train(name, tmp_path / "run", replica, evaluation=True)

    assert list(actual) == list(expected)
    assert torch.equal(actual["final rng"], expected["final rng"])
    tolerance = 0.05 if name in ("bfloat16", "gradient_scaler") else 1e-4 if name != "lbfgs_with_a_closure" else 0.1
    for key, tensor in expected.items():
        if "step 0" in key:  # later ones follow from updates whose signs may be noise
            bound = tolerance * float(tensor.abs().max()) + 1e-6
            assert torch.allclose(actual[key].to(tensor.dtype), tensor, rtol=0, atol=bound), key
    if (name, replica) != ("bfloat16", "reorder:1"):  # short sums in bfloat16 are rounded once, whatever their order
        assert any(not torch.equal(actual[key], tensor) for key, tensor in expected.items())


Trained = Callable[[str, str], tuple[Outcome, Path]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Outcome and recording of a replica, by training and replica; each is made once."""

    @cache
    def made(name: str, replica: str) -> tuple[Outcome, Path]:
        path = tmp_path_factory.mktemp("replica") / "run"
        return train(name, path, replica), path

    return made


@pytest.fixture(scope="module")
def plainly_trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The recording of a training that is no replica; each is made once."""

    @cache
    def made(name: str) -> Path:
        path = tmp_path_factory.mktemp("plain") / "run"
        train(name, path, None)
        return path

    return made


@pytest.mark.parametrize("replica", REPLICAS)
@pytest.mark.parametrize("name", TRAININGS)
def test_the_same_seed_makes_the_same_replica(name: str, replica: str, trained: Trained, tmp_path: Path) -> None:
    first, path = trained(name, replica)
    second = train(name, tmp_path / "second", replica)

    assert_bitwise_equal(second, first)
    assert fingerprints(tmp_path / "second") == fingerprints(path)


@pytest.mark.parametrize("kind", ["ulp", "reorder"])
@pytest.mark.parametrize("name", TRAININGS)
def test_another_seed_makes_another_replica(name: str, kind: str, trained: Trained, tmp_path: Path) -> None:
    first, _ = trained(name, f"{kind}:1")
    other = train(name, tmp_path / "other", f"{kind}:2")

    if (name, kind) != ("bfloat16", "reorder"):  # short sums in bfloat16 are rounded once, whatever their order
        assert any(not torch.equal(other[key], tensor) for key, tensor in first.items())


@pytest.mark.parametrize("replica", REPLICAS)
@pytest.mark.parametrize("name", TRAININGS)
def test_a_replica_has_the_same_observations_as_the_training(
    name: str, replica: str, trained: Trained, plainly_trained: Callable[[str], Path]
) -> None:
    runs = plainly_trained(name), trained(name, replica)[1]

    sites = [sorted(found[:-1] for found in fingerprints(run) if found[4] != "rng") for run in runs]
    if name != "lbfgs_with_a_closure":  # how often it calls the closure depends on rounding
        # More than the training: a hook on a view that is written to later is not called, on what was rounded it is.
        assert set(sites[0]) <= set(sites[1])
        assert len(sites[0]) == len(sites[1]) or name == "in_place_on_a_view"


@pytest.mark.parametrize("replica", REPLICAS)
@pytest.mark.parametrize("name", TRAININGS)
def test_closing_leaves_nothing_on_the_training(name: str, replica: str, tmp_path: Path) -> None:
    seen: list[tuple[nn.Module, Any]] = []

    def observe(model: nn.Module, optimizer: Any) -> traindiff.Recorder:
        seen.append((model, optimizer))
        return traindiff.record(tmp_path / "run", model, optimizer, observe=OBSERVABLE, replica=replica)

    TRAININGS[name](observe)

    model, optimizer = seen[0]
    assert _get_current_dispatch_mode_stack() == []
    assert_nothing_left(model, *(optimizer if isinstance(optimizer, list) else [optimizer] if optimizer else []))


BREAK = {
    "ulp:1": "traindiff.observe.torch.perturb.ulp.randomly_rounded",
    "reorder:1": "traindiff.observe.torch.perturb.reorder.Permutations.shuffled",
    "float64": "traindiff.observe.torch.perturb.precision.PrecisionReplica._computed",
}


@pytest.mark.parametrize("replica", REPLICAS)
def test_a_fault_is_contained_and_the_recording_says_that_it_is_no_full_replica(
    replica: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise MemoryError("on purpose")

    expected = TRAININGS["plain"](lambda *_: nullcontext())
    monkeypatch.setattr(BREAK[replica], broken)
    with pytest.warns(traindiff.TraindiffWarning, match="no longer perturbs the training: MemoryError"):
        actual = TRAININGS["plain"](lambda *args: traindiff.record(tmp_path / "run", *args, replica=replica))

    if replica != "float64":  # what was converted stays converted, or nothing would fit together
        assert_bitwise_equal(actual, expected)
    assert [(seen.path, seen.slot, seen.unobserved) for seen, _ in rows(tmp_path / "run", path="traindiff")] == [
        ("traindiff", "replica", "this is no full replica: MemoryError: on purpose")
    ]


def test_a_recording_says_that_it_is_a_replica(tmp_path: Path) -> None:
    train("plain", tmp_path / "run", "ulp:12")
    train("plain", tmp_path / "base", None)

    assert traindiff.open_recording(str(tmp_path / "run")).run["settings"]["replica"] == "ulp:12"
    assert traindiff.open_recording(str(tmp_path / "base")).run["settings"]["replica"] is None


@pytest.mark.parametrize(
    "compile_it",
    [lambda model: torch.compile(model, backend="eager"), lambda model: model.compile(backend="eager") or model],
)
def test_a_compiled_model_is_refused_before_anything_is_attached(compile_it: Any, tmp_path: Path) -> None:
    model, replica = compile_it(nn.Linear(2, 2)), "ulp:1"

    with pytest.raises(traindiff.ConfigError) as caught:
        traindiff.record(tmp_path / "run", model, replica=replica)

    assert str(caught.value) == (
        "1 problem in record(...); nothing was attached to the model.\n"
        "\n"
        '  record(replica="ulp:1")\n'
        "    cannot perturb compiled code, and the model has some: (root).\n"
        "    Record the replica of the same training without torch.compile; what it measures holds for both."
    )
    assert not (tmp_path / "run").exists()
