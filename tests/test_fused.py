"""Steps in one pass: the same values as step by step, and right sums; and how their library comes about."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import relprop
from relprop import fused, merges
from relprop.compat import import_torchvision
from relprop.dues import Due
from relprop.forward import Forward
from relprop.pools import Pool, Sliding

SHAPES = [(2, 64, 56, 56), (3, 7, 5, 3), (1, 2048, 7, 7), (4, 10)]

compiled = pytest.mark.skipif(fused.library() is None, reason="needs a C compiler (cc) with OpenMP, on Linux")


@pytest.fixture(params=[(shape, targets) for shape in SHAPES for targets in (1, 3)], ids=str)
def drawn(request: pytest.FixtureRequest) -> tuple[Tensor, Tensor, Tensor]:
    """Two values and relevance, with zeros among them, channels last."""
    shape, targets = request.param
    draw = torch.Generator().manual_seed(len(shape) + targets)

    def tensor(*shape: int) -> Tensor:
        t = torch.randn(*shape, generator=draw)
        t[t.abs() < 0.2] = 0
        return t.contiguous(memory_format=torch.channels_last) if t.ndim == 4 else t

    r = tensor(targets * shape[0], *shape[1:]).unflatten(0, (targets, -1))
    return tensor(*shape), tensor(*shape), r


@pytest.fixture(params=["whole", "product", "both"])
def come(request: pytest.FixtureRequest, drawn: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor | Due, Tensor, Tensor]:
    """Relevance in the three ways that it comes; what it is; and its product, zero where there is none."""
    a, _, r = drawn
    a = a.flip(1).contiguous(memory_format=torch.channels_last) if a.ndim == 4 else a.flip(1)
    if request.param == "whole":
        return r, r, torch.zeros_like(r)
    more = r.flip(2) if request.param == "both" else None
    more = None if more is None else torch.empty_like(r).copy_(more)
    product = r * a
    return Due(r.clone(), a, more), product if more is None else more + product, product


def summed(t: Tensor) -> Tensor:
    return t.double().flatten(2).sum(2)


def assert_sums(found: Tensor, *expected: Tensor) -> None:
    for sums, t in zip(found, expected, strict=True):
        torch.testing.assert_close(sums, summed(t), rtol=0, atol=1e-6 * float(summed(t.abs()).max()) + 1e-12)


def assert_known(come: Tensor | Due, product: Tensor) -> None:
    """The sums of a product are known, if there was one."""
    if isinstance(come, Due):
        assert come.sums is not None
        assert_sums(torch.stack(come.sums), product, product.abs())


Come = tuple[Tensor | Due, Tensor, Tensor]


@compiled
class TestSteps:
    def test_a_split_by_magnitude(self, drawn: tuple[Tensor, Tensor, Tensor], come: Come) -> None:
        a, b, _ = drawn
        whole, r, product = come
        x, y = torch.empty_like(r), torch.empty_like(r)
        sums = fused.split_by_magnitude(a, b, whole, x, y)
        assert_known(whole, product)
        share = (a.abs() / (a.abs() + b.abs())).nan_to_num(0.5) * r
        assert torch.equal(x, share)
        assert torch.equal(y, r - share)
        assert_sums(sums, x, y, x.abs(), y.abs())

    def test_a_split_by_value(self, drawn: tuple[Tensor, Tensor, Tensor], come: Come) -> None:
        a, b, _ = drawn
        whole, r, product = come
        x, y = torch.empty_like(r), torch.empty_like(r)
        sums = fused.split_by_value(a, b, whole, x, y, 1e-3)
        assert_known(whole, product)
        eps = torch.copysign(torch.tensor(1e-3), a + b)
        s = r / (a + b + eps)
        assert torch.equal(x, a * s)
        assert torch.equal(y, b * s)
        assert_sums(sums, x, y, x.abs(), y.abs(), s * eps)

    @pytest.mark.parametrize("lost", [True, False])
    def test_a_division(self, drawn: tuple[Tensor, Tensor, Tensor], come: Come, lost: bool) -> None:
        z, *_ = drawn
        whole, r, product = come
        z = z if lost else torch.where(z == 0, 1, z)
        s = torch.empty_like(r)
        assert fused.divide(whole, z, s, 1e-30) == lost
        assert_known(whole, product)
        assert torch.equal(s, torch.where(z == 0, 0, r / z))

    @pytest.mark.parametrize("biased", [True, False])
    @pytest.mark.parametrize("per_sample", [True, False])
    def test_a_stabilised_division(
        self, drawn: tuple[Tensor, Tensor, Tensor], come: Come, biased: bool, per_sample: bool
    ) -> None:
        z, *_ = drawn
        whole, r, product = come
        eps = torch.linspace(0.1, 0.2, len(z)) if per_sample else torch.tensor(0.1)
        bias = torch.linspace(-1, 1, z.shape[1]) if biased else None
        s = torch.empty_like(r)
        sums = fused.steady(whole, z, s, eps, bias)
        assert_known(whole, product)
        wide = torch.copysign(eps.reshape(-1, *[1] * (z.ndim - 1)), z)
        expected = r / (z + wide)
        assert torch.equal(s, expected)
        shared = torch.zeros_like(s) if bias is None else s * bias.reshape(-1, *[1] * (z.ndim - 2))
        assert_sums(sums, s * wide, shared)

    def test_a_product(self, come: Come) -> None:
        whole, r, product = come
        assert torch.equal(fused.taken(whole), r)
        assert_known(whole, product)

    def test_a_quotient_over_the_factor(self, drawn: tuple[Tensor, Tensor, Tensor]) -> None:
        """A ReLU's output may be both what a product is due with and what the next rule divides by and writes over."""
        a, _, r = drawn
        r, z = r[:1], a.relu()
        expected = r * z / (z + 0.1)
        s = z[None]
        fused.steady(Due(r.clone(), z), z, s, torch.tensor(0.1), None)
        assert torch.equal(s, expected)

    def test_a_measure(self, drawn: tuple[Tensor, Tensor, Tensor]) -> None:
        *_, r = drawn
        assert_sums(fused.measure(r), r, r.abs())

    def test_sums_are_the_same_for_any_number_of_threads(self) -> None:
        r = torch.randn(2, 3, 5, 200, 100)
        before = torch.get_num_threads()
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(fused.measure(r))
        torch.set_num_threads(before)
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])

    def test_what_it_does_not_take(self) -> None:
        a, r = torch.rand(2, 4, 3, 3), torch.rand(3, 2, 4, 3, 3)
        assert fused.fits(a, r=r)
        assert not fused.fits(a.double(), r=r.double())
        assert not fused.fits(a.contiguous(memory_format=torch.channels_last), r=r)
        assert not fused.fits(a, r=r[:1].expand(3, -1, -1, -1, -1))
        assert not fused.fits(a[:, :, :2], r=r[:, :, :, :2])


