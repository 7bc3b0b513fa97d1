"""Nets that nobody wrote this for: any inputs, any outputs, any start, however they are traced."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import relprop

Pair = namedtuple("Pair", "first second")


@dataclass
class Answer:
    scores: Tensor
    hidden: Tensor


class Two(nn.Module):
    """An image and a table of numbers; its parts hand tuples and dicts to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True))
        self.numbers = nn.Linear(4, 6)
        self.shared = nn.Linear(6, 6)
        self.head = nn.Linear(12, 5)

    def parts(self, image: Tensor, numbers: Tensor) -> dict[str, Any]:
        return {"image": self.image(image), "more": (self.numbers(numbers), 1.0)}

    def forward(self, image: Tensor, numbers: Tensor, scale: float = 1.0) -> Tensor:
        parts = self.parts(image, numbers)
        x, (y, factor) = parts["image"].mean((2, 3)), parts["more"]
        for _ in range(2):  # the same weights twice, for both
            x, y = x + self.shared(x).relu_(), y + self.shared(y).relu_()
        if numbers.shape[-1] > 3:
            y = y * factor
        return self.head(torch.cat([x, y], 1)) * scale


class Returns(nn.Module):
    """Whatever a function makes of two heads."""

    def __init__(self, wrap: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.body, self.one, self.two = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 5)
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        h = self.body(x).relu()
        return self.wrap(self.one(h), self.two(h))


class Residual(nn.Module):
    """Three blocks, the last two of which share their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.block1, self.block2 = (
            nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True)) for _ in range(2)
        )
        self.fc = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in (self.block1, self.block2, self.block2):
            x = x + block(x)
        return self.fc(x.mean((2, 3)))


def seeded(model: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Weights of a model's own, and batch norms that are not the identity."""
    draw = torch.Generator().manual_seed(0)
    model = model.to(dtype).eval()
    with torch.no_grad():
        for name, t in (*model.named_parameters(), *model.named_buffers()):
            if t.is_floating_point():
                t.copy_(0.3 * torch.randn(t.shape, generator=draw))
            if name.endswith("running_var"):
                t.abs_().add_(0.5)
    return model


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


IMAGE, NUMBERS = noise(2, 3, 6, 6), noise(2, 4, seed=1)


def arrived(relevance: Any) -> Tensor:
    """All that arrived at the inputs, a number a sample."""
    parts = relevance.values() if isinstance(relevance, dict) else relevance
    return sum(r.flatten(1).sum(1) for r in parts if r is not None)


# -- inputs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["paper", "epsilon"])
@pytest.mark.parametrize(
    "x",
    [(IMAGE, NUMBERS), [IMAGE, NUMBERS], {"numbers": NUMBERS, "image": IMAGE}, (IMAGE, NUMBERS, 2.0)],
    ids=["tuple", "list", "dict", "with a setting"],
)
def test_several_inputs_get_what_there_is(x: Any, preset: str) -> None:
    model = seeded(Two())
    e = relprop.explain(model, x, 1, preset=preset, start="logit", strict=True)
    call = model(**x) if isinstance(x, dict) else model(*x)
    torch.testing.assert_close(e.output, call.detach())
    of = dict(zip(("image", "numbers"), e.relevance, strict=False)) if not isinstance(x, dict) else e.relevance
    assert of["image"].shape == IMAGE.shape and of["numbers"].shape == NUMBERS.shape  # noqa: PT018 - both
    assert e.heatmap[0 if not isinstance(x, dict) else "image"].shape == (2, 6, 6)
    assert all(of[name].abs().sum() > 0 for name in ("image", "numbers"))
    absorbed = sum(e.ledger.absorbed_by_cause.values())
    torch.testing.assert_close(arrived(e.relevance) + absorbed, e.start)
    assert float(e.ledger.error.max()) < 1e-12
    for name in ("image", "numbers"):
        torch.testing.assert_close(e.ledger.at(f"input.{name}").received, of[name].flatten(1).sum(1))


