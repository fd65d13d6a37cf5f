"""What this machine has: accelerators, torch, an mpirun. Looked up without importing torch or touching CUDA."""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Final

from jupyter_ddp.launchers import (
    RANKS_HERE,
    clean_environment,
    mpi_flavour,
    mpirun_command,
    read_early,
    session_environment,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_NPROC: Final = 2
_TIMEOUT: Final = 15.0
_SHARED_ROOM: Final = 4 << 20
"""Bytes that mpirun and the ranks of a small run share."""
_SOME_FILES: Final = 32


def visible_gpus(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the GPUs that a process with this environment may use, named as CUDA_VISIBLE_DEVICES names them."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    present = [str(number) for number in range(_gpus_present())]
    if chosen is None or not present:
        return present
    wanted = [word.strip() for word in chosen.split(",")]
    visible = []
    for word in wanted:  # CUDA stops at the first one that is not there
        if word not in present and not word.startswith(("GPU-", "MIG-")):
            break
        visible.append(word)
    return visible


@functools.cache
def _gpus_present() -> int:
    listed = _output("nvidia-smi", "--list-gpus")
    if listed:
        return sum(line.startswith("GPU ") for line in listed.splitlines())
    return len(gpu_nodes())


def gpu_nodes(devices: str = "/dev") -> list[str]:
    """Return the device nodes of NVIDIA's GPUs."""
    return sorted(str(path) for path in Path(devices).glob("nvidia[0-9]*") if path.name[6:].isdigit())


@functools.cache
def neuron_cores() -> int:
    """Return the number of Neuron cores of this machine."""
    try:
        return sum(int(device["nc_count"]) for device in json.loads(_output("neuron-ls", "--json-output")))
    except (ValueError, KeyError, TypeError):
        return 0


def cpu_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def short_directory() -> str:
    """Return where a run's sockets lie, and what its mpirun and MPI's ranks share: a short path, in memory if possible.

    A socket's path has 107 bytes at most, and run directories lie deep. Memory that is full is passed over.
    """
    memory = "/dev/shm"  # noqa: S108 - a private directory is made in it, with a name that nobody can guess
    usable = os.access(memory, os.W_OK | os.X_OK) and has_room(memory, _SHARED_ROOM)
    return memory if usable else "/tmp"  # noqa: S108


def has_room(directory: str, size: int) -> bool:
    """Tell whether some files, of `size` bytes together, could be made in a directory. True if that is not known."""
    try:
        found = os.statvfs(directory)
    except OSError:
        return True
    counted = found.f_files > 0  # some file systems have as many files as there is space for
    return found.f_bavail * found.f_frsize >= size and (found.f_favail >= _SOME_FILES or not counted)


def file_limit() -> int:
    """Return how many files this process, and so each process of a run, may have open."""
    found = os.sysconf("SC_OPEN_MAX")
    return found if found > 0 else sys.maxsize


def has_loopback() -> bool:
    """Tell whether this machine can be reached from itself as 127.0.0.1. Nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect(("127.0.0.1", 9))
    except OSError as error:
        return error.errno not in (errno.ENETUNREACH, errno.EADDRNOTAVAIL, errno.EHOSTUNREACH)
    return True


def torch_version() -> str | None:
    """Return the version of the torch that ranks would import, or None."""
    if importlib.util.find_spec("torch") is None:
        return None
    try:
        return version("torch")
    except PackageNotFoundError:
        return "of unknown version"


def find_mpirun() -> tuple[str, str | None, str] | None:
    """Return the mpirun that would be used: its path, its flavour (None: not supported), and its version's first line.

    One beside the kernel's Python (from an environment that is not activated) comes before those on PATH.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    found = shutil.which("mpirun", path=path)
    if found is None:
        return None
    text = _version_text(found, Path(found).stat().st_mtime_ns)
    return found, mpi_flavour(text), _one_line(text)


def early_environment(env: Mapping[str, str], ranks: int) -> dict[str, str]:
    """Return what mpirun gives each of `ranks` ranks, beside `env`, of what a process reads early (`read_early`).

    mpirun itself tells: it runs ``env``, for some hundredths of a second. {} if it does not tell.
    """
    path, flavour, _ = find_mpirun() or ("", None, "")
    if flavour is None:
        return {}
    early = tuple(sorted((name, value) for name, value in env.items() if read_early(name)))
    changes = dict(_changes(path, Path(path).stat().st_mtime_ns, flavour, early))
    return {name: str(ranks) if name in RANKS_HERE else value for name, value in changes.items()}


@functools.cache
def _changes(
    mpirun: str, _changed_at: int, flavour: str, early: tuple[tuple[str, str], ...]
) -> frozenset[tuple[str, str]]:
    command = mpirun_command(mpirun, flavour, hosts=[("localhost", 1)], program=["env", "-0"])
    with tempfile.TemporaryDirectory(dir=short_directory()) as directory:
        kept = {name: value for name, value in clean_environment(os.environ).items() if not read_early(name)}
        text = _output(*command, env=kept | session_environment(flavour, directory) | dict(early))
    found = (line.partition("=") for line in text.split("\0"))
    return frozenset((name, value) for name, _, value in found if read_early(name)) - set(early)


def with_home(env: dict[str, str]) -> dict[str, str]:
    """Return an environment with the user's HOME, where it has none and one is known: Open MPI 5 needs it."""
    if "HOME" not in env:
        with contextlib.suppress(RuntimeError):
            return {**env, "HOME": str(Path.home())}
    return env


def _one_line(text: str) -> str:
    """Return the first line; one that ends with a colon (MPICH's) says nothing without the second."""
    first, *rest = text.strip().splitlines() or [""]
    return " ".join([first, *rest[0].split()]) if first.endswith(":") and rest else first


@functools.cache
def _version_text(mpirun: str, _changed_at: int) -> str:
    return _output(mpirun, "--version")


def _output(program: str, *arguments: str, env: Mapping[str, str] | None = None) -> str:
    if shutil.which(program) is None:
        return ""
    try:
        done = subprocess.run(
            [program, *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_TIMEOUT,
            stdin=subprocess.DEVNULL,
            env=with_home(clean_environment(os.environ)) if env is None else env,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout or done.stderr


def is_network_file_system(path: Path) -> bool:
    """Tell whether a directory lies on NFS or the like, where locks and appended lines cannot be relied on."""
    try:
        kind = _file_system(path.resolve(), Path("/proc/mounts").read_text(errors="replace"))
    except OSError:
        return False
    return kind.startswith(("nfs", "cifs", "smb", "lustre", "fuse.sshfs"))


def _file_system(path: Path, mounts: str) -> str:
    """Return the kind of file system on which a path lies, by the table of mounts; the last of equals hides others."""
    kind, depth = "", -1
    for line in mounts.splitlines():
        _, point, name = line.split()[:3]
        point = point.replace("\\040", " ")
        if path.is_relative_to(point) and len(point) >= depth:
            kind, depth = name, len(point)
    return kind
