"""A small residual network behind the zoo's front, and photos for it: studies of it take moments."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from relprop.preparation import Preparation
from relprop.sources import Source
from relprop.zoo import Model


class Net(nn.Module):
    """A stem, a residual block and a head of ten classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 1, 1))
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        logits: Tensor = self.head((x + self.block(x)).relu().mean((2, 3)))
        return logits


def model(seed: int = 0) -> Model:
    """The same weights every time; over many colours, every class has its turn."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        net = Net().eval().requires_grad_(False)
        logits = net(torch.randn(256, 3, 2, 2).repeat_interleave(16, 2).repeat_interleave(16, 3))
        spread = logits.std(0) / 3
        net.head.bias.sub_(logits.mean(0)).div_(spread)
        net.head.weight /= spread[:, None]
    source = Source("random", "seed 0", None, "none", "tiny")
    return Model("tiny", net, source, Preparation(resize=36, crop=32), 10)


def photos(folder: Path, count: int) -> Path:
    """Patches of different colours, side by side, with their classes in a table: a class of its own for each."""
    draw = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        colours = draw.integers(0, 255, (2, 2, 3), dtype=np.uint8)
        Image.fromarray(colours).resize((40, 40), Image.Resampling.BICUBIC).save(folder / f"{i:02d}.png")
    lines = "".join(f"{i:02d}.png,{i % 10}\n" for i in range(count))
    (folder / "labels.csv").write_text(f"file,class_index\n{lines}")
    return folder
