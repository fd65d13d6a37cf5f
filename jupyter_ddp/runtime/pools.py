"""OpenBLAS starts its threads when it is loaded. The zygote must have none, so a rank starts them when it is forked.

libgomp and MKL start theirs when they are first used, and read their settings from the run's environment in the
zygote too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

QUIET: Final = {"OPENBLAS_NUM_THREADS": "1"}
"""The environment in which OpenBLAS starts no threads."""
_READ: Final = ("OPENBLAS_NUM_THREADS", "OPENBLAS_DEFAULT_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
"""What OpenBLAS reads; the first that is set holds."""
_SETTERS: Final = tuple(
    f"{prefix}openblas_set_num_threads{suffix}" for prefix in ("", "scipy_") for suffix in ("", "64_")
)


def resize(environ: Mapping[str, str]) -> None:
    """Give every OpenBLAS of this process the threads that it would have in this environment."""
    size = wanted(environ, len(os.sched_getaffinity(0)))
    if size == 1:
        return
    for path in _libraries():
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(path)
            for setter in _SETTERS:
                if hasattr(library, setter):
                    getattr(library, setter)(size)


def wanted(environ: Mapping[str, str], cores: int) -> int:
    """Return how many threads OpenBLAS would have: never more than cores, which is also what it has by itself."""
    for name in _READ:
        found = re.match(r"\s*(\d+)", environ.get(name, ""))
        if found and int(found[1]):
            return min(int(found[1]), cores)
    return cores


def _libraries() -> Iterator[str]:
    """Yield the paths of the OpenBLAS libraries of this process."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        paths = {line.split(None, 5)[5].rstrip("\n") for line in file if "openblas" in line}
    yield from (path for path in paths if ".so" in path)
