"""Where ranks of mpirun come from: a nurse that forks one for each process that mpirun has started.

MPI knows the process that it starts by what it has given to it: variables, and for some an open descriptor. A stub
passes both on, and the rank that the nurse forks with them is, for MPI, that process.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
from typing import TYPE_CHECKING, Any, Final

from jupyter_ddp.launchers import read_early
from jupyter_ddp.runtime import stub
from jupyter_ddp.runtime.forked import Fresh, be_nursed
from jupyter_ddp.runtime.process import news_of_children, reap
from jupyter_ddp.runtime.wire import Decoder, pack

if TYPE_CHECKING:
    from collections.abc import Mapping

CHUNK: Final = 1 << 16
DESCRIPTORS: Final = 253
"""As many as one message can carry."""
ASK_LIMIT: Final = 5.0
"""Seconds in which a stub that has connected must have said what it wants."""


def why_not() -> str:
    """Return why this process could not be a nurse of ranks, or ""."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:
        return f"a process cannot be held by a descriptor here ({error})"
    return ""


class Nursery:
    """Serves stubs.

    Args:
        channel: To the agent: when it is closed, there is nothing more to do.
        listener: Where stubs connect.
        environment: What mpirun was started with: a rank that has another one where it matters to an import is
            refused.
        fresh: What the zygote had when it was new.
    """

    def __init__(
        self, channel: socket.socket, listener: socket.socket, environment: Mapping[str, str], fresh: Fresh
    ) -> None:
        self._channel = channel
        self._listener = listener
        self._early = _early({**fresh.added, **environment})
        self._fresh = fresh
        self._stubs: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()

    def serve(self) -> None:
        """Fork ranks, tell their ends, and end those whose stub is gone; returns when the agent has let go."""
        news = news_of_children()
        for watched in (self._channel, self._listener, news):
            self._selector.register(watched, selectors.EVENT_READ)
        while True:
            for pid, code in reap().items():
                if connection := self._stubs.pop(pid, None):
                    self._tell_end(connection, code)
            for key, _ in self._selector.select():
                if key.fileobj is self._channel:
                    return
                if key.fileobj is self._listener:
                    self._answer()
                elif key.fileobj == news:
                    os.read(news, 4096)
                elif key.data in self._stubs:
                    self._let_go(key.data)

    def _answer(self) -> None:
        """Fork the rank that a stub asks for; a closed connection says that there is none for it."""
        connection, _ = self._listener.accept()
        connection.settimeout(ASK_LIMIT)
        descriptors: list[int] = []
        try:
            request = _receive(connection, descriptors)
            if request is None or not self._can_be(request["env"]):
                connection.close()
                return
            me = os.getpid()
            pid = stub.fork()
            if pid == 0:
                self._detach(connection)
                be_nursed(self._fresh, me, request, descriptors)
            stub.unblock()
            self._hand_over(connection, pid)
        except OSError:  # the stub is gone
            connection.close()
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _can_be(self, environment: Mapping[str, str]) -> bool:
        """Tell whether a rank can have this environment; the agent hears why not."""
        early = _early(environment)
        changed = sorted(name for name, _ in early.items() ^ self._early.items())
        if changed:
            reason = f"mpirun has changed {changed[0]}, which is read before a cell runs"
            self._channel.sendall(pack({"op": "refused", "reason": reason}))
        return not changed

    def _hand_over(self, connection: socket.socket, pid: int) -> None:
        pidfd = os.pidfd_open(pid)
        try:
            socket.send_fds(connection, [b"."], [pidfd])
        except OSError:
            os.kill(pid, signal.SIGKILL)
            raise
        finally:
            os.close(pidfd)
        self._stubs[pid] = connection
        self._selector.register(connection, selectors.EVENT_READ, pid)

    def _detach(self, connection: socket.socket) -> None:
        """Have no object of this forked process close a descriptor that is somebody else's by then."""
        for one in (connection, self._channel, self._listener, *self._stubs.values()):
            one.detach()
        self._selector.close()

    def _tell_end(self, connection: socket.socket, code: int) -> None:
        self._selector.unregister(connection)
        with contextlib.suppress(OSError):
            connection.sendall(pack({"code": code}))
        connection.close()

    def _let_go(self, pid: int) -> None:
        """End a rank as mpirun would have done it, which has ended the stub: with its process group."""
        connection = self._stubs.pop(pid)
        self._selector.unregister(connection)
        connection.close()
        for end in (os.killpg, os.kill):  # it may not have its group yet
            with contextlib.suppress(OSError):
                end(pid, signal.SIGKILL)


def _receive(connection: socket.socket, descriptors: list[int]) -> dict[str, Any] | None:
    """Return a stub's request, and add the descriptors that come with it; None when there is none."""
    decoder = Decoder()
    while True:
        data, arrived, _, _ = socket.recv_fds(connection, CHUNK, DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        descriptors += arrived
        if not data:
            return None
        for message in decoder.feed(data):
            return message


def _early(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what of an environment has been read when torch has been imported."""
    return {name: value for name, value in environment.items() if read_early(name)}
