"""Another representation of the same thing: activations differ, or an order does, and nothing that is learned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import traindiff
from tests.made_up import BATCH, FC, HEAD, Edit, Measured, Seen, Step, at, both, plain_step, record, rotated, scaled
from traindiff.analyse.compare import compare


def with_loss(step: int) -> Step:
    found: Step = {}
    for site, seen in plain_step(step).items():
        if site == ("batch", "after", "rng", "cpu"):
            found["loss", "", "loss", "backward"] = Seen(values=np.array(1.5 - 0.1 * step, dtype=np.float32))
        found[site] = seen
    return found


def test_activations_that_differ_while_nothing_learned_does_are_another_representation(measured: Measured) -> None:
    found = measured(rotated(FC, 1e-2), build=with_loss)

    assert (found.verdict, found.findings, found.first_divergence) == ("equivalent", (), None)
    assert [one.path for one in found.representation] == ["fc"]
    assert "The representation differs, not the computation: step 0" in found.notes[0]
    assert len(found.to_json()["representation"]) == 1
    assert "more sites" not in found.notes[0]
    assert str(found).startswith(
        "equivalent (uncalibrated): no loss, gradient or update differs by more than its floor,"
    )


def test_the_first_of_several_activations_that_differ_is_named(measured: Measured) -> None:
    found = measured(both(rotated(FC, 1e-2), rotated(HEAD, 0.5)), build=with_loss)

    assert "forward, fc output[0] and at 1 more site" in found.notes[0]


@pytest.mark.parametrize(
    "site", [("loss", "", "loss", "backward"), ("grad", "", "head.weight", "grad"), ("param", "", "fc.weight", "value")]
)
def test_where_something_learned_differs_it_is_no_other_representation(
    site: tuple[str, str, str, str], measured: Measured
) -> None:
    found = measured(both(rotated(FC, 1e-2), rotated(site, 1e-2)), build=with_loss)

    assert found.verdict == "diverged"
    assert found.representation == ()


def test_without_a_loss_it_cannot_be_told_that_only_the_representation_differs(measured: Measured) -> None:
    assert measured(rotated(FC, 1e-2)).verdict == "diverged"


GRADIENTS = [("grad", "", path, "grad") for path in ("fc.weight", "fc.bias", "head.weight")]


@pytest.mark.parametrize(("size", "verdict"), [(1e-4, "equivalent"), (1e-3, "diverged")])
def test_noise_does_not_hide_that_gradients_follow_activations(size: float, verdict: str, measured: Measured) -> None:
    replicas = [both(*(scaled(site, 2e-3) for site in GRADIENTS))] * 2

    found = measured(both(rotated(FC, 1e-2), *(rotated(site, size) for site in GRADIENTS)), *replicas, build=with_loss)

    assert found.verdict == verdict
    assert {one.path for one in (*found.findings, *found.representation)} == {"fc"}


@pytest.mark.parametrize(("size", "verdict"), [(0.01, "equivalent"), (0.2, "diverged")])
def test_an_activation_that_has_nothing_in_common_hides_no_gradients(
    size: float, verdict: str, measured: Measured
) -> None:
    replicas = [both(*(scaled(site, 0.5) for site in GRADIENTS))] * 2

    found = measured(both(rotated(FC, 50.0), *(rotated(site, size) for site in GRADIENTS)), *replicas, build=with_loss)

    assert found.verdict == verdict


@pytest.mark.parametrize(
    "change", [lambda x: x * np.float32(np.nan), lambda x: x[:, :7]], ids=["not finite", "another shape"]
)
def test_what_has_no_size_is_no_other_representation(change: Callable[[Any], Any], measured: Measured) -> None:
    found = measured(at(FC, change), build=with_loss)

    assert (found.verdict, found.representation) == ("diverged", ())


@pytest.mark.parametrize(
    "further",
    [
        at(HEAD, lambda x: x * np.float32(np.nan)),
        rotated(("optimizer", "", "fc.weight", "momentum_buffer"), 1e-2),
    ],
    ids=["not finite", "state of the optimizer"],
)
def test_beside_anything_else_another_representation_counts_too(further: Edit, measured: Measured) -> None:
    found = measured(both(rotated(FC, 1e-2), further), build=with_loss)

    assert (found.verdict, found.representation) == ("diverged", ())
    assert found.findings[0].path == "fc"


def test_a_module_that_is_not_called_is_another_representation_too(measured: Measured) -> None:
    found = measured(both(rotated(FC, 1e-2), lambda step, sites: sites.pop(HEAD)), build=with_loss)

    assert (found.verdict, found.findings) == ("equivalent", ())
    assert [(one.path, one.kind) for one in found.representation] == [("fc", "value"), ("head", "missing")]


def test_in_a_forced_run_a_module_that_is_not_called_is_another_representation_and_no_operation_is(
    tmp_path: Path,
) -> None:
    def uncalled(_step: int, sites: Step) -> None:
        sites.pop(HEAD)

    baseline = record(tmp_path / "baseline", build=with_loss)
    alone, beside = (
        compare(baseline, record(tmp_path / str(number), edit, build=with_loss, run={"forced_by": "baseline"}))
        for number, edit in enumerate((uncalled, both(rotated(FC, 1e-2), uncalled)))
    )

    assert (alone.verdict, alone.findings) == ("equivalent", ())
    assert [(one.path, one.kind) for one in alone.representation] == [("head", "missing")]
    assert (beside.verdict, [one.path for one in beside.findings]) == ("diverged", ["fc", "head"])


TRANSPOSED = [
    ("param", "", "fc.weight", "value"),
    ("grad", "", "fc.weight", "grad"),
    ("optimizer", "", "fc.weight", "momentum_buffer"),
]


def transposed(_step: int, sites: Step) -> None:
    """The candidate holds the weight as (inputs, outputs), as other frameworks may."""
    for site in [("param", "before", "fc.weight", "value"), *TRANSPOSED]:
        if site in sites:
            sites[site].values = np.ascontiguousarray(sites[site].values.T)


def test_a_weight_that_one_run_holds_transposed_is_another_representation(measured: Measured) -> None:
    found = measured(transposed, build=with_loss)

    assert (found.verdict, found.findings) == ("equivalent", ())
    assert [(one.path, one.kind) for one in found.representation] == [("fc.weight", "initial-parameter")]
    assert "fc.weight starts with the same values, transposed: [" in found.representation[0].message


@pytest.mark.parametrize("site", TRANSPOSED[:2])
def test_a_transposed_weight_hides_no_other_size(site: tuple[str, str, str, str], measured: Measured) -> None:
    found = measured(both(scaled(site, 0.5), transposed), build=with_loss)

    assert found.verdict != "equivalent"


def test_what_is_no_parameter_is_not_taken_for_transposed(measured: Measured) -> None:
    found = measured(at(FC, lambda x: np.ascontiguousarray(x.T)), build=with_loss)

    assert (found.verdict, found.representation) != ("equivalent", ())


def test_of_a_forced_run_and_where_the_user_sets_tolerances_each_operation_counts(tmp_path: Path) -> None:
    baseline = record(tmp_path / "baseline", build=with_loss)
    free = record(tmp_path / "free", rotated(FC, 1e-2), build=with_loss)
    forced = record(tmp_path / "forced", rotated(FC, 1e-2), build=with_loss, run={"forced_by": "baseline"})

    assert compare(baseline, free).verdict == "equivalent"
    assert compare(baseline, free, rtol=1e-6).verdict == "diverged"
    assert compare(baseline, forced).verdict == "diverged"


def test_the_gradient_of_an_activation_that_a_forced_run_does_not_show_leaves_nothing_open(tmp_path: Path) -> None:
    baseline = record(tmp_path / "baseline", build=with_loss)
    gradient = next(site for site in with_loss(0) if site[0] == "backward")
    hidden: list[Edit] = [lambda _step, sites: sites.pop(gradient), rotated(HEAD, 1e-2)]
    verdicts = [
        compare(
            baseline,
            record(tmp_path / str(count), both(*hidden[:count]), build=with_loss, run={"forced_by": "baseline"}),
        ).verdict
        for count in (1, 2)
    ]

    assert verdicts == ["identical", "diverged"]


def test_what_a_forced_training_reports_follows_from_what_was_found_before_it(tmp_path: Path) -> None:
    """It cannot be forced."""
    report = ("loss", "", "accuracy", "logged")

    def reporting(step: int) -> Step:
        return {**with_loss(step), report: Seen(values=np.array(0.5), about={"merge": "mean"})}

    def compared(*edits: Edit) -> set[str]:
        where = tmp_path / str(len(edits))
        baseline = record(where / "baseline", build=reporting)
        forced = record(where / "forced", both(*edits), build=reporting, run={"forced_by": "baseline"})
        return {finding.path for finding in compare(baseline, forced).findings}

    assert compared(scaled(report, 0.1)) == {"accuracy"}
    assert compared(scaled(report, 0.1), rotated(FC, 1e-2)) == {"fc"}


def test_samples_in_another_order_are_another_representation(measured: Measured) -> None:
    activations = [site for site in with_loss(0) if site[0] in ("forward", "backward")]
    order = np.array([3, 1, 4, 0, 2])

    found = measured(both(*(at(site, lambda x: x[order]) for site in (BATCH, *activations))), build=with_loss)

    assert found.verdict == "equivalent"
    assert found.representation[0].kind == "batch"
    assert "holds the same values in another order" in found.notes[0]


def test_channels_in_another_order_are_another_representation(measured: Measured) -> None:
    order = np.array([5, 2, 7, 0, 1, 6, 3, 4])
    hidden = [("fc.weight", 0), ("fc.bias", 0), ("head.weight", 1)]
    of_parameter = [("param", "before", "value"), ("grad", "", "grad"), ("optimizer", "", "momentum_buffer")]
    of_parameter.append(("param", "", "value"))

    def permuted(_step: int, sites: Step) -> None:
        for path, dim in hidden:
            for phase, stage, slot in of_parameter:
                if (phase, stage, path, slot) in sites:
                    seen = sites[phase, stage, path, slot]
                    seen.values = np.take(seen.values, order, axis=dim)
        for site in (FC, ("backward", "", "fc", "output[0]")):
            sites[site].values = sites[site].values[:, order]

    found = measured(permuted, build=with_loss)

    assert found.verdict == "equivalent", str(found)
    assert found.representation[0].kind == "initial-parameter"
    assert "starts with the same values in another order" in found.notes[0]


def words(path: Path, *, permuted: bool, lost: bool = False) -> Path:
    """A training of rare words with AdamW: the signs of its smallest gradients follow the order of the sums."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(40, 16), torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 40)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with traindiff.record(path, model, optimizer):
        for step in range(4):
            draw = torch.Generator().manual_seed(step)
            tokens, order = torch.randint(0, 40, (16, 12), generator=draw), torch.randperm(16, generator=draw)
            tokens = tokens[order] if permuted else tokens
            torch.nn.functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
            if lost and step == 2:
                model[1].weight.grad.mul_(0.5)  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
    return path


