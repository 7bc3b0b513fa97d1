"""Trainings that are killed, for test_training.py: ``python kill_training.py PHOTOS FOLDER``.

As kills.py does, this process imports torch once and forks a child for every attempt. A child stops at a moment that it
was told, in the middle of an epoch, or with half of a checkpoint or of its features written, and is killed there with
SIGKILL. For either part, FOLDER/PART/whole is trained without any kill, and FOLDER/PART/broken is killed at every one
of these moments and then left to finish. On stdout: how many children were killed.
"""

import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import tiny
import torch

from relprop import training
from relprop.training import checkpoint, features

MOMENTS = {
    "all": [("step", 1), ("step", 5), ("half", 1), ("step", 4), ("half", 3), ("half", 1), ("step", 4)],
    "head": [("row", 1), ("row", 1), ("row", 2), ("step", 5), ("half", 2), ("step", 7)],
}
"""What is counted from the start of a child, and at which count it stops."""


def train(photos: Path, out: Path, part: str, pipe: int | None = None, moment: tuple[str, int] = ("", 0)) -> None:
    """Trains, up to a moment at which it says so and waits to be killed."""
    kind, left = moment

    def now(what: str) -> bool:
        nonlocal left
        left -= what == kind
        return what == kind and not left

    def stop() -> None:
        assert pipe is not None
        os.write(pipe, b"!")
        signal.pause()

    def tick(_: int, __: int, what: str) -> None:
        if now("row" if what.startswith("features") else "step" if "epoch" in what else "test"):
            stop()

    save = checkpoint.save

    def half(fabric: Any, path: Path, state: dict[str, Any]) -> None:
        if now("half"):
            save(fabric, path.with_name("other.pt"), state)
            data = path.with_name("other.pt").read_bytes()
            path.with_suffix(".partial").write_bytes(data[: len(data) // 2])
            stop()
        save(fabric, path, state)

    checkpoint.save = half
    features._EVERY, features._BATCH = 0.0, 16
    recipe = training.Recipe(lr=0.02, batch_size=8, epochs=6, step=2)
    training.Training(
        tiny.model(),
        lambda seed: training.open_folder(photos, seed),
        out,
        training.devices("cpu"),
        recipe,
        part,
        tick=tick,
    )(3)


def killed(photos: Path, out: Path, part: str, moment: tuple[str, int]) -> bool:
    """Whether a child was killed at its moment."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            train(photos, out, part, write, moment)
        except BaseException:  # nothing may get out of a fork into what the parent was about to do
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(write)
    there = os.read(read, 1) == b"!"
    os.close(read)
    if there:
        os.kill(pid, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1]) and there


def main(photos: Path, folder: Path) -> None:
    """Kills trainings at every moment, and lets them finish."""
    kills = {}
    for part, moments in MOMENTS.items():
        broken, whole = folder / part / "broken", folder / part / "whole"
        kills[part] = sum(killed(photos, broken, part, moment) for moment in moments)
        train(photos, broken, part)
        train(photos, whole, part)
    print(json.dumps(kills))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
