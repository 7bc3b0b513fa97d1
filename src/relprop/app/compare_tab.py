"""The view that compares: several methods on the photo that was explained, with a bar that tells how far it is."""

from __future__ import annotations

import html
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import gradio as gr

from relprop import methods
from relprop.app.cards import cards
from relprop.app.desk import Desk
from relprop.app.gate import Turn
from relprop.app.parts import alert, framed, part
from relprop.app.visits import Visit
from relprop.compare import PROTOCOLS
from relprop.errors import RelpropError
from relprop.runs import named

__all__ = ["CompareTab"]

_FIRST = ["relprop", "grad-cam", "random"]
_QUANTISED = ["paper+hq", "released+hq-released"]
_QUICK, _PUBLISHED = "quick (11 points a curve)", "as published (101 points, slow)"
_EVERY = 0.3  # seconds between two looks at how far a comparison is
_ABOUT_SCORES = (
    "<p>Each method's map of the photo above is scored: pixels are inserted into a black picture, or deleted from the "
    "photo, the strongest first, and the class's probability is followed. The ID score is the insertion area minus the "
    f"deletion area, under two protocols: {PROTOCOLS['otsuki2024']} moves tied pixels together, "
    f"{PROTOCOLS['tie-safe']} breaks ties at random.</p>"
)
_ABOUT = "Done. ID is insertion minus deletion; a larger ID is better. Both protocols scored the explained class."


class CompareTab:
    """The parts of the view, and what they do; made where they are to be on the page.

    Args:
        desk: Where the work is done.
        model: The part that says which model.
        weights: The part that says which weights.
    """

    def __init__(self, desk: Desk, model: gr.Dropdown, weights: gr.Dropdown) -> None:
        self.desk = desk
        there = [*methods.names(), *_QUANTISED]
        with gr.Row():
            self.methods = gr.Dropdown(
                there,
                value=_FIRST,
                multiselect=True,
                label="Methods: type to search",
                elem_id="methods",
                scale=3,
                min_width=280,
            )
            self.points = gr.Radio(
                [_QUICK, _PUBLISHED], value=_QUICK, label="Curves", elem_id="points", scale=2, min_width=280
            )
        with gr.Row():
            self.start = gr.Button("Compare", variant="primary", elem_id="start")
            self.stop = gr.Button("Cancel", elem_id="stop")
        self.progress = part(_ABOUT_SCORES, "progress")
        self.grid = part("", "grid")
        self.start.click(
            self._compare,
            [model, weights, self.methods, self.points],
            [self.progress, self.grid],
            api_visibility="private",
            show_progress="hidden",
            trigger_mode="once",
        )
        self.stop.click(self._stop, None, None, api_visibility="private", show_progress="hidden")

    def emptied(self) -> dict[Any, Any]:
        """What is shown when there is something else to compare on."""
        return {self.grid: "", self.progress: framed(_ABOUT_SCORES)}

    def _compare(
        self, model: str, weights: str, chosen: list[str], points: str, request: gr.Request
    ) -> Iterator[tuple[Any, Any]]:
        """Tells how far it is while another thread waits for its turns at the gate."""
        visit = self.desk.visits.of(str(request.session_hash))
        said = ["Done."]

        def work() -> None:
            wanted = visit.wants(model, weights)
            try:
                for _ in self.desk.compare(visit, wanted, chosen, 11 if points == _QUICK else None):
                    pass
            except RelpropError as error:
                said[0] = str(error)
            except Exception:
                traceback.print_exc()
                said[0] = "Something unexpected happened; the server's log says what."

        visit.comparison = None
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        count = -1
        while thread.is_alive():
            thread.join(_EVERY)
            grid, count = self._grid(visit, count)
            yield framed(_bar(visit.turn)), grid
        grid, _ = self._grid(visit, count)
        done = said[0] == "Done."
        yield framed(f'<p class="rp-done" role="status">{_ABOUT}</p>') if done else alert(said[0]), grid

    def _grid(self, visit: Visit, before: int) -> tuple[Any, int]:
        """The cards, if there are more than before."""
        comparison, answer = visit.comparison, visit.answer
        count = 0 if comparison is None else len(comparison.methods) + len(comparison.failures)
        if count == before:
            return gr.skip(), count
        if comparison is None or answer is None:
            return "", count
        label = named(answer.row["target"])
        return framed(cards(comparison, answer.photo, label, answer.name)), count

    def _stop(self, request: gr.Request) -> None:
        visit = self.desk.visits.of(str(request.session_hash))
        if visit.turn is not None:
            visit.turn.stop()


def _bar(turn: Turn | None) -> str:
    part, doing = (0.0, "waiting for its turn") if turn is None else (turn.part, turn.doing)
    return (
        f'<p><progress max="1" value="{part:.3f}" aria-label="progress of the comparison"></progress> '
        f'<span role="status">{100 * part:.0f} %, {html.escape(doing)}</span></p>'
    )
