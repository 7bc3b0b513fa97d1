"""From a model to its graph: sums however written, residual blocks, names, lines, and what in-place code means."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import relprop
from relprop.graph import Graph, Node

MakeModel = Callable[..., nn.Module]
Forward = Callable[[Any, Tensor], Tensor]


@pytest.fixture(autouse=True)
def _the_same_numbers() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


class Model(nn.Module):
    """Some layers, and a forward that a test writes."""

    def __init__(self, forward: Forward, **modules: nn.Module) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.c = nn.Linear(4, 4)
        for name, module in modules.items():
            self.add_module(name, module)
        self.written = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.written(self, x)


def build(forward: Forward, **modules: nn.Module) -> nn.Module:
    return Model(forward, **modules).eval()


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def graph_of(model: nn.Module) -> Graph:
    return relprop.plan(model).graph


def merges(graph: Graph) -> list[Node]:
    return [node for node in graph if node.merge is not None]


def branches(graph: Graph, node: Node) -> list[str]:
    return [graph.nodes[i].name for i in node.inputs]


def assert_agrees(model: nn.Module, x: Tensor) -> relprop.Explanation:
    """The graph computes what the model computes, and relevance adds up on it."""
    e = relprop.explain(model, x, strict=True)
    with torch.no_grad():
        torch.testing.assert_close(e.output, model(x.clone()), rtol=1e-5, atol=1e-6)
    return e


# -- sums -------------------------------------------------------------------------------------------------------------


def iadd(self: Any, x: Tensor) -> Tensor:
    out = self.a(x)
    out += self.b(x)
    return out


def in_a_loop(self: Any, x: Tensor) -> Tensor:
    out = self.a(x)
    for layer in (self.b, self.c):
        out = out + layer(x)
    return out


TWO: dict[str, Forward] = {
    "+": lambda m, x: m.a(x) + m.b(x),
    "+=": iadd,
    "torch.add": lambda m, x: torch.add(m.a(x), m.b(x)),
    "torch.add by keyword": lambda m, x: torch.add(input=m.a(x), other=m.b(x)),
    "Tensor.add": lambda m, x: m.a(x).add(m.b(x)),
    "Tensor.add_": lambda m, x: m.a(x).add_(m.b(x)),
    "operator.add": lambda m, x: operator.add(m.a(x), m.b(x)),
    "operator.iadd": lambda m, x: operator.iadd(m.a(x), m.b(x)),
    "__add__": lambda m, x: m.a(x).__add__(m.b(x)),
    "sum()": lambda m, x: sum([m.a(x), m.b(x)]),
}


@pytest.mark.parametrize("forward", TWO.values(), ids=TWO)
def test_sums_are_found_however_they_are_written(forward: Forward) -> None:
    model = build(forward)
    graph = graph_of(model)
    (merge,) = merges(graph)
    assert merge.operator.label == "add"
    assert branches(graph, merge) == ["a", "b"]
    assert_agrees(model, noise(2, 4))


WEIGHTED: dict[str, tuple[Forward, tuple[float, ...]]] = {
    "alpha": (lambda m, x: torch.add(m.a(x), m.b(x), alpha=3), (1.0, 3.0)),
    "-": (lambda m, x: m.a(x) - m.b(x), (1.0, -1.0)),
    "torch.sub": (lambda m, x: torch.sub(m.a(x), m.b(x), alpha=2), (1.0, -2.0)),
    "sub_": (lambda m, x: m.a(x).sub_(m.b(x)), (1.0, -1.0)),
    "minus a sum": (lambda m, x: m.c(x) - (m.a(x) - m.b(x)), (1.0, -1.0, 1.0)),
}


@pytest.mark.parametrize(("forward", "factors"), WEIGHTED.values(), ids=WEIGHTED)
def test_factors_of_sums(forward: Forward, factors: tuple[float, ...]) -> None:
    model = build(forward)
    (merge,) = merges(graph_of(model))
    assert merge.operator.factors == factors
    assert_agrees(model, noise(2, 4))


THREE: dict[str, Forward] = {
    "a + b + c": lambda m, x: m.a(x) + m.b(x) + m.c(x),
    "a + (b + c)": lambda m, x: m.a(x) + (m.b(x) + m.c(x)),
    "sum()": lambda m, x: sum((m.a(x), m.b(x), m.c(x))),
    "a loop": in_a_loop,
}


@pytest.mark.parametrize("forward", THREE.values(), ids=THREE)
def test_sums_of_several_terms_are_one_merge(forward: Forward) -> None:
    model = build(forward)
    graph = graph_of(model)
    (merge,) = merges(graph)
    assert sorted(branches(graph, merge)) == ["a", "b", "c"]
    e = relprop.explain(model, noise(2, 4), split="symmetric", start="one", layers=["a", "b", "c"])
    for name in "abc":
        torch.testing.assert_close(e.relevance_at(name).sum(1), torch.full((2,), 1 / 3))
    assert_agrees(model, noise(2, 4))


def test_a_sum_that_is_read_twice_stays_a_merge_of_its_own() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x) + m.b(x)
        return h + m.c(h)

    model = build(forward)
    graph = graph_of(model)
    first, second = merges(graph)
    assert branches(graph, first) == ["a", "b"]
    assert branches(graph, second) == [first.name, "c"]
    assert second.identities == {0}
    assert_agrees(model, noise(2, 4))


def test_a_sum_across_modules_is_not_merged_with_the_one_outside() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + x

    model = build(lambda m, x: m.inner(m.a(x)) + m.b(x), inner=Inner())
    graph = graph_of(model)
    assert [node.name for node in merges(graph)] == ["inner.add", "add"]
    e = relprop.explain(model, noise(2, 4), layers=["inner"])
    assert e.relevance_at("inner").shape == (2, 4)


def test_t_plus_t_is_one_branch_taken_twice() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        t = m.a(x)
        return t + t

    model = build(forward)
    graph = graph_of(model)
    assert merges(graph) == []
    node = graph.nodes[-1]
    assert node.operator.factors == (2.0,)
    e = relprop.explain(model, noise(2, 4), start="one", strict=True)
    alone = relprop.explain(model.a, noise(2, 4), target=e.target, start="one")
    torch.testing.assert_close(e.relevance, alone.relevance)
    assert_agrees(model, noise(2, 4))


def test_a_branch_taken_twice_weighs_double() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        t = m.a(x)
        return t + m.b(x) + t

    model = build(forward)
    (merge,) = merges(graph_of(model))
    assert merge.operator.factors == (2.0, 1.0)
    assert_agrees(model, noise(2, 4))


def test_a_constant_is_a_part_but_no_branch() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return 1.5 + m.a(x) + m.shift

    model = build(forward)
    model.shift = nn.Parameter(torch.arange(4.0))
    graph = graph_of(model)
    assert merges(graph) == []
    node = graph.nodes[-1]
    assert node.operator.parts == 2
    torch.testing.assert_close(node.operator.constant.detach(), torch.arange(4.0) + 1.5)
    e = assert_agrees(model, noise(2, 4))
    assert set(e.ledger.absorbed_by_cause) == {"constant"}


def test_broadcast_branches_get_their_own_shape() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.conv(x)
        return (h + h.mean((2, 3), keepdim=True)).mean((2, 3))

    model = build(forward, conv=nn.Conv2d(3, 4, 3))
    (merge,) = merges(graph_of(model))
    assert merge.identities == {0}
    assert_agrees(model, noise(2, 3, 6, 6))


# -- residual blocks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "blocks", "projections"),
    [
        ("resnet18", 8, {3, 5, 7}),
        ("resnet34", 16, {4, 8, 14}),
        ("resnet50", 16, {1, 4, 8, 14}),
        ("resnet101", 33, {1, 4, 8, 31}),
        ("resnet152", 50, {1, 4, 12, 48}),
        ("resnext50_32x4d", 16, {1, 4, 8, 14}),
        ("wide_resnet50_2", 16, {1, 4, 8, 14}),
        ("vgg16", 0, set()),
        ("alexnet", 0, set()),
    ],
)
def test_blocks_of_known_models(torchvision_model: MakeModel, name: str, blocks: int, projections: set[int]) -> None:
    graph = graph_of(torchvision_model(name))
    found = merges(graph)
    assert graph.merges == blocks
    assert [node.merge for node in found] == list(range(1, blocks + 1))
    assert {node.merge for node in found if not node.identities} == projections
    for node in found:
        main = graph.nodes[node.inputs[node.main]].name
        assert main.startswith(node.name.removesuffix("add") + "bn")
        assert node.main not in node.identities
        assert node.block == node.merge
    assert [node.name for node in graph if node.first] == ["features.0" if blocks == 0 else "conv1"]


def test_what_stands_in_a_block(torchvision_model: MakeModel) -> None:
    graph = graph_of(torchvision_model("resnet50"))
    names = {block: [node.name for node in graph if node.block == block] for block in (None, 1, 2, 16)}
    assert names[None][:5] == ["input", "conv1", "bn1", "relu", "maxpool"]
    assert names[None][-3:] == ["avgpool", "flatten", "fc"]
    assert all(name.startswith("layer1.0.") for name in names[1])
    assert {"layer1.0.conv1", "layer1.0.downsample.0", "layer1.0.relu#1", "layer1.0.add"} <= set(names[1])
    assert {name.rsplit(".", 1)[0] for name in names[2]} == {"layer1.1"}
    assert names[16][-1] == "layer4.2.add"
    after = {node.name: node.after for node in graph}
    assert after["conv1"] == after["layer1.0.conv1"] == after["layer1.0.add"] == 0
    assert after["layer1.0.relu#2"] == after["layer1.1.conv1"] == 1
    assert after["layer3.0.downsample.0"] == 7
    assert after["fc"] == 16


def test_a_skip_through_identities_is_an_identity_skip_and_one_through_a_pool_is_none() -> None:
    identity = build(lambda m, x: m.b(m.a(x)) + m.drop(m.skip(m.a(x))), skip=nn.Identity(), drop=nn.Dropout())
    (merge,) = merges(graph_of(identity))
    assert merge.identities == frozenset()  # a is called twice: each branch has a call of its own

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        return m.b(h) + m.drop(m.skip(h))

    (merge,) = merges(graph_of(build(forward, skip=nn.Identity(), drop=nn.Dropout())))
    assert merge.identities == {1}
    assert merge.main == 0

    def pooled(m: Any, x: Tensor) -> Tensor:
        return (m.conv(x) + m.pool(x)).mean((2, 3))

    model = build(pooled, conv=nn.Conv2d(3, 3, 3, 2, 1), pool=nn.AvgPool2d(2))
    (merge,) = merges(graph_of(model))
    assert merge.identities == frozenset()
    assert merge.main == 0


def test_the_main_branch_has_done_most_wherever_it_is_written() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        return h + m.c(m.b(h).relu())

    (merge,) = merges(graph_of(build(forward)))
    assert (merge.main, merge.identities) == (1, {0})

    def projected(m: Any, x: Tensor) -> Tensor:
        return m.a(x) + m.c(m.b(x).relu())

    (merge,) = merges(graph_of(build(projected)))
    assert (merge.main, merge.identities) == (1, frozenset())


def test_nested_blocks_are_numbered_inside_out() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        outer = m.a(x)
        inner = m.b(outer)
        inner = (m.c(inner) + inner).relu()
        return inner + outer

    graph = graph_of(build(forward))
    assert [node.merge for node in merges(graph)] == [1, 2]
    block = {node.name: node.block for node in graph}
    assert block == {"input": None, "a": None, "b": 2, "c": 1, "add": 1, "relu": 2, "add#1": 2}


# -- names and lines --------------------------------------------------------------------------------------------------


def test_names_of_nodes_are_those_of_modules_and_unique() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = F.relu(m.body(x))
        h = torch.relu(m.a(h))
        h = m.act(m.a(m.act(h)))
        return torch.flatten(h, 1)

    body = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(4, 4))))
    graph = graph_of(build(forward, body=body, act=nn.ReLU()))
    names = [node.name for node in graph]
    assert names == [
        "input", "body.0", "body.1.0", "body.1.1.0", "relu", "a", "relu#1", "act", "a#1", "act#1", "flatten",
    ]  # fmt: skip
    assert graph.nodes[3].calls == (("body", 0), ("body.1", 0), ("body.1.1", 0), ("body.1.1.0", 0))
    assert graph.nodes[8].calls == (("a", 1),)
    assert graph.calls["body", 0] == {1, 2, 3}
    assert graph.calls["a", 1] == {8}


def test_functions_are_named_by_the_module_that_calls_them() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.layer(x)) + x

    model = build(lambda m, x: m.stages(m.a(x)), stages=nn.Sequential(Inner(), Inner()))
    names = [node.name for node in graph_of(model)]
    assert names[2:5] == ["stages.0.layer", "stages.0.relu", "stages.0.add"]
    assert names[5:] == ["stages.1.layer", "stages.1.relu", "stages.1.add"]


def test_a_module_named_input_does_not_hide_the_input() -> None:
    model = build(lambda m, x: m.input(x), input=nn.Linear(4, 4))
    names = [node.name for node in graph_of(model)]
    assert names[0] == "input"
    assert len(set(names)) == len(names) == 2
    assert_agrees(model, noise(2, 4))


def test_what_the_output_does_not_need_is_left_out() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.b(x)
        unused = m.c(x).relu()  # noqa: F841
        return m.a(x)

    assert [node.name for node in graph_of(build(forward))] == ["input", "a"]


class Lines(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)  # line of the features
        h = F.relu(h)  # line of the function
        h += x  # line of the sum
        return self.head(h)  # line of the head


def test_nodes_know_the_line_that_they_were_written_in() -> None:
    source, first = inspect.getsourcelines(Lines.forward)
    lines = {
        word: first + i for i, text in enumerate(source) for word in ("features", "function", "sum", "head")
        if f"# line of the {word}" in text
    }  # fmt: skip
    found = {node.name: node.source for node in graph_of(Lines().eval())}
    for node, word in (("features.0", "features"), ("features.1", "features"), ("relu", "function"), ("add", "sum")):
        assert found[node].startswith(f"test_trace.py:{lines[word]}:"), node
    assert found["head"].startswith(f"test_trace.py:{lines['head']}: return self.head(h)")


# -- in place ---------------------------------------------------------------------------------------------------------


def relu_then_both(relu: Callable[[Any, Tensor], Tensor]) -> Forward:
    """A pre-activation block: the skip is read after the ReLU has run."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        out = relu(m, h)
        return m.b(out) + h

    return forward


