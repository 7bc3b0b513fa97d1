"""A real server on the loopback interface, for what is fetched."""

import hashlib
import io
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

TENSORS = {"fc.weight": torch.arange(300_000.0).reshape(3, -1), "fc.bias": torch.ones(3)}


def torch_file(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


PAYLOAD = torch_file(TENSORS)
SHA256 = hashlib.sha256(PAYLOAD).hexdigest()


class Server:
    """Serves bytes by path, whole or not, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {"/whole": PAYLOAD, "/cut": PAYLOAD, "/stalled": PAYLOAD, "/other": b"x" * 5000}
        self.asked: list[str] = []
        self.going_on = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.answer(self)

            def do_HEAD(self) -> None:
                outer.answer(self)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        self.asked.append(handler.path)
        body = self.files.get(handler.path)
        if body is None:
            handler.send_error(404)
            return
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.send_header("Content-Type", "text/html" if handler.path.endswith("/") else "application/octet-stream")
        handler.end_headers()
        half = handler.path in ("/cut", "/stalled") and not self.going_on.is_set()
        try:
            handler.wfile.write(body[: len(body) // 2] if half else body)
            if half and handler.path == "/stalled":
                self.going_on.wait(60)
        except OSError:
            pass  # the other side was killed

    def close(self) -> None:
        self.going_on.set()
        self.http.shutdown()
        self.http.server_close()
