"""A small ResNet on scanned digits, in the shape of torchvision's reference scripts."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from raycloud import Splits, Task


class BasicBlock(nn.Module):
    def __init__(self, planes):
        super().__init__()
        self.conv1 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(out)) + x)


class ResNet(nn.Module):
    def __init__(self, planes=16, blocks=2, num_classes=10):
        super().__init__()
        self.stem = nn.Conv2d(1, planes, 3, padding=1)
        self.layers = nn.Sequential(*(BasicBlock(planes) for _ in range(blocks)))
        self.fc = nn.Linear(planes, num_classes)

    def forward(self, x):
        return self.fc(self.layers(self.stem(x)).mean((2, 3)))


class Digits(torch.utils.data.Dataset):
    """1797 images of 8 x 8 pixels, the last fifth of them to test."""

    def __init__(self, train):
        images, labels = load_digits(return_X_y=True)
        part = slice(0, 1437) if train else slice(1437, None)
        self.images = torch.tensor(images[part], dtype=torch.float32).view(-1, 1, 8, 8) / 16
        self.labels = torch.tensor(labels[part])

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.images[i], self.labels[i]


def shifted(image, generator=None):
    down, right = torch.randint(-1, 2, (2,), generator=generator).tolist()
    return image.roll((down, right), (1, 2))


def collate(samples, generator=None):
    moved = [(shifted(image, generator), target) for image, target in samples]
    return torch.utils.data.default_collate(moved)


class Classification(Task):
    def model(self):
        return ResNet()

    def data(self, path):
        return Splits(train=Digits(train=True), held_out=Digits(train=False))

    def batch(self, samples, rng):
        generator = rng and torch.Generator().manual_seed(int(rng.integers(2**63)))
        return collate(samples, generator) if rng else super().batch(samples, rng)

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)

    def scheduler(self, optimizer, steps):
        return CosineAnnealingLR(optimizer, T_max=steps)
