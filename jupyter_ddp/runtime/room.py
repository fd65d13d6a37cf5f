"""What the text of a run may take on disk: past the limit, the middle of each stream is given up.

The oldest text tells how a run began, the newest how it stands; what lies between goes, as a hole in the rank's
file. So offsets stay what they are, no writer has to know, and a reader sees by the hole that something is missing:
`spans`.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import TYPE_CHECKING, Final

from jupyter_ddp.words import size_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

HEAD: Final = 1 << 20
"""Bytes of a stream's beginning that stay."""
PAGE: Final = 1 << 16
"""Holes begin and end at multiples of this: a file system's block is smaller."""
FULL: Final = "the disk is full: what ranks print is not kept until there is room again"
_NO_HOLES: Final = "this file system keeps all of it nevertheless"
_PUNCH_AND_KEEP_SIZE: Final = 0x02 | 0x01
_BLOCK: Final = 512


class Room:
    """Watches over the files of an instance's ranks.

    Args:
        limit: Bytes that they may take together.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._holes = sys.platform == "linux"
        self._told = False

    def squeeze(self, streams: Sequence[tuple[Path, int]]) -> bool:
        """Give up half of what there is, for a run's end on a full disk; tell whether that made room."""
        before = sum(_on_disk(path) for path, _ in streams)
        limit, self._limit = self._limit, before // 2
        told, self._told = self._told, True
        self.make(streams)
        self._limit, self._told = limit, told
        return sum(_on_disk(path) for path, _ in streams) < before

    def make(self, streams: Sequence[tuple[Path, int]]) -> str:
        """Give up what is too much; return a sentence about it the first time, else "".

        Args:
            streams: Each file, and how much of it has been read: what comes after that is not touched.
        """
        if not self._holes:
            return ""
        sizes = [_on_disk(path) for path, _ in streams]
        if sum(sizes) <= self._limit:
            return ""
        share = self._limit // max(1, sum(size > 0 for size in sizes))
        for (path, read), size in zip(streams, sizes, strict=True):
            if size > share and not _punch(path, min(HEAD, share // 4), read - share // 2):
                self._holes = False
        if self._told:
            return ""
        self._told = True
        said = f"ranks have printed more than {size_text(self._limit)}, which c.DistributedMagics.run_bytes allows"
        return f"{said}: {'the middle of their text is not kept' if self._holes else _NO_HOLES}"


def spans(descriptor: int, start: int, stop: int) -> Iterator[tuple[int, int, bool]]:
    """Yield the parts of a range of a file in order: begin, end, and whether it is there."""
    seek_data, seek_hole = getattr(os, "SEEK_DATA", None), getattr(os, "SEEK_HOLE", None)
    while start < stop:
        data, hole = start, stop
        if seek_data is not None and seek_hole is not None and sys.platform == "linux":
            try:
                data = os.lseek(descriptor, start, seek_data)
                hole = os.lseek(descriptor, data, seek_hole) if data == start else stop
            except OSError:  # nothing but a hole, or beyond the end; or a file system without holes
                data, hole = start, stop
        end = min(stop, hole if data == start else data)
        yield start, end, data == start
        start = end


def _on_disk(path: Path) -> int:
    try:
        return path.stat().st_blocks * _BLOCK
    except OSError:
        return 0


def _punch(path: Path, start: int, stop: int) -> bool:
    """Make a hole of what is in a range; tell whether that can be done."""
    start, stop = -(-start // PAGE) * PAGE, stop // PAGE * PAGE
    if stop <= start:
        return True
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError:  # removed
        return True
    try:
        return int(fallocate(descriptor, _PUNCH_AND_KEEP_SIZE, start, stop - start)) == 0
    finally:
        os.close(descriptor)
