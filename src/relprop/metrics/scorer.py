"""Scorers: from images to class probabilities, as fast as can be without changing them.

A study scores some fifty images for every heatmap, so the forward pass is nearly all of its cost. Several engines
compute it; which one is fastest depends on the machine and the model, so it is measured.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn

from relprop import requests
from relprop.errors import RelpropError
from relprop.quiet import quietly
from relprop.state import State, undisturbed

__all__ = ["Engine", "Probabilities", "Scorer", "classes", "fastest", "probabilities"]

Engine: TypeAlias = Callable[[Tensor], Tensor]
"""From images to logits."""

Probabilities: TypeAlias = Callable[[Tensor], Tensor]
"""From images to the probabilities of all classes, ``(n, classes)``."""

ENGINES = ("eager", "folded", "frozen")
TOLERANCE = {"float32": 1e-4, "bf16": 5e-2}
"""How far a probability may lie from the eager forward pass's.

Rounding to bf16 moves ResNet-50's by up to 3e-2 (50 images, half of them masked; 8e-3 on average), and still by 1e-2
where only the upper half of the network is rounded.
"""

CHUNK = 8
"""Images in one forward pass on a CPU: more make buffers that the allocator gives back to the system every time."""

WORTHWHILE = 512
"""Images to score that pay for measuring the engines: those of the check, and a quarter is what is gained."""

_CHOICES = ("auto", "steady")
_PROBE, _ROUNDS = 4, 3


class Scorer:
    """Class probabilities of images, computed by the fastest engine that agrees with the model.

    The engines are ``"eager"``, the model as it is; ``"folded"``, batch norms folded into the convolutions and
    channels last; ``"frozen"``, that as an optimised TorchScript graph. Each is built on a copy of the model as it is
    now, checked on a batch of whole and masked images, of one image as well as of several, and timed. One that cannot
    be built, or does not agree, is left out; eager is always there.

    Args:
        model: A module in evaluation mode, or what ``relprop.load`` returns; it is never changed.
        example: A batch of inputs like those that will be scored; not needed for ``engine="eager"``.
        engine: ``"auto"``, the fastest; ``"steady"``, the first of frozen, folded and eager that agrees, whatever a
            clock says, so that two processes on like machines have the same last digits; or the name of the one to use.
        precision: ``"float32"``, the model's own; or ``"bf16"``, for convolutional networks on processors that have it,
            where probabilities to a few hundredths are enough. Where that cannot be had, it is the former.
        chunk: Images in one forward pass; by default 8 on a CPU, and as many as there are elsewhere.

    Attributes:
        engine: The name of the engine that was chosen.
        error: The largest difference to an eager probability that was seen in the check.
        seconds: The time each engine that agrees took for the batch of the check.

    Raises:
        RelpropError: If the model or the example cannot be used, or the engine that was named cannot.
    """

    def __init__(
        self,
        model: Any,
        example: Tensor | None = None,
        *,
        engine: str = "auto",
        precision: str = "float32",
        chunk: int | None = None,
    ) -> None:
        if engine not in (*_CHOICES, *ENGINES):
            raise RelpropError(
                f"The engine {engine!r} is unknown; pass 'auto', 'steady', 'eager', 'folded' or 'frozen'."
            )
        if precision not in TOLERANCE:
            raise RelpropError(f"The precision {precision!r} is unknown; pass 'float32' or 'bf16'.")
        module = requests.module(model)
        self._device = requests.device(module)
        self._chunk = chunk or (CHUNK if self._device.type == "cpu" else None)
        self.engine, self.error, self.seconds = "eager", 0.0, dict[str, float]()
        self._forward: Engine = _Eager(module)
        if engine == "eager" and precision == "float32":
            return
        if example is None:
            raise RelpropError("An engine is checked on inputs like those to be scored; pass a batch as example=.")
        requests.check_input(example, module)
        wanted = ENGINES if engine in _CHOICES else (engine,)
        self._choose(module, _probe(example.detach()), wanted, precision, steady=engine == "steady")
        if engine not in (*_CHOICES, self.engine.removesuffix("-bf16")):
            raise RelpropError(
                f"The engine {engine!r} cannot compute {type(module).__name__} in {precision}; pass engine='auto'."
            )

    def __call__(self, images: Tensor) -> Tensor:
        """The probabilities of all classes, ``(n, classes)``.

        Raises:
            RelpropError: If the model's output is no ``(n, classes)`` tensor.
        """
        chunks = images.split(self._chunk) if self._chunk else [images]
        return torch.cat([self._probabilities(self._forward, chunk) for chunk in chunks])

    def __repr__(self) -> str:
        return f"Scorer({self.engine}, error {self.error:.1e})"

    def _probabilities(self, forward: Engine, images: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            output = _checked(forward(images), len(images), "model's output")
        return output.to(torch.promote_types(output.dtype, torch.float32)).softmax(1)

    def _choose(
        self, module: nn.Module, probe: Tensor, engines: tuple[str, ...], precision: str, *, steady: bool
    ) -> None:
        """Keeps the fastest, or the last, of the engines that agree; the eager one where none does."""
        expected = [self._probabilities(self._forward, batch) for batch in (probe, probe[:1])]
        agreeing: dict[str, Engine] = {"eager": self._forward} if precision == "float32" else {}
        errors = {"eager": 0.0}
        for name, forward in _built(module, probe, engines, precision):
            try:
                found = [self._probabilities(forward, batch) for batch in (probe, probe[:1])]
                error = max(float((f - e).abs().max()) for f, e in zip(found, expected, strict=True))
            except Exception:  # an engine may fail in ways of its own, and is not used then
                continue
            if error <= TOLERANCE[precision]:
                agreeing[name], errors[name] = forward, error
        if not agreeing:
            return self._choose(module, probe, ENGINES, "float32", steady=steady)
        if len(engines) == 1:
            agreeing = {name: forward for name, forward in agreeing.items() if name != "eager"} or agreeing
        if steady:
            agreeing = {name: agreeing[name] for name in [*agreeing][-1:]}
        self.seconds = self._timed(agreeing, probe)
        self.engine = min(self.seconds, key=self.seconds.__getitem__)
        self._forward, self.error = agreeing[self.engine], errors[self.engine]
        return None

    def _timed(self, engines: dict[str, Engine], probe: Tensor) -> dict[str, float]:
        """The best time of each engine, taken in turns so that a busy machine is unfair to none."""
        seconds = dict.fromkeys(engines, float("inf"))
        if len(engines) == 1:
            return seconds
        for turn in range(1 + _ROUNDS):
            for name, forward in engines.items():
                begin = time.perf_counter()
                float(self._probabilities(forward, probe).sum())  # a number, so that it has been computed
                if turn:  # the first is for warming up
                    seconds[name] = min(seconds[name], time.perf_counter() - begin)
        return seconds


def fastest(
    model: Any,
    example: Tensor,
    precision: str = "float32",
    *,
    forwards: float = float("inf"),
    engine: str = "auto",
) -> Scorer:
    """The scorer of a model, measured once and kept for as long as the model lives and stays as it was.

    Args:
        model: A module in evaluation mode, or what ``relprop.load`` returns.
        example: A batch of inputs like those that will be scored.
        precision: As for `Scorer`.
        forwards: How many images there are to score; where they are too few to pay for the measuring, and it has not
            been done yet, they are scored eagerly.
        engine: As for `Scorer`.

    Raises:
        RelpropError: As `Scorer`.
    """
    module = requests.module(model)
    key = engine, precision, tuple(example.shape[1:]), example.dtype, torch.get_num_threads()
    with _LOCK:
        state, scorers = _KNOWN.get(module, (None, {}))
        if state is None or not state.holds(module):
            state, scorers = State(module), {}
            _KNOWN[module] = state, scorers
        if key not in scorers and forwards >= WORTHWHILE:
            scorer = Scorer(module, example, engine=engine, precision=precision)
            # An eager scorer holds the model itself, which what is known of the model must not keep alive.
            scorers[key] = None if scorer.engine == "eager" else scorer
        return scorers.get(key) or Scorer(module, engine="eager")


def probabilities(score: Probabilities, images: Tensor) -> Tensor:
    """What a scorer, perhaps the caller's own, says of some images.

    Raises:
        RelpropError: If it is no ``(n, classes)`` tensor, or not finite.
    """
    with torch.no_grad():
        output = _checked(score(images), len(images), "scorer's answer")
    if not torch.isfinite(output).all():
        raise RelpropError("The probabilities are not finite, so nothing can be scored; check weights and input.")
    return output


def classes(target: Any, output: Tensor) -> Tensor:
    """The class of each sample, ``(B,)``: that predicted where none is given.

    Raises:
        RelpropError: If the target does not fit the output, or there are several a sample.
    """
    chosen = requests.targets(target, output.shape)
    if chosen is None:
        return output.argmax(1)
    if chosen.ndim != 1:
        raise RelpropError(f"There are targets of shape {tuple(chosen.shape)}; a map has one, so pass one a sample.")
    return chosen.to(output.device)


def _checked(output: Any, count: int, what: str) -> Tensor:
    if isinstance(output, Tensor) and output.ndim == 2 and len(output) == count:
        return output
    found = f"of shape {tuple(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
    raise RelpropError(f"The {what} for {count} images is {found}; it has to be a tensor ({count}, classes).")


_KNOWN: WeakKeyDictionary[nn.Module, tuple[State, dict[Any, Scorer | None]]] = WeakKeyDictionary()
_LOCK = threading.RLock()


# -- Engines -----------------------------------------------------------------------------------------------------------


class _Eager:
    """The model as it is."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, images: Tensor) -> Tensor:
        with undisturbed(self.module):
            output: Tensor = self.module(images)
        return output


