"""The file in which variables travel, in both directions.

::

    offset  what
    0       8 bytes    magic: b"JDDP" + version (u16) + zero (u16)
    8       3 x u64    number of buffers, length of the head, length of the pickles
    32      n x 2 u64  offset and length of each buffer
    .       head       JSON: {"python": "3.11", "names": [...], "sources": {...}, "modules": {...}}
    .       pickles    one for each name and one more for the definitions, all of one Pickler (one memo)
    page    buffers    raw out-of-band buffers (pickle protocol 5), each on a page of its own

Little endian. The reader maps the file copy-on-write: arrays are writable, pages that nobody writes
exist once for all ranks of a machine, and the file never changes. A file is made exclusively with mode 0600.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

PYTHON: Final = f"{sys.version_info[0]}.{sys.version_info[1]}"
"""The Python whose byte code and pickles a container of this process holds."""

_MAGIC: Final = b"JDDP\x01\x00\x00\x00"
_COUNTS: Final = struct.Struct("<8sQQQ")
_SPAN: Final = struct.Struct("<QQ")
_HEAD: Final = {"python": str, "names": list, "sources": dict, "modules": dict}
_PAGE: Final = 4096
_CHUNK: Final = 64 << 20


class ContainerError(ValueError):
    """The file is not a container of this version, or it is torn."""


@dataclass(frozen=True, slots=True)
class Container:
    """A container in memory: its head, the pickles, and the buffers that they refer to."""

    head: dict[str, Any]
    pickles: memoryview
    buffers: list[memoryview]


def layout(
    head: dict[str, Any], pickles: memoryview, buffers: Sequence[memoryview]
) -> tuple[bytes, list[int], int]:
    """Return what comes before the pickles, the offset of each buffer, and the size of the whole file."""
    text = json.dumps(head, separators=(",", ":")).encode()
    start = _COUNTS.size + _SPAN.size * len(buffers) + len(text) + len(pickles)
    offsets = []
    for buffer in buffers:
        start = -(-start // _PAGE) * _PAGE
        offsets.append(start)
        start += buffer.nbytes
    spans = b"".join(
        _SPAN.pack(offset, buffer.nbytes) for offset, buffer in zip(offsets, buffers, strict=True)
    )
    return _COUNTS.pack(_MAGIC, len(buffers), len(text), len(pickles)) + spans + text, offsets, start


def write(path: str | os.PathLike[str], container: Container) -> int:
    """Write a new file (mode 0600) and return its size; what was begun is removed on an error.

    Raises:
        OSError: The file exists, or the disk is full.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    for name in ("O_CLOEXEC", "O_NOFOLLOW", "O_BINARY"):  # each where there is one
        flags |= getattr(os, name, 0)
    descriptor = os.open(path, flags, 0o600)
    try:
        try:
            return write_to(descriptor, container)
        finally:
            os.close(descriptor)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)  # noqa: PTH108 - a rank starts with few imports
        raise


def write_to(descriptor: int, container: Container) -> int:
    """Write a container into an empty file or ``memfd`` and return its size."""
    start, offsets, size = layout(container.head, container.pickles, container.buffers)
    os.ftruncate(descriptor, size)
    _write_at(descriptor, 0, memoryview(start))
    _write_at(descriptor, len(start), container.pickles)
    for offset, buffer in zip(offsets, container.buffers, strict=True):
        _write_at(descriptor, offset, buffer)
    return size


def release(container: Container) -> None:
    """Let go of the buffers, so that their owners can be resized and freed."""
    container.pickles.release()
    for buffer in container.buffers:
        buffer.release()
    container.buffers.clear()


def _write_at(descriptor: int, offset: int, data: memoryview) -> None:
    os.lseek(descriptor, offset, os.SEEK_SET)
    done = 0
    while done < data.nbytes:
        done += os.write(descriptor, data[done : done + _CHUNK])


def read(path: str | os.PathLike[str] | int, *, map_above: int = 0) -> Container:
    """Read a container; files above ``map_above`` bytes are mapped copy-on-write, smaller ones are read.

    A descriptor in the place of a path is closed. Of one that others have too the file must be mapped: they share
    the place in it.

    Raises:
        OSError: The file cannot be opened.
        ContainerError: It is no container, or torn.
    """
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - a rank starts with few imports
        size = os.fstat(file.fileno()).st_size
        if size < _COUNTS.size:
            raise ContainerError("this is not a file of jupyter_ddp")
        if size > map_above:
            whole: mmap.mmap | bytearray = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
        else:
            whole = bytearray(size)
            if file.readinto(whole) != size:
                raise ContainerError("the file changes while it is read")
    return parse(memoryview(whole))


def parse(view: memoryview) -> Container:
    """Return the container in a writable view of a whole file.

    Raises:
        ContainerError: It is no container, or torn.
    """
    try:
        magic, count, head_length, pickles_length = _COUNTS.unpack_from(view, 0)
        if magic != _MAGIC:
            message = "this file is not of this version of jupyter_ddp"
            raise ContainerError(message)
        spans = [_SPAN.unpack_from(view, _COUNTS.size + _SPAN.size * index) for index in range(count)]
        head_at = _COUNTS.size + _SPAN.size * count
        pickles_at = head_at + head_length
        ends = [pickles_at + pickles_length, *(offset + length for offset, length in spans)]
        if max(ends) > view.nbytes:
            message = "the file is cut short"
            raise ContainerError(message)
        head = json.loads(bytes(view[head_at:pickles_at]))
    except (struct.error, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        message = "the file is torn"
        raise ContainerError(message) from error
    if not isinstance(head, dict) or any(type(head.get(name)) is not kind for name, kind in _HEAD.items()):
        message = "its head is not that of a container"
        raise ContainerError(message)
    pickles = view[pickles_at : pickles_at + pickles_length]
    return Container(head, pickles, [view[offset : offset + length] for offset, length in spans])
