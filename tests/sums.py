"""What arrives at the input of two transformers, with and without splits at their sums, and by other methods.

`make support` writes it into docs/support.md; LXT takes part where it is installed.
"""

from __future__ import annotations

import importlib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import relprop
from relprop.compat import import_torchvision

MODELS = ("vit_b_16", "swin_t")
KEPT = Path(__file__).parent.parent / "build" / "sums.md"


def _all(branches: tuple[Tensor, ...]) -> list[float]:
    """No split: each branch of a sum gets all of its relevance."""
    return [1.0] * len(branches)


LRP: dict[str, dict[str, Any]] = {
    "paper (ratio at the sums)": {},
    "paper, symmetric": {"split": "symmetric"},
    "paper, identity skips out": {"identity_skips": False},
    "paper, all to every branch": {"split": _all},
    "paper, by value (signed)": {"split": "signed"},
    "epsilon (signed), conventional LRP": {"preset": "epsilon"},
    "epsilon, ratio at the sums": {"preset": "epsilon", "split": "ratio"},
}


def build(name: str) -> nn.Module:
    """A model with random weights; its head, which begins as nothing, too."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net: nn.Module = import_torchvision().models.get_model(name, weights=None).eval()
        for parameter in net.parameters():
            if not parameter.any():
                nn.init.normal_(parameter, std=0.02)
    return net.requires_grad_(False)


def rows(name: str) -> list[list[str]]:
    """A row a method: the sum at the input, and what the ledger names, in shares of the start, for two inputs."""
    net = build(name)
    x = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    found = []
    for method, options in LRP.items():
        e = relprop.explain(net, x, start="logit", **options)
        named = {cause: amount / e.start for cause, amount in e.ledger.absorbed_by_cause.items()}
        causes = ", ".join(f"{cause} {_numbers(share)}" for cause, share in named.items()) or "nothing"
        missing = f"{float(e.ledger.error.max()):.0e}"
        found.append([f"relprop, {method}", *_shares(e.relevance, e.start), causes, missing])
    found.append(["gradient x input", *_gradient(net, x), "", ""])
    found.append(["LXT", *_lxt(name, x), "", ""])
    return [[name, *row] for row in found]


def _shares(relevance: Tensor, start: Tensor) -> list[str]:
    flat = relevance.flatten(1)
    return [_numbers(flat.sum(1) / start), _numbers(flat.abs().sum(1) / start.abs())]


def _numbers(values: Tensor) -> str:
    return ", ".join(f"{float(v):.3g}" for v in values)


def _gradient(net: nn.Module, x: Tensor) -> list[str]:
    """Gradient x input of the predicted class."""
    x = x.clone().requires_grad_()
    top = net(x).max(1).values
    (gradient,) = torch.autograd.grad(top.sum(), x)
    return _shares((x * gradient).detach(), top.detach())


def _lxt(name: str, x: Tensor) -> list[str]:
    """The same through LXT, which changes torch's classes: run last, on a model of its own."""
    if name != "vit_b_16":
        return ["does not know this model", ""]
    try:
        efficient = importlib.import_module("lxt.efficient")
        patches = importlib.import_module("lxt.efficient.models.vit_torch")
    except ImportError as error:
        return [f"does not run here: {str(error).splitlines()[0]}", ""]
    from torchvision.models import vision_transformer

    efficient.monkey_patch(vision_transformer, patches.cp_LRP)
    return _gradient(build(name), x)


def section() -> str:
    """The table in Markdown."""
    lines = [
        "## What arrives at the input of ViT-B/16 and Swin-T",
        "",
        "The sum of relevance at the input, and that of its magnitudes, in shares of the start, which is the predicted "
        "class' logit; the shares that the ledger names; and what is *missing*, neither here nor there. torchvision's "
        "models with random weights of seed 0, two inputs of noise, 224 x 224, float32. Written by "
        f"`make support`, with torch {version('torch')}, torchvision "
        f"{version('torchvision')}{_version('lxt')}{_version('transformers')}. LXT is conservative propagation through "
        "gradients, with the rules of relprop's `epsilon`: the two agree. It knows torchvision's vision transformer, "
        "and its imports need `transformers` below 5.",
        "",
        "| model | method | sum at the input | magnitudes | named by the ledger | missing |",
        "|---|---|---|---|---|---|",
    ]
    # The one that LXT knows comes last, for it stays changed.
    found = {name: rows(name) for name in reversed(MODELS)}
    lines += [f"| {' | '.join(row)} |" for name in MODELS for row in found[name]]
    return "\n".join(lines) + "\n"


def _version(package: str) -> str:
    try:
        return f", {package} {version(package)}"
    except ModuleNotFoundError:
        return ""


if __name__ == "__main__":
    torch.set_num_threads(1)
    KEPT.parent.mkdir(exist_ok=True)
    KEPT.write_text(section(), encoding="utf-8")
