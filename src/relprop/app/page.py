"""The page: explain, where the relevance went, compare, take it away."""

from __future__ import annotations

import html
import shutil
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, get_args

import gradio as gr

from relprop.app.answer import Answer, Question
from relprop.app.compare_tab import CompareTab
from relprop.app.desk import Desk
from relprop.app.flow import flow, words
from relprop.app.gate import Turn
from relprop.app.limits import called
from relprop.app.parts import alert, framed, part
from relprop.app.viewer import views
from relprop.app.visits import Visit
from relprop.cli import Preset, Split
from relprop.errors import RelpropError
from relprop.images import SAMPLES
from relprop.runs import named

__all__ = ["page"]

_OWN_SPLIT = "the preset's"
_NOBODY = "nothing"


def page(desk: Desk) -> gr.Blocks:
    """The page of a desk."""
    blocks: gr.Blocks = _Page(desk).blocks
    return blocks


class _Page:
    """The parts of the page, and what they do."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        idle = int(desk.limits.idle)  # what was sent and never asked about belongs to no visit
        with gr.Blocks(title="relprop", analytics_enabled=False, delete_cache=(20, idle)) as self.blocks:
            gr.HTML(
                '<div class="rp"><h1>relprop</h1><p>Why did the network decide so? Relevance for a class, handed back '
                "from layer to layer until it reaches the pixels, with nothing lost on the way.</p></div>"
            )
            with gr.Tabs(elem_classes="rp-tabs"):
                with gr.Tab("Explain", id="explain"):
                    self._explain_tab()
                with gr.Tab("Where it went", id="flow"):
                    self.flow = part("<p>Explain a photo first.</p>", "flow")
                with gr.Tab("Compare", id="compare"):
                    self.compare = CompareTab(desk, self.model, self.weights)
                with gr.Tab("Take it away", id="take"):
                    self.take = part("<p>Explain a photo first.</p>", "take")
            self._wire()
        self.blocks.queue(max_size=2 * desk.limits.waiting + 8, default_concurrency_limit=desk.limits.waiting + 8)

    def _explain_tab(self) -> None:
        offers = self.desk.shelf.offers
        name, weights = self.desk.shelf.default
        with gr.Row():
            with gr.Column(scale=1, min_width=300):
                self.photo = gr.Image(
                    label="Photo: drop, paste or pick one",
                    sources=["upload", "clipboard"],
                    height=260,
                    buttons=[],
                    alt_text="The photo that you chose",
                    elem_id="photo",
                )
                with gr.Row(elem_classes="rp-samples"):
                    self.samples = [gr.Button(f"sample: {sample}", size="sm", min_width=80) for sample in SAMPLES]
                self.model = gr.Dropdown(list(offers), value=name, label="Model", elem_id="model")
                self.weights = gr.Dropdown(list(offers[name]), value=weights, label="Weights", elem_id="weights")
                with gr.Accordion("Rules", open=False):
                    self.preset = gr.Dropdown(list(get_args(Preset)), value="relprop", label="Preset", elem_id="preset")
                    splits = [_OWN_SPLIT, *get_args(Split)]
                    self.split = gr.Dropdown(splits, value=_OWN_SPLIT, label="How sums part relevance", elem_id="split")
                    self.skips = gr.Checkbox(True, label="Identity skips have a share", elem_id="skips")
                with gr.Accordion("Your own weights", open=False, visible=self.desk.limits.checkpoint > 0):
                    self.checkpoint = gr.File(
                        label="A .safetensors checkpoint of the model above",
                        file_types=[".safetensors"],
                        height=120,
                        elem_id="checkpoint",
                    )
            with gr.Column(scale=3, min_width=320):
                self.notice = part("", "notice")
                first = "<p>Choose a photo, or one of the samples, to see what speaks for which class.</p>"
                self.headline = part(first, "headline")
                self.top = gr.Radio([], label="The likeliest classes: which one to explain", elem_id="top")
                self.view = part("", "view")
                with gr.Row():
                    self.target = gr.Dropdown(
                        [], label="Any class: type to search", filterable=True, elem_id="target", min_width=260
                    )
                    self.contrast = gr.Dropdown(
                        [_NOBODY],
                        value=_NOBODY,
                        label="Why this, and not …",
                        filterable=True,
                        elem_id="contrast",
                        min_width=260,
                    )

    def _wire(self) -> None:
        settings = [self.model, self.weights, self.target, self.contrast, self.preset, self.split, self.skips]
        shown = [self.notice, self.headline, self.view, self.flow, self.take, self.top, self.target, self.contrast]
        shown += [self.compare.progress, self.compare.grid, self.weights, self.photo, self.checkpoint]

        def on(event: Callable[..., Any], work: Callable[..., Any], *more: Any) -> None:
            event(
                self._told(work),
                [*settings, *more],
                shown,
                preprocess=False,  # Gradio would decode a stranger's photo; here it is read under limits
                api_visibility="private",
                trigger_mode="always_last",
                show_progress="minimal",
                show_progress_on=[self.headline, self.view],
            )

        on(self.photo.upload, self._uploaded, self.photo)
        on(self.photo.clear, self._cleared)
        for button, sample in zip(self.samples, SAMPLES, strict=True):
            on(button.click, partial(self._sampled, sample))
        on(self.model.input, self._other_model)
        on(self.weights.input, self._other_weights)
        on(self.checkpoint.upload, self._own_weights, self.checkpoint)
        on(self.checkpoint.clear, self._other_weights)
        on(self.top.input, self._likely, self.top)
        for choice in (self.target, self.contrast, self.preset, self.split, self.skips):
            on(choice.input, self._again)
        self.blocks.unload(self._left)

    # -- what happens --

    def _told(self, work: Callable[..., dict[Any, Any]]) -> Callable[..., dict[Any, Any]]:
        """What was asked for, or a sentence that says why not."""

        def answered(request: gr.Request, *values: Any) -> dict[Any, Any]:
            visit = self.desk.visits.of(str(request.session_hash))
            try:
                return {self.notice: "", **work(visit, *values)}
            except RelpropError as error:
                return {self.notice: alert(str(error))}
            except Exception:  # a stranger is not shown what is inside
                traceback.print_exc()
                return {self.notice: alert("Something unexpected happened; the server's log says what.")}

        return answered

    def _uploaded(self, visit: Visit, *values: Any) -> dict[Any, Any]:
        *settings, photo = values
        found = self.desk.house.holds(photo["path"]) if photo else None
        if found is None:
            raise RelpropError("The photo did not arrive; choose it again.")
        before, visit.photo = visit.photo, (visit.keep(found), called(photo.get("orig_name") or found.name))
        with _instead(visit, "photo", before):
            return self._explained(visit, *settings, fresh=True)

    def _sampled(self, sample: str, visit: Visit, *settings: Any) -> dict[Any, Any]:
        copy = visit.folder / SAMPLES[sample].name
        shutil.copyfile(SAMPLES[sample], copy)
        visit.photo = copy, copy.name
        return {**self._explained(visit, *settings, fresh=True), self.photo: str(copy)}

    def _cleared(self, visit: Visit, *_: Any) -> dict[Any, Any]:
        visit.photo = visit.answer = visit.comparison = None
        nothing = framed("<p>Explain a photo first.</p>")
        return {
            self.headline: framed("<p>Choose a photo, or one of the samples.</p>"),
            self.view: "",
            self.flow: nothing,
            self.take: nothing,
            self.top: gr.update(choices=[], value=None),
            **self.compare.emptied(),
        }

    def _other_model(self, visit: Visit, *settings: Any) -> dict[Any, Any]:
        model, _, *others = settings
        weights = self.desk.shelf.offers.get(str(model), ("random",))
        update = {self.weights: gr.update(choices=list(weights), value=weights[0])}
        return {**update, **self._other_weights(visit, model, weights[0], *others)}

    def _other_weights(self, visit: Visit, *settings: Any) -> dict[Any, Any]:
        visit.checkpoint = None
        return {self.checkpoint: None, **self._anew(visit, *settings)}

    def _own_weights(self, visit: Visit, *values: Any) -> dict[Any, Any]:
        *settings, file = values
        found = self.desk.house.holds(file["path"]) if file else None
        if found is None or found.suffix != ".safetensors":
            raise RelpropError("Your own weights are a .safetensors file; convert other checkpoints to that.")
        self.desk.limits.check_size(found.name, found.stat().st_size, self.desk.limits.checkpoint)
        before, visit.checkpoint = visit.checkpoint, visit.keep(found, found.suffix)
        with _instead(visit, "checkpoint", before):
            return self._anew(visit, *settings)

    def _likely(self, visit: Visit, *values: Any) -> dict[Any, Any]:
        model, weights, _, *others, top = values
        return self._explained(visit, model, weights, top, *others)

    def _anew(self, visit: Visit, *settings: Any) -> dict[Any, Any]:
        return self._explained(visit, *settings, fresh=True) if visit.photo else {}

    def _again(self, visit: Visit, *settings: Any) -> dict[Any, Any]:
        return self._explained(visit, *settings) if visit.photo else {}

    def _explained(self, visit: Visit, *settings: Any, fresh: bool = False) -> dict[Any, Any]:
        """Explains the photo; with `fresh`, the predicted class."""
        model, weights, target, contrast, preset, split, skips = settings
        if visit.photo is None:
            raise RelpropError("There is no photo yet; choose one first.")
        question = Question(
            None if fresh or target in (None, "") else target,
            None if fresh or contrast in (None, "", _NOBODY) else contrast,
            preset,
            None if split == _OWN_SPLIT else split,
            bool(skips),
        )
        turn = visit.turn = Turn(self.desk.limits)
        answer = self.desk.ask(*visit.photo, visit.wants(model, weights), question, lambda found: found, turn)
        known = visit.answer.classes if visit.answer else ()
        visit.answer, visit.comparison = answer, None
        return self._shown(visit, answer, answer.classes != known)

    def _shown(self, visit: Visit, answer: Answer, classes: bool) -> dict[Any, Any]:
        top = [(f"{named(about)}, {100 * about['probability']:.1f} %", about["class"]) for about in answer.row["top"]]
        every = [(f"{name} ({index})", index) for index, name in enumerate(answer.classes)]
        chosen = answer.row["target"]["class"]
        against = answer.contrast[0]["class"] if answer.contrast else _NOBODY
        return {
            self.headline: framed(_headline(answer)),
            self.view: framed(views(answer)),
            self.flow: framed(flow(answer)),
            self.take: framed(_take(visit)),
            self.top: gr.update(choices=top, value=chosen if chosen in [index for _, index in top] else None),
            self.target: gr.update(value=chosen, choices=every) if classes else chosen,
            self.contrast: gr.update(value=against, choices=[_NOBODY, *every]) if classes else against,
            **self.compare.emptied(),
        }

    def _left(self, request: gr.Request) -> None:
        """Nothing stays, nor does what Gradio would keep of the page for an hour."""
        session = str(request.session_hash)
        self.desk.visits.end(session)
        held = self.blocks.state_holder
        held.session_data.pop(session, None)
        held.time_last_used.pop(session, None)


@contextmanager
def _instead(visit: Visit, name: str, before: Any) -> Iterator[None]:
    """Takes what was there before again if the new one is of no use."""
    try:
        yield
    except Exception:
        setattr(visit, name, before)
        raise


def _headline(answer: Answer) -> str:
    if answer.contrast is None:
        return f"<h2>{html.escape(answer.label)}</h2><p>{html.escape(words(answer))}</p>"
    this, that = html.escape(named(answer.row["target"])), html.escape(named(answer.contrast[0]))
    return (
        f"<h2>{this}, and not {that}</h2><p>The difference of two maps that started with the same: positive where the "
        f"photo speaks more for {this}, negative where it speaks more for {that}. It sums to zero.</p>"
    )


def _take(visit: Visit) -> str:
    return (
        "<p>The bundle has the pictures, the relevance as a numpy array and a manifest with settings, the ledger and "
        "the SHA-256 of every file; <code>relprop.Explanation.load</code> reads it. The report is one HTML file that "
        "opens without a server. Both go when your visit ends.</p>"
        f'<div class="rp-links"><a class="rp-button" id="bundle" href="visit/{visit.token}/bundle.zip" download>Bundle '
        f'(.zip)</a><a class="rp-button" id="report" href="visit/{visit.token}/report.html" download>Report (.html)</a>'
        '</div><p>From a program: <a href="docs">the JSON interface</a>.</p>'
    )
