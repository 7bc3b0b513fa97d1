"""Importing torchvision where its compiled part does not match the installed torch."""

import importlib
import sys
import threading
from types import ModuleType

import torch

_MISSING = "operator torchvision::nms does not exist"
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"

_lock = threading.Lock()
# A Library takes its operators with it when it is collected, so one that was made is kept for the life of the process.
_declared: list[torch.library.Library] = []


def import_torchvision() -> ModuleType:
    """Import torchvision, declaring the two operators that a mismatched build fails to bring along.

    torchvision describes ``nms`` and ``qnms`` to torch while it is being imported. When its compiled part cannot be
    loaded (a CUDA build beside a CPU torch, say) the operators do not exist and the whole import fails, although
    models, transforms and datasets never call them. Declaring the two schemas is enough; calling ``nms`` still
    raises. A sound torchvision is imported as it is.

    Call this before importing anything that imports torchvision itself (zennit, timm). It may be called often, and
    from several threads.

    Returns:
        The torchvision package.

    Raises:
        ImportError: torchvision is not installed.
        RuntimeError: torchvision fails to import for another reason.
    """
    with _lock:
        if "torchvision" not in sys.modules:
            _purge()  # an earlier import that failed half-way would make this one fail differently
        try:
            return importlib.import_module("torchvision")
        except RuntimeError as error:
            if _MISSING not in str(error) or _declared:
                raise
        library = torch.library.Library("torchvision", "DEF")
        _declared.append(library)
        for operator in ("nms", "qnms"):
            library.define(operator + _SCHEMA)
        _purge()
        return importlib.import_module("torchvision")


def _purge() -> None:
    """Forget submodules of a torchvision that was never imported to the end."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
