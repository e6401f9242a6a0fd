"""Scanned digits with Ray Train."""

import ray.train
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def digits(part):
    images, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(images[part] / 16).float(), torch.tensor(labels[part]))


def build_model(width):
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def train_loop_per_worker(config):
    torch.manual_seed(0)
    model = prepare_model(build_model(config["width"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    per_worker = 32 // ray.train.get_context().get_world_size()
    loader = prepare_data_loader(DataLoader(digits(slice(0, 1437)), per_worker, shuffle=True))
    x_test, y_test = digits(slice(1437, None)).tensors
    for epoch in range(config["epochs"]):
        if ray.train.get_context().get_world_size() > 1:
            loader.sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            right = (model(x_test).argmax(1) == y_test).float().mean()
        ray.train.report({"loss": loss.item(), "accuracy": right.item()})
        if ray.train.get_context().get_world_rank() == 0:
            print(f"epoch {epoch}: accuracy {right:.4f}", flush=True)


if __name__ == "__main__":
    trainer = TorchTrainer(
        train_loop_per_worker,
        train_loop_config={"width": 128, "lr": 1e-3, "epochs": 6},
        scaling_config=ScalingConfig(num_workers=2),
    )
    trainer.fit()
