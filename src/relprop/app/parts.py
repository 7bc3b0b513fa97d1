"""Parts: what all views of the page are made of."""

from __future__ import annotations

import html

import gradio as gr

__all__ = ["alert", "framed", "part"]


def part(content: str, name: str) -> gr.HTML:
    """A place on the page, by a name that scripts and tests find it by."""
    return gr.HTML(framed(content), elem_id=name, apply_default_css=False)


def framed(content: str) -> str:
    """Markup that looks as it does in a report."""
    return f'<div class="rp">{content}</div>' if content else ""


def alert(sentence: str) -> str:
    """Why something could not be done; read out at once to those who do not see it."""
    return framed(f'<p class="rp-alert" role="alert">{html.escape(sentence)}</p>')
