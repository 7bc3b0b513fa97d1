"""The verbs of the engine: what they answer, what they leave behind (nothing), and what they refuse."""

from __future__ import annotations

import copy
import gc
import inspect
import random
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import relprop
from relprop import rules
from relprop.compat import import_torchvision
from relprop.forward import Forward

FORWARDS: list[str] = []
"""Grows by one at every call of a `Net`'s forward, traced or real; it lies outside of the model."""


@pytest.fixture(autouse=True)
def _the_same_numbers() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


class Block(nn.Module):
    """A residual block whose ReLU is used twice and works in place."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.down = nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 or inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += self.down(x)
        return self.relu(out)


class Net(nn.Module):
    """A small residual network with a bit of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.pool = nn.MaxPool2d(2)
        self.layer1 = Block(8, 8)
        self.layer2 = Block(8, 12, stride=2)
        self.dropout = nn.Dropout(0.5)
        self.fc = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        FORWARDS.append("forward")
        x = self.layer2(self.layer1(self.pool(self.stem(x))))
        return self.fc(self.dropout(F.adaptive_avg_pool2d(x, 1).flatten(1)))


class Functional(nn.Module):
    """Any function of a tensor and some modules, as a model."""

    def __init__(self, function: Callable[[Any, Tensor], Any], **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A model in evaluation, with batch norms that are not the identity."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = make().eval()
        for m in model.modules():
            if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is not None:
                m.running_mean.normal_()
                m.running_var.uniform_(0.5, 1.5)
                m.weight.normal_()
    return model


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def images(batch: int = 2) -> Tensor:
    return noise(batch, 3, 12, 12)


@pytest.fixture
def net() -> nn.Module:
    return seeded(Net)


def assert_same(got: Tensor, want: Tensor, tolerance: float = 1e-6) -> None:
    """Equal up to a part of the largest value."""
    assert got.shape == want.shape
    worst, largest = float((got - want).abs().max()), float(want.abs().max())
    assert worst <= tolerance * largest, f"off by {worst:.1e} where the largest is {largest:.1e}"


def fresh(model: nn.Module, x: Tensor, **options: Any) -> relprop.Explanation:
    """Explains a copy of the model, of which nothing can be known yet."""
    return relprop.explain(copy.deepcopy(model), x, **options)


# -- nothing is left --------------------------------------------------------------------------------------------------


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


def snapshot(model: nn.Module) -> list[Any]:
    """Everything about a model that a call could change, as things that can be compared."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    facts: list[Any] = [(name, id(t), t._version, t.requires_grad, t.dtype, bits(t)) for name, t in tensors]
    facts += [(name, None if p.grad is None else bits(p.grad)) for name, p in model.named_parameters()]
    for name, module in model.named_modules():
        attributes = {key: id(value) for key, value in vars(module).items()}
        dicts = {key: list(value.items()) for key, value in vars(module).items() if isinstance(value, dict)}
        tensorless = {key: [k for k, _ in items] for key, items in dicts.items()}
        facts.append((name, module.training, attributes, tensorless))
    for cls in {nn.Module, *(c for m in model.modules() for c in type(m).__mro__ if c is not object)}:
        facts.append((cls, {key: id(value) for key, value in vars(cls).items() if not key.startswith("_abc")}))
    return sorted(facts, key=str)


def with_grads(model: nn.Module) -> nn.Module:
    """Gradients of an earlier training step, which must survive, and one frozen parameter."""
    for i, p in enumerate(model.parameters()):
        p.grad = torch.full_like(p, float(i))
    next(model.parameters()).requires_grad_(False)
    return model


def test_snapshot_sees_every_kind_of_change() -> None:
    def changed(change: Callable[[nn.Module], Any]) -> bool:
        model = with_grads(seeded(Net))
        before = snapshot(model)
        change(model)
        return snapshot(model) != before

    assert not changed(lambda _: None)
    assert changed(lambda m: m.fc.weight.data.add_(1))
    assert changed(lambda m: m.stem[1].running_mean.add_(0))
    assert changed(lambda m: m.fc.register_forward_hook(lambda *_: None))
    assert changed(lambda m: m.layer1.train())
    assert changed(lambda m: m.zero_grad())
    assert changed(lambda m: m.fc.weight.requires_grad_(False))
    assert changed(lambda m: setattr(m, "left", 1))


@pytest.mark.parametrize("preset", ["paper", "released", "mixture", "epsilon", "epsilon-plus-flat"])
def test_nothing_is_left_on_the_model(preset: str) -> None:
    model = with_grads(seeded(Net))
    before = snapshot(model)
    relprop.plan(model, preset=preset)
    relprop.plan(model, images(), preset=preset)
    relprop.explain(model, images(), preset=preset, layers=["layer1", "layer2.relu"])
    relprop.LRP(model, preset=preset).attribute(images(), target=1)
    assert snapshot(model) == before


def raises_in_split(error: type[BaseException]) -> Callable[[Any], Any]:
    def split(_: tuple[Tensor, ...]) -> list[float]:
        raise error

    return split


FAILURES: dict[str, tuple[type[BaseException], dict[str, Any]]] = {
    "target": (relprop.RelpropError, {"target": 99}),
    "layer": (relprop.RelpropError, {"layers": ["nowhere"]}),
    "preset": (relprop.RelpropError, {"preset": "none"}),
    "override": (relprop.RelpropError, {"overrides": {"nowhere": "z+"}}),
    "leak": (relprop.RelpropError, {"split": lambda branches: [0.3] * len(branches), "strict": True}),
    "shares": (relprop.RelpropError, {"split": lambda _: [1.0]}),
    "NaN shares": (relprop.RelpropError, {"split": lambda branches: [float("nan")] * len(branches)}),
    "a split that raises": (ZeroDivisionError, {"split": raises_in_split(ZeroDivisionError)}),
    "an interrupt": (KeyboardInterrupt, {"split": raises_in_split(KeyboardInterrupt)}),
}


@pytest.mark.parametrize(("error", "options"), FAILURES.values(), ids=FAILURES)
def test_nothing_is_left_after_an_exception(error: type[BaseException], options: dict[str, Any]) -> None:
    model = with_grads(seeded(Net))
    before, x = snapshot(model), images()
    with pytest.raises(error):
        relprop.explain(model, x, **options)
    assert snapshot(model) == before
    assert torch.equal(x, images())
    assert_same(relprop.explain(model, x).relevance, fresh(model, x).relevance)


def test_nothing_is_left_after_a_failed_trace() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.last = self.fc(x)
        return self.last if self.last.sum() > 0 else -self.last

    model = with_grads(seeded(lambda: Functional(forward, fc=nn.Linear(4, 3))))
    before = snapshot(model)
    with pytest.raises(relprop.RelpropError, match="branches on values"):
        relprop.explain(model, noise(2, 4))
    assert snapshot(model) == before


def test_a_forward_that_raises_leaves_nothing() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.fc(x)
        raise LookupError("gone")

    model = seeded(lambda: Functional(forward, fc=nn.Linear(4, 3)))
    before = snapshot(model)
    with pytest.raises(relprop.RelpropError, match="gone"):
        relprop.explain(model, noise(2, 4))
    assert snapshot(model) == before


def test_what_a_forward_keeps_on_the_model_is_no_proxy_afterwards() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.features = self.fc(x)
        return self.features.relu()

    model = seeded(lambda: Functional(forward, fc=nn.Linear(4, 3)))
    before = snapshot(model)
    relprop.plan(model)
    assert snapshot(model) == before
    relprop.explain(model, noise(2, 4))
    assert isinstance(vars(model).get("features", torch.empty(0)), Tensor)


def test_tensors_made_in_forward_are_not_hung_on_the_model() -> None:
    model = seeded(lambda: Functional(lambda self, x: self.fc(x) + torch.ones(3), fc=nn.Linear(4, 3)))
    before = snapshot(model)
    e = relprop.explain(model, noise(2, 4))
    assert snapshot(model) == before
    assert "constant" in e.ledger.absorbed_by_cause


def test_random_numbers_are_not_touched(net: nn.Module) -> None:
    drawing = seeded(lambda: Functional(lambda self, x: self.fc(x) + torch.rand(3), fc=nn.Linear(4, 3)))
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes())  # noqa: NPY002
    relprop.explain(net, images())
    relprop.plan(net, images())
    with pytest.raises(relprop.RelpropError):
        relprop.explain(drawing, noise(2, 4))
    after = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes())  # noqa: NPY002
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def test_the_input_is_not_touched(net: nn.Module) -> None:
    x = images()
    relprop.explain(net, x)
    assert torch.equal(x, images())
    assert x._version == 0


@pytest.mark.parametrize(
    "begin",
    [
        lambda _, x: x.relu_(),
        lambda _, x: F.relu(x, inplace=True),
        lambda self, x: self.relu(x),
        lambda _, x: x.add_(1.0),
        lambda _, x: F.leaky_relu(x, 0.1, True),
    ],
    ids=["relu_", "F.relu", "nn.ReLU", "add_", "leaky_relu"],
)
def test_the_input_is_not_touched_by_a_model_that_begins_in_place(begin: Callable[..., Tensor]) -> None:
    parts = {"relu": nn.ReLU(inplace=True), "fc": nn.Linear(4, 3)}
    model = seeded(lambda: Functional(lambda self, x: self.fc(begin(self, x)), **parts))
    x = noise(2, 4)
    e = relprop.explain(model, x)
    assert torch.equal(x, noise(2, 4))
    assert x._version == 0
    assert_same(e.output, model(x.clone()).detach(), 1e-5)


def test_an_input_that_requires_grad_is_fine_and_gets_none(net: nn.Module) -> None:
    x = images().requires_grad_()
    e = relprop.explain(net, x)
    assert x.grad is None
    assert x.requires_grad
    assert torch.equal(e.relevance, relprop.explain(net, images()).relevance)


def test_results_do_not_share_memory_with_the_input() -> None:
    x = noise(2, 4)
    e = relprop.explain(nn.Identity().eval(), x, start="one")
    e.output.add_(1)
    e.relevance.add_(1)
    assert torch.equal(x, noise(2, 4))


@pytest.mark.parametrize("mode", ["grad", "no_grad", "inference", "autocast"])
def test_modes_around_the_call_change_nothing_and_no_graph_is_left(net: nn.Module, mode: str) -> None:
    want = fresh(net, images(), layers=["layer1"])
    modes = {
        "grad": torch.enable_grad(),
        "no_grad": torch.no_grad(),
        "inference": torch.inference_mode(),
        "autocast": torch.autocast("cpu", dtype=torch.bfloat16),
    }
    with modes[mode]:
        e = relprop.explain(net, images(), layers=["layer1"])
    for got, expected in (
        (e.relevance, want.relevance),
        (e.output, want.output),
        (e.relevance_at("layer1"), want.relevance_at("layer1")),
    ):
        assert got.dtype == torch.float32
        assert not got.requires_grad
        assert got.grad_fn is None
        assert_same(got, expected)


def test_what_was_learned_in_inference_mode_can_be_used_outside_and_back(net: nn.Module) -> None:
    with torch.inference_mode():
        inside = relprop.explain(net, images()).relevance
    outside = relprop.explain(net, images()).relevance
    assert torch.equal(inside, outside)
    net.fc(torch.ones(1, 12)).sum().backward()
    assert net.fc.weight.grad is not None
    with torch.inference_mode():
        assert torch.equal(relprop.explain(net, images()).relevance, outside)


# -- threads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("models", [1, 2], ids=["one model", "different models"])
def test_threads_get_the_maps_that_one_gets(models: int) -> None:
    xs = [noise(2, 3, 12, 12, seed=s) for s in range(4)]
    want = [relprop.explain(seeded(Net, i % models), x) for i, x in enumerate(xs)]
    expected = [seeded(Net, i)(images()).detach() for i in range(models)]
    for _ in range(5):  # every round begins with models of which nothing is known
        shared = [seeded(Net, i) for i in range(models)]
        barrier = threading.Barrier(len(xs) + 1)

        def explain(
            i: int, barrier: threading.Barrier = barrier, shared: list[nn.Module] = shared
        ) -> list[relprop.Explanation]:
            barrier.wait()
            return [relprop.explain(shared[i % models], xs[i]) for _ in range(3)]

        def forward(barrier: threading.Barrier = barrier, shared: list[nn.Module] = shared) -> list[list[Tensor]]:
            barrier.wait()
            with torch.no_grad():
                return [[model(images()) for model in shared] for _ in range(60)]

        with ThreadPoolExecutor(len(xs) + 1) as pool:
            outputs = pool.submit(forward)
            found = [pool.submit(explain, i) for i in range(len(xs))]
            for ys in outputs.result():
                for y, own in zip(ys, expected, strict=True):
                    assert_same(y, own)
            for future, e in zip(found, want, strict=True):
                for got in future.result():
                    assert_same(got.relevance, e.relevance)
                    assert_same(got.output, e.output)
                    assert got.ledger.max_leak <= 1e-5


# -- what is known of a model -----------------------------------------------------------------------------------------


def test_a_model_is_traced_and_compared_once_for_each_shape(net: nn.Module) -> None:
    FORWARDS.clear()
    relprop.explain(net, images())
    assert len(FORWARDS) == 2  # traced, and compared with the model's own output
    relprop.explain(net, images())
    relprop.explain(net, noise(2, 3, 12, 12, seed=1), target=1, start="one", layers=["layer1"], strict=True)
    relprop.plan(net)
    relprop.plan(net, images())
    assert len(FORWARDS) == 2
    relprop.explain(net, noise(2, 3, 16, 16))
    relprop.explain(net, noise(2, 3, 16, 16))
    assert len(FORWARDS) == 3


def load_other_weights(model: nn.Module) -> None:
    model.load_state_dict(seeded(Net, 1).state_dict())


def step(model: nn.Module) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=1.0)
    model(images()).square().sum().backward()
    optimiser.step()


def change_stride(model: nn.Module) -> None:
    model.layer1.conv1.stride = (2, 2)
    model.layer1.down = nn.MaxPool2d(2).eval()


def write_through_numpy(model: nn.Module) -> None:
    weight = model.layer1.conv2.weight.detach().numpy()
    weight *= -1


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "load_state_dict": load_other_weights,
    "an optimiser's step": step,
    "p.data.mul_": lambda m: [p.data.mul_(-1) for p in m.layer2.conv1.parameters()],
    "one column through p.data": lambda m: m.fc.weight.data[:, 3].fill_(9.0),
    "p.data = ...": lambda m: setattr(m.fc.weight, "data", -m.fc.weight.data),
    "numpy": write_through_numpy,
    "a buffer": lambda m: m.layer1.bn2.running_var.mul_(4),
    "a replaced parameter": lambda m: setattr(m.fc, "weight", nn.Parameter(-m.fc.weight.detach())),
    "a replaced submodule": lambda m: setattr(m, "fc", seeded(lambda: nn.Linear(12, 5), 9)),
    "a replaced block": lambda m: setattr(m, "layer1", seeded(lambda: Block(8, 8), 9)),
    "an attribute": change_stride,
    "a batch norm's eps": lambda m: setattr(m.layer1.bn1, "eps", 1.0),
    "a hook that changes values": lambda m: m.layer1.register_forward_hook(lambda _, __, y: y + 1.0),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_model_is_noticed(net: nn.Module, change: Callable[[nn.Module], Any]) -> None:
    x = images()
    before = relprop.explain(net, x, target=1)
    change(net)
    e, want = relprop.explain(net, x, target=1), fresh(net, x, target=1)
    assert (e.relevance - before.relevance).abs().max() > 1e-3 * before.relevance.abs().max()
    assert_same(e.relevance, want.relevance)
    assert_same(e.output, net(x).detach(), 1e-5)


def test_a_new_precision_is_noticed(net: nn.Module) -> None:
    before = relprop.explain(net, images())
    e = relprop.explain(net.to(torch.float64), images().double())
    assert e.relevance.dtype == torch.float64
    assert e.ledger.max_leak <= 1e-10
    torch.testing.assert_close(e.relevance.float(), before.relevance, rtol=1e-3, atol=1e-6)
    assert_same(relprop.explain(net.float(), images()).relevance, before.relevance)


ATTRIBUTES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "a number": (2.0, lambda m: setattr(m, "thing", -3.0)),
    "a tensor": (torch.ones(3), lambda m: setattr(m, "thing", torch.full((3,), -5.0))),
    "a tensor written to": (torch.ones(3), lambda m: m.thing.mul_(-5)),
    "a list": ([1.0], lambda m: m.thing.__setitem__(0, -4.0)),
    "a dict": ({0: 1.0}, lambda m: m.thing.__setitem__(0, -4.0)),
    "tensors in a tuple": ((torch.ones(3),), lambda m: setattr(m, "thing", (torch.full((3,), -5.0),))),
    "a tensor written to behind torch's back": (torch.ones(3), lambda m: m.thing.data.mul_(-5)),
    "an object": ([SimpleNamespace(k=1.0)], lambda m: setattr(m.thing[0], "k", -4.0)),
    "an array": ([np.ones(3, "f")], lambda m: m.thing[0].__setitem__(0, -4.0)),
    "a module in a list": ([nn.Linear(1, 1)], lambda m: m.thing[0].bias.data.fill_(-4.0)),
}


@pytest.mark.parametrize(("value", "change"), ATTRIBUTES.values(), ids=ATTRIBUTES)
def test_a_changed_attribute_is_noticed(value: Any, change: Callable[[Any], Any]) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        thing = self.thing[0] if isinstance(self.thing, list | dict | tuple) else self.thing
        if isinstance(thing, nn.Module):
            return self.fc(x) + thing(x[:, :1])
        thing = torch.from_numpy(thing) if isinstance(thing, np.ndarray) else thing
        return self.fc(x) + getattr(thing, "k", thing)

    model = seeded(lambda: Functional(forward, fc=nn.Linear(4, 3)))
    model.thing = copy.deepcopy(value)
    x = noise(2, 4)
    before = relprop.explain(model, x).output
    change(model)
    e = relprop.explain(model, x)
    assert not torch.allclose(before, e.output)
    assert_same(e.output, model(x).detach())


def test_filters_that_change_places_behind_torchs_back_are_noticed() -> None:
    model = seeded(lambda: nn.Sequential(nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5)))
    x = noise(2, 64, 3, 3)
    relprop.explain(model, x)
    weight = model[0].weight.data
    weight[[2, 4]] = weight[[4, 2]].clone()
    assert_same(relprop.explain(model, x).output, model(x).detach())


def test_a_changed_function_is_noticed() -> None:
    model = seeded(lambda: Functional(lambda self, x: self.fc(x).relu(), fc=nn.Linear(4, 3)))
    relprop.explain(model, noise(2, 4))
    model.function = lambda self, x: self.fc(x)
    e = relprop.explain(model, noise(2, 4))
    assert e.output.min() < 0
    assert_same(e.output, model(noise(2, 4)).detach())


def test_a_model_is_not_kept_alive(net: nn.Module) -> None:
    model = copy.deepcopy(net)
    e = relprop.explain(model, images(), layers=["layer1"])
    relprop.LRP(model).attribute(images(), target=1)
    references = [weakref.ref(m) for m in model.modules()]
    storage = weakref.ref(model.fc.weight)
    del model
    gc.collect()
    assert all(ref() is None for ref in references)
    assert storage() is None
    assert e.relevance_at("layer1").shape == (2, 8, 6, 6)


def test_a_split_that_holds_the_model_does_not_keep_it_alive(net: nn.Module) -> None:
    model = copy.deepcopy(net)

    def split(branches: tuple[Tensor, ...], held: nn.Module = model) -> list[float]:
        return [1 / len(branches) for _ in branches if held is not None]

    relprop.explain(model, images(), split=split)
    reference = weakref.ref(model)
    del model, split
    gc.collect()
    assert reference() is None


# -- batches, targets, starts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("preset", "tolerance"), [("paper", 1e-6), ("mixture", 1e-4), ("epsilon", 1e-4)])
def test_a_batch_equals_its_samples_one_by_one(net: nn.Module, preset: str, tolerance: float) -> None:
    x = images(4)
    e = relprop.explain(net, x, target=[0, 1, 2, 3], preset=preset)
    for i in range(4):
        one = relprop.explain(net, x[i : i + 1], target=i, preset=preset)
        assert_same(e.relevance[i : i + 1], one.relevance, tolerance)
        assert_same(e.start[i : i + 1], one.start)


@pytest.mark.parametrize("batch", [1, 3, 17])
def test_shapes_for_batches_of_any_size(net: nn.Module, batch: int) -> None:
    e = relprop.explain(net, images(batch), layers=["layer2"])
    assert e.relevance.shape == (batch, 3, 12, 12)
    assert e.heatmap.shape == (batch, 12, 12)
    assert e.target.shape == e.start.shape == (batch,)
    assert e.output.shape == (batch, 5)
    assert e.relevance_at("layer2").shape == (batch, 8, 6, 6)
    assert e.ledger.error.shape == (batch,)
    assert e.ledger.error.max() <= 1e-5


def test_layouts_of_the_input_do_not_matter(net: nn.Module) -> None:
    want = relprop.explain(net, images(3)).relevance
    assert_same(relprop.explain(net, images(3).to(memory_format=torch.channels_last)).relevance, want)
    wide = noise(3, 3, 12, 24)
    strided = wide[..., ::2]
    assert_same(relprop.explain(net, strided).relevance, relprop.explain(net, strided.contiguous()).relevance)
    same = images(1).expand(3, -1, -1, -1)
    assert_same(relprop.explain(net, same).relevance, want[:1].expand(3, -1, -1, -1))


def test_no_target_is_the_predicted_class(net: nn.Module) -> None:
    e = relprop.explain(net, images(4))
    predicted = net(images(4)).argmax(1)
    assert torch.equal(e.target, predicted)
    assert torch.equal(e.relevance, relprop.explain(net, images(4), predicted).relevance)


@pytest.mark.parametrize(
    "target", [2, [2, 2], (2, 2), torch.tensor(2), torch.tensor([2, 2], dtype=torch.int32), np.array([2, 2])], ids=repr
)
def test_ways_to_name_one_target(net: nn.Module, target: Any) -> None:
    e = relprop.explain(net, images(), target)
    assert e.target.tolist() == [2, 2]
    assert e.target.dtype == torch.int64
    want = net(images()).softmax(1)[:, 2].detach()
    torch.testing.assert_close(e.start, want)
    torch.testing.assert_close(e.relevance.double().sum((1, 2, 3)), want.double(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("start", ["probability", "logit", "one"])
def test_several_targets_equal_separate_calls(net: nn.Module, start: str) -> None:
    target = torch.tensor([[0, 3, 3], [4, 1, 0]])
    e = relprop.explain(net, images(), target, start=start, layers=["layer1", "layer2.relu"])
    assert e.relevance.shape == (2, 3, 3, 12, 12)
    assert e.heatmap.shape == (2, 3, 12, 12)
    assert e.start.shape == e.target.shape == e.ledger.error.shape == (2, 3)
    for t in range(3):
        one = relprop.explain(net, images(), target[:, t], start=start, layers=["layer1", "layer2.relu"])
        assert_same(e.relevance[:, t], one.relevance)
        assert_same(e.start[:, t], one.start)
        assert_same(e.relevance_at("layer1")[:, t], one.relevance_at("layer1"))
        assert_same(e.relevance_at("layer2.relu", 1)[:, t], one.relevance_at("layer2.relu", 1))
        assert_same(e.ledger.at("layer1").handed[:, t], one.ledger.at("layer1").handed)


def test_several_targets_cost_one_forward_pass(net: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    forward = Forward.__call__
    monkeypatch.setattr(Forward, "__call__", lambda self, *args, **kw: calls.append(1) or forward(self, *args, **kw))
    relprop.explain(net, images(), torch.tensor([[0, 3, 3], [4, 1, 0]]))
    assert len(calls) == 1


def test_one_target_in_two_axes_keeps_them(net: nn.Module) -> None:
    e = relprop.explain(net, images(), torch.tensor([[2], [1]]))
    assert e.relevance.shape == (2, 1, 3, 12, 12)
    assert_same(e.relevance[:, 0], relprop.explain(net, images(), [2, 1]).relevance)


def test_starts_scale_one_map(net: nn.Module) -> None:
    output = net(images()).detach()
    one = relprop.explain(net, images(), 3, start="one")
    assert one.start.tolist() == [1, 1]
    amounts = {
        "probability": output.softmax(1)[:, 3],
        "logit": output[:, 3],
        "tensor": torch.tensor([-2.5, 1e-3]),
    }
    for start, amount in amounts.items():
        e = relprop.explain(net, images(), 3, start=amount if start == "tensor" else start)
        torch.testing.assert_close(e.start, amount)
        assert_same(e.relevance, one.relevance * amount.reshape(-1, 1, 1, 1), 1e-5)
        assert e.ledger.error.max() <= 1e-5


def test_a_start_for_each_of_several_targets(net: nn.Module) -> None:
    target, start = torch.tensor([[0, 3], [4, 1]]), torch.tensor([[1.0, -2.0], [0.0, 3.0]])
    one = relprop.explain(net, images(), target, start="one")
    e = relprop.explain(net, images(), target, start=start)
    assert torch.equal(e.start, start)
    assert_same(e.relevance, one.relevance * start[..., None, None, None])
    assert e.relevance[1, 0].abs().max() == 0


def test_a_start_over_classes_is_the_sum_of_its_targets(net: nn.Module) -> None:
    start = torch.tensor([[1.0, -2.0, 0.0, 0.5, 0.0], [0.0, 0.0, 3.0, 0.0, 1e-3]])
    e = relprop.explain(net, images(), start=start, strict=True)
    every = relprop.explain(net, images(), torch.arange(5).expand(2, 5), start="one").relevance
    assert_same(e.relevance, (every * start[..., None, None, None]).sum(1), 1e-5)
    torch.testing.assert_close(e.start, start.sum(1))
    assert e.ledger.error.max() <= 1e-5


def test_a_start_that_cancels_is_no_division_by_zero(net: nn.Module) -> None:
    start = torch.tensor([[1.0, -1.0, 0.0, 0.0, 0.0], [0.0] * 5])
    e = relprop.explain(net, images(), start=start, strict=True)
    assert e.relevance[0].abs().max() > 0
    assert e.relevance[1].abs().max() == 0
    assert e.ledger.error.max() <= 1e-5


def test_tiny_probabilities_do_not_underflow_on_the_way(net: nn.Module) -> None:
    with torch.no_grad():
        net.fc.bias.copy_(torch.tensor([0.0, -68.0, -200.0, 0.0, 0.0]))
    one = relprop.explain(net, images(), 1, preset="paper", start="one")
    tiny = relprop.explain(net, images(), 1, preset="paper")
    assert 0 < tiny.start.max() < 1e-28
    scaled = tiny.relevance.double() / tiny.start.double().reshape(-1, 1, 1, 1)
    assert_same(scaled, one.relevance.double(), 1e-5)
    nothing = relprop.explain(net, images(), 2, start="one")
    assert net(images()).softmax(1)[:, 2].max() == 0
    assert_same(nothing.relevance.double().sum((1, 2, 3)), torch.ones(2, dtype=torch.float64), 1e-6)
    ledger = relprop.explain(net, images(), 2).ledger
    assert 0 < ledger.at("fc").received.max() < 1e-80
    assert ledger.error.max() <= 1e-5


def test_output_is_the_models_own(net: nn.Module) -> None:
    for preset in ("paper", "released", "mixture", "epsilon", "epsilon-gamma-box"):
        assert_same(relprop.explain(net, images(3), preset=preset).output, net(images(3)).detach(), 1e-5)


def test_a_holder_of_a_module_is_explained_like_it(net: nn.Module) -> None:
    class Holder:
        module = net

    assert torch.equal(relprop.explain(Holder(), images()).relevance, relprop.explain(net, images()).relevance)


def test_features_without_space_are_explained() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)))
    e = relprop.explain(model, noise(4, 6), strict=True)
    assert e.relevance.shape == e.heatmap.shape == (4, 6)


# -- relevance at modules, and the ledger -----------------------------------------------------------------------------


def test_relevance_at_every_kind_of_module(net: nn.Module) -> None:
    shapes = {
        "stem": (3, 12, 12),
        "stem.1": (8, 12, 12),
        "pool": (8, 12, 12),
        "layer1": (8, 6, 6),
        "layer2": (8, 6, 6),
        "layer2.conv1": (8, 6, 6),
        "layer2.down": (8, 6, 6),
        "layer1.down": (8, 6, 6),
        "dropout": (12,),
        "fc": (12,),
    }
    e = relprop.explain(net, images(), start="one", layers=list(shapes))
    for name, shape in shapes.items():
        assert e.relevance_at(name).shape == (2, *shape), name
        arrived = e.ledger.at(name).handed
        sums = e.relevance_at(name).double().flatten(1).sum(1)
        torch.testing.assert_close(sums, arrived, rtol=1e-5, atol=1e-9)
    assert torch.equal(e.relevance_at("stem"), e.relevance)
    one = torch.ones(2, dtype=torch.float64)
    for name in ("stem", "pool", "layer1", "layer2", "dropout", "fc"):
        torch.testing.assert_close(e.ledger.at(name).handed, one, rtol=1e-5, atol=0)
    block = e.relevance_at("layer2.conv1") + e.relevance_at("layer2.down")
    assert_same(e.relevance_at("layer2"), block)


def test_relevance_at_the_calls_of_a_reused_module(net: nn.Module) -> None:
    e = relprop.explain(net, images(), layers=["layer2.relu", "layer2.conv2"])
    first, second = e.relevance_at("layer2.relu"), e.relevance_at("layer2.relu", call=1)
    assert torch.equal(first, e.relevance_at("layer2.relu", call=0))
    assert first.shape == second.shape == (2, 12, 3, 3)
    assert_same(second.double().flatten(1).sum(1), e.start.double())
    # Between the first ReLU and conv2 lies nothing, so what arrives at the one's input arrives at the other's.
    assert_same(first, e.relevance_at("layer2.conv2"))
    with pytest.raises(relprop.RelpropError, match=r"layer2\.relu"):
        e.relevance_at("layer2.relu", call=2)
    with pytest.raises(relprop.RelpropError, match=r"layers=\[\"layer1\"\]"):
        e.relevance_at("layer1")


def test_relevance_at_a_whole_module_that_is_used_twice() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.fc(self.block(self.block(x)))

    def make() -> nn.Module:
        return Functional(forward, block=nn.Sequential(nn.Linear(4, 4), nn.ReLU()), fc=nn.Linear(4, 3))

    e = relprop.explain(seeded(make), noise(2, 4), start="one", layers=["block"])
    assert torch.equal(e.relevance_at("block", 0), e.relevance)
    assert (e.relevance_at("block", 1) - e.relevance_at("block", 0)).abs().max() > 1e-3
    for call in (0, 1):
        handed = e.ledger.at("block", call).handed
        torch.testing.assert_close(handed, torch.ones(2, dtype=torch.float64), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("layer", "options"),
    [("layer2.down", {"split": "main-only"}), ("layer1.down", {"identity_skips": False})],
    ids=["main-only", "identity skips out"],
)
def test_relevance_at_a_module_that_gets_none_is_zero(net: nn.Module, layer: str, options: dict[str, Any]) -> None:
    e = relprop.explain(net, images(), layers=[layer], **options)
    assert torch.equal(e.relevance_at(layer), torch.zeros(2, 8, 6, 6))
    assert e.ledger.at(layer).received.tolist() == [0, 0]


def test_relevance_at_the_layers_of_a_skip_adds_up(net: nn.Module) -> None:
    e = relprop.explain(net, images(), start="one", layers=["layer1.conv1", "layer1.down"])
    both = e.ledger.at("layer1.conv1").handed + e.ledger.at("layer1.down").handed
    torch.testing.assert_close(both, torch.ones(2, dtype=torch.float64), rtol=1e-5, atol=0)
    assert e.relevance_at("layer1.down").abs().max() > 0


def test_ledger_entries_of_nodes_and_modules(net: nn.Module) -> None:
    e = relprop.explain(net, images(), preset="epsilon", start="logit")
    names = {row["node"] for row in relprop.plan(net).rows()}
    assert names == set(e.ledger.nodes)
    for name in names:
        entry = e.ledger.at(name)
        assert entry.received.shape == entry.handed.shape == (2,)
        assert entry.leak.max() <= 1e-4, name
    block = e.ledger.at("layer2")
    absorbed = sum(block.absorbed.values())
    torch.testing.assert_close(block.received - block.handed, absorbed, rtol=1e-3, atol=1e-5)
    assert "layer1.add" in names
    torch.testing.assert_close(e.ledger.at("fc").received, e.start.double())


def test_ledger_refuses_names_and_calls_that_are_not_there(net: nn.Module) -> None:
    ledger = relprop.explain(net, images()).ledger
    with pytest.raises(relprop.RelpropError, match="'layer9'"):
        ledger.at("layer9")
    with pytest.raises(relprop.RelpropError, match="called 2 times"):
        ledger.at("layer1.relu", call=2)


def test_ledger_prints_a_line_for_every_node(net: nn.Module) -> None:
    e = relprop.explain(net, images())
    lines = str(e.ledger).splitlines()
    assert len(lines) == len(e.ledger.nodes) + 2
    assert lines[0].split()[:2] == ["node", "received"]
    assert lines[1].startswith("fc")
    assert lines[-2].startswith("input")
    assert "end to end error" in lines[-1]


def lossy(branches: tuple[Tensor, ...]) -> list[float]:
    return [0.5, 0.4, *[0.0 for _ in branches[2:]]]


def test_a_split_that_loses_relevance_is_measured_and_strict_refuses_it(net: nn.Module) -> None:
    e = relprop.explain(net, images(), preset="paper", split=lossy)
    assert e.ledger.max_leak == pytest.approx(0.1, abs=1e-5)
    torch.testing.assert_close(e.ledger.error, torch.full((2,), 1 - 0.9**2, dtype=torch.float64), rtol=1e-4, atol=0)
    torch.testing.assert_close(e.relevance.sum((1, 2, 3)), e.start * 0.9**2, rtol=1e-4, atol=0)
    with pytest.raises(relprop.RelpropError, match=r"layer2\.add leaks 1\.0e-01.*sum to one"):
        relprop.explain(net, images(), preset="paper", split=lossy, strict=True)


def test_a_split_of_ones_own_sees_the_branches(net: nn.Module) -> None:
    seen = []

    def ratio(branches: tuple[Tensor, ...]) -> list[Tensor]:
        seen.append([tuple(b.shape) for b in branches])
        sizes = [b.abs() + 1e-12 for b in branches]
        return [size / (sizes[0] + sizes[1]) for size in sizes]

    e = relprop.explain(net, images(), split=ratio, strict=True)
    assert seen == [[(2, 12, 3, 3)] * 2, [(2, 8, 6, 6)] * 2]
    assert_same(e.relevance, relprop.explain(net, images(), split="ratio").relevance, 1e-4)


@pytest.mark.parametrize("share", [torch.ones(5), torch.ones(3, 2, 8, 6, 6), "half"])
def test_shares_that_do_not_fit_are_refused(net: nn.Module, share: Any) -> None:
    with pytest.raises(relprop.RelpropError, match=r"A share of the split .* it has to be a number, or a tensor"):
        relprop.explain(net, images(), split=lambda branches: [share] * len(branches))


@pytest.mark.parametrize("preset", ["paper", "relprop", "epsilon"])
def test_a_sum_in_more_digits_than_the_rest(preset: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        return self.fc((h.double() + self.b(h).double()).float().mean((2, 3)))

    model = seeded(
        lambda: Functional(forward, a=nn.Conv2d(3, 8, 3), b=nn.Conv2d(8, 8, 3, padding=1), fc=nn.Linear(8, 5))
    )
    e = relprop.explain(model, images(), preset=preset)
    assert e.relevance.dtype == torch.float32
    assert e.ledger.max_leak <= 1e-5


def test_relevance_at_a_module_of_several_inputs_is_refused_not_mixed() -> None:
    class Join(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return torch.cat([a, b], 1)

    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        return self.fc(self.join(h, self.b(h)).mean((2, 3)))

    parts = {"a": nn.Conv2d(3, 8, 3), "b": nn.Conv2d(8, 8, 1), "join": Join(), "fc": nn.Linear(16, 5)}
    model = seeded(lambda: Functional(forward, **parts))
    with pytest.raises(relprop.RelpropError, match=r"join takes several inputs .* ask for join:output"):
        relprop.explain(model, images(), layers=["join"])
    e = relprop.explain(model, images(), layers=["join:output"])
    assert_same(e.relevance_at("join:output").flatten(1).sum(1), e.start, 1e-5)


def test_settings_tell_how_it_was_made(net: nn.Module) -> None:
    e = relprop.explain(net, images(), preset="mixture", split="symmetric", identity_skips=False, start="one")
    assert {"preset": "mixture", "split": "symmetric", "identity_skips": False, "start": "one"}.items() <= dict(
        e.settings
    ).items()


# -- layers' outputs, and starts that are functions -------------------------------------------------------------------


def test_relevance_at_a_modules_output(torchvision_model: Callable[..., nn.Module], tmp_path: Path) -> None:
    model, x = torchvision_model("resnet18"), torch.rand(2, 3, 32, 32)
    names = ["layer1:output", "layer2", "layer4:output", "avgpool", "layer1.0.relu:output", "fc:output"]
    e = relprop.explain(model, x, 3, start="logit", layers=names)
    assert torch.equal(e.relevance_at("layer1:output"), e.relevance_at("layer2"))
    assert torch.equal(e.relevance_at("layer4:output"), e.relevance_at("avgpool"))
    assert torch.equal(e.relevance_at("fc:output")[:, 3], e.start)
    first, second = (e.relevance_at("layer1.0.relu:output", call) for call in (0, 1))
    assert (first.sum((1, 2, 3)).abs() < second.sum((1, 2, 3)).abs()).all()  # the skip has the rest
    e.save(tmp_path)
    assert torch.equal(relprop.Explanation.load(tmp_path).relevance_at("layer4:output"), e.relevance_at("avgpool"))
    with pytest.raises(relprop.RelpropError, match="There is no module 'layer9' to keep the relevance of"):
        relprop.explain(model, x, layers=["layer9:output"])


def test_a_start_may_be_a_function_of_the_output(net: nn.Module) -> None:
    e = relprop.explain(net, images(), start=lambda y: y * (torch.arange(y.shape[1]) == 2))
    assert torch.equal(e.relevance, relprop.explain(net, images(), 2, start="logit").relevance)
    assert e.settings["start"] == "function"
    for wrong in (lambda y: y[0], lambda y: y / 0, lambda _: 3):
        with pytest.raises(relprop.RelpropError, match="has to give finite relevance of shape"):
            relprop.explain(net, images(), start=wrong)
    with pytest.raises(relprop.RelpropError, match="pass it without a target"):
        relprop.explain(net, images(), 2, start=lambda y: y)


# -- Captum's interface -----------------------------------------------------------------------------------------------


def test_attribute_has_captums_parameters() -> None:
    import_torchvision()
    from captum.attr import LRP as Captum  # noqa: N811

    ours, theirs = (inspect.signature(cls.attribute).parameters for cls in (relprop.LRP, Captum))
    assert list(ours) == list(theirs)
    for name, parameter in theirs.items():
        assert ours[name].default == parameter.default, name
        assert ours[name].kind == parameter.kind, name


def test_attribute_starts_from_the_logit(net: nn.Module) -> None:
    attributions = relprop.LRP(net).attribute(images(), target=2)
    assert torch.equal(attributions, relprop.explain(net, images(), 2, start="logit").relevance)
    logits = net(images())[:, 2].detach()
    torch.testing.assert_close(attributions.sum((1, 2, 3)), logits, rtol=1e-4, atol=0)


def test_attribute_returns_what_the_sum_lacks(net: nn.Module) -> None:
    attributions, delta = relprop.LRP(net).attribute(images(), target=2, return_convergence_delta=True)
    assert delta.shape == (2,)
    assert delta.abs().max() <= 1e-5
    attributions, delta = relprop.LRP(net, preset="epsilon").attribute(images(), 2, return_convergence_delta=True)
    logits = net(images())[:, 2].detach()
    torch.testing.assert_close(delta, logits - attributions.sum((1, 2, 3)), rtol=1e-3, atol=1e-4)
    assert delta.abs().max() > 1e-3  # biases took their share


def test_attribute_takes_and_gives_tuples_and_options(net: nn.Module, capsys: pytest.CaptureFixture[str]) -> None:
    lrp = relprop.LRP(net, preset="mixture", split="symmetric")
    (attributions,) = lrp.attribute((images(),), target=torch.tensor([1, 2]), verbose=True)
    want = relprop.explain(net, images(), [1, 2], preset="mixture", split="symmetric", start="logit")
    assert torch.equal(attributions, want.relevance)
    assert "end to end error" in capsys.readouterr().out
    with pytest.raises(relprop.RelpropError, match="2 arguments"):
        lrp.attribute((images(), images()))
    with pytest.raises(relprop.RelpropError, match="2 arguments"):
        lrp.attribute(images(), additional_forward_args=3)
    with pytest.raises(relprop.RelpropError, match="no inputs"):
        lrp.attribute(())
    with pytest.raises(relprop.RelpropError, match="no class number"):
        lrp.attribute(images(), target=torch.tensor([1.7]))
    assert lrp.attribute(images()[:1], target=torch.tensor([[1]])).shape == (1, 1, 3, 12, 12)


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """All that really computed something: the engine's forward passes, and calls of modules on real tensors."""
    calls: list[str] = []
    forward = Forward.__call__

    def counted(self: Forward, *args: Any, **kwargs: Any) -> Any:
        calls.append("sweep")
        return forward(self, *args, **kwargs)

    def noted(module: nn.Module, args: tuple[Any, ...]) -> None:
        if type(module).__name__ == "GuardsFn":  # torch.export's own, which looks at shapes
            return
        if any(isinstance(a, Tensor) and a.device.type != "meta" and not isinstance(a, FakeTensor) for a in args):
            calls.append(type(module).__name__)

    monkeypatch.setattr(Forward, "__call__", counted)
    handle = nn.modules.module.register_module_forward_pre_hook(noted)
    yield calls
    handle.remove()


def test_computing_is_seen(net: nn.Module, computed: list[str]) -> None:
    relprop.plan(net, images())
    assert computed == []
    relprop.explain(net, images())
    assert {"sweep", "Net"} <= set(computed)


def assert_refused(model: Any, x: Any, options: dict[str, Any], words: tuple[str, ...], computed: list[str]) -> str:
    """One sentence with these words, before anything was computed, and nothing changed."""
    before = snapshot(model) if isinstance(model, nn.Module) else []
    pixels = x.clone() if isinstance(x, Tensor) else None
    with pytest.raises(relprop.RelpropError) as caught:
        relprop.explain(model, x, **options)
    message = str(caught.value)
    for word in words:
        assert word in message, message
    assert message.endswith(".")
    assert "\n" not in message
    assert not re.search(r"[.!?]\s", message), f"more than one sentence: {message}"
    assert computed == []
    assert (snapshot(model) if isinstance(model, nn.Module) else []) == before
    if pixels is not None:
        assert torch.equal(x.nan_to_num(nan=7.0), pixels.nan_to_num(nan=7.0))
    return message


TARGETS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "out of range": (5, ("target 5", "out of range", "0 to 4")),
    "out of range for one sample": ([1, 1000], ("target 1000", "0 to 4")),
    "negative": (-1, ("target -1", "out of range")),
    "a float": (1.0, ("target 1.0", "int")),
    "a float tensor": (torch.ones(2), ("target", "integer tensor")),
    "a bool": (True, ("target True", "int")),
    "a word": ("cat", ("'cat'", "int")),
    "too many": ([0, 1, 2], ("(3,)", "batch of 2", "(2,)")),
    "too few": ([0], ("(1,)", "batch of 2")),
    "none at all": ([], ("target", "int")),
    "wrong batch of several": (torch.zeros(3, 2, dtype=torch.long), ("(3, 2)", "(2, T)")),
    "no targets for each": (torch.zeros(2, 0, dtype=torch.long), ("(2, 0)", "(2, T)")),
    "three axes": (torch.zeros(2, 1, 1, dtype=torch.long), ("(2, 1, 1)", "(2, T)")),
    "out of range among several": (torch.tensor([[0, 1], [2, 7]]), ("target 7", "0 to 4")),
}


