"""The server: page and JSON interface at one address, which can be left running."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence

from relprop.app.limits import Limits
from relprop.errors import RelpropError
from relprop.zoo import Model

__all__ = ["Server"]

_LOCAL = frozenset({"127.0.0.1", "localhost", "::1"})
_EVERY = 20.0  # seconds between two looks for visits that are over

# Gradio reads these when it is imported: nothing is told to anybody, nothing is asked of a hub.
_QUIET = {"GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_OFFLINE": "1", "GRADIO_SERVER_MODE_ENABLED": "False"}


class Server:
    """A server that is ready to run.

    Args:
        models: What it offers, the first one unasked.
        limits: What it takes and does at most.
        host: The address to listen at.
        port: The port; 0 for any that is free.
        auth: ``user:password``, or None to let everybody in.

    Attributes:
        address: Where its page is.
        local: Whether only this machine reaches it.

    Raises:
        RelpropError: It cannot listen there, or a package is missing.
    """

    def __init__(
        self,
        models: Sequence[Model],
        limits: Limits | None = None,
        host: str = "127.0.0.1",
        port: int = 7860,
        auth: str | None = None,
    ) -> None:
        limits = limits or Limits()
        os.environ.update(_QUIET)
        try:
            import gradio  # noqa: PLC0415 - after the environment is set, and only where it is served
            import uvicorn  # noqa: PLC0415
        except ImportError as error:
            raise RelpropError("A server needs Gradio; install it with pip install 'relprop[app]'.") from error
        from relprop.app.api import api  # noqa: PLC0415
        from relprop.app.desk import Desk  # noqa: PLC0415
        from relprop.app.guard import Guard  # noqa: PLC0415
        from relprop.app.page import page  # noqa: PLC0415
        from relprop.app.viewer import script, style  # noqa: PLC0415

        self.socket = _listening(host, port)
        self.desk = Desk(models, limits)
        os.environ["GRADIO_TEMP_DIR"] = str(self.desk.house.uploads)
        blocks = page(self.desk)
        blocks.has_launched = True  # else Gradio does not look where a file comes from
        blocks.state_session_capacity = limits.visits
        system = [gradio.themes.Font("system-ui"), gradio.themes.Font("sans-serif")]
        mono = [gradio.themes.Font("ui-monospace"), gradio.themes.Font("monospace")]
        app = gradio.mount_gradio_app(
            api(self.desk),
            blocks,
            path="/",
            footer_links=[],
            run_history=False,  # else photos stay in the browser
            show_error=False,
            max_file_size=limits.upload,
            ssr_mode=False,
            enable_monitoring=False,
            mcp_server=False,
            theme=gradio.themes.Default(primary_hue="blue", font=system, font_mono=mono),
            css=style(),
            head=f"<script>{script()}</script>",
        )
        at, number, *_ = self.socket.getsockname()
        self.address = f"http://{_shown(host)}:{number}"
        self.local = ipaddress.ip_address(at).is_loopback
        hosts = _LOCAL | {host.lower()} if self.local else None  # no page of another name reaches what is only for here
        guard = Guard(app, self.desk.house, limits, auth, hosts)
        config = uvicorn.Config(
            guard, log_level="warning", timeout_keep_alive=30, timeout_graceful_shutdown=3, ws="none"
        )
        self._uvicorn = uvicorn.Server(config)

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serves until it is told to end.

        Args:
            ready: Called before the first request is taken.
        """
        over = threading.Event()

        def sweeping() -> None:
            while not over.wait(_EVERY):
                self.desk.visits.sweep()

        threading.Thread(target=sweeping, daemon=True).start()
        # Pages that are open when it ends are broken off, which is nothing to tell.
        logging.getLogger("uvicorn.error").addFilter(lambda _: not self._uvicorn.should_exit)
        try:
            ready()
            self._uvicorn.run(sockets=[self.socket])
        finally:
            over.set()
            self.desk.close()
            self.socket.close()

    def stop(self) -> None:
        """Tells it to end; from another thread."""
        self._uvicorn.should_exit = True


def _listening(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        server = socket.socket(found[0], socket.SOCK_STREAM)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(found[4])
        server.listen(128)
    except OSError as error:
        reason = error.strerror or error
        raise RelpropError(
            f"The server cannot listen at {host}, port {port}: {reason}; try another --host or --port."
        ) from error
    return server


def _shown(host: str) -> str:
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
