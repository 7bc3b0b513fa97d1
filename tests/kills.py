"""A study that is killed again and again, for test_study.py: ``python kills.py PHOTOS WHOLE BROKEN KILLS``.

Importing torch takes longer than the study, so this process imports it once and forks a child for every attempt. It
computes nothing itself: a child starts with torch as it is after an import, and with one thread. A child tells through
a pipe when it begins and when it writes; which moment it is killed at is drawn by lot, from the first row to the last.

WHOLE is run without any kill, BROKEN is killed KILLS times and then left to finish. On stdout: how many kills really
ended a child in the middle of its study, and how many of these while rows were being written.
"""

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from statistics import median

import tiny
import torch
import torch.fx.experimental.optimization  # what a study imports on its way, a child need not import again

from relprop.study import Journal, Row, output, run

METHODS = ["paper", "random+hq"]
BEGIN, WRITE, WRITTEN = b"b", b"w", b"d"


class Child:
    """A study in a process of its own.

    Args:
        photos: The images.
        out: The folder of the study.
        stop: After so many writes it waits to be killed: a busy machine may be late with that.
    """

    def __init__(self, photos: Path, out: Path, stop: int | None = None) -> None:
        self.said = b""
        self.pipe, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                _study(photos, out, write, stop)
                status = 0
            except BaseException:  # nothing may get out of a fork into what the parent was about to do
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(write)

    def wait(self, sign: bytes, count: int = 1) -> bool:
        """Waits for so many signs; whether they came before the child ended."""
        while count:
            byte = os.read(self.pipe, 1)
            if not byte:
                return False
            self.said += byte
            count -= byte == sign
        return True

    def kill(self) -> bool:
        """Kills it; whether it was in the middle of its study."""
        os.kill(self.pid, signal.SIGKILL)
        return os.WIFSIGNALED(self.end()) and self.said.startswith(BEGIN)

    def end(self) -> int:
        """Waits until it has ended, and hears what it said last."""
        while heard := os.read(self.pipe, 1 << 16):
            self.said += heard
        os.close(self.pipe)
        return os.waitpid(self.pid, 0)[1]


def _study(photos: Path, out: Path, pipe: int, stop: int | None) -> None:
    class Telling(Journal):
        """The journal, which tells when it writes."""

        count = 0

        def add(self, rows: list[Row]) -> int:
            os.write(pipe, WRITE)
            added = super().add(rows)
            os.write(pipe, WRITTEN)
            self.count += 1
            if self.count == stop:
                signal.pause()
            return added

    output.Journal = Telling
    model = tiny.model()
    os.write(pipe, BEGIN)
    run.evaluate(model, photos, METHODS, protocol="both", points=3, seeds=1, out=out, batch_size=2)


def _rows(folder: Path) -> int:
    """The rows of a study; in a copy, for what a kill left behind is the next child's to mend."""
    with tempfile.TemporaryDirectory() as copy:
        for file in folder.glob("journal.sqlite*"):
            shutil.copy(file, copy)
        with Journal(Path(copy) / "journal.sqlite") as journal:
            return len(journal)


def main(photos: Path, whole: Path, broken: Path, wanted: int) -> None:
    """Runs it once whole, then kills it and leaves it to finish."""
    child, times = Child(photos, whole), {WRITE: list[float](), WRITTEN: list[float]()}
    while child.wait(WRITE):
        times[WRITE].append(time.monotonic())
        child.wait(WRITTEN)
        times[WRITTEN].append(time.monotonic())
    assert child.end() == 0
    writes = len(times[WRITE])
    each = _rows(whole) // writes
    between = median(b - a for a, b in zip(times[WRITTEN], times[WRITE][1:], strict=False))
    within = median(b - a for a, b in zip(times[WRITE], times[WRITTEN], strict=True))

    draw = random.Random(0)
    kills = writing = 0
    for attempt in range(1, wanted + 1):
        # In even steps through all writes: while the one is written that is due now, or on the way from it to the next.
        due = round(attempt * (writes - 4) / wanted) - _rows(broken) // each
        child = Child(photos, broken, stop=max(1, due) + 2)
        child.wait(BEGIN)
        if draw.random() < 0.5:
            child.wait(WRITE, max(1, due))
            time.sleep(draw.uniform(0, within / 2))
        else:
            child.wait(WRITTEN, max(0, due))
            time.sleep(draw.uniform(0, between))
        ended = child.kill()
        kills += ended
        writing += ended and child.said.endswith(WRITE)
    assert _rows(broken) < _rows(whole)
    assert Child(photos, broken).end() == 0
    print(json.dumps({"kills": kills, "writing": writing, "writes": writes}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*map(Path, sys.argv[1:4]), int(sys.argv[4]))
