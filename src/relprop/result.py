"""The result of an explanation: relevance and all that vouches for it, in memory and on disk."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from io import BytesIO
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from relprop.errors import RelpropError
from relprop.forms import mapped
from relprop.heatmap import Edges, Picture, heat_quantization, save_png
from relprop.ledger import Ledger

__all__ = ["Explanation", "Images"]

Images: TypeAlias = Sequence[Picture] | npt.NDArray[np.uint8] | Tensor
"""One image a sample: a list of them, a uint8 array (B, H, W, 3) or a float tensor (B, 3, H, W) in 0..1."""

_FORMAT = "relprop.explanation"
_VERSION = 1
_MANIFEST = "manifest.json"
_ARRAYS = ("relevance", "target", "start", "output")


@dataclass(frozen=True, eq=False, repr=False)
class Explanation:
    """What `explain` returns, for a batch of B samples with one target each, or with T.

    Attributes:
        relevance: like the input, (B, C, *spatial) or (B, features); with T targets (B, T, C, *spatial). For a tuple or
            a dict of inputs, a tuple or a dict of such tensors.
        target: the explained classes, (B,) or (B, T).
        start: the relevance that each target started with, shaped like ``target``.
        output: the model's own output, (B, classes), or that of the layer that relevance started at.
        ledger: where the relevance went, node by node.
        layers: relevance arriving at a module's input, by qualified name and call.
        settings: how it was made, in JSON types.
    """

    relevance: Any
    target: Tensor
    start: Tensor
    output: Tensor
    ledger: Ledger
    layers: Mapping[tuple[str, int], Tensor] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        batch = self.target.shape
        shapes: list[tuple[int, ...]] = []
        mapped(self.relevance, lambda _, r: shapes.append(tuple(r.shape)))
        single = isinstance(self.relevance, Tensor)
        fits = shapes and all(shape[: len(batch)] == batch and len(shape) >= len(batch) + single for shape in shapes)
        if len(batch) not in (1, 2) or not fits or self.start.shape != batch or self.output.shape[:1] != batch[:1]:
            raise RelpropError(
                f"An explanation of targets {tuple(batch)} needs relevance {(*batch, '...')}, start {tuple(batch)} and "
                f"output {(*batch[:1], '...')}, not {', '.join(map(str, shapes))}, {tuple(self.start.shape)} and "
                f"{tuple(self.output.shape)}."
            )

    def __repr__(self) -> str:
        layers = ", ".join(_call(*key) for key in self.layers) or "none"
        shapes = mapped(self.relevance, lambda _, r: tuple(r.shape))
        return (
            f"Explanation(relevance {shapes}, target {self.target.tolist()}, "
            f"error {float(self.ledger.error.max()):.1e}, layers {layers})"
        )

    @property
    def heatmap(self) -> Any:
        """Relevance summed over the channels, (B, *spatial) or (B, T, *spatial); features have none and stay as are."""
        channels = self.target.dim()
        return mapped(self.relevance, lambda _, r: r.sum(channels) if r.dim() > channels + 1 else r)

    def quantized(self, levels: int = 8, edges: Edges = "paper") -> Any:
        """Heat Quantization of each heatmap, as in `relprop.heat_quantization`.

        Raises:
            RelpropError: ``levels`` or ``edges`` is not one that there is.
        """
        before = self.target.dim()
        return mapped(self.heatmap, lambda _, map_: heat_quantization(map_, levels, edges, dims=map_.dim() - before))

    def relevance_at(self, name: str, call: int = 0) -> Tensor:
        """The relevance that arrived at a module's input.

        Args:
            name: the module's qualified name.
            call: which call, for a module that is used more than once.

        Raises:
            RelpropError: the relevance of that module or call was not kept.
        """
        if (name, call) not in self.layers:
            there = ", ".join(_call(*key) for key in self.layers) or "none"
            raise RelpropError(
                f"The relevance at {_call(name, call)} was not kept (kept: {there}); "
                f'ask for it with explain(..., layers=["{name}"]).'
            )
        return self.layers[name, call]

    def save(
        self,
        folder: str | os.PathLike[str],
        images: Images | None = None,
        quantize: bool = True,
        colorbar: bool = False,
    ) -> list[Path]:
        """Writes arrays, pictures and a manifest into a folder, all of them or none.

        ``relevance.npy``, ``target.npy``, ``start.npy``, ``output.npy``, one ``layer-000-NAME.npy`` for each kept
        layer, ``heatmap-000.png`` and ``heatmap-000-quantized.png`` for each sample (``heatmap-000-t00.png`` for each
        of several targets), ``overlay-000.png`` where there are images, and ``manifest.json`` with settings, ledger
        and the SHA-256 of every file. Maps of volumes have no picture, nor have those of several inputs, whose
        relevance is in one ``relevance-000-NAME.npy`` each.

        An earlier save in the same folder is replaced; files that are not from `save` are left alone.

        Args:
            folder: where to; made if it is missing.
            images: one image a sample to lay the heatmaps over, as `relprop.heatmap.overlay` takes them.
            quantize: paint the quantized maps too.
            colorbar: add colour bars to the pictures.

        Returns:
            The files written, the manifest last.

        Raises:
            RelpropError: the folder is a file, an image does not fit, the settings are not JSON types, or the maps
                cannot be painted.
        """
        folder = Path(folder)
        if folder.exists() and not folder.is_dir():
            raise RelpropError(f"{folder} is a file; save needs a folder.")
        count = len(images) if isinstance(images, Sequence | np.ndarray | Tensor) else 0
        if images is not None and count != len(self.target):
            given = f"{count}" if count else f"one {type(images).__name__}"
            raise RelpropError(f"images is a list with one a sample, {len(self.target)} here, not {given}.")
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RelpropError(f"The folder {folder} cannot be made: {error.strerror}.") from None
        # Renaming is only atomic within a file system, and an existing folder may be a mount: then stage inside it.
        staging = (folder if folder.is_dir() else folder.parent) / f".{folder.name}.{uuid.uuid4().hex}.tmp"
        try:
            staging.mkdir()
            names = [*self._write_arrays(staging), *self._write_pictures(staging, images, quantize, colorbar)]
            (staging / _MANIFEST).write_text(self._manifest(staging, names), encoding="utf-8")
            names.append(_MANIFEST)
            _move_in(staging, folder, names)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        return [folder / name for name in names]

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Explanation:
        """Reads what `save` wrote, bit for bit, onto the CPU; nothing is unpickled.

        The arrays are checked against the manifest's SHA-256. The pictures are not read and may be missing.

        Raises:
            RelpropError: a file is missing, was changed, or is from another version.
        """
        folder = Path(folder)
        manifest = _read_manifest(folder)
        try:
            tensors = {entry["file"]: _read_array(folder, entry, manifest["files"]) for entry in manifest["arrays"]}
            layers = {
                (entry["layer"], entry["call"]): tensors[entry["file"]]
                for entry in manifest["arrays"]
                if "layer" in entry
            }
            arrays = {name: tensors[f"{name}.npy"] for name in _ARRAYS if name != "relevance"}
            arrays["relevance"] = _filled(manifest.get("relevance", "relevance.npy"), tensors)
            ledger = Ledger.from_dict(manifest["ledger"])
            return cls(**arrays, ledger=ledger, layers=layers, settings=manifest["settings"])
        except RelpropError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RelpropError(f"{folder / _MANIFEST} is damaged: {error!r}; save the explanation again.") from error

    def _arrays(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        """Every tensor, with its entry in the manifest."""
        named: list[tuple[dict[str, Any], Tensor]] = []
        files = iter(self._relevance_files())
        mapped(self.relevance, lambda _, r: named.append(({"file": next(files)}, r)))
        named += [({"file": f"{n}.npy"}, getattr(self, n)) for n in _ARRAYS if n != "relevance"]
        for index, ((name, call), tensor) in enumerate(self.layers.items()):
            named.append(({"file": _file("layer", index, name), "layer": name, "call": call}, tensor))
        for entry, tensor in named:
            yield {**entry, "shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}, tensor

    def _relevance_files(self) -> list[str]:
        names: list[str] = []
        mapped(self.relevance, lambda name, _: names.append(name))
        return [_file("relevance", index, name) if name else "relevance.npy" for index, name in enumerate(names)]

    def _write_arrays(self, folder: Path) -> Iterator[str]:
        for entry, tensor in self._arrays():
            values = tensor.detach().cpu()
            # numpy has no bfloat16; float32 holds its values exactly and the manifest remembers the dtype.
            array = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
            np.save(folder / entry["file"], array, allow_pickle=False)
            yield entry["file"]

    def _write_pictures(self, folder: Path, images: Images | None, quantize: bool, colorbar: bool) -> Iterator[str]:
        heatmap, batch = self.heatmap, self.target.dim()
        if not isinstance(heatmap, Tensor) or heatmap.dim() - batch > 2:
            if images is not None:
                what = "volumes" if isinstance(heatmap, Tensor) else "several inputs"
                raise RelpropError(f"Maps of {what} cannot be laid over images; save without images.")
            return
        quantized = self.quantized() if quantize else None
        for index in np.ndindex(*self.target.shape):
            label = f"{index[0]:03d}" + "".join(f"-t{position:02d}" for position in index[1:])
            yield save_png(heatmap[index], folder / f"heatmap-{label}.png", colorbar=colorbar).name
            if quantized is not None:
                yield save_png(quantized[index], folder / f"heatmap-{label}-quantized.png", colorbar=colorbar).name
            if images is not None:
                yield save_png(heatmap[index], folder / f"overlay-{label}.png", images[index[0]], colorbar).name

    def _manifest(self, folder: Path, names: Sequence[str]) -> str:
        files = iter(self._relevance_files())
        manifest = {
            "format": _FORMAT,
            "version": _VERSION,
            "relprop": _relprop_version(),
            "torch": str(torch.__version__),
            "settings": dict(self.settings),
            "relevance": mapped(self.relevance, lambda *_: next(files)),
            "arrays": [entry for entry, _ in self._arrays()],
            "ledger": self.ledger.to_dict(),
            "files": {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names},
        }
        try:
            # A line for each key: a person finds the settings, and the ledger does not fill a thousand lines.
            lines = [f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in manifest.items()]
        except (TypeError, ValueError) as error:
            raise RelpropError(f"The manifest takes finite numbers and JSON types only: {error}.") from error
        return "{\n" + ",\n".join(lines) + "\n}\n"


def _file(kind: str, index: int, name: str) -> str:
    """The name is there for people; the index keeps files apart whose names differ in what is replaced."""
    return f"{kind}-{index:03d}-{re.sub(r'[^A-Za-z0-9_.-]', '_', name)[:100]}.npy"


def _filled(files: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The arrays of several inputs in their form, which the manifest tells."""
    if isinstance(files, Mapping):
        return {key: _filled(file, tensors) for key, file in files.items()}
    if isinstance(files, list):
        return tuple(_filled(file, tensors) for file in files)
    return None if files is None else tensors[files]


