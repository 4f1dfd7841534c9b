"""Gives the memory of a mapped file back while the file stays mapped."""

import mmap


def release(data: mmap.mmap, begin: int, end: int) -> None:
    """Drop the pages of bytes `[begin, end)`; they are read again from the file when needed.

    Without it a loaded file counts as memory of this process until the system runs short.
    """
    if hasattr(mmap, "MADV_DONTNEED") and begin < end:
        first = begin // mmap.PAGESIZE * mmap.PAGESIZE
        data.madvise(mmap.MADV_DONTNEED, first, end - first)
