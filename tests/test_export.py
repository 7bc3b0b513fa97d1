"""What torch.fx cannot trace: torch.export, with the same rules; and a text classifier that nobody wrote this for."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from test_anywhere import IMAGE, NUMBERS, Residual, Two, noise, seeded
from test_engine import snapshot
from torch import Tensor, nn
from torch.nn import functional as F

import relprop
from relprop import export, forms, plans
from relprop.compat import import_torchvision
from relprop.graph import Graph
from relprop.ledger import Ledger
from relprop.sweep import Sweep
from relprop.trace import trace


def swept(graph: Graph, tensors: tuple[Tensor, ...], preset: str) -> tuple[Tensor, list[Tensor], Ledger]:
    """Output, relevance of the first class, and ledger."""
    sweep = Sweep(plans.make(graph, preset))
    with torch.no_grad():
        sweep.forward.shapes(*tensors)
        record = sweep.forward(*tensors)
        start = torch.zeros_like(record.output)[None]
        start[:, :, 0] = 1
        output = record.output.clone()
        results, _, ledger = sweep.back(record, start, torch.ones(start.shape[:2], dtype=torch.float64), strict=True)
    return output, results, ledger


class Mixed(nn.Module):
    """A bit of every family, functions and modules, in place and not."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 8, 1), nn.Sigmoid())
        self.norm, self.group = nn.LayerNorm(8), nn.GroupNorm(2, 8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up = nn.ConvTranspose2d(8, 8, 2, 2)
        self.register_buffer("position", torch.zeros(1, 36, 8))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.up(F.gelu(self.bn(self.conv(x)))), 2)
        x = x * self.gate(x)
        x = x + F.hardswish(self.group(F.pad(x, (1, 1, 1, 1))[:, :, 1:-1, 1:-1]))
        x = F.interpolate(F.avg_pool2d(x, 2), scale_factor=2.0)
        t = x.flatten(2).transpose(1, 2) + self.position
        q, k, v = self.qkv(self.norm(t)).reshape(len(t), 36, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        t = t + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        t = torch.cat([t[:, ::2], torch.roll(t, 1, 1)[:, 1::2]], 1)
        t = torch.addcmul(t, t.tanh(), t.sigmoid(), value=0.5)
        return self.head(t.mean(1))


@pytest.mark.parametrize("preset", ["paper", "mixture", "epsilon"])
@pytest.mark.parametrize(
    ("make", "x"),
    [(Residual, (IMAGE,)), (Two, (IMAGE, NUMBERS)), (Mixed, (IMAGE,))],
    ids=["residual", "two inputs", "mixed"],
)
def test_the_same_rules_serve_both(make: Any, x: tuple[Tensor, ...], preset: str) -> None:
    model = seeded(make())
    form, tensors = forms.form(x, model)
    mine, other = trace(model, form, tensors), export.trace(model, form, tensors)
    output, relevance, ledger = swept(mine, tensors, preset)
    exported, likewise, books = swept(other, tensors, preset)
    torch.testing.assert_close(output, model(*x).detach())
    torch.testing.assert_close(exported, output)
    torch.testing.assert_close(likewise, relevance)
    torch.testing.assert_close(books.absorbed_by_cause, ledger.absorbed_by_cause)
    assert other.merges == mine.merges
    assert float(books.error.max()) < 1e-12


def test_exported_nodes_have_the_names_and_lines_of_the_model() -> None:
    model = seeded(Residual())
    form, tensors = forms.form(IMAGE, model)
    mine, other = trace(model, form, tensors), export.trace(model, form, tensors)
    modules = [node.name for node in mine if node.calls and node.calls[-1][0] == node.name.partition("#")[0]]
    assert set(modules) <= {node.name for node in other}
    assert mine.calls.keys() == other.calls.keys()
    assert {kind for node in mine for kind in node.kinds} == {kind for node in other for kind in node.kinds}
    lines, first = inspect.getsourcelines(Residual.forward)
    line = first + next(k for k, text in enumerate(lines) if "block(x)" in text)
    source = next(node.source for node in other if node.merge == 1)
    assert source == f"test_anywhere.py:{line}: x = x + block(x)"


class Untraceable(nn.Module):
    """Writes into a view, and looks at shapes and types in ways that symbols cannot follow."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 6, 3, padding=1), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        if not torch.jit.isinstance(x, Tensor) or not type(x).__name__.endswith("Tensor"):
            raise TypeError("no tensor")
        h = F.relu(self.conv(x))
        h[:, :2].mul_(2.0)  # a view
        return self.fc(h.mean((2, 3)) + torch.erf(torch.tensor(math.pi)))


def test_what_fx_cannot_trace_is_exported() -> None:
    model = seeded(Untraceable())
    form, tensors = forms.form(IMAGE, model)
    for known in (None, tensors):
        with pytest.raises(relprop.RelpropError, match=r"cannot be traced by torch\.fx"):
            trace(model, form, known)
    before, numbers = snapshot(model), torch.random.get_rng_state()
    e = relprop.explain(model, IMAGE, 1, start="logit", strict=True)
    assert snapshot(model) == before
    assert torch.equal(torch.random.get_rng_state(), numbers)
    torch.testing.assert_close(e.output, model(IMAGE).detach())
    assert float(e.ledger.error.max()) < 1e-12
    assert relprop.explain(model, IMAGE[:1], 1, layer="conv").output.shape == (
        1,
        6,
        6,
        6,
    )  # another shape: exported anew
    with pytest.raises(relprop.RelpropError, match=r"cannot be traced by torch\.fx"):
        relprop.plan(seeded(Untraceable()))  # without an input there is nothing to export with


def test_an_exported_operator_without_a_rule_is_named_with_its_line() -> None:
    class Odd(Untraceable):
        def forward(self, x: Tensor) -> Tensor:
            return torch.erfinv(super().forward(x).tanh())  # here

    model = seeded(Odd())
    _, first = inspect.getsourcelines(Odd.forward)
    with pytest.raises(relprop.RelpropError, match=rf"erfinv \(erfinv, test_export\.py:{first + 1}: .*has no rule"):
        relprop.explain(model, IMAGE)
    assert relprop.explain(model, IMAGE, overrides={"erfinv": "pass"}, strict=True).relevance.shape == IMAGE.shape


def test_an_exported_model_may_write_into_its_input_and_its_buffers() -> None:
    class Writes(Untraceable):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            x.mul_(2.0)
            return super().forward(x)

    model, x = seeded(Writes()), IMAGE.clone()
    before = model.calls.clone()
    e = relprop.explain(model, x, 1, strict=True)
    assert torch.equal(x, IMAGE)
    torch.testing.assert_close(e.output, seeded(Writes())(IMAGE.clone()).detach())
    assert torch.equal(model.calls, before)


def test_branches_on_values_are_refused_with_the_first_complaint(capfd: pytest.CaptureFixture[str]) -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(relprop.RelpropError, match="branches on values"):
        relprop.explain(Branches().eval(), NUMBERS)
    assert capfd.readouterr() == ("", "")  # torch has a page of its own to say


# -- text -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bert() -> nn.Module:
    import_torchvision()  # which transformers imports, too
    import transformers

    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        num_labels=3,
    )
    return seeded(transformers.BertForSequenceClassification(config))


TOKENS = torch.randint(0, 50, (2, 7), generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([[1] * 7, [1] * 5 + [0] * 2])


@pytest.mark.parametrize("preset", ["paper", "epsilon"])
@pytest.mark.parametrize(
    "x", [{"input_ids": TOKENS, "attention_mask": MASK}, {"input_ids": TOKENS}], ids=["with a mask", "without"]
)
def test_a_text_classifier_gives_relevance_to_tokens(bert: nn.Module, x: dict[str, Tensor], preset: str) -> None:
    e = relprop.explain(bert, x, 1, preset=preset, layers=["bert.embeddings.LayerNorm"], strict=True)
    torch.testing.assert_close(e.output, bert(**x).logits.detach())
    tokens = e.relevance["input_ids"]
    assert tokens.shape == TOKENS.shape
    assert not tokens.is_complex() and tokens.is_floating_point()  # noqa: PT018 - one thought
    if "attention_mask" in x:
        assert not e.relevance["attention_mask"].any()
    # Positions and token types take their share where they are added to the words, and it has a name.
    vectors = e.relevance_at("bert.embeddings.LayerNorm")
    added = e.ledger.at("bert.embeddings").absorbed["constant"]
    assert vectors.shape == (2, 7, 16)
    torch.testing.assert_close(tokens.sum(1) + added, vectors.sum((1, 2)))
    assert float(e.ledger.error.max()) < 1e-12
    if preset == "paper":
        torch.testing.assert_close(tokens.sum(1) + added, e.start)


def test_masked_tokens_matter_only_to_themselves(bert: nn.Module) -> None:
    other = TOKENS.clone()
    other[1, 5:] = (other[1, 5:] + 1) % 50
    # The classifier reads the first token, so what is masked gets nothing, whatever it is.
    one, two = (relprop.explain(bert, {"input_ids": t, "attention_mask": MASK}, 1) for t in (TOKENS, other))
    torch.testing.assert_close(one.relevance["input_ids"][:, :5], two.relevance["input_ids"][:, :5])
    assert float(one.relevance["input_ids"][1, 5:].abs().max()) < 1e-12 * float(one.start[1])


def test_a_text_classifier_of_vectors(bert: nn.Module) -> None:
    vectors = noise(2, 7, 16)
    e = relprop.explain(bert, {"inputs_embeds": vectors}, 1, strict=True)
    assert e.relevance["inputs_embeds"].shape == vectors.shape
    e = relprop.explain(bert, {"input_ids": TOKENS}, 3, layer="bert.encoder.layer.0.intermediate", strict=True)
    assert e.output.shape == (2, 7, 32)
    torch.testing.assert_close(e.start, e.output[:, :, 3].sum(1))


def test_tokens_get_what_their_vectors_get() -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.bag, self.fc = nn.Embedding(20, 6), nn.EmbeddingBag(20, 6, mode="sum"), nn.Linear(6, 3)

        def forward(self, ids: Tensor) -> Tensor:
            return self.fc(self.words(ids).mean(1) + self.bag(ids))

    class Rest(nn.Module):
        def __init__(self, bag: Bag) -> None:
            super().__init__()
            self.fc = bag.fc

        def forward(self, one: Tensor, two: Tensor) -> Tensor:
            return self.fc(one.mean(1) + two.sum(1))

    model = seeded(Bag())
    ids = TOKENS % 20
    e = relprop.explain(model, ids, 1, preset="epsilon", strict=True)
    vectors = (model.words.weight.detach()[ids], model.bag.weight.detach()[ids])
    rest = relprop.explain(Rest(model).eval(), vectors, 1, preset="epsilon")
    torch.testing.assert_close(e.relevance, rest.relevance[0].sum(-1) + rest.relevance[1].sum(-1))
    with pytest.raises(relprop.RelpropError, match="20 cannot be looked up in a table of 20 rows, 0 to 19"):
        relprop.explain(model, ids + 1 + (19 - ids.max()), 1)
