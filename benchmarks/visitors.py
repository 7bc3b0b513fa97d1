"""Visitors: how long one waits alone and among others, and whether the server's memory grows.

    python benchmarks/visitors.py load --seconds 120 --visitors 4
    python benchmarks/visitors.py memory --requests 500

Both start a server of their own on the loopback address and talk to it as the page does: a photo is uploaded, explained
by the page's own event, and the visitor leaves. Everything is bounded by the numbers given.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from relprop.images import SAMPLES

PATIENCE = 300.0
_STAY = 10  # photos that a visitor explains before leaving


class Visitor:
    """Somebody with the page open."""

    def __init__(self, address: str) -> None:
        self.client = httpx.Client(base_url=address, timeout=PATIENCE)
        config = self.client.get("/config").raise_for_status().json()
        parts = {part["id"]: part["props"] for part in config["components"]}
        photo = next(number for number, props in parts.items() if props.get("elem_id") == "photo")
        self.event = next(d for d in config["dependencies"] if [photo, "upload"] in [list(t) for t in d["targets"]])
        self.values = [parts[number].get("value") for number in self.event["inputs"]]
        self.session = uuid.uuid4().hex[:11]

    @contextmanager
    def here(self) -> Iterator[None]:
        """While the page is open; when it is closed, the server forgets."""
        with self.client.stream("GET", f"/gradio_api/heartbeat/{self.session}"):
            yield

    def explain(self, photo: Path) -> float:
        """Seconds from the choice of a photo to its heatmap.

        Raises:
            RuntimeError: Another answer came.
        """
        begun = time.perf_counter()
        sent = self.client.post("/gradio_api/upload", files={"files": (photo.name, photo.read_bytes())})
        file = {
            "path": sent.raise_for_status().json()[0],
            "orig_name": photo.name,
            "meta": {"_type": "gradio.FileData"},
        }
        body = {"data": [*self.values[:-1], file], "fn_index": self.event["id"], "session_hash": self.session}
        self.client.post("/gradio_api/queue/join", json=body).raise_for_status()
        with self.client.stream("GET", "/gradio_api/queue/data", params={"session_hash": self.session}) as answer:
            for line in answer.iter_lines():
                message = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {}
                if message.get("msg") == "process_completed":
                    shown = json.dumps(message["output"])
                    if not message["success"] or "relprop-map" not in shown or photo.name not in shown:
                        raise RuntimeError(shown[:500])
                    return time.perf_counter() - begun
        raise RuntimeError("The server broke off.")


@contextmanager
def server(model: str) -> Iterator[tuple[str, int]]:
    """A server's address and process."""
    command = [sys.executable, "-c", "from relprop.cli import main; main()", "serve", "--port", "0", "--model", model]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+?:\d+", process.stdout.readline())
        if found is None:
            raise RuntimeError("The server did not start.")
        yield found[0], process.pid
    finally:
        process.terminate()
        process.wait(60)


@contextmanager
def counted(errors: list[str]) -> Iterator[None]:
    """Notes what goes wrong, whatever it is."""
    try:
        yield
    except Exception as error:
        errors.append(repr(error))


def visits(address: str, visitors: int, seconds: float) -> tuple[list[float], list[str]]:
    """Latencies, and what went wrong, of so many visitors at once."""
    latencies: list[float] = []
    errors: list[str] = []
    end = time.perf_counter() + seconds

    def visit(number: int) -> None:
        photos = list(SAMPLES.values())
        while time.perf_counter() < end:
            with counted(errors):
                visitor = Visitor(address)
                with visitor.here():
                    for photo in (photos[number % len(photos) :] + photos * _STAY)[:_STAY]:
                        latencies.append(visitor.explain(photo))
                        if time.perf_counter() > end:
                            break

    threads = [threading.Thread(target=visit, args=(number,)) for number in range(visitors)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return latencies, errors


def load(options: argparse.Namespace) -> int:
    """One visitor, then several at once."""
    with server(options.model) as (address, _):
        visits(address, 1, 5)  # the first call of a model costs more
        rows: dict[int, dict[str, Any]] = {}
        for visitors, seconds in ((1, options.seconds / 4), (options.visitors, options.seconds)):
            latencies, errors = visits(address, visitors, seconds)
            ordered = sorted(latencies)
            rows[visitors] = {
                "requests": len(latencies),
                "errors": errors,
                "median": statistics.median(ordered),
                "p95": ordered[int(0.95 * (len(ordered) - 1))],
                "slowest": ordered[-1],
            }
    ratio = rows[options.visitors]["median"] / rows[1]["median"]
    print(json.dumps({"model": options.model, "visitors": rows, "ratio of medians": ratio}, indent=2))
    return 1 if any(row["errors"] for row in rows.values()) else 0


def memory(options: argparse.Namespace) -> int:
    """One request after another, through visits that end."""
    held: list[tuple[int, float]] = []
    with server(options.model) as (address, process):
        done = 0
        while done < options.requests:
            visitor = Visitor(address)
            with visitor.here():
                for photo in (list(SAMPLES.values()) * _STAY)[:_STAY]:
                    visitor.explain(photo)
                    done += 1
            status = Path(f"/proc/{process}/status").read_text()
            held.append((done, int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1024))
    for done, size in held[:: max(1, len(held) // 10)]:
        print(f"{done:5d} requests  {size:7.1f} MB")
    after = [size for done, size in held if done >= options.requests / 5]
    first = f"From request {options.requests // 5} on: {after[0]:.1f} MB"
    print(f"{first}, then at most {max(after):.1f}, in the end {after[-1]:.1f}.")
    return 0


def main() -> int:
    """Reads the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("load", "memory"))
    parser.add_argument("--model", default=None, help="NAME=WEIGHTS")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--visitors", type=int, default=4)
    parser.add_argument("--requests", type=int, default=500)
    options = parser.parse_args()
    options.model = options.model or {"load": "resnet50=keras", "memory": "resnet18=random"}[options.what]
    return load(options) if options.what == "load" else memory(options)


if __name__ == "__main__":
    sys.exit(main())