@pytest.mark.parametrize(("target", "words"), TARGETS.values(), ids=TARGETS)
def test_bad_targets(net: nn.Module, computed: list[str], target: Any, words: tuple[str, ...]) -> None:
    assert_refused(net, images(), {"target": target}, words, computed)


def poked(value: float) -> Tensor:
    x = images()
    x[1, 0, 3, 3] = value
    return x


INPUTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "NaN": (poked(float("nan")), ("1 NaN or infinite", "sample 1", "nan_to_num")),
    "infinity": (poked(float("-inf")), ("1 NaN or infinite", "sample 1")),
    "an empty batch": (images()[:0], ("empty batch", "(0, 3, 12, 12)", "at least one")),
    "an empty image": (torch.empty(2, 3, 0, 12), ("empty", "(2, 3, 0, 12)")),
    "no batch axis": (images()[0], ("(3, 12, 12)", "batch", "stem.0")),
    "one axis": (noise(12), ("(12,)", "batch axis", "unsqueeze(0)")),
    "five axes": (noise(2, 3, 1, 12, 12), ("(2, 3, 1, 12, 12)", "(batch, 3, height, width)")),
    "wrong channels": (noise(2, 1, 12, 12), ("(2, 1, 12, 12)", "(batch, 3, height, width)", "stem.0")),
    "too small": (noise(2, 3, 1, 1), ("pool", "(2, 8, 1, 1)")),
    "float64": (images().double(), ("float64", "float32", "x.to(torch.float32)")),
    "float16": (images().half(), ("float16", "float32", "x.to(torch.float32)")),
    "bytes": (images().to(torch.uint8), ("uint8", "float32")),
    "an array": (images().numpy(), ("ndarray", "torch.Tensor")),
    "a list": ([1.0], ("list", "torch.Tensor")),
    "nothing": (None, ("NoneType", "torch.Tensor")),
}