IN_PLACE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "nn.ReLU": lambda m, h: m.act(h),
    "F.relu": lambda _, h: F.relu(h, inplace=True),
    "F.relu by place": lambda _, h: F.relu(h, True),
    "F.relu_": lambda _, h: F.relu_(h),
    "torch.relu_": lambda _, h: torch.relu_(h),
    "Tensor.relu_": lambda _, h: h.relu_(),
    "through an identity": lambda m, h: m.act(m.same(h)),
    "through a dropout": lambda m, h: m.act(m.drop(h)),
    "through detach": lambda m, h: m.act(h.detach()),
}


@pytest.mark.parametrize("relu", IN_PLACE.values(), ids=IN_PLACE)
def test_a_skip_sees_what_an_in_place_relu_did(relu: Callable[[Any, Tensor], Tensor]) -> None:
    model = build(relu_then_both(relu), act=nn.ReLU(inplace=True), same=nn.Identity(), drop=nn.Dropout())
    graph = graph_of(model)
    (merge,) = merges(graph)
    rectified = next(i for i, node in enumerate(graph) if node.operator.label == "relu")
    assert rectified in merge.inputs
    assert merge.identities == {list(merge.inputs).index(rectified)}
    assert_agrees(model, noise(4, 4))


NOT_IN_PLACE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "nn.ReLU": lambda m, h: m.act(h),
    "F.relu": lambda _, h: F.relu(h),
    "a clone": lambda _, h: h.clone().relu_(),
    "a sum with zero": lambda _, h: (h + 0).relu_(),
}


