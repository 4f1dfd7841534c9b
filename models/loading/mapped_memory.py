"""Gives the memory of a mapped file back while the file stays mapped."""

import mmap


def release(data: mmap.mmap) -> None:
    """Drop the pages that were read; they are read again from the file when they are needed.

    Without it a loaded file counts as memory of this process until the system runs short.
    """
    if hasattr(mmap, "MADV_DONTNEED"):
        data.madvise(mmap.MADV_DONTNEED)
