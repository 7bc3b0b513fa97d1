"""The catalogue: how each library's models are built and filled with weights."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from relprop import cache, classes, keras, lite, weights
from relprop.compat import import_torchvision
from relprop.errors import RelpropError
from relprop.fetching import UnavailableError, download, probe
from relprop.preparation import Normalization, Preparation
from relprop.sources import PORTS, SEED, Request, Source, chosen, fill, outputs_of

FROM_TIMM = {"efficientnet_lite0": lite.PORT.architecture}
"""Names that go without ``timm:``, and what timm calls these."""
_RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
NAMES = (
    *_RESNETS,
    *("resnext50_32x4d", "resnext101_32x8d", "resnext101_64x4d", "wide_resnet50_2", "wide_resnet101_2"),
    *("vgg11", "vgg13", "vgg16", "vgg19", "vgg11_bn", "vgg13_bn", "vgg16_bn", "vgg19_bn", "alexnet"),
    *FROM_TIMM,
)
_HUB_FILE = "model.safetensors"
CLASSES, PREPARATION = "classes", "preparation"
"""What a weights file may tell besides its source."""
IMAGENET = 1000


class Made(NamedTuple):
    """A network with its weights in it; `assumed`, that its classes are ImageNet's is a guess.

    `classes` are the names that came with the weights, if any did.
    """

    module: nn.Module
    source: Source
    preparation: Preparation
    outputs: int
    assumed: bool = False
    classes: tuple[str, ...] | None = None


def labels(name: str) -> list[str]:
    """The names of the weights that can be had for one of `NAMES`."""
    entries = [] if name in FROM_TIMM else list(_entries(name))
    return [*entries, PORTS[name].weights] if name in PORTS else entries


def cached(name: str) -> list[str]:
    """Those of them that are in the cache."""
    return [label for label in labels(name) if cache.holds(f"{name}-{label}")]


# -- torchvision --


def from_torchvision(request: Request) -> Made:
    """Builds one of torchvision's models.

    Raises:
        RelpropError: There is no such model, or its weights cannot be had.
    """
    models = torchvision().models
    known = models.list_models(module=models)
    name = request.bare.lower()
    kind = "torchvision:" if ":" in request.name else ""
    if name not in (known if kind else NAMES):
        hint = (
            f"; it goes by torchvision:{name}"
            if name in known
            else classes.nearest(name, known if kind else NAMES, kind)
        )
        raise RelpropError(f"There is no model {request.name!r}{hint}.")
    entries = _entries(name)
    variant = f"{name} v1.5" if name in _RESNETS[2:] else name
    makers = {label: _published(entry, label, variant, request) for label, entry in entries.items()}
    first = "imagenet1k_v1" if "imagenet1k_v1" in makers else next(iter(makers))
    file = chosen(request, name, makers, (first,))
    about = file.about if file else {}
    entry = entries.get(about.get("weights", "")) or entries.get("imagenet1k_v1") or next(iter(entries.values()))

    def build(outputs: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            module: nn.Module = models.get_model(name, weights=None, num_classes=outputs, **_quirks(name, entry))
        return module

    if file is None:
        outputs = len(request.classes) if request.classes else IMAGENET
        source = Source.random(variant)
        return Made(build(outputs), source, _preparation(entry), outputs)
    module = build(IMAGENET)
    outputs = outputs_of(module, file)
    if outputs != IMAGENET:
        module = build(outputs)
    fill(module, file, name)
    if about.get("architecture") == keras.PORT.architecture:
        for layer in (module.layer2, module.layer3, module.layer4):
            block: Any = layer[0]  # type: ignore[index] # torch types any child as a tensor or a module
            block.conv1.stride, block.conv2.stride = block.conv2.stride, block.conv1.stride
        preparation = keras.PORT.preparation
    else:
        preparation = _preparation(entry)
    return _with_what_came_along(Made(module, Source.of(file, variant), preparation, outputs, assumed=not about), about)


def _with_what_came_along(made: Made, about: Mapping[str, str]) -> Made:
    """What weights that were trained here tell of themselves: the names of their classes, and how they want images."""
    names, wants = about.get(CLASSES), about.get(PREPARATION)
    try:
        return made._replace(
            classes=tuple(map(str, json.loads(names))) if names else None,
            preparation=Preparation.read(wants) if wants else made.preparation,
        )
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise RelpropError(
            f"The weights {made.source.weights} say of their classes or images what relprop never writes; save their "
            "tensors alone."
        ) from error


def _entries(name: str) -> dict[str, Any]:
    # Some are for other tasks, such as the bare features of vgg16; those have no classes.
    entries = torchvision().models.get_model_weights(name)
    return {entry.name.lower(): entry for entry in entries if entry.meta.get("categories")}


def _published(entry: Any, label: str, variant: str, request: Request) -> Callable[[Path], cache.Made]:
    """How to get weights from torchvision's server, whose file names end in the beginning of their hashes."""

    def make(work: Path) -> cache.Made:
        request.report(f"Fetching {label} weights from {entry.url}.")
        expected = re.findall(r"-([0-9a-f]{8,})\.", entry.url)[-1]
        sha256 = download(entry.url, work / "fetched.pth", sha256=expected, progress=request.progress)
        about = {
            "architecture": variant,
            "licence": entry.meta.get("license", "BSD-3-Clause"),
            "origin": entry.url,
            "origin_sha256": sha256,
            "weights": label,
        }
        # The published densenets have names from before dots in module names were forbidden.
        old = re.compile(r"(denselayer\d+\.(?:norm|relu|conv))\.([12]\.)")
        tensors = weights.read(work / "fetched.pth").tensors
        return {old.sub(r"\1\2", key): tensor for key, tensor in tensors.items()}, about

    return make


