"""How much memory a process may still take: what is free on the machine, and what its control groups allow."""

from __future__ import annotations

import contextlib
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Files(NamedTuple):
    """What the files of a control group are called."""

    limits: tuple[str, ...]
    used: str
    page_cache: frozenset[str]


_V1: Final = _Files(
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    frozenset({"total_active_file", "total_inactive_file"}),
)
_V2: Final = _Files(
    ("memory.max", "memory.high"), "memory.current", frozenset({"active_file", "inactive_file"})
)


def free_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that this process can take without swapping or being killed; 0 where nothing tells (macOS).

    Args:
        proc: The file system ``proc``.
        cgroups: Where control groups are mounted, of version 1 or 2.
    """
    try:
        lines = (proc / "meminfo").read_text(encoding="ascii").splitlines()
        (available,) = (int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError):
        return 0
    return max(0, min([available, *_left_in_groups(proc, cgroups)]))


def _left_in_groups(proc: Path, cgroups: Path) -> Iterator[int]:
    """Yield what each control group that this process is in, from the innermost to the outermost, has left."""
    with contextlib.suppress(OSError, ValueError):
        for line in (proc / "self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                base, files = cgroups, _V2
            elif "memory" in controllers.split(","):
                base, files = cgroups / "memory", _V1
            else:
                continue
            inside = PurePosixPath(path).relative_to("/")
            if ".." in inside.parts:  # outside of what this container sees
                inside = PurePosixPath()
            for group in (inside, *inside.parents):
                left = _left(base / group, files)
                if left is not None:
                    yield left


def _left(group: Path, files: _Files) -> int | None:
    """Return what a group has left, its page cache counted as free; None where it has no limit, or is not seen."""
    limits = []
    for name in files.limits:
        with contextlib.suppress(OSError, ValueError):  # "max"
            limits.append(int((group / name).read_text(encoding="ascii")))
    if not limits:
        return None
    try:
        used = int((group / files.used).read_text(encoding="ascii"))
        facts = (line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        used -= sum(int(value) for name, value in facts if name in files.page_cache)
    except (OSError, ValueError):
        return None
    return min(limits) - used
