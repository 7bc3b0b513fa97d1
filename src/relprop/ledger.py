"""The ledger: where relevance went, node by node, and that none of it was lost.

It holds what every node handed to each of its inputs and what it absorbed, by cause, summed in float64 for every
target of every sample. All else follows: what a node received is what its consumers handed to it, and what a whole
module received or handed on is what crossed its border.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from relprop import fused
from relprop.errors import RelpropError
from relprop.tiles import tileable

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
"""The largest leak, relative, that counts as rounding."""


def total(r: Tensor) -> Tensor:
    """Sums relevance ``(T, B, ...)`` to ``(T, B)`` in float64.

    Rows of float32 are summed as they are (torch sums them pairwise, at about 1e-7) before the sum over the rows,
    which is as exact as the values and many times faster than widening each of them.
    """
    rows = _rows(r)
    if rows is not None:
        return rows.sum(-1).sum(-1, dtype=torch.float64).reshape(r.shape[:2])
    if r.ndim > 3:
        # In the order of memory, whatever the layout: channels last, or contiguous.
        r = r.movedim(2, -1) if r.stride(2) == 1 else r
        r = r.sum(-1)
    return r.flatten(2).sum(-1, dtype=torch.float64) if r.ndim > 2 else r.to(torch.float64)


def totals(r: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`total` of relevance, and of its magnitudes."""
    if r.ndim > 3 and fused.fits(r=r):
        amounts, sizes = fused.measure(r)
        return amounts, sizes
    rows = _rows(r)
    if rows is None:
        return total(r), total(r.abs())
    # A sample at a time, in memory that stays in the cache: twice as fast as torch's own norm.
    room = torch.empty_like(rows[0])
    both = zip(*((part.sum(-1), torch.abs(part, out=room).sum(-1)) for part in rows), strict=True)
    amounts, sizes = (torch.stack(of).sum(-1, dtype=torch.float64).reshape(r.shape[:2]) for of in both)
    return amounts, sizes


