"""Recipes of trainings whose trainer saves and loads: as it does by itself, and with one thing forgotten."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
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


def of_accelerate(*, careful: bool, scheduler_too: bool = True) -> traindiff.Training:
    """A hand-written loop, saved by Accelerate in the middle of an epoch.

    Args:
        careful: Whether the generators are restored after the loader has begun, which draws from them.
        scheduler_too: Whether Accelerate is given the scheduler, so that it is saved.
    """
    import accelerate
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    settings = accelerate.utils.DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=settings)
    model: Any = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 3))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    data = TensorDataset(torch.randn(64, 6), torch.randint(3, (64,)))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4, shuffle=True))
    if scheduler_too:
        scheduler = accelerator.prepare(scheduler)

    def step(batch: list[Tensor]) -> Tensor:
        loss: Tensor = nn.functional.cross_entropy(model(batch[0]), batch[1])
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return loss

    def load(directory: Path) -> Iterator[Any]:
        rest = iter(accelerator.skip_first_batches(loader, 3))
        begun = [next(rest)] if careful else []
        accelerator.load_state(directory)
        return chain(begun, rest)

    return traindiff.Training(
        model=model, optimizer=optimizer, batches=loader, step=step, save=accelerator.save_state, load=load
    )  # fmt: skip


def accelerate_loop() -> traindiff.Training:
    return of_accelerate(careful=True)


def accelerate_loop_that_draws_after_loading() -> traindiff.Training:
    return of_accelerate(careful=False)


def accelerate_loop_without_scheduler() -> traindiff.Training:
    return of_accelerate(careful=True, scheduler_too=False)
