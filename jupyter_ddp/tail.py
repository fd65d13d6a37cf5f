"""The end of what a run showed, its ranks' text and displays, at the cost of the end alone."""

from __future__ import annotations

import json
import math
from collections import deque
from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from jupyter_ddp.bundles import load_bundle
from jupyter_ddp.events import DisplayEvent, Event, OutEvent
from jupyter_ddp.logend import last_events
from jupyter_ddp.transcript import join, read_lines
from jupyter_ddp.view import DisplayView
from jupyter_ddp.view.model import take_displays
from jupyter_ddp.view.rich_output import Displays, shorten
from jupyter_ddp.view.terminal import Line
from jupyter_ddp.words import ranks_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from jupyter_ddp.rundir import RunDirectory

_BYTES_A_CHARACTER: Final = 4
_LEAST_DISPLAY: Final = 64
"""Bytes of room that a display takes, however short its text is."""


def read_end(run: RunDirectory, limit: int, *, rank: int | None = None) -> tuple[str, bool]:
    """Return the last whole lines of what a rank showed, or of all ranks with labels, and whether there is more before.

    What was displayed is there as text, in its last state; equal displays of several ranks are one, as in the view of
    the run. Time and memory go with ``limit``, the number of characters, and not with what the run has written.
    """
    labelled = rank is None
    events, more = _last_events(run, limit, rank)
    parts: deque[str] = deque()
    size = 0
    for item in _in_order(read_lines(run.path, events, rank=rank), _displays(events)):
        if parts and not parts[-1].endswith("\n"):
            parts[-1] += "\n"
            size += 1
        if isinstance(item, Line):
            parts.append(join([item], labelled=labelled))
        else:
            parts.append(_display_text(item, labelled=labelled))
        size += len(parts[-1])
        while size > limit and len(parts) > 1:
            size -= len(parts.popleft())
            more = True
    text = "".join(parts)
    return (text[-limit:], True) if size > limit else (text, more)


def _last_events(run: RunDirectory, limit: int, rank: int | None) -> tuple[list[Event], bool]:
    """Return the last events that show something, in order, and whether there are more before."""
    room = _BYTES_A_CHARACTER * limit
    found: list[Event] = []
    updated: set[tuple[str, int | None, str | None]] = set()
    more = False
    for event in last_events(run):
        if not isinstance(event, OutEvent | DisplayEvent) or rank not in (None, event.rank):
            continue
        if isinstance(event, DisplayEvent) and _is_outdated(event, updated):
            continue
        if room <= 0:
            more = True
            break
        if isinstance(event, DisplayEvent):
            text, size = _as_text(event, run.path)
            found.append(text)
            room -= size
        else:
            end = _end_of(event, room)
            more = end.length < event.length
            found.append(end)
            room -= end.length
    return found[::-1], more


def _is_outdated(event: DisplayEvent, updated: set[tuple[str, int | None, str | None]]) -> bool:
    """Tell whether an event shows nothing that stays: of updates the last one holds, and a log forgets nothing."""
    key = (event.attempt, event.rank, event.display_id)
    if event.action != "update":
        return event.action == "clear"
    if key in updated:
        return True
    updated.add(key)
    return False


def _as_text(event: DisplayEvent, run_dir: Path) -> tuple[DisplayEvent, int]:
    """Return a display of which only the text is kept, and what tells it from others of equal text; and its size."""
    event = load_bundle(event, run_dir)
    text = DisplayView(ranks=(), data=shorten(event.data), file=event.file).text
    whole = json.dumps([event.data, event.metadata, event.file], sort_keys=True, default=repr)
    digest = blake2b(whole.encode(), digest_size=16).hexdigest()
    event = replace(event, data={"text/plain": text}, metadata={"digest": digest}, file=None)
    return event, _LEAST_DISPLAY + len(text)


def _end_of(event: OutEvent, size: int) -> OutEvent:
    """Return an event, or as much of its end as has so many bytes: one of a flood can tell of very much text."""
    if event.length <= size or event.text is not None:
        return event
    return replace(event, offset=event.offset + event.length - size, length=size)


def _displays(events: Iterable[Event]) -> deque[DisplayView]:
    """Return what events display; the order of each is the number of its event."""
    shown = Displays()
    attempt = None
    for number, event in enumerate(events, 1):
        if not isinstance(event, DisplayEvent) or event.rank is None:
            continue
        if event.attempt != attempt:
            shown.freeze()
            attempt = event.attempt
        view = DisplayView(
            ranks=(event.rank,),
            data=event.data,
            metadata=event.metadata,
            result=event.action == "result",
            display_id=event.display_id,
            order=number,
        )
        if event.action != "update":
            shown.add(event.rank, view)
        elif event.display_id:
            shown.update(event.rank, event.display_id, view)
    return deque(sorted(shown, key=lambda one: one.order))


def _in_order(lines: Iterable[Line], displays: deque[DisplayView]) -> Iterator[Line | DisplayView]:
    for line in lines:
        yield from take_displays(displays, line.order)
        yield line
    yield from take_displays(displays, math.inf)


def _display_text(shown: DisplayView, *, labelled: bool) -> str:
    head = f"[{ranks_text(shown.ranks)}] " if labelled else ""
    return "".join(f"{head}{line}\n" for line in shown.text.rstrip("\n").split("\n"))
