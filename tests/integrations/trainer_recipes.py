"""Recipes of trainings whose trainer saves and loads: as it does by itself, and with one thing forgotten."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import traindiff


class Texts(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(64, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def of_transformers(*, forgets: bool) -> traindiff.Training:
    import transformers

    from traindiff.integrations.transformers import training

    class Forgetful(transformers.Trainer):  # type: ignore[misc]
        def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
            """Nothing is loaded."""

    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=64, n_positions=16)
    arguments = transformers.TrainingArguments(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=4, max_steps=12, report_to=[], use_cpu=True,
        disable_tqdm=True, save_strategy="no", logging_steps=1,
    )  # fmt: skip
    kind = Forgetful if forgets else transformers.Trainer
    return training(kind(model=transformers.GPT2LMHeadModel(config), args=arguments, train_dataset=Texts()))


def trainer() -> traindiff.Training:
    return of_transformers(forgets=False)


def forgetful_trainer() -> traindiff.Training:
    return of_transformers(forgets=True)


def of_lightning(*, batches_differ: bool) -> traindiff.Training:
    from lightning.pytorch import LightningModule, Trainer

    from traindiff.integrations.lightning import training

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(6, 3)

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]

    x, y = torch.randn(64, 6), torch.randint(3, (64,))
    if not batches_differ:
        x, y = x[:4].repeat(16, 1), y[:4].repeat(16)
    made = Trainer(
        max_steps=12, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    return training(made, Module(), DataLoader(TensorDataset(x, y), 4))


def lightning_one_batch() -> traindiff.Training:
    return of_lightning(batches_differ=False)


def lightning() -> traindiff.Training:
    return of_lightning(batches_differ=True)
