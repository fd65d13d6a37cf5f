"""A rank's standard streams: file descriptors 1 and 2 are append-only files, which are the record of its text.

What Python, C code, subprocesses and forked children write goes to these files, in order and without a pipe that
could fill up or be lost with its reader. The agent reads the files. It learns by the doorbell that one has grown, and
by marks where one stream ended and the other began.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import io
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from jupyter_ddp.runtime.link import start_quiet_thread
from jupyter_ddp.runtime.record import LOOK_AGAIN, LOW, NO_ROOM, is_low

if TYPE_CHECKING:
    from pathlib import Path

    from jupyter_ddp.runtime.link import Bell, Link

STACKS_SIGNAL: Final = signal.SIGRTMAX - 2 if sys.platform == "linux" else signal.SIGUSR2
"""On this signal a rank writes the stacks of its threads to ``rank<r>.stacks``, even while it is stuck in C."""
TRAIL: Final = 0.05
"""Seconds after which text without a line's end is written."""
PLACED_LIMIT: Final = 2.0
"""Seconds that a frame may take on its way to an agent that is busy."""
LOOK_EVERY: Final = 64 << 10
"""Bytes after which a rank looks whether the disk is full."""
_PRIVATE: Final = 64
"""Private descriptors are numbered from here, out of the way of code that closes 3, 4, 5."""


class Streams:
    """Both streams of a rank, once they are files.

    Everything here is safe in threads, in signal handlers and after a fork: one re-entrant lock, held across forks,
    and nobody waits for anybody else while holding it.
    """

    def __init__(self, link: Link, bell: Bell) -> None:
        self._link = link
        self._bell = bell
        self._lock = _Lock()
        self._files: tuple[int, int] | None = None
        self._texts: list[Stream] = []
        self._current = 1
        self._told_full = False
        self._full_until = 0.0
        self._unchecked = LOOK_EVERY

    def open(self, directory: Path, rank: int) -> None:
        """Make descriptors 0, 1 and 2 of this process and ``sys.std*`` the rank's own; call it once."""
        self._files = (
            _private(directory / f"rank{rank}.stdout"),
            _private(directory / f"rank{rank}.stderr"),
        )
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        for number, private in zip((1, 2), self._files, strict=True):
            os.dup2(private, number)
            name = "<stdout>" if number == 1 else "<stderr>"
            self._texts.append(Stream(_Raw(number, name, self), self))
        sys.stdout, sys.stderr = self._texts
        sys.__stdout__, sys.__stderr__ = self._texts  # type: ignore[misc]
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # type: ignore[misc]  # noqa: SIM115
        os.register_at_fork(
            before=self._before_fork,
            after_in_parent=self._lock.release,
            after_in_child=self._lock.release,
        )
        start_quiet_thread(self._flush_trailing, "jupyter_ddp-flush")

    def watch_faults(self, directory: Path, rank: int) -> None:
        """Have crashes write the stacks to ``rank<r>.fault``, and `STACKS_SIGNAL` to ``rank<r>.stacks``."""
        faulthandler.enable(_private(directory / f"rank{rank}.fault"), all_threads=True)
        stacks = _private(directory / f"rank{rank}.stacks")
        faulthandler.register(STACKS_SIGNAL, stacks, all_threads=True, chain=False)

    def sizes(self) -> list[int]:
        """Return the sizes of both files after flushing what Python still holds: a place in the rank's text."""
        self._flush_foreign()
        with self._lock:
            self._flush()
            return self._sizes()

    def put_event(self, event: dict[str, Any]) -> None:
        """Send an event of this rank, placed after all text so far."""
        self._flush_foreign()
        with self._lock:
            self._flush()
            self._send({"op": "event", "o": self._sizes(), "event": event})

    def turn_to(self, number: int) -> None:
        """Note that what follows is stream `number`'s; with the lock held, before each write to the other one."""
        if number == self._current:
            return
        self._flush()
        self._current = number
        self._send({"op": "mark", "o": self._sizes()})

    def has_room(self, size: int) -> bool:
        """Tell whether so many bytes may be written; with the lock held.

        The last of a disk belongs to the log: it tells how the run ends.
        """
        if self._full_until and time.monotonic() < self._full_until:
            return False
        self._unchecked += size
        if self._unchecked < LOOK_EVERY and not self._full_until:
            return True
        self._unchecked = 0
        if self._files and is_low(self._files[0], 2 * LOW if self._full_until else LOW):
            self.say_full()
            return False
        self._full_until = 0.0
        return True

    def say_full(self) -> None:
        """Write nothing for a while, and tell the agent once; with the lock held."""
        self._full_until = time.monotonic() + LOOK_AGAIN
        if not self._told_full:
            self._told_full = True
            self._send({"op": "full", "o": self._sizes()})

    def _send(self, frame: dict[str, Any]) -> None:
        """Send a frame that has a place in the text, and wait until it is gone.

        Else what is written next could be in the file before the frame is on the socket, and the agent, which drains
        all text for which it finds no frame, would put it before. An exception of a signal handler ends the waiting
        only: the frame is sent by another thread.
        """
        self._link.put(frame)
        self._link.drain(PLACED_LIMIT)

    def _sizes(self) -> list[int]:
        return [os.fstat(file).st_size for file in self._files] if self._files else [0, 0]

    def _flush_foreign(self) -> None:
        """Flush what the user put in the place of ``sys.stdout``; without our lock, as it may have locks of its own."""
        for stream in (sys.stdout, sys.stderr):
            if not isinstance(stream, Stream):
                with contextlib.suppress(Exception):
                    stream.flush()

    def _flush(self) -> None:
        for text in self._texts:
            with contextlib.suppress(OSError, ValueError):  # the user closed it
                text.flush()

    def _flush_trailing(self) -> None:
        while True:
            time.sleep(TRAIL)
            with self._lock:
                before = self._sizes()
                self._flush()
                wrote = self._sizes() != before
            if wrote:
                self._bell.ring()

    def _before_fork(self) -> None:
        """Take the lock, so that the child does not get it locked, and leave nothing that both would write."""
        self._lock.acquire()
        self._flush()