def _call(name: str, call: int) -> str:
    return f"{name!r}" if call == 0 else f"{name!r} call {call}"


def _relprop_version() -> str:
    try:
        return metadata.version("relprop")
    except metadata.PackageNotFoundError:  # run from a source tree that was never installed
        return "unknown"


def _move_in(staging: Path, folder: Path, names: Sequence[str]) -> None:
    """Moves finished files into their folder in place of those of an earlier save; on failure puts those back."""
    if not folder.exists():
        staging.rename(folder)
        return
    attic = staging / "replaced"
    attic.mkdir()
    done: list[tuple[Path, Path]] = []

    def move(source: Path, to: Path) -> None:
        source.rename(to)
        done.append((source, to))

    try:
        for name in dict.fromkeys([*_files_of_save(folder), *names]):
            if (folder / name).is_file():
                move(folder / name, attic / name)
        for name in names:
            move(staging / name, folder / name)
    except BaseException:
        for source, to in reversed(done):
            to.rename(source)
        raise


def _files_of_save(folder: Path) -> list[str]:
    """The files of an earlier save, by its manifest; none if that cannot be read, for then they may be anyone's."""
    try:
        names = [str(name) for name in _read_manifest(folder)["files"]]
    except (RelpropError, TypeError):
        return []
    return [name for name in names if Path(name).name == name]  # a manifest has no say outside its folder


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / _MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise RelpropError(f"{folder} holds no saved explanation: there is no {_MANIFEST}.") from error
    except ValueError as error:
        raise RelpropError(f"{path} is damaged: {error}; save the explanation again.") from error
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise RelpropError(f"{path} is not the manifest of a saved explanation.")
    if manifest.get("version") != _VERSION:
        raise RelpropError(
            f"{path} has format version {manifest.get('version')!r} and this relprop reads {_VERSION}; "
            f"load it with relprop {manifest.get('relprop')}."
        )
    if not isinstance(manifest.get("files"), dict):
        raise RelpropError(f"{path} is damaged: it lists no files; save the explanation again.")
    return manifest


def _read_array(folder: Path, entry: Mapping[str, Any], hashes: Mapping[str, str]) -> Tensor:
    """One array, from the very bytes whose hash was checked."""
    name = entry["file"]
    if Path(name).name != name:
        raise RelpropError(f"{folder / _MANIFEST} names {name!r}, which is outside its folder.")
    try:
        data = (folder / name).read_bytes()
    except FileNotFoundError as error:
        raise RelpropError(f"{folder / name} is missing; save the explanation again.") from error
    if hashlib.sha256(data).hexdigest() != hashes[name]:
        raise RelpropError(f"{folder / name} was changed since it was saved: its SHA-256 is not the manifest's.")
    try:
        array = np.load(BytesIO(data), allow_pickle=False)
    except ValueError as error:
        raise RelpropError(f"{folder / name} is not a plain numpy array: {error}.") from error
    tensor = torch.from_numpy(array)
    return tensor.to(getattr(torch, entry["dtype"]))
