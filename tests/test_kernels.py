"""Packed convolutions and tiles: faster, and the same."""

import pytest
import torch
from torch.nn import functional as F

from relprop import kernels
from relprop.convolution import Convolution
from relprop.tiles import SIZE, tileable, tiles
from relprop.transforms import positive, same

GEOMETRIES = [
    # kernel, stride, padding, dilation, groups
    (1, 1, 0, 1, 1),
    (3, 1, 1, 1, 1),
    (3, 1, 0, 1, 1),
    (3, 1, 2, 2, 1),
    (5, 1, 4, 1, 1),
    (3, 1, 3, 1, 1),  # padded beyond what a turned kernel can undo
    (1, 2, 0, 1, 1),
    (1, 3, 0, 1, 4),
    (3, 2, 1, 1, 1),
    (5, 3, 0, 1, 4),
    (2, 3, 1, 1, 1),  # pixels that no output sees
    (7, 2, 3, 1, 1),
    (3, 2, 2, 2, 1),
    (3, 1, 1, 1, 4),
    (3, 1, 1, 1, 8),
]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("kernel", "stride", "padding", "dilation", "groups"), GEOMETRIES)
def test_a_packed_convolution_is_torchs(
    kernel: int, stride: int, padding: int, dilation: int, groups: int, layout: torch.memory_format
) -> None:
    draw = torch.Generator().manual_seed(kernel + stride)
    a = torch.rand(2, 8, 12, 11, generator=draw).contiguous(memory_format=layout)
    weight = torch.randn(16, 8 // groups, kernel, kernel, generator=draw)
    bias = torch.randn(16, generator=draw)
    linear = Convolution(weight, bias, [stride] * 2, [(padding, padding)] * 2, [dilation] * 2, groups)
    exact = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    y = F.conv2d(a.double(), weight.double(), bias.double(), **exact)
    close = {"rtol": 1e-5, "atol": 1e-5, "check_dtype": False}
    for _ in range(2):  # packed, and then from what was packed
        torch.testing.assert_close(linear(a), y, **close)
        torch.testing.assert_close(linear.activated(a), y.relu(), **close)
        for transform in (same, positive):
            w = transform(weight).double()
            torch.testing.assert_close(linear.sums(a, transform), F.conv2d(a.double(), w, **exact), **close)
            s = torch.rand(1, *y.shape, generator=draw)
            x = a.double().requires_grad_()
            (back,) = torch.autograd.grad(F.conv2d(x, w, **exact), x, s[0].double())
            several = linear.shares(torch.cat([s, 2 * s]), transform, a.shape[1:])
            assert several.shape == (2, *a.shape)
            torch.testing.assert_close(several, torch.stack([back, 2 * back]), **close)
            torch.testing.assert_close(linear.shares(s, transform, a.shape[1:])[0], back, **close)


def test_kernels_are_used_here_and_nowhere_else() -> None:
    assert kernels.packable(torch.zeros(1, 2, 3, 3))
    assert not kernels.packable(torch.zeros(1, 2, 3, 3, dtype=torch.float64))
    assert not kernels.packable(torch.zeros(1, 2, 3))
    assert not kernels.packable(torch.zeros(1, 2, 3, 3, device="meta"))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_tiles_cover_every_sample_once(layout: torch.memory_format) -> None:
    a = torch.randn(3, 64, 80, 80).contiguous(memory_format=layout)
    result, sums = torch.zeros_like(a), [0.0] * 3
    assert tileable(a, result)
    pieces = list(tiles(a, result))
    assert len(pieces) == 3 * -(-a[0].numel() // SIZE) > 3
    for sample, (one, out) in pieces:
        out.add_(one)
        sums[sample] += float(one.double().sum())
    assert torch.equal(result, a)
    torch.testing.assert_close(torch.tensor(sums, dtype=torch.float64), a.double().sum((1, 2, 3)))


def test_what_does_not_lie_alike_has_no_tiles() -> None:
    a = torch.randn(3, 64, 40, 40)
    for other in (a.contiguous(memory_format=torch.channels_last), a[:1].expand_as(a), a.transpose(2, 3)):
        assert not tileable(a, other)
    assert not tileable(a[:, ::2], a[:, ::2])
    assert tileable(a[:1], a[:1].as_strided((1, 64, 40, 40), (7, 1600, 40, 1)))
    assert not tileable(a[:1].expand_as(a))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_strided_convolution_of_next_to_nothing(size: int) -> None:
    weight = torch.rand(4, 8, 3, 3)
    linear = Convolution(weight, None, [2, 2], [(1, 1)] * 2, [1, 1], 1)
    a = torch.rand(2, 8, size, 1).requires_grad_()
    s = torch.rand_like(F.conv2d(a, weight, stride=2, padding=1))
    (back,) = torch.autograd.grad(F.conv2d(a, weight, stride=2, padding=1), a, s)
    found = linear.shares(s[None], same, a.shape[1:])
    torch.testing.assert_close(found[0], back)
