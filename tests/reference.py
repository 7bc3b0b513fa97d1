"""Two references that share no code with relprop, written from the formulas alone.

The first builds the explicit matrix of a linear layer and applies each rule to it, entry by entry.
The second walks a torchvision ResNet by hand, module by module, and uses autograd for the transposes.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Map = Callable[[Tensor], Tensor]


# -- The explicit matrix of a layer ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Matrix:
    """A linear layer written out: `weight[j, i]` leads from input i to output j of one sample."""

    weight: Tensor  # (outputs, inputs)
    bias: Tensor  # (outputs,)
    connected: Tensor  # (outputs, inputs), 1 where output j really reads input i, whatever the weight


def as_matrix(layer: Map, shape: tuple[int, ...]) -> Matrix:
    """Write `layer` out for one sample of `shape` by pushing every basis vector through it.

    A max pool becomes the 0/1 matrix of its windows: the maximum of a basis vector over a window tells if it is there.
    """
    inputs = prod(shape)
    basis = torch.eye(inputs, dtype=torch.float64).reshape(inputs, *shape)
    bias = layer(torch.zeros(1, *shape, dtype=torch.float64)).flatten()
    weight = (layer(basis).flatten(1) - bias).T
    if isinstance(getattr(layer, "weight", None), Tensor):
        ones = deepcopy(layer)
        nn.init.ones_(ones.weight)
        if ones.bias is not None:
            nn.init.zeros_(ones.bias)
        connected = ones(basis).flatten(1).T
    else:
        connected = weight
    return Matrix(weight.detach(), bias.detach(), (connected != 0).double())


# -- Rules on the matrix: (matrix, input of one sample, relevance of the outputs) -> relevance of the inputs -----------

Rule = Callable[[Matrix, Tensor, Tensor], Tensor]


def stabilise(total: Tensor, epsilon: float) -> Tensor:
    """Move `total` away from zero by epsilon, zero itself upwards."""
    return total + epsilon * torch.where(total >= 0, torch.ones_like(total), -1)


def hand_on(z: Tensor, connected: Tensor, r: Tensor) -> Tensor:
    """Share each output's relevance in proportion to `z`; where a whole row is zero, evenly among what it reads.

    A row without connections (a window that lies in the padding) has nobody to hand its relevance to.
    """
    given = torch.zeros(z.shape[1], dtype=z.dtype)
    for row, reads, relevance in zip(z, connected, r, strict=True):
        parts = row if row.any() else reads
        if parts.any():
            given += parts / parts.sum() * relevance
    return given


def zplus(m: Matrix, a: Tensor, r: Tensor) -> Tensor:
    """The positive part of each contribution; Eq. (2) of the paper where inputs are non-negative."""
    return hand_on((m.weight * a).clamp(min=0), m.connected, r)


def zplus_stabilised(epsilon: float, bias: bool) -> Rule:
    """As `zplus`, with epsilon (and the bias' positive part) in the denominator, and dead units lost."""

    def rule(m: Matrix, a: Tensor, r: Tensor) -> Tensor:
        z = (m.weight * a).clamp(min=0)
        total = z.sum(1) + m.bias.clamp(min=0) * bias
        return (z / stabilise(total, epsilon)[:, None] * r[:, None]).sum(0)

    return rule


def epsilon(eps: float) -> Rule:
    """Bach et al. 2015, the bias in the denominator."""

    def rule(m: Matrix, a: Tensor, r: Tensor) -> Tensor:
        z = m.weight * a
        return (z / stabilise(z.sum(1) + m.bias, eps)[:, None] * r[:, None]).sum(0)

    return rule


def gamma(factor: float, eps: float) -> Rule:
    """The generalised gamma rule: contributions of the output's own sign count 1 + gamma times, the bias likewise."""

    def rule(m: Matrix, a: Tensor, r: Tensor) -> Tensor:
        given = torch.zeros_like(a)
        for j in range(len(r)):
            z, b = m.weight[j] * a, m.bias[j]
            sign = torch.sign(z.sum() + b)
            if sign == 0:
                continue
            z = z + factor * torch.where(z * sign > 0, z, 0.0)
            b = b + factor * torch.where(b * sign > 0, b, 0.0)
            given += z / stabilise(z.sum() + b, eps) * r[j]
        return given

    return rule


def alpha_beta(alpha: float, beta: float) -> Rule:
    """Positive contributions share alpha times the relevance, negative ones minus beta times.

    Where a unit has none of a sign, that part goes evenly to what the unit reads, so that nothing is lost.
    """

    def rule(m: Matrix, a: Tensor, r: Tensor) -> Tensor:
        z = m.weight * a
        positive, negative = z.clamp(min=0), z.clamp(max=0)
        return alpha * hand_on(positive, m.connected, r) - beta * hand_on(negative, m.connected, r)

    return rule


def alpha_beta_stabilised(alpha: float, beta: float, epsilon: float, bias: bool) -> Rule:
    """As `alpha_beta`, with epsilon (and the bias by its sign) in both denominators, and dead units lost."""

    def rule(m: Matrix, a: Tensor, r: Tensor) -> Tensor:
        z = m.weight * a
        given = torch.zeros_like(a)
        for factor, part, b in (
            (alpha, z.clamp(min=0), m.bias.clamp(min=0)),
            (-beta, z.clamp(max=0), m.bias.clamp(max=0)),
        ):
            given += factor * (part / stabilise(part.sum(1) + b * bias, epsilon)[:, None] * r[:, None]).sum(0)
        return given

    return rule


def flat(m: Matrix, _: Tensor, r: Tensor) -> Tensor:
    """Every connection weighs the same."""
    return hand_on(m.connected, m.connected, r)


def w2(m: Matrix, _: Tensor, r: Tensor) -> Tensor:
    """Squared weights, whatever the input."""
    return hand_on(m.weight**2, m.connected, r)


def wplus(m: Matrix, _: Tensor, r: Tensor) -> Tensor:
    """Positive weights, the input taken as ones."""
    return hand_on(m.weight.clamp(min=0), m.connected, r)


def zbox(low: Tensor, high: Tensor) -> Rule:
    """Contributions (a - low) w+ + (a - high) w-, with a bound for every input."""

    def rule(m: Matrix, a: Tensor, r: Tensor) -> Tensor:
        z = (a - low) * m.weight.clamp(min=0) + (a - high) * m.weight.clamp(max=0)
        return hand_on(z, m.connected, r)

    return rule


def winner(m: Matrix, a: Tensor, r: Tensor) -> Tensor:
    """Winner takes all, tied maxima share evenly."""
    window = torch.where(m.connected > 0, a, -torch.inf)
    return hand_on((window == window.amax(1, keepdim=True)).double(), m.connected, r)


def brute_force(rule: Rule, layer: Map, a: Tensor, r: Tensor) -> Tensor:
    """Relevance of the batch `a`, given relevance `r` of `layer(a)`, sample by sample on the explicit matrix."""
    matrix = as_matrix(layer, tuple(a.shape[1:]))
    rows = [rule(matrix, a_n.flatten(), r_n.flatten()) for a_n, r_n in zip(a, r, strict=True)]
    return torch.stack(rows).reshape(a.shape)


# -- A torchvision ResNet by hand --------------------------------------------------------------------------------------


@dataclass
class ResNetRelevance:
    """What `resnet_relevance` found: at the input, and arriving at the input of each named module."""

    output: Tensor
    target: Tensor
    start: Tensor
    input: Tensor
    at: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class ResNetRules:
    """`paper`: exact, dead units hand on evenly. `released`: 1e-5 in every denominator, dead units lost, 2x2 pool."""

    released: bool = False
    split: str = "ratio"
    identity_skips: bool = True

    def step(self, forward: Map, connections: Map, a: Tensor, r: Tensor) -> Tensor:
        """z+ through `forward`, whose weights are non-negative already; `connections` is the same map on ones."""
        z = forward(a)
        if self.released:
            return a * transpose(forward, a, r / (z + 1e-5))
        dead = z == 0
        alive = a * transpose(forward, a, torch.where(dead, 0, r / torch.where(dead, 1, z)))
        reads = connections(torch.ones_like(a))
        return alive + transpose(connections, a, torch.where(dead & (reads > 0), r / reads.clamp(min=1e-9), 0))

    def conv(self, layer: nn.Conv2d, a: Tensor, r: Tensor) -> Tensor:
        def with_weight(weight: Tensor) -> Map:
            return lambda t: F.conv2d(t, weight, None, layer.stride, layer.padding, layer.dilation, layer.groups)

        weight = layer.weight.detach()
        return self.step(with_weight(weight.clamp(min=0)), with_weight(torch.ones_like(weight)), a, r)

    def linear(self, layer: nn.Linear, a: Tensor, r: Tensor) -> Tensor:
        weight = layer.weight.detach()
        return self.step(lambda t: t @ weight.clamp(min=0).T, lambda t: t @ torch.ones_like(weight).T, a, r)

    def global_average(self, a: Tensor, r: Tensor) -> Tensor:
        def average(t: Tensor) -> Tensor:
            return t.mean((2, 3))

        return self.step(average, average, a, r)

    def max_pool(self, layer: nn.MaxPool2d, a: Tensor, r: Tensor) -> Tensor:
        def average(t: Tensor) -> Tensor:
            if self.released:
                return F.avg_pool2d(t, 2, 2)
            return F.avg_pool2d(t, layer.kernel_size, layer.stride, layer.padding, layer.ceil_mode, divisor_override=1)

        return self.step(average, average, a, r)

    def share_of_skip(self, skip: Tensor, main: Tensor, identity: bool) -> Tensor:
        if identity and not self.identity_skips:
            return torch.zeros_like(skip)
        if self.split == "symmetric":
            return torch.full_like(skip, 0.5)
        total = skip.abs() + main.abs()
        return torch.where(total == 0, 0.5, skip.abs() / torch.where(total == 0, 1, total))


def transpose(forward: Map, like: Tensor, r: Tensor) -> Tensor:
    """The transpose of a linear map, applied to `r`."""
    point = torch.zeros_like(like, requires_grad=True)
    with torch.enable_grad():
        out = forward(point)
    return torch.autograd.grad(out, point, r)[0]


@dataclass(frozen=True)
class BlockPass:
    """One block's forward pass: the input of each convolution of the residual branch, and both summands."""

    block: nn.Module
    input: Tensor
    conv_inputs: list[Tensor]
    main: Tensor
    skip: Tensor

    @classmethod
    def run(cls, block: nn.Module, a: Tensor) -> BlockPass:
        h, inputs = a, []
        for conv, norm in residual_branch(block):
            h = h if not inputs else h.clamp(min=0)
            inputs.append(h)
            h = norm(conv(h))
        return cls(block, a, inputs, h, a if block.downsample is None else block.downsample(a))

    @property
    def output(self) -> Tensor:
        return (self.main + self.skip).clamp(min=0)


def residual_branch(block: nn.Module) -> list[tuple[nn.Conv2d, nn.Module]]:
    """The (convolution, batch norm) pairs of a BasicBlock or a Bottleneck, in order."""
    pairs = [(block.conv1, block.bn1), (block.conv2, block.bn2)]
    return [*pairs, (block.conv3, block.bn3)] if hasattr(block, "conv3") else pairs


@torch.no_grad()
def resnet_relevance(model: nn.Module, x: Tensor, rules: ResNetRules, target: Tensor | None = None) -> ResNetRelevance:
    """LRP of a torchvision ResNet from softmax(output)[target]; batch norms and ReLUs pass relevance unchanged."""
    stem = model.bn1(model.conv1(x)).clamp(min=0)
    pooled = model.maxpool(stem)
    blocks: dict[str, BlockPass] = {}
    h = pooled
    for stage in ("layer1", "layer2", "layer3", "layer4"):
        for index, block in enumerate(getattr(model, stage)):
            blocks[f"{stage}.{index}"] = done = BlockPass.run(block, h)
            h = done.output
    features = h.mean((2, 3))
    output = model.fc(features)
    target = output.argmax(1) if target is None else target
    start = output.softmax(1).gather(1, target[:, None])[:, 0]

    at: dict[str, Tensor] = {}
    r = torch.zeros_like(output).scatter(1, target[:, None], start[:, None])
    r = at["fc"] = rules.linear(model.fc, features, r)
    r = at["avgpool"] = rules.global_average(h, r)
    for name, done in reversed(blocks.items()):
        share = rules.share_of_skip(done.skip, done.main, identity=done.block.downsample is None)
        r_skip, r_main = r * share, r * (1 - share)
        convs = [conv for conv, _ in residual_branch(done.block)]
        for number, (conv, a) in reversed(list(enumerate(zip(convs, done.conv_inputs, strict=True), start=1))):
            r_main = at[f"{name}.conv{number}"] = rules.conv(conv, a, r_main)
        if done.block.downsample is not None:
            r_skip = at[f"{name}.downsample.0"] = rules.conv(done.block.downsample[0], done.input, r_skip)
        r = at[name] = r_main + r_skip
    r = at["maxpool"] = rules.max_pool(model.maxpool, stem, r)
    r = at["conv1"] = rules.conv(model.conv1, torch.ones_like(x), r)
    return ResNetRelevance(output, target, start, r, at)
