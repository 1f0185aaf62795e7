"""An autoencoder of two parts, which `training_step` calls one by one; validated, saved, and tested with the best."""

import sys

import torch
from lightning import pytorch as lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class AutoEncoder(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 12))

    def error(self, batch):
        (x,) = batch
        return nn.functional.mse_loss(self.decoder(self.encoder(x)), x)

    def training_step(self, batch, number):
        loss = self.error(batch)
        self.log("training", loss)
        return loss

    def validation_step(self, batch, number):
        self.log("validation", self.error(batch))

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


lightning.seed_everything(3)
data = TensorDataset(torch.randn(24, 12))
training, held_out = DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=8)
module = AutoEncoder()
trainer = lightning.Trainer(
    accelerator="cpu", devices=1, max_epochs=2, logger=False, enable_progress_bar=False,
    callbacks=[ModelCheckpoint(dirpath="best", monitor="validation")],
)  # fmt: skip
trainer.fit(module, training, held_out)
trainer.test(ckpt_path="best", dataloaders=held_out, verbose=False)
torch.save(module.state_dict(), sys.argv[1])
