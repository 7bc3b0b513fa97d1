"""Quiet in several threads at once."""

import threading
import warnings
from pathlib import Path

import pytest
import tiny
import torch

from relprop import images
from relprop.metrics.scorer import Scorer
from relprop.quiet import quietly


def test_one_that_leaves_does_not_end_the_quiet_of_another() -> None:
    entered, leave = threading.Event(), threading.Event()

    def first() -> None:
        with quietly():
            entered.set()
            leave.wait(10)

    before = list(warnings.filters)
    thread = threading.Thread(target=first)
    thread.start()
    assert entered.wait(10)
    with quietly():
        leave.set()
        thread.join()
        warnings.warn("a remark", stacklevel=1)  # the tests make errors of them
    assert list(warnings.filters) == before
    with pytest.raises(UserWarning, match="a remark"):
        warnings.warn("a remark", stacklevel=1)


def test_quiet_ends_with_an_error_too() -> None:
    before = list(warnings.filters)
    with pytest.raises(KeyError), quietly(), quietly():
        raise KeyError
    assert list(warnings.filters) == before


def test_an_engine_is_the_same_while_images_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image that was begun before, and is done in the midst of the building."""
    photo = next(tiny.photos(tmp_path / "some", 1).rglob("*.png"))
    model, trace = tiny.model(), torch.jit.trace
    entered, leave = threading.Event(), threading.Event()

    def rgb(*_: object) -> None:
        entered.set()
        leave.wait(10)

    monkeypatch.setattr(images, "rgb", rgb)
    thread = threading.Thread(target=images.read, args=(photo,))

    def tracing(*args: object, **options: object) -> object:
        leave.set()
        thread.join()
        return trace(*args, **options)

    monkeypatch.setattr(torch.jit, "trace", tracing)
    thread.start()
    assert entered.wait(10)
    side = model.preparation.crop
    assert Scorer(model, torch.zeros(4, 3, side, side), engine="steady").engine == "frozen"
    assert not thread.is_alive()
