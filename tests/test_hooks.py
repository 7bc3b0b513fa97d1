"""Models as their users left them: compiled, parametrised, pruned, with hooks of their own, in half precision."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_anywhere import IMAGE, NUMBERS, Residual, seeded
from test_engine import snapshot
from torch import Tensor, fx, nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

import relprop

# -- compiled ---------------------------------------------------------------------------------------------------------


def test_a_compiled_model_is_explained_through_its_original() -> None:
    model = seeded(Residual())
    want = relprop.explain(model, IMAGE, 1, layers=["block1.0"])
    compiled = torch.compile(seeded(Residual()), backend="eager")
    got = relprop.explain(compiled, IMAGE, 1, layers=["block1.0"])
    assert torch.equal(got.relevance, want.relevance)
    assert torch.equal(got.relevance_at("block1.0"), want.relevance_at("block1.0"))


def test_compiled_parts_are_explained_through_their_originals() -> None:
    model = seeded(Residual())
    want = relprop.explain(model, IMAGE, 1, layers=["block1.0"])
    parts = seeded(Residual())
    parts.block1 = torch.compile(parts.block1, backend="eager")
    parts.stem.compile(backend="eager")  # in place
    got = relprop.explain(parts, IMAGE, 1, layers=["block1.0"], strict=True)
    torch.testing.assert_close(got.relevance, want.relevance)
    assert "block1.0" in got.ledger.nodes
    assert relprop.explain(parts, IMAGE, 1, layer="block1").output.shape == (2, 6, 6, 6)


# -- parametrised -----------------------------------------------------------------------------------------------------

REPARAMETRISED: dict[str, Callable[[nn.Module], Any]] = {
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "older weight norm": weight_norm,
    "older spectral norm": spectral_norm,
    "pruning": lambda m: prune.l1_unstructured(m, "weight", 0.5),
    "own": lambda m: parametrize.register_parametrization(m, "weight", Doubled()),
}


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@pytest.mark.filterwarnings(
    "ignore:.*weight_norm.*is deprecated:FutureWarning", "ignore:.*spectral_norm.*:FutureWarning"
)
@pytest.mark.parametrize("change", REPARAMETRISED.values(), ids=REPARAMETRISED)
def test_parametrised_weights_are_those_that_the_model_uses(change: Callable[[nn.Module], Any]) -> None:
    model = Residual()
    for part in (model.stem[0], model.block1[0], model.fc):
        change(part)
    model = seeded(model)  # after which the older ones hold weights that are no longer true
    before = snapshot(model)
    e = relprop.explain(model, IMAGE, 1, strict=True)
    assert snapshot(model) == before
    plain = seeded(Residual())
    with torch.no_grad():
        torch.testing.assert_close(e.output, model(IMAGE))  # refreshes them
        for name in ("stem.0", "block1.0", "fc"):
            plain.get_submodule(name).weight.copy_(model.get_submodule(name).weight)
        rest = {k: v for k, v in model.state_dict().items() if k in plain.state_dict()}
        plain.load_state_dict(rest, strict=False)
    torch.testing.assert_close(e.relevance, relprop.explain(plain, IMAGE, 1).relevance)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    torch.testing.assert_close(relprop.explain(model, IMAGE, 1).output, model(IMAGE).detach())


# -- hooks ------------------------------------------------------------------------------------------------------------

STEER = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(1, 6, 1, 1)


class Plus(nn.Module):
    """What the hook below does, as a module."""

    def forward(self, x: Tensor) -> Tensor:
        return x + STEER


@pytest.mark.parametrize("name", ["", "stem", "stem.0"])
def test_hooks_that_look_see_tensors_only(name: str) -> None:
    want = relprop.explain(seeded(Residual()), IMAGE, 1)
    model = seeded(Residual())
    seen: list[Any] = []
    model.get_submodule(name).register_forward_hook(lambda _, __, out: seen.append(out))
    model.get_submodule(name).register_forward_pre_hook(lambda _, args: seen.extend(args))
    before = snapshot(model)
    e = relprop.explain(model, IMAGE, 1)
    assert snapshot(model) == before
    assert torch.equal(e.relevance, want.relevance)
    assert all(isinstance(value, Tensor) for value in seen)


@pytest.mark.parametrize("where", ["block1", "block1.2"])
def test_hooks_that_change_are_a_part_of_the_model(where: str) -> None:
    model = seeded(Residual())
    model.get_submodule(where).register_forward_hook(lambda _, __, out: out + STEER)
    written = seeded(Residual())
    written.block1.append(Plus().eval())
    want = relprop.explain(written, IMAGE, 1)
    before = snapshot(model)
    e = relprop.explain(model, IMAGE, 1, strict=True)
    assert snapshot(model) == before
    torch.testing.assert_close(e.output, model(IMAGE).detach())
    torch.testing.assert_close(e.relevance, want.relevance)
    assert float(e.ledger.absorbed_by_cause["constant"].min()) > 0


def test_hooks_before_a_module_and_around_the_model() -> None:
    model = seeded(Residual())
    model.fc.register_forward_pre_hook(lambda _, args, kwargs: ((2 * args[0],), kwargs), with_kwargs=True)
    model.register_forward_pre_hook(lambda _, args: (args[0] * 3,))
    model.register_forward_hook(lambda _, __, out: out - 1)
    e = relprop.explain(model, IMAGE, 1, start="logit", strict=True)
    torch.testing.assert_close(e.output, model(IMAGE).detach())
    plain = seeded(Residual())
    torch.testing.assert_close(e.output, (plain.fc(2 * hidden_mean(plain, 3 * IMAGE)) - 1).detach())


def hidden_mean(model: nn.Module, x: Tensor) -> Tensor:
    x = model.stem(x)
    for block in (model.block1, model.block2, model.block2):
        x = x + block(x)
    return x.mean((2, 3))


def test_a_hook_that_begins_to_change_things_is_noticed() -> None:
    model = seeded(Residual())
    factor = [1.0]
    model.block1.register_forward_hook(lambda _, __, out: out * factor[0])
    before = relprop.explain(model, IMAGE, 1)
    for factor[0] in (3.0, 0.5):
        after = relprop.explain(model, IMAGE, 1)
        torch.testing.assert_close(after.output, model(IMAGE).detach())
        assert not torch.allclose(before.output, after.output)


def test_a_hook_that_never_does_the_same_is_refused() -> None:
    model = seeded(Residual())
    calls = [1]

    def grows(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        calls[0] += 1
        return out * calls[0]

    model.block1.register_forward_hook(grows)
    with pytest.raises(relprop.RelpropError, match=r"something else than the model.*hooks on block1"):
        relprop.explain(model, IMAGE, 1)


def test_a_hook_that_cannot_be_traced_is_refused() -> None:
    model = seeded(Residual())
    model.block1.register_forward_hook(lambda _, __, out: out * float(out.sum()))
    with pytest.raises(relprop.RelpropError):
        relprop.explain(model, IMAGE, 1)


def test_a_forward_of_the_instances_own_is_traced() -> None:
    model = seeded(Residual())
    model.forward = lambda x: Residual.forward(model, 2 * x)
    torch.testing.assert_close(relprop.explain(model, IMAGE, 1).output, model(IMAGE).detach())
    assert not any(isinstance(value, fx.Proxy) for m in model.modules() for value in vars(m).values())


# -- half precision ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_explained_in_float32(dtype: torch.dtype) -> None:
    model = seeded(Residual(), dtype)
    x = IMAGE.to(dtype)
    wide = copy.deepcopy(model).float()
    want = relprop.explain(wide, x.float(), 1)
    before = snapshot(model)
    e = relprop.explain(model, x, 1, strict=True)
    assert snapshot(model) == before
    assert e.relevance.dtype == e.output.dtype == torch.float32
    assert torch.equal(e.relevance, want.relevance)
    assert float(e.ledger.error.max()) <= 1e-5
    assert "block1.0" in str(relprop.plan(model, x))
    if dtype == torch.float16:
        torch.testing.assert_close(e.output, model(x).detach().float(), rtol=2e-2, atol=2e-3)
    assert torch.equal(relprop.explain(model, x, 2, layer="block1").target, torch.tensor([2, 2]))
    with torch.no_grad():
        model.fc.weight.mul_(2)
    assert not torch.equal(relprop.explain(model, x, 1).output, e.output)


def test_half_precision_wants_inputs_of_its_kind() -> None:
    model = seeded(Residual(), torch.float16)
    with pytest.raises(relprop.RelpropError, match=r"float32.*float16.*x\.to\(torch\.float16\)"):
        relprop.explain(model, IMAGE.float())


def test_a_half_precision_model_that_is_not_its_twin_is_refused() -> None:
    class Depends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) * (2 if x.dtype == torch.float16 else 1)

    with pytest.raises(relprop.RelpropError, match="something else than the model"):
        relprop.explain(seeded(Depends(), torch.float16), NUMBERS.half())