class _Copy:
    """A copy of the model, in its own precision and memory format."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self.module, self.dtype = module, dtype

    def __call__(self, images: Tensor) -> Tensor:
        output: Tensor = self.module(_laid_out(images.to(self.dtype)))
        return output


def _built(module: nn.Module, probe: Tensor, engines: tuple[str, ...], precision: str) -> Iterator[tuple[str, Engine]]:
    """The engines that can be built."""
    dtype, suffix = (torch.bfloat16, "-bf16") if precision == "bf16" else (probe.dtype, "")
    try:
        with quietly():
            folded = _folded(module) if precision == "float32" else _halved(_folded(module))
    except Exception:  # a model that cannot be copied is scored as it is
        return
    if "folded" in engines:
        yield f"folded{suffix}", _Copy(folded, dtype)
    if "frozen" in engines:
        try:
            # TorchScript announces that it will be replaced; where it is gone, the engine is simply not there.
            with quietly(), torch.no_grad():
                frozen = _frozen(folded, _laid_out(probe.to(dtype)))
        except Exception:  # what cannot be traced is not used
            return
        yield f"frozen{suffix}", _Copy(frozen, dtype)


def _folded(module: nn.Module) -> nn.Module:
    """A copy with batch norms folded, where torch.fx can trace it, and channels last."""
    try:
        # It imports TorchScript, with its warnings, which nobody should pay who scores eagerly.
        from torch.fx.experimental.optimization import fuse  # noqa: PLC0415

        copy: nn.Module = fuse(module)
    except Exception:  # what cannot be traced is copied as it is
        copy = deepcopy(module)
    copy.to(memory_format=torch.channels_last)  # type: ignore[call-overload] # torch's annotations leave it out
    return copy.eval().requires_grad_(False)


class _Full(nn.Module):
    """A linear layer that stays in float32 among others that do not."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear.float()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x.float())
        return output


