from __future__ import annotations

import pytest
import torch

from traindiff.run.demo.model import Dropout, mix, sample_keys


def keys(*, step: int = 0, seed: int = 0) -> torch.Tensor:
    return sample_keys(torch.arange(16), step=step, seed=seed)


def test_mixing_loses_no_word() -> None:
    words = mix(torch.arange(1 << 16))
    assert len(words.unique()) == 1 << 16
    assert 0 <= int(words.min()) <= int(words.max()) < 1 << 32


def test_mixing_numbers_and_tensors_is_the_same() -> None:
    words = [0, 1, 12345, (1 << 32) - 1]
    assert [mix(word) for word in words] == mix(torch.tensor(words)).tolist()


def test_a_sample_has_one_mask_however_the_batch_is_cut() -> None:
    dropout = Dropout(0.1, layer=3)
    whole = dropout.mask(keys(), 32, 24)
    parts = [dropout.mask(part, 32, 24) for part in keys().chunk(4)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_so_many_entries_are_dropped_and_the_mean_stays(probability: float) -> None:
    mask = Dropout(probability, layer=3).mask(keys(), 64, 160)
    size = mask.numel()
    deviation = (probability * (1 - probability) / size) ** 0.5
    assert (mask == 0).double().mean().item() == pytest.approx(probability, abs=5 * deviation)
    assert mask.max().item() == pytest.approx(1 / (1 - probability))


def test_samples_steps_seeds_and_layers_have_independent_masks() -> None:
    masks = torch.stack(
        [
            Dropout(0.5, layer=layer).mask(keys(step=step, seed=seed), 32, 32)[sample].flatten()
            for layer, step, seed, sample in [(0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1, 0), (0, 1, 0, 0), (1, 0, 0, 0)]
        ]
    )
    correlation = torch.corrcoef(masks)
    # 1,024 pairs of independent entries correlate by 0 with a standard deviation of 1/32.
    assert (correlation - torch.eye(5)).abs().max().item() < 5 / 32


def test_nothing_is_dropped_in_evaluation() -> None:
    x = torch.randn(16, 4, 4)
    assert Dropout(0.5, layer=0).eval()(x, keys()) is x
