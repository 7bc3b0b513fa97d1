"""Sources: where a model's weights are from, how they are chosen, and how they get into a network."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import nn

from relprop import cache, keras, lite, weights
from relprop.cache import Made
from relprop.errors import RelpropError
from relprop.fetching import Progress, Report, UnavailableError
from relprop.weights import WeightsFile

SEED = 0
"""Of random weights."""
_RANDOM = ("none", "random")
PORTS = {"resnet50": keras.PORT, "efficientnet_lite0": lite.PORT}


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

    @classmethod
    def random(cls, architecture: str) -> Source:
        """That of random weights."""
        return cls("random", f"seed {SEED}", None, "none", architecture)

    @classmethod
    def of(cls, file: WeightsFile, architecture: str) -> Source:
        """That of a file, for an architecture unless the file says which."""
        about = file.about
        return cls(
            about.get("weights", file.path.name),
            about.get("origin", str(file.path)),
            file.sha256,
            about.get("licence", "not stated"),
            about.get("architecture", architecture),
            about.get("origin_sha256"),
        )

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


def chosen(
    request: Request, name: str, makers: Mapping[str, Callable[[Path], Made]], auto: Sequence[str] = ()
) -> WeightsFile | None:
    """The weights file that was asked for; None for random weights.

    Args:
        request: What was asked for.
        name: That of the model, in the cache too.
        makers: Weights that can be had, besides those of a port.
        auto: Those of them to take, the first that can be had, before those of a port.

    Raises:
        UnavailableError: They cannot be fetched.
        RelpropError: There are none of that name, nor such a file, or it cannot be read.
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


def outputs_of(module: nn.Module, file: WeightsFile) -> int:
    """The number of classes in a checkpoint: the length of the last parameter, for that is the head's.

    Where the head's tensors contradict each other it is the module's own, and :func:`fill` says what is wrong: nothing
    is built that is larger than what the file holds.
    """
    parameters = dict(module.named_parameters())
    last = list(parameters)[-1]
    outputs = next(iter(file.tensors.get(last, parameters[last]).shape), 0)
    head = [name for name in parameters if name.rpartition(".")[0] == last.rpartition(".")[0]]
    fits = all(
        name in file.tensors and file.tensors[name].shape == (outputs, *parameters[name].shape[1:]) for name in head
    )
    return int(outputs if fits and outputs else parameters[last].shape[0])


def fill(module: nn.Module, file: WeightsFile, name: str) -> None:
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


def _checkpoint(request: Request, makers: Iterable[str]) -> WeightsFile:
    path = Path(request.weights).expanduser()
    if not path.exists() and not path.suffix and path.name == request.weights:
        there = ", ".join(["auto", *makers, "random"])
        raise RelpropError(
            f"There are no weights {request.weights!r} for {request.name}, nor is there such a file; there are {there} "
            "or the path of a checkpoint."
        )
    return weights.read(path)
