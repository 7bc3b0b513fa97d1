"""Weights files: read without running code."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from relprop.errors import RelpropError
from relprop.quiet import quietly

__all__ = ["WeightsFile", "fingerprint", "read", "serialised", "sha256_of"]

_WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "net")
_PREFIXES = ("module.", "model.", "_orig_mod.")


@dataclass(frozen=True)
class WeightsFile:
    """A weights file that was read.

    Attributes:
        path: Where it lies.
        sha256: Of the whole file.
        about: What is known of it, such as where it came from; empty for a file that relprop did not write.
        tensors: Its tensors, by name.
    """

    path: Path
    sha256: str
    about: Mapping[str, str]
    tensors: Mapping[str, Tensor] = field(repr=False)


def read(path: str | os.PathLike[str]) -> WeightsFile:
    """Reads a ``.safetensors`` file, or a torch file as far as it is nothing but tensors.

    Wrappings are taken off: ``state_dict``, ``model`` and the like around the tensors, ``module.`` and the like in
    front of all names.

    Raises:
        RelpropError: There is no such file, it is damaged or no weights file, or reading it could run code.
    """
    path = Path(path)
    try:
        sha256 = sha256_of(path)
        content, about = _safetensors(path) if path.suffix == ".safetensors" else (_torch(path), {})
    except FileNotFoundError as error:
        raise RelpropError(f"There is no weights file {path}.") from error
    except OSError as error:
        raise RelpropError(f"The weights file {path} cannot be read: {error.strerror or error}.") from error
    tensors = _unwrapped(content)
    if not tensors:
        raise RelpropError(
            f"{path} holds no tensors by name; save a model's with torch.save(model.state_dict(), path)."
        )
    return WeightsFile(path, sha256, about, tensors)


def serialised(tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> bytes:
    """A ``.safetensors`` file, the same bytes for the same content."""
    # One entry of metadata, for safetensors writes several in any order and the hash would be another every time.
    plain = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    data: bytes = _library().save(plain, metadata={"relprop": json.dumps(dict(about), sort_keys=True)})
    return data


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def fingerprint(module: nn.Module) -> str:
    """A hash of all weights of a module."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _library() -> Any:
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise RelpropError("Weights files need safetensors; install it with pip install 'relprop[vision]'.") from error


def _safetensors(path: Path) -> tuple[dict[str, Tensor], Mapping[str, str]]:
    library = _library()
    try:
        with library.safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {}).get("relprop", "{}"))
        tensors = library.load_file(path)
    except OSError:
        raise
    except Exception as error:  # the library's own kind, which has no other base
        raise RelpropError(f"{path} is cut short or no safetensors file: {error}.") from error
    if not isinstance(about, dict) or not all(isinstance(value, str) for value in about.values()):
        raise RelpropError(f"{path} has metadata of relprop's name that relprop never writes; save its tensors alone.")
    return tensors, about


def _torch(path: Path) -> Any:
    with path.open("rb") as file:
        magic = file.read(2)
    if magic != b"PK" and magic[:1] != b"\x80":
        what = "is empty" if not magic else "is no weights file"
        raise RelpropError(f"{path} {what}; relprop reads .safetensors and what torch.save writes.")
    try:
        with quietly():  # what torch would warn of is refused just below
            return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        text = str(error)
        if isinstance(error, RuntimeError) and "weights_only" not in text:  # TorchScript is a RuntimeError that does
            raise RelpropError(f"{path} is cut short or damaged: {text.splitlines()[0]}") from error
        found = re.search(r"GLOBAL (\S+)", text)
        what = f"objects such as {found[1]}" if found else "more than tensors"
        raise RelpropError(
            f"{path} is refused, for it holds {what} and reading those could run code; save only the tensors, with "
            "torch.save(model.state_dict(), path)."
        ) from error
    except OSError:
        raise
    except Exception as error:  # damaged pickles end in errors of any kind
        raise RelpropError(f"{path} is cut short or damaged: {error!r}.") from error


def _unwrapped(content: Any) -> dict[str, Tensor]:
    while isinstance(content, Mapping):
        inner = next((content[name] for name in _WRAPPERS if isinstance(content.get(name), Mapping)), None)
        if inner is None:
            break
        content = inner
    if not isinstance(content, Mapping):
        return {}
    tensors = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
    while tensors:
        prefix = next((p for p in _PREFIXES if all(name.startswith(p) for name in tensors)), None)
        if prefix is None:
            break
        tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return tensors
