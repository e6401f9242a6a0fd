"""Scanned digits with Lightning."""

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def digits(part):
    images, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(images[part] / 16).float(), torch.tensor(labels[part]))


class LitDigits(L.LightningModule):
    def __init__(self, width=128, lr=1e-3):
        super().__init__()
        self.lr = lr
        self.layers = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("accuracy", (self(x).argmax(1) == y).float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


if __name__ == "__main__":
    L.seed_everything(0)
    train_loader = DataLoader(digits(slice(0, 1437)), batch_size=32, shuffle=True)
    val_loader = DataLoader(digits(slice(1437, None)), batch_size=32)
    trainer = L.Trainer(max_epochs=6, accelerator="cpu", devices=1)
    trainer.fit(LitDigits(), train_loader, val_loader)
    print(f"accuracy {trainer.callback_metrics['accuracy']:.4f}")
