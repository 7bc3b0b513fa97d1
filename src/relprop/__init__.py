"""Layer-wise Relevance Propagation for residual networks that always adds up."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relprop.engine import explain, plan
    from relprop.errors import RelpropError
    from relprop.heatmap import heat_quantization
    from relprop.lrp import LRP
    from relprop.metrics import insertion_deletion
    from relprop.result import Explanation
    from relprop.study import evaluate
    from relprop.zoo import Model, load

__all__ = [
    "LRP",
    "Explanation",
    "Model",
    "RelpropError",
    "evaluate",
    "explain",
    "heat_quantization",
    "insertion_deletion",
    "load",
    "plan",
]
__version__ = "0.1.0"

_ROOMS = {
    "LRP": "lrp",
    "Explanation": "result",
    "Model": "zoo",
    "RelpropError": "errors",
    "evaluate": "study",
    "explain": "engine",
    "heat_quantization": "heatmap",
    "insertion_deletion": "metrics",
    "load": "zoo",
    "plan": "engine",
}

if not TYPE_CHECKING:  # a type checker is to know what is here, and what is not

    def __getattr__(name: str) -> object:
        """What is asked for is imported then: torch takes longer than `relprop --help` may."""
        if name in _ROOMS:
            value = getattr(import_module(f"relprop.{_ROOMS[name]}"), name)
            globals()[name] = value
            return value
        if not name.startswith("_"):
            try:
                return import_module(f"relprop.{name}")
            except ModuleNotFoundError as error:
                if error.name != f"relprop.{name}":
                    raise
        raise AttributeError(f"module 'relprop' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
