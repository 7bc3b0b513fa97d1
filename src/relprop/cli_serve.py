"""The verb that serves: the page in a browser, and the JSON interface."""

# ruff: noqa: D301, PLC0415
# D301: \b keeps the lines of the examples apart. PLC0415: torch is imported where it computes, so that --help is quick.

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from relprop.errors import RelpropError
from relprop.runs import DONE, load_model


def serve(
    model: Annotated[
        list[str] | None, typer.Option(help="NAME or NAME=WEIGHTS, as for explain; may be given several times.")
    ] = None,
    weights: Annotated[str, typer.Option(help="For those without; as for explain.")] = "auto",
    host: Annotated[str, typer.Option(help="Where to listen; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any that is free.")] = 7860,
    auth: Annotated[
        str | None, typer.Option(envvar="RELPROP_AUTH", help="USER:PASSWORD, or @FILE with it; also RELPROP_AUTH.")
    ] = None,
    max_photo: Annotated[float, typer.Option(min=0.001, help="Megabytes of a photo.")] = 20,
    max_pixels: Annotated[float, typer.Option(min=0.001, help="Megapixels of a photo.")] = 50,
    max_checkpoint: Annotated[float, typer.Option(min=0, help="Megabytes of a visitor's weights; 0: none.")] = 300,
    waiting: Annotated[int, typer.Option(min=0, max=30, help="Requests that may wait for their turn.")] = 16,
    time_limit: Annotated[float, typer.Option(min=0.001, help="Seconds that a request may compute.")] = 300,
    visits: Annotated[int, typer.Option(min=1, help="Visitors whose results are kept.")] = 50,
    idle: Annotated[float, typer.Option(min=1, help="Minutes without a request that end a visit.")] = 30,
    show: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> int:
    """Serve a page that explains photos, and a JSON interface.

    \b
    relprop serve --open
    relprop serve --model resnet50 --model efficientnet_lite0 --port 8080
    relprop serve --host 0.0.0.0 --auth @password.txt
    curl -F image=@photo.jpg http://127.0.0.1:7860/explain

    Weights are fetched before it starts, if need be, and never for a visitor. Uploads are read under limits, and gone
    when their visitor is. The interface is described at /docs.
    """
    from relprop.app.limits import MEGA, Limits
    from relprop.app.server import Server
    from relprop.memory import keep_freed

    keep_freed()
    limits = Limits(
        photo=int(max_photo * MEGA),
        pixels=int(max_pixels * MEGA),
        checkpoint=int(max_checkpoint * MEGA),
        waiting=waiting,
        seconds=time_limit,
        visits=visits,
        idle=60 * idle,
    )
    password = _secret(auth)
    wanted = [each.partition("=") for each in model or ["resnet50"]]
    server = Server([load_model(name, given or weights) for name, _, given in wanted], limits, host, port, password)

    def ready() -> None:
        typer.echo(f"relprop is at {server.address}, its JSON interface at {server.address}/docs; Ctrl-C ends it.")
        if not server.local and password is None:
            typer.echo("Everybody who reaches this machine can use it; --auth asks for a password.", err=True)
        if show:
            import webbrowser

            webbrowser.open(server.address)

    with suppress(KeyboardInterrupt):  # the way to end it, and no error
        server.run(ready)
    typer.echo("relprop has ended; nothing that was sent to it is left.")
    if server.desk.gate.busy:  # Python would wait for it
        os._exit(DONE)
    return DONE


def _secret(auth: str | None) -> str | None:
    """The name and the password, which need not stand where others can read them."""
    if auth is None:
        return None
    if auth.startswith("@"):
        path = Path(auth[1:]).expanduser()
        try:
            auth = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise RelpropError(
                f"The password in {path} cannot be read: {getattr(error, 'strerror', error)}."
            ) from error
    user, _, password = auth.partition(":")
    if not user or not password:
        raise RelpropError("--auth is USER:PASSWORD, both of at least one character, or @FILE with that in it.")
    return auth
