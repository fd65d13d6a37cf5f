"""A rank as its stub has it: a child that the stub has forked, or one that a nurse has forked for it.

It is part of the stub, so it imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from typing import Any, Final, Protocol

from jupyter_ddp.runtime.wire import Decoder, WireError, pack

CHUNK: Final = 1 << 12
LOST: Final = "the process from which the ranks were forked was killed, and they with it"
"""What is to be said when a rank is lost."""


class Child(Protocol):
    """What a stub needs of its rank.

    Attributes:
        lost: It has ended because the process has from which it was forked.
    """

    lost: bool

    def fileno(self) -> int | None:
        """Return a descriptor that is readable when `poll` has news; None where SIGCHLD tells it."""

    def poll(self) -> int | None:
        """Return the exit code, minus the signal's number when it was killed; None while it runs."""

    def signal(self, number: int) -> None:
        """Send a signal to it, if it is still there."""


class OwnChild:
    """A rank that the stub has forked."""

    lost = False

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._code: int | None = None

    def fileno(self) -> int | None:
        """Return None: SIGCHLD tells the end."""
        return None

    def poll(self) -> int | None:
        """Collect it when it has ended."""
        if self._code is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def signal(self, number: int) -> None:
        """Send a signal to it."""
        if self._code is None:
            with contextlib.suppress(OSError):
                os.kill(self._pid, number)


class NursedChild:
    """A rank that a nurse has forked, which is its parent: it tells the end, and ends it when the stub is gone."""

    def __init__(self, connection: socket.socket, pidfd: int) -> None:
        self._connection = connection
        self._pidfd = pidfd
        self._decoder = Decoder()
        self._code: int | None = None
        self.lost = False

    def fileno(self) -> int | None:
        """Return the connection to the nurse."""
        return self._connection.fileno()

    def poll(self) -> int | None:
        """Hear whether it has ended. A nurse that is gone has taken it along."""
        while self._code is None:
            try:
                data = self._connection.recv(CHUNK, socket.MSG_DONTWAIT)
                frames = list(self._decoder.feed(data))
            except BlockingIOError:
                return None
            except (OSError, WireError):
                data, frames = b"", []
            if not data:
                self._code, self.lost = -signal.SIGKILL, True
            for frame in frames:
                if frame is not None and "code" in frame:
                    self._code = int(frame["code"])
        return self._code

    def signal(self, number: int) -> None:
        """Send a signal to it, never to another process that has got its number."""
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._pidfd, number)


def ask_nurse(path: str, rank: dict[str, Any]) -> NursedChild | None:
    """Ask the nurse that listens at `path` for a rank that is as a child of this process would be.

    Waits as long as the nurse's imports take.

    Args:
        path: A Unix socket.
        rank: What the rank needs besides: its number, its agent's socket.

    Returns:
        The rank; None when there is none to be had there: then this process has to fork it.
    """
    descriptors = _inheritable()
    umask = os.umask(0o077)
    os.umask(umask)
    request = pack(
        {
            **rank,
            "env": dict(os.environ),
            "cwd": os.getcwd(),
            "umask": umask,
            "limits": _limits(),
            "cores": sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else [],
            "orig_argv": sys.orig_argv,
            "descriptors": descriptors,
        }
    )
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
        connection.sendall(request[socket.send_fds(connection, [request], descriptors) :])
        _, (pidfd,), _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
    except (OSError, ValueError):  # nobody there; or an answer without a rank
        connection.close()
        return None
    return NursedChild(connection, pidfd)


def _limits() -> list[tuple[int, tuple[int, int]]]:
    """Return the limits of this process, which its launcher may have changed."""
    import resource  # not on Windows

    numbers = {getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
    return [(number, resource.getrlimit(number)) for number in sorted(numbers)]


def _inheritable() -> list[int]:
    """Return the descriptors that a program would have that is executed now: the standard ones, and what MPI left."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            if os.get_inheritable(int(name)):
                found.append(int(name))
    return sorted(found)
