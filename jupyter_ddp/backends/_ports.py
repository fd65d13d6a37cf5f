"""Ports for the ranks' rendezvous: free now, and ours as long as the run lives."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
import tempfile
from pathlib import Path
from typing import Final

from jupyter_ddp.errors import LaunchError
from jupyter_ddp.locks import try_lock

FIRST: Final = 20_000
LAST: Final = 32_000
TRIES: Final = 2_000
"""Below the range from which operating systems take the ports of outgoing connections."""


def reserve(count: int) -> tuple[list[int], list[int]]:
    """Return ports that nobody listens on, and the descriptors of the locks that keep other runs from them.

    The locks live as long as somebody holds a descriptor: hand them to the run.

    Raises:
        LaunchError: No ports can be had.
    """
    directory = _directory()
    ports: list[int] = []
    locks: list[int] = []
    with contextlib.ExitStack() as undo:
        for port in random.sample(range(FIRST, LAST), TRIES):
            if (lock := _reserve(directory / str(port), port)) is None:
                continue
            undo.callback(os.close, lock)
            ports.append(port)
            locks.append(lock)
            if len(ports) == count:
                undo.pop_all()
                return ports, locks
    raise LaunchError(f"no free port was found between {FIRST} and {LAST}")


def _directory() -> Path:
    """Return where this user's locks are; anybody could have made it there, where all may write."""
    path = Path(tempfile.gettempdir()) / f"jupyter_ddp-{os.getuid()}-ports"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        owner = path.lstat().st_uid
    except OSError as error:
        raise LaunchError(f"no directory for the locks of ports: {error}; set TMPDIR") from error
    if owner != os.getuid():
        raise LaunchError(
            f"{path}, for the locks of ports, belongs to user {owner}: remove it, or set TMPDIR"
        )
    return path


def _reserve(path: Path, port: int) -> int | None:
    """Return the descriptor of the port's lock, or None if another run has it or somebody listens there."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise LaunchError(f"port {port} cannot be reserved: {error}") from error
    if try_lock(lock) and _is_free(port):
        return lock
    os.close(lock)
    return None


def _is_free(port: int) -> bool:
    """Bind on all addresses, as the store of torch.distributed does."""
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):  # noqa: S104 - only to see that it is free
        try:
            with socket.socket(family, socket.SOCK_STREAM) as sock:
                if family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                sock.bind((address, port))
        except OSError as error:
            if family == socket.AF_INET or error.errno == errno.EADDRINUSE:  # no IPv6 is no obstacle
                return False
    return True
