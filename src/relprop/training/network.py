"""The network in training: a model with a head for its new classes, cut into what is frozen and what is trained."""

from __future__ import annotations

from collections import OrderedDict
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import nn

from relprop.errors import RelpropError
from relprop.training.views import lot
from relprop.zoo import Model

__all__ = ["ALL", "HEAD", "Network", "build"]

ALL, HEAD = "all", "head"


@dataclass(frozen=True, eq=False)
class Network:
    """A network, and its two parts, which share its modules: ``trained(frozen(x))`` is ``whole(x)``.

    Attributes:
        whole: All of it, a copy of the model's.
        frozen: What comes first and stays as it was; None where all is trained. Of a head it is a copy.
        trained: The rest.
    """

    whole: nn.Module
    frozen: nn.Module | None
    trained: nn.Module


def build(model: Model, classes: tuple[str, ...], part: str = ALL, seed: int = 0) -> Network:
    """Puts a new head on a copy of a model, and cuts it.

    A model whose classes are these already keeps its head: training goes on from there.

    Args:
        model: What ``relprop.load`` returns; it is not changed.
        classes: The names of the classes.
        part: What is trained: ``"all"``, ``"head"``, or everything from a stage on, such as ``"layer4"``.
        seed: Of the head's first weights.

    Raises:
        RelpropError: If the model has no head that can be replaced, or cannot be cut there.
    """
    whole = deepcopy(model.module).requires_grad_(False).eval()
    path = list(whole.named_parameters())[-1][0].rpartition(".")[0]
    head = whole.get_submodule(path) if path else whole
    if not isinstance(head, nn.Linear):
        raise RelpropError(f"{model.name} ends in {type(head).__name__}; only a last nn.Linear can be replaced.")
    if model.classes != classes:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(lot("head", seed))
            head = nn.Linear(head.in_features, len(classes), head.bias is not None)
        whole.set_submodule(path, head)
    if part == ALL:
        frozen, trained = None, whole
    elif part == HEAD:
        frozen, trained = deepcopy(whole), head
        frozen.set_submodule(path, nn.Identity())
    else:
        frozen, trained = _cut(whole, part, model.name)
    trained.requires_grad_(True)
    network = Network(whole, frozen, trained)
    _check(network, model, part)
    return network


def _cut(whole: nn.Module, stage: str, name: str) -> tuple[nn.Module, nn.Module]:
    """Cuts a network whose children follow one another, as those of a ResNet do."""
    children = list(whole.named_children())
    names = [child for child, _ in children]
    if stage not in names[1:]:
        raise RelpropError(
            f"{name} has no stage {stage!r} to train from; there are {', '.join([ALL, HEAD, *names[1:]])}."
        )
    at = names.index(stage)
    after = children[at:]
    if isinstance(after[-1][1], nn.Linear):
        after.insert(len(after) - 1, ("flatten", nn.Flatten()))
    return nn.Sequential(OrderedDict(children[:at])), nn.Sequential(OrderedDict(after))


def _check(network: Network, model: Model, part: str) -> None:
    """The two parts, one after the other, have to be the network."""
    if network.frozen is None:
        return
    side = model.preparation.crop
    x = torch.rand(1, 3, side, side, generator=torch.Generator().manual_seed(0))
    try:
        with torch.no_grad():
            same = torch.allclose(network.trained(network.frozen(x)), network.whole(x), rtol=1e-4, atol=1e-5)
    except RuntimeError:  # shapes that do not fit
        same = False
    if not same:
        raise RelpropError(
            f"{model.name} cannot be cut at {part!r}: its modules do not simply follow one another there."
        )
