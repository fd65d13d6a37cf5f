"""Python stacks as faulthandler writes them, cut down to what is the user's."""

from __future__ import annotations

import re
from typing import Final

_BLOCK: Final = re.compile(r"^(?=(?:Current thread|Thread) 0x)", re.MULTILINE)
_FRAME: Final = re.compile(r'^  File "(?P<file>.*)", line \d+ in ')
_OURS: Final = re.compile(r"[/\\]jupyter_ddp[/\\]runtime[/\\]|^<frozen runpy>$")
_SHELL: Final = re.compile(r"[/\\]IPython[/\\]core[/\\]|[/\\]jupyter_ddp[/\\]runtime[/\\]|^<frozen runpy>$")


def clean(text: str) -> str:
    """Return the stacks without the threads of this package, and without the frames that brought the cell to run.

    faulthandler writes the innermost frame first, so those are the last lines of a thread. A text that is not of its
    form comes back as it is.
    """
    head, *blocks = _BLOCK.split(text)
    kept = [shortened for block in blocks if (shortened := _shorten(block))]
    return (head.rstrip() + "\n\n" if head.strip() else "") + "\n".join(kept) if blocks else text


def _shorten(block: str) -> str:
    lines = block.rstrip().splitlines()
    frames = [found["file"] if (found := _FRAME.match(line)) else None for line in lines]
    files = [file for file in frames if file]
    if any(_OURS.search(file) for file in files) and not any(file == "<distributed cell>" for file in files):
        ours = next(i for i, file in enumerate(files) if _OURS.search(file))
        if all("threading.py" in file for file in files[ours + 1 :]):
            return ""
    while lines and frames and (file := frames[-1]) and _SHELL.search(file):
        lines.pop()
        frames.pop()
    return "\n".join(lines) + "\n" if len(lines) > 1 else ""