def test_samples_in_another_order_are_the_same_training_also_with_an_adaptive_optimizer(tmp_path: Path) -> None:
    baseline = words(tmp_path / "a", permuted=False)

    assert compare(baseline, words(tmp_path / "b", permuted=True)).verdict == "equivalent"
    assert compare(baseline, words(tmp_path / "c", permuted=True, lost=True)).exit_code


def learned(path: Path, how: str, *, scaled: float = 1.0, dtype: torch.dtype = torch.float32) -> Path:
    """Two towers and a loss over all pairs of a batch; see `cached` for the other way."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with traindiff.record(path, model, optimizer):
        for step in range(3):
            x = torch.randn(12, 6, generator=torch.Generator().manual_seed(step)).to(dtype)
            if how == "cached":
                with torch.no_grad():
                    rows = torch.cat([model(part) for part in x.split(4)]).requires_grad_()
                (pairs(rows) * scaled).backward()
                assert rows.grad is not None
                for part, gradient in zip(x.split(4), rows.grad.split(4), strict=True):
                    (model(part) * gradient).sum().backward()
            elif how == "functional":
                weights = {name: one.detach() for name, one in model.named_parameters()}

                def loss(weights: Any, x: Any = x) -> Any:
                    return pairs(torch.func.functional_call(model, weights, (x,))) * scaled

                gradients = torch.func.grad(loss)(weights)
                for name, one in model.named_parameters():
                    one.grad = gradients[name]
            else:
                (pairs(model(x)) * scaled).backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


def pairs(rows: Any) -> Any:
    return torch.nn.functional.cross_entropy((rows @ rows.flip(0).T).float(), torch.arange(len(rows)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["cached", "functional"])
def test_gradients_may_come_from_losses_of_another_value_or_from_none(
    how: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    plain = learned(tmp_path / "plain", "plain", dtype=dtype)
    other = learned(tmp_path / "other", how, dtype=dtype)

    for found in (traindiff.compare(plain, other), traindiff.compare(other, plain)):
        assert found.verdict in ("identical", "equivalent"), str(found)
        assert not found.findings
        assert "Labels" not in found.notes[0]
        assert not any("implementation" in note for note in found.notes)


@pytest.mark.parametrize("how", ["cached", "functional"])
def test_wrong_gradients_of_such_losses_are_found(how: str, tmp_path: Path) -> None:
    plain = learned(tmp_path / "plain", "plain")

    found = traindiff.compare(plain, learned(tmp_path / "other", how, scaled=1.01))

    assert found.verdict == "diverged"


def test_another_value_of_one_loss_is_a_divergence(tmp_path: Path) -> None:
    plain = learned(tmp_path / "plain", "plain")

    assert traindiff.compare(plain, learned(tmp_path / "other", "plain", scaled=1.01)).verdict == "diverged"
