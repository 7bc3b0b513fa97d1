"""The flow: the ledger as a picture and in plain words."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from itertools import groupby

from relprop.app.answer import Answer
from relprop.app.viewer import view
from relprop.figure import Share
from relprop.runs import named

__all__ = ["band", "flow", "words"]

_SKIP, _PROJECTION, _RESIDUAL, _TRUNK = "#2f6db3", "#8db8e2", "#e8833a", "#b4b4b4"
_STEP, _THICK, _APART, _TOP = 62, 120, 20, 44


def flow(answer: Answer) -> str:
    """The whole view: words, the band, and the map at every block."""
    parts = [f"<h2>Where the relevance went</h2><p>{html.escape(words(answer))}</p>"]
    if answer.shares:
        parts += ["<h3>How it was parted at every merge</h3>", band(answer.shares, answer.label), _table(answer.shares)]
    else:
        parts.append("<p>This network has no residual blocks: there was one way, and all of it took that.</p>")
    if len(answer.stops) > 1:
        parts += ["<h3>The map on the way</h3>", _maps(answer)]
    return "".join(parts)


def _maps(answer: Answer) -> str:
    return view(answer.stops, answer.label, answer.photo, answer.name, ("heat", "overlay"))


def words(answer: Answer) -> str:
    """Where the relevance went, in plain words."""
    row = answer.row
    error, leak = row["conservation_error"], row["largest_leak"]
    absorbed = answer.explanation.ledger.absorbed_by_cause
    kept = {cause: float(amount.sum()) / (row["start"] or 1.0) for cause, amount in absorbed.items()}
    said = [f"Relevance started with {row['start']:.4g} at {named(row['target'])}, what the model gives this class."]
    if any(kept.values()):
        causes = ", ".join(f"{cause} {100 * part:.3g} %" for cause, part in kept.items())
        said.append(f"On the way, the rules kept a part of it by design: {causes}.")
        said.append("What arrived at the pixels and what was kept add up to the start")
    else:
        said.append("All of it was handed back, block by block, to the pixels, which add up to the start")
    said[-1] += f" but for {_tiny(error)} of it." if error else " exactly."
    said.append(f"At no single node was more than {_tiny(leak)} lost or made ({row['leaks_most']} comes closest).")
    return " ".join(said)


def _tiny(part: float) -> str:
    if part >= 1e-4:
        return f"{100 * part:.2g} %"
    return f"one part in {_grouped(1 / part)}" if part > 0 else "nothing"


def _grouped(number: float) -> str:
    """A number to two digits, as a person would say it."""
    for size, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if number >= size:
            return f"{number / size:.2g} {name}" if number < 100 * size else f"{number / size:.0f} {name}"
    return f"{number:.0f}"


def band(shares: Sequence[Share], label: str) -> str:
    """A band of constant width, from the pixels on the left to the class on the right, that opens at every block."""
    width, height = _STEP * len(shares) + 90, _THICK + 2 * _APART + _TOP + 50
    middle = _TOP + _APART + _THICK / 2
    left, right = 40.0, 40.0 + _STEP * len(shares)
    skips = sum(share.skip for share in shares) / len(shares)
    said = (
        f"Relevance flows from {label} back to the pixels through {len(shares)} residual blocks; on average "
        f"{100 * skips:.0f} % takes the skip and {100 * (1 - skips):.0f} % the residual branch. A table has all."
    )
    parts = [
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{html.escape(said)}" '
        'font-family="inherit" font-size="12" fill="currentColor" xmlns="http://www.w3.org/2000/svg">',
        _rectangle(left - 14, middle - _THICK / 2, 14 + 2, _THICK, _TRUNK),
        _rectangle(right - 2, middle - _THICK / 2, 14 + 2, _THICK, _TRUNK),
        f'<path d="M{left - 13} {middle - 75} L{left - 36} {middle} L{left - 13} {middle + 75} Z" fill="{_TRUNK}"/>',
        f'<text transform="translate({right + 28} {middle}) rotate(90)" text-anchor="middle">{_short(label)}</text>',
        f'<text transform="translate({left - 22} {middle + 24}) rotate(-90)" font-size="11">pixels</text>',
    ]
    for i, share in enumerate(shares):
        parts += _block(share, left + _STEP * i, middle)
    parts += _stages(shares, left, middle + _THICK / 2 + _APART + 22)
    keys = [(_SKIP, f"through the skip, {100 * skips:.0f} % on average")]
    if not all(share.identity for share in shares):
        keys.append((_PROJECTION, "the same, a projection"))
    keys.append((_RESIDUAL, f"through the residual branch, {100 * (1 - skips):.0f} %"))
    legend = "".join(f'<span><i class="rp-key" style="background:{c}"></i>{html.escape(t)}</span>' for c, t in keys)
    picture = "".join(parts) + "</svg>"
    return (
        f'<div class="rp-wide" tabindex="0" role="group" aria-label="The flow through the blocks">{picture}</div>'
        f'<div class="rp-legend">{legend}</div>'
    )


def _block(share: Share, at: float, middle: float) -> Iterator[str]:
    """One block: above what takes the skip, below what the residual branch gets."""
    top, bottom = middle - _THICK / 2, middle + _THICK / 2
    cut = top + _THICK * share.skip
    colour = _SKIP if share.identity else _PROJECTION
    end, a, b = at + _STEP, at + _STEP * 0.34, at + _STEP * 0.66
    name = html.escape(share.node.rpartition(".")[0] or share.node)
    yield f"<g><title>{name}: {100 * share.skip:.0f} % skip, {100 * share.residual:.0f} % residual branch</title>"
    for low, high, move, fill in ((top, cut, -_APART, colour), (cut, bottom, _APART, _RESIDUAL)):
        yield (
            f'<path fill="{fill}" d="M{at} {low:.1f} C{a} {low:.1f} {at + 8} {low + move:.1f} {a} {low + move:.1f} '
            f"L{b} {low + move:.1f} C{end - 8} {low + move:.1f} {b} {low:.1f} {end} {low:.1f} L{end} {high:.1f} "
            f"C{b} {high:.1f} {end - 8} {high + move:.1f} {b} {high + move:.1f} L{a} {high + move:.1f} "
            f'C{at + 8} {high + move:.1f} {a} {high:.1f} {at} {high:.1f} Z"/>'
        )
    x = at + _STEP / 2
    yield f'<text x="{x}" y="{top - _APART - 5}" text-anchor="middle">{100 * share.skip:.0f}</text>'
    yield f'<text x="{x}" y="{bottom + _APART + 14}" text-anchor="middle">{100 * share.residual:.0f}</text></g>'


def _stages(shares: Sequence[Share], left: float, y: float) -> Iterator[str]:
    """The names of the modules that hold the blocks, below them."""
    start = 0
    for name, members in groupby(share.node.split(".")[0] if "." in share.node else "" for share in shares):
        end = start + len(list(members))
        if name:
            a, b = left + _STEP * start + 6, left + _STEP * end - 6
            yield f'<path d="M{a} {y} L{b} {y}" stroke="currentColor"/>'
            yield f'<text x="{(a + b) / 2}" y="{y + 16}" text-anchor="middle">{html.escape(name)}</text>'
        start = end


def _table(shares: Sequence[Share]) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(share.node)}</td><td class=n>{100 * share.skip:.1f} %</td>"
        f"<td class=n>{100 * share.residual:.1f} %</td><td>{'identity' if share.identity else 'projection'}</td></tr>"
        for share in reversed(shares)
    )
    head = "<tr><th>merge</th><th class=n>skip</th><th class=n>residual branch</th><th>the skip is</th></tr>"
    return f"<details><summary>The same as a table, from output to input</summary><table>{head}{rows}</table></details>"


def _rectangle(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{fill}"/>'


def _short(label: str) -> str:
    return html.escape(label if len(label) <= 30 else f"{label[:20]} … {label[-7:]}")
