"""The catalogue: how each library's models are built and filled with weights."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from relprop import cache, classes, keras, lite, weights
from relprop.cache import Made as Tensors
from relprop.compat import import_torchvision
from relprop.errors import RelpropError
from relprop.fetching import Progress, Report, UnavailableError, download, probe
from relprop.preparation import Normalization, Preparation
from relprop.weights import WeightsFile

PORTS = {"resnet50": keras.PORT, "efficientnet_lite0": lite.PORT}
FROM_TIMM = {"efficientnet_lite0": lite.PORT.architecture}
"""Names that go without ``timm:``, and what timm calls these."""
_RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
NAMES = (
    *_RESNETS,
    *("resnext50_32x4d", "resnext101_32x8d", "resnext101_64x4d", "wide_resnet50_2", "wide_resnet101_2"),
    *("vgg11", "vgg13", "vgg16", "vgg19", "vgg11_bn", "vgg13_bn", "vgg16_bn", "vgg19_bn", "alexnet"),
    *FROM_TIMM,
)
_RANDOM = ("none", "random")
_HUB_FILE = "model.safetensors"
IMAGENET = 1000
_SEED = 0


@dataclass(frozen=True)
class Source:
    """Where a model's weights are from.

    Attributes:
        weights: Their name, such as ``imagenet1k_v1``; for a checkpoint, that of the file.
        origin: Where they came from.
        sha256: Of the weights file that was read; None where there is none, or none that relprop has seen.
        licence: Of the weights.
        architecture: The model, with its variant where there are several.
        origin_sha256: Of the file that was fetched, where the one that was read is a conversion of it.
    """

    weights: str
    origin: str
    sha256: str | None
    licence: str
    architecture: str
    origin_sha256: str | None = None

    def __str__(self) -> str:
        sha256 = f", sha256 {self.sha256[:16]}" if self.sha256 else ""
        return f"{self.architecture}, weights {self.weights} from {self.origin}{sha256}, licence: {self.licence}"


class Request(NamedTuple):
    """What `load` was asked for."""

    name: str
    bare: str
    weights: str
    classes: tuple[str, ...] | None
    report: Report
    progress: Progress


class Made(NamedTuple):
    """A network with its weights in it; `assumed`, that its classes are ImageNet's is a guess."""

    module: nn.Module
    source: Source
    preparation: Preparation
    outputs: int
    assumed: bool = False


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
    file = _chosen(request, name, makers, (first,))
    about = file.about if file else {}
    entry = entries.get(about.get("weights", "")) or entries.get("imagenet1k_v1") or next(iter(entries.values()))

    def build(outputs: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            module: nn.Module = models.get_model(name, weights=None, num_classes=outputs, **_quirks(name, entry))
        return module

    if file is None:
        outputs = len(request.classes) if request.classes else IMAGENET
        source = Source("random", f"seed {_SEED}", None, "none", variant)
        return Made(build(outputs), source, _preparation(entry), outputs)
    module = build(IMAGENET)
    outputs = _outputs(module, file)
    if outputs != IMAGENET:
        module = build(outputs)
    _fill(module, file, name)
    if about.get("architecture") == keras.PORT.architecture:
        for layer in (module.layer2, module.layer3, module.layer4):
            block: Any = layer[0]  # type: ignore[index] # torch types any child as a tensor or a module
            block.conv1.stride, block.conv2.stride = block.conv2.stride, block.conv1.stride
        preparation = keras.PORT.preparation
    else:
        preparation = _preparation(entry)
    return Made(module, _source(file, variant), preparation, outputs, assumed=not about)


def _entries(name: str) -> dict[str, Any]:
    # Some are for other tasks, such as the bare features of vgg16; those have no classes.
    entries = torchvision().models.get_model_weights(name)
    return {entry.name.lower(): entry for entry in entries if entry.meta.get("categories")}


def _published(entry: Any, label: str, variant: str, request: Request) -> Callable[[Path], Tensors]:
    """How to get weights from torchvision's server, whose file names end in the beginning of their hashes."""

    def make(work: Path) -> Tensors:
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
            torch.manual_seed(_SEED)
            module: nn.Module = timm.create_model(request.bare, **options)
        return module

    file = None
    if request.weights.lower() == "auto" and ":" in request.name:
        module, source = _timm_pretrained(request, build)
    elif file := _chosen(request, request.name.lower(), {}):
        meant = file.about.get("architecture", request.bare)
        if meant != request.bare:  # which may have the same shapes
            raise RelpropError(f"{file.path} holds the weights of {meant}, and {request.name} is not that.")
        module = build(num_classes=_outputs(build(), file))
        _fill(module, file, request.name)
        source = _source(file, request.bare)
    else:
        module = build(**({"num_classes": len(request.classes)} if request.classes else {}))
        source = Source("random", f"seed {_SEED}", None, "none", request.bare)
    if file and file.about.get("weights") == lite.PORT.weights:
        preparation = lite.PORT.preparation
    else:
        wants = timm.data.resolve_data_config({}, model=module)
        size = wants["input_size"][-1]
        colours = Normalization(tuple(wants["mean"]), tuple(wants["std"]))
        preparation = Preparation(int(size / wants["crop_pct"]), size, wants["interpolation"], colours)
    outputs: Any = module.num_classes  # a number, which torch's types do not know
    return Made(module, source, preparation, outputs, assumed=file is not None and not file.about)


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


# -- weights --


def labels(name: str) -> list[str]:
    """The names of the weights that can be had for one of `NAMES`."""
    entries = [] if name in FROM_TIMM else list(_entries(name))
    return [*entries, PORTS[name].weights] if name in PORTS else entries


def _chosen(
    request: Request, name: str, makers: Mapping[str, Callable[[Path], Tensors]], auto: Sequence[str] = ()
) -> WeightsFile | None:
    """The weights file that was asked for; None for random weights.

    Args:
        request: What was asked for.
        name: That of the model, in the cache too.
        makers: Weights that can be had, besides those of a port.
        auto: Those of them to take, the first that can be had, before those of a port.
    """
    if port := PORTS.get(name):
        makers = {**makers, port.weights: port.maker(request.report, request.progress)}
        auto = (*auto, port.weights)
    choice = request.weights.lower()
    if choice in _RANDOM:
        return None
    if choice != "auto" and choice not in makers:
        return _checkpoint(request, makers)
    sources = [choice] if choice != "auto" else auto
    for label in dict.fromkeys([*sources, *makers]) if choice == "auto" else ():
        if found := cache.cached(f"{name}-{label}", request.report):
            return found
    reasons = []
    for label in sources:
        try:
            return cache.fetch(f"{name}-{label}", makers[label], request.report)
        except UnavailableError as error:  # noqa: PERF203 - a round is a download
            request.report(f"The {label} weights cannot be had: {error}")
            reasons.append(f"{label} ({str(error).rstrip('.')})")
    others = [label for label in makers if label not in sources]
    raise UnavailableError(
        f"No weights for {name} can be had, neither from the cache nor as {' nor as '.join(reasons)}; connect to a "
        f"network{', try ' + ' or '.join(others) if others else ''}, or pass the path of a checkpoint or 'random'."
    )


def _checkpoint(request: Request, makers: Iterable[str]) -> WeightsFile:
    path = Path(request.weights).expanduser()
    if not path.exists() and not path.suffix and path.name == request.weights:
        there = ", ".join(["auto", *makers, "random"])
        raise RelpropError(
            f"There are no weights {request.weights!r} for {request.name}, nor is there such a file; there are {there} "
            "or the path of a checkpoint."
        )
    return weights.read(path)


def _source(file: WeightsFile, variant: str) -> Source:
    about = file.about
    return Source(
        about.get("weights", file.path.name),
        about.get("origin", str(file.path)),
        file.sha256,
        about.get("licence", "not stated"),
        about.get("architecture", variant),
        about.get("origin_sha256"),
    )


def _outputs(module: nn.Module, file: WeightsFile) -> int:
    """The number of classes in a checkpoint: the length of the last parameter, for that is the head's."""
    name, parameter = list(module.named_parameters())[-1]
    return int((file.tensors.get(name, parameter).shape or parameter.shape)[0])


def _fill(module: nn.Module, file: WeightsFile, name: str) -> None:
    """Puts weights into a module.

    Raises:
        RelpropError: They are not the module's; with which, how many, and an example.
    """
    own, given = module.state_dict(), file.tensors
    missing = [key for key in own if key not in given and not key.endswith("num_batches_tracked")]
    foreign = [key for key in given if key not in own]
    misshapen = [key for key in own if key in given and own[key].shape != given[key].shape]
    faults = []
    if missing:
        faults.append(f"{len(missing)} of its {len(own)} tensors are missing, such as {missing[0]!r}")
    if foreign:
        faults.append(f"{len(foreign)} are not the model's, such as {foreign[0]!r}")
    if misshapen:
        key = misshapen[0]
        shapes = f"{tuple(given[key].shape)} for {tuple(own[key].shape)}"
        faults.append(f"{len(misshapen)} have another shape, such as {key!r}, {shapes}")
    if faults:
        raise RelpropError(f"{file.path} does not fit {name}: {'; '.join(faults)}.")
    own.update(given)  # its own dict, for some modules look for the version that comes with it
    module.load_state_dict(own)
