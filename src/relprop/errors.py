"""What is said when something cannot be done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["RelpropError", "saying"]


class RelpropError(ValueError):
    """A request that cannot be met; the message is one sentence that names the thing and the remedy."""


@contextmanager
def saying(what: str, remedy: str = "") -> Iterator[None]:
    """Gives whatever goes wrong meanwhile a sentence, for where libraries have errors of their own.

    Args:
        what: What cannot be done then, such as "x.png cannot be read".
        remedy: What to do about it, behind the reason.
    """
    try:
        yield
    except RelpropError:
        raise
    except Exception as error:
        said = str(getattr(error, "strerror", None) or next(iter(str(error).splitlines()), "")).rstrip(". ")
        raise RelpropError(f"{what}: {said or type(error).__name__}{remedy}.") from error
