from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import traindiff
from traindiff.core.tap_registry import OBSERVABLE, OBSERVED_BY_DEFAULT
from traindiff.errors import ConfigError
from traindiff.run.demo.loop import DemoSettings, TrainingLoop
from traindiff.run.demo.model import LanguageModel, ModelSize, build_model
from traindiff.run.demo.training import train

OBSERVED = tuple(name for name in OBSERVABLE if name != "operators")


def test_the_loss_falls() -> None:
    numbers = train(None)
    assert [one.step for one in numbers] == list(range(8))
    assert numbers[0].loss > 5
    assert numbers[-1].loss < numbers[0].loss - 1


def test_a_healthy_training_is_not_clipped() -> None:
    assert max(one.gradient_norm for one in train(None)) < DemoSettings().largest_norm


def test_the_model_is_small_and_its_head_is_tied() -> None:
    model = build_model(LanguageModel, ModelSize(), seed=0)
    assert 1e6 < sum(parameter.numel() for parameter in model.parameters()) < 3e6
    assert model.lm_head.weight is model.transformer.wte.weight


def test_modules_are_named_as_in_gpt_2() -> None:
    names = {name for name, _ in build_model(LanguageModel, ModelSize(), seed=0).named_modules()}
    assert {
        "transformer.wte",
        "transformer.wpe",
        "transformer.h.3.ln_1",
        "transformer.h.3.attn.qkv",
        "transformer.h.3.attn.proj",
        "transformer.h.3.ln_2",
        "transformer.h.3.mlp.fc",
        "transformer.h.3.mlp.act",
        "transformer.h.3.mlp.proj",
        "transformer.ln_f",
        "lm_head",
    } <= names