def _halved(module: nn.Module) -> nn.Module:
    """A traced copy in bfloat16, but for its linear layers, which cost little beside convolutions.

    Products of bfloat16 matrices end the whole process on a machine that announces AMX without letting it be used, and
    convolutions do not; so a model with products that are no linear layers is refused.

    Raises:
        TypeError: If the model is not traced, or has such products.
    """
    products = ("linear", "matmul", "mm", "einsum", "tensordot", "attention")
    nodes = module.graph.nodes if isinstance(module, fx.GraphModule) else ()
    names = [str(getattr(node.target, "__name__", node.target)) for node in nodes if node.op != "call_module"]
    leaves = [module.get_submodule(str(node.target)) for node in nodes if node.op == "call_module"]
    known = (nn.Linear, nn.modules.conv._ConvNd, nn.modules.batchnorm._BatchNorm)
    if not nodes or any(product in name for product in products for name in names):
        raise TypeError
    if any(not isinstance(leaf, known) and any(True for _ in leaf.parameters()) for leaf in leaves):
        raise TypeError
    module.to(torch.bfloat16)
    for name, linear in list(module.named_modules()):
        if isinstance(linear, nn.Linear):
            parent, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(parent), attribute, _Full(linear))
    return module


def _frozen(module: nn.Module, probe: Tensor) -> nn.Module:
    traced = torch.jit.trace(module, probe, check_trace=False)
    graph: nn.Module = torch.jit.optimize_for_inference(torch.jit.freeze(traced.eval()))
    return graph


def _laid_out(images: Tensor) -> Tensor:
    return images.contiguous(memory_format=torch.channels_last) if images.ndim == 4 else images


def _probe(example: Tensor) -> Tensor:
    """Some images, every second one with half of its pixels gone, as they will come."""
    images = example[torch.arange(_PROBE, device=example.device) % len(example)].clone()
    flat = images[1::2].flatten(1)
    flat[:, : flat.shape[1] // 2] = 0.0
    images[1::2] = flat.reshape(images[1::2].shape)
    return images
