"""The sizes of the thread pools that a forked rank inherits: libgomp and OpenBLAS read the environment when loaded."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_OPENMP: Final = re.compile(r"lib(gomp|omp|iomp5)\b")
_OPENBLAS: Final = re.compile(r"openblas")
_SETTERS: Final = (
    "openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "scipy_openblas_set_num_threads64_",
)


def resize(environ: Mapping[str, str]) -> None:
    """Give the pools that were loaded with ``OMP_NUM_THREADS=1`` the size that they would have in this environment."""
    size = wanted(environ)
    if size == 1:
        return
    for path in _libraries():
        name = os.path.basename(path)
        with contextlib.suppress(OSError):
            if _OPENMP.match(name):
                ctypes.CDLL(path).omp_set_num_threads(size)
            elif _OPENBLAS.search(name):
                library = ctypes.CDLL(path)
                for setter in _SETTERS:
                    if hasattr(library, setter):
                        getattr(library, setter)(size)


def wanted(environ: Mapping[str, str]) -> int:
    """Return the threads that ``OMP_NUM_THREADS`` means; the cores that this process may use when it is not set."""
    found = re.match(r"\s*(\d+)", environ.get("OMP_NUM_THREADS", ""))
    if found and int(found[1]):
        return int(found[1])
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _libraries() -> Iterator[str]:
    """Yield the paths of the shared libraries of this process."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        yield from {line.split(None, 5)[5].rstrip("\n") for line in file if ".so" in line}
