"""Reports: one HTML file that says everything about an answer and opens without a server."""

from __future__ import annotations

import hashlib
import html
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

import relprop
from relprop import images, zoo
from relprop.app.answer import Answer, Stop
from relprop.app.cards import cards
from relprop.app.flow import flow
from relprop.app.viewer import data_uri, script, style, views
from relprop.compare import Comparison
from relprop.errors import RelpropError
from relprop.fetching import quiet
from relprop.figure import shares
from relprop.result import Explanation
from relprop.runs import account, named

__all__ = ["compared", "report", "saved"]

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_BODY = (
    "body{font-family:system-ui,sans-serif;margin:1.5rem auto;padding:0 1rem;max-width:1500px;color-scheme:light dark}"
)


def report(answer: Answer, comparison: Comparison | None = None) -> str:
    """The report of an answer, with a comparison of methods where there was one."""
    model = str(answer.explanation.settings.get("model", "a model"))
    parts = [
        f"<p>{html.escape(answer.name)}, as seen by {html.escape(model)}.</p>",
        top(answer.row),
        views(answer),
        flow(answer),
    ]
    if comparison is not None:
        label = named(answer.row["target"])
        parts += ["<h2>Other methods</h2>", cards(comparison, answer.photo, label, answer.name)]
    parts += ["<h2>How it was made</h2>", _settings(answer.explanation.settings)]
    return _page(f"Why {answer.label}?", "".join(parts))


def top(row: Mapping[str, Any]) -> str:
    """The first classes as a table."""
    rows = "".join(
        f"<tr><td>{html.escape(named(about))}</td><td class=n>{100 * about['probability']:.2f} %</td></tr>"
        for about in row["top"]
    )
    return f"<table><tr><th>class</th><th class=n>probability</th></tr>{rows}</table>"


def saved(folder: Path) -> Answer:
    """The answer in a folder that ``relprop explain`` or a bundle has left.

    Raises:
        RelpropError: There is none.
    """
    e = Explanation.load(folder)
    if e.target.shape != (1,) or e.heatmap.ndim != 3:
        raise RelpropError(f"{folder} holds no explanation of one image and one class; a report is of those.")
    picture = folder / "photo.png"
    photo = images.read(picture) if picture.is_file() else None
    how = {name: e.settings[name] for name in ("preset", "split", "identity_skips") if name in e.settings}
    net = plan = None
    try:  # a plan depends on the architecture alone, so no weights are needed
        net = zoo.load(str(e.settings.get("model")), "random", report=quiet)
        plan = relprop.plan(net, net.blank, **how)
    except RelpropError:
        net = None
    known = e.settings.get("class") or {}
    fits = net is not None and net.outputs == e.output.shape[1]
    names = net.classes if net is not None and fits and known.get("synset") else None
    parted = shares(e.ledger, plan.graph) if plan is not None and plan.graph.nodes and _same(e, plan) else []
    name = Path(str(e.settings.get("image", folder.name))).name
    row = _row(e, name, known, names)
    return Answer(name, photo, e, plan, tuple(parted), (Stop("the pixels", e.heatmap[0]),), row)


def _same(e: Explanation, plan: Any) -> bool:
    return tuple(node.name for node in plan.graph) == e.ledger.nodes


def _row(e: Explanation, name: str, known: Mapping[str, Any], names: tuple[str, ...] | None) -> dict[str, Any]:
    """What there is to say of a saved explanation, as far as it is still known."""
    probability = e.output[0].double().softmax(0)
    best = probability.topk(min(5, len(probability))).indices.tolist()

    def about(index: int) -> dict[str, Any]:
        told = known.get("name") if index == known.get("class") else names[index] if names else None
        return {"class": index, "name": told, "probability": float(probability[index])}

    return {"image": name, "top": [about(index) for index in best], "target": about(int(e.target[0])), **account(e)}


def compared(folder: Path) -> str:
    """The report of a folder that ``relprop compare`` has left.

    Raises:
        RelpropError: There is none, or a file was changed since.
    """
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        pictures = []
        for name in ("grid.png", "curves.png"):
            data = (folder / name).read_bytes()
            if hashlib.sha256(data).hexdigest() != manifest["files"][name]:
                raise RelpropError(f"{folder / name} was changed since it was saved; compare again.")
            with Image.open(folder / name) as opened:
                pictures.append(data_uri(opened.convert("RGB")))
        target, image = manifest["target"], Path(manifest["image"]["path"]).name
        methods = ", ".join(manifest["methods"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, RelpropError):
            raise
        raise RelpropError(
            f"{folder} holds no explanation and no comparison; pass a folder that relprop made."
        ) from error
    said = (f"Overlays of {methods} on {image}, with their scores", f"Insertion and deletion curves of {methods}")
    shown = "".join(
        f'<p><img style="max-width:100%" src="{uri}" alt="{html.escape(text)}"></p>'
        for uri, text in zip(pictures, said, strict=True)
    )
    about = {
        name: manifest.get(name) for name in ("command", "model", "weights", "image", "scored", "settings", "files")
    }
    return _page(f"Methods for {target['name']}", f"{shown}<h2>How it was made</h2>{_settings(about)}")


def _settings(settings: Mapping[str, Any]) -> str:
    def shown(value: Any) -> str:
        if isinstance(value, Mapping):
            return "<br>".join(f"{html.escape(str(k))}: {shown(v)}" for k, v in value.items() if v is not None)
        return html.escape(value if isinstance(value, str) else json.dumps(value))

    rows = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{shown(value)}</td></tr>"
        for name, value in {**settings, "relprop": relprop.__version__}.items()
        if value is not None
    )
    return f'<div class="rp-wide"><table>{rows}</table></div>'


def _page(title: str, body: str) -> str:
    title = html.escape(title)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_BODY}{style()}</style></head>"
        f'<body class="rp"><main><h1>{title}</h1>{body}</main><script>{script()}</script></body></html>\n'
    )
