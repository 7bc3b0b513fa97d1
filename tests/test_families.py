"""Each family of operators on a small net: the model's own output, nothing lost, and samples as if alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import relprop
from relprop import rules
from relprop.attention import Attention, Matmul
from relprop.gates import Product
from relprop.operators import Ref
from relprop.upsampling import TransposedConvolution, _interpolate


class Net(nn.Module):
    """A convolution, then whatever is to be tried, then a head; `(B, 4, 6, 6)` goes in between."""

    def __init__(self, middle: Callable[[Any, Tensor], Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.middle = middle
        for name, module in modules.items():
            setattr(self, name, module)
        self.token = nn.Parameter(torch.randn(1, 4, 1, 6))
        self.head = nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self, self.stem(x)).flatten(1))


def made(middle: Callable[[Any, Tensor], Tensor], **modules: nn.Module) -> Net:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        net = Net(middle, **modules).double().eval()
        net(torch.randn(1, 3, 6, 6, dtype=torch.float64))
        for parameter in net.parameters():
            parameter.normal_(std=0.5)
    return net


def assigned(_: Any, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for k in range(len(x.shape)):  # a loop, and a shape that decides
        y[:, k % x.shape[1]] = x[:, k % x.shape[1]] * (k + 1)
    return y


def hidden(x: Tensor, axes: int) -> tuple[Tensor, int]:
    """What fx is told not to look into, for it branches on a shape; it returns two things."""
    return (x.unsqueeze(-1) if x.dim() == axes else x), x.dim()


torch.fx.wrap("hidden")


def tokens(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2)


def attention(_: Any, x: Tensor) -> Tensor:
    """By hand, in windows, with samples second for a while."""
    b, c, h, w = x.shape
    t = x.view(b, c, 2, h // 2, 2, w // 2).permute(0, 2, 4, 3, 5, 1).reshape(b * 4, 9, c)
    q, k, v = torch.stack([t, t * 2, t - 1]).unbind(0)
    mixed = (q @ k.transpose(-2, -1) / 2).softmax(-1) @ v
    return mixed.reshape(b, 4, 9, c)


def second(m: Any, x: Tensor) -> Tensor:
    """Samples along the second axis, through a matrix, a sum and a norm."""
    t = tokens(x).transpose(0, 1)
    return m.norm(t + m.fc(t)).transpose(0, 1)


MIDDLES: dict[str, tuple[Callable[[Any, Tensor], Tensor], dict[str, Callable[[], nn.Module]]]] = {
    "cat": (lambda m, x: torch.cat([x, m.token.expand(x.shape[0], -1, -1, -1), x[:, :, :2]], 2), {}),
    "a constant of shapes": (lambda m, x: x + m.token * torch.ones(1, 4, x.shape[2], 6, dtype=x.dtype), {}),
    "stack": (lambda _, x: torch.stack([x, x + 1, x], 0).mean(0), {}),
    "chunk": (lambda _, x: x.chunk(2, 1)[1] - x.chunk(2, 1)[0], {}),
    "split": (lambda _, x: x.split([1, 3], 1)[1], {}),
    "slices": (lambda _, x: x[:, 1:, ::2, -1] + x[..., 0, [0, 2, 4]][:, :3], {}),
    "roll": (lambda _, x: torch.roll(x, (1, -2), (2, 3)).flip(1), {}),
    "repeat": (lambda _, x: x.repeat(1, 2, 1, 1) * x[:, :1].expand(-1, 8, -1, -1).sigmoid(), {}),
    "zero pad": (lambda _, x: F.pad(x, (1, 2, 0, 1)) + F.pad(x, (1, 2, 0, 1), value=3.0), {}),
    "reflect": (lambda _, x: F.pad(x, (2, 1, 1, 0), mode="reflect"), {}),
    "max pool padded by hand": (lambda _, x: F.max_pool2d(F.pad(x, (0, 1, 0, 1), value=-torch.inf), 3, 2), {}),
    "maximum": (lambda _, x: x.amax((2, 3)) + x.flatten(2).max(2)[0], {}),
    "pixel shuffle": (lambda _, x: F.pixel_shuffle(x, 2), {}),
    "unfold": (lambda _, x: F.fold(F.unfold(x, 3, padding=1), (6, 6), 3, padding=1), {}),
    "assignment": (assigned, {}),
    "a hidden function": (lambda _, x: hidden(x, 4)[0].mean(-1), {}),
    "gate": (lambda m, x: x * m.gate(x.mean((2, 3), keepdim=True)).sigmoid(), {"gate": lambda: nn.Conv2d(4, 4, 1)}),
    "glu": (lambda _, x: F.glu(x, 1), {}),
    "product of equals": (
        lambda m, x: m.a(x) * m.b(x),
        {"a": lambda: nn.Conv2d(4, 2, 1), "b": lambda: nn.Conv2d(4, 2, 1)},
    ),
    "scaled sums": (lambda m, x: 0.5 * x - x.relu() / 3 + (-x) * m.token.mean(), {}),
    "global response": (lambda m, x: torch.addcmul(m.token.mean(3, True), x, x.norm(dim=(2, 3), keepdim=True)), {}),
    "activations": (
        lambda m, x: F.gelu(x) + F.silu(x) + F.hardswish(x) + x.tanh() + F.elu(x) + m.prelu(x) + x.clamp(-1, 1) ** 2,
        {"prelu": nn.PReLU},
    ),
    "layer norm": (lambda m, x: m.norm(x), {"norm": lambda: nn.LayerNorm(6)}),
    "group norm": (lambda m, x: m.norm(x), {"norm": lambda: nn.GroupNorm(2, 4)}),
    "instance norm": (lambda m, x: m.norm(x), {"norm": lambda: nn.InstanceNorm2d(4, affine=True)}),
    "rms norm": (lambda m, x: m.norm(x), {"norm": lambda: nn.RMSNorm(6, eps=1e-6)}),
    "attention by hand": (attention, {}),
    "samples second": (second, {"fc": lambda: nn.Linear(4, 4), "norm": lambda: nn.LayerNorm(4)}),
    "samples second of one": (
        lambda m, x: m.norm(torch.stack([m.fc(x.mean((2, 3)))]) + 1)[0],
        {
            "fc": lambda: nn.Linear(4, 4),
            "norm": lambda: nn.LayerNorm(4),
        },
    ),
    "einsum": (lambda _, x: torch.einsum("bij,bjc->bic", (tokens(x) @ tokens(x).mT).softmax(-1), tokens(x)), {}),
    "multihead": (
        lambda m, x: m.mha(tokens(x), tokens(x), tokens(x))[0],
        {"mha": lambda: nn.MultiheadAttention(4, 2, batch_first=True)},
    ),
    "multihead, samples second": (
        lambda m, x: m.mha(*[tokens(x).transpose(0, 1)] * 3, need_weights=False)[0].transpose(0, 1),
        {"mha": lambda: nn.MultiheadAttention(4, 2)},
    ),
    "encoder": (
        lambda m, x: m.layer(tokens(x)),
        {"layer": lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, norm_first=True)},
    ),
    "lstm": (
        lambda m, x: m.lstm(tokens(x)[:, ::8])[0],
        {"lstm": lambda: nn.LSTM(4, 3, num_layers=2, bidirectional=True, batch_first=True)},
    ),
    "lstm, samples second": (
        lambda m, x: m.lstm(tokens(x)[:, ::12].transpose(0, 1))[1][0][0],
        {"lstm": lambda: nn.LSTM(4, 3)},
    ),
    "interpolation": (
        lambda _, x: F.interpolate(x, scale_factor=2, mode="bilinear") + F.interpolate(x, size=(12, 12)),
        {},
    ),
    "bicubic": (lambda _, x: F.interpolate(x, size=(9, 4), mode="bicubic"), {}),
    "transposed convolution": (
        lambda m, x: m.up(x),
        {"up": lambda: nn.ConvTranspose2d(4, 2, 3, stride=2, padding=1, output_padding=1)},
    ),
}


@pytest.mark.parametrize("preset", ["paper", "epsilon"])
@pytest.mark.parametrize(("middle", "modules"), MIDDLES.values(), ids=MIDDLES)
def test_nothing_is_lost_and_samples_stay_apart(
    middle: Callable[[Any, Tensor], Tensor], modules: dict[str, Callable[[], nn.Module]], preset: str
) -> None:
    net = made(middle, **{name: make() for name, make in modules.items()})
    x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    e = relprop.explain(net, x, 1, preset=preset, start="one", strict=True)
    torch.testing.assert_close(e.output, net(x).detach())
    assert torch.isfinite(e.relevance).all()
    assert e.ledger.error.max() <= 1e-9
    causes = {"constant", "padding"} | ({"bias", "epsilon"} if preset == "epsilon" else set())
    assert set(e.ledger.absorbed_by_cause) <= causes
    for k in range(2):
        alone = relprop.explain(net, x[k : k + 1], 1, preset=preset, start="one")
        torch.testing.assert_close(e.relevance[k : k + 1], alone.relevance, rtol=1e-6, atol=1e-9)
    both = relprop.explain(net, x, torch.tensor([[0, 1], [2, 1]]), preset=preset, start="one")
    torch.testing.assert_close(both.relevance[:, 1], e.relevance, rtol=1e-6, atol=1e-9)


def test_relevance_of_a_concatenation_goes_back_by_slice() -> None:
    net = made(lambda m, x: torch.cat([x, m.token.expand(len(x), -1, -1, -1)], 2))
    e = relprop.explain(net, torch.randn(1, 3, 6, 6, dtype=torch.float64), 0, start="one", layers=["head", "stem"])
    arrived = e.relevance_at("head").reshape(1, 4, 7, 6)
    torch.testing.assert_close(e.ledger.absorbed_by_cause["constant"], arrived[:, :, 6].sum((1, 2)))
    torch.testing.assert_close(e.ledger.at("stem").received, arrived[:, :, :6].sum((1, 2, 3)))


def test_attention_hands_all_to_the_values() -> None:
    """z+ on the explicit matrix of the weights, for one head."""
    q, k, v = (torch.randn(1, 1, 5, 3, dtype=torch.float64) for _ in range(3))
    r = torch.rand(1, 1, 1, 5, 3, dtype=torch.float64)
    refs = (Ref(0), Ref(1), Ref(2))
    op = relprop.operators.TABLE[F.scaled_dot_product_attention](*refs)
    assert isinstance(op, Attention)
    assert op.heirs == (2,)
    weights = (q @ k.transpose(-1, -2) / math.sqrt(3)).softmax(-1)
    expected = reference.brute_force(reference.zplus, lambda a: weights @ a, v, r[0])
    handed = rules.zplus()(op.map(q, k, v), v, r).relevance[0]
    torch.testing.assert_close(handed[0], expected)


@pytest.mark.parametrize(
    "options",
    [
        {"scale_factor": 2, "mode": "bilinear"},
        {"size": (3, 7)},
        {"size": (2, 3), "mode": "area"},
        {"size": (7, 9), "mode": "bicubic"},
        {"size": (3, 3), "mode": "bicubic"},
    ],
)
def test_interpolation_is_the_explicit_matrix(options: dict[str, Any]) -> None:
    a, op = torch.randn(2, 2, 4, 5, dtype=torch.float64), _interpolate(Ref(0), **options)
    y = op.forward(a)
    r = torch.rand(y.shape, dtype=torch.float64)
    for ours, theirs in ((rules.zplus(), reference.zplus), (rules.epsilon(1e-6), reference.epsilon(1e-6))):
        expected = reference.brute_force(theirs, op.forward, a, r)
        torch.testing.assert_close(ours(op.map(a), a, r[None]).relevance[0][0], expected)


def test_a_transposed_convolution_is_the_explicit_matrix() -> None:
    layer = nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, groups=2, bias=False).double()
    a = torch.randn(2, 4, 3, 4, dtype=torch.float64)
    r = torch.rand(layer(a).shape, dtype=torch.float64)
    linear = TransposedConvolution(layer.weight.detach(), None, ([2, 2], [1, 1], [0, 0], 2, [1, 1]))
    for ours, theirs in ((rules.zplus(), reference.zplus), (rules.epsilon(1e-6), reference.epsilon(1e-6))):
        expected = reference.brute_force(theirs, layer, a, r)
        torch.testing.assert_close(ours(linear, a, r[None]).relevance[0][0], expected)


def test_a_layer_norm_under_epsilon_is_linear_with_its_factor_fixed() -> None:
    norm = nn.LayerNorm(5).double()
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    a, r = torch.randn(2, 5, dtype=torch.float64), torch.randn(2, 5, dtype=torch.float64)
    op = relprop.operators.TABLE[nn.LayerNorm](norm, Ref(0))
    for k in range(2):
        factor = (a[k].var(unbiased=False) + norm.eps).rsqrt() * norm.weight.detach()
        bias = norm.bias.detach()
        expected = reference.brute_force(
            reference.epsilon(1e-6),
            lambda t, f=factor, b=bias: (t - t.mean(-1, keepdim=True)) * f + b,
            a[k : k + 1],
            r[k : k + 1],
        )
        ours = rules.epsilon(1e-6)(op.map(a[k : k + 1]), a[k : k + 1], r[None, k : k + 1]).relevance[0][0]
        torch.testing.assert_close(ours, expected)


def gated(m: Any, y: Tensor) -> Tensor:
    return y * m.a(y)


def halved(m: Any, x: Tensor) -> Tensor:
    u, v = m.a(x).relu().chunk(2, 1)
    return u * m.b(v.repeat(1, 2, 1, 1))[:, :2]


def heads(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x).softmax(-1)) @ x  # the weights of four heads, mixed


def linear_attention(m: Any, x: Tensor) -> Tensor:
    return m.a(x) @ (m.b(x).softmax(-1) @ x)


SIGNALS: dict[str, tuple[Callable[[Any, Tensor], Tensor], tuple[float, float]]] = {
    "a sigmoid is a gate": (lambda m, x: x.sigmoid() * m.a(x), (0, 1)),
    "more so than a tanh": (lambda m, x: m.a(x).tanh() * m.b(x).sigmoid(), (1, 0)),
    "what was made of the other": (lambda m, x: gated(m, x.relu()), (1, 0)),
    "one number for many": (lambda m, x: m.a(x)[:, :1] * m.b(x).relu(), (0, 1)),
    "numbers for many, both": (lambda m, x: m.a(x)[:, :1] * m.b(x)[:, :, :1], (0.5, 0.5)),
    "an activation beside none": (lambda m, x: m.a(x) * m.b(x).relu(), (1, 0)),
    "an activation before both": (halved, (0.5, 0.5)),
    "nothing tells": (lambda m, x: m.a(x) * m.b(x), (0.5, 0.5)),
    "a quotient": (lambda m, x: m.a(x) / (m.b(x).abs() + 1), (1, 0)),
    "weights of a softmax": (lambda m, x: m.a(x).softmax(-1) @ m.b(x), (0, 1)),
    "weights of a softmax, mixed": (heads, (0, 1)),
    "a query beside values": (linear_attention, (0, 1)),
}


@pytest.mark.parametrize(("middle", "shares"), SIGNALS.values(), ids=SIGNALS)
def test_the_signal_of_a_product_is_read_from_the_graph(
    middle: Callable[[Any, Tensor], Tensor], shares: tuple[float, float]
) -> None:
    net = made(middle, a=nn.Conv2d(4, 4, 1), b=nn.Conv2d(4, 4, 1))
    ledger = relprop.explain(net, torch.randn(1, 3, 6, 6, dtype=torch.float64), start="one", strict=True).ledger
    graph = relprop.plan(net).graph
    last = max(i for i, n in enumerate(graph) if isinstance(n.operator, Product | Matmul))
    given = [ledger.edges.get((last, j)) for j in graph.nodes[last].inputs]
    assert [0 if share is None else float(share[0]) for share in given] == pytest.approx(shares)


def test_a_gate_may_get_half() -> None:
    net = made(lambda m, x: x * m.gate(x).sigmoid(), gate=nn.Conv2d(4, 4, 1))
    x = torch.randn(1, 3, 6, 6, dtype=torch.float64)
    assert relprop.explain(net, x, start="one").ledger.at("gate").received == 0
    e = relprop.explain(net, x, start="one", overrides={"mul": "halves"}, strict=True)
    torch.testing.assert_close(e.ledger.at("gate").received, torch.full((1,), 0.5, dtype=torch.float64))
    assert "gets no relevance" in str(relprop.plan(net))


def test_what_gets_no_relevance_needs_no_rule() -> None:
    net = made(lambda _, x: x * torch.erfinv(x.tanh() / 2).sigmoid())
    assert relprop.explain(net, torch.randn(1, 3, 6, 6, dtype=torch.float64), strict=True).ledger.error.max() < 1e-9
    with pytest.raises(relprop.RelpropError, match=r"erfinv .* has no rule"):
        relprop.plan(made(lambda _, x: torch.erfinv(x.tanh())))


def test_a_map_of_classes_starts_where_the_class_is_predicted() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1)).eval()
    x = torch.randn(2, 3, 6, 6)
    predicted = net(x).argmax(1)
    e = relprop.explain(net, x, 1, start="one", strict=True)
    count = (predicted == 1).sum((1, 2))
    torch.testing.assert_close(e.start, torch.where(count > 0, count, 36).float())
    torch.testing.assert_close(e.relevance.sum((1, 2, 3)), e.start)
    mask = torch.zeros(2, 3, 6, 6)
    mask[:, 2, 3, 3] = 2.0  # one pixel of a class
    one = relprop.explain(net, x, start=mask)
    torch.testing.assert_close(one.relevance.sum((1, 2, 3)), torch.full((2,), 2.0))
    assert one.relevance[..., :2, :].eq(0).all()
