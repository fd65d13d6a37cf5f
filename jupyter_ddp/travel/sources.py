"""Source text of code that travels without its file: notebook cells, in `linecache` on both sides."""

from __future__ import annotations

import linecache
import sysconfig
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def collect(files: Iterable[str]) -> dict[str, str]:
    """Return the text of the files that this process knows, installed packages left out."""
    installed = tuple(path for key in ("stdlib", "purelib", "platlib") if (path := sysconfig.get_path(key)))
    found = {}
    for file in sorted(files):
        lines = [] if file.startswith(installed) else linecache.getlines(file)
        if lines:
            found[file] = "".join(lines)
    return found


def register(sources: Mapping[str, str], *, replace: bool) -> None:
    """Let tracebacks, `inspect` and TorchScript find sources that are in no file here."""
    for file, text in sources.items():
        if replace or file not in linecache.cache:
            # without a time of change, `linecache.checkcache` leaves the entry alone
            linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
