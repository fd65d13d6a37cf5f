"""What the zygote forks for an agent, as that sees it: a torchrun, or a nurse for the ranks of an mpirun."""

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


class Nurse:
    """Asks the zygote for a nurse, and hears from it.

    Args:
        zygote: Where to ask.
        selector: What wakes the agent when it says something.
        request: What is wanted.
        descriptor: What it needs for that.

    Attributes:
        nurse: The process below which everything is that is forked for this, once it is known.
        refusal: Why nothing was forked; "" while that is not so.
    """

    def __init__(
        self,
        zygote: socket.socket,
        selector: selectors.BaseSelector,
        request: dict[str, Any],
        descriptor: int,
    ) -> None:
        self.nurse: int | None = None
        self.refusal = ""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(zygote, [b"."], [theirs.fileno(), descriptor])
            except OSError:
                self.refusal = GONE
        self._channel = Channel(ours, selector, lambda _channel: self.poll())
        self._channel.send(request)

    def poll(self) -> None:
        """Take in what the nurse has said."""
        with contextlib.suppress(WireError):
            for message in self._channel.receive():
                self._take(message or {})
        if self._channel.closed and self.nurse is None:
            self.refusal = self.refusal or GONE

    def _take(self, message: dict[str, Any]) -> None:
        if message.get("op") == "started":
            self.nurse = message["nurse"]
        elif message.get("op") == "refused":
            self.refusal = message["reason"]

    def end(self) -> None:
        """Have all ended that was forked; returns when it is, or after `END_LIMIT` seconds."""
        self._channel.finish(END_LIMIT)


class ForkedLauncher(Nurse):
    """A torchrun that a nurse has forked.

    Attributes:
        pid: Its process, None before the start and after the end.
    """

    def __init__(
        self, zygote: socket.socket, selector: selectors.BaseSelector, request: dict[str, Any], log: int
    ) -> None:
        self.pid: int | None = None
        self._code: int | None = None
        self._ended = False
        super().__init__(zygote, selector, request, log)

    def poll(self) -> None:
        """Take in what the nurse has said; without it there is no torchrun any more."""
        super().poll()
        if self._channel.closed and self.nurse is not None and not self._ended:
            self._end_with(-signal.SIGKILL)

    def _take(self, message: dict[str, Any]) -> None:
        super()._take(message)
        if message.get("op") == "started":
            self.pid = message["pid"]
        elif message.get("op") == "ended":
            self._end_with(int(message["code"]))

    def _end_with(self, code: int) -> None:
        self.pid, self._code, self._ended = None, code, True

    def take_code(self) -> int | None:
        """Return torchrun's exit code (minus the signal's number when it was killed) once, when it has ended."""
        code, self._code = self._code, None
        return code

    def end(self) -> None:
        """Have torchrun ended, and all below it."""
        super().end()
        self.pid = None


class RankNurse(Nurse):
    """A nurse of the ranks that mpirun asks for; see `nursery`.

    Args:
        zygote: Where to ask for it.
        selector: What wakes the agent when it says something.
        request: mpirun's environment, and the notebook's ``sys.path``.
        path: The Unix socket where it will listen. Stubs may connect at once: if it refuses, their connection ends.
    """

    def __init__(
        self, zygote: socket.socket, selector: selectors.BaseSelector, request: dict[str, Any], path: str
    ) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(socket.SOMAXCONN)
            super().__init__(zygote, selector, request, listener.fileno())
