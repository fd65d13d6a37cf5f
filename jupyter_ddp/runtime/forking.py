"""A torchrun that the zygote forks, as its agent sees it: asked for, started or refused, ended."""

from __future__ import annotations

import contextlib
import signal
import socket
from typing import TYPE_CHECKING, Any, Final

from jupyter_ddp.runtime.links import Channel
from jupyter_ddp.runtime.wire import WireError

if TYPE_CHECKING:
    import selectors

END_LIMIT: Final = 1.0
"""Seconds in which a nurse that is let go must have ended what is below it."""
GONE: Final = "the process that has imported torch is gone: see zygote.log"


class ForkedLauncher:
    """Asks the zygote for a torchrun, and hears from its `nurse`.

    Attributes:
        pid: torchrun's process, None before the start and after the end.
        nurse: The process below which everything is that torchrun and its ranks start, once it is known.
        refusal: Why nothing was forked; "" while that is not so.
    """

    def __init__(
        self, zygote: socket.socket, selector: selectors.BaseSelector, request: dict[str, Any], log: int
    ) -> None:
        self.pid: int | None = None
        self.nurse: int | None = None
        self.refusal = ""
        self._code: int | None = None
        self._ended = False
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(zygote, [b"."], [theirs.fileno(), log])
            except OSError:
                self.refusal = GONE
        self._channel = Channel(ours, selector, lambda _channel: self.poll())
        self._channel.send(request)

    def poll(self) -> None:
        """Take in what the nurse has said."""
        with contextlib.suppress(WireError):
            for message in self._channel.receive():
                self._take(message or {})
        if self._channel.closed and not self._ended and not self.refusal:
            if self.nurse is None:
                self.refusal = GONE
            else:  # killed, and torchrun with it
                self._end_with(-signal.SIGKILL)

    def _take(self, message: dict[str, Any]) -> None:
        if message.get("op") == "started":
            self.pid, self.nurse = message["pid"], message["nurse"]
        elif message.get("op") == "refused":
            self.refusal = message["reason"]
        elif message.get("op") == "ended":
            self._end_with(int(message["code"]))

    def _end_with(self, code: int) -> None:
        self.pid, self._code, self._ended = None, code, True

    def take_code(self) -> int | None:
        """Return torchrun's exit code (minus the signal's number when it was killed) once, when it has ended."""
        code, self._code = self._code, None
        return code

    def end(self) -> None:
        """Have torchrun and all below it ended; returns when they are, or after `END_LIMIT` seconds."""
        self._channel.finish(END_LIMIT)
        self.pid = None
