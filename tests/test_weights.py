"""Weights files of every kind, read without running their code."""

import argparse
import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from server import PAYLOAD, TENSORS, torch_file

from relprop import RelpropError, weights


@pytest.mark.parametrize(
    "wrap",
    [
        lambda t: t,
        lambda t: {"state_dict": t, "epoch": 3},
        lambda t: {"model": t, "optimizer": {"state": {}, "lr": 0.1}},
        lambda t: {"model_state_dict": t},
        lambda t: {"model": {"state_dict": t}},
        lambda t: {f"module.{name}": tensor for name, tensor in t.items()},
        lambda t: {"state_dict": {f"model.{name}": tensor for name, tensor in t.items()}},
        lambda t: {f"module._orig_mod.{name}": tensor for name, tensor in t.items()},
    ],
)
def test_wrappings_are_taken_off(tmp_path: Path, wrap: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    torch.save(wrap(TENSORS), tmp_path / "x.pth")
    read = weights.read(tmp_path / "x.pth")
    assert set(read.tensors) == set(TENSORS)
    assert all(torch.equal(read.tensors[name], TENSORS[name]) for name in TENSORS)
    assert read.about == {}


def test_safetensors_are_read(tmp_path: Path) -> None:
    save_file({f"module.{name}": tensor for name, tensor in TENSORS.items()}, tmp_path / "x.safetensors")
    read = weights.read(tmp_path / "x.safetensors")
    assert set(read.tensors) == set(TENSORS)
    assert read.sha256 == hashlib.sha256((tmp_path / "x.safetensors").read_bytes()).hexdigest()


class Malicious:
    """Unpickled, it runs code that leaves a trace."""

    def __init__(self, sentinel: Path) -> None:
        self.sentinel = str(sentinel)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.sentinel,)


@pytest.mark.parametrize("name", ["zip.pt", "legacy.pth", "bare.pkl"])
def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path, name: str) -> None:
    path, sentinel = tmp_path / name, tmp_path / "sentinel"
    content = {"state_dict": TENSORS, "extra": Malicious(sentinel)}
    if name == "bare.pkl":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=name == "zip.pt")
    with pytest.raises(RelpropError, match=r"is refused, for it holds .* could run code; save only the tensors"):
        weights.read(path)
    assert not sentinel.exists()
    # And it would have: a reader that takes everything runs it.
    pickle.loads(path.read_bytes()) if name == "bare.pkl" else torch.load(path, weights_only=False)
    assert sentinel.exists()


@pytest.mark.parametrize("content", [{"args": argparse.Namespace(lr=1)}, torch.nn.Linear(2, 2)])
def test_objects_beside_the_tensors_are_refused(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(
        RelpropError, match=r"holds objects such as (argparse.Namespace|torch.nn.modules.linear.Linear)"
    ):
        weights.read(tmp_path / "x.pt")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit is on its way out; files of it are about
def test_torchscript_is_refused(tmp_path: Path) -> None:
    torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / "x.pt")
    with pytest.raises(RelpropError, match="is refused"):
        weights.read(tmp_path / "x.pt")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("empty.pt", b"", "is empty"),
        ("text.pt", b"not weights at all", "is no weights file; relprop reads .safetensors"),
        ("picture.pth", b"\x89PNG\r\n\x1a\n" + bytes(100), "is no weights file|is refused"),
        ("cut.pt", PAYLOAD[: len(PAYLOAD) // 2], "is cut short or damaged"),
        ("start.pt", PAYLOAD[:10], "is cut short or damaged"),
        ("pickle.pt", b"\x80\x02", "is cut short or damaged|is refused"),
        ("empty.safetensors", b"", "is cut short or no safetensors file"),
        ("text.safetensors", b"not weights at all", "is cut short or no safetensors file"),
        ("numbers.pt", torch_file([1, 2, 3]), "holds no tensors by name"),
        ("nothing.pt", torch_file({"state_dict": {}}), "holds no tensors by name"),
    ],
)
def test_what_is_no_checkpoint_is_named(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RelpropError, match=says) as caught:
        weights.read(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_safetensors_file_that_is_cut_short_is_named(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "x.safetensors")
    os.truncate(tmp_path / "x.safetensors", 1000)
    with pytest.raises(RelpropError, match="is cut short"):
        weights.read(tmp_path / "x.safetensors")


def test_a_missing_checkpoint_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(RelpropError, match=r"There is no weights file .*gone\.pt"):
        weights.read(tmp_path / "gone.pt")
    with pytest.raises(RelpropError, match="cannot be read: Is a directory"):
        weights.read(tmp_path)
