"""A model you have, through a pipeline: the same nn.Sequential, the same batches, the same losses.

    python examples/bring_your_model.py                                      # one process
    torchrun --standalone --nproc-per-node 2 examples/bring_your_model.py    # two stages

``plain`` is the training loop as one writes it, ``piped`` is what it becomes.  No layer may mix the rows of a
batch, as BatchNorm does, which would see micro-batches instead; GroupNorm and LayerNorm do not.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from pipeline import PipelineModule, initialize, split_batch

Batches = Iterable[tuple[Tensor, Tensor]]


def plain(model: nn.Sequential, batches: Batches) -> list[float]:
    losses = []
    optimizer = SGD(model.parameters(), lr=0.1)
    for images, labels in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def piped(model: nn.Sequential, batches: Batches) -> list[float]:
    losses = []
    engine = initialize(PipelineModule(model, F.cross_entropy), optimizer=lambda groups: SGD(groups, lr=0.1))
    for images, labels in batches:
        loss = engine.train_batch(split_batch((images, labels), engine.config.micro_batches))
        losses.append(loss.item())
    return losses


def network() -> nn.Sequential:
    torch.manual_seed(0)  # each rank builds the whole model and keeps its part, so all must start alike
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 32, kernel_size=3, padding=1, stride=2),
        nn.GroupNorm(4, 32),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(inplace=True),
        nn.Linear(64, 10),
    )


def digits(epochs: int = 3) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of 100 of scikit-learn's 1,797 digits; the last of an epoch has 97, which 8 does not divide."""
    data = load_digits()
    images = torch.tensor(data.images / 16, dtype=torch.get_default_dtype()).unsqueeze(1)
    labels = torch.tensor(data.target)
    generator = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for chosen in torch.randperm(len(labels), generator=generator).split(100):
            yield images[chosen], labels[chosen]


def main() -> None:
    losses = plain(network(), digits()), piped(network(), digits())
    if os.environ.get("RANK", "0") != "0":
        return
    for name, (first, *_, last) in zip(("plain", "piped"), losses, strict=True):
        print(f"{name}: loss {first:.6f} at the first step, {last:.6f} at the last of {len(losses[0])}")
    difference = max(abs(a - b) for a, b in zip(*losses, strict=True))
    print(f"largest difference of a step's loss: {difference:.1e}")


if __name__ == "__main__":
    main()