@pytest.mark.parametrize("micro_batches", [2, 3, 6])
def test_micro_batches_compute_the_same_loss_and_gradients(tiny: DemoSettings, micro_batches: int) -> None:
    whole, cut = (TrainingLoop(tiny, micro_batches=parts, seed=0) for parts in (1, micro_batches))
    for loop in (whole, cut):
        loop.model.double()  # so that what is left of a difference is not rounding
    for step in range(2):
        expected, actual = whole.run_step(step), cut.run_step(step)
        assert actual.loss == pytest.approx(expected.loss, rel=1e-12)
        assert actual.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-10)
    for expected_one, actual_one in zip(whole.model.parameters(), cut.model.parameters(), strict=True):
        torch.testing.assert_close(actual_one.grad, expected_one.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_recording_changes_no_bit_of_the_training(tiny: DemoSettings, micro_batches: int, tmp_path: Path) -> None:
    plain, recorded = (TrainingLoop(tiny, micro_batches=micro_batches, seed=0) for _ in range(2))
    expected = [plain.run_step(step) for step in range(3)]
    random_state = torch.get_rng_state()
    with traindiff.record(tmp_path / "run", recorded.model, recorded.optimizer, observe=OBSERVED, strict=True):
        assert [recorded.run_step(step) for step in range(3)] == expected
    assert torch.equal(torch.get_rng_state(), random_state)
    for left, right in zip(everything(plain), everything(recorded), strict=True):
        assert torch.equal(left, right)


def everything(loop: TrainingLoop) -> list[Tensor]:
    """Parameters, gradients and optimizer state."""
    found: list[Tensor] = []
    for parameter in loop.model.parameters():
        assert parameter.grad is not None
        found += [parameter.detach(), parameter.grad, *loop.optimizer.state[parameter].values()]
    return found


def test_torchs_random_numbers_are_left_alone(tiny: DemoSettings, tmp_path: Path) -> None:
    torch.manual_seed(123)
    before = torch.get_rng_state()
    first = train(None, settings=tiny, steps=2)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(456)
    assert train(tmp_path / "run", settings=tiny, steps=2) == first


def test_another_seed_is_another_training(tiny: DemoSettings) -> None:
    assert train(None, settings=tiny, steps=1, seed=0) != train(None, settings=tiny, steps=1, seed=1)


def test_loss_and_gradient_norm_are_logged_in_their_step(tiny: DemoSettings, tmp_path: Path) -> None:
    numbers = train(tmp_path / "run", settings=tiny, steps=2, micro_batches=3)
    logged = {
        (seen.step, seen.path): float(summary["sum"])
        for part in traindiff.open_recording(str(tmp_path / "run")).steps(0)
        for seen, summary in zip(part.observations, part.summaries, strict=True)
        if seen.slot == "logged"
    }
    assert logged == {
        **{(one.step, "loss"): one.loss for one in numbers},
        **{(one.step, "grad_norm"): one.gradient_norm for one in numbers},
    }


@pytest.mark.parametrize("micro_batches", [1, 3, 6])
def test_only_the_position_embedding_has_no_batch_axis(tiny: DemoSettings, micro_batches: int, tmp_path: Path) -> None:
    train(tmp_path / "run", settings=tiny, steps=1, micro_batches=micro_batches)
    [step] = traindiff.open_recording(str(tmp_path / "run")).steps(0)
    unbatched = {
        (seen.path, seen.phase, seen.merge)
        for seen in step.observations
        if seen.phase in ("forward", "backward") and seen.path and not seen.shard.batched
    }
    # The same output in every micro-batch, but a gradient of which each has only a share.
    assert unbatched == {("transformer.wpe", "forward", "shard"), ("transformer.wpe", "backward", "sum")}


def test_on_step_hears_of_every_step(tiny: DemoSettings) -> None:
    heard: list[int] = []
    train(None, settings=tiny, steps=3, on_step=heard.append)
    assert heard == [0, 1, 2]


def test_a_misspelt_fault_is_refused_with_the_nearest_name(tiny: DemoSettings) -> None:
    with pytest.raises(ConfigError, match='Did you mean "gelu-tanh"') as caught:
        train(None, settings=tiny, fault="gelu-tan")
    assert str(caught.value).startswith(
        "1 problem in the demo; nothing was trained.\n\n  fault = 'gelu-tan'\n    \"gelu-tan\" is not a fault.\n"
    )


def test_a_fault_that_needs_more_micro_batches_says_so(tiny: DemoSettings) -> None:
    with pytest.raises(ConfigError) as caught:
        train(None, settings=tiny, fault="lost-gradient", micro_batches=2)
    assert str(caught.value) == (
        "1 problem in the demo; nothing was trained.\n"
        "\n"
        "  micro_batches = 2\n"
        '    is too few for the fault "lost-gradient".\n'
        "    Write at least 3, and a number that divides the batch."
    )


@pytest.mark.parametrize("micro_batches", [0, 4])
def test_micro_batches_must_divide_the_batch(tiny: DemoSettings, micro_batches: int) -> None:
    with pytest.raises(ConfigError) as caught:
        train(None, settings=tiny, micro_batches=micro_batches)
    assert str(caught.value) == (
        "1 problem in the demo; nothing was trained.\n"
        "\n"
        f"  micro_batches = {micro_batches}\n"
        "    does not divide the 6 samples of a batch into equal parts.\n"
        "    Write one of 1, 2, 3, 6."
    )


@pytest.mark.parametrize("observe", [OBSERVED, (*OBSERVED_BY_DEFAULT, "grad.micro")])
def test_the_lost_micro_batch_is_named_as_the_readme_shows_it(
    observe: tuple[str, ...], tiny: DemoSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = traindiff.record
    monkeypatch.setattr(traindiff, "record", lambda *args, **kw: record(*args, **{**kw, "observe": observe}))
    train(tmp_path / "baseline", settings=tiny, steps=3, micro_batches=3)
    train(tmp_path / "faulty", settings=tiny, steps=3, micro_batches=3, fault="lost-gradient")

    first = traindiff.compare(tmp_path / "baseline", tmp_path / "faulty").first_divergence

    assert first is not None
    assert (first.kind, first.step, first.micro_step, first.phase) == ("lost-contribution", 2, 2, "grad")
    assert first.message == (
        "The optimizer's gradient lacks what micro-step 2 of 3 contributed; it is the sum of the other 2."
    )
