"""A rank's connection to its agent: frames out by one thread, frames in by another, and the doorbell.

User code may raise, be interrupted or fork at any moment. So nobody but the sender thread writes to the socket: all
others put frames on a queue, which takes no lock that a signal handler could find taken. No Python signal handler runs
in these threads, and their signals are blocked, so a frame is never torn.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from jupyter_ddp.runtime.wire import Decoder, WireError, pack

if TYPE_CHECKING:
    from collections.abc import Callable

CHUNK: Final = 1 << 16
RING_INTERVAL: Final = 0.004
"""Seconds between two rings of the doorbell, at least."""
ORPHAN_GRACE: Final = 2.0
"""Seconds between the SIGTERM and the end of a rank whose agent has gone."""
ORPHAN_EXIT_CODE: Final = 75
BELL_SUFFIX: Final = ".bell"
_CLOSE_ON_EXEC: Final = getattr(socket, "MSG_CMSG_CLOEXEC", 0)  # not on macOS


def connect(path: str) -> socket.socket:
    """Return a connection to the agent that listens on `path`. The socket is not inherited by programs.

    Raises:
        OSError: Nobody listens there.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(path)
    except OSError:
        sock.close()
        raise
    return sock


def start_quiet_thread(target: Callable[[], None], name: str) -> threading.Thread:
    """Start a daemon thread that no asynchronous signal is delivered to, so that signals reach the user's code."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return thread


class Bell:
    """Tells the agent that a stream's file has grown. It never blocks, never fails and may be rung from anywhere."""

    def __init__(self, path: str, rank: int) -> None:
        self._message = str(rank).encode()
        self._last = 0.0
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with contextlib.suppress(OSError):
            self._sock.connect(path)

    def ring(self) -> None:
        """Ring, unless it has just been rung: the agent looks again by itself while a file grows."""
        now = time.monotonic()
        if now - self._last > RING_INTERVAL:
            self._last = now
            with contextlib.suppress(OSError):
                self._sock.send(self._message, socket.MSG_DONTWAIT)


class Link:
    """One rank's connection to its agent.

    Frames from a process that the rank has forked are dropped: the agent would take them for the rank's own.
    When the agent goes away the rank ends: SIGTERM first, and after `ORPHAN_GRACE` seconds at once.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._owner = os.getpid()
        self._outgoing: queue.SimpleQueue[dict[str, Any] | threading.Event] = queue.SimpleQueue()
        self._incoming: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        os.register_at_fork(after_in_child=self._abandon)
        start_quiet_thread(self._send_frames, "jupyter_ddp-send")
        start_quiet_thread(self._receive_frames, "jupyter_ddp-receive")

    @property
    def is_owner(self) -> bool:
        """Whether this process is the rank itself, not one that it has forked."""
        return os.getpid() == self._owner

    def put(self, frame: dict[str, Any]) -> None:
        """Queue a frame; returns at once. Safe in signal handlers and in any thread."""
        if os.getpid() == self._owner:
            self._outgoing.put(frame)

    def drain(self, limit: float) -> bool:
        """Wait until all that was queued has been sent, at most `limit` seconds; tell whether it has."""
        if os.getpid() != self._owner:
            return False
        sent = threading.Event()
        self._outgoing.put(sent)
        return sent.wait(limit)

    def receive(self) -> dict[str, Any]:
        """Return the next frame from the agent, however long it takes.

        A true ``payload`` is the descriptor that came with the frame, and the caller's to close.
        """
        return self._incoming.get()

    def _send_frames(self) -> None:
        broken = False
        while True:
            item = self._outgoing.get()
            if isinstance(item, threading.Event):
                item.set()
            elif not broken:
                try:
                    self._sock.sendall(_pack_whatever(item))
                except OSError:  # the receiver thread sees it too and ends the rank
                    broken = True

    def _receive_frames(self) -> None:
        decoder = Decoder()
        descriptors: deque[int] = deque()
        with contextlib.suppress(OSError, WireError):
            while True:
                data, arrived, _, _ = socket.recv_fds(self._sock, CHUNK, 1, _CLOSE_ON_EXEC)
                if not data:
                    break
                for descriptor in arrived:
                    os.set_inheritable(descriptor, False)
                descriptors += arrived
                for frame in decoder.feed(data):
                    if frame is not None:
                        if frame.get("payload"):
                            frame["payload"] = descriptors.popleft()
                        self._incoming.put(frame)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ORPHAN_GRACE)
        os._exit(ORPHAN_EXIT_CODE)

    def _abandon(self) -> None:
        """Close the copy of the socket in a forked child: the agent shall see when the rank itself has gone."""
        with contextlib.suppress(OSError):
            self._sock.close()


def _pack_whatever(frame: dict[str, Any]) -> bytes:
    """Return the frame's bytes; a note in its place when it cannot be packed, so that the next ones still go."""
    try:
        return pack(frame)
    except (TypeError, ValueError, RecursionError, WireError) as error:
        text = f"an event of this rank could not be sent: {error}"
        note = {"kind": "note", "text": text, "level": "warning", "time": time.time()}
        return pack({"op": "event", "o": frame.get("o", [0, 0]), "event": note})
