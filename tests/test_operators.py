"""What a user may add to the vocabulary."""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import relprop
from relprop import operators
from relprop.operators import Elementwise, Operator, Ref

ROOT = Path(__file__).parent.parent


class Shrunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.hardshrink(self.conv(x)).mean((2, 3)))


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


@pytest.fixture
def table() -> Iterator[None]:
    before = dict(operators.TABLE)
    yield
    operators.TABLE.clear()
    operators.TABLE.update(before)


def documented(page: Path) -> str:
    """The lines that register an operator, as a page has them."""
    (code,) = re.findall(
        r"^ *@relprop.operators.register.*?^ *return [^\n]*$", page.read_text(), re.MULTILINE | re.DOTALL
    )
    return textwrap.dedent(code)


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    "page", [ROOT / "CONTRIBUTING.md", ROOT / "src" / "relprop" / "operators.py"], ids=lambda p: p.name
)
def test_an_unknown_function_is_named_and_registered_in_the_documented_lines(page: Path) -> None:
    model, x = Shrunk().eval(), torch.randn(2, 3, 8, 8)
    with pytest.raises(relprop.RelpropError) as caught:
        relprop.plan(model)
    for told in (
        r"hardshrink \(hardshrink, test_operators.py:\d+: return self.head\(F.hardshrink\(self.conv\(x\)\)",
        "has no rule; register one with relprop.operators.register",
        "overrides={'hardshrink': 'pass'}",
    ):
        assert re.search(told, str(caught.value)) or told in str(caught.value)
    code = documented(page)
    assert len(code.splitlines()) <= 5
    exec(code, {"torch": torch, "relprop": relprop})  # the very lines that a user would write
    explanation = relprop.explain(model, x, strict=True)
    assert explanation.ledger.error.max() < 1e-5
    torch.testing.assert_close(explanation.output, model(x).detach())


@pytest.mark.usefixtures("table")
def test_a_module_type_is_registered_with_the_module_in_front() -> None:
    @relprop.operators.register(Doubling)
    def doubling(module: Doubling, x: Ref) -> Operator:
        return Elementwise("doubling", (x,), module.forward, nonnegative=None)

    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 6), Doubling(), nn.ReLU(), nn.Linear(6, 3)).eval()
    x = torch.randn(2, 3, 2, 2)
    explanation = relprop.explain(model, x, strict=True)
    torch.testing.assert_close(explanation.output, model(x))
    assert "doubling" in str(relprop.plan(model))
