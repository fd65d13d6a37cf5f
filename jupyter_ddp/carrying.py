"""Where the notebook's variables lie while they go to the ranks.

Few bytes go into ``payload.bin`` and stay with the run: another kernel finds the notebook's classes in them. More
than that is only in the way when the run is over, and has no name from the start: it lies in memory (a sealed
``memfd``), or, where that is too small, in a file that is unlinked before it is written. Whatever dies at whatever
moment, the system gives it back with the last descriptor and the last mapping.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from typing import TYPE_CHECKING, Final

from jupyter_ddp.errors import LaunchError
from jupyter_ddp.memory import free_memory
from jupyter_ddp.rundir import PAYLOAD_KEPT
from jupyter_ddp.words import size_text

if TYPE_CHECKING:
    from jupyter_ddp.capture import Payload
    from jupyter_ddp.rundir import RunDirectory

_SHARE: Final = 0.5
"""How much of the free memory a payload may take: the ranks have something to do with it."""
_NOEXEC_SEAL: Final = 0x8
"""MFD_NOEXEC_SEAL of Linux 6.3, without which a system may refuse (``vm.memfd_noexec=2``)."""
_NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.ENOMEM})


def carry(payload: Payload, rundir: RunDirectory, *, by_descriptor: bool) -> float:
    """Put a payload where the ranks get it from, let go of the variables, and return the seconds that it took.

    Args:
        payload: The variables. It cannot be written again.
        rundir: Its run. `RunDirectory.payload` is made, or `RunDirectory.carried` is set.
        by_descriptor: Whether its backend passes a descriptor on.

    Raises:
        LaunchError: There is no room for it; nothing is left behind.
    """
    begin = time.monotonic()
    try:
        if payload.nbytes <= PAYLOAD_KEPT or not by_descriptor:
            payload.write(rundir.payload)
        else:
            carried = _in_memory(payload)
            rundir.carried = _on_disk(payload, rundir) if carried is None else carried
    except OSError as error:
        raise LaunchError(_no_room(error, payload.nbytes, rundir)) from error
    finally:
        payload.release()
    return time.monotonic() - begin


def _in_memory(payload: Payload) -> int | None:
    """Return a descriptor of memory that holds the payload and that nobody can change; None: there is not enough."""
    if sys.platform != "linux" or payload.nbytes > free_memory() * _SHARE:
        return None
    import fcntl

    with contextlib.ExitStack() as on_failure, contextlib.suppress(OSError):
        try:
            descriptor = os.memfd_create("jupyter_ddp", os.MFD_CLOEXEC | _NOEXEC_SEAL)
        except OSError:
            descriptor = os.memfd_create("jupyter_ddp", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        on_failure.callback(os.close, descriptor)
        payload.write_to(descriptor)
        seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        on_failure.pop_all()
        return descriptor
    return None


def _on_disk(payload: Payload, rundir: RunDirectory) -> int:
    """Return a descriptor, for reading, of a file without a name that holds the payload."""
    with contextlib.ExitStack() as on_failure:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(rundir.payload, flags, 0o600)
        try:
            try:
                reading = os.open(rundir.payload, os.O_RDONLY | os.O_CLOEXEC)
                on_failure.callback(os.close, reading)
            finally:
                rundir.payload.unlink()
            payload.write_to(descriptor)
        finally:
            os.close(descriptor)  # a network file system may say only here that there is no room
        on_failure.pop_all()
        return reading


def _no_room(error: OSError, nbytes: int, rundir: RunDirectory) -> str:
    what = f"{size_text(nbytes)} of variables could not be written to {rundir.path} ({error.strerror})"
    if error.errno == errno.EFBIG:
        return f"{what}: start Jupyter with a higher limit for files (ulimit -f), or send less"
    if error.errno in _NO_SPACE:
        return f"{what}: free space there, set c.DistributedMagics.run_root to another disk, or send less"
    return f"{what}: see to that, or set c.DistributedMagics.run_root"
