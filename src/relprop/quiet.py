"""Quiet: what other libraries remark on, kept from the user, whichever threads are at it."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

__all__ = ["quietly"]

_LOCK = threading.Lock()
_restore = ExitStack()
_inside = 0


@contextmanager
def quietly() -> Iterator[None]:
    """Nothing warns until the last of those who asked for it, in any thread, has left.

    ``warnings.catch_warnings`` alone is for one thread: the filters belong to the process, so that of two threads whose
    turns overlap, the first to leave ends the quiet of the other, and the last leaves it behind for good.
    """
    global _inside  # noqa: PLW0603 - as the filters, it is the process's
    with _LOCK:
        if not _inside:
            _restore.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
        _inside += 1
    try:
        yield
    finally:
        with _LOCK:
            _inside -= 1
            if not _inside:
                _restore.close()