@pytest.mark.parametrize(("x", "words"), INPUTS.values(), ids=INPUTS)
def test_bad_inputs(
    net: nn.Module, computed: list[str], capfd: pytest.CaptureFixture[str], x: Any, words: tuple[str, ...]
) -> None:
    assert_refused(net, x, {}, words, computed)
    assert capfd.readouterr() == ("", "")


def test_a_sparse_input_is_refused(net: nn.Module) -> None:
    with pytest.raises(relprop.RelpropError, match=r"The input is sparse; pass x\.to_dense\(\)\."):
        relprop.explain(net, images().to_sparse())


OPTIONS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "preset": ({"preset": "papre"}, ("preset 'papre'", "paper, released, mixture")),
    "preset of a wrong type": ({"preset": ["paper"]}, ("preset", "['paper']", "name")),
    "split": ({"split": "halves"}, ("split 'halves'", "symmetric, ratio, signed, main-only", "function")),
    "split of a wrong type": ({"split": [0.5, 0.5]}, ("split", "[0.5, 0.5]", "function")),
    "start": ({"start": "half"}, ("start 'half'", "'probability', 'logit', 'one'")),
    "start of a wrong type": ({"start": 1.0}, ("start 1.0", "tensor")),
    "start of a wrong shape": ({"start": torch.ones(3)}, ("start", "(3,)", "(2,)", "(2, 5)")),
    "start with targets": ({"target": 1, "start": torch.ones(2, 5)}, ("start", "(2, 5)", "(2,)")),
    "start that is not finite": ({"start": torch.tensor([1.0, float("inf")])}, ("start", "infinite")),
    "override of nothing": (
        {"overrides": {"layer1.conv11": "z+"}},
        ("'layer1.conv11'", "nearest names", "layer1.conv1"),
    ),
    "override of a missing type": ({"overrides": {nn.Conv1d: "z+"}}, ("Conv1d", "not in the model")),
    "override of a missing block": ({"overrides": {3: "z+"}}, ("3", "not in the model")),
    "override that does not fit": ({"overrides": {"layer1.conv1": "ratio"}}, ("'layer1.conv1'", "ratio")),
    "override of a relu": ({"overrides": {nn.ReLU: "epsilon"}}, ("ReLU", "epsilon")),
    "override's value": ({"overrides": {"fc": "epsilom"}}, ("'epsilom'", "epsilon", "winner", "fold")),
    "override's value of a wrong type": ({"overrides": {"fc": 3}}, ("'fc'", "3", "rule")),
    "override's value as a list": ({"overrides": {"fc": ["z+"]}}, ("'fc'", "['z+']", "rule")),
    "override's key": ({"overrides": {1.5: "z+"}}, ("1.5", "pattern", "type", "block number")),
    "overrides as a list": ({"overrides": ["fc"]}, ("overrides", "['fc']", "dict")),
    "layer": ({"layers": ["layer1.conv"]}, ("'layer1.conv'", "nearest names", "layer1.conv1")),
    "layer without neighbours": ({"layers": ["xyz"]}, ("'xyz'",)),
    "layers of a wrong type": ({"layers": 3}, ("layers", "3")),
    "a list as a layer to start at": ({"layer": ["layer1"]}, ("layer", "['layer1']", "name")),
    "first layer's bounds": ({"overrides": {"stem.0": rules.zbox(0.0, (1.0, 1.0))}}, ("2 channels", "3")),
}


