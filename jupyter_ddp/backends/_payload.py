"""How variables get to the ranks of this machine: as a file that each of them maps, so there is one copy for all.

A small payload stays with the run, as ``payload.bin``. A big one has no name on Linux: it is memory (a ``memfd``), or a
file that is unlinked at once where that does not fit. Guard and agents hand its descriptor down, ranks open it through
their agent's, and it is gone with the last of them, however they end.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from jupyter_ddp.errors import LaunchError
from jupyter_ddp.rundir import PAYLOAD_KEPT
from jupyter_ddp.words import duration_text, size_text

if TYPE_CHECKING:
    from jupyter_ddp.capture import Payload
    from jupyter_ddp.rundir import RunDirectory

SHARE: Final = 0.5
"""How much of the free memory a payload may take. The ranks need the rest."""
_ENDLESS: Final = 1 << 60
_CGROUPS: Final = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


@dataclass(frozen=True, slots=True)
class Carried:
    """A payload on its way.

    Attributes:
        path: Where ranks find it; None if it has no name.
        descriptor: What has no name; whoever gets this closes it.
        note: A sentence for the user; "" for a small one.
    """

    path: str | None = None
    descriptor: int | None = None
    note: str = ""


def carry(payload: Payload, rundir: RunDirectory) -> Carried:
    """Write a payload to where the ranks of this machine can map it.

    Raises:
        LaunchError: There is no room for it; nothing is left behind.
    """
    begin = time.monotonic()
    place = "a file"
    descriptor = None
    if payload.nbytes > PAYLOAD_KEPT and sys.platform == "linux":
        if payload.nbytes <= SHARE * free_memory():
            descriptor = _in_memory(payload)
            place = "memory"
        if descriptor is None:
            descriptor = _unlinked(payload, rundir.payload)
            place = "a file"
    else:
        _write(payload, rundir.payload)
    path = None if descriptor is not None else str(rundir.payload)
    if payload.nbytes <= PAYLOAD_KEPT:
        return Carried(path, descriptor)
    seconds = duration_text(payload.seconds + time.monotonic() - begin)
    note = (
        f"{size_text(payload.nbytes)} of variables put into {place} in {seconds}; all ranks map that one copy"
    )
    return Carried(path, descriptor, note)


def free_memory() -> int:
    """Return the bytes that this machine, or the container that this process is in, has left. Linux."""
    found = [_ENDLESS]
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        found.append(int(line.split()[1]) << 10)
    for limit, used in _CGROUPS:
        with contextlib.suppress(OSError, ValueError):  # not there; "max"
            found.append(int(Path(limit).read_text()) - int(Path(used).read_text()))
    return min(found)


def _in_memory(payload: Payload) -> int | None:
    """Return a sealed memfd with the payload; None where there can be none that a rank could open."""
    if sys.platform != "linux":
        return None
    try:
        descriptor = os.memfd_create("jupyter_ddp", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError:
        return None
    try:
        payload.write_to(descriptor)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        if _can_be_opened(descriptor):
            return descriptor
    except OSError:  # less room than it seemed
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _unlinked(payload: Payload, path: Path) -> int | None:
    """Return a file with the payload that has no name any more; None where it must keep it."""
    _write(payload, path)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    if not _can_be_opened(descriptor):
        os.close(descriptor)
        return None
    path.unlink()
    return descriptor


def _can_be_opened(descriptor: int) -> bool:
    """Tell whether /proc is there, and lets a process open what another one has."""
    try:
        os.close(os.open(f"/proc/{os.getpid()}/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def _write(payload: Payload, path: Path) -> None:
    try:
        payload.write(path)
    except OSError as error:
        raise LaunchError(
            f"{payload.nbytes:,} bytes of variables could not be written to {path.parent} ({error.strerror}): "
            "free space there, or set c.DistributedMagics.run_root"
        ) from error
