"""What is measured: ResNets with random weights, images of noise, and clocks that treat everyone alike."""

import copy
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from relprop.compat import import_torchvision

SEED, THREADS, CLASSES = 0, 2, 1000
PLAIN, LAST = "plain", "channels last"
"""The two forward passes that everything is compared with, the faster of which counts."""

Call = Callable[[], object]


def resnet(name: str = "resnet50", device: str = "cpu") -> nn.Module:
    """A network of torchvision's with random weights, which are frozen: no method pays for gradients of them."""
    torch.manual_seed(SEED)
    model: nn.Module = getattr(import_torchvision().models, name)(weights=None)
    return model.eval().requires_grad_(False).to(device)


def images(
    batch: int, side: int = 224, targets: int = 0, device: str = "cpu", seed: int = SEED
) -> tuple[Tensor, Tensor]:
    """Noise, and one target an image, or several: the cost of a dense network does not depend on what it sees."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, 3, side, side, generator=generator)
    shape = (batch, targets) if targets else (batch,)
    return x.to(device), torch.randint(CLASSES, shape, generator=generator).to(device)


class Forwards:
    """A model's eager forward passes without gradients, as it is and with channels last.

    Args:
        model: The model; a copy is made for the other layout.
    """

    def __init__(self, model: nn.Module) -> None:
        self._models = {PLAIN: model, LAST: copy.deepcopy(model).to(memory_format=torch.channels_last)}

    def of(self, x: Tensor) -> dict[str, Call]:
        """Both passes of a batch, each with the layout that it likes."""
        inputs = {PLAIN: x, LAST: x.contiguous(memory_format=torch.channels_last)}
        return {name: torch.no_grad()(lambda name=name: self._models[name](inputs[name])) for name in inputs}


def seconds(call: Call, device: str = "cpu") -> float:
    """Time one call, until its device is done with it."""
    begin = time.perf_counter()
    call()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def in_turns(calls: Mapping[str, Call], rounds: int, warmup: int = 1, device: str = "cpu") -> dict[str, float]:
    """Return the best time of each; taking turns, all meet the same machine and the same grown allocator."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(warmup + rounds):
        for name, call in calls.items():
            times[name].append(seconds(call, device))
    return {name: min(found[warmup:]) for name, found in times.items()}


def faster(best: Mapping[str, float]) -> float:
    """The time of the faster of the two forward passes."""
    return min(best[PLAIN], best[LAST])


def verdict(name: str, value: float, bar: float, data: Mapping[str, Any], unit: str = "") -> str:
    """A line that says whether a figure is within its bar."""
    return f"- {name}: {value:.2f}{unit}, bar <= {bar}{unit}: {word(value <= bar, data)}"


def word(passed: bool, data: Mapping[str, Any]) -> str:
    """A verdict; there is none on a quick run."""
    return "not judged" if data["quick"] else "**pass**" if passed else "**miss**"
