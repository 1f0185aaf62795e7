"""What is known of gradients beyond their size: the terms they are sums of, and the parts that are noise."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.made_up import Compared, Seen, Step, at, random, record, same, summary_of
from traindiff.analyse.compare import compare
from traindiff.analyse.merge.distance import Pair, difference
from traindiff.analyse.merge.site import MergedSite, SiteKey
from traindiff.analyse.noise.gradients import (
    FEW_TURNED,
    common_factor,
    gradient_floor,
    median,
    share_of_noise,
    terms_by_module,
    turned_share,
)
from traindiff.analyse.noise.uncalibrated import Floors
from traindiff.core.summary import rounding


def test_the_share_of_noise_is_the_share_of_groups_that_hold_nothing_larger_than_the_error() -> None:
    gradient = random(96, seed=1)
    gradient[32:64] *= np.float32(1e-8)  # the key's third of a joint bias

    assert share_of_noise(summary_of(gradient), gradient.shape, 1e-6) == pytest.approx(1 / 3)
    assert share_of_noise(summary_of(random(96, seed=1)), (96,), 1e-6) == 0.0


def test_rows_of_a_matrix_are_groups_too() -> None:
    gradient = random(64, 8, seed=2)
    gradient[:16] = 0.0

    assert share_of_noise(summary_of(gradient), gradient.shape, 1e-6) == pytest.approx(1 / 4)


@pytest.mark.parametrize("shape", [(8,), (0,), ()])
def test_nothing_is_known_of_the_parts_of_a_small_gradient(shape: tuple[int, ...]) -> None:
    assert share_of_noise(summary_of(random(*shape, seed=3)), shape, 1e-6) == 0.0


def _gradients(smallest: float, moved: float, others: float = 0.0) -> Pair:
    """144 elements, one of them small. In the candidate it has moved, and a large one has too."""
    values = np.sign(random(144, seed=4)) * np.float32(1.0) + random(144, seed=5) * np.float32(0.1)
    values[7] = smallest
    candidate = values.copy()
    candidate[7] += np.float32(moved)
    candidate[8] += np.float32(others)
    entries = [
        MergedSite(
            key=SiteKey("grad", "", "fc.weight", "grad"), order=0, dtype="float32", shape=(144,),
            summary=summary_of(one),
        )
        for one in (values, candidate)
    ]  # fmt: skip
    return Pair(baseline=entries[0], candidate=entries[1])


@pytest.mark.parametrize(
    ("smallest", "moved", "others", "few"),
    [
        (1e-5, -2e-5, 0.0, True),
        (1e-5, 0.0, 0.0, False),
        (0.0, 1e-5, 0.0, True),
        (0.0, 0.0, 1e-3, False),
        (1e-2, 0.0, 1e-3, False),
    ],
    ids=["turns around", "no bit differs", "leaves zero", "stays zero", "too large"],
)
def test_a_few_elements_may_turn_around_where_one_lies_within_its_error(
    smallest: float, moved: float, others: float, few: bool
) -> None:
    share = turned_share(_gradients(smallest, moved, others), 1e-5)

    assert share == pytest.approx(FEW_TURNED / 144 if few else 0.0)


def test_one_sign_of_144_is_within_the_floor_of_an_adaptive_update(tmp_path: Path) -> None:
    """An element within its error goes the other way: 2 / sqrt(144) of the first update, 30 sqrt(2.6e-5) is less."""

    def build(_step: int) -> Step:
        found: Step = {}
        gradient = np.sign(random(144, seed=4)) + random(144, seed=5) * np.float32(0.1)
        gradient[7] = 1e-5
        value = random(144, seed=6)
        found["param", "before", "w", "value"] = Seen(values=value)
        found["grad", "", "w", "grad"] = Seen(values=gradient)
        for slot, power in (("exp_avg", 1), ("exp_avg_sq", 2)):
            found["optimizer", "", "w", slot] = Seen(values=(gradient**power * np.float32(0.1)).astype(np.float32))
        found["param", "", "w", "value"] = Seen(values=value - np.float32(0.01) * np.sign(gradient))
        return found

    def turned(_: int, step: Step) -> None:
        gradient, value = (step["grad", "", "w", "grad"].values, step["param", "", "w", "value"].values)
        gradient[20] *= np.float32(1 + 1e-5)
        gradient[7] = -1e-5
        value[7] += np.float32(0.02)

    base, candidate = (
        record(tmp_path / name, edit, steps=1, build=build) for name, edit in (("b", same), ("c", turned))
    )
    found = compare(base, candidate)

    (row,) = (one for one in found.differences if one.phase == "update")
    assert row.difference == pytest.approx(2 / 12, rel=0.05)
    assert found.verdict == "equivalent", str(found)


def test_a_module_that_is_called_twice_adds_up_the_terms_of_both_calls() -> None:
    entries = [
        MergedSite(
            key=SiteKey("backward", "", "fc", "output[0]", call, 0), order=call, dtype="float32", shape=(4, 8),
            summary=summary_of(np.full((4, 8), 3.0 + call, dtype=np.float32)),
        )
        for call in range(2)
    ]  # fmt: skip

    terms = terms_by_module([Pair(baseline=entry, candidate=entry) for entry in entries])["fc"]

    assert terms.count == 64
    assert terms.norm == pytest.approx(np.sqrt(32 * 9.0 + 32 * 16.0))


def _terms_of(path: str, *calls: int) -> list[MergedSite]:
    return [
        MergedSite(
            key=SiteKey("backward", "", path, "output[0]", call, 0), order=call, dtype="bfloat16", shape=(4, 8),
            summary=summary_of(np.full((4, 8), 3.0 + call, dtype=np.float32)),
        )
        for call in calls
    ]  # fmt: skip


def test_a_module_that_one_run_does_not_call_sums_the_terms_of_the_other_run() -> None:
    (entry,) = _terms_of("fc", 0)
    alone = [*_terms_of("norm", 0, 1), *_terms_of("norm", 0, 1), *_terms_of("fc", 1)]

    terms = terms_by_module([Pair(baseline=entry, candidate=entry)], alone=alone)

    assert (terms["fc"].count, terms["norm"].count) == (32, 64)
    assert terms["norm"].dtype == "bfloat16"


def test_terms_have_the_shorter_dtype_of_the_two_runs() -> None:
    (short,) = _terms_of("fc", 0)

    long = replace(short, dtype="float32")
    for pair in (Pair(baseline=long, candidate=short), Pair(baseline=short, candidate=long)):
        assert terms_by_module([pair])["fc"].dtype == "bfloat16"


def _summed_by_torch(module: nn.Module, given: Tensor, sent: Tensor) -> tuple[list[Pair], Pair]:
    """The gradient of a module's output, and that of its weight: by torch's kernel, and exactly."""
    weights = []
    for dtype in (torch.float64, torch.bfloat16):
        own = deepcopy(module).to(dtype)
        given = given.to(dtype) if given.is_floating_point() else given
        own(given).backward(sent.to(dtype))
        weights.append(own.weight.grad.float().numpy())
    entries = [
        MergedSite(
            key=SiteKey("grad", "", "m.weight", "grad"), order=1, dtype="bfloat16", shape=one.shape,
            summary=summary_of(one),
        )
        for one in weights
    ]  # fmt: skip
    terms = MergedSite(
        key=SiteKey("backward", "", "m", "output[0]"), order=0, dtype="bfloat16", shape=tuple(sent.shape),
        summary=summary_of(sent.float().numpy()),
    )  # fmt: skip
    return [Pair(baseline=terms, candidate=terms)], Pair(baseline=entries[0], candidate=entries[1])


@pytest.mark.parametrize("rows", [64, 512, 4096])
@pytest.mark.parametrize("one_sign", [0.0, 1.0])
@pytest.mark.parametrize("name", ["LayerNorm", "Embedding", "EmbeddingBag"])
def test_the_floor_allows_for_kernels_that_sum_one_by_one_in_bfloat16(name: str, one_sign: float, rows: int) -> None:
    torch.manual_seed(0)
    sent = (torch.randn(rows, 16) + one_sign * torch.randn(16)).bfloat16()
    modules: dict[str, tuple[nn.Module, Tensor]] = {
        "LayerNorm": (nn.LayerNorm(16), torch.randn(rows, 16).abs().bfloat16()),
        "Embedding": (nn.Embedding(3, 16), torch.zeros(rows, dtype=torch.int64)),
        "EmbeddingBag": (nn.EmbeddingBag(3, 16, mode="sum"), torch.zeros(rows, 4, dtype=torch.int64)),
    }
    module, given = modules[name]
    backward, weight = _summed_by_torch(module, given, sent)
    terms = terms_by_module(backward, {"m": name})
    known = Floors(precision=rounding("bfloat16"))

    floor = gradient_floor(weight, terms, known, accumulated=1)

    size = difference(weight)
    assert size is not None
    assert size < floor < 1.0
    if (rows, one_sign, name) in ((64, 0.0, "LayerNorm"), (64, 0.0, "Embedding")):  # half a gradient is no rounding
        assert floor < 0.1
    assert gradient_floor(weight, {"m": replace(terms["m"], kernel="accurate")}, known, accumulated=1) <= floor


def test_matrix_products_lose_no_addends() -> None:
    pairs = [*_summed_by_torch(nn.LayerNorm(16), torch.randn(4096, 16), torch.ones(4096, 16))[0]]
    matrix, bias = (
        _gradient_of(path, np.full(shape, 4096.0)) for path, shape in (("m.weight", (16, 4)), ("m.bias", 16))
    )

    kernels = [terms_by_module(of)["m"].kernel for of in (pairs, [*pairs, matrix])]
    floors = [gradient_floor(bias, terms_by_module(of), Floors(), accumulated=1) for of in (pairs, [*pairs, matrix])]

    assert kernels == ["one by one", "accurate"]
    assert floors[0] > 0.9
    assert floors[1] < 0.3


def test_sites_in_another_dtype_are_said(compared: Compared) -> None:
    comparison = compared(at(("forward", "", "fc", "output[0]"), lambda x: x.astype(np.float16)))

    assert comparison.verdict == "equivalent"
    assert (
        "1 site is float32 in the baseline and float16 in the candidate, first forward of fc output[0]; floors follow "
        "the shorter of the two."
    ) in comparison.notes


def test_a_finding_at_a_site_of_another_dtype_names_both(compared: Compared) -> None:
    comparison = compared(at(("forward", "", "fc", "output[0]"), lambda x: (x * 1.1).astype(np.float16)))

    assert comparison.first_divergence is not None
    assert comparison.first_divergence.message.endswith(" It is float32 in the baseline and float16 in the candidate.")


def _gradient_of(path: str, values: np.ndarray, *, stage: str = "", phase: str = "grad") -> Pair:
    entry = MergedSite(
        key=SiteKey(phase, stage, path, "grad"), order=0, dtype="float32", shape=values.shape,
        summary=summary_of(values),
    )  # fmt: skip
    return Pair(baseline=entry, candidate=entry)


@pytest.mark.parametrize("shape", [(8, 4), (8, 2, 2)])
def test_the_terms_of_a_backward_pass_that_was_not_observed_follow_from_the_gradient_of_the_weight(
    shape: tuple[int, ...],
) -> None:
    """Each output sums as many terms as it has inputs, of unit size."""
    terms = terms_by_module([_gradient_of("fc.weight", np.full(shape, 3.0, dtype=np.float32))])

    assert (terms["fc"].count, terms["fc"].summed) == (8, 0.0)
    assert terms["fc"].norm == pytest.approx(3.0 * np.sqrt(32) / 2)


@pytest.mark.parametrize(
    "pair",
    [
        _gradient_of("fc.bias", random(8, 4, seed=0)),
        _gradient_of("fc.weight", random(8, seed=0)),
        _gradient_of("fc.weight", random(0, 4, seed=0)),
        _gradient_of("fc.weight", random(4, 0, seed=0)),
        _gradient_of("fc.weight", random(8, 4, seed=0), stage="reduced"),
        _gradient_of("fc.weight", random(8, 4, seed=0), phase="update"),
    ],
    ids=["no weight", "a vector", "no outputs", "no inputs", "of a stage", "no gradient"],
)
def test_other_sites_tell_nothing_of_terms(pair: Pair) -> None:
    assert terms_by_module([pair]) == {}


@pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
@given(st.lists(st.floats(width=64), min_size=1, max_size=9))
@example([-0.0])
@example([-0.0, -0.0])
def test_the_median_is_that_of_numpy_to_the_bit(numbers: list[float]) -> None:
    assert repr(median(numbers)) == repr(float(np.median(numbers)))


@pytest.mark.parametrize(
    ("fits", "limits", "factor"),
    [
        ([0.5, 0.5, 0.5, 1.0], [1e-5, 1e-5, 1e-5, 1e-5], 0.5),
        ([0.5, 0.5, 1.0, 1.0], [1e-5, 1e-5, 1e-5, 1e-5], None),
        ([0.994, 0.99, 0.994, 1.0], [0.1, 0.3, 0.1, 1e-5], None),
        ([0.994, 0.994, 0.994, 1.0], [0.1, 0.3, 1e-5, 1e-5], 0.994),
    ],
)
def test_a_common_factor_shows_in_a_gradient_that_follows_it(
    fits: list[float], limits: list[float], factor: float | None
) -> None:
    """Noisy gradients have any factor; one with little noise has its own."""
    assert common_factor(fits, limits) == factor
