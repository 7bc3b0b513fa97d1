"""The page of the JSON interface: its OpenAPI description, readable, and a form to try it; nothing from elsewhere."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping
from typing import Any

from relprop.app.viewer import style

__all__ = ["docs_page"]

_BODY = (
    "body{font-family:system-ui,sans-serif;margin:1.5rem auto;padding:0 1rem;max-width:60rem;color-scheme:light dark}"
)
_BODY += "pre{overflow-x:auto;padding:.6rem;background:#8882;border-radius:6px}code{font-size:.95em}"
_BODY += "form label{display:block;margin:.5rem 0}form input,form select{font:inherit}"


def docs_page(schema: Mapping[str, Any]) -> str:
    """A page about an OpenAPI description."""
    about = schema["info"]
    parts = [f"<h1>{_text(about['title'])} {_text(about['version'])}</h1><p>{_text(about['description'])}</p>"]
    parts.append(
        '<p>The <a href="openapi.json">OpenAPI description</a> is for programs, <a href="./">the page</a> for people.'
        "</p>"
    )
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            parts += _operation(schema, path, method, operation)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>relprop: the JSON interface</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<style>{_BODY}{style()}</style></head><body class="rp"><main>{"".join(parts)}</main></body></html>'
    )


def _operation(schema: Mapping[str, Any], path: str, method: str, operation: Mapping[str, Any]) -> Iterator[str]:
    yield f"<h2><code>{method.upper()} {_text(path)}</code></h2><p>{_text(operation.get('description', ''))}</p>"
    body = operation.get("requestBody")
    if body is not None:
        (kind, content), *_ = body["content"].items()
        fields = _found(schema, content["schema"])
        yield "<table><tr><th>field</th><th>what it is</th><th>by default</th></tr>"
        for name, about in fields["properties"].items():
            default = json.dumps(about["default"]) if about.get("default") is not None else ""
            needed = "needed" if name in fields.get("required", ()) else default
            what = f"{about.get('description', '')} {' | '.join(_choices(about))}"
            yield f"<tr><td><code>{_text(name)}</code></td><td>{_text(what)}</td><td>{_text(needed)}</td></tr>"
        yield f"</table><pre>curl -F image=@photo.jpg -F target=tabby http://HOST:PORT{_text(path)}</pre>"
        yield f'<details><summary>Try it</summary><form method="post" action=".{_text(path)}" enctype="{_text(kind)}">'
        yield from (_input(name, about) for name, about in fields["properties"].items())
        yield '<button type="submit">Send</button></form></details>'
    yield "<table><tr><th>answer</th><th>what it means</th></tr>"
    for code, answer in operation["responses"].items():
        content = answer.get("content", {}).get("application/json", {}).get("schema", {})
        name = content.get("$ref", "").rpartition("/")[2] or content.get("items", {}).get("$ref", "").rpartition("/")[2]
        yield f"<tr><td>{_text(code)}</td><td>{_text(answer['description'])} <code>{_text(name)}</code></td></tr>"
    yield "</table>"


def _input(name: str, about: Mapping[str, Any]) -> str:
    label, choices = _text(name), _choices(about)
    if name == "image":
        return f'<label>{label} <input type="file" name="{label}" accept="image/*" required></label>'
    if choices:
        default = about.get("default")
        options = ([] if default is not None else [""]) + choices
        shown = "".join(f"<option{' selected' if c == default else ''}>{_text(c)}</option>" for c in options)
        return f'<label>{label} <select name="{label}">{shown}</select></label>'
    value = about.get("default")
    shown = "" if value is None else _text(str(value).lower())
    return f'<label>{label} <input name="{label}" value="{shown}"></label>'


def _choices(about: Mapping[str, Any]) -> list[str]:
    return [str(c) for part in (about, *about.get("anyOf", ())) for c in part.get("enum", ())]


def _found(schema: Mapping[str, Any], part: Mapping[str, Any]) -> Mapping[str, Any]:
    if "$ref" not in part:
        return part
    found = schema
    for step in part["$ref"].removeprefix("#/").split("/"):
        found = found[step]
    return found


def _text(text: Any) -> str:
    return html.escape(str(text))
