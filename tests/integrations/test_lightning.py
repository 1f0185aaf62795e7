"""The callback for Lightning's `Trainer`, with the library itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import traindiff
from tests.integrations.same_bits import differing, micro_steps, numbers, sites

lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed; make test-integrations")

from traindiff.integrations.lightning import RecordingCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own


def make_classifier() -> Any:
    class Classifier(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.GELU())
            self.head = nn.Linear(8, 3)
            self.loss = nn.CrossEntropyLoss()

        def training_step(self, batch: list[Tensor], _number: int) -> Tensor:
            return self.loss(self.head(self.net(batch[0])), batch[1])

        def validation_step(self, batch: list[Tensor], _number: int) -> None:
            self.log("validation", self.loss(self.head(self.net(batch[0])), batch[1]))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return Classifier()


def make_gan() -> Any:
    class Gan(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.generator = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6))
            self.discriminator = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))

        def training_step(self, batch: list[Tensor], _number: int) -> None:
            of_generator, of_discriminator = self.optimizers()
            made = self.generator(torch.randn(len(batch[0]), 3))
            of_discriminator.zero_grad()
            self.manual_backward(self.discriminator(made.detach()).mean() - self.discriminator(batch[0]).mean())
            of_discriminator.step()
            of_generator.zero_grad()
            self.manual_backward(-self.discriminator(made).mean())
            of_generator.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.Adam(one.parameters()) for one in (self.generator, self.discriminator)]

    return Gan()


def train(
    make: Callable[[], Any], where: Path, *callbacks: Any, checkpoint: str | None = None, **settings: Any
) -> dict[str, Tensor]:
    lightning.seed_everything(2, verbose=False)
    module = make()
    data = TensorDataset(torch.randn(16, 6), torch.randint(3, (16,)))
    loader, held_out = (DataLoader(data, batch_size=4, shuffle=shuffled) for shuffled in (False, False))
    trainer = lightning.Trainer(
        default_root_dir=where, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=list(callbacks),
        **{"max_epochs": 1, "enable_checkpointing": False, **settings},
    )  # fmt: skip
    trainer.fit(module, loader, held_out if hasattr(module, "head") else None, ckpt_path=checkpoint)
    if checkpoint is None and not settings.get("enable_checkpointing", False):
        trainer.save_checkpoint(where / "last.ckpt")
    return {name: one.clone() for name, one in module.state_dict().items()}


@pytest.mark.parametrize(
    "settings",
    [{}, {"accumulate_grad_batches": 2, "precision": "bf16-mixed", "gradient_clip_val": 0.5, "val_check_interval": 2}],
    ids=["plain", "accumulated-bfloat16-clipped-evaluated"],
)
def test_a_training_computes_the_same_bits_and_is_recorded(tmp_path: Path, settings: dict[str, Any]) -> None:
    without = train(make_classifier, tmp_path / "without", **settings)
    recording, again = tmp_path / "recording", tmp_path / "again"

    assert differing(without, train(make_classifier, tmp_path / "with", RecordingCallback(recording), **settings)) == []
    accumulated = settings.get("accumulate_grad_batches", 1)
    assert numbers(recording) == list(range(4 // accumulated))
    assert micro_steps(recording, step=1) == list(range(accumulated))
    found = sites(recording, step=1)
    assert {
        ("batch", "net", "input[0]"), ("forward", "net.0", "output[0]"), ("forward", "head", "input[0]"),
        ("backward", "head", "output[0]"), ("grad", "head.weight", "grad"), ("optimizer", "net.0.bias", "exp_avg"),
    } <= found  # fmt: skip
    assert ("batch", "head", "input[0]") not in found
    train(make_classifier, tmp_path / "with-again", RecordingCallback(again), **settings)
    assert traindiff.compare(recording, again).verdict == "identical"


def test_two_optimizers_that_the_module_steps_itself_are_followed(tmp_path: Path) -> None:
    without = train(make_gan, tmp_path / "without")
    recording = tmp_path / "recording"

    assert differing(without, train(make_gan, tmp_path / "with", RecordingCallback(recording))) == []
    found = sites(recording, step=1)
    assert {
        ("grad", "generator.0.weight", "grad"), ("grad", "discriminator.2.bias", "grad"),
        ("batch", "generator", "input[0]"), ("forward", "discriminator", "input[0]"),
        ("optimizer", "generator.0.weight", "exp_avg"), ("optimizer", "discriminator.0.weight", "exp_avg"),
    } <= found  # fmt: skip


def test_a_training_that_goes_on_has_the_numbers_of_the_steps_that_it_makes(tmp_path: Path) -> None:
    train(make_classifier, tmp_path / "first", RecordingCallback(tmp_path / "first-run"))
    train(
        make_classifier, tmp_path / "second", RecordingCallback(tmp_path / "second-run"),
        checkpoint=str(tmp_path / "first" / "last.ckpt"), max_epochs=2,
    )  # fmt: skip

    assert numbers(tmp_path / "first-run") == [0, 1, 2, 3]
    assert numbers(tmp_path / "second-run") == [4, 5, 6, 7]


def test_a_training_that_fails_keeps_what_it_had_recorded(tmp_path: Path) -> None:
    class Failing(lightning.Callback):  # type: ignore[misc,name-defined]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 2:
                raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        train(make_classifier, tmp_path / "run", Failing(), RecordingCallback(tmp_path / "recording"))
    assert numbers(tmp_path / "recording") == [0, 1]


def test_settings_are_checked_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises(traindiff.ConfigError, match="at least 1"):
        RecordingCallback(tmp_path, every=0)
