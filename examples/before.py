"""A training on one process without Paceline; after.py is the same program with it.

python examples/before.py
"""

import torch
import torch.nn.functional as F
from digits import make_datasets
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

EPOCHS = 5


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 10),
    )


def validate(model, loader):
    model.eval()
    loss = correct = count = 0
    with torch.no_grad():
        for images, labels in loader:
            logits = model(images)
            loss += F.cross_entropy(logits, labels, reduction="sum").item()
            correct += (logits.argmax(1) == labels).sum().item()
            count += len(labels)
    model.train()
    return loss / count, correct / count


def main():
    torch.manual_seed(7)
    device = "cpu"
    train, test = make_datasets()
    loader = DataLoader(train, batch_size=64, shuffle=True, num_workers=1)
    test_loader = DataLoader(test, batch_size=64)
    model = make_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    steps = EPOCHS * len(loader)
    schedule = LambdaLR(optimizer, lambda step: max(0.05, 1 - step / steps))
    for epoch in range(EPOCHS):
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        test_loss, accuracy = validate(model, test_loader)
        print(f"epoch {epoch}: loss {test_loss:.3f}, accuracy {accuracy:.3f}")
    torch.save(model.state_dict(), "model.pth")


if __name__ == "__main__":
    main()