def test_the_form_of_the_input_does_not_matter() -> None:
    model = seeded(Two())
    one = relprop.explain(model, (IMAGE, NUMBERS), 1, preset="paper")
    other = relprop.explain(model, {"numbers": NUMBERS, "image": IMAGE}, 1, preset="paper")
    assert torch.equal(one.relevance[0], other.relevance["image"])
    assert torch.equal(one.relevance[1], other.relevance["numbers"])
    # The one is a constant to the other: as if it had been fixed in the model.
    fixed = seeded(Two())
    fixed.forward = lambda image: Two.forward(fixed, image, NUMBERS)
    alone = relprop.explain(fixed, IMAGE, 1, preset="paper")
    torch.testing.assert_close(alone.relevance, one.relevance[0])


def test_an_input_that_is_not_used_gets_nothing() -> None:
    class Ignores(nn.Module):
        def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:  # noqa: ARG002 - that is the point
            return x.relu()

    e = relprop.explain(Ignores().eval(), (NUMBERS, NUMBERS), strict=True)
    assert e.relevance[0].abs().sum() > 0
    assert torch.equal(e.relevance[1], torch.zeros_like(NUMBERS))
    assert relprop.explain(Ignores().eval(), (NUMBERS, None)).relevance[1] is None


def test_a_model_that_returns_one_of_its_inputs() -> None:
    class Second(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return y if x.ndim == 2 else x

    e = relprop.explain(Second().eval(), (NUMBERS, NUMBERS + 1), 2, start="one")
    assert not e.relevance[0].any()
    assert e.relevance[1].sum() == 2


def test_several_inputs_are_planned_saved_and_attributed(tmp_path: Path) -> None:
    model = seeded(Two())
    assert "input.numbers" in str(relprop.plan(model, (IMAGE, NUMBERS)))
    assert "input.numbers" in str(relprop.plan(model))
    for x in ((IMAGE, NUMBERS, 1.0), {"image": IMAGE, "numbers": NUMBERS}):
        e = relprop.explain(model, x)
        e.save(tmp_path / "out")
        back = relprop.Explanation.load(tmp_path / "out")
        assert type(back.relevance) is type(e.relevance)
        torch.testing.assert_close(back.relevance, e.relevance)
        torch.testing.assert_close(back.ledger.error, e.ledger.error)
    first, second = relprop.LRP(model).attribute((IMAGE, NUMBERS), target=1)
    (same,), delta = relprop.LRP(model).attribute((IMAGE,), 1, NUMBERS, return_convergence_delta=True)
    assert torch.equal(first, same)
    assert second.shape == NUMBERS.shape
    assert float(delta.abs().max()) < 1e-12


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (IMAGE, ("one tensor", "'numbers'", "tuple")),
        ({"image": IMAGE, "figures": NUMBERS}, ("image, figures", "'numbers'", "dict")),
        ((IMAGE, NUMBERS, 1.0, 2), ("4 arguments", "too many")),
        ((IMAGE, NUMBERS[:1]), ("'numbers'", "(1, 4)", "batch of 2")),
        ((IMAGE, NUMBERS.float()), ("'numbers'", "float32", "float64")),
        ((IMAGE, NUMBERS * torch.inf), ("'numbers'", "NaN or infinite")),
        ((IMAGE, NUMBERS.long()), ("'numbers'", "int64", "float64")),
        ((IMAGE, NUMBERS.numpy()), ("ndarray", "torch.Tensor")),
        ({}, ("dict without tensors",)),
    ],
)
def test_inputs_that_do_not_fit(x: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(relprop.RelpropError) as caught:
        relprop.explain(seeded(Two()), x)
    assert all(word in str(caught.value) for word in words), caught.value


# -- outputs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrap", "output", "classes"),
    [
        (lambda a, b: (a, b), 1, 5),
        (lambda a, b: [a, {"deep": b}], (1, "deep"), 5),
        (lambda a, b: {"a": a, "b": b}, "a", 3),
        (lambda a, b: {"aux": a, "out": b}, None, 5),
        (lambda a, b: {"aux": a, "logits": b}, "aux", 3),
        (lambda a, _: (a, None), None, 3),
        (Pair, "second", 5),
        (Answer, "scores", 3),
    ],
    ids=["tuple", "nested", "dict", "out", "not logits", "alone", "namedtuple", "dataclass"],
)
def test_outputs_of_any_form(wrap: Callable[..., Any], output: Any, classes: int) -> None:
    model = seeded(Returns(wrap))
    e = relprop.explain(model, NUMBERS, output=output, strict=True)
    plain = seeded(Returns(lambda a, b: a if classes == 3 else b))
    want = relprop.explain(plain, NUMBERS)
    assert e.output.shape == (2, classes)
    assert torch.equal(e.relevance, want.relevance)
    assert e.settings.get("output") == (
        None if output is None else list(output) if isinstance(output, tuple) else [output]
    )


