"""The guard: what is asked of the server passes here first, and most of what it does not need is refused.

Gradio answers many more addresses than the page uses: it fetches from other hosts, lists runs, edits code. Only those
that the page needs get through, and files only from the server's own folder.
"""

from __future__ import annotations

import base64
import json
import re
import secrets
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import suppress
from pathlib import PurePath
from typing import Any, TypeAlias

from starlette.requests import ClientDisconnect

from relprop.app.limits import MEGA, Limits
from relprop.app.visits import House

__all__ = ["Guard"]

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Message, Receive, Send], Awaitable[None]]

_OURS = re.compile(r"/(explain|models|health|docs|openapi\.json|visit/[\w-]+/(bundle\.zip|report\.html))")
_READ = re.compile(
    r"/|/(theme\.css|favicon\.ico|manifest\.json|robots\.txt|config)|/(assets|static|svelte)/[\w./@-]+"
    r"|/gradio_api/(info|app_id|startup-events|theme\.css|login_check|heartbeat/\w+|queue/data|upload_progress)/?"
)
_WRITE = re.compile(r"/gradio_api/(queue/join|upload|cancel|reset)/?")
_FILE = "/gradio_api/file="
_READING = ("GET", "HEAD")
_SMALL = 2 * MEGA  # bytes of what the page says when nothing is uploaded
_PATIENCE = 100 * MEGA  # bytes that are listened to, and dropped, before one is told that they are too many
_FULL = 20  # uploads of the largest size that the folder has room for

HEADERS = {
    # 'unsafe-inline' and 'unsafe-eval' are what Gradio's page needs; what counts is that no other host is reached.
    "content-security-policy": "default-src 'self' data: blob: 'unsafe-inline' 'unsafe-eval'; frame-ancestors 'self'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_STRANGE = re.compile(rb"<meta[^>]*(?:og:|twitter:)[^>]*>", re.DOTALL)


class Guard:
    """Stands before an application.

    Args:
        app: The application.
        house: The folder that files may come from.
        limits: What may be sent.
        auth: ``user:password``, or None to let everybody in.
        hosts: The names that the server may be called by; None for any.
    """

    def __init__(
        self, app: App, house: House, limits: Limits, auth: str | None = None, hosts: frozenset[str] | None = None
    ) -> None:
        self.app, self.house, self.limits, self.hosts = app, house, limits, hosts
        self._auth = None if auth is None else base64.b64encode(auth.encode()).decode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # the page needs no web socket
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        refused = self._refusal(scope["method"], scope["path"], headers)
        if refused is not None:
            if refused[0] == 413:
                await _whole(receive, _PATIENCE, keep=False)  # else a browser never reads why it was refused
            await _say(send, *refused)
            return
        path = scope["path"].rstrip("/")
        if path == "/gradio_api/queue/join":
            body = await _whole(receive, _SMALL)
            if body is None or not self._fine(body):
                await _say(send, 400, "This request names a file that was not uploaded here.")
                return
            receive = _again(body, receive)
        elif scope["method"] == "POST":
            receive = _counted(receive, self._most(path) + _SMALL)
        if path == "":
            scope = {**scope, "headers": [(n, v) for n, v in scope["headers"] if n.lower() != b"accept-encoding"]}
            send = _plain(send)
        with suppress(ClientDisconnect):  # in the middle of an upload; there is nobody to be told
            await self.app(scope, receive, _with_headers(send))

    def _refusal(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str] | None:
        """Why something is not answered, to whomever and whatever it is."""
        host = re.sub(r":\d+$", "", headers.get("host", "")).strip("[]").lower()
        if self.hosts is not None and host not in self.hosts:
            return 403, "This server does not go by that name."
        if self._auth is not None:
            kind, _, given = headers.get("authorization", "").partition(" ")
            if kind.lower() != "basic" or not secrets.compare_digest(given.strip().encode(), self._auth.encode()):
                return 401, "This server wants a name and a password."
        if method not in _READING and _elsewhere(headers):
            return 403, "Another site's page has asked for this."
        return self._no_place(method, path) or self._no_room(method, path, headers.get("content-length", ""))

    def _no_place(self, method: str, path: str) -> tuple[int, str] | None:
        """Why nothing is at an address."""
        if path.startswith(_FILE):
            found = self.house.holds(path.removeprefix(_FILE))
            return None if found and method in _READING else (403, "There is no such file here.")
        allowed = _OURS.fullmatch(path) or (_READ if method in _READING else _WRITE).fullmatch(path)
        return None if allowed and ".." not in PurePath(path).parts else (404, "There is nothing here.")

    def _no_room(self, method: str, path: str, length: str) -> tuple[int, str] | None:
        """Why something is too large to be taken."""
        most = self._most(path)
        if length.isdigit() and int(length) > most + _SMALL:
            return 413, f"This is more than the {most / MEGA:g} MB that this server takes."
        if path.startswith("/gradio_api/upload") and method == "POST" and self._full():
            return 507, "The server's folder is full; try again later."
        return None

    def _most(self, path: str) -> int:
        """Bytes of files that may be sent to an address."""
        if path.startswith("/gradio_api/upload"):
            return self.limits.upload
        return self.limits.photo if path == "/explain" else _SMALL

    def _full(self) -> bool:
        size = 0
        for file in self.house.uploads.rglob("*"):  # what visits keep are links to these
            with suppress(OSError):  # gone with its visit just now
                size += file.stat().st_size
        return size > _FULL * self.limits.upload

    def _fine(self, body: bytes) -> bool:
        """Whether all files that are named in a request were uploaded here."""
        try:
            return all(self.house.holds(path) is not None for path in _paths(json.loads(body)))
        except (ValueError, RecursionError):  # lists in lists in lists
            return False


def _elsewhere(headers: dict[str, str]) -> bool:
    """Whether another site's page asks; browsers say so, but not to addresses that are neither TLS nor local."""
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is None and origin is not None:
        return origin.partition("://")[2].lower() != headers.get("host", "").lower()
    return site in ("cross-site", "same-site")


def _paths(content: Any) -> Iterator[str]:
    if isinstance(content, dict):
        path = content.get("path")
        if path is not None:
            yield path if isinstance(path, str) else ""
        for value in content.values():
            yield from _paths(value)
    elif isinstance(content, list):
        for value in content:
            yield from _paths(value)


async def _say(send: Send, status: int, sentence: str) -> None:
    body = json.dumps({"detail": sentence}).encode()
    headers = {**HEADERS, "content-type": "application/json", "content-length": str(len(body))}
    if status == 401:
        headers["www-authenticate"] = 'Basic realm="relprop", charset="UTF-8"'
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})