@pytest.mark.parametrize("relu", NOT_IN_PLACE.values(), ids=NOT_IN_PLACE)
def test_a_skip_sees_what_was_there_before_a_relu_that_is_not_in_place(relu: Callable[[Any, Tensor], Tensor]) -> None:
    model = build(relu_then_both(relu), act=nn.ReLU())
    graph = graph_of(model)
    (merge,) = merges(graph)
    assert "a" in branches(graph, merge)
    assert_agrees(model, noise(4, 4))


def clone_first(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    kept = h.clone()
    h.relu_()
    return m.b(h) + kept


def iadd_with_a_second_name(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    other = h
    h += m.b(x).relu()
    return m.c(h).relu() + other


def add_then_read_the_old_name(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    out = h.add_(m.b(x).relu())
    return m.c(out).relu() - h


def write_twice(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h += 1.0
    h.relu_()
    h -= 0.5
    return m.b(h) + h


def plus_is_a_new_tensor(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    other = h
    h = h + m.b(x).relu()
    return m.c(h).relu() + other


@pytest.mark.parametrize(
    "forward", [clone_first, iadd_with_a_second_name, add_then_read_the_old_name, write_twice, plus_is_a_new_tensor]
)
def test_names_of_one_tensor_follow_what_is_written_to_it(forward: Forward) -> None:
    assert_agrees(build(forward), noise(4, 4))


def test_a_preactivation_net_with_in_place_relus() -> None:
    class Block(nn.Module):
        def __init__(self, inputs: int, outputs: int, stride: int) -> None:
            super().__init__()
            self.bn1, self.bn2 = nn.BatchNorm2d(inputs), nn.BatchNorm2d(outputs)
            self.relu = nn.ReLU(inplace=True)
            self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
            self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
            self.down = None if stride == 1 else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            out = self.relu(self.bn1(x))
            skip = x if self.down is None else self.down(out)
            out = self.conv2(self.relu(self.bn2(self.conv1(out))))
            out += skip
            return out

    blocks = nn.Sequential(nn.Conv2d(3, 4, 3), Block(4, 4, 1), Block(4, 6, 2), Block(6, 6, 1))
    model = build(lambda m, x: m.blocks(x).mean((2, 3)), blocks=blocks)
    with torch.no_grad():
        for i, p in enumerate(model.blocks.parameters()):
            p.copy_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
    graph = graph_of(model)
    assert graph.merges == 3
    assert [bool(node.identities) for node in merges(graph)] == [True, False, True]
    assert_agrees(model, noise(2, 3, 9, 9))


def test_writing_into_a_view_is_refused_not_wrong() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        h.view(-1, 2, 2).relu_()
        return m.b(h)

    model = build(forward)
    with pytest.raises(relprop.RelpropError, match="writes into views"):
        relprop.explain(model, noise(2, 4))


# -- other ways of writing --------------------------------------------------------------------------------------------

IMAGES: dict[str, Forward] = {
    "modules": lambda m, x: m.fc(m.flat(m.gap(m.act(m.bn(m.conv(x)))))),
    "functions": lambda m, x: m.fc(F.adaptive_avg_pool2d(F.relu(m.bn(m.conv(x))), 1).flatten(1)),
    "F.conv2d": lambda m, x: m.fc(F.conv2d(x, m.conv.weight, m.conv.bias, padding=1).relu().mean((2, 3))),
    "F.conv2d by keyword": lambda m, x: m.fc(F.conv2d(input=x, weight=m.conv.weight, padding="same").mean((2, 3))),
    "F.batch_norm": lambda m, x: m.fc(
        F.batch_norm(m.conv(x), m.bn.running_mean, m.bn.running_var, m.bn.weight, m.bn.bias).mean((2, 3))
    ),
    "F.linear": lambda m, x: F.linear(m.conv(x).mean((2, 3)), m.fc.weight, m.fc.bias),
    "a keyword": lambda m, x: m.fc(input=m.conv(x).mean(dim=(2, 3))),
    "view": lambda m, x: m.wide(m.conv(x).view(x.size(0), -1)),
    "reshape": lambda m, x: m.wide(torch.reshape(m.conv(x), (x.shape[0], -1))),
    "flatten by keyword": lambda m, x: m.wide(torch.flatten(input=m.conv(x), start_dim=1)),
    "permute": lambda m, x: m.wide(m.conv(x).permute(0, 2, 3, 1).contiguous().view(x.shape[0], -1)),
    "transpose": lambda m, x: m.wide(m.conv(x).transpose(1, 3).flatten(1)),
    "mT": lambda m, x: m.wide(m.conv(x).mT.flatten(1)),
    "squeeze": lambda m, x: m.fc(m.conv(x).mean((2, 3), keepdim=True).squeeze(-1).squeeze(-1)),
    "means one by one": lambda m, x: m.fc(m.conv(x).mean(-1).mean(-1)),
    "sum": lambda m, x: m.fc(m.conv(x).sum((2, 3))),
    "F.max_pool2d": lambda m, x: m.fc(F.max_pool2d(m.conv(x), 3, stride=2, padding=1, ceil_mode=True).mean((2, 3))),
    "F.avg_pool2d": lambda m, x: m.fc(F.avg_pool2d(m.conv(x), 2).mean((2, 3))),
    "F.adaptive_max_pool2d": lambda m, x: m.fc(F.adaptive_max_pool2d(m.conv(x), 1).flatten(1)),
    "F.dropout": lambda m, x: m.fc(F.dropout(m.conv(x), 0.5, m.training).mean((2, 3))),
    "F.leaky_relu": lambda m, x: m.fc(F.leaky_relu(m.conv(x), 0.2).mean((2, 3))),
    "F.relu6": lambda m, x: m.fc(F.relu6(m.conv(x)).mean((2, 3))),
}


@pytest.mark.parametrize("forward", IMAGES.values(), ids=IMAGES)
def test_modules_functions_and_methods_are_the_same(forward: Forward) -> None:
    parts = {
        "conv": nn.Conv2d(3, 4, 3, padding=1),
        "bn": nn.BatchNorm2d(4),
        "act": nn.ReLU(),
        "gap": nn.AdaptiveAvgPool2d(1),
        "flat": nn.Flatten(),
        "fc": nn.Linear(4, 3),
        "wide": nn.Linear(144, 3),
    }
    model = build(forward, **parts)
    with torch.no_grad():
        model.bn.running_mean.copy_(noise(4))
        model.bn.weight.copy_(noise(4))
    assert assert_agrees(model, noise(2, 3, 6, 6)).relevance.shape == (2, 3, 6, 6)


def test_a_transposition_brings_relevance_back_in_place() -> None:
    model = build(lambda m, x: m.wide(x.transpose(1, 2).flatten(1)), wide=nn.Linear(12, 2))
    other = build(lambda m, x: m.wide(x.mT.flatten(1)), wide=nn.Linear(12, 2))
    plain = build(lambda m, x: m.wide(x.flatten(1)), wide=nn.Linear(12, 2))
    for m in (model, other):
        m.wide = plain.wide
    x = noise(2, 3, 4)
    turned = relprop.explain(plain, x.transpose(1, 2).contiguous(), 0).relevance.transpose(1, 2)
    torch.testing.assert_close(relprop.explain(model, x, 0).relevance, turned)
    torch.testing.assert_close(relprop.explain(other, x, 0).relevance, turned)


def test_a_transposition_on_the_way_into_a_module_is_not_inside_it() -> None:
    model = build(lambda m, x: m.narrow(x.mT).mean(1), narrow=nn.Linear(3, 2))
    graph = graph_of(model)
    assert [node.calls for node in graph] == [(), (), (("narrow", 0),), ()]
    e = relprop.explain(model, noise(2, 3, 4), layers=["narrow"])
    torch.testing.assert_close(e.relevance_at("narrow"), e.relevance.mT)


def test_a_batch_norm_over_another_axis_than_the_matrix_before_it() -> None:
    """`nn.Linear` works on the last axis, `nn.BatchNorm1d` on the second one, here of the same size."""
    model = build(lambda m, x: m.wide(m.bn(m.a(x)).flatten(1)), bn=nn.BatchNorm1d(4), wide=nn.Linear(16, 3))
    with torch.no_grad():
        model.bn.running_mean.copy_(noise(4))
        model.bn.weight.copy_(noise(4))
    assert_agrees(model, noise(2, 4, 4))


def test_arguments_with_defaults_keep_them() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor | None = None, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
            if mask is not None:
                x = x + mask
            return self.fc(x) if scale == 1.0 else -self.fc(x)

    assert [node.name for node in graph_of(Masked().eval())] == ["input", "fc"]
    assert_agrees(Masked().eval(), noise(2, 4))


def test_subclasses_of_known_modules_are_traced_by_what_they_do() -> None:
    class Standardised(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
            return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)

    model = build(lambda m, x: m.conv(x).mean((2, 3)), conv=Standardised(3, 4, 3))
    assert_agrees(model, noise(2, 3, 6, 6))


def test_signs_are_known_where_they_are_sure() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x).relu()
        both = h + h.flatten(1)
        less = both - m.b(both).relu()
        return less + F.leaky_relu(less)

    graph = graph_of(build(forward))
    known = {node.name: node.nonnegative for node in graph}
    assert known == {
        "input": False, "a": False, "relu": True, "flatten": True, "add": True, "b": False, "relu#1": True,
        "add#1": False, "leaky_relu": False, "add#2": False,
    }  # fmt: skip