@pytest.mark.parametrize(("options", "words"), OPTIONS.values(), ids=OPTIONS)
def test_bad_options(net: nn.Module, computed: list[str], options: dict[str, Any], words: tuple[str, ...]) -> None:
    assert_refused(net, images(), options, words, computed)


def training(name: str) -> nn.Module:
    model = seeded(Net)
    (model.get_submodule(name) if name else model).train()
    return model


class TwoInputs(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class Inverse(nn.Module):
    """Calls an operator that has no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.erfinv(self.body(x))  # here


def functional(function: Callable[[Any, Tensor], Any], **modules: nn.Module) -> nn.Module:
    return seeded(lambda: Functional(function, fc=nn.Linear(4, 3), **modules))


def norm_without_statistics() -> nn.Module:
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    return nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 3)).eval()


MODELS: dict[str, tuple[Callable[[], Any], tuple[int, ...], tuple[str, ...]]] = {
    "in training": (lambda: training(""), (2, 3, 12, 12), ("Net", "training mode", "model.eval()")),
    "one part in training": (lambda: training("layer2.bn1"), (2, 3, 12, 12), ("'layer2.bn1'", "model.eval()")),
    "complex": (lambda: nn.Linear(4, 3, dtype=torch.complex64).eval(), (2, 4), ("complex64", "model.float()")),
    "two precisions": (
        lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3).double()).eval(),
        (2, 4),
        ("float32", "float64"),
    ),
    "not a module": (lambda: "resnet50", (2, 4), ("str", "torch.nn.Module")),
    "a class": (lambda: Net, (2, 4), ("type", "torch.nn.Module")),
    "two inputs": (lambda: TwoInputs().eval(), (2, 4), ("TwoInputs", "one tensor", "'y'", "tuple", "dict")),
    "a tuple": (lambda: functional(lambda m, x: (m.fc(x), x)), (2, 4), ("tuple", "one tensor")),
    "a dict": (lambda: functional(lambda m, x: {"a": m.fc(x), "b": x}), (2, 4), ("dict", "one tensor", "'logits'")),
    "control flow": (
        lambda: functional(lambda m, x: m.fc(x) if x.sum() > 0 else -m.fc(x)),
        (2, 4),
        ("Functional", "traced", "branches on values"),
    ),
    "dropout always on": (
        lambda: functional(lambda m, x: F.dropout(m.fc(x))),
        (2, 4),
        ("dropout", "at random", "training=self.training", "test_engine.py:"),
    ),
    "batch norm without statistics": (
        norm_without_statistics,
        (2, 4),
        ("batch norm", "running statistics", "mixes the samples", "1"),
    ),
    "an output without batch": (lambda: functional(lambda m, x: m.fc(x).sum(1)), (2, 4), ("(2,)", "(batch, classes)")),
    "mean over everything": (lambda: functional(lambda m, x: m.fc(x).mean()), (2, 4), ("mean", "mixes the samples")),
    "mean over the batch": (
        lambda: functional(lambda m, x: m.fc(x) + m.fc(x).mean(0, keepdim=True)),
        (2, 4),
        ("mean", "axis 0", "mixes the samples"),
    ),
    "an output without input": (
        lambda: functional(lambda m, _: m.fc.weight),
        (2, 4),
        ("does not depend on its input",),
    ),
    "circular padding": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), nn.Flatten()).eval(),
        (2, 3, 12, 12),
        ("padding_mode='circular'", "zero padding", "0"),
    ),
}


@pytest.mark.parametrize(("make", "shape", "words"), MODELS.values(), ids=MODELS)
def test_bad_models(
    computed: list[str], make: Callable[[], Any], shape: tuple[int, ...], words: tuple[str, ...]
) -> None:
    model = make()
    assert_refused(model, noise(*shape), {}, words, computed)


def test_lazy_modules_are_refused_until_they_have_weights(computed: list[str]) -> None:
    model = nn.Sequential(nn.LazyLinear(3)).eval()
    with pytest.raises(relprop.RelpropError, match=r"lazy modules.* run one batch"):
        relprop.explain(model, noise(2, 4))
    assert computed == []
    assert isinstance(model[0], nn.LazyLinear)
    model(noise(2, 4))
    assert relprop.explain(model, noise(2, 4), strict=True).relevance.shape == (2, 4)


def test_an_operator_without_a_rule_is_named_with_its_line_and_both_remedies(computed: list[str]) -> None:
    model = seeded(Inverse)
    source, first = inspect.getsourcelines(Inverse.forward)
    line = first + next(i for i, text in enumerate(source) if "# here" in text)
    words = (
        "erfinv",
        f"test_engine.py:{line}",
        "torch.erfinv(self.body(x))",
        "register",
        "overrides={'erfinv': 'pass'}",
    )
    assert_refused(model, noise(2, 4), {}, words, computed)
    with pytest.raises(relprop.RelpropError, match="erfinv"):
        relprop.plan(model)
    e = relprop.explain(model, 0.1 * noise(2, 4), overrides={"erfinv": "pass"})
    assert e.ledger.max_leak <= 1e-5
    assert_same(e.output, model(0.1 * noise(2, 4)).detach(), 1e-5)


def test_a_module_without_a_rule_is_named(computed: list[str]) -> None:
    model = seeded(lambda: Functional(lambda m, x: m.fc(m.act(x)), act=nn.Softshrink(), fc=nn.Linear(4, 3)))
    words = ("act", "Softshrink", "test_engine.py:", "register", "overrides={'act': 'pass'}")
    assert_refused(model, noise(2, 4), {}, words, computed)
    assert relprop.explain(model, noise(2, 4), overrides={"act": "pass"}, strict=True).relevance.shape == (2, 4)


def test_something_that_changes_shape_cannot_be_passed(computed: list[str]) -> None:
    model = seeded(lambda: Functional(lambda m, x: m.fc(torch.diff(x, dim=1)), fc=nn.Linear(3, 3)))
    assert_refused(model, noise(2, 4), {}, ("diff", "overrides={'diff': 'pass'}"), computed)
    options = {"overrides": {"diff": "pass"}}
    assert_refused(model, noise(2, 4), options, ("diff", "changes the shape"), computed)


def test_average_2x2_where_shapes_do_not_fit(computed: list[str]) -> None:
    model = seeded(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(3, 1), nn.Flatten(), nn.Linear(256, 3)))
    words = ("average-2x2", "1", "(2, 4, 10, 10)", "(2, 4, 8, 8)", "preset='paper'", "'average'")
    assert_refused(model, noise(2, 3, 12, 12), {"preset": "released"}, words, computed)
    with pytest.raises(relprop.RelpropError, match="average-2x2"):
        relprop.plan(model, noise(2, 3, 12, 12), preset="released")
    e = relprop.explain(model, noise(2, 3, 12, 12), preset="released", overrides={"1": "average"})
    assert e.ledger.max_leak <= 1e-5


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.fc(x) + torch.rand(3),
        lambda m, x: m.fc(x + float(torch.rand(()))),
        lambda m, x: m.fc(x) + m.noise(),
    ],
    ids=["torch.rand", "a random number", "a method"],
)
def test_a_model_that_draws_at_random_is_refused(function: Callable[[Any, Tensor], Tensor]) -> None:
    model = functional(function)
    model.noise = lambda: torch.randn(3)
    before = snapshot(model)
    with pytest.raises(relprop.RelpropError, match=r"something else than the model .* draws at random"):
        relprop.explain(model, noise(2, 4))
    with pytest.raises(relprop.RelpropError, match="something else"):  # and the next time, too
        relprop.explain(model, noise(2, 4))
    assert snapshot(model) == before


def test_an_output_that_is_not_finite_is_refused() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 3)))
    with torch.no_grad():
        model[0].weight.fill_(1e30)
    x = torch.cat([torch.zeros(1, 4), torch.full((1, 4), 1e30)])
    before = snapshot(model)
    with pytest.raises(relprop.RelpropError, match="output for sample 1 is not finite"):
        relprop.explain(model, x)
    assert snapshot(model) == before


@pytest.mark.parametrize("batch", [1, 2])
def test_parts_of_samples_may_go_through_a_network_as_if_they_were_samples(batch: int) -> None:
    """Frames of a clip; the ledger still has one line a sample."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.fc(self.frame(x.flatten(0, 1)).reshape(x.shape[0], -1))

    model = seeded(lambda: Functional(forward, frame=nn.Linear(4, 2), fc=nn.Linear(6, 3)))
    x = noise(batch, 3, 4)
    e = relprop.explain(model, x, 1, start="one", strict=True)
    assert e.ledger.error.shape == (batch,)
    assert e.ledger.error.max() < 1e-6
    alone = torch.cat([relprop.explain(model, x[k : k + 1], 1, start="one").relevance for k in range(batch)])
    torch.testing.assert_close(e.relevance, alone)


def test_one_element_written_behind_torchs_back_is_noticed() -> None:
    model, x = nn.Sequential(nn.Linear(100, 40), nn.ReLU(), nn.Linear(40, 3)).eval(), torch.rand(1, 100)
    relprop.explain(model, x)
    model[0].weight.data[0, 22] = 5000.0
    expected = relprop.explain(copy.deepcopy(model), x).relevance
    assert torch.equal(relprop.explain(model, x).relevance, expected)
    model[0].weight.data.copy_(model[0].weight.data.flip(0))  # the same values, at other places
    expected = relprop.explain(copy.deepcopy(model), x).relevance
    assert torch.equal(relprop.explain(model, x).relevance, expected)


def test_a_write_into_weights_that_do_not_lie_densely_is_noticed() -> None:
    model, x = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)).eval(), torch.rand(1, 5)
    model[0].weight = nn.Parameter(torch.randn(5, 4).T)
    relprop.explain(model, x)
    model[0].weight.data.mul_(-1)
    expected = relprop.explain(copy.deepcopy(model), x).relevance
    torch.testing.assert_close(relprop.explain(model, x).relevance, expected)


def test_zbox_takes_its_bounds_from_the_models_normalisation() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)).eval()
    x = (torch.rand(1, 3, 4, 4) - 0.5) / 0.01
    loaded = SimpleNamespace(module=module, normalization=((0.5,) * 3, (0.01,) * 3))
    given = relprop.explain(module, x, preset="epsilon-gamma-box", overrides={"0": rules.zbox(-50.0, 50.0, 1e-6)})
    told = relprop.explain(loaded, x, preset="epsilon-gamma-box")
    torch.testing.assert_close(told.relevance, given.relevance)
    assert not torch.allclose(relprop.explain(module, x, preset="epsilon-gamma-box").relevance, told.relevance)