def _quirks(name: str, entry: Any) -> dict[str, Any]:
    """What torchvision's builders set when they load weights themselves, and without which those are silently wrong."""
    if name in ("googlenet", "inception_v3"):
        return {"transform_input": True, "init_weights": False}
    return {"image_size": entry.meta["min_size"][0]} if name.startswith("vit_") else {}


def _preparation(entry: Any) -> Preparation:
    as_published = entry.transforms()
    return Preparation(
        as_published.resize_size[0],
        as_published.crop_size[0],
        as_published.interpolation.value,
        Normalization(tuple(as_published.mean), tuple(as_published.std)),
    )


def torchvision() -> Any:
    """torchvision, made to work where its compiled part does not match.

    Raises:
        RelpropError: It is not installed.
    """
    try:
        return import_torchvision()
    except ImportError as error:
        raise RelpropError("Models by name need torchvision; install it with pip install 'relprop[vision]'.") from error


# -- timm --


def from_timm(request: Request) -> Made:
    """Builds one of timm's models.

    Raises:
        RelpropError: There is no timm, no such model, or its weights cannot be had.
    """
    try:
        torchvision()  # first, for timm imports it too
        timm = importlib.import_module("timm")
    except ImportError as error:
        raise RelpropError(f"{request.name} needs timm; install it with pip install 'relprop[timm]'.") from error
    if not timm.is_model(request.bare):
        raise RelpropError(
            f"There is no model {request.name!r}{classes.nearest(request.bare, timm.list_models(), 'timm:')}."
        )

    def build(**options: Any) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            module: nn.Module = timm.create_model(request.bare, **options)
        return module

    file = None
    if request.weights.lower() == "auto" and ":" in request.name:
        module, source = _timm_pretrained(request, build)
    elif file := chosen(request, request.name.lower(), {}):
        meant = file.about.get("architecture", request.bare)
        if meant != request.bare:  # which may have the same shapes
            raise RelpropError(f"{file.path} holds the weights of {meant}, and {request.name} is not that.")
        module = build(num_classes=outputs_of(build(), file))
        fill(module, file, request.name)
        source = Source.of(file, request.bare)
    else:
        module = build(**({"num_classes": len(request.classes)} if request.classes else {}))
        source = Source.random(request.bare)
    if file and file.about.get("weights") == lite.PORT.weights:
        preparation = lite.PORT.preparation
    else:
        wants = timm.data.resolve_data_config({}, model=module)
        size = wants["input_size"][-1]
        colours = Normalization(tuple(wants["mean"]), tuple(wants["std"]))
        preparation = Preparation(int(size / wants["crop_pct"]), size, wants["interpolation"], colours)
    outputs: Any = module.num_classes  # a number, which torch's types do not know
    made = Made(module, source, preparation, outputs, assumed=file is not None and not file.about)
    return _with_what_came_along(made, file.about if file else {})


def _timm_pretrained(request: Request, build: Callable[..., nn.Module]) -> tuple[nn.Module, Source]:
    """Weights from timm's hub, through the hub's own client and its cache."""
    hub = importlib.import_module("huggingface_hub")
    try:
        about: Any = build().pretrained_cfg
        origin = about.get("hf_hub_id")
        if not origin:
            raise UnavailableError("timm's hub has none")
        path = hub.try_to_load_from_cache(origin, _HUB_FILE)
        if not isinstance(path, str):
            request.report(f"Fetching the weights of {request.name} from the hub, {origin}.")
            probe(hub.constants.ENDPOINT)
            path = hub.hf_hub_download(origin, _HUB_FILE)
        file = weights.read(path)
        module = build(pretrained=True, pretrained_cfg_overlay={"file": path})
    except Exception as error:  # whichever way the client fails
        reason = str(error).partition("\n")[0].strip("'.") or repr(error)
        raise UnavailableError(
            f"The weights of {request.name} cannot be had ({reason}); connect to a network, or pass the path of a "
            "checkpoint or 'random'."
        ) from error
    tag, licence = about.get("tag") or "timm", about.get("license") or "not stated"
    return module, Source(tag, origin, file.sha256, licence, request.bare)
