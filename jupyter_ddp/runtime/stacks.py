"""Python stacks as faulthandler writes them, cut down to what is the user's and given the cell's text."""

from __future__ import annotations

import re
from itertools import groupby
from typing import TYPE_CHECKING, Final

from jupyter_ddp.runtime.source import CALL, CELL

if TYPE_CHECKING:
    from collections.abc import Sequence

_BLOCK: Final = re.compile(r"^(?=(?:Current thread|Thread) 0x)", re.MULTILINE)
_HEAD: Final = re.compile(r"^(?:(Current) thread|Thread) 0x[0-9a-f]+(.*?)(?: \(most recent call first\))?:$")
_FRAME: Final = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in ')
_MODULES: Final = re.compile(r"^Extension modules: .*\n?", re.MULTILINE)
_OURS: Final = re.compile(r"[/\\]jupyter_ddp[/\\]runtime[/\\]|^<frozen runpy>$")
_BELOW_CELL: Final = re.compile(
    r"[/\\]IPython[/\\]core[/\\]|[/\\]jupyter_ddp[/\\]runtime[/\\]|^<frozen runpy>$"
    rf"|^{re.escape(CALL[:-1])}( \d+)?>$"
)
_FORK: Final = re.compile(r"[/\\]jupyter_ddp[/\\]runtime[/\\]forked\.py$")
"""Where a forked rank begins; below are torchrun's frames."""


def clean(text: str, cell: Sequence[str] = ()) -> str:
    """Return the stacks without the threads of this package, and without the frames that brought the cell to run.

    faulthandler writes the innermost frame first, so those frames are the last lines of a thread. A text that is not of
    its form comes back as it is.

    Args:
        text: What faulthandler wrote.
        cell: The lines of the cell, the magic line first; they are written below its frames.
    """
    head, *blocks = _BLOCK.split(_MODULES.sub("", text))
    if not blocks:
        return text
    kept = [shortened for block in blocks if (shortened := _shorten(block.rstrip().splitlines(), cell))]
    return (head.rstrip() + "\n\n" if head.strip() else "") + "\n".join(kept)


def _shorten(lines: list[str], cell: Sequence[str]) -> str:
    """Return one thread, "" for one of ours."""
    frames = [_FRAME.match(line) for line in lines]
    files = [frame["file"] for frame in frames if frame]
    ours = next((number for number, file in enumerate(files) if _OURS.search(file)), None)
    if ours is not None and CELL not in files and all("threading.py" in file for file in files[ours + 1 :]):
        return ""
    if below := next((at for at, frame in enumerate(frames) if frame and _FORK.search(frame["file"])), 0):
        del frames[below:], lines[below:]
    while frames and (last := frames[-1]) is not None and _BELOW_CELL.search(last["file"]):
        frames.pop()
        lines.pop()
    shown = []
    for line, same in groupby(lines):
        frame, repeated = _FRAME.match(line), len(list(same)) - 1
        shown.append(_HEAD.sub(_name_thread, line))
        if frame and frame["file"] == CELL and 0 < int(frame["line"]) <= len(cell):
            shown.append(f"    {cell[int(frame['line']) - 1].strip()}")
        if frame and repeated:
            shown.append(f"  [the frame above {repeated} more times]")
    return "\n".join(shown) + "\n" if len(shown) > 1 else ""


def _name_thread(found: re.Match[str]) -> str:
    """Return a thread's first line without its address, which says nothing to anybody."""
    return f"{'running' if found[1] else 'another'} thread{found[2]}, most recent call first:"
