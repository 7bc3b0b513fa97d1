"""Memory: freed buffers kept for the next layer instead of handed back to the system."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # of glibc's malloc.h
_LARGEST = 2**31 - 1  # of an int, which mallopt takes
_SPARE = 64 << 20


def keep_freed() -> bool:
    """Tells glibc to keep large freed buffers, for as long as the process lives.

    By default every buffer of some megabytes is mapped anew, filled with zeros and unmapped again, layer after layer.
    It is for processes that are ours alone, the command line's; a library has no business with its host's allocator.

    Returns:
        Whether there is a glibc that agreed.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another libc
        return False
    wanted = {_MMAP_THRESHOLD: _LARGEST, _TRIM_THRESHOLD: _LARGEST, _TOP_PAD: _SPARE}
    agreed = [mallopt(option, value) == 1 for option, value in wanted.items()]
    return all(agreed)
