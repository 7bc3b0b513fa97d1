"""Running a training: from a model and a dataset to weights that ``--weights`` takes, with their manifest."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from relprop import weights
from relprop.catalogue import CLASSES, PREPARATION
from relprop.datasets import Dataset
from relprop.errors import RelpropError
from relprop.study import manifest
from relprop.training import curve
from relprop.training.checkpoint import best
from relprop.training.features import Features, Tick, quiet
from relprop.training.feeds import Feed, Kept, Photos
from relprop.training.network import ALL, Network, build
from relprop.training.parts import Parts
from relprop.training.recipe import Recipe
from relprop.training.trainer import Trainer
from relprop.zoo import Model

if TYPE_CHECKING:
    from lightning_fabric import Fabric

__all__ = ["Outcome", "Training", "devices", "tabulate"]

WEIGHTS = "weights.safetensors"


def devices(accelerator: str = "auto", count: str = "1", precision: str = "32-true") -> Fabric:
    """What training runs on, through Lightning Fabric.

    Raises:
        RelpropError: If it is not installed, or there are no such devices.
    """
    try:
        library: Any = importlib.import_module("lightning_fabric")
    except ImportError as error:
        raise RelpropError("Training needs Lightning Fabric; install it with pip install 'relprop[train]'.") from error
    try:
        number: Any = int(count) if count.lstrip("-").isdigit() else count
        fabric: Fabric = library.Fabric(accelerator=accelerator, devices=number, precision=precision)
        fabric.launch()
    except (ValueError, RuntimeError, TypeError, library.utilities.exceptions.MisconfigurationException) as error:
        first = str(error).partition("\n")[0].rstrip(".")
        raise RelpropError(f"There is no training on {count} {accelerator} devices at {precision}: {first}.") from error
    return fabric


@dataclass(frozen=True)
class Outcome:
    """What a training came to.

    Attributes:
        seed: Its seed.
        weights: The weights file.
        epochs: How many epochs it had.
        best_epoch: Which of them gave the weights.
        validation_loss: At that epoch.
        validation_accuracy: Likewise.
        test_loss: Of the weights, on the test images.
        test_accuracy: Likewise.
    """

    seed: int
    weights: Path
    epochs: int
    best_epoch: int
    validation_loss: float
    validation_accuracy: float
    test_loss: float
    test_accuracy: float

    @classmethod
    def read(cls, folder: Path) -> Outcome:
        """What the manifest in a seed's folder says.

        Raises:
            RelpropError: If there is none.
        """
        try:
            return cls(**{**manifest.read(folder)["outcome"], "weights": folder / WEIGHTS})
        except (KeyError, TypeError) as error:
            raise RelpropError(f"{folder} holds no training that was finished.") from error


def tabulate(outcomes: Sequence[Outcome]) -> str:
    """A line for each seed, and their means with standard deviations, as Markdown."""
    lines = ["| seed | epochs | best | validation loss | validation accuracy | test loss | test accuracy |"]
    lines.append("|" + " ---: |" * 7)
    columns = ("validation_loss", "validation_accuracy", "test_loss", "test_accuracy")
    for o in outcomes:
        numbers = " | ".join(f"{getattr(o, name):.4f}" for name in columns)
        lines.append(f"| {o.seed} | {o.epochs} | {o.best_epoch} | {numbers} |")
    if len(outcomes) > 1:
        spread = [[getattr(o, name) for o in outcomes] for name in columns]
        lines.append(f"| mean | | | {' | '.join(f'{mean(v):.4f} ± {stdev(v):.4f}' for v in spread)} |")
    return "\n".join(lines)


@dataclass
class Training:
    """Trainings of one model, one for each seed.

    Attributes:
        model: What ``relprop.load`` returns; it is not changed.
        parts: From a seed to the parts of the dataset.
        out: The folder; each seed has its own in it.
        fabric: Which devices, at which precision.
        recipe: How.
        part: What is trained: ``"all"``, ``"head"`` or a stage, such as ``"layer4"``, and all behind it.
        views: How many views of a training photo the features are of.
        workers: Threads that decode.
        features: Where features are kept, for any trainings that have the same frozen part; by default in ``out``.
        say: Told what happens, in lines.
        tick: Told how far it is.
    """

    model: Model
    parts: Callable[[int], Parts]
    out: Path
    fabric: Fabric
    recipe: Recipe = field(default_factory=Recipe)
    part: str = ALL
    views: int = 2
    workers: int = 2
    features: Path | None = None
    say: Callable[[str], None] = quiet
    tick: Tick = quiet

    def __call__(self, seed: int = 0) -> Outcome:
        """Trains with a seed, or goes on from where that was left.

        Raises:
            RelpropError: If something does not fit, or the folder holds another training.
        """
        parts = self.parts(seed)
        network = build(self.model, parts.classes, self.part, seed)
        if network.frozen is not None and self.fabric.world_size > 1:
            raise RelpropError(f"Training {self.part} on kept features is for one device; leave --devices at 1.")
        folder = self.out / f"seed{seed}"
        request = self._request(parts, seed)
        facts = manifest.read(folder)
        if facts.get("request") == request and facts.get("recipe", {}).get("epochs") == self.recipe.epochs:
            found = Outcome.read(folder)
            if found.weights.is_file() and weights.sha256_of(found.weights) == facts["sha256"]:
                self.say(f"seed {seed}: is there already")
                return found
        folder.mkdir(parents=True, exist_ok=True)
        fit, exam = self._feeds(network, parts)
        text = json.dumps(request, sort_keys=True)
        trainer = Trainer(
            self.fabric, network.trained, fit, parts, self.recipe, seed, folder, text, self.say, self.tick
        )
        began = manifest.now()
        epochs = trainer.run()
        chosen = best(epochs)
        test = trainer.examine(exam, parts.test.samples)
        outcome = Outcome(
            seed,
            folder / WEIGHTS,
            len(epochs),
            chosen.epoch,
            chosen.validation_loss,
            chosen.validation_accuracy,
            *test,
        )
        if self.fabric.is_global_zero:
            self._write(network, parts, outcome, request, began)
            curve.plot(epochs, folder / "curve.png", f"{parts.train.name}, {self.part}, seed {seed}")
        self.fabric.barrier()
        self.say(f"seed {seed}: test loss {test[0]:.3f}, accuracy {test[1]:.4f}; {outcome.weights}")
        return outcome

    def _feeds(self, network: Network, parts: Parts) -> tuple[Feed, Feed]:
        """Where training and validation images come from, and test images."""
        wants = self.model.preparation
        if network.frozen is None:
            photos = Photos(wants, self.workers)
            return photos, photos
        frozen = self.fabric.to_device(network.frozen)
        pool = replace(parts.train, samples=(*parts.train, *parts.validation))
        home = self.features or self.out / "features"
        asked = [(pool, self.views), (replace(parts.test, name=f"{parts.test.name}, test"), 1)]
        fit, exam = (
            Kept(Features.of(data, frozen, wants, home, count=n, workers=self.workers, tick=self.tick))
            for data, n in asked
        )
        return fit, exam

    def _request(self, parts: Parts, seed: int) -> dict[str, Any]:
        """What a training is known by; more epochs are the same one, continued."""
        recipe = {name: value for name, value in asdict(self.recipe).items() if name != "epochs"}
        return {
            "model": self.model.name,
            "start": weights.fingerprint(self.model.module),
            "part": self.part,
            "views": self.views if self.part != ALL else None,
            "recipe": recipe,
            "seed": seed,
            "data": {name: _names(part) for name, part in parts.items()},
        }

    def _write(self, network: Network, parts: Parts, outcome: Outcome, request: dict[str, Any], began: str) -> None:
        """The weights, and beside them who they are."""
        source = self.model.source
        about = {
            "architecture": source.architecture,
            "weights": f"{parts.train.name}-{self.part}-seed{outcome.seed}",
            "origin": f"{self.part} trained with relprop on {parts.train.name}, from {source.weights}",
            "licence": f"that of {source.weights} ({source.licence}) and of the dataset",
            CLASSES: json.dumps(parts.classes),
            PREPARATION: self.model.preparation.written(),
        }
        data = weights.serialised({k: v.cpu() for k, v in network.whole.state_dict().items()}, about)
        partial = outcome.weights.with_suffix(".partial")
        partial.write_bytes(data)
        partial.replace(outcome.weights)
        parts.write(outcome.weights.with_name("parts.csv"))
        outcome.weights.with_name("classes.txt").write_text("".join(f"{name}\n" for name in parts.classes))
        around = manifest.surroundings()
        around["packages"]["lightning-fabric"] = version("lightning-fabric")
        facts = {
            "command": manifest.command(),
            "started": began,
            "finished": manifest.now(),
            "sha256": weights.sha256_of(outcome.weights),
            **about,
            "start": str(source),
            "images": {name: len(part) for name, part in parts.items()},
            "recipe": asdict(self.recipe),
            "views": request["views"],
            "outcome": {**asdict(outcome), "weights": WEIGHTS},
            "request": request,
            **around,
        }
        del facts[CLASSES]
        manifest.write(outcome.weights.parent, facts)


def _names(part: Dataset) -> str:
    """A hash of which images a part has."""
    return hashlib.sha256("\n".join(sample.name for sample in part).encode()).hexdigest()[:16]
