"""Which directions agree, of whole tensors and of tensors that were cut into shards."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.made_up import summary_of
from traindiff.analyse.signs import Agreement, Signs, agreement, merged, part_signs, total
from traindiff.core.kernels.torch_arrays import detail_of
from traindiff.core.shards import Shard

SPECIAL = st.sampled_from([1.5, -1.5, 0.0, -0.0, np.nan, np.inf, -np.inf])
VALUES = st.lists(SPECIAL, min_size=1, max_size=40).map(lambda found: np.array(found, dtype=np.float32))


def stored(values: Any) -> dict[str, Any]:
    """What a recording keeps of a tensor."""
    detail = detail_of(torch.from_numpy(np.ascontiguousarray(values)), {"signs"})
    return {} if detail is None else {name: np.frombuffer(one.data, np.uint8) for name, one in detail.tensors.items()}


def signs_of(values: Any) -> Signs:
    found = part_signs(stored(values), summary_of(values), values.size)
    assert found is not None
    return found


def expected(baseline: Any, candidate: Any) -> int:
    """Element by element, in words."""

    def word(x: float) -> str:
        return "nan" if np.isnan(x) else "zero" if x == 0 else "positive" if x > 0 else "negative"

    pairs = zip(baseline.tolist(), candidate.tolist(), strict=True)
    return sum(word(one) == word(other) != "nan" for one, other in pairs)


@given(VALUES, st.randoms(use_true_random=False))
def test_zero_agrees_with_zero_only_and_nan_with_nothing(baseline: Any, random: Any) -> None:
    candidate = baseline.copy()
    random.shuffle(candidate)

    found = agreement(signs_of(baseline), signs_of(candidate))

    assert found == Agreement(same=expected(baseline, candidate), count=baseline.size)


def test_a_tensor_of_nan_does_not_agree_with_itself() -> None:
    nan = signs_of(np.full(9, np.nan, dtype=np.float32))
    assert agreement(nan, nan) == Agreement(same=0, count=9)


@given(st.data())
def test_shards_have_the_signs_of_the_whole(data: st.DataObject) -> None:
    shape = (data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6)))
    values = np.array(data.draw(st.lists(SPECIAL, min_size=30, max_size=30)), np.float32)[: shape[0] * shape[1]]
    values = values.reshape(shape)
    cut = data.draw(st.integers(0, shape[1]))
    boxes = [(Shard(shape=(shape[0], cut), global_shape=shape, offset=(0, 0)), values[:, :cut])]
    boxes.append((Shard(shape=(shape[0], shape[1] - cut), global_shape=shape, offset=(0, cut)), values[:, cut:]))
    at = data.draw(st.integers(0, values.size))
    flat = values.reshape(-1)
    ranges = [(Shard(shape=(at,), global_shape=shape, offset=(0,)), flat[:at])]
    ranges.append((Shard(shape=(values.size - at,), global_shape=shape, offset=(at,)), flat[at:]))

    for parts in (boxes, ranges, boxes[::-1]):
        held = [(shard, part_signs(stored(part), summary_of(part), part.size)) for shard, part in parts]
        whole = merged([(shard, signs) for shard, signs in held if signs is not None], shape)
        assert whole is not None
        np.testing.assert_array_equal(whole.positive, flat > 0)
        np.testing.assert_array_equal(whole.zero, flat == 0)
        np.testing.assert_array_equal(whole.nan, np.isnan(flat))


def test_shards_that_leave_elements_out_make_no_whole() -> None:
    values = np.float32([1, 2, 3])
    assert merged([(Shard(shape=(3,), global_shape=(4,), offset=(0,)), signs_of(values))], (4,)) is None


def test_the_sign_of_a_scalar_is_in_its_summary() -> None:
    for value, kind in ((2.0, "positive"), (0.0, "zero"), (np.nan, "nan"), (np.inf, "positive"), (-1.0, None)):
        found = part_signs({}, summary_of(np.float32(value).reshape(())), 1)
        assert found is not None
        assert {name: bool(getattr(found, name)[0]) for name in ("positive", "zero", "nan")} == {
            name: name == kind for name in ("positive", "zero", "nan")
        }


def test_a_tensor_without_signs_has_none() -> None:
    values = np.float32([1, 2])
    assert part_signs({}, summary_of(values), 2) is None


def test_similarities_of_several_tensors_are_weighted_by_their_elements() -> None:
    assert total([Agreement(same=1, count=1), None, Agreement(same=0, count=3)]) == Agreement(same=1, count=4)
    assert total([]).share is None


def test_signs_of_a_tensor_far_larger_than_its_shards_are_not_made() -> None:
    part = Shard(shape=(2, 2), global_shape=(2**30, 2**30), offset=(0, 0))

    assert merged([(part, signs_of(np.ones((2, 2), np.float32)))], part.global_shape) is None