@pytest.fixture
def in_steps(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Leaves everything to torch, from the call on."""
    return lambda: monkeypatch.setattr(fused, "library", lambda: None)


@compiled
@pytest.mark.parametrize("shape", [(2, 64, 12, 12), (3, 7, 9, 11), (1, 300, 13, 8)])
@pytest.mark.parametrize("kernel", [(3, 3), (2, 4)])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("ceil", [True, False])
def test_a_max_pool_hands_on_the_same(
    shape: tuple[int, ...],
    kernel: tuple[int, int],
    stride: int,
    dilation: int,
    ceil: bool,
    in_steps: Callable[[], None],
) -> None:
    draw, targets = torch.Generator().manual_seed(0), 2
    windows = Sliding(kernel, (stride, 2), (1, 0), (dilation, 1), ceil)
    a = torch.randint(4, shape, generator=draw).float().contiguous(memory_format=torch.channels_last)  # with ties
    y = F.max_pool2d(a, kernel, (stride, 2), (1, 0), (dilation, 1), ceil)
    r = torch.randn(targets * len(y), *y.shape[1:], generator=draw).contiguous(memory_format=torch.channels_last)
    pool, r = Pool(windows, torch.nn.Identity(), "max"), r.unflatten(0, (targets, -1))
    assert fused.winners(a, y, r, (windows.kernel, windows.stride, windows.padding, windows.dilation)) is not None
    found = pool.winners(a, y, r)
    in_steps()
    assert torch.equal(found, pool.winners(a, y, r))
    torch.testing.assert_close(summed(found), summed(r), rtol=0, atol=1e-4)


def test_padding_never_wins(in_steps: Callable[[], None]) -> None:
    a, r = torch.full((1, 1, 2, 2), -torch.inf), torch.ones(1, 1, 1, 1, 1)
    pool = Pool(Sliding((3, 3), (2, 2), (1, 1), (1, 1)), nn.MaxPool2d(3, 2, 1), "max")
    for prepare in (lambda: None, in_steps):
        prepare()
        assert torch.equal(pool.winners(a, pool.forward(a), r), torch.full((1, 1, 1, 2, 2), 0.25))


@compiled
@pytest.mark.parametrize("preset", ["relprop", "paper", "epsilon", "mixture", "epsilon-plus-flat"])
def test_explanations_are_the_same_with_and_without(preset: str, in_steps: Callable[[], None]) -> None:
    torch.manual_seed(0)
    net, x = import_torchvision().models.resnet18(num_classes=4).eval(), torch.rand(2, 3, 64, 64)
    one = relprop.explain(net, x, target=1, preset=preset)
    several = relprop.explain(net, x, target=torch.tensor([[0, 1], [2, 1]]), preset=preset)
    strict = relprop.explain(net, x, target=1, preset=preset, strict=True)
    assert torch.equal(one.relevance, strict.relevance)
    in_steps()
    plain = relprop.explain(net, x, target=1, preset=preset)
    assert torch.equal(one.relevance, plain.relevance)
    assert one.ledger.edges.keys() == plain.ledger.edges.keys()
    for edge, sums in one.ledger.edges.items():
        size = 1e-6 * float(sums[1].max())
        for mine, other in zip(sums, plain.ledger.edges[edge], strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=size)
    both = relprop.explain(net, x, target=torch.tensor([[0, 1], [2, 1]]), preset=preset)
    near = 1e-5 * float(both.relevance.abs().max())
    torch.testing.assert_close(several.relevance, both.relevance, rtol=0, atol=near)
    for found in (one, several, plain, both):
        assert float(found.ledger.error.max()) < 1e-5


@compiled
@pytest.mark.parametrize("split", ["symmetric", "ratio", "signed", "main-only"])
@pytest.mark.parametrize("skips", [True, False])
def test_all_splits_are_the_same_with_and_without(split: str, skips: bool, in_steps: Callable[[], None]) -> None:
    torch.manual_seed(0)
    net, x = import_torchvision().models.resnet18(num_classes=4).eval(), torch.rand(2, 3, 64, 64)
    one = relprop.explain(net, x, target=1, preset="paper", split=split, identity_skips=skips)
    in_steps()
    plain = relprop.explain(net, x, target=1, preset="paper", split=split, identity_skips=skips)
    assert torch.equal(one.relevance, plain.relevance)
    assert float(one.ledger.error.max()) < 1e-5


class Chain(nn.Module):
    """Two convolutions, with something between them behind a ReLU."""

    def __init__(self, between: nn.Module | None) -> None:
        super().__init__()
        self.first, self.norm, self.between = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), between
        self.second, self.head = nn.Conv2d(8, 8, 3), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        a = self.norm(self.first(x)).relu()
        a = a if self.between is None else self.between(a)
        y: Tensor = self.head(self.second(a).mean((2, 3)))
        return y


class TestDividingByAReLU:
    """The epsilon rule divides by what a map put out; its ReLU will do where no relevance comes to zeros."""

    @staticmethod
    def kept(between: nn.Module | None = None, near: float = 1e-5, **options: object) -> tuple[bool, bool]:
        """Whether negative outputs of the first map are kept; and whether the map is that of double precision."""
        torch.manual_seed(0)
        net, x = Chain(between).eval(), torch.randn(2, 3, 12, 12)
        plan = relprop.plan(net, **{"preset": "epsilon", **options})
        values = Forward(plan)(x).values
        first = next(i for i, node in enumerate(plan.graph) if node.name == "first")
        negative = bool((values[first] < 0).any())
        single = relprop.explain(net, x, 1, **{"preset": "epsilon", **options}).relevance
        double = relprop.explain(net.double(), x.double(), 1, **{"preset": "epsilon", **options}).relevance
        return negative, bool((single - double).abs().max() < near * double.abs().max())

    def test_a_map_behind_it_skips_zeros(self) -> None:
        assert self.kept() == (False, True)

    def test_a_pool_whose_winner_may_be_zero_does_not(self) -> None:
        assert self.kept(nn.MaxPool2d(2)) == (True, True)

    def test_a_rule_that_hands_evenly_does_not(self) -> None:
        # Outputs near zero get as much as others, and divide it by next to nothing: digits are lost, ReLU or not.
        assert self.kept(overrides={"second": "flat"}, near=1e-3) == (True, True)

    def test_a_stabiliser_relative_to_all_outputs_sees_them_all(self) -> None:
        relative = relprop.rules.epsilon(0.01, relative=True)
        assert self.kept(overrides={"first": relative}) == (True, True)

    def test_without_a_stabiliser_zeros_cannot_be_divided_by(self) -> None:
        assert self.kept(overrides={"*": relprop.rules.epsilon(0)}) == (True, True)


def test_a_bias_for_each_of_many_outputs_is_summed_exactly() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 128_000)).eval()
    nn.init.constant_(net[0].bias, 0.1)
    found = relprop.explain(net, torch.randn(1, 8), start=lambda y: y, preset="epsilon", strict=True)
    assert float(found.ledger.error.max()) < 1e-5


@pytest.mark.parametrize(
    "split",
    [
        merges.Split("sizes, stabilised", torch.abs, epsilon=0.1),
        merges.Split("squares", torch.square),
        merges.Split("values", merges.SIGNED.weights),
    ],
    ids=str,
)
def test_a_split_of_ones_own_is_not_taken_for_another(split: merges.Split) -> None:
    a, b, r = torch.tensor([[1.0, 3.0]]), torch.tensor([[1.0, 1.0]]), torch.ones(1, 1, 2)
    assert split.weights is not None
    x, y = split.weights(a), split.weights(b)
    whole = x + y + (split.epsilon or 0)
    found = split([a, b], 2, r).relevance
    torch.testing.assert_close(found, ((x / whole)[None], (y / whole)[None]))


class TestLibrary:
    @pytest.fixture
    def found(self, monkeypatch: pytest.MonkeyPatch) -> Callable[..., bool]:
        """Whether a new process in such an environment would have the functions."""

        def found(**environment: object) -> bool:
            for name, value in environment.items():
                monkeypatch.setenv(name, str(value))
            return fused.library.__wrapped__() is not None

        return found

    @compiled
    def test_it_is_made_once_and_kept(self, found: Callable[..., bool], tmp_path: Path) -> None:
        assert found(RELPROP_CACHE=tmp_path)
        (made,) = tmp_path.iterdir()
        before = made.stat().st_mtime_ns
        assert found(RELPROP_CACHE=tmp_path)
        assert made.stat().st_mtime_ns == before

    @compiled
    def test_what_others_may_write_is_not_loaded(self, found: Callable[..., bool], tmp_path: Path) -> None:
        assert found(RELPROP_CACHE=tmp_path)
        (made,) = tmp_path.iterdir()
        for path in (made, tmp_path):
            before = path.stat().st_mode
            path.chmod(0o777)
            assert not found(RELPROP_CACHE=tmp_path)
            path.chmod(before)
        assert found(RELPROP_CACHE=tmp_path)

    @pytest.mark.parametrize("compiler", ["", "no-such-compiler", "false"])
    def test_there_is_none_without_a_compiler(self, compiler: str, found: Callable[..., bool], tmp_path: Path) -> None:
        assert not found(RELPROP_CACHE=tmp_path, RELPROP_COMPILER=compiler)
        assert not list(tmp_path.iterdir())

    def test_torch_does_it_then(self, tmp_path: Path) -> None:
        code = (
            "import torch, relprop; from relprop import fused; torch.manual_seed(0);"
            "net, x = torch.nn.Linear(3, 2).eval(), torch.ones(1, 3);"
            "e = relprop.explain(net, x, 0, preset='epsilon').ledger.error;"
            "print(fused.library() is None, float(e) < 1e-5)"
        )
        environment = {**os.environ, "RELPROP_CACHE": str(tmp_path), "RELPROP_COMPILER": "false"}
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
        assert run.stdout.strip() == "True True"

    @compiled
    def test_a_cache_here(self, found: Callable[..., bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        assert found(RELPROP_CACHE=".")

    def test_a_cache_that_cannot_be_written_will_not_do(self, found: Callable[..., bool], tmp_path: Path) -> None:
        file = tmp_path / "file"
        file.write_text("")
        assert not found(RELPROP_CACHE=file)

    def test_nor_will_no_home(self, found: Callable[..., bool], monkeypatch: pytest.MonkeyPatch) -> None:
        def homeless() -> Path:
            raise RuntimeError("Could not determine home directory.")  # as Path.expanduser does

        monkeypatch.setattr(fused, "folder", homeless)
        assert not found()

    def test_a_compiler_without_openmp_will_not_do(self, found: Callable[..., bool], tmp_path: Path) -> None:
        compiler = tmp_path / "cc"
        compiler.write_text('#!/bin/sh\nfor last; do :; done; echo "no such thing" > "$last"\n')
        compiler.chmod(0o755)
        (tmp_path / "cache").mkdir()
        assert not found(RELPROP_CACHE=tmp_path / "cache", RELPROP_COMPILER=compiler)
