"""Plans: which rule or split every node gets.

A preset is a few lines of a table; a plan is what the table says about one graph, with the user's overrides, a line a
node. It can be read before anything runs, and it refuses what cannot be done while nothing has been computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from torch import nn

from relprop import concepts, merges, rules
from relprop.attention import Matrices
from relprop.errors import RelpropError
from relprop.gates import Product
from relprop.graph import Graph, Node
from relprop.mapped import AveragePool, BatchNorm, Linear, Mapped
from relprop.merges import Shares, Split
from relprop.norms import Norm
from relprop.operators import Constant, MaxPool, Operator, Scalar, Sum, Unknown
from relprop.presets import FOLD, HALVES, PASS, POOLINGS, PRESETS, ZENNIT, Pooling, Preset
from relprop.rules import Rule, evened, zbox
from relprop.transforms import same

Treatment = Rule | Split | Pooling | str | None
"""What a node gets: a rule, a split, a stand-in for a max pool, one of the words above; None if there is no choice."""

Override = Rule | Split | Pooling | Shares | str
"""What a user may ask for, by object, by name, or as a function that splits."""


@dataclass(frozen=True, eq=False)
class Plan:
    """A graph and what each of its nodes gets.

    Attributes:
        graph: The nodes.
        treatments: One for each of them.
        settings: What the plan was made from, by name.
        identity_skips: Whether identity skips get relevance.
        shapes: Shape of each node's value, once an input has been seen.
        layer: The layer at whose output relevance starts; None for the model's own.
    """

    graph: Graph
    treatments: tuple[Treatment, ...]
    settings: Mapping[str, Any]
    identity_skips: bool = True
    shapes: tuple[tuple[int, ...], ...] = field(default=(), compare=False)
    layer: str | None = None

    @cached_property
    def reached(self) -> frozenset[int]:
        """The nodes that relevance can reach; what only makes gates, attention or masks counts as constant."""
        return _reached(self.graph, self.treatments)

    @property
    def keeps_sign(self) -> bool:
        """Whether relevance that starts without negative values has none anywhere."""
        rules_ = [t.rule if isinstance(t, Pooling) else t for t in self.treatments]
        return all(t.keeps_sign for t in rules_ if isinstance(t, Rule | Split))

    def closed(self, node: Node) -> frozenset[int]:
        """The branches of a merge that get nothing."""
        return frozenset() if self.identity_skips else node.identities - {node.main}

    def rows(self) -> list[dict[str, Any]]:
        """The table as JSON types, from input to output."""
        return [
            {
                "node": node.name,
                "operator": node.operator.label,
                "block": node.block,
                "merge": node.merge,
                "shape": list(self.shapes[i]) if self.shapes else None,
                "treatment": self._describe(node, treatment) if i in self.reached else "gets no relevance",
                "source": node.source,
            }
            for i, (node, treatment) in enumerate(zip(self.graph, self.treatments, strict=True))
        ]

    def _describe(self, node: Node, treatment: Treatment) -> str:
        if treatment == FOLD and node.folds is not None:
            return f"folded into {self.graph.nodes[node.folds].name}"
        if isinstance(treatment, Split) and node.identities and not self.identity_skips:
            return f"{treatment}, identity skips out"
        return "" if treatment is None else str(treatment)

    def __str__(self) -> str:
        """A line a node; arithmetic on shapes, which relevance never meets, is left out."""
        rows = [["node", "operator", "block", "shape", "treatment"]]
        for node, row in zip(self.graph, self.rows(), strict=True):
            if isinstance(node.operator, Scalar) and not isinstance(node.operator, Constant):
                continue
            shape = "x".join(map(str, row["shape"][1:])) if row["shape"] else ""
            block = f"{row['block'] or ''}" + (" merge" if row["merge"] else "")
            rows.append([row["node"], row["operator"], block, shape, row["treatment"]])
        kept = [c for c in range(5) if any(row[c] for row in rows[1:])]
        widths = [max(len(row[c]) for row in rows) for c in range(5)]
        return "\n".join("  ".join(row[c].ljust(widths[c]) for c in kept).rstrip() for row in rows)


def make(
    graph: Graph,
    preset: str = "relprop",
    split: str | Split | Shares | None = None,
    identity_skips: bool = True,
    overrides: Mapping[Any, Override] | None = None,
    pixels: tuple[tuple[float, ...], tuple[float, ...]] | None = None,
    layer: str | None = None,
) -> Plan:
    """Decides what every node gets.

    Args:
        graph: The model's graph.
        preset: Name of a preset.
        split: Split at merges, instead of the preset's.
        identity_skips: Whether identity skips get relevance.
        overrides: From a name pattern (``"layer4.*"``), a module type or a block number to a rule, a split, a
            stand-in for a max pool, ``"fold"`` or ``"pass"``; later ones win.
        pixels: Smallest and largest value of a pixel, by channel, for the rule that needs them; ImageNet's if not told.
        layer: The layer at whose output relevance starts, instead of the model's; what lies before it gets what it
            would get anyway.

    Raises:
        RelpropError: If there is no such preset, an override fits nothing, or an operator has no rule.
    """
    if preset not in PRESETS:
        msg = f"There is no preset {preset!r}; there are {', '.join(PRESETS)}."
        raise RelpropError(msg)
    table = PRESETS[preset]
    if split is not None:
        table = replace(table, split=merges.split(split), lower_split=None)
    if pixels is not None and table.first.name.startswith("zB"):
        table = replace(table, first=zbox(*pixels, epsilon=table.first.epsilon))
    last = _last(graph)
    treatments = [_treat(node, table, upper=_upper(graph, node), head=i in last) for i, node in enumerate(graph)]
    for key, value in (overrides or {}).items():
        _override(graph, treatments, key, _named(value))
    if layer is not None:
        graph, kept = graph.until(concepts.find(graph, layer))
        treatments = [treatments[i] for i in kept]
    for i in sorted(_reached(graph, treatments)):
        node, treatment = graph.nodes[i], treatments[i]
        if isinstance(node.operator, Unknown) and treatment != PASS:
            look = "give plan an input, x, to look inside, " if node.operator.wrapped and graph.shape is None else ""
            msg = (
                f"{node.name} ({node.operator.label}, {node.source}) has no rule; {look}register one with "
                "relprop.operators.register, or let relevance pass it unchanged with "
                f"overrides={{{node.name!r}: 'pass'}}."
            )
            raise RelpropError(msg)
    settings: dict[str, Any] = {
        "preset": preset,
        "split": None if table.lower_split else str(table.split),
        "identity_skips": identity_skips,
    }
    if overrides:
        settings["overrides"] = {getattr(k, "__name__", str(k)): str(_named(v)) for k, v in overrides.items()}
    if layer is not None:
        settings["layer"] = layer
    return Plan(graph, tuple(treatments), settings, identity_skips, layer=layer)


def _reached(graph: Graph, treatments: Sequence[Treatment]) -> frozenset[int]:
    return graph.reached({i for i, treatment in enumerate(treatments) if treatment == HALVES})


def _upper(graph: Graph, node: Node) -> bool:
    """Whether a node lies in the upper half: by blocks, or, in a net without any, by convolutions and matrices."""
    if graph.merges:
        return 2 * node.after >= graph.merges
    maps = [n for n in graph if _weighted(n)]
    return node in maps[len(maps) // 2 :] or (bool(maps) and graph.nodes.index(node) > graph.nodes.index(maps[-1]))


def _last(graph: Graph) -> set[int]:
    """The maps with weights that relevance comes to before any other: the head, or the heads that are added up."""
    below, last = set[int](), set[int]()
    for i in sorted(graph.reached(), reverse=True):
        node = graph.nodes[i]
        if _weighted(node) and i not in below:
            last.add(i)
        if _weighted(node) or i in below:
            below.update(node.inputs[k] for k in node.operator.heirs)
    return last


def _weighted(node: Node) -> bool:
    return isinstance(node.operator, Mapped) and node.operator.weighted


def _treat(node: Node, preset: Preset, *, upper: bool, head: bool) -> Treatment:
    op = node.operator
    rule = (preset.head if head else None) or (preset.upper if upper else None)
    if node.first:
        return _evened(op, preset.first, preset)
    if isinstance(op, BatchNorm | Norm):
        norm = preset.upper_norm if rule else preset.norm
        return _unfolded(node, rule or ZENNIT) if norm == FOLD else PASS
    if isinstance(op, Mapped):
        average = not op.weighted and not isinstance(op, Matrices)
        own = preset.average if average else preset.conv if op.label.startswith("conv") else preset.dense
        return _evened(op, rule or own, preset)
    if isinstance(op, Sum) and op.parts > 1:
        lower = preset.lower_split if node.merge is not None and not upper else None
        return lower or preset.split
    return _stand_in(op, preset) if isinstance(op, MaxPool) else None


def _stand_in(op: MaxPool, preset: Preset) -> Pooling:
    pool = preset.pool
    return pool if pool.rule is None or pool.halves else replace(pool, rule=_evened(op, pool.rule, preset))


def _evened(op: Operator, rule: Rule, preset: Preset) -> Rule:
    """The rule, evened if the preset has it so and the operator visits its inputs unevenly."""
    pooled = op.pool.steps if isinstance(op, MaxPool | AveragePool) else ()
    steps = op.linear.steps if isinstance(op, Linear) else pooled
    return evened(rule) if preset.even and steps else rule


def _unfolded(node: Node, rule: Rule) -> Treatment:
    """Folded where there is something to fold into, a linear map of its own where there is not."""
    return rule if node.folds is None else FOLD


def _named(value: Override) -> Treatment:
    """Finds what a user's word stands for."""
    if isinstance(value, Rule | Split | Pooling) or value in (PASS, FOLD, HALVES):
        return value
    if isinstance(value, str):
        if value in rules.NAMES:
            return rules.NAMES[value]()
        if value in POOLINGS:
            return POOLINGS[value]
        if value not in merges.NAMES:
            known = [*rules.NAMES, *merges.NAMES, *POOLINGS, PASS, FOLD, HALVES]
            msg = f"There is no rule, split or pool treatment {value!r}; there are {', '.join(known)}."
            raise RelpropError(msg)
    return merges.split(value)


