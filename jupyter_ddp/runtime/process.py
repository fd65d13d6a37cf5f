"""Processes of a run: how they are tied to each other, found and ended.

A run's processes are the descendants of its guard and agents (both are child subreapers, so that a daemon does not
get away) and every process whose environment has ``JUPYTER_DDP_RUN=<run id>``. Process groups are of no use here:
mpirun puts each rank into its own, and user code calls setsid.

Linux has all of this. macOS has neither prctl nor /proc: there, descendants are found through ``ps``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Final

MARKER: Final = "JUPYTER_DDP_RUN"
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_THREADS: Final = 17
"""Where ``/proc/<pid>/stat`` has the number of threads, counted from the state."""
_LINUX: Final = sys.platform == "linux"


def die_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Have the kernel send `signum` to this process when its parent dies; end at once if it is already dead.

    `parent` is the process that this one believes to be its parent (``os.getppid`` before the fork of a race). The
    signal comes when the parent's *thread* ends: start children from the main thread. Nothing happens on macOS.
    """
    if _LINUX:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


def outlive_parent() -> None:
    """Undo `die_with_parent`, or what a library of that kind has done. Nothing happens on macOS."""
    if _LINUX:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)


def become_plain(parent: int, file_limit: int | None) -> None:
    """Between fork and exec: die with the parent, and else be as a process that the user's shell starts."""
    die_with_parent(parent)
    restore_file_limit(file_limit)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def raise_file_limit() -> int | None:
    """Allow this process as many open files as it may have; return the soft limit before, None where there is none.

    An agent has four for each of its ranks.
    """
    try:
        import resource
    except ImportError:
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft


def restore_file_limit(soft: int | None) -> None:
    """Undo `raise_file_limit`: programs that use select cannot live with descriptors above 1023."""
    if soft is not None:
        import resource

        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def become_subreaper() -> None:
    """Make orphaned descendants children of this process. Nothing happens on macOS."""
    if _LINUX:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Process:
    """A process as the system's table shows it."""

    pid: int
    ppid: int
    name: str
    marked: bool


def table(run_id: str = "") -> dict[int, Process]:
    """Return all living processes by pid; those of `run_id` by its marker are ``marked``. Zombies are left out."""
    return _proc_table(run_id) if _LINUX else _ps_table()


def _proc_table(run_id: str) -> dict[int, Process]:
    marker = f"{MARKER}={run_id}".encode()
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        pid = int(entry)
        if (stat := _stat(pid)) is not None:
            name, ppid = stat
            found[pid] = Process(pid, ppid, name, marked=bool(run_id) and _has_marker(entry, marker))
    return found


def _stat(pid: int) -> tuple[str, int] | None:
    """Return a living process's name and parent.

    One whose main thread has ended looks like a zombie, but lives, and keeps its children, while another thread does.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
        start, end = stat.index(b"(") + 1, stat.rindex(b")")
        fields = stat[end + 2 :].split()
        state, ppid, threads = fields[0], int(fields[1]), int(fields[_THREADS])
    except (OSError, ValueError, IndexError):
        return None
    if state == b"X" or (state == b"Z" and threads <= 1):
        return None
    return stat[start:end].decode(errors="replace"), ppid


def _has_marker(pid: str, marker: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return marker in file.read().split(b"\0")
    except OSError:  # another user's, or gone
        return False


def _ps_table() -> dict[int, Process]:
    listing = subprocess.run(
        ["ps", "-axo", "pid=,ppid=,stat=,comm="], capture_output=True, text=True, check=False
    )
    found = {}
    for line in listing.stdout.splitlines():
        pid, ppid, state, name = line.split(None, 3)
        if "Z" not in state:
            found[int(pid)] = Process(int(pid), int(ppid), os.path.basename(name), marked=False)
    return found


def descendants(processes: dict[int, Process], *roots: int) -> set[int]:
    """Return the pids below `roots`, without those that are below none."""
    children: dict[int, list[int]] = {}
    for process in processes.values():
        children.setdefault(process.ppid, []).append(process.pid)
    found: set[int] = set()
    pending = list(roots)
    while pending:
        for pid in children.get(pending.pop(), ()):
            if pid not in found:
                found.add(pid)
                pending.append(pid)
    return found


def of_run(run_id: str, root: int) -> list[Process]:
    """Return the living processes of a run: marked, or below `root` or a marked one. Never `root` or this process."""
    processes = table(run_id)
    below = descendants(processes, root, *(p.pid for p in processes.values() if p.marked))
    return [
        p for p in processes.values() if (p.pid in below or p.marked) and p.pid not in (root, os.getpid())
    ]


def kill_all(run_id: str, root: int | None = None, *, collect: bool = True, limit: float = 5.0) -> set[str]:
    """SIGKILL every process of a run until none is left; return the names of those that were killed.

    Args:
        run_id: The run whose marker is looked for.
        root: The process below which everything belongs to the run; this process by default.
        collect: Whether children of this process that have ended are collected: false where they may be somebody
            else's, as in the notebook's kernel.
        limit: Seconds after which it gives up (a process in uninterruptible sleep).
    """
    root = os.getpid() if root is None else root
    names: set[str] = set()
    end = time.monotonic() + limit
    seen_none = False
    while time.monotonic() < end:
        victims = of_run(run_id, root)
        if not victims and seen_none:
            break
        seen_none = (
            not victims
        )  # who lost its parent while the table was being read may not have been found below it
        for process in victims:
            with contextlib.suppress(OSError):
                os.kill(process.pid, signal.SIGKILL)
                names.add(process.name)
        if collect:
            reap()
        if victims:
            time.sleep(0.003)
    return names


def kill_below() -> None:
    """SIGKILL every process below this one until none is left."""
    kill_all("")


def news_of_children() -> int:
    """Return a descriptor that is readable when a child of this process has ended, or any signal has come."""
    read, write = os.pipe()
    for end in (read, write):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return read


def reap() -> dict[int, int]:
    """Collect children that have ended; return their exit codes (minus the signal's number when killed) by pid."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            ended[pid] = os.waitstatus_to_exitcode(status)
    return ended


def is_alive(pid: int) -> bool:
    """Tell whether a process exists and is not a zombie."""
    if not _LINUX:
        try:
            os.kill(pid, 0)
        except OSError:
            return False
        return True
    return _stat(pid) is not None
