"""Convolutions with fewer products: the same, zeros included."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import relprop
from relprop import fused
from relprop.convolution import Convolution
from relprop.kernels import Packed, packed
from relprop.transforms import negative, positive, same
from relprop.winograd import Winograd

pytestmark = pytest.mark.skipif(
    fused.library() is None or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="needs a C compiler (cc) with OpenMP, on Linux, and a processor with AVX2",
)

LEAST = 2.0**-7


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("side", [(12, 12), (13, 16), (9, 21), (3, 97)])
@pytest.mark.parametrize("padding", [(0, 0), (1, 1), (2, 1), (0, 3)])
@pytest.mark.parametrize("channels", [(32, 64), (96, 32)])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_it_is_torchs(side: tuple[int, int], padding: tuple[int, int], channels: tuple[int, int], threads: int) -> None:
    before, after = channels
    a, weight, bias = drawn(3, before, *side), drawn(after, before, 3, 3), drawn(after)
    exact = F.conv2d(a.double(), weight.double(), padding=padding)
    count = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for least in (0.0, LEAST):
            plain = Winograd(weight, None, padding, a.shape, least)
            close = {"rtol": 0, "atol": 1e-6 * float(exact.abs().max()), "check_dtype": False}
            torch.testing.assert_close(plain(a), exact, **close)
            biased = Winograd(weight, bias, padding, a.shape, least)
            expected = (exact + bias.double().reshape(-1, 1, 1)).relu()
            torch.testing.assert_close(biased(a, relu=True), expected, **close)
    finally:
        torch.set_num_threads(count)


@pytest.mark.parametrize("transform", [same, positive, negative])
def test_a_convolution_has_it_both_ways(transform: relprop.maps.Transform) -> None:
    a, weight = drawn(2, 32, 14, 15).relu(), drawn(64, 32, 3, 3)
    linear = Convolution(weight, drawn(64), [1, 1], [(1, 1)] * 2, [1, 1], 1)
    assert isinstance(linear._kernel(a, transform), Winograd)
    w = transform(weight).double()
    x = a.double().requires_grad_()
    y = F.conv2d(x, w, padding=1)
    s = drawn(2, *y.shape, seed=1).abs()
    for target in range(2):
        (back,) = torch.autograd.grad(y, x, s[target].double(), retain_graph=True)
        torch.testing.assert_close(
            linear.shares(s, transform, a.shape[1:])[target].double(), back, rtol=1e-5, atol=1e-4
        )
    torch.testing.assert_close(linear.sums(a, transform).double(), y.detach(), rtol=1e-5, atol=1e-4)


def test_a_window_of_zeros_is_zero() -> None:
    a = drawn(2, 32, 24, 24)
    a[:, :, 5:10, 8:15] = 0
    weight = drawn(32, 32, 3, 3)
    y = Winograd(weight, None, (1, 1), a.shape)(a)
    dead = F.max_pool2d(a.abs().amax(1, keepdim=True), 3, 1, 1) == 0
    assert dead.sum() == 2 * 3 * 5
    assert torch.equal((y == 0).all(1, keepdim=True), dead)


def test_what_is_no_number_stays_none() -> None:
    a, weight = drawn(1, 32, 16, 16), drawn(32, 32, 3, 3)
    a[0, 7, 4, 9] = torch.nan
    y = Winograd(weight, None, (1, 1), a.shape)(a, relu=True)
    assert torch.equal(y.isnan(), F.conv2d(a, weight, padding=1).relu().isnan())


def test_what_cancels_out_is_computed_anew() -> None:
    """Weights of zero where there is something, and nothing where there are weights: the sum is zero, not noise."""
    a = drawn(2, 32, 24, 24).abs()
    a[:, ::2, :, ::3] = 0
    weight = drawn(32, 32, 3, 3).abs()
    weight[:, 1::2] = 0
    weight[:, ::2, :, 1:] = 0
    exact = F.conv2d(a.double(), weight.double(), padding=1)
    dead = exact == 0
    assert 0 < int(dead.sum()) < dead.numel()
    assert bool((Winograd(weight, None, (1, 1), a.shape)(a)[dead] != 0).any())
    for laid in (weight, weight.contiguous(memory_format=torch.channels_last), weight.flip(2, 3).flip(2, 3)):
        y = Winograd(laid, None, (1, 1), a.shape, LEAST)(a)
        assert torch.equal(y == 0, dead)
        torch.testing.assert_close(y.double(), exact, rtol=1e-4, atol=0)


def test_such_dead_units_lose_nothing() -> None:
    """The same in a network: relevance of an output without contributions is handed on evenly, not divided by noise."""
    torch.manual_seed(0)
    convolutions = nn.Conv2d(3, 32, 1, bias=False), nn.Conv2d(32, 32, 3, padding=1)
    net = nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4)).eval()
    with torch.no_grad():
        net[0].weight.abs_()
        net[1].weight.abs_()[..., 1:] *= -1  # only the left column of a window counts
        net[1].bias.fill_(99.0)  # and all outputs have relevance
    x = torch.rand(2, 3, 24, 24)
    x[..., ::3] = 0
    e = relprop.explain(net, x, 1, preset="paper", strict=True, start="one")
    exact = relprop.explain(net.double(), x.double(), 1, preset="paper", start="one")
    assert float(e.ledger.max_leak) < 1e-5
    near = 1e-5 * float(exact.relevance.abs().max())
    torch.testing.assert_close(e.relevance.double(), exact.relevance, rtol=0, atol=near)


def test_an_image_is_the_same_in_any_batch() -> None:
    a, weight = drawn(5, 32, 16, 16), drawn(32, 32, 3, 3)
    many = Winograd(weight, None, (1, 1), a.shape)(a)
    assert torch.equal(many[3:4], Winograd(weight, None, (1, 1), (1, 32, 16, 16))(a[3:4]))


def test_other_convolutions_are_left_alone() -> None:
    def kind(
        channels: tuple[int, int] = (32, 32), kernel: int = 3, stride: int = 1, groups: int = 1, side: int = 16
    ) -> type:
        weight = torch.ones(channels[1], channels[0] // groups, kernel, kernel)
        shape = (1, channels[0], side, side)
        return type(packed(weight, None, ([stride] * 2, [1, 1], [1, 1], groups), shape))

    assert kind() is Winograd
    for other in ({"kernel": 1}, {"stride": 2}, {"groups": 2}, {"channels": (3, 32)}, {"channels": (32, 40)}):
        assert kind(**other) is Packed
    assert kind(side=4) is Packed  # four tiles do not pay