def _fits(treatment: Treatment, op: Operator) -> bool:
    """Whether an operator can be treated so."""
    if isinstance(treatment, Rule):
        plain = all(term.weight is same for part in treatment.parts for term in part.terms) and treatment.parts[0].terms
        return isinstance(op, Mapped) and (op.clamps or bool(plain))
    if isinstance(treatment, Split):
        return isinstance(op, Sum) and op.parts > 1
    if isinstance(treatment, Pooling):
        return isinstance(op, MaxPool)
    if treatment == HALVES:
        return isinstance(op, Product) and len(op.inputs) > 1
    norms = (BatchNorm, Norm)
    return isinstance(op, norms) if treatment == FOLD else isinstance(op, (*norms, Unknown))


_NORMS = (
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)


def _override(graph: Graph, treatments: list[Treatment], key: Any, treatment: Treatment) -> None:
    """Puts a treatment at every node that a key means and that it fits; a key that means none is a mistake."""
    meant = [i for i, node in enumerate(graph) if _matches(node, key)]
    # A batch norm takes a rule of its own only by its own name or type: a rule for a whole block is for its maps.
    direct = isinstance(key, type) and issubclass(key, _NORMS)
    fitting = [
        i
        for i in meant
        if _fits(treatment, graph.nodes[i].operator)
        and (
            not isinstance(treatment, Rule)
            or not isinstance(graph.nodes[i].operator, BatchNorm | Norm)
            or direct
            or graph.nodes[i].name == key
        )
    ]
    if not fitting:
        name = key.__name__ if isinstance(key, type) else repr(key)
        near = get_close_matches(str(key), [node.name for node in graph], 3)
        hint = f"; the nearest names are {', '.join(near)}" if near and not meant else ""
        what = f"cannot be treated with {treatment}" if meant else "is not in the model"
        msg = f"The override for {name} fits nothing: it {what}{hint}."
        raise RelpropError(msg)
    for i in fitting:
        fold = treatment == FOLD
        treatments[i] = _unfolded(graph.nodes[i], ZENNIT) if fold else treatment


def _matches(node: Node, key: Any) -> bool:
    """Whether a key means a node: a block's number, a module's type, or a pattern of names."""
    if isinstance(key, bool) or not isinstance(key, int | str | type):
        msg = f"An override's key is a name pattern, a module type or a block number, not {key!r}."
        raise RelpropError(msg)
    if isinstance(key, int):
        return node.block == key
    if isinstance(key, type):
        return any(issubclass(kind, key) for kind in node.kinds)
    return any(fnmatchcase(name, key) for name in (node.name, *(name for name, _ in node.calls)))