def _rows(r: Tensor) -> Tensor | None:
    """The elements of each target of each sample in rows, ``(T B, count, row)``; None where they do not lie so."""
    if r.ndim <= 3:
        return None
    flat = r.flatten(0, 1)
    row = math.gcd(flat[0].numel(), 1024)
    if row < 32 or not tileable(flat):
        return None
    return flat.as_strided((len(flat), flat[0].numel() // row, row), (flat.stride(0), row, 1))


@dataclass(frozen=True)
class Entry:
    """What one node, or one whole module, did with relevance; each a ``(B,)`` or ``(B, T)`` tensor of float64.

    Attributes:
        received: Relevance that arrived at its output.
        handed: Relevance that it handed to its inputs.
        absorbed: What stayed behind by design, by cause.
        size: Sum of absolute values against which a leak is measured.
    """

    received: Tensor
    handed: Tensor
    absorbed: Mapping[str, Tensor]
    size: Tensor

    @property
    def leak(self) -> Tensor:
        """Relative size of what no cause explains: ``|in - out - named| / sum |in|``."""
        missing = self.received - self.handed
        for amount in self.absorbed.values():
            missing = missing - amount
        return missing.abs() / torch.where(self.size > 0, self.size, 1.0)


@dataclass
class Ledger:
    """The account of one explanation.

    Built while the sweep runs back, with a start of one (``record``), and read afterwards in units of the true start.

    Attributes:
        nodes: Names of the nodes, from input to output.
        modules: For every module call, ``(name, call)``, the nodes inside it.
        edges: ``(consumer, producer)`` to what the one handed to the other, and the sum of absolute values, ``(T, B)``.
        absorbed: Node to cause to amount, ``(T, B)``.
        start: Relevance that the sweep started with, ``(T, B)``.
        scale: What the sums are multiplied with to give the user's units, ``(T, B)``.
        several: Whether the user asked for several targets a sample.
        tolerance: Largest leak that counts as rounding.
        inputs: How many of the nodes, the first ones, are inputs.
    """

    nodes: tuple[str, ...]
    modules: Mapping[tuple[str, int], frozenset[int]]
    start: Tensor
    scale: Tensor
    several: bool
    tolerance: float
    inputs: int = 1
    edges: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    absorbed: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    def record(self, node: int, producer: int, amount: Tensor, size: Tensor) -> None:
        """Notes what a node handed to one of its inputs; called once for each time that the input is used."""
        before = self.edges.get((node, producer))
        self.edges[node, producer] = (amount, size) if before is None else (before[0] + amount, before[1] + size)

    def entry(self, nodes: Iterable[int]) -> Entry:
        """Sums up what crossed the border of a set of nodes."""
        inside = frozenset(nodes)
        zero = torch.zeros_like(self.start)
        received, handed, came, left = zero, zero, zero, zero
        for (consumer, producer), (amount, size) in self.edges.items():
            if producer in inside and consumer not in inside:
                received, came = received + amount, came + size
            # The model's inputs keep what they receive: nobody else gets it.
            if producer < self.inputs if producer in inside else consumer in inside:
                handed, left = handed + amount, left + size
        if len(self.nodes) - 1 in inside:  # the model's output, where the start is put
            received, came = received + self.start, came + self.start.abs()
        causes: dict[str, Tensor] = {}
        for node in inside & self.absorbed.keys():
            for cause, amount in self.absorbed[node].items():
                causes[cause] = causes[cause] + amount if cause in causes else amount
        user = self._user
        return Entry(
            user(received),
            user(handed),
            {c: user(a) for c, a in causes.items()},
            user(torch.maximum(came, left), size=True),
        )

    def at(self, name: str, call: int = 0) -> Entry:
        """The entry of a node or of a whole module, by its name.

        Args:
            name: A node's name as ``print`` shows it, or a module's qualified name.
            call: Which of its calls, for a module that is used more than once.

        Raises:
            RelpropError: If there is no such node or module.
        """
        if (name, call) in self.modules:
            return self.entry(self.modules[name, call])
        if name in self.nodes and call == 0:
            return self.entry([self.nodes.index(name)])
        calls = sum(module == name for module, _ in self.modules)
        msg = (
            f"{name!r} is called {calls} times, so call={call} is not there."
            if calls
            else f"The ledger has no node or module {name!r}."
        )
        raise RelpropError(msg)

    @property
    def absorbed_by_cause(self) -> dict[str, Tensor]:
        """What was absorbed in the whole network, by cause."""
        return dict(self.entry(range(len(self.nodes))).absorbed)

    @property
    def error(self) -> Tensor:
        """End to end: ``|start - sum at the input - named| / |start|``, one a target of each sample."""
        arrived = self.entry(range(self.inputs)).received
        start = self._user(self.start)
        missing = start - arrived - sum(self.absorbed_by_cause.values(), start=torch.zeros_like(start))
        return missing.abs() / torch.where(start != 0, start.abs(), 1.0)

    @property
    def max_leak(self) -> float:
        """The largest leak at one node, over all samples."""
        return max((float(self.entry([node]).leak.max()) for node in range(len(self.nodes))), default=0.0)

    def check(self, node: int) -> None:
        """Raises at a leak that no cause explains.

        Raises:
            RelpropError: If a node lost or made relevance.
        """
        leak = float(self.entry([node]).leak.max())
        if not leak <= self.tolerance:
            msg = (
                f"{self.nodes[node]} leaks {leak:.1e} of the relevance that reaches it, which no cause explains "
                f"(tolerance {self.tolerance:g}); a split of your own must hand out shares that sum to one, and "
                "float64 rounds less."
            )
            raise RelpropError(msg)

    def _user(self, amount: Tensor, *, size: bool = False) -> Tensor:
        """From ``(T, B)`` and a start of one to the user's shape and units."""
        scaled = (amount * (self.scale.abs() if size else self.scale)).T
        return scaled if self.several else scaled[:, 0]

    def __str__(self) -> str:
        """A table: a line for every node that relevance passed, from the output down."""
        width = max(map(len, self.nodes), default=4)
        lines = [f"{'node':<{width}}  {'received':>11}  {'handed on':>11}  {'leak':>8}  absorbed"]
        for node in reversed(range(len(self.nodes))):
            entry = self.entry([node])
            if not entry.size.any():
                continue
            causes = ", ".join(f"{cause} {float(amount.mean()):.3g}" for cause, amount in entry.absorbed.items())
            lines.append(
                f"{self.nodes[node]:<{width}}  {float(entry.received.mean()):>11.5g}  "
                f"{float(entry.handed.mean()):>11.5g}  {float(entry.leak.max()):>8.1e}  {causes}".rstrip()
            )
        many = "mean of the samples, largest leak; " if self.start.numel() > 1 else ""
        lines.append(f"{many}end to end error {float(self.error.max()):.1e}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON types."""
        return {
            "nodes": list(self.nodes),
            "modules": [[name, call, sorted(nodes)] for (name, call), nodes in self.modules.items()],
            "start": self.start.tolist(),
            "scale": self.scale.tolist(),
            "several": self.several,
            "tolerance": self.tolerance,
            "inputs": self.inputs,
            "edges": [[c, p, amount.tolist(), size.tolist()] for (c, p), (amount, size) in self.edges.items()],
            "absorbed": [[n, cause, a.tolist()] for n, causes in self.absorbed.items() for cause, a in causes.items()],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Ledger:
        """The ledger that ``to_dict`` wrote."""

        def tensor(value: Any) -> Tensor:
            return torch.tensor(value, dtype=torch.float64)

        ledger = cls(
            tuple(values["nodes"]),
            {(name, call): frozenset(nodes) for name, call, nodes in values["modules"]},
            tensor(values["start"]),
            tensor(values["scale"]),
            values["several"],
            values["tolerance"],
            values.get("inputs", 1),
        )
        for consumer, producer, amount, size in values["edges"]:
            ledger.edges[consumer, producer] = tensor(amount), tensor(size)
        for node, cause, amount in values["absorbed"]:
            ledger.absorbed.setdefault(node, {})[cause] = tensor(amount)
        return ledger
