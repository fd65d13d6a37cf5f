"""A guard that waits for its run, with a zygote that has imported torch already: ``guard --wait <pid of the owner>``.

The owner hands a run over on standard input, a socket: one frame with the run directory, and the descriptors of
doorbell, log, locks and payload. Until then it dies with its owner, when it is let go, and after `IDLE` seconds:
what a zygote keeps in memory is given back.
"""

from __future__ import annotations

import os
import selectors
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from jupyter_ddp.runtime import zygote
from jupyter_ddp.runtime.process import is_alive
from jupyter_ddp.runtime.wire import Decoder

if TYPE_CHECKING:
    from collections.abc import Callable

IDLE: Final = 600.0
TAKEN: Final = b"+"
"""What the owner hears when its run is in good hands."""


@dataclass(frozen=True, slots=True)
class Handed:
    """A run that was handed over.

    Attributes:
        run_dir: Its directory.
        give_id: Gives the zygote its id, and returns where agents ask it.
        numbers: Descriptors: the owner's numbers, and what they are here.
    """

    run_dir: Path
    give_id: Callable[[str], socket.socket | None]
    numbers: dict[int, int]


def wait(owner: int, limit: float = IDLE) -> Handed | None:
    """Return the run that this process gets, or None when nobody wants it."""
    asks = zygote.start(sys.executable, dict(os.environ), zygote.NOBODY, Path("/"), Path(os.devnull))
    from jupyter_ddp.runtime import agent  # noqa: F401 - so that it need not be imported later

    line = socket.socket(fileno=os.dup(0))
    if not _readable(line, owner, limit):
        return None
    data, descriptors, _, _ = socket.recv_fds(line, 1 << 16, 16, socket.MSG_CMSG_CLOEXEC)
    message = next(iter(Decoder().feed(data)), None)
    if not message or len(descriptors) < 2:
        return None
    doorbell, log, *others = descriptors  # locks are held, no more
    for descriptor, standard in ((doorbell, 1), (log, 2)):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    run_dir = Path(message["run_dir"])
    os.chdir(run_dir)
    line.sendall(TAKEN)
    line.close()

    def give_id(run_id: str) -> socket.socket | None:
        if asks is not None:
            zygote.name(asks, run_id)
        return asks

    return Handed(run_dir, give_id, dict(zip(message["descriptors"][2:], others, strict=True)))


def _readable(line: socket.socket, owner: int, limit: float) -> bool:
    """Wait until the owner says something, or is gone, or the time is over; tell whether it was the first."""
    end = time.monotonic() + limit
    with selectors.DefaultSelector() as selector:
        selector.register(line, selectors.EVENT_READ, "line")
        selector.register(os.pidfd_open(owner), selectors.EVENT_READ, "owner")
        while (left := end - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                return key.data == "line" and is_alive(owner)
    return False
