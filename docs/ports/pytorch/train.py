"""A small ResNet on scanned digits, in the shape of torchvision's reference scripts."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR


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


def train_one_epoch(model, criterion, optimizer, data_loader, device):
    model.train()
    for image, target in data_loader:
        image, target = image.to(device), target.to(device)
        loss = criterion(model(image), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def evaluate(model, data_loader, device):
    model.eval()
    right = sum(
        int((model(image.to(device)).argmax(1) == target.to(device)).sum())
        for image, target in data_loader
    )
    return right / len(data_loader.dataset)


def main(args):
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    dataset, dataset_test = Digits(train=True), Digits(train=False)
    data_loader = torch.utils.data.DataLoader(
        dataset, batch_size=args.batch_size, shuffle=True, collate_fn=collate
    )
    data_loader_test = torch.utils.data.DataLoader(dataset_test, batch_size=args.batch_size)
    model = ResNet().to(device)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    lr_scheduler = CosineAnnealingLR(optimizer, T_max=args.epochs)
    for epoch in range(args.epochs):
        train_one_epoch(model, criterion, optimizer, data_loader, device)
        lr_scheduler.step()
        print(f"epoch {epoch}: accuracy {evaluate(model, data_loader_test, device):.4f}")
        torch.save(model.state_dict(), args.output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch-size", default=32, type=int)
    parser.add_argument("--epochs", default=6, type=int)
    parser.add_argument("--seed", default=0, type=int)
    parser.add_argument("--output", default="model.pth")
    main(parser.parse_args())
