"""Connections of an agent: to its ranks and their stubs, to clients, and to the other agents of the run.

All are Unix sockets here, in a directory that only this user can enter; the peer's user is checked besides. Agents of
several (simulated) instances form a star: every other agent keeps one connection to agent 0, which gives the orders.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import sys
from collections import deque
from typing import TYPE_CHECKING, Any

from jupyter_ddp.runtime.wire import Decoder, WireError, pack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RECEIVE_SIZE = 256 << 10
RECEIVE_TURNS = 16
"""So often a channel is read before others have their turn: more than a socket's buffer holds."""


def same_user(connection: socket.socket) -> bool:
    """Tell whether the process at the other end of a Unix socket is of this user (or of root)."""
    if sys.platform != "linux":  # the 0700 directory has to do
        return True
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return uid in (os.getuid(), 0)


class Channel:
    """One connection: messages in, messages out, never blocking.

    What the peer does not take at once waits here and is sent when the selector says so.
    """

    def __init__(
        self, connection: socket.socket, selector: selectors.BaseSelector, on_ready: Callable[[Channel], None]
    ) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._selector = selector
        self._decoder = Decoder()
        self._outgoing: deque[tuple[memoryview, int | None]] = deque()
        self._events = selectors.EVENT_READ
        self._on_ready = on_ready
        self.role = ""
        self.rank: int | None = None
        self.node: int | None = None
        self.closed = False
        selector.register(connection, self._events, self._handle)

    def _handle(self, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self._flush()
        if mask & selectors.EVENT_READ:
            self._on_ready(self)

    def receive(self) -> Iterator[dict[str, Any] | None]:
        """Yield every message that has arrived; a None is a frame that did not parse. Sets `closed` at the end of file.

        What a peer adds all the time is left for the next call. Nothing comes any more once the channel is closed.

        Raises:
            WireError: The peer does not speak this protocol; the channel is closed.
        """
        for _ in range(RECEIVE_TURNS):
            if self.closed:
                return
            try:
                data = self._socket.recv(RECEIVE_SIZE)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                data = b""
            if not data:
                self.close()
                return
            try:
                for message in self._decoder.feed(data):
                    yield message
                    if self.closed:
                        return
            except WireError:
                self.close()
                raise

    def send(self, message: dict[str, Any], descriptor: int | None = None) -> None:
        """Send a message, or keep it until the peer can take it. A closed channel drops it.

        Args:
            message: The message.
            descriptor: One that the peer gets a copy of, with the message's first byte; it stays the caller's.
        """
        if self.closed:
            return
        copy = None if descriptor is None else os.dup(descriptor)
        self._outgoing.append((memoryview(pack(message)), copy))
        self._flush()

    def _flush(self) -> None:
        try:
            while self._outgoing:
                data, descriptor = self._outgoing[0]
                if descriptor is None:
                    sent = self._socket.send(data)
                else:
                    sent = socket.send_fds(self._socket, [data], [descriptor])
                    os.close(descriptor)
                if sent == len(data):
                    self._outgoing.popleft()
                else:
                    self._outgoing[0] = (data[sent:], None)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:  # the end of file is told by receive
            self._drop_outgoing()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)
        if events != self._events and not self.closed:
            self._events = events
            self._selector.modify(self._socket, events, self._handle)

    def _drop_outgoing(self) -> None:
        for _, descriptor in self._outgoing:
            if descriptor is not None:
                os.close(descriptor)
        self._outgoing.clear()

    def finish(self, limit: float) -> None:
        """Say that nothing more comes, wait until the peer has closed its end (at most `limit` seconds), and close."""
        if self.closed:
            return
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            self._socket.settimeout(limit)
            while self._socket.recv(RECEIVE_SIZE):
                pass
        self.close()

    def close(self) -> None:
        """Close the connection. Closing twice does nothing."""
        if not self.closed:
            self.closed = True
            self._drop_outgoing()
            self._selector.unregister(self._socket)
            self._socket.close()


class Listener:
    """The socket on which an agent waits for its ranks, for clients and other agents, and the doorbell beside it."""

    def __init__(
        self,
        path: str,
        selector: selectors.BaseSelector,
        *,
        on_ready: Callable[[Channel], None],
        on_bell: Callable[[int], None],
    ) -> None:
        self._path = path
        self._selector = selector
        self._on_ready = on_ready
        self._on_bell = on_bell
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        for sock, name in ((self._socket, path), (self._bell, f"{path}.bell")):
            sock.bind(name)
            sock.setblocking(False)
        self._socket.listen(1024)
        selector.register(self._socket, selectors.EVENT_READ, self._accept)
        selector.register(self._bell, selectors.EVENT_READ, self._ring)

    def _accept(self, _mask: int) -> None:
        with contextlib.suppress(BlockingIOError, InterruptedError, ConnectionError):
            connection, _ = self._socket.accept()
            if same_user(connection):
                Channel(connection, self._selector, self._on_ready)
            else:
                connection.close()

    def _ring(self, _mask: int) -> None:
        ranks = set()
        with contextlib.suppress(BlockingIOError, InterruptedError):
            while True:
                word = self._bell.recv(32)
                if word.isdigit():
                    ranks.add(int(word))
        for rank in ranks:
            self._on_bell(rank)

    def close(self) -> None:
        """Close both sockets and remove their names."""
        for sock, name in ((self._socket, self._path), (self._bell, f"{self._path}.bell")):
            self._selector.unregister(sock)
            sock.close()
            with contextlib.suppress(OSError):
                os.unlink(name)


class Uplink:
    """An agent's way to agent 0; messages wait until it is joined."""

    def __init__(
        self, path: str, node: int, selector: selectors.BaseSelector, on_ready: Callable[[Channel], None]
    ) -> None:
        self._path = path
        self._node = node
        self._selector = selector
        self._on_ready = on_ready
        self._waiting: list[dict[str, Any]] = []
        self.channel: Channel | None = None

    def try_join(self) -> bool:
        """Connect to agent 0 if it is there yet; tell whether the link stands."""
        if self.channel is not None:
            return True
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(self._path)
        except OSError:
            connection.close()
            return False
        self.channel = Channel(connection, self._selector, self._on_ready)
        self.channel.role = "agent"
        self.channel.node = 0
        self.channel.send({"op": "hello", "role": "agent", "node": self._node})
        for message in self._waiting:
            self.channel.send(message)
        self._waiting.clear()
        return True

    def send(self, message: dict[str, Any]) -> None:
        """Send to agent 0, now or when the link stands."""
        if self.channel is None:
            self._waiting.append(message)
        else:
            self.channel.send(message)
