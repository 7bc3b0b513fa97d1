"""Memory: freed buffers kept for the next layer instead of handed back to the system, in large pages."""

from __future__ import annotations

import ctypes
import sys
from functools import cache

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # of glibc's malloc.h
_LARGEST = 2**31 - 1  # of an int, which mallopt takes
_SPARE = 64 << 20

_HUGE = 14  # MADV_HUGEPAGE, of Linux' mman.h
_PAGE = 2 << 20
_ROOM = 3 << 29
"""Where large pages are asked for; none of it is taken before it is needed. More than the above would be given back."""


def keep_freed() -> bool:
    """Tells glibc to keep large freed buffers, for as long as the process lives, and Linux to use large pages for them.

    By default every buffer of some megabytes is mapped anew, filled with zeros and unmapped again, layer after layer;
    and whoever reads it looks up 256 addresses a megabyte.
    It is for processes that are ours alone, the command line's; a library has no business with its host's allocator.

    Returns:
        Whether there is a glibc that agreed.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    try:
        mallopt = libc.mallopt
    except AttributeError:  # another libc
        return False
    wanted = {_MMAP_THRESHOLD: _LARGEST, _TRIM_THRESHOLD: _LARGEST, _TOP_PAD: _SPARE}
    if not all(mallopt(option, value) == 1 for option, value in wanted.items()):
        return False
    _enlarge_pages()
    return True


@cache
def _enlarge_pages() -> None:
    """Lets the heap grow, once, and asks for large pages there; where that cannot be, everything stays as it was."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
    block = libc.malloc(ctypes.c_size_t(_ROOM)) or 0
    libc.free(ctypes.c_void_p(block))
    begin, end = -(-block // _PAGE) * _PAGE, libc.sbrk(ctypes.c_ssize_t(0))
    if 0 < begin < end:  # it was in the heap
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _HUGE)
