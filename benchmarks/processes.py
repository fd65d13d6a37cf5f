"""Processes that a benchmark has started: found by a token in their environment, measured and ended by pid. Linux."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

TOKEN = "DDP_BENCH_TOKEN"
"""The variable that everything started by a benchmark inherits."""


@dataclass(frozen=True)
class Process:
    """A process, told apart from a later one with the same pid by its start."""

    pid: int
    started: int
    ppid: int = 0
    command: str = ""

    def lives(self) -> bool:
        """Tell whether it is still there; a zombie is not."""
        found = find(self.pid)
        return found is not None and found.started == self.started

    def kill(self) -> None:
        """End it, if it still is the same."""
        if self.lives():
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)


def find(pid: int) -> Process | None:
    """Return a process by its pid, None when it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return None
    fields = stat[stat.rindex(")") + 2 :].split()
    if fields[0] in "ZX":
        return None
    return Process(pid, int(fields[19]), int(fields[1]), command.strip())


def marked(token: str) -> list[Process]:
    """Return the living processes with this token in their environment."""
    wanted = f"{TOKEN}={token}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                has = wanted in (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if has and (process := find(int(entry.name))):
                found.append(process)
    return found


def wait_gone(processes: list[Process], limit: float) -> tuple[float, list[Process]]:
    """Wait until all have ended; return when the last was seen to be gone, and those that never went."""
    end = time.time() + limit
    while True:
        processes = [process for process in processes if process.lives()]
        now = time.time()
        if not processes or now > end:
            return now, processes
        time.sleep(0.003)


def resident(pid: int) -> int:
    """Return the memory of a process in bytes (RSS)."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def proportional(pid: int) -> int:
    """Return the memory of a process in bytes, shared pages counted by their share (PSS)."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0