async def _whole(receive: Receive, most: int, *, keep: bool = True) -> bytes | None:
    """A request's body, if it is to be kept; None where it is too long, or was broken off."""
    body, size = b"", 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        part: bytes = message.get("body", b"")
        body, size = body + part if keep else b"", size + len(part)
        if size > most:
            return None
        if not message.get("more_body"):
            return body


def _again(body: bytes, receive: Receive) -> Receive:
    """Hands out a body that was read already, and what comes after it."""
    rest = [{"type": "http.request", "body": body, "more_body": False}]

    async def once() -> Message:
        return rest.pop() if rest else await receive()

    return once


def _counted(receive: Receive, most: int) -> Receive:
    """Ends a request that is longer than it may be; one need not say beforehand how long it is."""
    got = 0

    async def counting() -> Message:
        nonlocal got
        message = await receive()
        got += len(message.get("body", b""))
        return {"type": "http.disconnect"} if got > most else message

    return counting


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            there = {name.lower() for name, _ in message["headers"]}
            more = [(n.encode(), v.encode()) for n, v in HEADERS.items() if n.encode() not in there]
            message = {**message, "headers": [*message["headers"], *more]}
        await send(message)

    return sending


def _plain(send: Send) -> Send:
    """The page without what is meant for other sites' previews of it, which names pictures on other hosts."""
    held: list[Message] = []

    async def sending(message: Message) -> None:
        held.append(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            body = _STRANGE.sub(b"", b"".join(m.get("body", b"") for m in held[1:]))
            headers = [(n, v) for n, v in held[0]["headers"] if n.lower() != b"content-length"]
            await send({**held[0], "headers": [*headers, (b"content-length", str(len(body)).encode())]})
            await send({"type": "http.response.body", "body": body})

    return sending
