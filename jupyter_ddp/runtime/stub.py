"""The stub of a rank: the process that the launcher sees.

It forwards signals to the rank, reports the rank's end exactly, under any launcher, and holds its own exit until the
agent releases it: a launcher that sees one rank end with an error kills the others, which could then not tell theirs.

It imports nothing heavy: it lives as long as the rank, beside it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from typing import TYPE_CHECKING, Any, Final

from jupyter_ddp.runtime.wire import Decoder, WireError, pack

if TYPE_CHECKING:
    import socket
    from types import FrameType

    from jupyter_ddp.runtime.child import Child

FORWARDED: Final = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
ORPHAN_LIMIT: Final = 5.0
"""Seconds that a rank has to end by itself when the agent has gone; then the stub kills it."""
_SIGNAL_EXIT: Final = 128


def fork() -> int:
    """Fork; return the child's pid, 0 in the child. `FORWARDED` signals are blocked in both until `unblock`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    return os.fork()


def unblock() -> None:
    """Let signals through again that `fork` has blocked."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)


class Stub:
    """Watches over one rank; see the module."""

    def __init__(self, sock: socket.socket, rank: int, child: Child) -> None:
        self._sock = sock
        self._rank = rank
        self._child = child
        self._decoder = Decoder()

    def run(self) -> int:
        """Return the exit code that this process shall have, when the child has ended and the agent has agreed."""
        wake_read, wake_write = os.pipe()
        for end in (wake_read, wake_write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in FORWARDED:
            signal.signal(number, self._forward)
        unblock()
        status: int | None = None
        connected, released = True, False
        kill_at: float | None = None
        while status is None or (connected and not released):
            if status is None and (status := self._child.poll()) is not None:
                connected = connected and self._report(status)
                continue
            watched: list[Any] = [wake_read, self._sock] if connected else [wake_read]
            if status is None and (news := self._child.fileno()) is not None:
                watched.append(news)
            timeout = None if kill_at is None else max(0.0, kill_at - time.monotonic())
            ready = select.select(watched, [], [], timeout)[0]
            if wake_read in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake_read, 4096)
            if self._sock in ready:
                connected, order = self._receive()
                released = released or order
                if not connected and status is None:
                    kill_at = time.monotonic() + ORPHAN_LIMIT
            if kill_at is not None and time.monotonic() >= kill_at:
                kill_at = None
                self._child.signal(signal.SIGKILL)
        return status if status >= 0 else _SIGNAL_EXIT - status

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        self._child.signal(number)

    def _report(self, status: int) -> bool:
        frame: dict[str, Any] = {
            "op": "exit",
            "rank": self._rank,
            "code": status if status >= 0 else None,
            "signal": -status if status < 0 else None,
            "time": time.time(),
            "lost": self._child.lost,
        }
        try:
            self._sock.sendall(pack(frame))
        except OSError:
            return False
        return True

    def _receive(self) -> tuple[bool, bool]:
        """Return whether the agent is still there, and whether it said that this process may exit."""
        try:
            data = self._sock.recv(1 << 16)
            frames = list(self._decoder.feed(data))
        except (OSError, WireError):
            return False, False
        return bool(data), any(frame is not None and frame.get("op") == "release" for frame in frames)
