"""Lightning's Trainer with SyncBatchNorm on two GPUs. Its arguments: a strategy, a precision, and "dry": nothing is saved."""

import sys

import lightning
import torch
from torch import nn


class Model(lightning.LightningModule):
    """One hidden layer, so many rows a GPU that BatchNorm has something to agree on."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch, index):
        """The loss, which every rank logs."""
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        """Adam."""
        return torch.optim.Adam(self.parameters(), 1e-2)


if __name__ == "__main__":
    strategy, precision = sys.argv[1:3]
    data = torch.utils.data.TensorDataset(torch.randn(64, 16), torch.randn(64, 1))
    quiet = {"enable_progress_bar": False, "logger": False, "enable_checkpointing": "dry" not in sys.argv}
    on = {"accelerator": "gpu", "devices": 2, "strategy": strategy, "precision": precision, "sync_batchnorm": True}
    trainer = lightning.Trainer(max_epochs=2, **on, **quiet)
    trainer.fit(Model(), torch.utils.data.DataLoader(data, batch_size=8))
    assert trainer.world_size == 2 and trainer.state.finished and "loss" in trainer.callback_metrics
