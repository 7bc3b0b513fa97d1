"""Cards: a comparison of methods as a grid, each with its map, its curves and its scores."""

from __future__ import annotations

import html

from PIL.Image import Image

from relprop.app.answer import Stop
from relprop.app.viewer import view
from relprop.compare import PROTOCOLS, Comparison

__all__ = ["cards"]

_WIDTH, _HEIGHT, _LEFT, _FOOT = 260, 120, 30, 18
_COLOURS = {"insertion": "#0072B2", "deletion": "#D55E00"}
_DASHES = {"otsuki2024": "5 3", "tie-safe": "none"}


def cards(comparison: Comparison, photo: Image | None, label: str, name: str) -> str:
    """A card for each method, and a sentence for each that failed."""
    made = "".join(_card(comparison, method, photo, label, name) for method in comparison.methods)
    failed = "".join(
        f'<p class="rp-alert">{html.escape(method)}: {html.escape(reason)}</p>'
        for method, reason in comparison.failures.items()
    )
    return f'{failed}<div class="rp-cards">{made}</div>'


def _card(comparison: Comparison, method: str, photo: Image | None, label: str, name: str) -> str:
    shown = view([Stop(method, comparison.heatmap(method))], label, photo, name, ("overlay",), controls=False)
    rows = "".join(
        f"<tr><th>{title}</th>"
        + "".join(f"<td class=n>{comparison.number(method, p, n):.3f}</td>" for n in ("score", "insertion", "deletion"))
        + "</tr>"
        for p, title in PROTOCOLS.items()
    )
    head = "<tr><th></th><th class=n>ID</th><th class=n>insertion</th><th class=n>deletion</th></tr>"
    name = html.escape(method)
    return (
        f'<section class="rp-card" aria-label="{name}"><h3>{name}</h3>{shown}{_curves(comparison, method)}'
        f"<table>{head}{rows}</table></section>"
    )


def _curves(comparison: Comparison, method: str) -> str:
    """Insertion and deletion under both protocols, as lines from 0 to 1."""
    lines = []
    for protocol in PROTOCOLS:
        curves = comparison.scores[method][protocol].curves._asdict()
        for kind, colour in _COLOURS.items():
            points = zip(*(axis[0].tolist() for axis in curves[kind]), strict=True)
            path = " ".join(
                f"{_LEFT + x * (_WIDTH - _LEFT - 4):.1f},{6 + (1 - y) * (_HEIGHT - 12):.1f}" for x, y in points
            )
            lines.append(
                f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8" '
                f'stroke-dasharray="{_DASHES[protocol]}"/>'
            )
    ticks = "".join(
        f'<path d="M{_LEFT} {6 + (1 - y) * (_HEIGHT - 12)} H{_WIDTH - 4}" stroke="#8885"/>'
        f'<text x="{_LEFT - 5}" y="{10 + (1 - y) * (_HEIGHT - 12)}" text-anchor="end">{y:g}</text>'
        for y in (0, 0.5, 1)
    )
    said = f"Curves of {method}: the probability while pixels are inserted and deleted; the table has the areas."
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT + _FOOT}" role="img" aria-label="{html.escape(said)}" font-size="10" '
        f'fill="currentColor" xmlns="http://www.w3.org/2000/svg">{ticks}{"".join(lines)}{_keys()}</svg>'
    )


def _keys() -> str:
    """What the lines are: colours and dashes."""
    y = _HEIGHT + 10
    parts = []
    for x, colour, dashes, text in (
        (_LEFT, _COLOURS["insertion"], "none", "insertion"),
        (_LEFT + 66, _COLOURS["deletion"], "none", "deletion"),
        (_LEFT + 130, "currentColor", _DASHES["otsuki2024"], "as published"),
    ):
        parts.append(
            f'<path d="M{x} {y - 3} h14" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"/>'
            f'<text x="{x + 18}" y="{y}">{text}</text>'
        )
    return "".join(parts)
