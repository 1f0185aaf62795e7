"""A GAN that steps two optimizers itself, and makes pictures at the end of an epoch with gradients on."""

import sys

import torch
from lightning import pytorch as lightning
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Gan(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.LeakyReLU(0.2), nn.Linear(16, 9))
        self.discriminator = nn.Sequential(nn.Linear(9, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
        self.fixed = torch.randn(3, 4)

    def training_step(self, batch, number):
        (real,) = batch
        of_generator, of_discriminator = self.optimizers()
        loss, valid, fake = nn.functional.binary_cross_entropy_with_logits, torch.ones(8, 1), torch.zeros(8, 1)
        self.toggle_optimizer(of_generator)
        of_generator.zero_grad()
        self.manual_backward(loss(self.discriminator(self.generator(torch.randn(8, 4))), valid))
        of_generator.step()
        self.untoggle_optimizer(of_generator)
        self.toggle_optimizer(of_discriminator)
        made = self.generator(torch.randn(8, 4)).detach()
        of_discriminator.zero_grad()
        self.manual_backward((loss(self.discriminator(real), valid) + loss(self.discriminator(made), fake)) / 2)
        of_discriminator.step()
        self.untoggle_optimizer(of_discriminator)

    def on_train_epoch_end(self):
        self.generator(self.fixed)

    def configure_optimizers(self):
        parts = self.generator, self.discriminator
        return [torch.optim.Adam(part.parameters(), lr=2e-4, betas=(0.5, 0.999)) for part in parts]


lightning.seed_everything(3)
module = Gan()
trainer = lightning.Trainer(
    accelerator="cpu", devices=1, max_epochs=2, logger=False, enable_progress_bar=False, enable_checkpointing=False
)
trainer.fit(module, DataLoader(TensorDataset(torch.randn(24, 9)), batch_size=8, shuffle=True))
torch.save(module.state_dict(), sys.argv[1])
