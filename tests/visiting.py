"""A real server in a process of its own, and a real browser to visit it with."""

import base64
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, sync_playwright

COMMAND = (sys.executable, "-c", "from relprop.cli import main; main()")
SMALL = ("--model", "resnet18=random")
ARGUMENTS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
WAIT = 60_000  # milliseconds that a slow machine may take for anything


class Running:
    """A server: where it is, its process, and its folder."""

    def __init__(self, *arguments: object) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [*COMMAND, "serve", "--port", "0", *map(str, arguments)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"http://\S+?:\d+", line)
        if found is None:
            raise AssertionError(f"The server said {line!r}: {self.process.communicate()[1]}")
        self.address, self.said = found[0], ""

    @property
    def folder(self) -> Path:
        """The server's own: the one that it has a lock in."""
        links = Path(f"/proc/{self.process.pid}/fd").iterdir()
        opened = [link.readlink() for link in links if link.is_symlink()]
        return next(path.parent for path in opened if path.name == ".lock")

    @property
    def memory(self) -> float:
        """Megabytes that it holds."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024

    def stop(self) -> None:
        """Ends it as a supervisor does, and keeps what it said on stderr."""
        self.process.terminate()
        try:
            self.said = self.process.communicate(timeout=60)[1]
        finally:
            self.process.kill()


@contextmanager
def running(*arguments: object) -> Iterator[Running]:
    """A server with these options, which is ended whatever happens."""
    server = Running(*arguments)
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def chromium() -> Iterator[Browser]:
    """Debian's browser, or a skip that says how to get it."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("no chromium on PATH: make chromium installs it")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        yield browser
        browser.close()


def painted(page: Any, where: str) -> str:
    """What the maps at a place were painted with last, when they are."""
    panes = page.locator(f"{where} .rp-panes[data-painted]").first
    panes.wait_for(timeout=WAIT)
    return str(panes.get_attribute("data-painted"))


def pixels(page: Any, where: str, pane: int = 0) -> bytes:
    """The pixels of a picture, as the browser has them."""
    # As text, for Playwright takes seconds over as many numbers.
    script = """canvas => {
      const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
      let text = "";
      for (let i = 0; i < data.length; i += 32768) text += String.fromCharCode(...data.subarray(i, i + 32768));
      return btoa(text); }"""
    return base64.b64decode(page.locator(f"{where} canvas").nth(pane).evaluate(script))
