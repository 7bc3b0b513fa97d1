"""Work: one task for each table and figure, all in one folder, none done twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from relprop import methods
from relprop.datasets import Dataset
from relprop.errors import RelpropError
from relprop.methods import Method
from relprop.reproduction import conservation, errors, figures, timing
from relprop.reproduction.claims import CLAIMS
from relprop.reproduction.tables import by_class, measure, tabulate, values
from relprop.study import Row, read

__all__ = ["BARE", "TASKS", "WHERE", "Work"]

PHOTO = Path(__file__).parents[1] / "data" / "chelsea.jpg"
"""A photo that may be published, for figures without a dataset."""

SHOWN = 5
"""Photos in a figure."""

WHERE = (
    "This needs images; pass --data DIR with ImageNet's validation set in folders by synset or by class index, or flat "
    "with labels.csv. It is at image-net.org; five images of every class are in the GitHub repository "
    "ndb796/Small-ImageNet-Validation-Dataset-1000-Classes. The first file of each class is taken."
)


@dataclass
class Work:
    """What the tasks work with.

    Attributes:
        model: What ``relprop.load`` returns; None where there are several, one after another.
        data: The images, one a class; None where there are none.
        limit: How many of them to measure.
        costly: How many with methods that cost most.
        batch_size: Images explained at once.
        out: Where results go.
        settings: What else :func:`relprop.evaluate` is told.
        failures: What could not be measured, in a sentence each.
    """

    model: Any
    data: Dataset | None
    limit: int
    costly: int
    batch_size: int
    out: Path
    settings: dict[str, Any] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def whole(self) -> Dataset:
        """All images that there are."""
        if self.data is None:
            raise RelpropError(WHERE)
        return self.data

    @property
    def images(self) -> Dataset:
        """The images to measure."""
        return self.whole.limit(self.limit)

    def rows(self) -> list[Row]:
        """All that the folder holds of these images."""
        names = {sample.name for sample in self.images}
        return [row for row in read(self.out) if row.image in names]

    def measured(self, methods: Sequence[Method]) -> list[Row]:
        """The rows of some methods, measured where they are lacking."""
        asked = {"costly": self.costly, "batch_size": self.batch_size, **self.settings}
        for study in measure(self.model, self.images, methods, self.out, **asked):
            self.failures |= study.failures
        return self.rows()

    def kept(self, name: str, text: str) -> str:
        """Writes a table beside its rows."""
        (self.out / f"{name}.md").write_text(text + "\n")
        return text


def _table(name: str, work: Work) -> str:
    return work.kept(name, tabulate(CLAIMS[name], work.measured(CLAIMS[name].methods)))


def _classes(work: Work) -> str:
    return work.kept("classes", by_class(work.measured(CLAIMS["table2"].methods), CLAIMS["table2"].lines))


def _conservation(work: Work) -> str:
    rows = list(conservation.sums(work.model, work.whole.limit(conservation.SAMPLES), work.batch_size))
    conservation.write(rows, work.out / "conservation.csv")
    conservation.plot(rows, work.out / "conservation.png")
    return work.kept("conservation", conservation.table(rows))


def _errors(work: Work) -> str:
    rows = work.measured([methods.get(name) for name in (errors.METHOD, errors.BASELINES[0])])
    failures, pictures = errors.examine(work.model, work.images, errors.failed(values(rows)))
    errors.write(failures, work.out / "errors.csv")
    errors.sheet(failures, pictures, work.out / "errors.png")
    return work.kept("errors", errors.table(failures, rows))


def _figure(name: str, work: Work) -> str:
    photos = [PHOTO] if work.data is None else [sample.path for sample in work.images.limit(SHOWN)]
    path = work.out / f"{name}.png"
    figures.draw(work.model, photos, figures.FIGURES[name], path)
    return str(path)


def _timing(work: Work) -> str:
    path = work.out / "timing.json"
    timing.write(timing.measure(work.model, work.model.prepare(PHOTO)[None]), path)
    return work.kept("timing", timing.table(path))


Task: TypeAlias = Callable[[Work], str]
TASKS: dict[str, Task] = {
    "table2": partial(_table, "table2"),
    "rules": partial(_table, "rules"),
    "table3": partial(_table, "table3"),
    "errors": _errors,
    "classes": _classes,
    "pools": partial(_table, "pools"),
    "norms": partial(_table, "norms"),
    "channels": partial(_table, "channels"),
    "table1": partial(_table, "table1"),
    "conservation": _conservation,
    "timing": _timing,
    **{name: partial(_figure, name) for name in figures.FIGURES},
}
"""By name, in the order that gives the first full page soonest: the dearest method comes last."""

BARE = {"timing", *figures.FIGURES}
"""What needs no images but the bundled photo."""
