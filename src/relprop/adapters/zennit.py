"""An attributor, as zennit's users know it: model and rules once, then output and relevance of each batch.

```python
from relprop.adapters.zennit import Attributor

with Attributor(model, "epsilon-plus-flat") as attributor:
    output, relevance = attributor(x, 281)                       # a class, or one an image
    output, relevance = attributor(x, torch.eye(1000)[[281]])    # or as zennit has it, a tensor like the output
```

Nothing is registered on the model, so the ``with`` is for who is used to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from relprop.engine import explain
from relprop.errors import RelpropError

__all__ = ["Attributor"]

Start = int | Sequence[int] | Tensor | Callable[[Tensor], Tensor] | None


class Attributor:
    """Computes a model's output and its relevance, from a start that the caller gives.

    Args:
        model: A module in evaluation mode, or what ``relprop.load`` returns; nothing is changed on it.
        composite: What is to stand for a composite: a preset's name. zennit's own composites keep their parameters to
            themselves; ``"epsilon-plus-flat"`` and ``"epsilon-gamma-box"`` are two of them, and ``overrides`` takes
            rules by name, type or block.
        attr_output: Relevance of the output, unless a call says otherwise: a tensor shaped like the output, a function
            of it, or classes (a number, or one a sample) that start with one. None starts with the output itself, all
            classes of it, as in zennit.
        **options: Passed to :func:`relprop.explain`: ``split``, ``identity_skips``, ``overrides``.

    Raises:
        RelpropError: If the composite is not a preset's name.
    """

    def __init__(self, model: Any, composite: str = "relprop", attr_output: Start = None, **options: Any) -> None:
        if not isinstance(composite, str):
            msg = (
                f"The composite is a {type(composite).__name__}, which cannot be read; pass a preset's name, such as "
                " 'epsilon-plus-flat', and overrides={...} for rules of your own."
            )
            raise RelpropError(msg)
        self.model = model
        self.composite = composite
        self.attr_output = attr_output
        self.options = options

    def __enter__(self) -> Attributor:
        return self

    def __exit__(self, *_: object) -> None:
        """There is nothing to remove."""

    def __call__(self, input: Tensor, attr_output: Start = None) -> tuple[Tensor, Tensor]:  # noqa: A002 - zennit's name
        """The model's output, and the relevance of the input.

        Args:
            input: A batch.
            attr_output: Relevance of the output, as for the class.

        Returns:
            The output, and relevance like the input.

        Raises:
            RelpropError: If the request cannot be met.
        """
        start = self.attr_output if attr_output is None else attr_output
        if start is None:
            how: dict[str, Any] = {"start": lambda output: output}
        elif callable(start) or (isinstance(start, Tensor) and start.is_floating_point()):
            how = {"start": start}
        else:
            how = {"target": start, "start": "one"}
        result = explain(self.model, input, **how, preset=self.composite, **self.options)
        return result.output, result.relevance