@pytest.mark.parametrize(
    ("wrap", "output", "words"),
    [
        (lambda a, b: (a, b), None, ("tuple", "0, 1", "output=0")),
        (lambda a, b: {"main": a, "aux": (a, b)}, "aux", ("tuple", "0, 1", "output=('aux', 0)")),
        (lambda a, b: (a, b), 2, ("tuple", "no output 2")),
        (lambda a, b: {"a": a, "b": b}, "c", ("dict", "'a', 'b'", "'c'")),
        (lambda a, b: {"a": a, "b": b}, 1.5, ("1.5", "key or the position")),
        (lambda a, b: ((a, b), b), 0, ("tuple", "one tensor")),
    ],
)
def test_outputs_that_are_not_there(wrap: Callable[..., Any], output: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(relprop.RelpropError) as caught:
        relprop.explain(seeded(Returns(wrap)), NUMBERS, output=output)
    assert all(word in str(caught.value) for word in words), caught.value


# -- starting anywhere ------------------------------------------------------------------------------------------------


def hidden(model: nn.Module, name: str, x: Tensor, call: int = 0) -> Tensor:
    """What a layer returns, by the way that relprop does not go."""
    seen: list[Tensor] = []
    handle = model.get_submodule(name).register_forward_hook(lambda _, __, out: seen.append(out.detach().clone()))
    model(x)
    handle.remove()
    return seen[call]


@pytest.mark.parametrize("preset", ["paper", "mixture", "epsilon"])
@pytest.mark.parametrize("layer", ["stem", "block1", "block1.0", "block2", "block2#1", "add", "fc"])
def test_a_start_at_a_channel_adds_up(layer: str, preset: str) -> None:
    model = seeded(Residual())
    e = relprop.explain(model, IMAGE, 2, layer=layer, preset=preset, strict=True)
    name, _, call = layer.partition("#")
    if name != "add":
        torch.testing.assert_close(e.output, hidden(model, name, IMAGE, int(call or 0)))
    torch.testing.assert_close(e.start, e.output[:, 2].reshape(2, -1).sum(1))
    assert float(e.ledger.error.max()) < 1e-12
    absorbed = sum(e.ledger.absorbed_by_cause.values(), start=torch.zeros(2, dtype=torch.float64))
    torch.testing.assert_close(e.relevance.flatten(1).sum(1) + absorbed, e.start)
    assert e.settings["layer"] == layer
    assert e.settings["start"] == "value"


def test_a_plan_from_a_layer_ends_there() -> None:
    model = seeded(Residual())
    whole, part = relprop.plan(model, IMAGE, preset="mixture"), relprop.plan(model, preset="mixture", layer="block2")
    rows = {row["node"]: row["treatment"] for row in whole.rows()}
    assert part.rows()[-1]["node"] == "block2.2"
    assert all(row["treatment"] == rows[row["node"]] for row in part.rows())  # as in the whole, not anew
    with pytest.raises(relprop.RelpropError, match="no module 'fc'"):
        relprop.explain(model, IMAGE, layer="block2", layers=["fc"])


def test_a_start_at_the_last_layer_is_one_at_the_class() -> None:
    model = seeded(Residual())
    one, other = relprop.explain(model, IMAGE, 1, start="logit"), relprop.explain(model, IMAGE, 1, layer="fc")
    torch.testing.assert_close(one.relevance, other.relevance)


@pytest.mark.parametrize("preset", ["paper", "mixture"])
def test_relevance_goes_on_from_a_layer_as_if_it_had_not_stopped(preset: str) -> None:
    model = seeded(Residual())
    whole = relprop.explain(model, IMAGE, 1, preset=preset, layers=["block1"])
    # All that is handed to the stem comes through the skip and the branch of the first block's sum.
    below = relprop.explain(model, IMAGE, preset=preset, layer="stem", start=at_stem(model, preset))
    torch.testing.assert_close(below.relevance, whole.relevance)


def at_stem(model: nn.Module, preset: str) -> Tensor:
    """Relevance of the stem's output: of the input of a model that is what comes after it."""
    rest = seeded(Residual())
    rest.load_state_dict(model.state_dict())
    rest.stem = nn.Identity().eval()
    between = hidden(model, "stem", IMAGE)
    return relprop.explain(rest, between, 1, preset=preset, overrides={"block1.0": "z+"}).relevance


def test_targets_of_a_layer_are_its_channels() -> None:
    model = seeded(Residual())
    both = relprop.explain(model, IMAGE, torch.tensor([[0, 3], [5, 1]]), layer="block1")
    assert both.relevance.shape == (2, 2, *IMAGE.shape[1:])
    one = relprop.explain(model, IMAGE, [3, 1], layer="block1")
    torch.testing.assert_close(both.relevance[:, 1], one.relevance)
    strongest = relprop.explain(model, IMAGE, layer="block1")
    assert torch.equal(strongest.target, strongest.output.sum((2, 3)).argmax(1))
    ones = relprop.explain(model, IMAGE, 0, layer="block1", start="one")
    assert torch.equal(ones.start, torch.full((2,), 36.0, dtype=torch.float64))


def test_a_start_at_a_neuron_or_a_region() -> None:
    model = seeded(Residual())
    output = relprop.explain(model, IMAGE, layer="stem").output
    neuron = torch.zeros_like(output)
    neuron[:, 4, 3, 3] = 1
    e = relprop.explain(model, IMAGE, layer="stem", start=neuron, preset="epsilon")
    seen = e.relevance.abs().sum((0, 1)) > 0
    assert seen[2:5, 2:5].all()
    assert int(seen.sum()) == 9  # a neuron of the first convolution sees three by three pixels
    region = torch.zeros_like(output)
    region[:, 4, :2] = output[:, 4, :2]
    rest = torch.zeros_like(output)
    rest[:, 4, 2:] = output[:, 4, 2:]
    parts = [relprop.explain(model, IMAGE, layer="stem", start=start).relevance for start in (region, rest)]
    torch.testing.assert_close(parts[0] + parts[1], relprop.explain(model, IMAGE, 4, layer="stem").relevance)


def test_channels_of_tokens_lie_last() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.inner(x).relu().mean(1))

    model, x = seeded(Tokens()), noise(2, 5, 4)
    e = relprop.explain(model, x, 5, layer="inner", strict=True)
    torch.testing.assert_close(e.start, e.output[:, :, 5].sum(1))
    with pytest.raises(relprop.RelpropError, match="inner has 6 channels, 0 to 5"):
        relprop.explain(model, x, 6, layer="inner")