class _Lock:
    """A re-entrant lock that stands open at the interpreter's end.

    Then only the main thread runs: the others were stopped wherever they were, maybe while they had it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._is_over = sys.is_finalizing

    def acquire(self) -> None:
        if not self._is_over():
            self._lock.acquire()

    def release(self) -> None:
        if not self._is_over():
            self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class _Raw(io.FileIO):
    """Descriptor 1 or 2, written at once and whole; rings the bell at the end of a line."""

    def __init__(self, number: int, name: str, streams: Streams) -> None:
        super().__init__(number, "w", closefd=False)
        self.name = name
        self._number = number
        self._streams = streams

    def write(self, data: Any) -> int:  # noqa: ANN401 - any buffer, as the base class
        streams = self._streams
        with streams._lock:  # noqa: SLF001 - one piece with Streams
            if streams._current != self._number:  # noqa: SLF001
                streams.turn_to(self._number)
            view = memoryview(data).cast("B")
            size = 0
            if not streams.has_room(len(view)):
                return len(view)  # what cannot be kept is lost: a training does not end for that
            try:
                while size < len(view):
                    size += super().write(view[size:]) or 0
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                streams.say_full()
                return len(view)
        if size and view[-1] in b"\n\r":
            streams._bell.ring()  # noqa: SLF001
        return size


class Stream(io.TextIOWrapper):
    """``sys.stdout`` or ``sys.stderr`` of a rank: written at each line's end, `TRAIL` seconds later at the latest."""

    mode = "w"

    def __init__(self, raw: _Raw, streams: Streams) -> None:
        super().__init__(
            raw,  # no buffer below: one would keep text back in a crash
            encoding="utf-8",
            errors="backslashreplace",
            newline="\n",
            line_buffering=True,
        )
        self._number = raw._number  # noqa: SLF001
        self._streams = streams

    def write(self, text: str, /) -> int:
        """Write text; returns the number of characters."""
        streams = self._streams
        with streams._lock:  # noqa: SLF001
            if streams._current != self._number:  # noqa: SLF001
                streams.turn_to(self._number)
            return super().write(text)

    def flush(self) -> None:
        """Write what is still held back."""
        with self._streams._lock:  # noqa: SLF001
            super().flush()


def _private(path: Path) -> int:
    """Return a descriptor of our own that appends to `path` and is not inherited by programs."""
    opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        return fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, min(_PRIVATE, _file_limit() // 2))
    finally:
        os.close(opened)


def _file_limit() -> int:
    """Return how many files this process may have open: no descriptor has that number or a higher one."""
    found = os.sysconf("SC_OPEN_MAX")
    return found if found > 0 else 2 * _PRIVATE
