"""The JSON interface: the same for those who call it from a program."""

from __future__ import annotations

import base64
import io
import secrets
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI, File, Form, Request, UploadFile
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from PIL import Image
from pydantic import BaseModel, Field
from torch import Tensor

from relprop import __version__
from relprop.app.answer import Answer, Question
from relprop.app.desk import Desk
from relprop.app.docs_page import docs_page
from relprop.app.gate import Turn
from relprop.app.limits import BusyError, LateError, TooLargeError, called
from relprop.app.shelf import Wanted
from relprop.cli import Preset, Split
from relprop.errors import RelpropError
from relprop.figure import glow, limit
from relprop.heatmap import colorize

__all__ = ["api"]

_BLOCK = 1 << 16


class Class(BaseModel):
    """A class, and what the model makes of it."""

    index: int
    name: str | None
    synset: str | None
    probability: float


class Merge(BaseModel):
    """How relevance was parted at one merge."""

    node: str
    block: int
    skip: float
    residual: float
    identity: bool


class Pictures(BaseModel):
    """PNG files, in base64, as large as what the model saw."""

    photo: str
    heatmap: str
    overlay: str
    quantized: str
    overlay_quantized: str


class Explained(BaseModel):
    """What came out."""

    relprop: str = Field(description="The version that computed it.")
    image: str
    settings: dict[str, Any] = Field(description="Model, weights with their hash, preset, split and start.")
    top: list[Class] = Field(description="The likeliest classes.")
    target: Class = Field(description="The class that is explained.")
    start: float = Field(description="The relevance that it started with.")
    conservation_error: float = Field(description="The part of that which is missing in the end.")
    largest_leak: float = Field(description="The largest part that one node has lost or made.")
    absorbed: dict[str, float] = Field(description="What the rules kept by design, by cause.")
    merges: list[Merge] = Field(description="From input to output.")
    pictures: Pictures


class Health(BaseModel):
    """That the server is there."""

    relprop: str
    visits: int


class Offer(BaseModel):
    """A model, and the weights that it may have."""

    model: str
    weights: list[str]


class Problem(BaseModel):
    """Why something cannot be done."""

    detail: str = Field(description="One sentence.")


_PROBLEMS: dict[int | str, dict[str, Any]] = {
    400: {"model": Problem, "description": "The request cannot be read."},
    413: {"model": Problem, "description": "The image has too many bytes or pixels."},
    422: {"model": Problem, "description": "The request cannot be met: no image, no such class, no such model."},
    503: {"model": Problem, "description": "Too many are waiting; try again in a moment."},
    504: {"model": Problem, "description": "It took too long."},
}