def test_what_lies_behind_a_layer_needs_no_rule() -> None:
    model = seeded(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Softshrink(), nn.Linear(4, 3)))
    with pytest.raises(relprop.RelpropError, match="Softshrink"):
        relprop.explain(model, NUMBERS)
    assert relprop.explain(model, NUMBERS, 1, layer="1", strict=True).relevance.shape == NUMBERS.shape


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layer": "block3"}, ("'block3'", "block1", "block2")),
        ({"layer": "block1#1"}, ("'block1#1'",)),
        ({"layer": 3}, ("layer 3",)),
        ({"layer": "input"}, ("'input'",)),
        ({"layer": "block1", "target": 6}, ("target 6", "block1 has 6 channels", "0 to 5")),
        ({"layer": "block1", "start": "probability"}, ("'probability'", "no classes", "'value', 'one'")),
        ({"layer": "block1", "start": torch.ones(2, 6)}, ("(2, 6)", "(2, 6, 6, 6)")),
        ({"start": "value"}, ("'value'", "'probability', 'logit', 'one'")),
    ],
)
def test_starts_that_are_not_there(options: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(relprop.RelpropError) as caught:
        relprop.explain(seeded(Residual()), IMAGE, **options)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_layer_with_several_outputs_wants_one_named() -> None:
    class Halves(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return F.relu(x).chunk(2, 1)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.halves, self.fc = Halves(), nn.Linear(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            a, b = self.halves(x)
            return self.fc(a) + self.fc(b)

    with pytest.raises(relprop.RelpropError, match=r"several outputs.*halves\.chunk#1, halves\.chunk#2"):
        relprop.explain(seeded(Net()), NUMBERS, layer="halves")
    e = relprop.explain(seeded(Net()), NUMBERS, 0, layer="halves.chunk#2", strict=True)
    assert not e.relevance[:, :2].any()
