"""What a user may add to the vocabulary."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import relprop
from relprop import operators
from relprop.operators import Elementwise, Operator, Ref


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


@pytest.mark.usefixtures("table")
def test_a_function_is_registered_in_a_few_lines() -> None:
    model, x = Shrunk().eval(), torch.randn(2, 3, 8, 8)
    with pytest.raises(relprop.RelpropError, match=r"hardshrink .*test_operators.py:\d+.*has no rule; register"):
        relprop.explain(model, x)

    @relprop.operators.register(torch.nn.functional.hardshrink)
    def hardshrink(x: Ref, lambd: float = 0.5) -> Operator:
        return Elementwise("hardshrink", (x,), lambda value: F.hardshrink(value, lambd))

    explanation = relprop.explain(model, x, strict=True)
    assert explanation.ledger.error.max() < 1e-5


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