def api(desk: Desk) -> FastAPI:
    """The interface of a desk, with its page and the take-away addresses of visits."""
    app = FastAPI(
        title="relprop",
        version=__version__,
        description="Explains what an image classifier sees, with relevance that adds up.",
        docs_url=None,  # those pages get their code from other hosts
        redoc_url=None,
    )

    @app.exception_handler(RelpropError)
    def refused(_: Request, error: RelpropError) -> JSONResponse:
        return _problem(error)

    @app.exception_handler(RequestValidationError)
    def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = str(first["loc"][-1]) if first["loc"] else "body"
        return JSONResponse({"detail": f"{where}: {first['msg']}."}, 422)

    @app.post("/explain", responses=_PROBLEMS, summary="Explain an image")
    def explain(
        image: Annotated[UploadFile, File(description="A photo: JPEG, PNG, WebP, AVIF, GIF, BMP or TIFF.")],
        model: Annotated[str | None, Form(description="One of /models; by default the server's first.")] = None,
        weights: Annotated[str | None, Form(description="One of the model's; by default its first.")] = None,
        target: Annotated[
            str | None, Form(description="The class: an index, a synset or a name; by default the predicted one.")
        ] = None,
        preset: Annotated[Preset, Form(description="Which rules to use.")] = "relprop",
        split: Annotated[Split | None, Form(description="How sums part relevance; by default the preset's.")] = None,
        identity_skips: Annotated[bool, Form(description="Whether identity skips have a share.")] = True,
        start: Annotated[
            Literal["probability", "contrast", "logit", "one"] | None,
            Form(description="What the target starts with; by default the preset's own."),
        ] = None,
        levels: Annotated[int, Form(ge=2, le=256, description="Levels of the quantised pictures.")] = 8,
    ) -> Explained:
        """Explains an image: classes, how well the relevance adds up, how it was parted, and pictures."""
        question = Question(target or None, None, preset, split, identity_skips, start)
        name = called(image.filename)
        path = desk.house.visits / f"api-{secrets.token_hex(8)}"
        try:
            _write(image, path, name, desk)
            wanted = Wanted(model or None, weights or None)
            return desk.ask(path, name, wanted, question, lambda found: _explained(found, levels), Turn(desk.limits))
        finally:
            path.unlink(missing_ok=True)

    @app.get("/models", summary="List the models")
    def models() -> list[Offer]:
        """The models that this server has, and their weights; the first of each is what one gets unasked."""
        return [Offer(model=name, weights=list(weights)) for name, weights in desk.shelf.offers.items()]

    @app.get("/health", summary="Is it there?")
    def health() -> Health:
        """For a supervisor."""
        return Health(relprop=__version__, visits=len(desk.visits))

    @app.get("/docs", include_in_schema=False)
    def docs() -> HTMLResponse:
        return HTMLResponse(docs_page(app.openapi()))

    @app.get("/visit/{token}/bundle.zip", include_in_schema=False)
    def take_bundle(token: str) -> Response:
        visit = desk.visits.find(token)
        return _download(desk.bundle(visit), "application/zip", f"{_stem(visit.answer)}.zip")

    @app.get("/visit/{token}/report.html", include_in_schema=False)
    def take_report(token: str) -> Response:
        visit = desk.visits.find(token)
        return _download(desk.report(visit).encode(), "text/html; charset=utf-8", f"{_stem(visit.answer)}.html")

    return app


def _write(image: UploadFile, path: Path, name: str, desk: Desk) -> None:
    """A visitor's file, as far as it is not too long."""
    size = 0
    with path.open("wb") as file:
        while block := image.file.read(_BLOCK):
            size += len(block)
            desk.limits.check_size(name, size, desk.limits.photo)
            file.write(block)


def _problem(error: RelpropError) -> JSONResponse:
    known = {TooLargeError: 413, BusyError: 503, LateError: 504}
    code = next((code for kind, code in known.items() if isinstance(error, kind)), 422)
    return JSONResponse({"detail": str(error)}, code, {"Retry-After": "5"} if code == 503 else None)


def _explained(answer: Answer, levels: int) -> Explained:
    row, e = answer.row, answer.explanation
    assert answer.photo is not None
    map_, photo = e.heatmap[0], answer.photo
    top, quantized = limit(map_), e.quantized(levels)[0]

    def about(found: dict[str, Any]) -> Class:
        return Class(index=found["class"], **{name: found[name] for name in ("name", "synset", "probability")})

    def heat(values: Tensor) -> str:
        return _png(Image.fromarray(colorize(values, limit=top)))

    return Explained(
        relprop=__version__,
        image=answer.name,
        settings=dict(e.settings),
        top=[about(found) for found in row["top"]],
        target=about(row["target"]),
        start=row["start"],
        conservation_error=row["conservation_error"],
        largest_leak=row["largest_leak"],
        absorbed={cause: float(amount.sum()) for cause, amount in e.ledger.absorbed_by_cause.items()},
        merges=[Merge(**asdict(share), skip=share.skip) for share in answer.shares],
        pictures=Pictures(
            photo=_png(photo),
            heatmap=heat(map_),
            overlay=_png(Image.fromarray(glow(map_, photo, top))),
            quantized=heat(quantized),
            overlay_quantized=_png(Image.fromarray(glow(quantized, photo, top))),
        ),
    )


def _png(picture: Image.Image) -> str:
    file = io.BytesIO()
    picture.save(file, format="PNG")
    return base64.b64encode(file.getvalue()).decode("ascii")


def _stem(answer: Answer | None) -> str:
    name = Path(answer.name).stem if answer else ""
    return "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "-" for c in name) or "relprop"


def _download(content: bytes, kind: str, name: str) -> Response:
    headers = {"Content-Disposition": f'attachment; filename="relprop-{name}"', "Cache-Control": "no-store"}
    return Response(content, media_type=kind, headers=headers)
